"""Our GPT against transformers' GPT2LMHeadModel, and against itself where it has two ways to one result."""

import itertools
import json
import os
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt2
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig
from runtime import loss as loss_module
from runtime import weights
from runtime.decoder import Decoder
from runtime.errors import UserError
from runtime.loss import FusedLinearCrossEntropy, cross_entropy_with_grad

VOCAB, BLOCK, LAYERS, HEADS, EMBD = 211, 48, 3, 4, 32  # 211 is padded to 256
TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # transformers has them as Conv1D


@pytest.fixture(scope="module")
def theirs():
    """Logits are some units apart."""
    return random_gpt2(0.15, vocab_size=VOCAB, n_positions=BLOCK, n_layer=LAYERS, n_head=HEADS, n_embd=EMBD,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=None)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture
def ours(folder):
    return GPT.from_pretrained(str(folder))


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of weights to spoil."""
    return shutil.copytree(folder, tmp_path / "copy")


def tokens(*shape, seed=1):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def some_targets(B, T):
    """Targets of which a third don't count, a whole row among them."""
    targets = tokens(B, T, seed=2)
    targets[:, ::3] = -1
    targets[1] = -1
    return targets


def gradients(model, idx, targets, loss=None):
    """(loss, {name: gradient}) of the model's own loss, or of loss(logits, targets)."""
    model.zero_grad(set_to_none=True)
    value = model(idx, targets) if loss is None else loss(model(idx), targets)
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def plain_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def furthest(a, b):
    """The largest difference between two dicts of tensors."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_logits_loss_and_every_gradient_are_those_of_transformers(ours, theirs):
    """Seen: logits to 1.2e-6 of up to 3, loss to 0, gradients to 6e-8 of up to 0.087."""
    text = tokens(3, BLOCK)
    with torch.no_grad():
        logits, their_logits = ours(text), theirs(text).logits
    assert logits.shape == (3, BLOCK, VOCAB) and their_logits.std() > 0.7
    assert (logits - their_logits).abs().max() < 1e-5
    theirs.zero_grad(set_to_none=True)
    their_loss = theirs(text, labels=text).loss
    their_loss.backward()
    loss, grads = gradients(ours, text[:, :-1], text[:, 1:])
    assert abs(loss - their_loss) < 1e-6
    wanted = {name: p.grad.T if name.endswith(TRANSPOSED) else p.grad for name, p in theirs.named_parameters()}
    assert len(wanted) == 2 + 12 * LAYERS + 2 and min(g.abs().max() for g in wanted.values()) > 1e-3
    assert (grads["transformer.wte.weight"][VOCAB:] == 0).all()
    grads["transformer.wte.weight"] = grads["transformer.wte.weight"][:VOCAB]
    assert furthest(grads, wanted) < 1e-6


def test_the_keys_bias_gets_no_gradient_and_all_others_are_unchanged(ours):
    """In float64, against plain linear layers, whose gradient of it is rounding."""
    text = tokens(3, BLOCK)
    _, grads = gradients(ours.double(), text[:, :-1], text[:, 1:])
    for block in ours.transformer.h:
        block.attn.c_attn.__class__ = torch.nn.Linear
    _, exact = gradients(ours, text[:, :-1], text[:, 1:])
    for name in [name for name in exact if name.endswith("c_attn.bias")]:
        keys, largest = exact[name][EMBD : 2 * EMBD], exact[name].abs().max()
        assert 0 < keys.abs().max() < 1e-14 * largest
        keys.zero_()
    assert furthest(grads, exact) == 0


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("form", ["whole", "sharded", "pickled"])
def test_a_folder_loads_in_every_form(theirs, ours, tmp_path, form, prefix):
    saved = theirs if prefix else theirs.transformer  # the hub's gpt2 is the latter
    if form == "pickled":
        theirs.config.save_pretrained(tmp_path)
        torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        saved.save_pretrained(tmp_path, max_shard_size="50KB" if form == "sharded" else "1GB")
    files = len(list(tmp_path.glob("*.safetensors")))
    assert {"whole": files == 1, "sharded": files > 3, "pickled": files == 0}[form]
    loaded = GPT.from_pretrained(str(tmp_path))
    assert furthest(loaded.state_dict(), ours.state_dict()) == 0
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.transformer.wte.weight[:VOCAB], theirs.transformer.wte.weight)
    assert torch.equal(loaded.transformer.h[2].mlp.c_fc.weight, theirs.transformer.h[2].mlp.c_fc.weight.T)
    assert (loaded.transformer.wte.weight[VOCAB:] == 0).all()


def test_a_configs_dropout_is_kept_unless_another_is_given(folder):
    config = GPTConfig(dropout=0.25)
    assert GPT.from_pretrained(str(folder), config=config).config.dropout == 0.25
    assert GPT.from_pretrained(str(folder), config=config, dropout=0.0).config.dropout == 0.0
    assert GPT.from_pretrained(str(folder)).transformer.drop.p == 0.0


def test_weights_load_in_half_precision(folder, ours):
    half = GPT.from_pretrained(str(folder), dropout=0.1, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and half.config.dropout == 0.1
    assert furthest(half.state_dict(), ours.bfloat16().state_dict()) == 0


@pytest.mark.parametrize("loss_chunk", [1, 7, 96, 4096])  # rows at a time, of 2 x 48
def test_fused_loss_and_gradients_are_those_of_plain_cross_entropy(ours, monkeypatch, loss_chunk):
    monkeypatch.setattr(loss_module, "EAGER_LOSS_CHUNK", loss_chunk)
    idx, targets = tokens(2, BLOCK), some_targets(2, BLOCK)
    wanted, wanted_grads = gradients(ours, idx, targets, plain_loss)
    loss, grads = gradients(ours, idx, targets)
    assert abs(loss - wanted) < 2e-6 and loss > 5  # seen: 1e-6 of 5.55
    assert furthest(grads, wanted_grads) < 1e-6  # seen: 7e-8 of up to 0.22
    (3 * ours(idx, targets)).backward()  # what comes from above scales it, and adds up
    assert furthest({n: p.grad / 4 for n, p in ours.named_parameters()}, grads) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_of_the_loss_without_compile(dtype):
    """18 bytes per logit, as runtime/plan/memory.py estimates it, and the head's gradient in float32."""
    x, weight = torch.randn(512, 16, dtype=dtype), torch.randn(4096, 16, dtype=dtype, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True,
                                acc_events=True) as recorded:
        FusedLinearCrossEntropy.apply(x, weight, torch.randint(4096, (512,)), 4096)
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    assert 17.9 < (max(sizes) - 4 * weight.numel()) / (512 * 4096) < 18.1


