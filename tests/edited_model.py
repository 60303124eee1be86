"""Edits of model.py as researchers make them, and a model.py that has them."""

import importlib.util
from pathlib import Path
from types import ModuleType

from conftest import ROOT

LOOP = "        for i, block in enumerate(self.transformer.h):\n"  # of GPT.forward
BLOCKS = "nn.ModuleList(Block(config) for _ in range(config.n_layer))"
HEAD = "        self.lm_head = LMHead(self.transformer.wte, config.vocab_size)\n"
CALL = """            if caches is None:
                x = block(x, recompute)
            else:
                x = block(x, cache=caches[i], positions=positions, mask=mask)
"""
RETURN = "        return self.lm_head(x, targets, reduction)\n"

MIX = [  # a matrix in every second block
    (
        "    def __init__(self, config: GPTConfig) -> None:\n        super().__init__()\n        self.ln_1",
        """    def __init__(self, config, odd=False):
        super().__init__()
        self.mix = nn.Linear(config.n_embd, config.n_embd, bias=False) if odd else None
        self.ln_1""",
    ),
    (
        "        x = x + self.attn(self.ln_1(x), **cached)\n",
        """        if self.mix is not None:
            x = x + self.mix(x)
        x = x + self.attn(self.ln_1(x), **cached)
""",
    ),
    (BLOCKS, "nn.ModuleList(Block(config, i % 2 == 1) for i in range(config.n_layer))"),
]

# Switch's experts (Fedus et al., 2021). There are so many that some get no token of a micro-batch
EXPERTS = [
    (
        "class Block(nn.Module):\n",
        '''class MoE(nn.Module):
    """Top-1 of n_expert MLPs, with Switch's load balancing loss in self.aux."""

    def __init__(self, config, n_expert=16):
        super().__init__()
        self.router = nn.Linear(config.n_embd, n_expert, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(n_expert))

    def forward(self, x):
        probs = self.router(x).softmax(dim=-1)
        weight, choice = probs.max(dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = choice == e
            if rows.any():
                y[rows] = expert(x[rows]) * weight[rows].unsqueeze(-1)
        share = F.one_hot(choice, len(self.experts)).float().mean(dim=(0, 1))
        self.aux = len(self.experts) * (share * probs.mean(dim=(0, 1))).sum()
        return y


class Block(nn.Module):
''',
    ),
    ("self.mlp = MLP(config)", "self.mlp = MoE(config)"),
    (
        RETURN,
        """        out = self.lm_head(x, targets, reduction)
        if targets is not None and reduction == "mean":
            out = out + 0.01 * sum(block.mlp.aux for block in self.transformer.h)
        return out
""",
    ),
]

# The output of a block in the first half goes to its mirror image in the second half
SKIPS = [
    (
        "    def __init__(self, config: GPTConfig) -> None:\n        super().__init__()\n        self.ln_1",
        """    def __init__(self, config, has_skip=False):
        super().__init__()
        self.skip_proj = nn.Linear(config.n_embd, config.n_embd, bias=False) if has_skip else None
        self.ln_1""",
    ),
    ("        recompute: bool = False,\n", "        skip=None,\n        recompute: bool = False,\n"),
    ("self.attn_and_mlp(x, cache=cache", "self.attn_and_mlp(x, skip, cache=cache"),
    ("self.forward_uncached(x, recompute)", "self.forward_uncached(x, skip, recompute)"),
    (
        "    def forward_uncached(self, x: Tensor, recompute: bool)",
        "    def forward_uncached(self, x: Tensor, skip, recompute: bool)",
    ),
    ("checkpoint(self.attn_and_mlp, x, use", "checkpoint(self.attn_and_mlp, x, skip, use"),
    (
        """        return self.attn_and_mlp(x)

    def attn_and_mlp(self, x: Tensor, **cached) -> Tensor:
        \"\"\"cached: cache, positions and mask, or nothing.\"\"\"
""",
        """        return self.attn_and_mlp(x, skip)

    def attn_and_mlp(self, x: Tensor, skip, **cached) -> Tensor:
        if skip is not None:
            x = x + self.skip_proj(skip)
""",
    ),
    (
        BLOCKS,
        "nn.ModuleList(Block(config, 2 * i >= config.n_layer) for i in range(config.n_layer))",
    ),
    (LOOP, f"        skips = []\n{LOOP}"),
    (
        CALL,
        """            skip = skips.pop() if block.skip_proj is not None else None
            if caches is None:
                x = block(x, skip, recompute)
            else:
                x = block(x, skip, cache=caches[i], positions=positions, mask=mask)
            if block.skip_proj is None:
                skips.append(x)
""",
    ),
]


