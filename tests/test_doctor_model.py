"""doctor.py --model, and the short checks before a run: equal for a right model, and each planted
fault of model.py is found, with the function to look at."""

import json
import random
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, done, edited_script, every, launch, planted
from edited_model import GRAPHS, HEAD, edited_model

from model import GPT, GPTConfig
from runtime.check.optimizer import optimizer_in_use
from runtime.check.report import IN_PROCESS
from runtime.check.shipped import HASHES, edited_functions
from runtime.check.short import check_before_training
from runtime.check.tiny import DIFFERS, EQUAL, RAISES, Unchecked, make_check, set_seed, tiny_of
from runtime.checkpoint.model_source import hashed_parts

SHAPE = {"block_size": 32, "vocab_size": 61, "n_layer": 2, "n_head": 2, "n_embd": 32}
LN_F = "        x = self.transformer.ln_f(x)\n"
UPDATE = "            k, v = cache.update(k, v, positions)  # those of all tokens so far\n"
GELU = "        x = F.gelu(x, approximate=self.gelu)\n"
SQUARED = '''class SquaredReLU(torch.autograd.Function):
    """Of which the gradient is FACTOR times too small."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 / FACTOR * x.relu() * grad


class MLP(nn.Module):
'''
STATISTICS = [
    (HEAD, f'{HEAD}        self.register_buffer("mean_square", torch.ones(()), persistent=PERSISTENT)\n'),
    (
        LN_F,
        "        if self.training:\n"
        "            self.mean_square.lerp_(x.detach().float().square().mean(), 0.1)\n"
        f"{LN_F}        x = x * self.mean_square.rsqrt()\n",
    ),
]


def squared_relu(factor: float) -> list[tuple[str, str]]:
    """Return the edit to an autograd.Function whose gradient is so many times too small."""
    return [
        ("class MLP(nn.Module):\n", SQUARED.replace("FACTOR", str(factor))),
        (GELU, "        x = SquaredReLU.apply(x)\n"),
    ]


def statistics(persistent: bool) -> list[tuple[str, str]]:
    """Return the edit to a running mean square, which training changes."""
    return [(old, new.replace("PERSISTENT", str(persistent))) for old, new in STATISTICS]


# {fault: (edit of model.py, the check that finds it, what its sentence says)}
FAULTS = {
    "a cache that drops a key": (
        [(UPDATE, f"{UPDATE}            k, v = k[:, :, -8:], v[:, :, -8:]\n")],
        "cached logits",
        r"with a cache the model raises RuntimeError: The size .* in CausalSelfAttention\.forward, "
        r"line \d+, of token 8 with the mask of a CUDA graph",
    ),
    "a cache that forgets what is longer ago": (
        [(UPDATE, f"{UPDATE}            if mask is None:\n                k, v = k[:, :, -8:], v[:, :, -8:]\n")],
        "cached logits",
        r"of token 9: look at CausalSelfAttention\.forward \(transformer\.h\.0\.attn\)",
    ),
    "a gradient that is off": (squared_relu(2), "own gradients", "look at the backward of SquaredReLU"),
    "a loss that looks at other rows": (
        [
            (
                "        logits = self.logits(x).float()\n",
                "        logits = self.logits(x).float()\n        logits = logits - logits.amax(0)\n",
            )
        ],
        "loss",
        r"what LMHead\.losses returns for a row may not depend on the other rows",
    ),
    "a buffer that isn't saved": (
        statistics(False),
        "buffers",
        "training changes the buffer mean_square, which isn't saved",
    ),
    "a state of its own": (
        [("        self.gelu = config.gelu\n\n    def forward", """        self.gelu = config.gelu

    def get_extra_state(self):
        return 7

    def set_extra_state(self, state):
        pass

    def forward""")],
        "buffers",
        r"transformer\.h\.0\.mlp has get_extra_state \(MLP\), and checkpoints hold parameters and buffers alone",
    ),
    "a mask that sees the future": (
        [("is_causal=T > 1,", "is_causal=False,")],
        "future tokens",
        r"the mask in CausalSelfAttention\.forward \(transformer\.h\.0\.attn\)",
    ),
    "a tie that is lost on load": (
        [("        self.weight = wte.weight\n", "        self.weight = nn.Parameter(wte.weight.data)\n")],
        "shared parameters",
        r"transformer\.wte\.weight and lm_head\.weight share memory but are two parameters",
    ),
    "positions off by one in decoding": (
        [
            (
                "self.transformer.wpe(positions)\n",
                "self.transformer.wpe(positions + (caches is not None and T == 1))\n",
            )
        ],
        "cached logits",
        r"of token 8: look at GPT\.forward",
    ),
    "dropout active in eval": (
        [("dropout = self.dropout if self.training else 0.0", "dropout = self.dropout")],
        "eval mode",
        r"look at CausalSelfAttention\.forward \(transformer\.h\.0\.attn\)",
    ),
    "recompute that differs": (
        [("checkpoint(self.attn_and_mlp, x, use", "checkpoint(self.attn_and_mlp, 0.9 * x, use")],
        "recomputing",
        r"look at what GPT\.forward and Block\.forward_uncached do with recompute",
    ),
}
# What a fault also makes different
ALSO = {
    "a mask that sees the future": {"cached logits"},
    "dropout active in eval": set(),
}
RIGHT = {
    "a gradient by hand": squared_relu(1),
    "running statistics": statistics(True),
    "an untied head": [
        (HEAD, f"{HEAD}        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))\n")
    ],
    **{name: edits for name, edits in GRAPHS.items() if name != "a random block skipped"},
}
BY_DEFAULT = ("a gradient by hand", "blocks twice", "experts")


