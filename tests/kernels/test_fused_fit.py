"""Which blocks run on the kernels, decided for each object: in Triton's interpreter, every edited model has the loss,
the gradients and the next tokens of plain PyTorch. Each row of EDITS says how many blocks still run on the kernels."""

import importlib.util
import itertools
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn

pytest.importorskip("triton", reason="PyTorch for this platform comes without Triton, and the kernels are not used")

import model as model_file
from model import GPT, Block, CausalSelfAttention, GPTConfig
from runtime.engine import setup
from runtime.engine.fast_paths import decide, describe, inspect_model
from runtime.engine.grad_sink import GradSink, set_sink
from runtime.errors import UserError
from runtime.hardware import Execution
from runtime.kernels import steady
from runtime.kernels.decode import decode_step, why_no_decode
from runtime.kernels.fit import fit, ranges, why_changed
from runtime.kernels.fused import ChainedBlock, ClosedBlock, FusedBlock, use_fused_blocks

SHAPE = {"block_size": 40, "vocab_size": 61, "n_layer": 3, "n_head": 3, "n_embd": 48}
GPU = Execution("cuda", "float32", True, 0)
NUMBERS = itertools.count()


def copied(*changes: tuple[str, str]) -> Callable[[Path], ModuleType]:
    """Return a function that imports a copy of model.py, with changes [(old, new)]."""

    def build(folder):
        text = (ROOT / "model.py").read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        name = f"model_copy_{next(NUMBERS)}"
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return build


