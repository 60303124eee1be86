"""Datasets, tokenizers and folders of others: no code of theirs runs, nothing hangs, and each gets one sentence."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
from conftest import SOURCE

from runtime.data import download
from runtime.data.dataset import check_dataset, write_dataset
from runtime.errors import UserError

pytestmark = pytest.mark.timeout(60)  # what is refused is refused at once, and the fault is mostly a hang


def sentence(function, *args):
    """The UserError of a call, which is one line."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def chats(tmp_path):
    """A dataset of conversations, 50 and 9 characters."""
    folder = tmp_path / "set"
    masks = {"train_mask.bin": [bytes([2] * 50)], "val_mask.bin": [bytes([2] * 9)]}
    write_dataset(folder, [0, 1] * 25, [1] * 9, {"kind": "char", "chars": "ab"}, 2, SOURCE, masks, template="x")
    return folder


@pytest.fixture
def letters(tmp_path):
    """A dataset as nanoGPT's scripts leave it, 4 and 2 characters."""
    folder = tmp_path / "letters"
    folder.mkdir()
    np.array([0, 1, 2, 1], np.uint16).tofile(folder / "train.bin")
    np.array([2, 1], np.uint16).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 3, "itos": {0: "a", 1: "b", 2: "c"}}))
    return folder


def make_fifo(path):
    os.mkfifo(path)


def make_link_to_zeros(path):
    path.symlink_to("/dev/zero")


def make_link_to_fifo(path):
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


NO_FILES = pytest.mark.parametrize("make", [make_fifo, make_link_to_zeros, make_link_to_fifo])


@pytest.mark.parametrize("python_path", ["", ".", f"{os.pathsep}/nowhere"], ids=["none", "relative", "empty entry"])
def test_pip_is_not_imported_from_the_working_directory(tmp_path, monkeypatch, python_path):
    mark = tmp_path / "mark"
    (tmp_path / "pip.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # it fails without asking anybody
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    _, read = download.wheel("no-such-package==1", [])
    with pytest.raises(OSError, match="No matching distribution found for no-such-package==1"):
        read()
    assert not mark.exists()


@NO_FILES
@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin", "train_mask.bin", "val_mask.bin"])
def test_a_pipe_or_a_device_in_a_dataset_is_refused(chats, make, name):
    check_dataset(chats)
    (chats / name).unlink()
    make(chats / name)
    assert f"{name} is a pipe or a device, not a file: replace it with a file" in sentence(check_dataset, chats)


@NO_FILES
@pytest.mark.parametrize("name", ["meta.pkl", "train.bin", "val.bin"])
def test_a_pipe_or_a_device_in_nanogpts_dataset_is_refused(letters, make, name):
    assert check_dataset(letters)["tokenizer"]["chars"] == "abc"
    (letters / name).unlink()
    make(letters / name)
    assert f"{name} is a pipe or a device, not a file: replace it with a file" in sentence(check_dataset, letters)


def test_a_dataset_of_links_to_files_is_read(chats, tmp_path):
    whole = shutil.copytree(chats, tmp_path / "whole")
    for path in chats.iterdir():
        path.unlink()
        path.symlink_to(whole / path.name)
    assert check_dataset(chats) == check_dataset(whole)


def test_a_file_of_an_implausible_size_is_refused(chats):
    os.truncate(chats / "meta.json", 10**12)
    assert "meta.json has 1,000,000,000,000 bytes, and at most 64,000,000 are plausible" in sentence(
        check_dataset, chats)


@pytest.mark.parametrize("changed, words", [
    ({"vocab_size": 2**24 + 1}, "vocab_size is 16777217: Input should be less than or equal to 16777216"),
    ({"vocab_size": True}, "vocab_size is True: Input should be a valid integer"),
    ({"train_tokens": "50"}, "train_tokens is '50': Input should be a valid integer"),
    ({"train_tokens": 2**60}, "train_tokens is 1152921504606846976: Input should be less"),
    ({"val_tokens": -1}, "val_tokens is -1: Input should be greater"),
    ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2': Input should be a valid dictionary"),
    ({"tokenizer": {"kind": ["gpt2"]}}, "tokenizer.kind is ['gpt2']: Input should be a valid string"),
    ({"tokenizer": {"kind": "char", "chars": [1, 2]}}, "tokenizer.chars is [1, 2]: Input should be a valid string"),
    ({"tokenizer": {"kind": "char", "chars": "abc"}}, "its 3 characters don't make a vocabulary of 2"),
    ({"tokenizer": {"kind": "char", "chars": "a\ud800"}}, "surrogates not allowed"),
    ({"tokenizer": {"kind": "char", "chars": "ab", "end_of_text": 2}}, "its end of text, token 2, is outside its voc"),
    ({"tokenizer": {"kind": "hf", "end_of_text": 0}}, "its tokenizer has no sha256"),
    ({"tokenizer": {"kind": "hf", "sha256": 5}}, "tokenizer.sha256 is 5: Input should be a valid string"),
    ({"template": {"a": 1}}, "template is {'a': 1}: Input should be a valid string"),
    ({"files": {"train.bin": "x"}}, "files.train.bin is 'x': Input should be a valid dictionary"),
    ({"format": 10**399}, "it holds a number of 400 digits"),
    ({"source": [[]]}, "it is nested more than 50 deep")])
def test_a_meta_json_of_other_types_or_sizes_is_refused(chats, changed, words):
    meta = json.loads((chats / "meta.json").read_text())
    text = json.dumps(meta | changed).replace("[[]]", "[" * 100_000 + "]" * 100_000)
    (chats / "meta.json").write_text(text)
    message = sentence(check_dataset, chats)
    assert "meta.json can't be used (" in message and words in message
    assert message.endswith(f"data/prepare.py PATH --name={chats} --overwrite")


PICKLES = {
    "a length of 2**60": (b"\x80\x04\x8e" + bytes(7) + b"\x10.", "expected 1152921504606846976 bytes"),
    "a memo of 1 GB": (b"\x80\x04}r\xff\xff\xff\x03.", "its memo has an entry 67108863 after 2 operations"),
    "nested lists": (b"\x80\x04" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
                     "RecursionError: "),
    "nested tuples as a key": (b"\x80\x04})" + b"\x85" * 10**6 + b"K\x01s.", "it holds EMPTY_TUPLE, but a meta.pkl"),
    "long numbers": (pickle.dumps({"vocab_size": 10**400}), "it holds LONG1, but a meta.pkl holds only dicts"),
    "a bytearray": (pickle.dumps(bytearray(5), protocol=5), "it holds BYTEARRAY8, but a meta.pkl holds only dicts"),
    "cut": (b"\x80\x04}", "pickle exhausted before seeing STOP"),
    "a vocabulary of 2**30": (pickle.dumps({"vocab_size": 2**30, "itos": {}}), "vocab_size is 1073741824: Input"),
    "words": (pickle.dumps({"vocab_size": 1, "itos": {0: "ab"}}), "itos.0 is 'ab': String should have at most 1 char"),
    "half a character": (pickle.dumps({"vocab_size": 1, "itos": {0: "\ud800"}}), "itos.0 is "),
    "no dict": (pickle.dumps("described_by"), "its content is 'described_by': Input should be a valid dictionary")}


@pytest.mark.parametrize("content, words", PICKLES.values(), ids=PICKLES)
def test_a_meta_pkl_that_is_a_bomb_is_refused(letters, content, words):
    (letters / "meta.pkl").write_bytes(content)
    message = sentence(check_dataset, letters)
    assert "meta.pkl can't be used (" in message and words in message
