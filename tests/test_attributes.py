"""State in plain attributes of a model's modules: no checkpoint has it, and a note reports it before the first step."""

import pytest
from conftest import done, edited_script
from edited_model import GRAPHS, edited_model

from runtime.check.attributes import lost_attributes
from runtime.check.tiny import tiny_of

INIT = "        self.gelu = config.gelu\n\n    def forward"
GELU = "        x = F.gelu(x, approximate=self.gelu)\n"
OPTIONS = ("--max_iters=8", "--lr_decay_iters=8", "--eval_interval=4", "--keep_last=10", "--grad_clip=0",
           "--learning_rate=1e-2", "--optimizer=adamw")


def in_mlp(made: str, forward: str) -> list[tuple[str, str]]:
    """Return the edit of MLP that makes an attribute, and the lines of its forward after the GELU."""
    lines = forward.splitlines()
    return [
        (INIT, INIT.replace("\n\n", f"\n        {made}\n\n")),
        (GELU, GELU + "".join(f"        {line}\n" for line in lines)),
    ]


DIVIDE = "x = x / (self.usage + 1e-3)"
IN_ATTRIBUTE = in_mlp(
    "self.usage = torch.tensor(1.0)",
    f"""if self.training:
    self.usage = 0.5 * self.usage + 0.5 * x.detach().float().square().mean()
{DIVIDE}""",
)
IN_BUFFER = in_mlp(
    'self.register_buffer("usage", torch.tensor(1.0))',
    f"""if self.training:
    self.usage.lerp_(x.detach().float().square().mean(), 0.5)
{DIVIDE}""",
)
SAID = (
    "note       training changes transformer.h.0.mlp.usage, transformer.h.1.mlp.usage and 2 more, and no checkpoint "
    "has plain attributes: unless your loop sets them, a resume begins with their first values, and has other losses "
    'than a run that never stopped; use self.register_buffer("usage", torch.tensor(...)), and change it in place\n'
)


def train_twice(train, folder, edits):
    """Return (a run of 8 steps, the same one stopped after 4 and resumed, all that was printed) of an edited model."""
    edited_model(folder, edits)
    options = {"plant": f"sys.path.insert(0, {str(folder)!r})"}
    whole = done(train(*OPTIONS, **options))
    half = done(train(*OPTIONS, "--max_iters=4", **options))
    resumed = done(train(*OPTIONS, "--init_from=resume", out_dir=half.out_dir, **options))
    return whole, resumed, whole.stdout + half.stdout + resumed.stdout


def test_a_run_says_that_an_attribute_is_lost_and_its_fix_keeps_it(train, tmp_path):
    """The attribute: each of the three runs says it once, and the resumed losses are others by up to 0.1. The buffer
    that the sentence asks for: nothing is said, and they are the same."""
    whole, resumed, said = train_twice(train, tmp_path, IN_ATTRIBUTE)
    assert said.count(SAID) == said.count("plain attributes") == 3, said
    gap = max(abs(resumed.losses[i] - whole.losses[i]) for i in range(5, 9))
    assert 1e-4 < gap < 1

    folder = tmp_path / "buffer"
    folder.mkdir()
    whole, resumed, said = train_twice(train, folder, IN_BUFFER)
    assert "plain attributes" not in said
    assert resumed.losses == whole.losses


# {edit: (what it does in MLP, the attributes that are lost, whether a loss depends on them)}
STATES = {
    "a number": (
        ("self.mean = 1.0", "self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean().item()\nx = x * self.mean"),
        "mean",
        True,
    ),
    "a tensor, in place": (
        ("self.mean = torch.ones(())", "self.mean.lerp_(x.detach().abs().mean(), 0.1)\nx = x * self.mean.clone()"),
        "mean",
        True,
    ),
    "made by the first forward": (
        ("self.last = None", "if self.last is not None:\n    x = x + 0.1 * self.last\nself.last = x.detach().mean()"),
        "last",
        True,
    ),
    "a window of values": (
        ("self.window = []", "self.window.append(x.detach().abs().mean())\nx = x * sum(self.window)"),
        "window",
        True,
    ),
    "a counter": (("self._calls = 0", "self._calls += 1"), "_calls", False),
    "a sum for the log": (
        ("self.count = torch.zeros(())", "self.count += (x.detach() > 0).sum()"),
        "count",
        False,
    ),
    # These are set anew by the next forward, or don't change
    "an output": (("self.aux = 0.0", "self.aux = x.square().mean()\nx = x + self.aux"), None, False),
    "a figure for the log": (("self.norm = None", "self.norm = x.detach().norm().item()"), None, False),
    "a table": (
        ("self.table = None", "if self.table is None:\n    self.table = torch.arange(x.size(-1))\nx = x + self.table"),
        None,
        False,
    ),
    "a time": (
        ("self.seconds = 0.0", "import time\nself.seconds += time.perf_counter_ns() % 1000"),
        None,
        False,
    ),
    "a list for the log": (("self.norms = []", "self.norms.append(x.detach().norm().item())"), None, False),
    "what the loop sets": (("self.weight_of_loss = 0.5", "x = x * self.weight_of_loss"), None, False),
    "its number": (
        ("MLP.count = getattr(MLP, 'count', 0) + 1\n        self.number = MLP.count", "x = x + 0 * self.number"),
        None,
        False,
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_what_is_lost(tmp_path, state):
    edit, name, changes_loss = STATES[state]
    module = edited_model(tmp_path, in_mlp(*edit))
    lost = lost_attributes(tiny_of(module.GPT, module.GPTConfig(n_layer=2, n_head=2, n_embd=32)))
    names = [f"transformer.h.{i}.mlp.{name}" for i in range(4)] if name else []
    assert (lost.names, lost.changes_loss) == (names, changes_loss)


@pytest.mark.parametrize("edit", [edit for edit in GRAPHS if edit != "a random block skipped"])
def test_usual_edits_lose_nothing(tmp_path, edit):
    """Among them experts, with an auxiliary loss in an attribute."""
    module = edited_model(tmp_path, GRAPHS[edit])
    assert lost_attributes(tiny_of(module.GPT, module.GPTConfig())).names == []


def test_a_schedule_of_the_loop_is_not_lost(train, tmp_path):
    """It is set before each step, so a resumed run has the losses of one that never stopped."""
    edited_model(tmp_path, in_mlp("self.scale = 1.0", "x = x * self.scale"))
    plant = f"sys.path.insert(0, {str(tmp_path)!r})"
    before = "    # one optimizer step\n"
    sets = "    for block in model.transformer.h:\n        block.mlp.scale = 1 + 0.1 * iter_num\n"
    script = edited_script(tmp_path, (before, sets + before))
    whole = done(train(*OPTIONS, plant=plant, script=script))
    half = done(train(*OPTIONS, "--max_iters=4", plant=plant, script=script))
    resumed = done(train(*OPTIONS, "--init_from=resume", out_dir=half.out_dir, plant=plant, script=script))
    assert resumed.losses == whole.losses
    assert "plain attributes" not in whole.stdout + resumed.stdout
    assert "equal are cached logits, loss, buffers, attributes\n" in whole.stdout
