"""Which edits of model.py have micro-steps that are all the same, so that a CUDA graph can repeat them. For the others,
a line is named."""

import pytest
import torch
from edited_model import ATTENTION, CALL, EXPERTS, GRAPHS, LOOP, RETURN, edited_model

from runtime.kernels.steady import varying_part

GELU = "        x = F.gelu(x, approximate=self.gelu)\n"  # of MLP.forward
LN_F = "        x = self.transformer.ln_f(x)\n"  # of GPT.forward
HEADS = "        backends = contextlib.nullcontext()\n"  # of CausalSelfAttention.forward, after q, k and v
N_HEAD = "        self.n_head = config.n_head\n"
LOGITS = "        return F.linear(x, self.weight)[..., : self.vocab_size]\n"
BLOCK = "        self.mlp = MLP(config)\n"
GPT_INIT = "        self.gradient_checkpointing = False\n"
ROPE = [
    (
        N_HEAD,
        f"""{N_HEAD}        size = config.n_embd // config.n_head
        angles = torch.outer(torch.arange(config.block_size), 1e4 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
""",
    ),
    (
        HEADS,
        f"""        q, k = self.rotate(q), self.rotate(k)
{HEADS}""",
    ),
    (
        "class MLP(nn.Module):\n",
        """def rotated(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(x)


class MLP(nn.Module):
""",
    ),
    (
        "        return self.resid_dropout(self.c_proj(y))\n",
        """        return self.resid_dropout(self.c_proj(y))

    def rotate(self, x):
        T = x.size(-2)
        return rotated(x, self.cos[:T], self.sin[:T])
""",
    ),
]
AUX = [
    (
        RETURN,
        """        loss = self.lm_head(x, targets, reduction)
        if targets is not None and reduction == "mean":
            loss = loss + self.aux_weight * x.float().square().mean()
        return loss
""",
    ),
    (GPT_INIT, f"{GPT_INIT}        self.aux_weight = 0.01\n"),
]
VALUES = [  # the first block's values are added to those of the others, in a list
    (LOOP, f"        first = []\n{LOOP}"),
    (CALL, "            x = block(x, recompute)\n            first.append(x)\n            x = x + 0.1 * first[0]\n"),
]

STEADY = {
    "nothing": [],
    "an auxiliary loss": AUX,
    "a softcap": [(LOGITS, "        logits = F.linear(x, self.weight)[..., : self.vocab_size]\n"
                           "        return 15 * torch.tanh(logits / 15)\n")],
    "squared ReLU": [(GELU, "        x = F.relu(x).square()\n")],
    "qk-norm": [(N_HEAD, f"{N_HEAD}        self.q_norm = nn.RMSNorm(config.n_embd // config.n_head)\n"),
                (HEADS, f"        q = self.q_norm(q)\n        k = F.rms_norm(k, (k.size(-1),))\n{HEADS}")],
    "rotary positions": ROPE,
    "grouped queries": [(HEADS, f"        groups = self.n_head // 2 if self.n_head > 1 else 1\n"
                                "        k, v = (z[:, ::groups].repeat_interleave(groups, dim=1) for z in (k, v))\n"
                                f"{HEADS}")],
    "values of the first block": VALUES,
    "skip connections": GRAPHS["skip connections"],
    "blocks twice": GRAPHS["blocks twice"],
    "a matrix in odd blocks": GRAPHS["a matrix in odd blocks"],
    "a layer in the head": GRAPHS["a layer in the head"],
    "a block without gradients": GRAPHS["a block without gradients"],
    "a comprehension": [(LN_F, f"        x = x + 0.0 * sum(block.ln_1(x) for block in self.transformer.h)\n{LN_F}")],
    "math.sqrt": [(LN_F, f"        x = x * math.sqrt(self.config.n_embd) / self.config.n_embd**0.5\n{LN_F}")],
    "a dict and tuples": [(GELU, '        parts = {"up": x, "scale": (2.0, 0.5)}\n        high, low = parts["scale"]\n'
                                 '        x = F.gelu(parts["up"] * high) * low\n')],
    "a metric": [(ATTENTION, f"{ATTENTION}        self.act_norm = x.detach().float().norm(dim=-1).mean()\n")],
    "stochastic depth on the GPU": [(ATTENTION, """        keep = torch.rand(x.size(0), 1, 1, device=x.device) < 0.9
        x = x + keep * self.attn(self.ln_1(x), **cached)
""")],
    "the device of a name": [(LN_F, """        device, dtype = x.device, x.dtype
        places = torch.arange(x.size(1), device=device).to(dtype)
        x = x + 0.0 * places[None, :, None]
""" + LN_F)],
    "gates": [(BLOCK, f"{BLOCK}        self.gate = nn.Parameter(torch.zeros(config.n_embd))\n"),
              (ATTENTION, "        x = x + self.gate.sigmoid() * self.attn(self.ln_1(x), **cached)\n")],
    "a Sequential": [(BLOCK, "        self.mlp = nn.Sequential(nn.Linear(config.n_embd, 64), nn.SiLU(),\n"
                             "                                 nn.Linear(64, config.n_embd))\n")],
    "sliding windows by block": [
        *GRAPHS["a block cuts off those before"][:2],
        (ATTENTION, f"        if self.number % 2 and self.training:\n            x = x * 1.0\n{ATTENTION}")],
}  # fmt: skip