def head_gradients(dtype, rows, micro_steps=1):
    """[(gradient, that in float64)] of the head's input and of the head, at 1,000 of 1,024 tokens."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(rows, 64), 0.1 * torch.randn(1024, 64), torch.randint(1000, (rows,))
    ours = [t.to(dtype).requires_grad_() for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    loss = FusedLinearCrossEntropy.apply(*ours, targets, 1000) / rows
    (loss / micro_steps).backward()
    (F.cross_entropy((exact[0] @ exact[1].T)[:, :1000], targets) / micro_steps).backward()
    return [(mine.grad.double(), its.grad) for mine, its in zip(ours, exact, strict=True)]


def test_gradients_of_the_head_and_of_its_input_have_one_scale():
    """12 sequences of 64 tokens, 5 micro-steps, in bfloat16, against float64: the scale 1 / (768 * 5) is no number of
    bfloat16's, whose nearest is 0.34% larger."""
    of_input, of_head = ((mine * exact).sum() / exact.square().sum()
                         for mine, exact in head_gradients(torch.bfloat16, 768, 5))
    assert abs(of_input / of_head - 1) < 2e-4 and abs(of_head - 1) < 1e-3


def test_few_gradients_of_float16_logits_are_flushed_to_zero():
    """Logits of deviation 3 over GPT-2's vocabulary: of the gradients 25% would be 0 without the factor. With it, what
    comes out of backward is not scaled."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, 50304)).half()
    _, grad = cross_entropy_with_grad(logits, torch.randint(50257, (64,)), 50257)
    assert (grad[:, :50257] == 0).float().mean() < 0.03
    for mine, exact in head_gradients(torch.float16, 96):
        assert (mine - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("loss_chunk", [7, 4096])
def test_loss_of_each_token(ours, monkeypatch, loss_chunk):
    monkeypatch.setattr(loss_module, "EAGER_LOSS_CHUNK", loss_chunk)
    idx, targets = tokens(2, BLOCK), some_targets(2, BLOCK)
    losses = ours(idx, targets, reduction="none")
    wanted = F.cross_entropy(ours(idx).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    assert losses.shape == (2 * BLOCK,) and (losses[targets.flatten() == -1] == 0).all()
    assert (losses - wanted).abs().max() < 1e-5


def test_padding_has_no_part(ours):
    """Rows of the vocabulary's padding that would win every time change nothing, get no gradient, are never drawn."""
    idx, targets = tokens(2, BLOCK), tokens(2, BLOCK, seed=2)
    loss, grads = gradients(ours, idx, targets)
    with torch.no_grad():
        ours.transformer.wte.weight[VOCAB:] = 100 * ours.transformer.ln_f.bias
    spoilt_loss, spoilt_grads = gradients(ours, idx, targets)
    assert spoilt_loss == loss and furthest(grads, spoilt_grads) == 0
    assert (spoilt_grads["transformer.wte.weight"][VOCAB:] == 0).all()
    assert ours(idx, targets, reduction="none").max() < 30
    assert ours(idx).shape[-1] == VOCAB
    drawn = ours.generate(tokens(64, 1), 20, temperature=100.0)  # nearly uniform
    assert drawn.max() < VOCAB and len(drawn[:, 1:].unique()) > 200


