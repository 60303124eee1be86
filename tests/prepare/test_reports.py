"""What users of other projects reported about preparing their data, with what happens here.

Each test names the report."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_prepare import SHARE, for_validation, ids_of, made_up, prepare, tokenizer_folder  # noqa: F401 (a fixture)

CHARS = ("--tokenizer=char", "--name=./out", "--overwrite")


def test_nanochat_541_validation_data_depends_on_how_many_shards_there_are(tmp_path):
    """The last shard of those that were downloaded was for validation, so losses couldn't be compared. A file that
    --val names stays the same, whatever else there is. By hash, a document stays in its split."""
    texts = [f"{text} of shard {i // 40}" for i, text in enumerate(made_up(160))]
    for i in range(4):
        table = pyarrow.table({"text": texts[40 * i : 40 * i + 40]})
        pyarrow.parquet.write_table(table, tmp_path / f"shard_{i:05}.parquet")
    shards = [f"shard_{i:05}.parquet" for i in range(3)]
    (tmp_path / "names.txt").write_text("".join(sorted({*"".join(texts)})))  # the same characters in both
    val = []
    for n in (1, 3):
        prepare(*shards[:n], "names.txt", "--val=shard_00003.parquet", *CHARS, cwd=tmp_path)
        val.append(ids_of(tmp_path / "out")[1]["val"])
    assert val[0] == val[1] and len(val[0]) > 4000
    for n in (1, 3):
        prepare(*shards[:n], f"--val_fraction={SHARE}", *CHARS, cwd=tmp_path)
        chosen = {text for text in texts[: 40 * n] if for_validation(text, SHARE)}
        assert ids_of(tmp_path / "out")[0]["documents"]["val"] == len(chosen)


def test_transformers_2825_ids_above_65535_are_cut_to_16_bits(tmp_path, tokenizer_folder):  # noqa: F811
    """45% of the tokens of a vocabulary of 119,547 became others."""
    ids = {"train": np.random.default_rng(0).integers(0, 70_001, 5000), "val": np.arange(65_000, 70_001)}
    for split, own in ids.items():
        own.astype("<i8").tofile(tmp_path / f"{split}.bin")
    command = ("train.bin", "val.bin", "--dtype=int64", "--name=./out")
    _, refused = prepare(*command, cwd=tmp_path, code=2)
    assert "val.bin has token 70000, which isn't one of GPT-2's: " in refused or "train.bin has token " in refused
    prepare(*command, f"--tokenizer={tokenizer_folder}", cwd=tmp_path)
    meta, written = ids_of(tmp_path / "out")
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", 70_001)
    assert written == {split: own.tolist() for split, own in ids.items()}


@pytest.mark.parametrize("row, text", [
    ("I ate pie, ice cream, and cookies", None),
    ('"I ate pie, ice cream, and cookies"', "I ate pie, ice cream, and cookies"),
    ('"""Pie, please"", I said"', '"Pie, please", I said')])
def test_gpt_2_simple_214_a_comma_ends_the_text(tmp_path, row, text):
    """Of a row without quotes, only what comes before the first comma was trained on."""
    (tmp_path / "a.csv").write_text(f"text\n{row}\n")
    (tmp_path / "b.csv").write_text("text\nother\n")
    if text is None:
        _, refused = prepare("a.csv", "--val=b.csv", *CHARS, cwd=tmp_path, code=2)
        assert refused.startswith("a.csv, line 2: the row has 3 fields, and the header 1: put quotes, ")
        return
    prepare("a.csv", "--val=b.csv", *CHARS, cwd=tmp_path)
    meta, ids = ids_of(tmp_path / "out")
    assert "".join(meta["tokenizer"]["chars"][i] for i in ids["train"]) == f"{text}\n"


def test_llama_factory_3119_a_small_set_ends_in_an_error_of_a_library(tmp_path):
    """"With n_samples=1, test_size=0.1 and train_size=None, the resulting train set will be empty." Here it is a
    sentence with the numbers, and each of its ways works."""
    texts = [f"example {i}" for i in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "", texts[0]]))
    assert not any(for_validation(text, 0.01) for text in texts)
    _, refused = prepare("a.jsonl", "--val_fraction=0.01", *CHARS, cwd=tmp_path, code=2)
    assert refused == ("training has 10 documents and validation 0 (skipped: 1 duplicate, 1 empty), and each needs "
                       "one: add documents, change --val_fraction=0.01, or give a file with --val=PATH\n")
    prepare("a.jsonl", "--val_fraction=0.4", *CHARS, cwd=tmp_path)
    n_val = sum(for_validation(text, 0.4) for text in texts)
    assert ids_of(tmp_path / "out")[0]["documents"]["val"] == n_val > 0
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    prepare("a.jsonl", "--val=b.jsonl", *CHARS, cwd=tmp_path)
    documents = {"train": 10, "val": 1, "duplicates": 1, "empty": 1, "unreadable": 0}
    assert ids_of(tmp_path / "out")[0]["documents"] == documents


def test_axolotl_290_an_example_without_text_stops_the_run_without_a_word_on_it(tmp_path):
    """Null, empty and white space are counted and left out, and the others are there."""
    lines = [{"text": None}, {"text": ""}, {"text": "\n "}, {"text": "one"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("two")
    said, _ = prepare("a.jsonl", "--val=b.txt", *CHARS, cwd=tmp_path)
    assert "train: 4 tokens in 1 document\n" in said and "skipped: 3 empty\n" in said
