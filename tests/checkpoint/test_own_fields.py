"""Fields of GPTConfig that are no shape, such as the weight of an auxiliary loss, in a run that starts from a tag:
the given setting counts, and one sentence says which value is used.
"""

import shutil

import numpy as np
import pytest
from conftest import CHARS, done, edited_script
from edited_model import edited_model

from runtime.checkpoint.tag_reader import TagReader
from runtime.checkpoint.tags import TagStore
from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream

RETURN = "        return self.lm_head(x, targets, reduction)\n"
WITH_AUXILIARY = """        loss = self.lm_head(x, targets, reduction)
        if targets is None or reduction != "mean":
            return loss
        return loss + self.config.aux_weight * x.float().square().mean()
"""
DROPOUT = "    dropout: float = 0.0\n"
SETTING = ("bias: bool | None = None", "aux_weight: float | None = None  # of the loss\nbias: bool | None = None")
STEP = ("--batch_size=8", "--gradient_accumulation_steps=1")  # sequences


def auxiliary(default: float) -> list[tuple[str, str]]:
    """Return the edit of model.py that adds the mean square of the last layer to the loss."""
    return [(DROPOUT, f"{DROPOUT}    aux_weight: float = {default}\n"), (RETURN, WITH_AUXILIARY)]


def plain_loss(characters, module, out_dir, first: int, aux_weight: float) -> float:
    """The loss of iter_4's weights in plain PyTorch, on the 8 sequences of the training data from number `first` on."""
    reader = TagReader(out_dir / "iter_4", TagStore(out_dir).find("iter_4").manifest)
    shape = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = module.GPT(module.GPTConfig(**shape, vocab_size=len(CHARS), aux_weight=aux_weight))
    model.load_state_dict({name: reader.get(name) for name in model.state_dict()})
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    located = locate_sequences(np.arange(first, first + 8), [(TokenStream(tokens, 32), 1)], 1337)
    return model(*read_sequences(located, len(CHARS))).item()


@pytest.fixture
def first_run(train, tmp_path):
    """(out_dir of a run of 4 steps with aux_weight=0.01 by default, its model.py as a module, options of more runs)."""
    module = edited_model(tmp_path, auxiliary(0.01))
    options = {"plant": f"sys.path.insert(0, {str(tmp_path)!r})"}
    out_dir = done(train(*STEP, "--max_iters=4", **options)).out_dir
    return out_dir, module, options


def test_a_setting_that_is_no_shape_counts_in_a_new_run(train, characters, tmp_path, first_run):
    """Before, it was refused as another shape: --aux_weight=0.01 had to be used."""
    out_dir, module, options = first_run
    script = edited_script(tmp_path, SETTING)
    run = done(train(*STEP, f"--init_from={out_dir}/iter_4", "--aux_weight=5.0", "--max_iters=1", script=script,
                     **options))
    assert f"note       this run has aux_weight=5.0, and {out_dir}/iter_4 had aux_weight=0.01\n" in run.stdout
    assert run.losses[1] == pytest.approx(plain_loss(characters, module, out_dir, 0, 5.0), abs=2e-6)
    assert run.losses[1] - plain_loss(characters, module, out_dir, 0, 0.01) > 4  # the mean square is about 1
    assert TagStore(run.out_dir).find("iter_1").manifest["state"]["model"]["aux_weight"] == 5.0


def test_a_setting_that_is_no_shape_counts_in_a_resume(train, characters, tmp_path, first_run):
    """And in the next resume, without it."""
    out_dir, module, options = first_run
    options["script"] = edited_script(tmp_path, SETTING)
    resume = (*STEP, "--init_from=resume")
    before = shutil.copytree(out_dir, tmp_path / "before")
    run = done(train(*resume, "--aux_weight=5.0", "--max_iters=5", out_dir=out_dir, **options))
    assert f"note       this run has aux_weight=5.0, and {out_dir}/iter_4 had aux_weight=0.01\n" in run.stdout
    assert run.losses[5] == pytest.approx(plain_loss(characters, module, before, 32, 5.0), abs=2e-6)

    longer = done(train(*resume, "--max_iters=6", out_dir=out_dir, **options))
    assert "aux_weight" not in longer.stdout
    assert longer.losses[6] - run.losses[5] == pytest.approx(0, abs=0.5)
    assert TagStore(out_dir).find("iter_6").manifest["state"]["model"]["aux_weight"] == 5.0


@pytest.mark.parametrize("start", ["a new run", "a resume"])
def test_another_default_does_not_count_and_a_note_says_so(train, characters, tmp_path, first_run, start):
    """With a setting of that name, the note has it."""
    out_dir, module, _ = first_run
    (tmp_path / "other").mkdir()
    edited_model(tmp_path / "other", auxiliary(5.0))
    options = {"plant": f"sys.path.insert(0, {str(tmp_path / 'other')!r})"}
    arguments, first, options["out_dir"] = (f"--init_from={out_dir}/iter_4", "--max_iters=1"), 0, tmp_path / "new"
    if start == "a resume":
        arguments, first, options["out_dir"] = ("--init_from=resume", "--max_iters=5"), 32, tmp_path / "copy"
        shutil.copytree(out_dir, tmp_path / "copy")
        out_dir = tmp_path / "copy"
    said = (
        f"note       this run has aux_weight=0.01 of {out_dir}/iter_4: the default of GPTConfig, 5.0, is for runs "
        "from scratch"
    )

    dry = done(train(*STEP, *arguments, "--dry_run", script=edited_script(tmp_path, SETTING), **options))
    assert f"{said}; --aux_weight=5.0 changes it\n" in dry.stdout
    run = done(train(*STEP, *arguments, **options))
    assert f"{said}; add a setting aux_weight to the training script to change it\n" in run.stdout
    expected = plain_loss(characters, module, out_dir, first, 0.01)
    assert [*run.losses.values()][-1] == pytest.approx(expected, abs=2e-6)


def test_nothing_is_said_if_nothing_differs(train, tmp_path, first_run):
    out_dir, _, options = first_run
    script = edited_script(tmp_path, SETTING)
    for value in ([], ["--aux_weight=0.01"]):
        run = done(train(*STEP, f"--init_from={out_dir}/iter_4", *value, "--dry_run", script=script, **options))
        assert "aux_weight" not in run.stdout
