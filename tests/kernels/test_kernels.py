"""The Triton kernels in Triton's interpreter, against model.py and torch.optim."""

import math
import operator

import pytest
import torch

pytest.importorskip("triton", reason="PyTorch for this platform comes without Triton, and the kernels are not used")

import model as model_file
from model import GPT, GPTConfig
from runtime import lora
from runtime import loss as loss_file
from runtime.decoder import Decoder
from runtime.engine.adamw import adamw_kernel
from runtime.engine.fast_paths import decide, inspect_model
from runtime.engine.grad_sink import GradSink, set_sink
from runtime.hardware import Execution
from runtime.kernels import decode, edits, steady
from runtime.kernels.decode import decode_step
from runtime.kernels.fit import fit
from runtime.kernels.fused import use_fused_blocks
from runtime.kernels.gram import symmetric_product

SHAPE = {"block_size": 150, "vocab_size": 61, "n_layer": 2, "n_head": 3, "n_embd": 48}  # 48: no power of two


def models(copies=False, **shape):
    """A model whose biases and layer norms are not what they begin as, and the same, fused."""
    torch.manual_seed(0)
    plain, fused = GPT(GPTConfig(**{**SHAPE, **shape})), GPT(GPTConfig(**{**SHAPE, **shape}))
    for p in plain.parameters():
        p.data += 0.1 * torch.randn_like(p)
    fused.load_state_dict(plain.state_dict())
    return plain, fused, use_fused_blocks(fused, copies=copies)


def gradients(model, idx, targets, where=lambda p: p.grad):
    model.zero_grad()
    loss = model(idx, targets)
    loss.backward()
    return loss.item(), {name: where(p).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recomputed", [False, True])
def test_fused_blocks_have_the_loss_and_the_gradients_of_plain_ones(recomputed):
    """In float32, over 2 x 19 rows, which no tile divides; also with gradients that are added to sinks."""
    plain, fused, _ = models()
    fused.gradient_checkpointing = recomputed
    idx, targets = torch.randint(61, (2, 2, 19))
    loss, wanted = gradients(plain, idx, targets)
    mine, got = gradients(fused, idx, targets)
    assert mine == pytest.approx(loss, rel=1e-6)
    for name, grad in wanted.items():
        assert (got[name] - grad).abs().max() < 2e-6 * grad.abs().max(), name
        assert not (name.endswith("c_attn.bias") and got[name][48:96].any())  # the keys'
    with torch.no_grad():
        assert torch.allclose(fused(idx, targets, "none"), plain(idx, targets, "none"), atol=2e-5)

    sums = {p: torch.full(p.shape, 0.5) for p in fused.parameters()}
    for p in fused.parameters():
        set_sink(p, GradSink(sums[p]))
    gradients(fused, idx, targets, where=lambda p: sums[p])
    _, got = gradients(fused, idx, targets, where=lambda p: sums[p] - 0.5 + (0 if p.grad is None else 2 * p.grad))
    ours = [name for name, p in fused.named_parameters() if p.grad is None]
    assert len(ours) == 26  # all but the embeddings
    for name, grad in wanted.items():
        assert (got[name] - 2 * grad).abs().max() < 2e-5 * grad.abs().max(), name


@pytest.mark.parametrize("stage", [2, 3])
def test_attention_in_a_bfloat16_model_is_as_exact_as_float16(stage):
    """Against float64, with an offset of 30 that all keys share. Stage 2: each parameter has a sink. 3: some have
    one, of a single backward. The interpreter truncates bfloat16, which makes 1%."""
    plain, fused, blocks = models(copies=stage == 2)
    for layer in plain.transformer.h:
        layer.attn.c_attn.bias.data[48:96] += 30
        layer.attn.c_proj.weight.data *= -1
    exact = GPT(GPTConfig(**SHAPE)).double()
    for name, p in fused.bfloat16().named_parameters():
        if stage == 2 or name.endswith("c_attn.weight"):
            total = torch.full_like(p, stage == 3, dtype=torch.float32 if stage == 2 else p.dtype)
            set_sink(p, GradSink(total.requires_grad_(False), one_backward=stage == 3))
    idx, targets = torch.randint(61, (2, 1, 60))
    for model in (fused, exact):
        model.load_state_dict(plain.bfloat16().state_dict())
    if stage == 2:
        blocks.copy_weights()
    (_, wanted), (_, rough) = gradients(exact, idx, targets), gradients(plain, idx, targets)
    _, got = gradients(fused, idx, targets, where=lambda p: p.grad_sink.total if p.grad is None else p.grad)
    for name, grad in wanted.items():
        rows = slice(48 if name.endswith("c_attn.weight") else None)  # of c_attn, those for q
        plain_error, error = ((found[name] - grad)[rows].norm() / grad[rows].norm() for found in (rough, got))
        assert error < (0.08 if rows.stop else 0.025), (name, error)
        assert name != "transformer.h.1.attn.c_attn.weight" or plain_error > 0.3  # 0.39 in PyTorch 2.7


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"temperature": 0.8, "top_k": 20}], ids=str)
def test_fused_blocks_generate_the_plain_text_and_train_on_as_before(sampling):
    """30 tokens after 19, with a context of 24, which slides."""
    plain, fused, _ = models(block_size=24)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    idx, targets = torch.randint(61, (2, 2, 19))
    before = gradients(fused, idx, targets)
    wanted, got = (model.generate(idx, 30, **sampling, generator=torch.Generator().manual_seed(1))
                   for model in (plain, fused))
    assert torch.equal(got, wanted) and len(got[:, 19:].unique()) > 5
    loss, grads = gradients(fused, idx, targets)
    assert loss == before[0] and all(torch.equal(grad, before[1][name]) for name, grad in grads.items())