def test_gradient_checkpointing_gives_the_same_gradients(folder):
    """With dropout, so that the second forward must draw what the first one drew."""
    model = GPT.from_pretrained(str(folder), dropout=0.2).train()
    forwards, results = [], []
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(0)
        results.append(gradients(model, tokens(2, BLOCK), tokens(2, BLOCK, seed=2)))
    assert len(forwards) == 1 + 2  # once; then once more in backward
    assert results[0][0] == results[1][0] and furthest(results[0][1], results[1][1]) == 0


@pytest.mark.parametrize("place", ["embedding", "attention", "attention's output", "mlp"])
def test_dropout_acts_in_training_alone(folder, ours, place):
    model = GPT.from_pretrained(str(folder), dropout=0.5)
    model.transformer.drop.p = 0.5 * (place == "embedding")
    for block in model.transformer.h:
        block.attn.dropout = 0.5 * (place == "attention")
        block.attn.resid_dropout.p = 0.5 * (place == "attention's output")
        block.mlp.dropout.p = 0.5 * (place == "mlp")
    idx = tokens(2, BLOCK)
    assert torch.equal(model.eval()(idx), ours.eval()(idx))
    assert (model.train()(idx) - model(idx)).abs().max() > 0.1
    assert torch.equal(ours.train()(idx), ours(idx))


def test_crop_block_size(ours):
    idx = tokens(2, BLOCK)
    whole = ours(idx[:, :20])
    ours.crop_block_size(20)
    assert torch.equal(ours(idx[:, :20]), whole)
    assert ours.config.block_size == 20 and ours.transformer.wpe.weight.shape == (20, EMBD)
    assert ours.num_params() == VOCAB * EMBD + 20 * EMBD + LAYERS * (12 * EMBD**2 + 13 * EMBD) + 2 * EMBD
    _, grads = gradients(ours, idx[:, :20], idx[:, :20])
    assert grads["transformer.wpe.weight"].abs().min() > 0
    with pytest.raises(ValueError, match="21 tokens is longer than block_size=20"):
        ours(idx[:, :21])
    with pytest.raises(ValueError, match="block_size=21 is above the 20 positions that the model has"):
        ours.crop_block_size(21)
    with pytest.raises(ValueError, match=f"vocab_size={VOCAB + 1} is above the {VOCAB} tokens that the model has"):
        ours.crop_vocab_size(VOCAB + 1)
    assert ours.config.block_size == 20 and ours.config.vocab_size == VOCAB


@pytest.mark.parametrize("n_layer, n_head, n_embd, params, flops", [
    (12, 12, 768, 124_439_808, 855_166_464),  # 6 x (124,439,808 - 786,432) + 12 x 12 x 768 x 1024
    (24, 16, 1024, 354_823_168, None), (36, 20, 1280, 774_030_080, None),
    (48, 25, 1600, 1_557_611_200, 10_279_555_200)], ids=["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_parameters_are_the_published_ones_and_flops_those_by_hand(n_layer, n_head, n_embd, params, flops):
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd))
    assert model.transformer.wte.weight.shape == (50304, n_embd)
    assert model.num_params() == params
    assert model.num_params(positions=False) == params - 1024 * n_embd
    assert model.flops_per_token() == flops or flops is None
    assert model.flops_per_token() - model.flops_per_token(512) == 12 * n_layer * n_embd * 512


