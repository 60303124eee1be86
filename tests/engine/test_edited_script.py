"""Usual edits of the training script: right, or one sentence."""

import pytest
from conftest import ROOT, SMALL, launch, planted


def edited(folder, *edits):
    """A copy of train_deepspeed.py with some texts replaced, [(old, new)]; it runs as the script does."""
    text = (ROOT / "train_deepspeed.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / "train_edited.py"
    copy.write_text(text, encoding="utf-8")
    return planted(folder, "", copy)


def test_a_step_without_micro_steps_is_refused(characters, tmp_path):
    script = edited(tmp_path, ("for _ in range(gradient_accumulation_steps):", "for _ in range(0):"))
    run = launch(script, *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", ranks=2)
    assert run.returncode == 2
    assert "an optimizer step had no micro-step: call engine.micro_step() before it" in run.stderr
    assert "Traceback" not in run.stderr and "not finite" not in run.stdout + run.stderr


@pytest.mark.parametrize("options", [(), ("--accumulate_locally=False",), ("--deepspeed_config=ds_config_zero3.json",)])
def test_ranks_with_different_numbers_of_micro_steps_are_told(characters, tmp_path, options):
    script = edited(tmp_path, ("for _ in range(gradient_accumulation_steps):", "for _ in range(2 - ranks.rank):"))
    run = launch(script, *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", *options, ranks=2)
    assert run.returncode == 2
    assert "the ranks make different numbers of micro-steps in one optimizer step (2, 1): make as many" in run.stderr
    assert "Traceback" not in run.stderr
