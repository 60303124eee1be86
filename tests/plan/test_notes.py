"""What the plan tells a user who may not have meant it."""

import pytest
from conftest import CHARS, ROOT, SMALL

from configurator import settings_of_script
from runtime.cluster.ranks import Ranks
from runtime.data.dataset import write_dataset
from runtime.plan.run_plan import Problems, make_plan


def notes_of(*args):
    """The notes of a run on one rank that has no problems."""
    problems = Problems()
    settings = settings_of_script(str(ROOT / "train_deepspeed.py"), [*SMALL, *args])
    plan = make_plan(settings, Ranks(0, 0, 1, 1), problems, [])
    assert problems == []
    return plan.notes


@pytest.fixture
def write(tmp_path):
    """write(name, tokens): a dataset with so many tokens for training."""

    def run(name, tokens):
        ids = [i % 28 for i in range(tokens)]
        source = {"name": name, "sha256": None, "bytes": tokens}
        write_dataset(tmp_path / name, ids, ids[:200], {"kind": "char", "chars": CHARS}, 28, source)
        return str(tmp_path / name)

    return run


def repeated(notes):
    return [note for note in notes if "epochs: use a smaller" in note]


def test_a_step_of_several_epochs_is_told_of(write):
    """1,000 tokens are 30 windows of 32 that have a next token, and a step has 2 x 80 or 2 x 15 of them."""
    small = f"--dataset={write('small', 1000)}"
    assert repeated(notes_of(small, "--gradient_accumulation_steps=80")) == [
        "small has 30 sequences of block_size=32, and each step takes 160, which are 5.3 epochs: use a smaller "
        "--gradient_accumulation_steps, or more data"]
    assert repeated(notes_of(small, "--gradient_accumulation_steps=15")) == []
    assert repeated(notes_of(small, "--gradient_accumulation_steps=80", "--eval_only=True")) == []


def test_each_dataset_of_a_mixture_has_its_own_epochs(write):
    """Of 40 sequences, 30 are of the small one, which has 15, and 10 of the large one, which has 60."""
    mixture = {write("little", 512 + 32): 3, write("large", 60 * 32 + 32): 1}
    (note,) = repeated(notes_of(f"--dataset={mixture}", "--gradient_accumulation_steps=20"))
    assert note.startswith("little has 16 sequences of block_size=32, and each step takes 30, which are 1.9 epochs")


def test_a_backslash_in_the_prompt_of_samples_is_told_of(write, monkeypatch):
    monkeypatch.setattr("runtime.plan.run_plan.tokenizer_of", lambda meta: (lambda text: list(text.encode()), None))
    notes = notes_of(f"--dataset={write('small', 1000)}", r"--sample_start=a\nb", "--sample_interval=1")
    assert (r"in --sample_start, \n is a backslash and the letter n: for a line end, write --sample_start=$'a\nb' in "
            "bash or zsh") in notes