class OtherAttention(CausalSelfAttention):
    """Without a mask: each token sees all others."""

    def forward(self, x, cache=None, *args, **named):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.n_head, -1).transpose(1, 2) for z in self.c_attn(x).split(C, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class ScaledGPT(GPT):
    def forward(self, *args, **named):
        return 2 * super().forward(*args, **named)


class NamedGPT(GPT):
    """A subclass without a forward of its own."""


class HalvedHead(model_file.LMHead):
    def forward(self, *args, **named):
        return super().forward(*args, **named) / 2


def swap_attention(gpt):
    attention = OtherAttention(gpt.config)
    attention.load_state_dict(gpt.transformer.h[1].attn.state_dict())
    gpt.transformer.h[1].attn = attention


def set_eps(gpt):
    gpt.transformer.h[0].ln_1.eps = 0.5


def set_last_eps(gpt):
    gpt.transformer.ln_f.eps = 0.5


def set_activation(gpt):
    gpt.transformer.h[1].mlp.gelu = "none"


def halve(module, given, made):
    """A hook that changes what a module returns."""
    return made / 2


def hook(path):
    return lambda gpt: gpt.get_submodule(path).register_forward_hook(halve)


def hook_a_gradient(gpt):
    gpt.transformer.h[2].mlp.c_fc.weight.register_hook(lambda grad: grad * 3)


def hook_backward(gpt):
    gpt.transformer.h[0].attn.register_full_backward_hook(lambda module, given, made: (given[0] * 2,))


def replace_a_forward(gpt):
    gpt.transformer.h[2].forward = lambda x, *args, **named: x


def wrap_a_method(gpt):
    """functools.wraps makes inspect show the source of the wrapped function."""
    known = Block.attn_and_mlp

    @wraps(known)
    def doubled(self, *args, **named):
        return 2 * known(self, *args, **named)

    for block in gpt.transformer.h:
        block.__class__ = type("Wrapped", (Block,), {"attn_and_mlp": doubled})


def parametrize(gpt):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(gpt.transformer.h[0].attn.c_attn, "weight", Double())


def become(kind):
    def change(gpt):
        gpt.__class__ = kind

    return change


def cap_logits(gpt):
    gpt.lm_head.__class__ = HalvedHead


def widen_an_mlp(gpt):
    gpt.transformer.h[1].mlp.c_fc = nn.Linear(48, 80)
    gpt.transformer.h[1].mlp.c_proj = nn.Linear(80, 48)


def share_a_block(gpt):
    gpt.transformer.h[2] = gpt.transformer.h[0]


LOOP = "        for i, block in enumerate(self.transformer.h):\n"
LAST = "        x = self.transformer.ln_f(x)\n"
FC = "        x = self.c_fc(x)\n"
COMMENTS = (FC, "        'Text'\n        # more\n\n        x = (\n            self.c_fc(x))\n")
BACKENDS = "        backends = contextlib.nullcontext()\n"
GELU = "approximate=self.gelu)"
RELU = [("F.gelu(", "F.relu(F.gelu("), (GELU, f"{GELU})")]
QK = (BACKENDS, f"        q = 4 * F.normalize(q, dim=-1)\n{BACKENDS}")
HEAD = "        return self.lm_head("  # of GPT.forward
GENERATE = "\n    @torch.no_grad()\n    def generate("
AUX = [
    (HEAD, HEAD.replace("return", "out =")),
    (GENERATE, f"        return out if targets is None else out + 1e-2 * x.square().mean()\n{GENERATE}"),
]
LOGITS = "        logits = self.logits(x).float()\n"
CAP = (LOGITS, f"{LOGITS}        logits = 15 * torch.tanh(logits / 15)\n")
SKIP = (LAST, f"        x = x + self.transformer.wte(idx)\n{LAST}")
TWICE = (LOOP, "        for i, block in [*enumerate(self.transformer.h)] * (1 if caches else 2):\n")
NEVER = (LOOP, f"{LOOP}            if i == 1:\n                continue\n")
TURNED = (LOOP, f"        x = x.transpose(0, 1).contiguous().transpose(0, 1)\n{LOOP}")
MLP = "        self.mlp = MLP(config)\n"
UNUSED = (MLP, f"{MLP}        self.unused = nn.Linear(2, 2)\n")


def with_another_decoder(folder):
    """A copied model.py whose Decoder doubles the logits."""
    module = copied()(folder)

    class Doubled(module.Decoder):
        def forward(self, *args, **named):
            return 2 * super().forward(*args, **named)

    module.Decoder = Doubled
    return module


class Edit(NamedTuple):
    fused: int  # blocks that run on the kernels, of three
    way: type[FusedBlock] | None
    decodes: bool  # whether the decoding kernels run it
    change: Callable | None = None  # of a GPT that was built
    source: Callable[[Path], ModuleType] | None = None  # else model.py


EDITS = {
    "nothing": Edit(3, ChainedBlock, True),
    "a copied model.py": Edit(3, ChainedBlock, True, source=copied()),
    "comments and formatting": Edit(3, ChainedBlock, True, source=copied(COMMENTS)),
    "a copy with normalized q and k": Edit(0, None, False, source=copied(QK)),
    "a copy with another activation": Edit(0, None, False, source=copied(*RELU)),
    "another attention class in one block": Edit(2, ClosedBlock, False, swap_attention),
    "another eps": Edit(2, ClosedBlock, False, set_eps),
    "another eps of the last norm": Edit(3, ClosedBlock, False, set_last_eps),
    "another activation in one block": Edit(2, ClosedBlock, False, set_activation),
    "a hook on attn": Edit(2, ClosedBlock, False, hook("transformer.h.1.attn")),
    "a hook on mlp": Edit(2, ClosedBlock, False, hook("transformer.h.1.mlp")),
    "a hook on c_attn": Edit(2, ClosedBlock, False, hook("transformer.h.1.attn.c_attn")),
    "a hook on a block": Edit(3, ClosedBlock, False, hook("transformer.h.1")),
    "a hook on ln_f": Edit(3, ClosedBlock, False, hook("transformer.ln_f")),
    "a hook on a backward": Edit(2, ClosedBlock, False, hook_backward),
    "a hook on a gradient": Edit(2, ClosedBlock, True, hook_a_gradient),
    "a forward of one block": Edit(2, ClosedBlock, False, replace_a_forward),
    "a method in a wrapper": Edit(0, None, False, wrap_a_method),
    "a parametrization": Edit(2, ClosedBlock, False, parametrize),
    "a GPT with a forward": Edit(3, ClosedBlock, False, become(ScaledGPT)),
    "a GPT without a forward": Edit(3, ChainedBlock, True, become(NamedGPT)),
    "a head that changes logits": Edit(3, ChainedBlock, False, cap_logits),
    "a wider MLP in one block": Edit(3, ChainedBlock, False, widen_an_mlp),
    "a block in two places": Edit(3, ChainedBlock, True, share_a_block),
    "a capped loss": Edit(3, ChainedBlock, True, source=copied(CAP)),
    "an auxiliary loss": Edit(3, ClosedBlock, False, source=copied(*AUX)),
    "a skip connection": Edit(3, ClosedBlock, False, source=copied(SKIP)),
    "blocks twice": Edit(3, ClosedBlock, False, source=copied(TWICE)),
    "a block never": Edit(3, ClosedBlock, False, source=copied(NEVER)),
    "a residual in another order of memory": Edit(3, ClosedBlock, False, source=copied(TURNED)),
    "more in Block.__init__": Edit(3, ChainedBlock, True, source=copied(UNUSED)),
    "the Decoder": Edit(3, ChainedBlock, False, source=with_another_decoder),
}


def build(edit, folder):
    """A model with an edit, whose biases and layer norms are not what they begin as."""
    source = edit.source(folder) if edit.source else model_file
    torch.manual_seed(0)
    gpt = source.GPT(source.GPTConfig(**SHAPE))
    for p in gpt.parameters():
        p.data += 0.1 * torch.randn_like(p)
    if edit.change:
        edit.change(gpt)
    return gpt, source


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Decide as on a GPU, without torch.compile. Return a function that takes the paths of a model."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def take(gpt, stage=2):
        paths = decide(inspect_model(gpt), GPU, {"zero_optimization": {"stage": stage}}, world_size=1)
        return setup.compile_blocks(gpt, paths, GPU), paths

    return take


def gradients(gpt, idx, targets):
    gpt.zero_grad()
    loss = gpt(idx, targets)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in gpt.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_model_trains_and_decodes_as_edited(edit, tmp_path, on_a_gpu):
    (plain, _), (ours, source) = build(edit, tmp_path), build(edit, tmp_path)
    generator = torch.Generator().manual_seed(1)
    idx, targets = torch.randint(61, (2, 2, 9), generator=generator)
    wanted = gradients(plain, idx, targets)

    why_slow = why_no_decode(ours)
    assert (why_slow is None) is edit.decodes, why_slow
    blocks = ours.transformer.h
    kinds = [type(block) for block in blocks]
    on_a_gpu(ours)
    assert sum(isinstance(block, FusedBlock) for block in blocks) == edit.fused
    for block, kind in zip(blocks, kinds):
        assert isinstance(block, kind)
        assert not isinstance(block, FusedBlock) or isinstance(block, edit.way)
    assert why_changed(ours) is None

    loss, got = gradients(ours, idx, targets)
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    compare(got, wanted[1], 1)

    # Two micro-steps whose gradients are added to sinks. Who looks at a gradient gets it from autograd
    sums = {}
    for name, p in ours.named_parameters():
        if not p._backward_hooks and not p._post_accumulate_grad_hooks:
            sums[name] = torch.full(p.shape, 0.5)
            set_sink(p, GradSink(sums[name]))
    ours.zero_grad()
    for _ in range(2):
        ours(idx, targets).backward()
    for name, p in ours.named_parameters():
        total = sums[name] - 0.5 if name in sums else 0
        got[name] = total + (0 if p.grad is None else p.grad)
    compare(got, wanted[1], 2)

    # The logits after each of 3 more tokens
    with torch.no_grad():
        logits = [model_logits(gpt.eval(), source, edit.decodes and gpt is ours, idx) for gpt in (plain, ours)]
    assert torch.allclose(*logits, atol=5e-5)


def compare(got, wanted, times):
    """Assert that gradients are `times` the wanted ones."""
    for name, grad in wanted.items():
        assert (got[name] - times * grad).abs().max() < 1e-5 * times * max(grad.abs().max(), 1e-4), name


def model_logits(gpt, source, by_kernels, idx):
    """The logits of a Decoder after a prompt of 6 tokens, token by token."""
    decoder = source.Decoder(gpt, 2, 9)
    rows = [decoder.prefill(idx[:, :6])]
    step = partial(decode_step, gpt)
    for at in range(6, 9):
        token = idx[:, at : at + 1]
        if by_kernels:
            rows.append(step(token, torch.tensor([at]), decoder.caches))
        else:
            rows.append(decoder.decode_one_token(token).clone())  # the next call overwrites it on a GPU
        decoder.cached = at + 1
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["a skip connection", "nothing"])
def test_recomputed_blocks_have_the_same_gradients(name, tmp_path, on_a_gpu):
    (plain, _), (ours, _) = build(EDITS[name], tmp_path), build(EDITS[name], tmp_path)
    idx, targets = torch.randint(61, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    on_a_gpu(ours)
    ours.gradient_checkpointing = True
    loss, wanted = gradients(plain, idx, targets)
    mine, got = gradients(ours, idx, targets)
    assert mine == pytest.approx(loss, rel=1e-6)
    compare(got, wanted, 1)


def test_closed_blocks_add_what_chained_ones_do(tmp_path):
    """To the last bit of each block's sum: the loss is equal, and so are gradients up to their sums' order."""
    edit = EDITS["nothing"]
    (chained, _), (closed, _) = build(edit, tmp_path), build(edit, tmp_path)
    closed.transformer.h[0].register_forward_hook(lambda *_: None)
    use_fused_blocks(chained)
    use_fused_blocks(closed)
    assert isinstance(closed.transformer.h[2], ClosedBlock) and isinstance(chained.transformer.h[2], ChainedBlock)
    idx = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(1))
    x, y = [], []
    chained.transformer.ln_f.register_forward_hook(lambda module, given, made: x.append(made))
    closed.transformer.ln_f.register_forward_pre_hook(lambda module, given: y.append(given[0]))
    chained(idx)
    closed(idx)
    assert torch.allclose(x[0], closed.transformer.ln_f(y[0]), atol=1e-6)


