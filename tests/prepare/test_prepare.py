"""data/prepare.py: any text into a dataset, compared with plain Python, and killed at every point.

tests/drills/prepare.py measures its memory and its cores, and kills it at random moments, with as much text as asked.
Tests with `index` in their name ask pip for a wheel of 2 MB; the others need no network."""

import bz2
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, done, launch, wait_until
from tokenizers import Tokenizer, models, pre_tokenizers

from runtime.data import dataset as bins
from runtime.data.dataset import Dataset, check_dataset, open_tokens
from runtime.data.folders import how_to_fix
from runtime.data.mixture import open_datasets
from runtime.data.tokenizer import gpt2_encoding, tokenizer_of
from runtime.errors import UserError
from runtime.prepare import inputs, shards

SCRIPT, HUB_SCRIPT = ROOT / "data" / "prepare.py", ROOT / "data" / "prepare_hub.py"
SHARE = 0.3
FILES = [".lock", "meta.json", "meta.pkl", "train.bin", "val.bin"]


def made_up(n, seed=0, size=60):
    """n documents of up to `size` words in several lines, each fifth one there before."""
    rng, words = np.random.default_rng(seed), ["the", "càt", "sät", "on", "\n", "a 漢字", "🙂", "mat.", "<|endo", "  "]
    texts = []
    for i in range(n):
        text = " ".join(words[w] for w in rng.integers(0, len(words), size))
        texts.append(texts[i // 2] if i % 5 == 4 else f"{text} {i}.")
    return texts


def for_validation(text, share):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") < share * 2**64


def expected(texts, encode, separator, share=SHARE):
    """{split: ids} as docs/data.md says it, in plain Python."""
    ids = {"train": [], "val": []}
    for text in dict.fromkeys(texts):
        ids["val" if for_validation(text, share) else "train"] += [*encode(text), separator]
    return ids


def expected_chars(texts, share=SHARE):
    chars = sorted({"\n", *"".join(texts)})
    known = {char: i for i, char in enumerate(chars)}
    return chars, expected(texts, lambda text: map(known.get, text), known["\n"], share)


def prepare(*args, cwd, stdin=None, code=0):
    run = subprocess.run([sys.executable, SCRIPT, *map(str, args)], cwd=cwd, input=stdin, capture_output=True)
    assert run.returncode == code, run.stderr.decode()
    return run.stdout.decode(), run.stderr.decode()


def ids_of(folder, block_size=1):
    """(meta, {split: ids}) of a data set, once it is found whole."""
    meta = check_dataset(folder, block_size)
    return meta, {split: open_tokens(Dataset("", 1, folder, meta), split)[:].tolist() for split in bins.SPLITS}


def hashes_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def zstd(content):
    return pyarrow.compress(content, "zstd", asbytes=True)


def write_forms(folder, texts):
    """The same documents in every form, {name of the form: (arguments, standard input)}."""
    lines = [json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)]
    jsonl, text = "".join(lines).encode(), "".join(f"{text}<|endoftext|>\n" for text in texts).encode()
    half = len(jsonl) // 2
    contents = {
        "a.text.zst": zstd(text), "windows.txt": b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
        "a.ndjson.gz": gzip.compress(jsonl[:half]) + gzip.compress(jsonl[half:]),  # two members,
        "a.json.zst": zstd(jsonl[:half]) + zstd(jsonl[half:]),  # and two frames
        "b.jsonl.bz2": bz2.compress(jsonl), "b.jsonl.lz4": pyarrow.compress(jsonl, "lz4", asbytes=True)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    column = pyarrow.array(texts, pyarrow.large_string()).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "body": column}), folder / "a.parquet",
                                row_group_size=70)
    (folder / "sub" / ".elsewhere").mkdir(parents=True)
    (folder / "sub" / "deep").symlink_to(".elsewhere")
    (folder / "sub" / "circle").symlink_to(".")
    pyarrow.parquet.write_table(pyarrow.table({"body": texts[100:]}), folder / "sub" / "deep" / "b.parquet")
    (folder / "sub" / "c.parquet.txt").write_text("")
    (folder / "sub" / "a.jsonl").write_text("".join(lines[:100]))
    (folder / "sub" / ".hidden.jsonl").write_text("not JSON")
    forms = {name: ([name], None) for name in [*contents, "a.parquet"]}
    return forms | {"folder": (["sub"], None), "several": (["sub/a.jsonl", "sub/deep"], None), "pipe": (["-"], text),
                    "pipe.jsonl": (["-", "--format=jsonl"], jsonl)}


