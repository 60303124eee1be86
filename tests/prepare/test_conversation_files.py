"""Conversations in JSON lines, JSON arrays, Parquet, Arrow, and folders of save_to_disk."""

import datetime
import decimal
import gzip
import io
import json
import os
import re
import runpy
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT

from runtime.data.dataset import SPLITS
from runtime.errors import UserError
from runtime.prepare import inputs, json_records, tables

MAIN = runpy.run_path(str(ROOT / "data" / "prepare.py"))["main"]
datasets.disable_progress_bars()


def conversation(number):
    """A conversation in which one answer has no loss, and which has fields of all kinds."""
    return {
        "messages": [
            {"role": "user", "content": f'q{number} é 🙂 "[,]{{}}\\'},
            {"role": "assistant", "content": "no", "weight": 0},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"a\n{number}", "weight": 1},
        ],
        "id": number,
        "tools": None,
    }


CONVERSATIONS = [conversation(number) for number in range(40)]


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """prepare(*args) runs data/prepare.py here, and returns (meta, {file: content}, output)."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "prepare.py",
                *map(str, args),
                "--name=./out",
                "--overwrite",
                "--format=chat",
                "--tokenizer=char",
                "--val_fraction=0.3",
                "--workers=1",
            ],
        )
        MAIN()
        names = [f"{split}{mask}.bin" for split in SPLITS for mask in ("", "_mask")]
        contents = {name: (tmp_path / "out" / name).read_bytes() for name in names}
        return (
            json.loads((tmp_path / "out" / "meta.json").read_text()),
            contents,
            capsys.readouterr().out,
        )

    return run


def write_forms(folder, records):
    """The same conversations in all kinds of files: {name of the form: path}."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    texts = {
        "lines.jsonl": lines,
        "blank lines.jsonl": "\n \n" + lines.replace("\n", "\r\n\r\n"),
        "lists.jsonl": "".join(json.dumps(record["messages"]) + "\n" for record in records),
        "array.json": json.dumps(records),
        "pretty.json": json.dumps(records, indent=2, ensure_ascii=False) + "\n",
        "mark.json": "\ufeff\n" + json.dumps(records),
        "lists.json": json.dumps([record["messages"] for record in records]),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "array.json.gz").write_bytes(gzip.compress(texts["array.json"].encode()))

    table = datasets.Dataset.from_list(records)
    table.to_parquet(folder / "a.parquet")
    table.save_to_disk(folder / "saved", num_shards=2)
    datasets.DatasetDict(train=table).save_to_disk(folder / "splits")
    with pyarrow.ipc.new_file(folder / "file.arrow", table.data.table.schema) as file:
        file.write_table(table.data.table, max_chunksize=7)
    # What load_from_disk and map leave there
    (folder / "saved" / "cache-0123456789abcdef.arrow").write_bytes(b"not Arrow")
    (folder / "hub").mkdir()
    table.to_parquet(folder / "hub" / "train-00000-of-00001.parquet")
    (folder / "hub" / "README.md").write_text("A dataset's card.")
    return [*texts, "array.json.gz", "a.parquet", "saved", "splits", "file.arrow", "hub"]


def test_all_kinds_of_files_give_the_same_tokens_and_masks(tmp_path, prepare):
    forms = write_forms(tmp_path, CONVERSATIONS)
    meta, wanted, output = prepare(forms[0])
    assert "fields that aren't used: id (40)" in output and meta["unused_fields"] == {"id": 40}
    chars = meta["tokenizer"]["chars"]
    text = "".join(chars[i] for i in wanted["train.bin"][::2])
    mask = wanted["train_mask.bin"]
    assert "Assistant:\nno\3User:\nagain\n\nAssistant:\na\n" in text and 'é 🙂 "[,]{}\\' in text
    place = text.index("no\3User:\nagain\n\nAssistant:\na\n")
    assert list(mask[place : place + 29]) == [0] * 27 + [1, 1]
    others = {form: prepare(form)[1] for form in forms[1:]}
    assert [form for form, contents in others.items() if contents != wanted] == []