# (edits, the function that is named, the code of its line, what is wrong with it)
VARYING = {
    "stochastic depth in Python": (
        [("import math\n", "import math\nimport random\n"),
         (LOOP, f"{LOOP}            if self.training and random.random() < 0.1:\n                continue\n")],
        "GPT.forward", "if self.training and random.random() < 0.1:",
        "uses random, which may return something else each time"),
    "stochastic depth on the CPU": (
        [(LOOP, f"{LOOP}            if torch.rand(()) < 0.1:\n                continue\n")],
        "GPT.forward", "if torch.rand(()) < 0.1:", "calls torch.rand without a device, so on the CPU"),
    "item": ([(GELU, "        scale = x.abs().max().item()\n        x = F.relu(x / scale)\n")],
             "MLP.forward", "scale = x.abs().max().item()",
             "calls .item(), which waits for the GPU, or is not known to be the same each time"),
    "a loss that is large": (
        [(RETURN, "        loss = self.lm_head(x, targets, reduction)\n        if loss > 3:\n"
                  "            loss = 2 * loss\n        return loss\n")],
        "GPT.forward", "if loss > 3:", "`if` on a value of a tensor"),
    "a mask as an index": (
        [(LN_F, f"        mask = idx > 0\n        x[mask] = 0.0\n{LN_F}")], "GPT.forward", "x[mask] = 0.0",
        "`[mask]` takes a number of items that may depend on the data"),
    "experts": (EXPERTS, "MoE.forward", "if rows.any():", "`if` on a value of a tensor"),
    "a counter": ([(ATTENTION, f"        self.calls += 1\n{ATTENTION}"), (BLOCK, f"{BLOCK}        self.calls = 0\n")],
                  "Block.attn_and_mlp", "self.calls += 1", "changes calls"),
    "a counter in a list": (
        [(ATTENTION, f"        self.calls.append(1)\n{ATTENTION}"), (BLOCK, f"{BLOCK}        self.calls = []\n")],
        "Block.attn_and_mlp", "self.calls.append(1)", "changes a list of another function or of a module"),
    "a moving average": (
        [(ATTENTION, f"{ATTENTION}        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()\n"),
         (BLOCK, f"{BLOCK}        self.mean = 0.0\n")],
        "Block.attn_and_mlp", "self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()",
        "sets mean, which a forward also reads"),
    "a global counter": (
        [("class MLP(nn.Module):\n", "COUNTS = [0]\n\n\nclass MLP(nn.Module):\n"),
         (GELU, f"        COUNTS[0] += 1\n{GELU}")],
        "MLP.forward", "COUNTS[0] += 1", "reads the global COUNTS, which may change"),
    "while": ([(GELU, f"        while x.size(0) < 0:\n            x = x + 1\n{GELU}")], "MLP.forward",
              "while x.size(0) < 0:", "`while` is not known to be the same each time"),
    "try": ([(GELU, "        try:\n            x = F.relu(x)\n        except RuntimeError:\n            pass\n")],
            "MLP.forward", "try:", "`try` is not known to be the same each time"),
    "an environment variable": (
        [(GELU, "        x = F.gelu(x) if os.environ.get('GELU') else F.relu(x)\n")], "MLP.forward",
        "x = F.gelu(x) if os.environ.get('GELU') else F.relu(x)",
        "uses os, which may return something else each time"),
    "a Python number of a tensor": (
        [(GELU, "        x = F.relu(x) * float(x.mean())\n")], "MLP.forward", "x = F.relu(x) * float(x.mean())",
        "float() of a tensor waits for the GPU"),
    "to the CPU": ([(GELU, '        x = F.relu(x.to("cpu"))\n')], "MLP.forward", 'x = F.relu(x.to("cpu"))',
                   "calls .to() with something that is no dtype and of no tensor, so maybe the CPU"),
    "random numbers of a device by name": (
        [(GELU, f"        x = x + torch.rand(1, device=self.place)\n{GELU}"),
         ("        self.gelu = config.gelu\n", '        self.gelu = config.gelu\n        self.place = "cpu"\n')],
        "MLP.forward", "x = x + torch.rand(1, device=self.place)",
        "rand with a device that is not that of a tensor, so maybe the CPU"),
    "a counter by another name": (
        [(ATTENTION, f"        calls = self.calls\n        calls += [1]\n{ATTENTION}"),
         (BLOCK, f"{BLOCK}        self.calls = []\n")],
        "Block.attn_and_mlp", "calls += [1]", "changes a list of another function or of a module"),
    "a list of the caller": (
        [("class MLP(nn.Module):\n", "def note(seen, x):\n    seen.append(x)\n\n\nclass MLP(nn.Module):\n"),
         (LN_F, f"        seen = []\n        note(seen, x)\n{LN_F}")],
        "note", "seen.append(x)", "changes a list of another function or of a module"),
    "a seed": ([(GELU, f"        torch.manual_seed(0)\n{GELU}")], "MLP.forward", "torch.manual_seed(0)",
               "calls torch.manual_seed, which waits for the GPU, or is not known to be the same each time"),
    "a closure": (
        [("class MLP(nn.Module):\n", '''def scaled_by(scale):
    def function(x):
        return F.relu(x) * scale[0]
    return function


relu = scaled_by([2.0])


class MLP(nn.Module):
'''), (GELU, "        x = relu(x)\n")],
        "function", "return F.relu(x) * scale[0]", "reads scale of the function around it, which may change"),
    "a comparison in an expression": (
        [(GELU, "        x = F.relu(x) if x.max() > 1 else x\n")], "MLP.forward", "x = F.relu(x) if x.max() > 1 else x",
        "`if` on a value of a tensor"),
    "an assertion": ([(GELU, f"        assert x.isfinite().all()\n{GELU}")], "MLP.forward",
                     "assert x.isfinite().all()", "`assert` on a value of a tensor"),
    "print": ([(GELU, f"        print(x.shape)\n{GELU}")], "MLP.forward", "print(x.shape)",
              "calls print, which waits for the GPU, or is not known to be the same each time"),
}  # fmt: skip


