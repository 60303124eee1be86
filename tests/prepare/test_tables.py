"""data/prepare.py with CSV, TSV and a document per line, and white space that is no document."""

import csv
import gzip
import hashlib
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from test_prepare import expected_chars, ids_of, made_up, prepare, zstd

from runtime.errors import UserError
from runtime.prepare.delimited import table_texts

OPTIONS = ("--tokenizer=char", "--name=./out", "--overwrite")
CELLS = ["plain", "a, b", 'say "hi"', '"quoted"', "two\nlines", "tab\there", "漢字 🙂", "  spaces  ", "<|endoftext|>"]


def text_of(folder):
    """{split: text} of a dataset of characters."""
    meta, ids = ids_of(folder)
    chars = meta["tokenizer"]["chars"]
    return {split: "".join(chars[i] for i in own) for split, own in ids.items()}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("kind, delimiter", [("csv", ","), ("tsv", "\t")])
def test_tables_have_the_documents_of_the_same_json_lines(tmp_path, kind, delimiter, line_end):
    """Also with a byte order mark, compressed, and from a pipe. Empty lines are no rows."""
    texts = [f"{cell} {n}" for n, cell in enumerate(CELLS * 8)] + CELLS[:8]
    path = tmp_path / f"a.{kind}"
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end)
        writer.writerow(["id", "body"])
        for number, text in enumerate(texts):
            writer.writerow([number, text.replace("\n", line_end)])
            file.write(line_end * (number % 7 == 0))
    content = path.read_bytes()
    (tmp_path / f"b.{kind}.gz").write_bytes(gzip.compress(content))
    (tmp_path / f"c.{kind}.zst").write_bytes(zstd(content))
    for args, stdin in ([f"a.{kind}"], None), ([f"b.{kind}.gz"], None), ([f"c.{kind}.zst"], None), (
            ["-", f"--format={kind}"], content):
        prepare(*args, "--field=body", "--val_fraction=0.3", *OPTIONS, cwd=tmp_path, stdin=stdin)
        assert ids_of(tmp_path / "out")[1] == expected_chars(texts)[1], args


QUOTES = 'put quotes, "...", around a field with {}, a line end or a quote in it, and write the quote twice, ""\n'
HEADER = "a.csv has no column 'text' in its first row "
TABLES = {  # {what: (file, content, message)}
    "no header": (
        "a.csv", "It was, he said\nsecond\n",
        f"{HEADER}(It was,  he said): choose one with --field=NAME, add a row with the names, or read each line as a "
        "document with --format=lines\n"),
    "another column": ("a.csv", "id,body\n1,x\n", f"{HEADER}(id, body): choose one "),
    "semicolons": ("a.csv", "id;text\n1;x\n", f"{HEADER}(id;text): choose one with "),
    "twice": ("a.csv", "text,text\n1,x\n", "a.csv has several columns 'text': rename all but one\n"),
    "nothing": ("a.csv", "", f"{HEADER}(empty): choose one with --field=NAME"),
    "UTF-16": ("a.csv", "t\0e\0x\0t\0\n\0", "a.csv has NUL bytes, as in UTF-16: save it as UTF-8\n"),
    "a comma": (
        "a.csv", 'id,text\n1,"x\ny"\n2,one, two\n',
        f"a.csv, line 4: the row has 3 fields, and the header 2: {QUOTES.format('a comma')}"),
    "a row that is cut": (
        "a.tsv", "id\ttext\n1\n",
        f"a.tsv, line 2: the row has 1 field, and the header 2: {QUOTES.format('a tab')}"),
    "a quote": (
        "a.tsv", 'id\ttext\n1\t"Hi" he said\n',
        f"a.tsv, line 2: '\\t' expected after '\"': {QUOTES.format('a tab')}"),
    "a quote that stays open": (
        "a.csv", 'id,text\n1,x\n2,"never\n3,closed\n4,y\n', "a.csv, line 3: unexpected end of data: put quotes"),
    "a quote that closes later": (
        "a.csv", 'id,text\n1,"never\n2,"x"\n', "a.csv, line 2: ',' expected after '\"': put quotes"),
    "no UTF-8": ("a.csv", "id,text\n1,one\n2,caf\udce9\n", "a.csv, row 2: 'utf-8' codec can't decode byte 0xe9 in ")}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_is_not_as_it_seems_is_a_sentence(tmp_path, case):
    name, content, message = TABLES[case]
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    _, refused = prepare(name, *OPTIONS, cwd=tmp_path, code=2)
    assert refused.startswith(message) and refused.count("\n") == 1, refused
    assert not list(tmp_path.glob("out/[!.]*"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"\0", b"text\n\"" + b"x" * 1000 + b"\n", b"text\n" + b"," * 1000])