@pytest.mark.long
# The plan refuses fp8 on a CPU, and PyTorch 2.7 is only for GPUs below compute capability 7.5, where it is refused too
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="PyTorch 2.7 has _scaled_mm on GPUs only")
def test_fp8_matmuls_are_near_the_plain_ones():
    """The first micro-step calibrates and is exact; in the second all matmuls of the blocks are in FP8, E4M3 with 3 and
    E5M2 with 2 bits of mantissa, also into a sink; an evaluation is exact again. The interpreter truncates what a
    GPU rounds."""
    plain, fused, _ = models()
    use_fused_blocks(fused, use_fp8=True)
    idx, targets = torch.randint(61, (2, 2, 40))
    loss, wanted = gradients(plain, idx, targets)
    calibrated, got = gradients(fused, idx, targets)
    assert calibrated == pytest.approx(loss, rel=1e-6)
    scales = fused.transformer.h[0].casts.c_attn.slot.scales
    assert (scales.amax > 0).all() and scales.amax.numel() == 24
    weight = plain.transformer.h[1].mlp.c_fc.weight
    assert scales.amax[12 + 6 + 1] == weight.abs().max()
    mine, got = gradients(fused, idx, targets)
    assert 1e-6 < abs(mine - loss) / loss < 0.01
    for name, grad in wanted.items():
        away = (got[name] - grad).norm() / grad.norm()
        assert away < 0.45, (name, away)
    assert scales.scale[12 + 6 + 1].item() == pytest.approx(224 / weight.abs().max().item())

    sums, amax = {p: torch.full(p.shape, 0.5) for p in fused.parameters()}, scales.amax.clone()
    assert torch.equal(fused.generate(idx, 3, temperature=0), plain.generate(idx, 3, temperature=0))
    assert torch.equal(scales.amax, amax)  # text is no micro-step
    _, once = gradients(fused, idx, targets)
    scales.amax.copy_(amax)  # the same scales again
    for p in fused.parameters():
        set_sink(p, GradSink(sums[p]))
    _, added = gradients(fused, idx, targets, where=lambda p: sums[p] - 0.5 if p.grad is None else p.grad)
    for name, grad in once.items():
        assert (added[name] - grad).abs().max() < 1e-5 * grad.abs().max(), name
    with torch.no_grad():
        assert torch.allclose(fused.eval()(idx), plain.eval()(idx), atol=2e-5)


@pytest.mark.parametrize(("shape", "reason"), [
    ({}, None), ({"dropout": 0.1}, "they need dropout=0"), ({"bias": False}, "ln_1 has no bias"),
    ({"gelu": "none"}, "they need tanh GELU"), ({"n_head": 1, "n_embd": 4100}, "n_embd is above 4,096")])
def test_models_of_other_shapes_are_left_alone(shape, reason):
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SHAPE, **shape}))
    assert fit(model).why_none() == reason


def test_the_kernels_implement_model_py():
    functions = {**edits.IMPLEMENTED, **edits.CAPTURED}
    now = {}
    for name in functions:
        file = loss_file if hasattr(loss_file, name.partition(".")[0]) else model_file
        now[name] = edits.function_hash(operator.attrgetter(name)(file))
    assert now == functions, ("model.py has changed, and no run uses the Triton kernels now: make the same "
                              f"change in runtime/kernels, then set IMPLEMENTED and CAPTURED in edits.py to {now}")


def test_adamw_in_one_pass_is_pytorchs():
    """Six steps of 3,000 weights, clipped in all but the last, and in between one whose norm is not finite and one
    whose norm is above the limit. The gradients have a loss scale of 4."""
    torch.manual_seed(0)
    master, n = torch.randn(3000), 3000
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], betas=(0.9, 0.95), weight_decay=0.1)
    exp_avg, exp_avg_sq, bf16, count = torch.zeros(n), torch.zeros(n), master.bfloat16(), torch.zeros(())
    for step, size in enumerate((3.0, 30.0, math.inf, 300.0, 0.1, 0.01)):
        grad, lr = torch.randn(n) * min(size, 1e6), 1e-2 / (step + 1)
        norm, grads = torch.tensor(size if math.isinf(size) else grad.norm().item()), 4 * grad
        adamw_kernel[(3,)](master, grads, exp_avg, exp_avg_sq, bf16, count, norm, n, lr, 1 - lr * 0.1, 0.9, 0.95,
                           1e-8, 0.25, 1.0, 5000.0, BLOCK=1024)
        count += norm < 5000
        assert grads.abs().max() == 0
        if norm >= 5000:
            continue
        theirs.grad = grad
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        state = optimizer.state[theirs]
        assert torch.allclose(master, theirs, rtol=1e-6, atol=1e-7) and count == state["step"]
        assert torch.allclose(exp_avg, state["exp_avg"], atol=1e-8)
        assert torch.allclose(exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=1e-12)
        assert torch.allclose(bf16.float(), master, rtol=2**-7)  # the interpreter cuts, a GPU rounds