def checks_of(module) -> dict:
    """Return {check: its Result} of a model, of the checks in one process."""
    tiny = tiny_of(module.GPT, module.GPTConfig())
    return {name: make_check(name, check, tiny) for name, check in IN_PROCESS}


def statuses(results: dict, status: str) -> set[str]:
    """Return the names of the checks with a status."""
    return {name for name, result in results.items() if result.status == status}


def doctor(folder) -> tuple[int, dict]:
    """Run doctor.py --model with the model.py of a folder. Return the exit code, and {check: (status, sentence)}."""
    script = planted(folder, f"sys.path.insert(0, {str(folder)!r})", ROOT / "doctor.py")
    run = launch(script, "--model", timeout=200)
    assert "Traceback" not in run.stderr, run.stderr
    rows = re.findall(r"^(equal|differs|raises|not checked) +(\S.*?)  +(.*)$", run.stdout, re.M)
    assert len(rows) == 13, run.stdout + run.stderr
    return run.returncode, {name: (status, sentence) for status, name, sentence in rows}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    """By its own check, which names the function. The other checks say "equal"."""
    edits, check, sentence = FAULTS[fault]
    results = checks_of(edited_model(tmp_path, edits))
    assert results[check].status == DIFFERS, results[check]
    assert re.search(sentence, results[check].sentence), results[check]
    others = statuses(results, DIFFERS) - {check}
    assert others <= ALSO.get(fault, set()), results


def test_the_shipped_model_is_equal(tmp_path):
    """In all 13 checks, in one run of doctor.py. Its kernels run all blocks."""
    code, rows = doctor(tmp_path)
    assert {status for status, _ in rows.values()} == {EQUAL}, rows
    assert code == 0
    assert rows["kernels"][1].startswith("all blocks on kernels have PyTorch's loss and gradients")
    assert rows["optimizer"][1].startswith("2 steps of AdamW at ZeRO-2 and 3 are those of its own step()")


@pytest.mark.parametrize("edit", [name if name in BY_DEFAULT else every(name) for name in RIGHT])
def test_an_edited_model_is_equal(edit, tmp_path):
    """In the checks of one process. Nothing is left out."""
    results = checks_of(edited_model(tmp_path, RIGHT[edit]))
    assert statuses(results, EQUAL) == results.keys(), results


@pytest.mark.parametrize("edit", [every(name) for name in RIGHT])
def test_an_edited_model_trains_with_zero_as_in_pytorch(edit, tmp_path):
    """All 13 checks, on two ranks and after a resume on one."""
    edited_model(tmp_path, RIGHT[edit])
    code, rows = doctor(tmp_path)
    assert {status for status, _ in rows.values()} == {EQUAL}, rows
    assert code == 0


def test_a_fault_ends_doctor_with_exit_code_2(tmp_path):
    edited_model(tmp_path, FAULTS["a buffer that isn't saved"][0])
    code, rows = doctor(tmp_path)
    assert code == 2
    assert rows["buffers"][0] == DIFFERS
    # A resume begins with another mean square
    assert rows["save and resume"][0] == DIFFERS
    assert "look for tensors that training changes" in rows["save and resume"][1]


def test_what_raises_is_told(tmp_path):
    """Stochastic depth by a number that the training loop sets: training forwards raise, others don't."""
    results = checks_of(edited_model(tmp_path, GRAPHS["a random block skipped"]))
    assert not statuses(results, DIFFERS)
    assert "step" in results["recomputing"].sentence
    assert statuses(results, RAISES) == {"buffers", "own gradients", "recomputing", "kernels"}
    assert results["cached logits"].status == EQUAL


def test_the_hashes_are_those_of_model_py():
    """python -m runtime.check.shipped > runtime/check/shipped.json"""
    assert json.loads(HASHES.read_text()) == hashed_parts(str(ROOT / "model.py"))
    assert edited_functions(tiny_of(GPT, GPTConfig()).model()) == []