def test_a_pipe_may_hold_an_array(tmp_path, prepare, monkeypatch):
    (tmp_path / "a.json").write_text(json.dumps(CONVERSATIONS))
    wanted = prepare("a.json")[1]
    with open("a.json", "rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        assert prepare("-")[1] == wanted


def test_values_of_mixed_types_in_parquet_and_arrow_are_what_json_lines_say(tmp_path, prepare):
    """datasets stores them as JSON in text: 7 as "7", and "7" as "\\"7\\""."""
    values = [7, "7", "seven", {"k": [1, None]}, None, True, -0.5, "[]", ["x"]]
    records = [
        {"instruction": f"i{i}", "input": values[i % len(values)], "output": "o"} for i in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "a.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert type(table.features["input"]).__name__ == "Json"
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    wanted = prepare("a.jsonl")[1]
    assert prepare("a.parquet")[1] == wanted and prepare("saved")[1] == wanted
    chars = prepare("a.jsonl")[0]["tokenizer"]["chars"]
    text = "".join(chars[i] for i in wanted["train.bin"][::2] + wanted["val.bin"][::2])
    for shown in (
        "i0\n\n7\n\n",
        "i1\n\n7\n\n",
        'i3\n\n{"k": [1, null]}\n\n',
        "i4\n\nAssistant",
        "i5\n\ntrue\n\n",
        "i7\n\n[]\n\n",
        'i8\n\n["x"]\n\n',
    ):
        assert text.count(f"User:\n{shown}") == 1, shown

    parts = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}] if i % 2 else "a"},
            ]
        }
        for i in range(40)
    ]
    nested = datasets.Dataset.from_dict(
        {"messages": [record["messages"] for record in parts]}, on_mixed_types="use_json"
    )
    nested.to_parquet(tmp_path / "parts.parquet")
    (tmp_path / "parts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in parts))
    assert prepare("parts.parquet")[1] == prepare("parts.jsonl")[1]


def test_a_field_twice_in_parquets_json_is_refused_as_in_json_lines(tmp_path, prepare):
    """And what is there once keeps its spaces and escapes: it isn't written anew."""
    message = '{"role": "assistant", "content": "a", "weight": 0, "weight": 1}'
    lists = ['[{"role": "user", "content": "q"}, {"role": "assistant",  "content": "\\u00e9"}]'] * 2
    lists.append(f'[{{"role": "user", "content": "q"}}, {message}]')
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(lists))
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    rows = list(tables.json_rows(str(tmp_path / "a.parquet")))
    assert rows == [f'{{"messages": {text}}}'.encode() for text in lists]
    with pytest.raises(UserError) as refused:
        prepare("a.parquet")
    assert str(refused.value).startswith(
        "1 of 3 conversations can't be used, the first is a.parquet, row 3: the field 'weight' "
        "twice in an object: keep one of the two")

    damaged = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['1, "x": 2']))
    pyarrow.parquet.write_table(pyarrow.table({"messages": damaged}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="b.parquet is corrupt, or not what its name says .Extra"):
        prepare("b.parquet")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, kind):
    """pyarrow has the first one as the column, and the last one in a row."""
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    path = str(tmp_path / f"a.{kind}")
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    for read in (lambda: inputs.read_records(path, kind, "text", 4096),
                 lambda: inputs.read_conversations(path)):
        with pytest.raises(UserError, match=f"a.{kind} has several columns 'text': rename all but"):
            list(read())


def test_two_fields_of_one_name_in_a_message_are_refused(tmp_path):
    parts = [pyarrow.array(["user"]), pyarrow.array(["assistant"])]
    message = pyarrow.StructArray.from_arrays(parts, ["role", "role"])
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1]), message)
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), path)
    with pytest.raises(UserError, match="a.parquet has several fields 'role': rename all but one"):
        list(inputs.read_conversations(path))


def test_an_array_of_conversations_on_each_line_is_told_of(tmp_path, prepare):
    """jq writes a conversation per line of it, which is what the sentence says."""
    lists = [record["messages"] for record in CONVERSATIONS]
    for name, line in ("lists", lists[:2]), ("objects", CONVERSATIONS[:2]):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
        with pytest.raises(UserError) as refused:
            prepare(f"{name}.jsonl")
        assert str(refused.value) == (
            f"{name}.jsonl has several JSON arrays, such as one per line: write one conversation "
            "per line, as jq -c '.[]' FILE > FILE.jsonl does")
    # After a line with one conversation, each line is one
    (tmp_path / "mixed.jsonl").write_text(f"{json.dumps(lists[0])}\n{json.dumps([lists[1]])}\n")
    with pytest.raises(UserError, match="mixed.jsonl, line 2, message 1: a list in the place of a "
                                        "message: write one conversation per line or element"):
        prepare("mixed.jsonl")