IMPORTS = ("import contextlib\nimport math\n", "import contextlib\nimport math\nimport random\n")


def skipping(choice: str) -> list[tuple[str, str]]:
    """Return the edit that skips one block of a training forward. choice: its number, in Python."""
    return [
        IMPORTS,
        (
            LOOP,
            f"""        config = self.config
        skipped = {choice} if self.training else None
{LOOP}            if i == skipped:
                continue
""",
        ),
    ]


NUMBERED = [
    (
        "    def __init__(self, config: GPTConfig) -> None:\n        super().__init__()\n        self.ln_1",
        """    def __init__(self, config, number=0):
        super().__init__()
        self.number = number
        self.ln_1""",
    ),
    (BLOCKS, "nn.ModuleList(Block(config, i) for i in range(config.n_layer))"),
]
ATTENTION = "        x = x + self.attn(self.ln_1(x), **cached)\n"


# {name: edits of model.py, [(old, new)]}. The GPTs have an even number of blocks
GRAPHS = {
    "blocks twice": [(LOOP, "        for i, block in [*enumerate(self.transformer.h)] * 2:\n")],
    "a block never": [(LOOP, f"{LOOP}            if i == 1:\n                continue\n")],
    "blocks shared in pairs": [
        (
            HEAD,
            f"""        for i in range(1, config.n_layer, 2):
            self.transformer.h[i] = self.transformer.h[i - 1]
{HEAD}""",
        )
    ],
    "one MLP": [
        (
            HEAD,
            f"""        for block in self.transformer.h:
            block.mlp = self.transformer.h[0].mlp
{HEAD}""",
        )
    ],
    # Stochastic depth (Huang et al., 2016). The training loop sets model.step
    "a random block skipped": skipping("random.Random(self.step).randrange(config.n_layer)"),
    # A choice of each micro-batch, so ranks differ. By the data, so that a reference can repeat it
    "a block skipped per rank": skipping("int(idx[:, 0].sum()) % config.n_layer"),
    "an order per rank": [
        (
            LOOP,
            """        blocks = [*enumerate(self.transformer.h)]
        if self.training and int(idx[:, 0].sum()) % 2:
            blocks.reverse()
        for i, block in blocks:
""",
        )
    ],
    # Choices in Block.forward: GPT.forward is as it was
    "a block without gradients": [
        *NUMBERED,
        (
            ATTENTION,
            f"""        if self.number == 1:
            with torch.no_grad():
                x = x + self.attn(self.ln_1(x), **cached)
                return x + self.mlp(self.ln_2(x))
{ATTENTION}""",
        ),
    ],
    "a block cuts off those before": [
        *NUMBERED,
        (ATTENTION, f"        if self.number == 2:\n            x = x.detach()\n{ATTENTION}"),
    ],
    "a block returns its input per rank": [
        *NUMBERED,
        (
            ATTENTION,
            f"""        if self.training and Block.skipped == self.number:
            return x
{ATTENTION}""",
        ),
        (
            HEAD,
            f"""{HEAD}        self.register_forward_pre_hook(
            lambda _, inputs: setattr(Block, "skipped", int(inputs[0][:, 0].sum()) % config.n_layer))
""",
        ),
    ],
    "experts": EXPERTS,
    "experts without an auxiliary loss": EXPERTS[:-1],  # GPT.forward isn't edited
    "skip connections": SKIPS,
    "a layer in the head": [
        (
            "        self.vocab_size = vocab_size\n\n",
            """        self.vocab_size = vocab_size
        self.proj = nn.Linear(wte.embedding_dim, wte.embedding_dim)

""",
        ),
        (
            "        return F.linear(x, self.weight)[..., : self.vocab_size]\n",
            """        logits = F.linear(self.proj(x), self.weight)[..., : self.vocab_size]
        return 15 * torch.tanh(logits / 15)
""",
        ),
    ],
    "a matrix in odd blocks": MIX,
}

# The loss depends on how a step is divided into micro-batches
BY_MICRO_BATCH = (
    "a block skipped per rank",
    "an order per rank",
    "a block returns its input per rank",
    "experts",
)


def edited_model(folder: Path, edits: list[tuple[str, str]]) -> ModuleType:
    """Write folder/model.py with these edits of model.py, and return it as a module."""
    text = (ROOT / "model.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = Path(folder, "model.py")
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("edited_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