def test_the_optimizer_is_that_of_the_training_script(tmp_path):
    """Also of a class in the script. One whose line needs more than the doctor has is not checked, and
    says what is missing."""
    made = "adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))"
    model = GPT(GPTConfig(**SHAPE))
    kinds = {
        "adamw = torch.optim.RAdam(groups, lr=learning_rate, betas=(beta1, beta2))": "RAdam",
        "class Mine(torch.optim.SGD):\n    pass\n\n\nadamw = Mine(groups, lr=learning_rate)": "Mine",
    }
    for line, name in kinds.items():
        optimizer = optimizer_in_use(model, {}, edited_script(tmp_path, (made, line)))
        assert type(optimizer).__name__ == name
        assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    script = edited_script(tmp_path, (made, "adamw = torch.optim.SGD(groups, lr=batch.sequences * 1e-5)"))
    told = r"^the optimizer can't be made outside of train_edited.py \(NameError: name 'batch' is not defined"
    with pytest.raises(Unchecked, match=told):
        optimizer_in_use(model, {}, script)


# ---------------------------------------------------------------------------------------------
# Before the first step of a run


def test_a_run_of_the_shipped_model_is_not_checked(train):
    run = done(train("--max_iters=1"))
    assert "checked    " not in run.stdout


def test_the_checks_of_a_run_leave_its_random_numbers(tmp_path):
    """Those of PyTorch, Python and NumPy. The checks draw from all three."""

    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand()

    module = edited_model(tmp_path, squared_relu(1))
    model = module.GPT(module.GPTConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters())
    set_seed(3)
    first, second = draw(), draw()
    set_seed(3)
    assert draw() == first
    check_before_training(model, model.config, optimizer, recomputes=True)
    assert draw() == second


def test_a_run_of_an_edited_model_is_checked_in_one_line(train, tmp_path):
    """Its losses are those of a run without the checks."""
    edited_model(tmp_path, squared_relu(1))
    plant = f"sys.path.insert(0, {str(tmp_path)!r})"
    run = done(train("--max_iters=2", "--dropout=0.1", "--gradient_checkpointing=True", plant=plant))
    line = (
        "checked    a tiny model (edited: MLP.forward, SquaredReLU, SquaredReLU.forward and 1 more): "
        "equal are cached logits, loss, buffers, attributes, recomputing\n"
    )
    assert run.stdout.count(line) == 1, run.stdout
    unchecked = (
        f"{plant}\nfrom runtime.check import short\nshort.check_before_training = lambda *_, **__: None"
    )
    other = done(
        train("--max_iters=2", "--dropout=0.1", "--gradient_checkpointing=True", plant=unchecked)
    )
    assert "checked    " not in other.stdout
    assert other.losses == run.losses


def test_a_run_of_another_optimizer_is_checked(train, tmp_path):
    made = "adamw = setup.make_adamw(groups, plan.ds_config, lr"
    script = edited_script(tmp_path, (made, "adamw = torch.optim.RAdam(groups, lr"))
    run = done(train("--max_iters=1", script=script))
    line = "checked    a tiny model (optimizer RAdam): equal are cached logits, loss, buffers, attributes\n"
    assert line in run.stdout


RETURN = "        return self.lm_head(x, targets, reduction)\n"
OTHER_LOSSES = {  # what is returned, and whether it is a mean over the targets that count
    "with an auxiliary loss": ("loss + 0.1 * x.square().mean()", True),
    "two tokens ahead": ("loss + self.lm_head(x[:, :-1], targets[:, 1:], reduction)", False),
    "over all tokens": ("loss * (targets != -1).float().mean()", False),
}


@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_an_edited_loss_is_checked_if_data_has_a_loss_mask(tmp_path, capsys, loss):
    text, is_mean = OTHER_LOSSES[loss]
    training = (
        f"        loss = self.lm_head(x, targets, reduction)\n"
        f"        return loss if targets is None or not self.training else {text}\n"
    )
    module = edited_model(tmp_path, [(RETURN, training)])
    model = module.GPT(module.GPTConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters())
    check_before_training(model, model.config, optimizer, recomputes=False, masked=True)
    said = capsys.readouterr().out
    told = "note       the loss of GPT.forward is not a mean over the targets that aren't -1. This data "
    assert (told in said) == (not is_mean), said
    assert said.count("equal are cached logits, loss, buffers, attributes") == 1, said
    assert ("attributes, loss mask\n" in said) == is_mean, said


@pytest.mark.parametrize("ranks", [1, every(2)])
def test_a_run_of_a_faulty_model_ends_before_its_first_step(train, tmp_path, ranks):
    edited_model(tmp_path, FAULTS["positions off by one in decoding"][0])
    run = train("--max_iters=1", ranks=ranks, plant=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert run.returncode == 2
    told = (
        r"^cached logits \(edited: GPT\.forward\): logits with a cache are not those without, of token "
        r"8: look at GPT\.forward, and at what it does with cache, positions and mask; python doctor\.py "
        r"--model checks all$"
    )
    assert len(re.findall(told, run.stderr, re.M)) == 1, run.stderr
    assert not run.losses