def rows_of(path, table):
    pyarrow.parquet.write_table(table, path)
    return [json.loads(row) for row in tables.json_rows(str(path))]


def test_what_json_has_no_type_for_becomes_text_or_is_no_text(tmp_path):
    table = pyarrow.table(
        {
            "day": [datetime.date(2024, 5, 1)],
            "time": [datetime.datetime(2024, 5, 1, 12, 30)],
            "price": [decimal.Decimal("1.50")],
            "image": [b"\xff\xd8"],
            "none": pyarrow.array([None], "string"),
        }
    )
    assert rows_of(tmp_path / "a.parquet", table) == [
        {
            "day": "2024-05-01",
            "time": "2024-05-01 12:30:00",
            "price": "1.50",
            "image": {"bytes": 2},
            "none": None,
        }
    ]
    for name in ("input", "image"):
        table = pyarrow.table({"instruction": ["i"], name: [b"x"], "output": ["o"]})
        if name == "image":
            assert rows_of(tmp_path / "a.parquet", table)[0]["image"] == {"bytes": 1}
        else:
            with pytest.raises(
                UserError, match="has bytes in the column 'input', not text: convert it"
            ):
                rows_of(tmp_path / "a.parquet", table)


def test_texts_of_arrow_files_are_read_too(tmp_path):
    datasets.Dataset.from_dict({"text": ["a", None, "é"], "n": [1, 2, 3]}).save_to_disk(
        tmp_path / "saved"
    )
    files = inputs.find_files([str(tmp_path / "saved")])
    assert [os.path.basename(file) for file in files] == ["data-00000-of-00001.arrow"]
    kind = inputs.kind_of(files[0])
    assert list(inputs.read_records(files[0], kind, "text", 4096)) == [b"a", b"", "é".encode()]
    with pytest.raises(
        UserError,
        match="has no text column 'n' .text columns: text.: choose one with --field=NAME, or ",
    ):
        list(inputs.read_records(files[0], kind, "n", 4096))


def test_a_saved_folder_is_whole_or_refused(tmp_path):
    table = datasets.Dataset.from_dict({"text": ["a", "b"]})
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "i"}]})
    )
    with pytest.raises(
        UserError,
        match="saved is of an old version of datasets, and may hold rows that were filtered",
    ):
        inputs.find_files([str(tmp_path / "saved")])
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        UserError,
        match="saved has no data-00001-of-00002.arrow, which its state.json names: copy it",
    ):
        inputs.find_files([str(tmp_path / "saved")])
    (tmp_path / "other").mkdir()
    for name in ("state.json", "a.arrow", "dataset_dict.json"):  # of another program
        (tmp_path / "other" / name).write_text("{}")
    assert len(inputs.find_files([str(tmp_path / "other")])) == 3


def elements(content, block, max_bytes=1000):
    json_records.BLOCK_BYTES = block
    file = io.BufferedReader(io.BytesIO(content), 16)
    return list(json_records.json_records(file, max_bytes))


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    monkeypatch.setattr(json_records, "BLOCK_BYTES", json_records.BLOCK_BYTES)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 2**20])
def test_an_array_is_read_in_blocks_of_any_size(block):
    values = [{"a": 'é🙂\\u00e9]}"\\\\'}, [[], {"b": [1, 2.5e-3]}], "te,xt", {}, {"c": None}]
    for indent in (None, 1):
        content = json.dumps(values, ensure_ascii=False, indent=indent).encode()
        found = elements(content + b" \n", block)
        assert [place for place, _ in found] == [f"element {i}" for i in range(1, 6)]
        assert [json.loads(record) for _, record in found] == values
    assert elements(b"[ ]\n", block) == []


