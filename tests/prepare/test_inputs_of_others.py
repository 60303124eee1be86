"""data/prepare.py with folders and files of others: no file outside is read, nothing hangs, each gets one sentence."""

import bz2
import gzip
import json
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT

from runtime.errors import UserError
from runtime.prepare import inputs, shards
from runtime.prepare.conversations import Conversations

pytestmark = pytest.mark.timeout(60)  # what is refused is refused within seconds, and the fault is mostly a hang
LINE = b'{"text": "a"}\n'


def sentence(function, *args):
    """The UserError of a call, which is one line."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def records(name, kind="jsonl"):
    return list(inputs.read_records(str(name), kind, "text", 4096))


@pytest.fixture
def texts(tmp_path):
    """A folder with a text, below one with a secret."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("a")
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "texts of mine").mkdir()
    return folder


@pytest.mark.parametrize("name, target", [
    ("link", "../secret"), ("link", "../texts of mine"), ("link", ".."), ("sub/link", "../../secret"),
    ("sub/link", "../sub/../.."), ("sub/link", "/etc/passwd"), ("sub/link", "/dev/zero"), ("sub/link", "/gone")])
def test_a_link_that_leads_out_of_the_folder_is_refused(texts, name, target):
    (texts / "circle").symlink_to("sub")
    (texts / "sub" / "circle").symlink_to("..")
    assert inputs.find_files([str(texts)]) == [f"{texts}/circle/a.txt"]  # what leads nowhere else is read, and once
    link = texts / name
    link.symlink_to(target)
    real = os.path.realpath(link)
    seen_as = str(link).replace("/sub/", "/circle/")
    assert sentence(inputs.find_files, [str(texts)]) == (
        f"{seen_as} is a link that leads out of its folder, to {real}: name {real} itself on the command line, and "
        "remove the link")


def test_links_inside_the_folder_and_those_that_are_named_are_read(texts, tmp_path):
    (texts / "again").symlink_to("sub")
    (texts / "b.txt").symlink_to("sub/a.txt")
    (texts / "gone").symlink_to("nothing")
    assert inputs.find_files([str(texts)]) == [f"{texts}/again/a.txt", f"{texts}/b.txt"]  # sub is the same as again
    (tmp_path / "named").symlink_to("texts")
    (tmp_path / "named.txt").symlink_to("secret")
    assert inputs.find_files([str(tmp_path / "named"), str(tmp_path / "named.txt")]) == [
        f"{tmp_path}/named/again/a.txt", f"{tmp_path}/named/b.txt", f"{tmp_path}/named.txt"]


def test_a_pipe_in_a_folder_is_refused_and_a_deep_one_is_read(texts):
    os.mkfifo(texts / "sub" / "pipe.txt")
    assert "pipe.txt is a pipe or a device, not a file: replace it with a file" in sentence(
        inputs.find_files, [str(texts)])
    (texts / "sub" / "pipe.txt").unlink()
    deep = str(texts)
    for _ in range(1500):
        deep += "/d"
        os.mkdir(deep)
    with open(f"{deep}/b.txt", "w") as file:
        file.write("b")
    found = inputs.find_files([str(texts)])
    subprocess.run(["rm", "-r", texts / "d"], check=True)  # pytest can't remove it
    assert found == [f"{deep}/b.txt", f"{texts}/sub/a.txt"]


BOMBS = {  # 110 MB each: blank lines would take minutes as records
    "gz": lambda: gzip.compress(b"\n" * 110_000_000, 1), "bz2": lambda: bz2.compress(b"\n" * 110_000_000),
    "zst": lambda: pyarrow.compress(b"\n" * 110_000_000, "zstd", asbytes=True),
    "lz4": lambda: pyarrow.compress(b"\n" * 110_000_000, "lz4", asbytes=True)}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(BOMBS[kind]())
    size = path.stat().st_size
    assert sentence(records, path) == (
        f"{path} has {size:,} bytes and unpacks to more than 100,000,000: if you trust it, unpack it yourself, and "
        "give the unpacked file")


def test_a_bomb_behind_a_large_file_is_refused_while_it_is_read(tmp_path, monkeypatch):
    """Beyond 4 MB on the disk, which are unpacked once before: here beyond 1 kB, and 100 times as much."""
    monkeypatch.setattr(inputs, "MAX_SCANNED_BYTES", 1000)
    monkeypatch.setattr(inputs, "MAX_UNPACKED_BYTES", 1000)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 20_000_000))
    assert f"unpacks to more than {100 * path.stat().st_size:,}" in sentence(records, path, "text")


