"""Tags of an edited model.py: ties, buffers, fields of GPTConfig, and the source that they record.

Each run is resumed from two ranks on one. Its losses are those of a run that never stopped.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, done, edited_script, launch, planted, stage
from edited_model import GRAPHS, HEAD, edited_model

from runtime.checkpoint.shards import TagReader
from runtime.checkpoint.tags import TagStore

# Tables of rotary positions (Su et al., 2021). persistent: whether a state_dict has them
ROPE = """        self.backends = None  # chosen at the first forward on CUDA
        head_size = config.n_embd // config.n_head
        rates = 10000.0 ** (-torch.arange(0, head_size, 2).float() / head_size)
        angles = torch.outer(torch.arange(config.block_size).float(), rates)
        self.register_buffer("cos", angles.cos(), persistent=PERSISTENT)
        self.register_buffer("sin", angles.sin(), persistent=PERSISTENT)

    def rope(self, x, positions):
        cos = self.cos[positions]
        sin = self.sin[positions]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)
"""
BACKENDS = "        self.backends = None  # chosen at the first forward on CUDA\n"
CONTEXT = "        backends = contextlib.nullcontext()\n"
ROTATE = f"""        if positions is None:
            positions = torch.arange(T, device=x.device)
        q = self.rope(q, positions)
        k = self.rope(k, positions)
{CONTEXT}"""
LN_F = "        x = self.transformer.ln_f(x)\n"

EDITS = {
    "an untied head": [
        (HEAD, f"{HEAD}        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))\n")
    ],
    "one MLP": GRAPHS["one MLP"],
    "blocks shared in pairs": GRAPHS["blocks shared in pairs"],
    # The position embeddings are used a second time, before the last layer norm
    "positions twice": [
        (HEAD, f"{HEAD}        self.last_positions = nn.Embedding(config.block_size, config.n_embd)\n"
               "        self.last_positions.weight = self.transformer.wpe.weight\n"),
        (LN_F, "        x = self.transformer.ln_f(x + self.last_positions(positions))\n"),
    ],
    "RoPE": [(BACKENDS, ROPE.replace("PERSISTENT", "False")), (CONTEXT, ROTATE)],
    "RoPE, persistent": [(BACKENDS, ROPE.replace("PERSISTENT", "True")), (CONTEXT, ROTATE)],
    # A table that a module has as a plain attribute
    "slopes": [
        (BACKENDS, f"{BACKENDS}        self.slopes = 0.5 ** torch.arange(1.0, config.n_head + 1)\n"),
        (CONTEXT, f"        q = q * self.slopes[:, None, None]\n{CONTEXT}"),
    ],
    # The mean square of the residual stream in training, by which the head's input is divided
    "running statistics": [
        (HEAD, f'{HEAD}        self.register_buffer("mean_square", torch.ones(()))\n'),
        (LN_F, "        if self.training:\n"
               "            self.mean_square.lerp_(x.detach().float().square().mean(), 0.1)\n"
               f"{LN_F}        x = x * self.mean_square.rsqrt()\n"),
    ],
}
LENGTHS = ("--n_layer=4", "--lr_decay_iters=6", "--eval_interval=3", "--keep_last=10")
HALF = ("--max_iters=3",)
WHOLE = ("--max_iters=6",)
ON_TWO = ("--batch_size=2", "--gradient_accumulation_steps=2")
ON_ONE = ("--batch_size=2", "--gradient_accumulation_steps=4")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(edit): a folder with the model.py of this edit."""
    folders = {}

    def folder(edit):
        if edit not in folders:
            folders[edit] = tmp_path_factory.mktemp("edited")
            edited_model(folders[edit], EDITS[edit])
        return folders[edit]

    return folder


def plant(folder: Path) -> str:
    """Return the code that lets a script take the model.py of a folder."""
    return f"sys.path.insert(0, {str(folder)!r})"


def script_with(folder: Path, tmp_path: Path, name: str) -> Path:
    """Return a script of the project that takes the model.py of a folder."""
    (tmp_path / name).mkdir(exist_ok=True)
    return planted(tmp_path / name, plant(folder), ROOT / name)


def reader_of(out_dir, tag: str) -> TagReader:
    return TagReader(out_dir / tag, TagStore(out_dir).find(tag).manifest)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("edit", EDITS)
def test_a_run_goes_on_on_one_rank(train, folder_of, tmp_path, edit, n):
    options = {"plant": plant(folder_of(edit)), "timeout": 100}
    whole = done(train(*LENGTHS, *WHOLE, *ON_TWO, stage(n), ranks=2, **options))
    half = done(train(*LENGTHS, *HALF, *ON_TWO, stage(n), ranks=2, **options))
    before = shutil.copytree(half.out_dir, tmp_path / "half")

    # On as many ranks, to the last bit. Statistics are those of rank 0
    again = done(train(*LENGTHS, *WHOLE, *ON_TWO, "--init_from=resume", stage(n), ranks=2,
                       out_dir=half.out_dir, **options))
    if edit == "running statistics":
        assert [*again.losses.values()] == pytest.approx([*whole.losses.values()], abs=1e-3)
    else:
        assert again.losses == whole.losses
        ours, theirs = reader_of(again.out_dir, "iter_6"), reader_of(whole.out_dir, "iter_6")
        for name in theirs.tensors().params:
            for field in theirs.fields(name):
                assert torch.equal(ours.get(name, field), theirs.get(name, field)), (name, field)

    # On one rank, at the other stage
    one = done(train(*LENGTHS, *WHOLE, *ON_ONE, "--init_from=resume", stage(5 - n), out_dir=before, **options))
    within = 1e-3 if edit == "running statistics" else 2e-6
    assert [*one.losses.values()] == pytest.approx([*whole.losses.values()], abs=within)
