"""generate() with its cache against forwards without one, in float64: one text by our kernels, and four by a captured
step. The lengths cross the borders at which programs divide the keys in another way, and the end of the context."""

import pytest
import torch
from reference import XL_2_LAYERS, build, check, plain_logits, random_weights

import model as model_file
from model import GPTConfig
from runtime.kernels.decode import decode_step_for

CONTEXT = 640  # decode_attention's programs take a second look from 513 places on
SMALL = {"block_size": CONTEXT, "n_layer": 2}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("prompt", "new"), [(1, 140), (500, 160)])
@pytest.mark.parametrize("config", [GPTConfig(**SMALL), GPTConfig(**SMALL, n_head=25, n_embd=XL_2_LAYERS.n_embd)],
                         ids=["768", "1600"])
@torch.no_grad()
def test_logits_with_a_cache_are_those_without(config, prompt, new, batch, monkeypatch):
    weights = random_weights(config)
    model = build(config, weights, torch.bfloat16).eval()
    seen = []

    def spy(logits, *_):
        seen.append(logits.clone())
        return torch.randint(config.vocab_size, (batch,), device="cuda")

    monkeypatch.setattr(model_file, "sample_token", spy)
    custom_step = decode_step_for(model, batch)
    assert (custom_step is not None) == (batch == 1)
    torch.manual_seed(0)
    idx = model.generate(torch.randint(config.vocab_size, (batch, prompt), device="cuda"), new,
                         custom_step=custom_step)
    assert idx.shape == (batch, prompt + new)

    def without_a_cache(dtype):
        """Logits of each new token, (new, batch, vocab_size): of all within the context at once."""
        w = {name: p.to(dtype) for name, p in weights.items()}
        whole = plain_logits(w, config, idx[:, : min(CONTEXT, prompt + new - 1)])[:, prompt - 1 :].transpose(0, 1)
        slid = [plain_logits(w, config, idx[:, end - CONTEXT : end])[:, -1] for end in range(CONTEXT + 1, prompt + new)]
        return torch.cat([whole, *(logits[None] for logits in slid)])

    exact, plain, got = without_a_cache(torch.float64), without_a_cache(torch.bfloat16), torch.stack(seen)
    for i in range(new):
        check(f"token {prompt + i}", got[i], plain[i], exact[i])