@pytest.mark.parametrize(
    ("batch", "programs", "keys", "prompts"),
    [
        # 8 programs share the keys of a head, and look at 64 at a time
        (1, 32, 64, (1, 63, 127, 256)),
        # at 16 at a time, so that each of them looks a second time from 129 keys on
        (1, 32, 16, (127, 129, 135, 255)),
        (2, 32, 32, (127,)),
        # as in a large batch, where one program looks at all keys
        (2, 1, 32, (256,)),
    ],
)
def test_one_more_token_by_our_kernels_gives_the_logits_of_the_whole(
    monkeypatch, batch, programs, keys, prompts
):
    """At the borders where another program begins to share the keys, or looks once more.

    What lies behind in the cache is not looked at.
    """
    tiles = ((keys, 4), (keys, 2))
    assert decode.MAX_KV_SPLITS == 8 and decode.ATTENTION_TILES == ((64, 4), (32, 2))
    monkeypatch.setattr(decode, "HEAD_PROGRAMS", programs)
    monkeypatch.setattr(decode, "ATTENTION_TILES", tiles)
    plain, _, _ = models(block_size=300)
    idx = torch.randint(61, (batch, 300))
    whole = plain(idx)
    with torch.no_grad():
        for prompt in prompts:
            decoder = Decoder(plain, batch, 300)
            decoder.prefill(idx[:, :prompt])
            for cache in decoder.caches:
                cache.keys[0][:, :, prompt:] = 7
                cache.values[0][:, :, prompt:] = 7
            for at in range(prompt, prompt + 2):
                token = idx[:, at : at + 1]
                logits = decode_step(plain, token, torch.tensor([at]), decoder.caches)
                assert torch.allclose(logits, whole[:, at], atol=2e-5), at


@pytest.mark.parametrize("shape", [(2, 130, 70), (1, 64, 200)], ids=str)
def test_half_of_a_symmetric_product_is_the_whole(shape):
    """Over two rows of tiles, which neither size fills, and one; of rows, of columns, and of matrices that commute."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = x @ x.mT
    assert torch.allclose(symmetric_product(x, x), whole, atol=1e-4)
    assert torch.allclose(symmetric_product(x.mT, x.mT), x.mT @ x, atol=1e-4)
    assert torch.allclose(symmetric_product(whole, whole @ whole, 0.5, -2.0),
                          0.5 * whole @ whole @ whole - 2 * whole, rtol=1e-4, atol=1)


def test_a_cuda_graph_needs_a_model_whose_micro_steps_are_all_the_same():
    """Stochastic depth in Python would skip the same block for ever."""
    config = GPTConfig(**SHAPE)
    assert steady.varying_part(GPT(config)) is None
    with_lora = GPT(config)
    lora.apply(with_lora, {"rank": 2, "alpha": 2.0, "dropout": 0.1, "target_modules": ["attn.c_attn"]})
    assert steady.varying_part(with_lora) is None

    class Skipping(GPT):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class OtherMLP(torch.nn.Linear):
        pass

    models = {name: GPT(config) for name in ("subclass", "module", "function", "hook", "gradient")}
    models["subclass"] = Skipping(config)
    models["module"].transformer.h[0].mlp = OtherMLP(48, 48)
    models["function"].transformer.h[1].forward = lambda x: x
    models["hook"].transformer.h[1].attn.register_forward_hook(lambda *_: None)
    models["gradient"].lm_head.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    reasons = {name: steady.varying_part(model) for name, model in models.items()}
    assert reasons == {
        "subclass": None,
        "module": None,
        "function": "the forward of transformer.h.1 was replaced",
        "hook": "transformer.h.1.attn has hooks",
        "gradient": "transformer.wte.weight has a gradient hook",
    }

    execution = Execution("cuda", "bfloat16", True, 0)

    def graph(model, setting="auto", **config):
        config = {"zero_optimization": {"stage": 2}, **config}
        return decide(inspect_model(model), execution, config, world_size=1, cuda_graph=setting).graph

    hooked = graph(models["hook"])
    assert not hooked.taken
    assert hooked.reason == ("transformer.h.1.attn has hooks, so a micro-step may depend on the data; cuda_graph=True "
                             "says that it doesn't")
    assert graph(models["hook"], True).taken
    assert not graph(GPT(config), False).taken
    assert not graph(GPT(config), True, wall_clock_breakdown=True).taken
    assert graph(GPT(config)).taken