@pytest.mark.parametrize("block", [4, 2**20])
def test_lines_are_read_in_blocks_of_any_size(block):
    content = b'\n{"a": 1}\n[1, 2]\n\n{"b": "' + b"x" * 50 + b'"}'
    lines = content.splitlines(keepends=True)
    assert elements(content, block) == [(f"line {i}", line) for i, line in enumerate(lines, 1)]
    long = elements(b"x" * 5000 + b"\ny", block, max_bytes=1000)
    assert len(long[0][1]) > 1000  # enough to be refused, and not much more than it takes to know


@pytest.mark.parametrize("block", [8, 2**20])
@pytest.mark.parametrize(
    "content, problem",
    [
        (b'[{"a": 1}, {"b": ]', "element 2 of the JSON array: Expecting value"),
        (b'[{"a": 1} {"b": 2}]', "element 1 of the JSON array: ',' is missing after it"),
        (b'[{"a": 1}, {"b": 2}', "element 2 of the JSON array: ',' is missing after it"),
        (b'[{"a": 1},', "element 2 of the JSON array: Expecting value"),
        (b'[{"a": 1}, {"b": "', "element 2 of the JSON array: Unterminated string starting at"),
        (b'[{"a": 1}]\n{"a": 2}', "element 2 of the JSON array: more follows after the array"),
        (b'[{"a": 1}]\n[{"a": 2}]', "another JSON array follows"),
        (b'[{"a": "\xe9"}]', "element 1 of the JSON array: invalid UTF-8"),
        (b'[{"a": 1}, {"b": "' + b"x" * 5000 + b'"}]', None),
        (b"[" * 100_000, "element 1 of the JSON array: it is nested too deeply"),
        (b'[{"a": 1' + b"0" * 5000 + b"}]", "element 1 of the JSON array: Exceeds the limit"),
        (b'[{"a": "' + b"x" * 20_000 + b'"}]', None),
    ],
)
def test_a_damaged_array_is_told_in_a_sentence(block, content, problem):
    if problem is None:  # it is only long
        assert len(elements(content, block, max_bytes=30_000)) == content.count(b"}")
        return
    with pytest.raises(ValueError, match=re.escape(problem)):
        elements(content, block, max_bytes=200_000)


def test_a_record_that_is_too_long_ends_the_reading():
    """Of an endless element, not more is read than a record may have."""
    endless = io.BytesIO(b'[{"a": "' + b"x" * 100_000_000)
    file = io.BufferedReader(endless, 16)
    with pytest.raises(ValueError, match="element 1 of the JSON array: Unterminated string"):
        list(json_records.json_records(file, 2_000_000))
    assert endless.tell() < 10_000_000


def arrow(folder, change):
    """A stream of one column with a change to its bytes."""
    datasets.Dataset.from_dict({"text": ["aaaaaaaa", "bbbbbbbb"] * 20}).save_to_disk(folder / "s")
    path = folder / "s" / "data-00000-of-00001.arrow"
    path.write_bytes(change(path.read_bytes()))
    return str(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-200],
        lambda content: b"",
        lambda content: b"ARROW1\0\0" + content,
        lambda content: content[:4] + b"\xff\xff\xff\x7f" + content[8:],
        lambda content: content.replace(
            bytes([8, 0, 0, 0, 16, 0, 0, 0]), b"\xff\xff\xff\x70" * 2, 1
        ),
        lambda content: content.replace(b"aaaaaaaa", b"\xe9" * 8, 1),
        lambda content: b"\x80\x04N." * 50,
    ],
)
def test_arrow_of_any_damage_is_a_sentence(tmp_path, change):
    path = arrow(tmp_path, change)
    with pytest.raises(UserError, match="is corrupt, or not what its name says"):
        list(inputs.read_records(path, "arrow", "text", 4096))
    with pytest.raises(UserError, match="is corrupt, or not what its name says"):
        list(inputs.read_conversations(path))