def test_a_line_or_a_field_without_end_is_a_sentence(content):
    """As in a sparse file of zeros: no more is read than the most that a record may have."""
    endless = io.BytesIO(content + bytes(5000))
    with pytest.raises(UserError, match=r"^a.csv(, line 2: field larger| has a line of more than 500 characters: )"):
        list(table_texts("a.csv", endless, "csv", "text", 500))


def test_conversations_are_not_read_from_tables(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\nHi,Hello\n")
    _, refused = prepare("a.csv", "--format=chat", *OPTIONS, cwd=tmp_path, code=2)
    assert refused == ("a.csv is a table, and conversations come from JSON, Parquet or Arrow: write a line such as "
                       '{"prompt": "...", "completion": "..."} for each row\n')


def test_a_field_that_cannot_be_read_is_left_out_when_asked(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,one\n2,caf\xe9\n3,three\n")
    (tmp_path / "b.csv").write_bytes(b"text\nfour\n")
    said, _ = prepare("a.csv", "--val=b.csv", "--skip_unreadable", *OPTIONS, cwd=tmp_path)
    assert "skipped: 1 unreadable\n" in said
    assert text_of(tmp_path / "out") == {"train": "one\nthree\n", "val": "four\n"}


def test_each_line_is_a_document(tmp_path):
    """Also with Windows line ends. An end-of-text ends a document, too, and gets no second one."""
    lines = "one two\r\n\r\n   \nthree<|endoftext|>\nfour<|endoftext|>five\none two\nsix, \"seven\""
    (tmp_path / "a.txt").write_bytes(lines.encode())
    (tmp_path / "b.csv").write_text("eight\n")
    said, _ = prepare("a.txt", "--val=b.csv", "--format=lines", *OPTIONS, cwd=tmp_path)
    assert text_of(tmp_path / "out") == {"train": "one two\nthree\nfour\nfive\nsix, \"seven\"\n", "val": "eight\n"}
    assert "train: 37 tokens in 5 documents\n" in said and "skipped: 1 duplicate, 2 empty\n" in said


@pytest.mark.parametrize("line_end", ["\r", "\r\n", "\n"])
def test_any_line_end_ends_a_document(tmp_path, line_end):
    """As in Python's text files. Line ends are at all places of the blocks in which the file is read."""
    texts = [f"{'é' * (number % 97)} {number}" for number in range(1000)]
    (tmp_path / "a.txt").write_bytes("".join(f"{text}{line_end}" for text in texts).encode())
    (tmp_path / "b.txt").write_bytes(b"last\r\r \r")
    said, _ = prepare("a.txt", "--val=b.txt", "--format=lines", *OPTIONS, cwd=tmp_path)
    assert "train: 51,885 tokens in 1,000 documents\n" in said and "skipped: 2 empty\n" in said
    assert text_of(tmp_path / "out") == {"train": "".join(f"{text}\n" for text in texts), "val": "last\n"}
    meta, _ = ids_of(tmp_path / "out")
    content = (tmp_path / "b.txt").read_bytes() + (tmp_path / "a.txt").read_bytes()
    assert meta["source"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_many_lines_are_the_same_documents_as_json_lines(tmp_path):
    texts = [text.replace("\n", " ") for text in made_up(300)]
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    prepare("a.txt", "--format=lines", "--val_fraction=0.3", *OPTIONS, cwd=tmp_path)
    assert ids_of(tmp_path / "out")[1] == expected_chars(texts)[1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.txt"])
def test_white_space_alone_is_no_document(tmp_path, name):
    """As in each kind of file. \\u3000 is the space of Chinese and Japanese text."""
    texts = ["one", " ", "\n\n", "\u3000\t", "", " two "]
    if name == "a.jsonl":
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
    elif name == "a.csv":
        with open(tmp_path / name, "w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in texts)])
    else:
        (tmp_path / name).write_text("<|endoftext|>".join(texts))
    (tmp_path / "b.txt").write_text("three")
    said, _ = prepare(name, "--val=b.txt", *OPTIONS, cwd=tmp_path)
    assert text_of(tmp_path / "out") == {"train": "one\n two \n", "val": "three\n"}
    assert "skipped: 4 empty\n" in said