def test_what_is_packed_well_is_read(tmp_path):
    """1.4 MB of one line, of a ratio of 300, and numbers, of a ratio of 2."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINE * 100_000))
    assert len(records(tmp_path / "a.jsonl.gz")) == 100_000
    lines = b"".join(b'{"text": "%d"}\n' % number for number in np.random.default_rng(0).integers(0, 2**60, 10_000))
    (tmp_path / "b.jsonl.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    assert b"".join(records(tmp_path / "b.jsonl.zst")) == lines


@pytest.mark.parametrize("line, words", [
    (b"[" * 100_000, "a JSON array"), (b'{"text": ' + b"[" * 100_000, "it is nested too deeply"),
    (b'{"text": 1' + b"0" * 5000 + b"}", "a number of more than 4,300 digits: write it as text"),
    (b'{"text": 1' + b"0" * 400 + b"}", "no text field 'text'"), (b'{"text": 1e400}', "no text field 'text'")])
def test_json_that_is_nested_or_holds_long_numbers_is_no_traceback(line, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        inputs.text_of(line, "jsonl", "text")
    chats = Conversations()
    assert chats.read(line, "a line") == b""
    assert re.search("no conversation|invalid JSON|more than 4,300 digits|nested too deeply", chats.report()[0])


@pytest.mark.parametrize("line, words", [
    (b'{"text": "a", "text": "b"}', "the field 'text' twice in an object: keep one of the two"),
    (b'{"text": "a", "meta": [{"k\\ud83d": 1, "k\\ud83d": 1}]}', r"the field 'k\ud83d' twice in an object"),
    ('{"text": "a"}\n'.encode("utf-16"), "invalid UTF-8: save the file as UTF-8"),
    ('{"text": "a"}\n'.encode("utf-16-le"), "a NUL byte, as in UTF-16: save the file as UTF-8"),
    ('{"text": "a"}'.encode("utf-16-be"), "a NUL byte, as in UTF-16: save the file as UTF-8")])
def test_json_with_a_field_twice_or_in_another_encoding_is_refused(line, words):
    """Python's json keeps the last of two fields, and reads UTF-16 if its lines have no end."""
    with pytest.raises(ValueError) as error:
        inputs.text_of(line, "jsonl", "text")
    assert words in str(error.value)
    chats = Conversations()
    assert chats.read(line, "a line") == b""
    assert words in chats.report()[0]


@pytest.mark.parametrize("depth", [10, 500, 900])
def test_a_role_that_is_nested_is_no_traceback(depth):
    role = "[" * depth + "]" * depth
    line = '{"messages": [{"role": ' + role + ', "content": "x"}]}'
    chats = Conversations()
    assert chats.read(line.encode(), "a line") == b""
    assert chats.report() == ["1 of 1 conversations can't be used, the first is a line, message 1: the role of another "
                              "type: use system, user or assistant"]


def test_parquet_of_any_damage_is_a_sentence(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "bb", "ccc"] * 50}), path)
    good = path.read_bytes()
    damaged = [good.replace(b"text", b"\xfe\xfe\xfe\xfe"), good[:4] + bytes(len(good) - 8) + good[-4:],
               good[:-8] + b"\xff\xff\xff\x7fPAR1", good[:8] + b"\xff" * 40 + good[48:], b"PAR1", b""]
    for content in damaged:
        path.write_bytes(content)
        assert f"{path} is corrupt, or not what its name says (" in sentence(records, path, "parquet")


def npy(header):
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(20)


@pytest.mark.parametrize("shape, descr", [
    ("(10**24,)".replace("10**24", "1" + "0" * 24), "'<u2'"), ("(-5,)", "'<u2'"), ("(4611686018427387904, 4)", "'<u2'"),
    ("(5,)", "'|O'"), ("(5,)", "[('a', 5, 5, 5)]"), ("(True,)", "'<u2'"), ("(" * 90 + ")" * 90, "'<u2'"),
    ("(4,)", "{}")])
def test_an_npy_file_of_another_shape_or_type_is_a_sentence(tmp_path, shape, descr):
    path = tmp_path / "train_1.npy"
    path.write_bytes(npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"))
    assert f"{path} is no shard of tokens (" in sentence(shards.token_file, str(path))


def test_names_of_files_put_no_escapes_on_a_terminal(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "\x1b[2Ja\x9b.jsonl").write_text(json.dumps({"\x1b]0;": 1}))
    run = subprocess.run([sys.executable, ROOT / "data" / "prepare.py", "texts", "--name=./out", "--tokenizer=char"],
                         cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and "\x1b" not in run.stdout + run.stderr and "\x9b" not in run.stdout + run.stderr
    assert "texts/\\x1b[2Ja\\x9b.jsonl, line 1: no text field 'text'" in run.stderr
