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


@pytest.mark.parametrize("wanted", ["1 if iter_num < 3 else 2", "3", "0"])
def test_a_step_with_another_number_of_micro_steps_is_refused(characters, tmp_path, wanted):
    """DeepSpeed would not step. Before, "the gradient is not finite; step skipped" was printed, with exit code 0."""
    script = edited(tmp_path, ("for _ in range(gradient_accumulation_steps):", f"for _ in range({wanted}):"))
    run = launch(script, *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", ranks=2)
    assert run.returncode == 2
    made = wanted[0]
    told = f"an optimizer step had {made} micro-steps, but gradient_accumulation_steps=2: make as many in each step"
    assert told in run.stderr
    assert "Traceback" not in run.stderr and "not finite" not in run.stdout + run.stderr
