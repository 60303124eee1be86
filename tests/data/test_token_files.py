"""Token files that aren't nanoGPT's uint16: noticed before a run, and converted by data/prepare.py."""

import json
import pickle
import runpy
import sys

import numpy as np
import pytest
from conftest import ROOT, SOURCE

from runtime.data.dataset import Dataset, check_dataset, open_tokens, write_dataset
from runtime.errors import UserError

CHARS = {"vocab_size": 4, "itos": dict(enumerate("\nabc")), "stoi": {char: i for i, char in enumerate("\nabc")}}


def write(folder, dtype, vocab_size, pickled=None, seed=0):
    """Write nanoGPT's files with ids of another type, and return them, {split: ids}."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    ids = {"train": rng.integers(0, vocab_size, 9000), "val": rng.integers(0, vocab_size, 1000)}
    for split, own in ids.items():
        own.astype(dtype).tofile(folder / f"{split}.bin")
    if pickled:
        (folder / "meta.pkl").write_bytes(pickle.dumps(pickled))
    return ids


def prepare(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
    runpy.run_path(str(ROOT / "data" / "prepare.py"))["main"]()


def tokens_of(folder, split):
    meta = check_dataset(folder)
    return open_tokens(Dataset("", 1, folder, meta), split)


@pytest.mark.parametrize("dtype, shown", [("<u4", "uint32"), ("<i4", "uint32"), ("<i8", "int64"), ("<u8", "int64")])
@pytest.mark.parametrize("vocab_size, pickled", [(50257, None), (128_256, None), (4, CHARS)],
                         ids=["GPT-2", "Llama 3", "characters"])
def test_wider_ids_are_noticed(tmp_path, dtype, shown, vocab_size, pickled):
    write(tmp_path / "wide", dtype, vocab_size, pickled)
    with pytest.raises(UserError) as refused:
        check_dataset(tmp_path / "wide")
    said = str(refused.value)
    assert f"train.bin seems to hold {shown}, and without a meta.json it is read as uint16: run python " in said
    assert f"wide/val.bin --name=wide-converted --dtype={shown}, or with --dtype=uint16 if it does hold that" in said
    assert "\n" not in said


@pytest.mark.parametrize("vocab_size, pickled", [(50257, None), (4, CHARS), (2, CHARS)])
def test_nanogpts_own_files_are_not(tmp_path, vocab_size, pickled):
    """Of DNA, say, each second id is as small as the others, and some are 0. One short text has no pattern yet."""
    ids = write(tmp_path / "own", "<u2", vocab_size, pickled)
    assert tokens_of(tmp_path / "own", "train").tolist() == ids["train"].tolist()
    np.array([3, 0] * 20, "<u2").tofile(tmp_path / "own" / "val.bin")
    assert check_dataset(tmp_path / "own")["val_tokens"] == 40


WIDER = {"uint32 as uint16": (50257, "<u4", "uint32"), "int64 as uint16": (50257, "<i8", "int64"),
         "int64 as uint32": (100_277, "<i8", "int64")}


@pytest.mark.parametrize("has_hashes", [True, False], ids=["hashes", "no hashes"])
@pytest.mark.parametrize("case", WIDER)
def test_wider_ids_of_the_described_size_are_noticed(tmp_path, case, has_hashes):
    """meta.json names another type, and the file has exactly its number of bytes. It begins with one id, many times,
    which looks like uint16, so that only other places show what it holds."""
    vocab_size, wide, shown = WIDER[case]
    meta = write_dataset(tmp_path, np.arange(600_000) % 50_000, [1, 2] * 50, {"kind": "gpt2"}, vocab_size, SOURCE)
    n = meta["files"]["train.bin"]["bytes"] // np.dtype(wide).itemsize
    ids = np.arange(n) % 50_000
    ids[: n // 4] = 0
    ids.astype(wide).tofile(tmp_path / "train.bin")
    if not has_hashes:  # as another program may write it
        (tmp_path / "meta.json").write_text(json.dumps(meta | {"files": {}}))
    with pytest.raises(UserError) as refused:
        check_dataset(tmp_path)
    said = str(refused.value)
    assert f"train.bin seems to hold {shown}, and its meta.json says {case.split()[-1]}: restore the file that " in said
    assert "\n" not in said


def test_ids_that_only_look_wider_are_what_their_hash_says(tmp_path):
    """Each second id is 0: as uint32 these are ids, too. Without the hash there is no proof."""
    ids = [token for number in range(1, 9000) for token in (number, 0)]
    meta = write_dataset(tmp_path, ids, ids[:1000], {"kind": "gpt2"}, 50257, SOURCE)
    assert tokens_of(tmp_path, "train").tolist() == ids
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"files": {}}))
    with pytest.raises(UserError, match="train.bin seems to hold uint32, and its meta.json says uint16: "):
        check_dataset(tmp_path)


@pytest.mark.parametrize("dtype, name", [("<u4", "uint32"), ("<i4", "int32"), ("<i8", "int64"), ("<u2", "uint16")])
@pytest.mark.parametrize("vocab_size, pickled", [(50257, None), (4, CHARS)], ids=["GPT-2", "characters"])
def test_files_of_any_type_are_converted(tmp_path, monkeypatch, capsys, dtype, name, vocab_size, pickled):
    """From the folder, in which other files are left out with a note, with the characters of its meta.pkl."""
    ids = write(tmp_path / "wide", dtype, vocab_size, pickled)
    (tmp_path / "wide" / "prepare.py").write_text("raise SystemExit")
    prepare(monkeypatch, tmp_path / "wide", f"--name={tmp_path / 'out'}", f"--dtype={name}")
    others = ["meta.pkl", "prepare.py"] if pickled else ["prepare.py"]
    listed = ", ".join(str(tmp_path / "wide" / other) for other in others)
    assert f"note: left out, as they are no token files by name: {listed}\n" in capsys.readouterr().out
    meta = check_dataset(tmp_path / "out")
    assert meta["tokenizer"] == ({"kind": "char", "chars": "\nabc"} if pickled else {"kind": "gpt2"})
    assert (meta["vocab_size"], meta["dtype"]) == (vocab_size, "uint16")
    for split, own in ids.items():
        assert tokens_of(tmp_path / "out", split).tolist() == own.tolist()


def test_a_large_vocabulary_is_kept_in_uint32(tmp_path, monkeypatch):
    """nanoGPT's meta.pkl may say no more than its size. As uint16, the ids can't be right, whatever they are."""
    size = {"vocab_size": 100_277}
    ids = write(tmp_path / "wide", "<u4", 100_277, size)
    prepare(monkeypatch, tmp_path / "wide", f"--name={tmp_path / 'out'}", "--dtype=uint32")
    meta = check_dataset(tmp_path / "out")
    assert (meta["vocab_size"], meta["dtype"]) == (100_277, "uint32")
    assert tokens_of(tmp_path / "out", "train").tolist() == ids["train"].tolist()
    write(tmp_path / "cut", "<u2", 50_000, size)
    with pytest.raises(UserError, match="cut/train.bin is read as uint16 without a meta.json, but a vocabulary of "
                                        "100,277 doesn't fit: run python .* --dtype=uint32$"):
        check_dataset(tmp_path / "cut")


def test_arrays_of_any_whole_numbers_are_copied(tmp_path, monkeypatch):
    """An .npy file says its type. A test split is left out, or validated on if there is no other."""
    ids = {split: np.random.default_rng(i).integers(0, 50257, 500) for i, split in enumerate(("train", "test", "dev"))}
    (tmp_path / "s").mkdir()
    for split, dtype in ("train", "<i8"), ("test", ">u4"), ("dev", "<i4"):
        np.save(tmp_path / "s" / f"{split}_0.npy", ids[split].astype(dtype))
    prepare(monkeypatch, tmp_path / "s", f"--name={tmp_path / 'out'}")
    assert tokens_of(tmp_path / "out", "train").tolist() == ids["train"].tolist()
    assert tokens_of(tmp_path / "out", "val").tolist() == ids["dev"].tolist()
    (tmp_path / "s" / "dev_0.npy").unlink()
    prepare(monkeypatch, tmp_path / "s", f"--name={tmp_path / 'out'}", "--overwrite")
    assert tokens_of(tmp_path / "out", "val").tolist() == ids["test"].tolist()


@pytest.mark.parametrize("dtype, given, message", [
    ("<i8", "uint32", r"train.bin is no shard of tokens \(it seems to hold int64, not uint32\): "),
    ("<i8", "int32", r"\(it seems to hold int64, not int32\): "),
    ("<u4", "int64", r"train.bin has token \d{10,}, which isn't one of GPT-2's: download it again, or name its token"),
    ("<u2", "uint32", r"train.bin has token \d{6,}, which isn't one of GPT-2's: "),
    ("<u4", None, r"\(its header begins with \[.*\], not \[20240520, 1\]\): .* name its type with --dtype"),
    ("odd", "uint32", r"\(its 9,001 bytes are no multiple of the 4 of uint32\): ")],
    ids=["int64 as uint32", "int64 as int32", "uint32 as int64", "uint16 as uint32", "no type", "an odd size"])
def test_another_type_than_the_files_have_is_refused(tmp_path, monkeypatch, dtype, given, message):
    write(tmp_path / "wide", "<u2" if dtype == "odd" else dtype, 50257)
    if dtype == "odd":
        (tmp_path / "wide" / "train.bin").write_bytes(bytes(9001))
    with pytest.raises(UserError, match=message):
        prepare(monkeypatch, tmp_path / "wide", f"--name={tmp_path / 'out'}", *[f"--dtype={given}"] * bool(given))
    assert not list(tmp_path.glob("out/[!.]*"))


def test_the_rest_of_what_cannot_be_meant(tmp_path, monkeypatch, capsys):
    write(tmp_path / "wide", "<u4", 50257)
    out = f"--name={tmp_path / 'out'}"
    with pytest.raises(UserError, match="^shards have no characters: leave out --tokenizer=char$"):
        prepare(monkeypatch, tmp_path / "wide", out, "--dtype=uint32", "--tokenizer=char")
    np.save(tmp_path / "train.npy", np.arange(9))
    with pytest.raises(UserError, match="^--dtype=int64 is for .bin files without a header, and all of these say their "
                                        "type: drop it$"):
        prepare(monkeypatch, tmp_path / "train.npy", out, "--dtype=int64")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="^--dtype is for token files"):
        prepare(monkeypatch, tmp_path / "a.txt", out, "--dtype=uint32")
    prepare(monkeypatch, tmp_path / "wide", out, "--dtype=uint16")
    assert f"note: {tmp_path}/wide/train.bin seems to hold uint32, and is read as uint16\n" in capsys.readouterr().out
    more = f"--name={tmp_path / 'more'}"
    with pytest.raises(UserError, match="out has a meta.json, which says the type: train on it as it is"):
        prepare(monkeypatch, tmp_path / "out", more, "--dtype=uint16")
    (tmp_path / "out" / "meta.json").unlink()  # its characters, say, would be taken for GPT-2's tokens
    with pytest.raises(UserError, match="out/meta.pkl is of a dataset with a meta.json: restore that, or prepare"):
        prepare(monkeypatch, tmp_path / "out", more, "--dtype=uint16")
    write(tmp_path / "letters", "<u4", 4, CHARS)
    with pytest.raises(UserError, match="^the folders of these files have different vocabularies: prepare them apart$"):
        prepare(monkeypatch, tmp_path / "letters", tmp_path / "wide", more, "--dtype=uint32")


@pytest.mark.parametrize("content, message", [
    (np.array([20240520, 1, 2000, *[0] * 253], "<i4").tobytes() + bytes(4000), "train.bin is a shard of llm.c, with a "
     "header: run python .*data/prepare.py .*own/train.bin .*own/val.bin --name=own-converted$"),
    (b"\x93NUMPY" + bytes(4000), r"train.bin is a NumPy array, with a header: rename it to .npy, and run python "
     r".*own/train.npy .*own/val.npy --name=own-converted$")])
def test_a_header_is_not_taken_for_tokens(tmp_path, content, message):
    write(tmp_path / "own", "<u2", 50257)
    (tmp_path / "own" / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_dataset(tmp_path / "own")