def build(tmp_path, edits):
    """Return a GPT of an edited model.py, of four blocks, and its file's lines."""
    module = edited_model(tmp_path, edits)
    config = module.GPTConfig(block_size=16, vocab_size=61, n_layer=4, n_head=2, n_embd=32)
    return module, module.GPT(config), (tmp_path / "model.py").read_text().splitlines()


@pytest.mark.parametrize("name", STEADY)
def test_steady(tmp_path, name):
    _, model, _ = build(tmp_path, STEADY[name])
    assert varying_part(model) is None
    idx = torch.randint(61, (2, 16))
    assert model(idx, idx).isfinite()  # the edit runs


@pytest.mark.parametrize("name", VARYING)
def test_not_steady(tmp_path, name):
    edits, function, code, why = VARYING[name]
    _, model, lines = build(tmp_path, edits)
    (line,) = [number for number, text in enumerate(lines, 1) if text.strip() == code]
    assert varying_part(model) == f"{function}, line {line}: {why}"


def test_an_edited_model_on_the_meta_device_is_read_as_well(tmp_path):
    with torch.device("meta"):
        _, model, _ = build(tmp_path, AUX)
    assert varying_part(model) is None


def test_functions_that_somebody_put_in_pytorchs_place(tmp_path, monkeypatch):
    module, model, lines = build(tmp_path, [(GELU, "        x = F.relu6(x)\n")])
    assert varying_part(model) is None
    monkeypatch.setattr(module.F, "relu6", lambda x: x * float(x.mean()))
    assert "no plain function" in varying_part(model)

    def relu6(x):
        return x * x.mean().item()

    monkeypatch.setattr(module.F, "relu6", relu6)
    assert "calls .item()" in varying_part(model)
