"""data/prepare.py: which split each file is for, as --val and the names of the files say."""

import json
import runpy
import sys

import pytest
from conftest import ROOT
from test_prepare import expected_chars, hashes_of, ids_of, made_up

from runtime.errors import UserError

SCRIPT = ROOT / "data" / "prepare.py"


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """Run data/prepare.py here, and return (its output, meta.json, {split: text})."""
    monkeypatch.chdir(tmp_path)

    def run(*args, name="out"):
        command = ["prepare.py", *map(str, args), f"--name=./{name}", "--tokenizer=char", "--overwrite"]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(SCRIPT))["main"]()
        meta, ids = ids_of(tmp_path / name)
        chars = meta["tokenizer"]["chars"]
        return capsys.readouterr().out, meta, {split: "".join(chars[i] for i in own) for split, own in ids.items()}

    return run


def write(folder, **texts):
    """Write {name: text} to a folder, with "__" for a dot and "/" for "_in_"."""
    for name, text in texts.items():
        path = folder / name.replace("_in_", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_val_is_validated_on_and_nothing_of_it_is_trained_on(prepare, tmp_path):
    """It is in the folder of the others. A text that is in both counts as a duplicate where it would be trained on,
    although its file comes first by name."""
    shared = "in both"
    write(tmp_path, c_in_a__txt="one", c_in_b__txt=shared, c_in_valid__jsonl="".join(
        json.dumps({"text": text}) + "\n" for text in (shared, "three")))
    said, meta, texts = prepare("c", "--val=c/valid.jsonl")
    assert texts == {"train": "one\n", "val": "in both\nthree\n"}
    assert said.startswith("3 files, 48 bytes; 1 of them for validation; ")
    assert meta["documents"] == {"train": 1, "val": 2, "duplicates": 1, "empty": 0, "unreadable": 0}
    options = {key: meta["options"][key] for key in ("paths", "split_by", "val", "val_fraction")}
    assert options == {"paths": ["c"], "split_by": "val", "val": ["c/valid.jsonl"], "val_fraction": None}
    made = hashes_of(tmp_path / "out")
    said, *_ = prepare("c", "--val=c/valid.jsonl", "--workers=1")
    assert "; 1 worker\ntrain: 4 tokens in 1 document\nval: 14 tokens in 2 documents\n" in said
    assert "\nskipped: 1 duplicate\n" in said
    assert hashes_of(tmp_path / "out") == made


def test_several_val_files_and_folders_in_order(prepare, tmp_path):
    write(tmp_path, a__txt="one", d_in_x__txt="two<|endoftext|>three", e__txt="four")
    _, _, texts = prepare("a.txt", "--val=d", "--val=e.txt")
    assert texts == {"train": "one\n", "val": "two\nthree\nfour\n"}


def test_conversations_are_split_by_files_too(prepare, tmp_path):
    line = json.dumps({"prompt": "Hi", "completion": "{}"}) + "\n"
    write(tmp_path, a__jsonl=line.replace("{}", "one"), b__jsonl=line.replace("{}", "two"))
    _, meta, texts = prepare("a.jsonl", "--val=b.jsonl", "--format=chat")
    assert (texts["train"], texts["val"]) == ("User:\nHi\n\nAssistant:\none\x03", "User:\nHi\n\nAssistant:\ntwo\x03")


NAMED = [  # {file: split, or None if it is left out}
    {"a-train.txt": "train", "a-valid.txt": "val"},
    {"train.txt": "train", "validation.txt": "val", "test.txt": None},
    {"train.txt": "train", "test.txt": "val"},
    {"wiki.train.tokens": "train", "wiki.valid.tokens": "val", "wiki.test.tokens": None, "README": "train"},
    {"train/a.txt": "train", "train/b.txt": "train", "dev/a.txt": "val"},
    {"data/en/train-00000-of-00001.txt": "train", "data/en/test-00000-of-00001.txt": "val"},
    {"my_training_set.txt": "train", "my_eval_set.txt": "val", "test_train.txt": "train"}]


@pytest.mark.parametrize("files", NAMED, ids=lambda files: " ".join(files))
def test_names_split_the_files(prepare, tmp_path, files):
    for file in files:
        path = tmp_path / "dev-test-val" / file  # the folder above says nothing: all files are in it
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {file}")
    said, meta, texts = prepare("dev-test-val")
    for split in ("train", "val"):
        own = [f"text of {file}\n" for file in sorted(files) if files[file] == split]
        assert sorted(texts[split].splitlines(keepends=True)) == sorted(own)
    assert meta["options"]["split_by"] == "names"
    validated = [f"dev-test-val/{file}" for file in sorted(files) if files[file] == "val"]
    assert meta["options"]["val"] == validated
    left_out = [file for file in files if files[file] is None]
    note = next(line for line in said.splitlines() if line.startswith("note: "))
    assert note.startswith(f"note: split by the names of the files: {', '.join(validated)} for validation")
    assert ("left out" in note) == bool(left_out) and all(file in note for file in left_out)


UNCLEAR = [["a.txt", "b.txt", "valid.txt"], ["a.txt", "test-drive.txt"],
           ["train.txt", "test.txt", "1.txt", "2.txt", "3.txt"]]


@pytest.mark.parametrize("files", UNCLEAR, ids=" ".join)
def test_names_that_are_not_clear_are_refused_with_both_ways(prepare, tmp_path, files):
    for number, file in enumerate(files):
        (tmp_path / file).write_text("<|endoftext|>".join(f"{n} of text {number}" for n in range(20)))
    held_out = next(file for file in files if file.startswith(("valid", "test")))
    with pytest.raises(UserError) as refused:
        prepare(*files)
    assert str(refused.value) == (f"{held_out} says validation or test by name: add --val={held_out}, or split all "
                                  "documents with --val_fraction=0.1")
    assert not (tmp_path / "out").exists()
    said, meta, _ = prepare(*files, "--val_fraction=0.5")
    assert sum(meta["documents"].values()) == 20 * len(files) and meta["options"]["split_by"] == "fraction"
    assert f"note: {held_out} says validation or test by name, but --val_fraction=0.5 splits all documents" in said
    said, _, texts = prepare(*files, f"--val={held_out}")
    assert texts["val"] == "".join(f"{n} of text {files.index(held_out)}\n" for n in range(20)) and "note" not in said


def test_files_whose_names_say_nothing_or_all_the_same_are_split_by_document(prepare, tmp_path):
    texts = made_up(60)
    for name in "train_1.txt", "train_2.txt", "contest.txt", "invalid.txt", "devil.txt":
        (tmp_path / name).write_text("".join(f"{text}<|endoftext|>\n" for text in texts))
    for files in (["train_1.txt", "train_2.txt"], ["contest.txt", "invalid.txt", "devil.txt"]):
        said, meta, _ = prepare(*files, "--val_fraction=0.3")
        assert ids_of(tmp_path / "out")[1] == expected_chars(texts)[1] and "note" not in said


def test_a_test_file_that_val_does_not_name_is_told_of(prepare, tmp_path):
    write(tmp_path, c_in_train__txt="one", c_in_valid__txt="two", c_in_test__txt="three")
    said, _, texts = prepare("c", "--val=c/valid.txt")
    assert texts["train"] == "three\none\n"
    assert "note: c/test.txt says validation or test by name, and --val doesn't name it, so it is trained on: " in said


@pytest.mark.parametrize("args, message", [
    (["a.txt", "--val=a.txt"], "^--val names all files, so none is left to train on: name others$"),
    (["a.txt", "--val=b.txt", "--val_fraction=0.1"], "^--val and --val_fraction can't be combined: drop one$"),
    (["-", "--val=-"], "^standard input is named twice, for training and for validation: drop one$"),
    (["a.txt", "--val=nowhere"], "^nowhere is not a file or folder"),
    (["a.txt", "--val=empty.txt"], r"^training has 1 document and validation 0 \(skipped: 1 empty\), and each needs "
     "one: add a file with other texts for validation with --val=PATH$"),
    (["a.txt", "--val=b.txt"], r"^training has 0 documents and validation 1 \(skipped: 1 duplicate\), and each needs "
     "one: add a file with other texts for training$"),
    (["s.bin", "--val=a.txt"], "^shards have their tokens and splits already: leave out --val$")])
def test_what_cannot_be_meant_is_refused(prepare, tmp_path, args, message):
    write(tmp_path, a__txt="one", b__txt="one", empty__txt=" \n\n", s__bin="")
    with pytest.raises(UserError, match=message):
        prepare(*args)