@torch.no_grad()
def uncached(model, idx, n):
    """idx continued by n of the likeliest tokens, without generate() and without a cache."""
    for _ in range(n):
        idx = torch.cat([idx, model(idx[:, -model.config.block_size:])[:, -1:].argmax(dim=-1)], dim=1)
    return idx


@pytest.mark.parametrize("start", [1, BLOCK - 1, BLOCK, BLOCK + 5])
def test_cached_text_is_uncached_text(ours, start):
    """Also past the context, where it slides."""
    idx = tokens(3, start)
    cached = ours.generate(idx, BLOCK + 10, temperature=0)
    assert cached.shape == (3, start + BLOCK + 10)
    assert torch.equal(cached, uncached(ours, idx, BLOCK + 10))


def test_text_by_captured_steps_is_the_same_text(monkeypatch):
    """What happens on CUDA but for the capture itself: from a prompt of 100, over caches of 128, 256 and 300 tokens,
    and beyond them, where the context slides."""
    torch.manual_seed(0)
    wide = GPT(GPTConfig(block_size=300, vocab_size=61, n_layer=2, n_head=2, n_embd=32)).eval()
    for p in wide.parameters():
        p.data += 0.2 * torch.randn_like(p)  # no fixed point
    idx = torch.randint(61, (2, 100))
    wanted = uncached(wide, idx, 220)
    drawn = wide.generate(idx, 150, generator=torch.Generator().manual_seed(1))
    decoders = []

    class Captured(Decoder):
        def __init__(self, *args, cuda_graphs, **options):
            super().__init__(*args, **options)
            self.use_cuda_graphs = cuda_graphs
            decoders.append(self)

    monkeypatch.setattr("model.Decoder", Captured)
    monkeypatch.setattr("runtime.decoder.capture_cuda_graph", lambda step, generator: step)
    assert torch.equal(wide.generate(idx, 220, temperature=0), wanted)
    assert len(wanted[:, 100:].unique()) > 20
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(wide.generate(idx, 150, generator=generator), drawn)
    assert torch.equal(wide.generate(idx, 50, temperature=0, cuda_graphs=False), wanted[:, :150])
    assert [(list(decoder.graphs), decoder.generator) for decoder in decoders] == [
        ([128, 256, 300], None), ([128, 250], generator), ([], None)]


def test_the_cache_is_used(ours):
    lengths = []
    ours.transformer.h[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].size(1)))
    ours.generate(tokens(2, 5), 4)
    uncached(ours, tokens(2, 5), 4)
    assert lengths == [5, 1, 1, 1, 5, 6, 7, 8]


def test_compiled_blocks_are_not_compiled_for_each_length_of_the_cache(ours):
    compiled, wanted = [], ours.generate(tokens(2, 5), 9, temperature=0)
    ours.compile_blocks(backend=lambda graph, inputs: compiled.append(1) or graph)
    assert torch.equal(ours.generate(tokens(2, 5), 9, temperature=0), wanted) and not compiled
    ours(tokens(2, 5), tokens(2, 5))
    assert len(compiled) == 2  # the block and the loss


def test_end_of_text_stops(ours):
    greedy = ours.generate(tokens(2, 5), 30, temperature=0)[:, 5:].tolist()
    ends = {token: sorted(row.index(token) for row in greedy) for token in set(greedy[0]) & set(greedy[1])}
    end, (first, last) = next((token, at) for token, at in ends.items() if at[1] > at[0] + 2)
    heard = []
    text = ours.generate(tokens(2, 5), 30, temperature=0, end_of_text=end, on_token=lambda t: heard.append(t.tolist()))
    wanted = [row[: row.index(end)] + [end] * (last + 1 - row.index(end)) for row in greedy]
    assert wanted != [row[: last + 1] for row in greedy]
    assert text[:, 5:].tolist() == wanted  # the row that ends first repeats it until the other ends
    assert [list(column) for column in zip(*wanted)] == heard