def test_refused_conversations_are_counted_and_nothing_is_written(tmp_path, prepare):
    """3 of 46 have tools, and 2 a role of a tool, in lines, an array and Parquet."""
    tools = [conversation(number) | {"tools": [{"name": "f"}]} for number in (100, 101, 102)]
    roles = [
        {"messages": [{"role": "tool", "content": "x"}, *conversation(number)["messages"]]}
        for number in (103, 104)
    ]
    records = [
        *CONVERSATIONS[:7],
        *tools,
        *CONVERSATIONS[7:],
        *roles,
        {"messages": [], "chosen": "x"},
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n" + "".join(json.dumps(record) + "\n" for record in records)
    )
    (tmp_path / "a.json").write_text(json.dumps(records))
    for record in records:
        record["chosen"] = record.get("chosen")
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    for file, place in {
        "a.jsonl": "line {}",
        "a.json": "element {}",
        "a.parquet": "row {}",
    }.items():
        eighth, last = (place.format(number + (file == "a.jsonl")) for number in (8, 44))
        with pytest.raises(UserError) as refused:
            prepare(file)
        lines = str(refused.value).split("\n")
        assert lines[:2] == [
            f"3 of 46 conversations can't be used, the first is {file}, {eighth}: the field "
            "'tools': the chat template has no place for tools: write them into a system message, "
            "or leave it out with --ignore_fields=tools",
            f"2 of 46 conversations can't be used, the first is {file}, {last}, message 1: the "
            "role 'tool': use system, user or assistant",
        ]
        assert (
            lines[2].startswith("1 of 46 conversations can't be used, the first is")
            and "'chosen'" in lines[2]
        )
        assert lines[-1].endswith("; or skip such conversations with --skip_unreadable")
        assert not (tmp_path / "out").exists()

    meta, _, output = prepare("a.jsonl", "--skip_unreadable")
    assert meta["documents"] == {
        "train": meta["documents"]["train"],
        "val": 40 - meta["documents"]["train"],
        "duplicates": 0,
        "empty": 1,
        "unreadable": 6,
    }
    assert (
        "  3 of 46 conversations can't be used, the first is a.jsonl, line 9: the field 'tools'"
        in output
    )
    meta = prepare("a.jsonl", "--skip_unreadable", "--ignore_fields=tools,id")[0]
    assert (
        sum(meta["documents"][split] for split in SPLITS) == 43
        and meta["documents"]["unreadable"] == 3
    )
    assert meta["unused_fields"] == {"id": 43, "tools": 3} and meta["options"]["ignore_fields"] == [
        "tools",
        "id",
    ]


@pytest.mark.parametrize("args, words", [
    (["--format=chat", "--field=text"], None),
    (["--format=chat", "--field=chat"], "--field=chat is for texts: drop it, and see docs/chat.md"),
    (["--format=lines", "--field=body"], "^--field=body is for JSON lines, tables and Parquet, and by their names "
     "these files are text: say what they hold with --format, such as --format=jsonl, or drop it$"),
    (["--format=chat", "--max_document_bytes=400"], "^--max_document_bytes=400 cuts texts, and "
     "these files have documents of their own, which are never cut: drop it$"),
    (["--field=id", "--max_document_bytes=400"], "^--max_document_bytes=400 cuts texts, and "),
    (["--format=lines", "--max_document_bytes=400"], "^--max_document_bytes=400 cuts texts, and "),
    (["--ignore_fields=a"], "--ignore_fields is for conversations: add --format=chat, or drop it")],
    ids=["the default", "a field", "a field of text", "cut chats", "cut JSON", "cut lines", "ignored"])
def test_options_that_would_do_nothing_are_refused(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(record) + "\n" for record in CONVERSATIONS]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    command = ["prepare.py", "a.jsonl", "--name=./out", "--tokenizer=char", *args]
    monkeypatch.setattr(sys, "argv", command)
    if words is None:
        MAIN()
        return
    with pytest.raises(UserError, match=words):
        MAIN()


def test_only_the_most_frequent_problems_are_told(tmp_path, prepare):
    records = [
        {"messages": [{"role": f"r{number}", "content": "x"}, *conversation(0)["messages"]]}
        for number in range(100)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError) as refused:
        prepare("a.jsonl")
    lines = str(refused.value).split("\n")
    assert len(lines) == 21 and lines[-1].startswith("and 80 other problems: correct these first")


def test_names_of_fields_put_no_escapes_on_a_terminal(tmp_path, prepare):
    records = [*CONVERSATIONS, conversation(40) | {"\x1b[2J": 1}, conversation(41) | {"\ud800": 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = prepare("a.jsonl", "--skip_unreadable")[2]
    assert "\x1b" not in output and r"the field '\x1b[2J' isn't known" in output
    assert r"the field '\ud800' isn't known" in output