def test_all_forms_of_the_same_documents_give_the_same_bytes(tmp_path):
    texts = [*made_up(300), "2024-05-01"]  # a timestamp to some readers of JSON
    chars, ids = expected_chars(texts)
    assert len(ids["val"]) > 10_000 and len(ids["train"]) > 20_000
    ids_by_form = {}
    for i, (name, (args, stdin)) in enumerate(write_forms(tmp_path, texts).items()):
        field = [] if name in ("a.text.zst", "windows.txt", "pipe") else ["--field=body"]
        prepare(*args, f"--name=./out{i}", *field, "--tokenizer=char", f"--val_fraction={SHARE}",
                f"--workers={1 + i % 3}", cwd=tmp_path, stdin=stdin)
        meta, ids_by_form[name] = ids_of(tmp_path / f"out{i}")
        assert (meta["documents"]["duplicates"], meta["tokenizer"]["chars"]) == (60, "".join(chars)), name
        if name == "windows.txt":
            assert meta["source"]["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert [name for name in ids_by_form if ids_by_form[name] != ids] == []


LARGE = {"torch", "transformers", "datasets", "deepspeed", "pandas", "matplotlib"}


@pytest.mark.parametrize("arguments", [
    ["data/prepare.py", "text.txt", "--name=./made", "--tokenizer=char"],
    ["data/prepare_hub.py", "--help"],
    ["data/shakespeare_char/prepare.py", "--help"],
])
def test_a_script_that_needs_no_model_imports_no_large_package(tmp_path, arguments):
    """torch alone takes a second and 400 MB."""
    (tmp_path / "text.txt").write_text("\n\n".join(made_up(40)))
    command = [sys.executable, "-X", "importtime", ROOT / arguments[0], *arguments[1:]]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    imported = set(re.findall(r"\| +(\w+)$", run.stderr, re.M))
    assert "argparse" in imported
    assert imported & LARGE == set()


@pytest.mark.parametrize("content, is_json", [
    ('{"text": "a"}\n', True), ('\ufeff[\n {"prompt" : "a", "completion": "b"}]', True), ("{'a': 1}\n", False)])
def test_json_from_a_pipe_is_not_read_as_text_unless_asked(tmp_path, content, is_json):
    (tmp_path / "val.txt").write_text("b")
    asked = ["-", "--val=val.txt", "--name=./out", "--tokenizer=char"]
    if is_json:
        said = prepare(*asked, cwd=tmp_path, stdin=content.encode(), code=2)[1]
        assert said == ("standard input begins with JSON, and would be read as text: add --format=jsonl or "
                        "--format=chat, or --format=text if it is text\n")
        asked += ["--format=text"]
    prepare(*asked, cwd=tmp_path, stdin=content.encode())
    assert ids_of(tmp_path / "out")[0]["train_tokens"] == len(content.removeprefix("\ufeff")) + 1


def test_index_gpt2_tokens_with_end_of_text_between_documents(tmp_path):
    texts = [*made_up(50), "not the token: <|endoftext|>"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare("a.jsonl", "--name=./out", f"--val_fraction={SHARE}", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ({"kind": "gpt2"}, 50257, "uint16")
    assert ids == expected(texts, gpt2_encoding().encode_ordinary, 50256)


def test_index_a_cut_text_has_the_tokens_of_the_whole(tmp_path):
    """And end-of-text only where the text was torn apart: where validation begins and ends, and at the very end."""
    rng = np.random.default_rng(0)
    words = ["a", "the", "1,000", " ", "\n", "\n\n", "naïve", "漢字漢字", "🙂", "it's", "\n\n\u3000", "\r\n", " \n "]
    for chosen in ["हिन्दी", "ქართული", "“q”", "か", "\u3000"], words:  # the first begin with a byte as some spaces do
        text = " ".join(chosen[w] for w in rng.integers(0, len(chosen), 40_000)).encode()
        (tmp_path / "a.txt").write_bytes(text)
        pieces = list(inputs.text_chunks(open(tmp_path / "a.txt", "rb"), 256))
        assert b"".join(pieces) == text and max(map(len, pieces)) <= 512 and len(pieces) > 400
        whole, encode = text.decode().replace("\r\n", "\n"), gpt2_encoding().encode_ordinary
        parts = [inputs.text_of(piece, "text", None)[0].decode() for piece in pieces]
        assert [token for part in parts for token in encode(part)] == encode(whole)
    prepare("a.txt", "--name=./out", "--max_document_bytes=256", "--val_fraction=0.1", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    val = [for_validation(part, 0.1) for part in parts]
    changes = sum(a != b for a, b in zip(val, val[1:]))
    assert meta["documents"]["val"] == sum(val) > 20 and meta["documents"]["duplicates"] == 0
    assert (ids["train"] + ids["val"]).count(50256) == changes + 1
    assert len(ids["train"]) + len(ids["val"]) == len(encode(whole)) + changes + 1


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer of 70,000 words in Hugging Face's form; the last is its end-of-text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words.add_special_tokens(["</s>"])
    words.enable_truncation(5)  # which is for batches of a model's, not for a data set's documents
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder


def test_a_tokenizer_folder_is_prepared_with_trained_on_and_sampled_with(tmp_path, tokenizer_folder, train):
    texts = [" ".join(f"w{w}" for w in np.random.default_rng(i).integers(0, 70_000, 60)) for i in range(100)]
    texts.append("</s> w69999 unknown")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare("a.jsonl", "--name=./out", f"--tokenizer={tokenizer_folder}", f"--val_fraction={SHARE}", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    known = {f"w{i}": i for i in range(70_000)}
    assert ids == expected(texts, lambda text: [known.get(word, 0) for word in text.split()], 70_000)
    assert (meta["vocab_size"], meta["dtype"]) == (70_001, "uint32")
    run = done(train(f"--dataset={tmp_path / 'out'}", "--max_iters=1", "--eval_iters=1"))
    assert f"{len(ids['train']):,} tokens to train on" in run.stdout
    assert run.losses[1] == pytest.approx(np.log(70_001), abs=0.2)
    sampled = done(launch(ROOT / "sample.py", f"--out_dir={run.out_dir}", "--start=w1 w2", "--num_samples=1",
                          "--max_new_tokens=5", "--device=cpu"))
    assert re.search(r"^w1 w2( w\d+){5}$", sampled.stdout, re.M), sampled.stdout


def test_a_tokenizer_goes_with_its_data_and_may_not_change(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_text("w1 w2 w3<|endoftext|>w4 w5 w6<|endoftext|>w7 w8")
    prepare("a.txt", "--name=./out", f"--tokenizer={tokenizer_folder}", "--val_fraction=0.5", cwd=tmp_path)
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    datasets, meta = open_datasets({str(tmp_path / "out"): 1, str(tmp_path / "moved"): 2}, 1)  # are of one tokenizer
    assert [dataset.share for dataset in datasets] == [1, 2]
    assert meta["train_tokens"] == 2 * datasets[0].meta["train_tokens"]
    # nothing of the first one's alone
    assert sorted(meta) == ["datasets", "template", "tokenizer", "train_tokens", "val_tokens", "vocab_size"]
    assert tokenizer_of(datasets[1].meta["tokenizer"])[0]("w5 </s>") == [5, 70_000]
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not the one that the data was prepared with"):
        tokenizer_of(meta["tokenizer"])


def write_jsonl(path, size):
    """A file of about `size` bytes, no two of its documents alike."""
    line = json.dumps({"text": " ".join(map(str, range(500)))})
    with open(path, "w") as file:
        file.writelines(line.replace(" 7 ", f" {i} ") + "\n" for i in range(size // len(line)))


def start(*args, cwd, **options):
    return subprocess.Popen([sys.executable, SCRIPT, *args], cwd=cwd, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True, **options)


def test_ctrl_c_leaves_nothing_and_a_kill_nothing_in_the_way(tmp_path):
    """The input is a pipe that stays open, so the job ends only when it is stopped."""
    args = ["--tokenizer=char", "--name=./out"]
    from_pipe = ["-", "--format=jsonl", *args]
    lock = tmp_path / "out" / ".lock"
    write_jsonl(tmp_path / "a.jsonl", 100_000)

    def start_and_feed():
        job = start(*from_pipe, cwd=tmp_path, stdin=subprocess.PIPE)
        assert wait_until(lock.exists)
        job.stdin.write((tmp_path / "a.jsonl").read_text())
        job.stdin.flush()
        return job

    job = start_and_feed()
    job.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.stderr.read() == "interrupted; no dataset was changed\n"
    assert os.listdir(tmp_path) == ["a.jsonl"]

    job = start_and_feed()
    assert "another run is writing to out: wait for it" in prepare("a.jsonl", *args, cwd=tmp_path, code=2)[1]
    job.kill()
    job.communicate()
    assert os.listdir(lock.parent) == [".lock"]
    prepare("a.jsonl", *args, cwd=tmp_path)
    assert sorted(os.listdir(lock.parent)) == FILES


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=200k tmpfs disk
{before}"$@"
code=$?
find disk -mindepth 1 -printf "%P\\n"
exit $code
"""


def test_a_full_disk_is_named_and_nothing_is_left_there(tmp_path):
    """200 kB for 289,000 characters. In the second run, the folder of the dataset is there already."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(50_000))))
    namespace = ["unshare", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None:
        pytest.skip("a small disk needs unshare (util-linux)")
    probe = subprocess.run([*namespace, "mount -t tmpfs tmpfs disk"], cwd=tmp_path, capture_output=True, text=True)
    if probe.returncode:  # only root may mount, and some containers forbid it. Nothing of ours has run
        pytest.skip(f"a small disk can't be mounted here: {probe.stderr.strip()}")
    command = [sys.executable, SCRIPT, "a.txt", "--name=disk/new/mine", "--tokenizer=char"]
    for before, left in (("", ""), ("mkdir -p disk/new/mine\n", "new\nnew/mine\n")):
        script = ON_A_SMALL_DISK.format(before=before)
        job = subprocess.run([*namespace, script, "sh", *command], cwd=tmp_path, capture_output=True, text=True)
        assert job.returncode == 2
        assert job.stderr == ("cannot write disk/new/mine (No space left on device): make room there, or choose "
                              "another --name=DIR\n")
        assert job.stdout.partition(" workers\n")[2] == left


@pytest.mark.parametrize("file, options, unwritten", [("a.txt", ["--tokenizer=char"], "out"),
                                                      ("a_train.npy", [], "out/train.bin")])
def test_what_cannot_be_written_is_named(tmp_path, file, options, unwritten):
    """With `ulimit -f`, as on FAT: 100 kB. The characters of a text are first in a file without a name."""
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(50_000))))
    np.save(tmp_path / "a_train.npy", np.arange(50_000, dtype=np.uint16))
    np.save(tmp_path / "a_val.npy", np.arange(50_000, dtype=np.uint16))
    files = [file, file.replace("train", "val")] if "train" in file else [file]
    before = sorted(os.listdir(tmp_path))
    command = [sys.executable, SCRIPT, *files, "--name=./out", *options]
    limited = ["bash", "-c", 'ulimit -f 90; exec "$@"', "bash", *command]
    job = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 2
    assert job.stderr == f"cannot write {unwritten} (File too large): choose another --name=DIR\n"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of files, good and bad."""
    folder = tmp_path_factory.mktemp("texts")
    good = "".join(json.dumps({"text": text}) + "\n" for text in made_up(20)).encode()
    with tarfile.open(fileobj=(archive := io.BytesIO()), mode="w:gz") as tar:
        tar.add(__file__)
    contents = {
        "good.jsonl": good, "broken.jsonl": good + b'{"text": "a\n', "list.jsonl": b"[1]\n",
        "value.jsonl": b"1\n", "array.json": b'[\n {"text": "a"},\n {"text": "b"}\n]\n',
        "fields.jsonl": b'{"id": 1, "body": "x"}\n', "number.jsonl": good + b'{"text": 5}\n',
        "half.jsonl": b'{"text": "\\ud83d"}\n', "one.txt": b"one", "words/tokenizer_config.json": b'{"eos_token": "a"}',
        "spaces.jsonl": b'{"text": "one' + rb"\n" * 600_000 + b'"}',
        "words/tokenizer.json": b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}',
        "latin.txt": b"one<|endoftext|>caf\xe9", "long.jsonl.zst": zstd(good + bytes(60_000_000)),
        "files.tar.gz": archive.getvalue(), "utf16.txt": "one".encode("utf-16-le"), "no.jsonl.gz": good,
        "cut.jsonl.bz2": bz2.compress(good)[:-1], "tokenizer/vocab.json": b"{}", "bad/tokenizer.json": b"{}",
        "lines.jsonl.zst": zstd(good) + zstd(good)[:9], "lines.jsonl.gz": gzip.compress(good)[:-1],
        "made/train.bin": b"", "empty/.hidden": b""}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": [1], "body": ["x"]}), folder / "number.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([b"\xe9"]).view("string")}), folder / "b.parquet")
    content = (folder / "number.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[:40] + content[-300:])
    return folder


MISTAKES = {
    "no file": ("nowhere.txt", "nowhere.txt is not a file or folder: check the path, or use one - for standard input"),
    "no files in it": ("empty", "empty has no files in it"),
    "cut": ("one.txt --max_document_bytes=1", "--max_document_bytes=1 must be 64 to 16777216"),
    "one document": ("one.txt", "^training has 1 document and validation 0, and each needs one: add to these 3 bytes, "
                     "change --val_fraction=0.1, cut .* with --max_document_bytes=64, or give a file with --val=PATH$"),
    "none for validation": ("good.jsonl --val_fraction=0.001", r"training has 16 documents and validation 0 \(skipped: "
                            r"4 duplicates\), and each needs one: add documents, change --val_fraction=0.001, or give"),
    "none for training": ("broken.jsonl list.jsonl --val_fraction=1 --skip_unreadable", "training has 0 documents and "
                          r"validation 16 \(skipped: 4 duplicates, 2 unreadable\), and each needs one: add documents"),
    "nothing readable": ("list.jsonl --skip_unreadable", r"validation 0 \(skipped: 1 unreadable\), and each needs one: "
                         "leave out --skip_unreadable to see why the first one can't be read$"),
    "no JSON": ("broken.jsonl", r"broken.jsonl, line 21: invalid JSON \(.*\): write one object per line; correct"),
    "no object": ("list.jsonl", r"list.jsonl, line 1: a JSON array: write one object per line, as jq -c '.\[\]' FILE"),
    "a number": ("value.jsonl", "value.jsonl, line 1: no JSON object: write one per line;"),
    "an array in lines": ("array.json", "array.json, line 1: a JSON array: write one object per line, as jq -c"),
    "no field": ("fields.jsonl", r"line 1: no text field 'text' \(text fields: body\): .* with --format=chat"),
    "no string": ("number.jsonl", r"number.jsonl, line 21: no text field 'text' \(text fields: none\)"),
    "half a character": ("half.jsonl", "half.jsonl, line 1: 'utf-8' codec can't encode .*surrogates not allowed"),
    "no UTF-8 in Parquet": ("b.parquet", "b.parquet, row 1: 'utf-8' codec can't decode byte 0xe9"),
    "spaces": ("spaces.jsonl", "spaces.jsonl, line 1: over 500,000 spaces or line ends in a row after 'one': shorten"),
    "no token": ("good.jsonl --tokenizer=words", "the tokenizer knows no tokens for '.*WordLevel error"),
    "no UTF-8": ("latin.txt", r"latin.txt, byte 19: byte 0xe9 isn't UTF-8 \(unexpected end of data\); correct it, or"),
    "a long line": ("long.jsonl.zst", "long.jsonl.zst, line 21 is longer than 50,000,000 bytes: split it into doc"),
    "archive": ("files.tar.gz", "files.tar.gz, byte 0: a NUL byte, as in an archive or in UTF-16: unpack it"),
    "UTF-16": ("utf16.txt", "utf16.txt, byte 0: a NUL byte"),
    "whole lines of gz": ("lines.jsonl.gz", "lines.jsonl.gz is corrupt, or not what its name says .*Truncated"),
    "whole lines of zst": ("lines.jsonl.zst", "lines.jsonl.zst is corrupt, or not what its name says .*Truncated"),
    "truncated bz2": ("cut.jsonl.bz2", r"cut.jsonl.bz2 is corrupt, or not what its name says .*Truncated"),
    "no gz": ("no.jsonl.gz", "no.jsonl.gz is corrupt, or not what its name says"),
    "corrupt parquet": ("cut.parquet --field=body", "cut.parquet is corrupt, or not what its name says"),
    "piped Parquet": ("- --format=parquet", "Parquet can't be read from a pipe: name the file"),
    "no text column": ("number.parquet", r"number.parquet has no text column 'text' \(text columns: body\): "),
    "no tokenizer": ("one.txt --tokenizer=empty", "empty has no tokenizer.json: choose gpt2, char, or a"),
    "half a tokenizer": ("one.txt --tokenizer=tokenizer", "tokenizer has vocab.json without merges.txt: restore it, "),
    "bad tokenizer": ("one.txt --tokenizer=bad", r"tokenizer .*bad/tokenizer.json can't be used \(.*\): restore it"),
    "no number": ("good.jsonl --val_fraction=nan", "--val_fraction=nan must be 0 to 1"),
    "no workers": ("good.jsonl --workers=0", "--workers=0 must be 1 to 1024"),
    "no name": ("good.jsonl --name=..", "--name=.. is no name: choose one, such as --name=mine"),
    "a ready-made one's": ("good.jsonl --name=shakespeare --overwrite", "/shakespeare is for the dataset that its pr"),
    "a field of text": ("one.txt --field=body", "^--field=body is for JSON lines, tables and Parquet, and by their "),
    "two pipes": ("- -", "- is not a file or folder: check the path, or use one - for standard input"),
    "other data": ("good.jsonl --name=./made", "made holds a dataset: choose another --name")}


def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing(texts, monkeypatch):
    before, main, wrong = {path for path in texts.rglob("*")}, runpy.run_path(str(SCRIPT))["main"], {}
    monkeypatch.chdir(texts)
    for mistake, (args, message) in MISTAKES.items():
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--name=./out", "--tokenizer=char", *args.split()])
        with pytest.raises(UserError) as refused:
            main()
        if "\n" in str(refused.value) or not re.search(message, str(refused.value)):
            wrong[mistake] = str(refused.value)
    assert wrong == {}
    assert {path for path in texts.rglob("*")} == before


def test_what_is_there_stays_unless_it_is_to_be_overwritten(tmp_path, texts):
    good = texts / "good.jsonl"
    asked = [good, "--name=./out", "--tokenizer=char", f"--val_fraction={SHARE}"]
    prepare(*asked, cwd=tmp_path)
    made = hashes_of(tmp_path / "out")
    _, refused = prepare(*asked, cwd=tmp_path, code=2)
    assert refused == "out holds a dataset: choose another --name, or replace it with --overwrite\n"
    assert hashes_of(tmp_path / "out") == made
    prepare(*asked[:-1], "--val_fraction=0.4", "--overwrite", cwd=tmp_path)
    assert ids_of(tmp_path / "out")[1] == expected_chars(made_up(20), 0.4)[1]
    (tmp_path / "out" / "train.bin").unlink()  # as it is after a kill: nothing is left to overwrite
    prepare(*asked, cwd=tmp_path)
    assert {**hashes_of(tmp_path / "out"), "meta.json": 0} == {**made, "meta.json": 0}


def test_documents_that_cannot_be_read_are_left_out_when_asked(tmp_path, texts):
    bad, other = [json.dumps({"text": text}) for text in made_up(20)], json.dumps({"\x1b[2J": ""})
    (tmp_path / "a.jsonl").write_text("\n".join([*bad[:10], other, *bad[10:15], '{"text": null}', "", *bad[15:]]))
    asked = ["a.jsonl", "--name=./out", "--tokenizer=char", f"--val_fraction={SHARE}"]
    _, refused = prepare(*asked, cwd=tmp_path, code=2)
    assert r"a.jsonl, line 11: no text field 'text' (text fields: \x1b[2J): choose one" in refused  # no escape itself
    said, _ = prepare(*asked, "--skip_unreadable", cwd=tmp_path)
    assert "skipped: 4 duplicates, 2 empty, 1 unreadable" in said
    assert ids_of(tmp_path / "out")[1] == expected_chars(made_up(20))[1]


def shard(tokens, magic=20240520, version=1):
    """The content of one of llm.c's .bin files."""
    header = np.array([magic, version, len(tokens), *[0] * 253], "<i4")
    return header.tobytes() + np.array(tokens, "<u2").tobytes()


def npy(tokens, dtype=np.uint16):
    np.save(file := io.BytesIO(), np.array(tokens, dtype))
    return file.getvalue()


def prepare_here(monkeypatch, *args):
    """Run data/prepare.py in this process, with slices of 300 tokens."""
    monkeypatch.setattr(shards, "SLICE", 300)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, args)])
    runpy.run_path(str(SCRIPT))["main"]()


def test_a_folder_of_three_novels_has_enough_documents_to_split(tmp_path):
    """The default cuts them at a thousandth of their 6 MB, not at 1 MB, which would leave none to validate on."""
    for i, name in enumerate(("emma", "persuasion", "sanditon")):
        lines = [f"{name} {i} line {n} of a long story\n" for n in range(55_000)]
        (tmp_path / "novels").mkdir(exist_ok=True)
        (tmp_path / "novels" / f"{name}.txt").write_text("".join(lines))
    size = sum(path.stat().st_size for path in (tmp_path / "novels").iterdir())
    prepare("novels", "--name=./out", "--tokenizer=char", cwd=tmp_path)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["options"]["max_document_bytes"] == size // 1000 == 6126
    assert 500 <= meta["documents"]["train"] + meta["documents"]["val"] <= 1000
    assert 0.05 < meta["documents"]["val"] / meta["documents"]["train"] < 0.2


def test_shards_are_copied_in_order(tmp_path, monkeypatch):
    """modded-nanogpt's names, early llm.c's, and build-nanogpt's, the latter with a train shard of number 0."""
    tokens = np.random.default_rng(0).integers(0, 50257, 3700).tolist()
    tokens[0] = tokens[1990] = tokens[3699] = 50256  # a document goes on in the next shard
    for name in "interval_{}_{:06}.bin", "fineweb_{1:06}.bin", "edufineweb_{}_{:06}.npy", "folders-/{}/{:06}.bin":
        (folder := tmp_path / name[:8]).mkdir()
        (folder / "README.md").write_text("a dataset's card")
        for i in range(4):
            split = "train" if i else "validation" if "/" in name else "val"
            file = folder / name.format(split, i - (i > 0) * name.endswith("npy"))
            file.parent.mkdir(exist_ok=True, parents=True)
            part = tokens[i * 1000:(i + 1) * 1000]
            file.write_bytes(npy(part) + b"\0\0" if file.suffix == ".npy" else shard(part))  # NumPy ignores the zeros
        prepare_here(monkeypatch, folder, f"--name={folder}-out")
        meta, ids = ids_of(f"{folder}-out")
        assert ids == {"val": tokens[:1000], "train": tokens[1000:]}, name
        assert (meta["tokenizer"], meta["documents"]) == ({"kind": "gpt2"}, {
            split: ids[split].count(50256) for split in bins.SPLITS})
    assert "4 shards, 11,496 bytes\ntrain: 2,700 tokens in" in prepare("interval", "--name=./out", cwd=tmp_path)[0]
    assert hashes_of(tmp_path / "out")["train.bin"] == meta["files"]["train.bin"]["sha256"]


GOOD = shard([7] * 100)


@pytest.mark.parametrize("name, content, message", [  # a file that is added or changed; None: it is missing
    ("train_1.bin", GOOD[:-1], r"s/train_1.bin .* shard of .* \(it has 1,223 bytes, but its 100 tokens take 1,224\)"),
    ("train_1.bin", GOOD + b"\0", "it has 1,225 bytes, but"),
    ("train_1.bin", shard([7], 20240801, 7), r"\(its header begins with \[20240801, 7\], not \[20240520, 1\]\): downl"),
    ("train_1.bin", GOOD[:8], "it has 8 bytes, fewer than its header"),
    ("train_1.bin", shard([*[7] * 900, 50257]), "s/train_1.bin has token 50257, which isn't one of GPT-2's: download"),
    ("train_2.npy", npy([7] * 100)[:-1], r"s/train_2.npy is no shard of tokens \(.*\): download it again"),
    ("train_2.npy", npy([7], np.float32), r"\(its array is float32\[1\], not one row of whole numbers\): download it"),
    ("train_2.npy", npy([7, -100], np.int64), "s/train_2.npy has token -100, which isn't one of GPT-2's: download it"),
    ("train_2.npy", npy([[7]]), r"\(its array is uint16\[1, 1\], not"),
    ("val_0.bin", None, "s has no tokens for val: add a shard with 'val' in its name"),
    ("x.txt", b"x", r"s/x.txt is no shard of tokens \(it has 1 bytes, fewer than its header\)"),
    ("train_1.bin", shard([]), "s has no tokens for train: add a shard with 'train' in its name"),
    ("--field=x", None, "shards have their tokens and splits already: leave out --field")])
def test_a_bad_shard_is_told_in_a_sentence_and_leaves_nothing(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    os.mkdir("s")
    for file, right in {"val_0.bin": GOOD, "train_1.bin": GOOD, name: content}.items():
        if right is not None:
            (tmp_path / "s" / file).write_bytes(right)
    with pytest.raises(UserError, match=message) as refused:
        prepare_here(monkeypatch, "s", "--name=./out", *[name] * name.startswith("--"))
    assert "\n" not in str(refused.value) and not list(tmp_path.glob("out/[!.]*"))


def hub(*args, cwd):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "cache")}  # online, it tries for 30 seconds
    return subprocess.run([sys.executable, HUB_SCRIPT, *args], env=env, cwd=cwd, capture_output=True, text=True)


def test_index_a_dataset_of_the_hub_is_tokenized_and_split_as_nanogpt_does(tmp_path):
    """From files in the layout of the Hub's OpenWebText. With --streaming, 200 documents are for validation."""
    import datasets

    texts, encode = [*made_up(2498, size=5), "", None], gpt2_encoding().encode_ordinary
    (tmp_path / "openwebtext").mkdir()
    for i, part in enumerate((texts[:1250], texts[1250:])):
        table = pyarrow.table({"text": part, "id": range(1250)})
        pyarrow.parquet.write_table(table, tmp_path / "openwebtext" / f"train-0000{i}-of-00002.parquet")
    parts = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    assert len(parts["test"]) == 2
    for options, *splits in ([], parts["train"]["text"], parts["test"]["text"]), (
            ["--streaming"], texts[200:], texts[:200]):
        done(hub("--dataset=openwebtext", "--name=./out", "--overwrite", *options, cwd=tmp_path))
        assert list(ids_of(tmp_path / "out")[1].values()) == [
            [i for text in part if text for i in (*encode(text), 50256)] for part in splits]


def test_index_the_hubs_own_split_is_for_validation(tmp_path):
    """And texts of white space alone are no documents."""
    texts = {"train": ["one", " \n", "two"], "validation": ["three", "\t", ""]}
    (tmp_path / "texts").mkdir()
    for split, own in texts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in own)
        (tmp_path / "texts" / f"{split}.jsonl").write_text(lines)
    encode = gpt2_encoding().encode_ordinary
    for options in [], ["--streaming"]:
        done(hub("--dataset=texts", "--name=./out", "--overwrite", "--val=validation", *options, cwd=tmp_path))
        meta, ids = ids_of(tmp_path / "out")
        assert ids == {"train": [*encode("one"), 50256, *encode("two"), 50256], "val": [*encode("three"), 50256]}
        assert meta["options"]["val"] == "validation"


@pytest.mark.parametrize("options, message", [
    ([], r"Skylion007/openwebtext can't be read \(.*\): correct --config, --val or --column, or set HF_ENDPOINT to a "
         r"mirror of the Hub, or run hf download Sky.* --local-dir=openwebtext on .*, and add --dataset=openwebtext$"),
    (["--dataset=texts"], r"^texts can't be read \(Config name is missing.*'large', 'small'.*\): correct --con"),
    (["--dataset=texts", "--config=small", "--column=body"], r"^texts can't be read \(.*'body'.*\): correct --con"),
    (["--dataset=texts", "--config=small"], "^texts has too few documents for training and validation: choose another"),
    (["--dataset=texts", "--config=large", "--val=dev"], r"^texts can't be read \(.*dev.*\): correct --config, --val"),
    (["--dataset=texts", "--config=large", "--streaming"], "^texts has too few documents for training and validation")])
def test_index_a_dataset_of_the_hub_that_cannot_be_read_is_told_in_a_sentence(tmp_path, options, message):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "texts" / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: a.jsonl\n" for name in ("large", "small")) + "---")
    refused = hub("--name=./out", *options, cwd=tmp_path)
    assert refused.returncode == 2 and re.search(message, refused.stderr.splitlines()[-1]), refused.stderr
    assert how_to_fix(ROOT / "data" / "openwebtext").endswith("data/prepare_hub.py")