def test_a_closed_block_leaves_what_the_kernels_do_not_know_to_pytorch(tmp_path):
    """Another dtype, which PyTorch refuses, and autocast, which it follows."""
    gpt, _ = build(EDITS["a hook on a block"], tmp_path)
    plain = gpt.transformer.h[0]
    x = torch.randn(2, 19, 48, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = plain(x)
    use_fused_blocks(gpt)
    block = gpt.transformer.h[0]
    assert isinstance(block, ClosedBlock)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block(x), wanted)
    assert not torch.equal(block(x), wanted)
    with pytest.raises(RuntimeError, match="type"):
        block(x.double())


def test_a_second_derivative_is_an_error(tmp_path):
    """The kernels' backwards can't be differentiated: a penalty of gradients would be wrong in silence."""
    gpt, _ = build(EDITS["a hook on a block"], tmp_path)
    use_fused_blocks(gpt)
    x = torch.randn(1, 5, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(gpt.transformer.h[0](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.parametrize("compiles_itself", [True, False])
def test_blocks_that_changed_after_the_paths_are_compiled(monkeypatch, compiles_itself):
    """An edited script may change all blocks between the plan and compile_blocks()."""
    gpt = model_file.GPT(model_file.GPTConfig(**SHAPE))
    paths = decide(inspect_model(gpt), GPU, {"zero_optimization": {"stage": 2}}, world_size=1)
    assert paths.kernels.taken
    for block in gpt.transformer.h:
        block.mlp.register_forward_hook(lambda module, given, made: made)
    if not compiles_itself:
        monkeypatch.delattr(model_file.GPT, "compile_blocks")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    assert setup.compile_blocks(gpt, paths, GPU) is None
    assert sum(function.__name__ == "forward_uncached" for function in compiled) == 3


def test_the_lines_say_which_blocks_and_why(tmp_path, on_a_gpu):
    gpt, _ = build(EDITS["another attention class in one block"], tmp_path)
    fused, paths = on_a_gpu(gpt)
    assert fused.blocks == [gpt.transformer.h[0], gpt.transformer.h[2]]
    lines = describe(paths)
    assert lines[0] == "fast gradients and step, fused blocks 0, 2"
    assert "no fused blocks 1: OtherAttention.forward in use is not the original one of model.py" in lines
    assert "no chained blocks: some blocks are not fused" in lines

    gpt, _ = build(EDITS["a GPT with a forward"], tmp_path)
    lines = describe(on_a_gpu(gpt)[1])
    assert lines[0] == "fast gradients and step, fused blocks"
    assert "no chained blocks: ScaledGPT.forward in use is not the original one of model.py" in lines
    gpt, _ = build(EDITS["a copy with another activation"], tmp_path)
    fused, paths = on_a_gpu(gpt)
    assert fused is None
    assert paths.kernels.reason == "MLP.forward in use is not the original one of model.py"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_change_after_the_choice_is_refused(tmp_path):
    for change, reason in (
        (set_eps, "transformer.h.0 was changed after setup.compile_blocks (ln_1.eps is 0.5, not 1e-05)"),
        (hook("transformer.h.1.mlp"), "transformer.h.1 was changed after setup.compile_blocks (mlp has hooks)"),
        (hook("transformer.h.1"), "transformer.h.0 was changed after setup.compile_blocks (a block has hooks)"),
        (set_last_eps, "transformer.h.0 was changed after setup.compile_blocks (ln_f.eps is 0.5, not 1e-05)"),
    ):
        gpt, _ = build(EDITS["nothing"], tmp_path)
        use_fused_blocks(gpt)
        assert why_changed(gpt) is None
        change(gpt)
        assert why_changed(gpt) == f"{reason}: change it before"


@pytest.mark.parametrize("name", ["nothing", "an auxiliary loss"])
def test_a_hook_that_comes_later_is_called(name, tmp_path):
    """Such as one that a training loop registers. That block is then PyTorch's."""
    (plain, _), (ours, _) = build(EDITS[name], tmp_path), build(EDITS[name], tmp_path)
    idx, targets = torch.randint(61, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    use_fused_blocks(ours)
    without = ours(idx, targets).item()
    for gpt in (plain, ours):
        hook("transformer.h.1.mlp")(gpt)
    loss, wanted = gradients(plain, idx, targets)
    mine, got = gradients(ours, idx, targets)
    assert mine == pytest.approx(loss, rel=1e-6) and abs(mine - without) > 1e-3
    compare(got, wanted, 1)


def test_hooks_of_all_modules_and_other_meanings_of_names(monkeypatch, tmp_path):
    gpt, _ = build(EDITS["nothing"], tmp_path)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert fit(gpt).why_none() == "there are hooks for all modules"
    assert steady.varying_part(gpt) == "there are hooks for all modules"
    handle.remove()
    assert fit(gpt).why_none() is None
    monkeypatch.setattr(model_file, "F", object())
    assert fit(gpt).why_none() == "CausalSelfAttention.forward in use is not the original one of model.py"


def test_fp8_needs_chained_blocks(tmp_path):
    gpt, _ = build(EDITS["a hook on a block"], tmp_path)
    with pytest.raises(UserError, match="fp8=True needs .* \\(a block has hooks\\): drop it"):
        use_fused_blocks(gpt, use_fp8=True)


def test_other_blocks_are_compiled_without_their_cache(monkeypatch):
    """A class without forward_uncached: its forward, unless a cache is given."""

    class Own(nn.Module):
        def forward(self, x, cache=None):
            return x + 1

    compiled = []

    def compile(function, **options):
        def run(*args, **named):
            compiled.append(args)
            return function(*args, **named)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    gpt = GPT(GPTConfig(**SHAPE))
    gpt.transformer.h[1] = Own()
    setup.compile_block(gpt.transformer.h[1])
    x = torch.zeros(1)
    assert gpt.transformer.h[1](x, cache=object()) == 1 and not compiled
    assert gpt.transformer.h[1](x) == 1 and len(compiled) == 1