def edit_config(folder, **changed):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def refused(folder):
    """The message with which a folder is refused: one line that names it."""
    with pytest.raises(UserError) as error:
        GPT.from_pretrained(str(folder))
    message = str(error.value)
    assert message.startswith(str(folder)) and "\n" not in message
    return message.removeprefix(str(folder))


def test_cut_or_missing_weights_are_refused(copy, theirs):
    for file in ("model.safetensors", "pytorch_model.bin"):
        if file == "pytorch_model.bin":
            (copy / "model.safetensors").unlink()
            torch.save(theirs.state_dict(), copy / file)
        for kept in (0.99, 0.0):
            os.truncate(copy / file, int(kept * os.path.getsize(copy / file)))
            assert " cannot be read (" in refused(copy)
    (copy / "pytorch_model.bin").unlink()
    assert refused(copy) == " has neither model.safetensors nor pytorch_model.bin"
    theirs.save_pretrained(copy, max_shard_size="50KB")
    shard, index = sorted(copy.glob("*.safetensors"))[1], copy / "model.safetensors.index.json"
    os.truncate(shard, 1000)
    assert " cannot be read (" in refused(copy)
    shard.unlink()
    assert " cannot be read (" in refused(copy)
    os.truncate(index, 100)
    assert " cannot be read (" in refused(copy)


@pytest.mark.parametrize("name, shape", [
    ("transformer.h.1.mlp.c_fc.weight", (4 * EMBD, EMBD)),  # not as transformers has it
    ("transformer.wpe.weight", (BLOCK + 1, EMBD)), ("transformer.wte.weight", (VOCAB + 1, EMBD))])
def test_a_missing_tensor_or_one_of_another_shape_is_named(copy, name, shape):
    weights = load_file(copy / "model.safetensors")
    save_file(weights | {name: torch.zeros(shape)}, copy / "model.safetensors")
    assert f"{name} has shape" in refused(copy)
    del weights[name]
    save_file(weights, copy / "model.safetensors")
    assert refused(copy) == f": the tensor {name} is missing, or is not one of floating-point numbers"


@pytest.mark.parametrize("key, value", [
    ("activation_function", "relu"), ("model_type", "llama"), ("layer_norm_epsilon", 1e-6), ("n_inner", 64),
    ("scale_attn_by_inverse_layer_idx", True), ("tie_word_embeddings", False)])
def test_another_architecture_is_refused(copy, key, value):
    edit_config(copy, **{key: value})
    assert f"config.json has {key}={value!r}, which is not GPT-2's" in refused(copy)


def test_a_config_may_say_what_gpt2_does_anyway(copy):
    edit_config(copy, n_inner=4 * EMBD)
    GPT.from_pretrained(str(copy))


@pytest.mark.parametrize("config", ["{", '"gpt2"', '{"n_layer": "2"}', '{"n_layer": null}', '{"n_head": 2.0}',
                                    '{"vocab_size": 0}', '{"n_positions": true}', '{"n_embd": 33}'])
def test_a_malformed_or_missing_config_is_refused(copy, config):
    (copy / "config.json").write_text(config)
    assert re.search(r"^.config.json cannot be read|^ cannot be read \((Value|Attribute)Error: ", refused(copy))
    (copy / "config.json").unlink()
    assert "config.json cannot be read" in refused(copy)


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="'gpt3' is not a folder, a file or one of gpt2, gpt2-medium"):
        GPT.from_pretrained("gpt3")


def test_weights_that_cannot_be_fetched_are_told_with_the_mend(monkeypatch, tmp_path):
    """The hub's client itself, kept off the network and with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="weights of gpt2-xl could not be fetched.*--init_from=DIR.*HF_ENDPOINT"):
        GPT.from_pretrained("gpt2-xl")


def test_weights_from_the_hub_are_of_one_revision(copy, monkeypatch):
    """The network is what is replaced."""
    asked = []

    def hf_hub_download(name, file, revision):
        asked.append((name, file, revision))
        return str(copy / file)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    monkeypatch.setitem(weights.REVISIONS, "gpt2-medium", "a" * 40)
    assert weights.fetch_from_hub("gpt2-medium") == str(copy)
    assert asked == [("openai-community/gpt2-medium", file, "a" * 40) for file in ("config.json", "model.safetensors")]
    GPT.from_pretrained("gpt2-medium")
