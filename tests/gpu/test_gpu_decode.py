"""Decoding with a cache and captured steps: logits against forwards without a cache, in float64, by our kernels and by
PyTorch's; greedy text against transformers; and the draws of each seed."""

import pytest
import torch
import transformers
from reference import GPT2, XL_2_LAYERS, build, check, plain_logits, random_weights

from model import GPT, GPTConfig
from runtime.decoder import Decoder
from runtime.kernels.decode import decode_step_for

CONTEXT = 640  # decode_attention's programs take a second look from 513 places on
SMALL = {"block_size": CONTEXT, "n_layer": 2}


@pytest.mark.parametrize(("batch", "kernels"), [(1, True), (4, True), (33, True), (4, False)])
@pytest.mark.parametrize(("prompt", "new"), [(1, 140), (500, 140)])
@pytest.mark.parametrize("config", [GPTConfig(**SMALL), GPTConfig(**SMALL, n_head=25, n_embd=XL_2_LAYERS.n_embd)],
                         ids=["768", "1600"])
@torch.no_grad()
def test_logits_with_a_cache_are_those_without(config, prompt, new, batch, kernels):
    """The lengths cross the borders at which programs divide the keys in another way, and fill the context."""
    weights = random_weights(config)
    model = build(config, weights, torch.bfloat16).eval()
    custom_step = decode_step_for(model) if kernels else None
    assert (custom_step is not None) == kernels
    torch.manual_seed(0)
    idx = torch.randint(config.vocab_size, (batch, prompt + new), device="cuda")
    decoder = Decoder(model, batch, prompt + new, custom_step)
    got = [decoder.prefill(idx[:, :prompt])]
    got += [decoder.decode_one_token(idx[:, at : at + 1]).clone() for at in range(prompt, prompt + new)]
    assert len(decoder.graphs) == (1 if kernels else 2)
    for row in range(0, batch, 8):  # in float64 the logits of one text take 260 MB
        exact, plain = (plain_logits({name: p.to(dtype) for name, p in weights.items()}, config,
                                     idx[row : row + 1])[0, prompt - 1 :] for dtype in (torch.float64, torch.bfloat16))
        for i, logits in enumerate(got):
            check(f"row {row}, token {prompt + i}", logits[row], plain[i], exact[i])


@pytest.fixture(scope="module")
def theirs():
    """transformers' GPT-2 with random weights, whose greedy text has no fixed point, in float32."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=96))
        for p in theirs.parameters():
            p.data += 0.05 * torch.randn_like(p)
    return theirs.eval()


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(folder)
    return GPT.from_pretrained(str(folder), device="cuda").eval()


@pytest.mark.parametrize("batch", [1, 8])
@torch.no_grad()
def test_greedy_text_is_that_of_transformers(theirs, ours, batch):
    """Up to the end of the context with a cache, by our kernels and by PyTorch's, and ten tokens beyond it."""
    idx = torch.randint(GPT2.vocab_size, (batch, 16), device="cuda")
    wanted = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=80, do_sample=False,
                             pad_token_id=0, eos_token_id=None)
    for _ in range(10):
        wanted = torch.cat([wanted, theirs(wanted[:, -96:]).logits[:, -1:].argmax(-1)], dim=1)
    assert wanted.shape == (batch, 106) and len(wanted[:, 16:].unique()) > 10
    for custom_step in (decode_step_for(ours), None) * 2:  # the second time without an eager step
        assert torch.equal(ours.generate(idx, 90, temperature=0, custom_step=custom_step), wanted)


@pytest.mark.parametrize("sampling", [{"top_k": 10}, {"top_k": 20, "top_p": 0.8}], ids=str)
def test_a_seed_gives_the_same_texts_with_and_without_graphs(ours, sampling):
    """By our kernels in captured steps, and by PyTorch's one by one."""
    def generate(**options):
        generator = torch.Generator("cuda").manual_seed(5)
        return ours.generate(idx, 40, temperature=0.8, generator=generator, **sampling, **options)

    idx = torch.tensor([[464, 3290]] * 8, device="cuda")
    wanted = generate(cuda_graphs=False)
    assert len(set(map(tuple, wanted.tolist()))) == 8
    assert torch.equal(generate(), wanted) and torch.equal(generate(custom_step=decode_step_for(ours)), wanted)
