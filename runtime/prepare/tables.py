"""Read Parquet and Arrow files, such as those that datasets' save_to_disk has written."""

import collections
import datetime
import decimal
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from runtime.errors import UserError
from runtime.prepare.json_records import DECODER
from runtime.untrusted import read_json

ROWS = 64  # that are in memory at once
ARROW_FILE = b"ARROW1"  # begins an Arrow file, but not a stream, as datasets writes it
TEXT = re.compile(r"(dictionary<values=)?(large_)?string")
BYTES = re.compile(r"(^|: |values=)(large_|fixed_size_)?binary")
JSON_TYPE = "extension<arrow.json>"  # values of mixed types, as datasets stores them
WRITTEN_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
DESCRIPTIONS = {"state.json", "dataset_info.json", "dataset_dict.json"}  # of save_to_disk


def open_table(name: str) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return (the schema of a file, a function that yields RecordBatches of some columns).

    Raises UserError, and pyarrow's errors if the file is damaged.
    """
    if name == "-":
        raise UserError("Parquet can't be read from a pipe: name the file")
    if name.lower().endswith(".arrow"):
        schema, read = open_arrow(name)
    else:
        schema, read = open_parquet(name)
    check_unique(name, schema)
    return schema, read


def check_unique(name: str, columns: Any, of: str = "columns") -> None:
    """Raise UserError if two columns of a table, or two fields of a struct, have one name.

    pyarrow would keep one of them without a word. columns: a schema or a struct's type.
    """
    names = [column.name for column in columns]
    for repeated, count in collections.Counter(names).items():
        if count > 1:
            raise UserError(f"{name} has several {of} {repeated!r}: rename all but one")

    # Structs have fields, which may be inside of lists
    for column in columns:
        kind = column.type
        while has_one_kind(kind):
            kind = kind.value_type
        if is_struct(kind):
            check_unique(name, kind, "fields")


def is_struct(kind: Any) -> bool:
    """Return whether values of Arrow's type `kind` have fields with names."""
    from pyarrow import types

    return types.is_struct(kind)


def has_one_kind(kind: Any) -> bool:
    """Return whether values of Arrow's type `kind` are lists."""
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def open_parquet(name: str) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return what open_table() does, of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    # With pre_buffer, it would keep whole row groups in memory
    file = ParquetFile(name, buffer_size=2**20, pre_buffer=False)

    def read(columns: list[str]) -> Iterator[Any]:
        return file.iter_batches(batch_size=ROWS, columns=columns, use_threads=False)

    return file.schema_arrow, read


def open_arrow(name: str) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return what open_table() does, of an Arrow file or stream."""
    import pyarrow

    # With a memory map, a length that the file doesn't have is an error, not an allocation
    file = pyarrow.memory_map(name)
    begins = file.read(len(ARROW_FILE))
    file.seek(0)
    if begins == ARROW_FILE:
        reader = pyarrow.ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = reader = pyarrow.ipc.open_stream(file)

    def read(columns: list[str]) -> Iterator[Any]:
        for batch in batches:
            chosen = batch.select(columns)
            chosen.validate(full=True)  # places outside of the file would otherwise be read
            for start in range(0, chosen.num_rows, ROWS):
                yield chosen.slice(start, ROWS)

    return reader.schema, read


def column_texts(name: str, field: str) -> Iterator[bytes]:
    """Yield the texts of a column as bytes, which are perhaps not UTF-8.

    Raises UserError, and pyarrow's errors.
    """
    schema, read = open_table(name)

    # Columns of text alone, so that a number is not trained on by mistake
    columns = [column.name for column in schema if TEXT.match(str(column.type))]
    if field not in columns:
        raise UserError(f"{name} has no text column {field!r} (text columns: "
                        f"{', '.join(columns) or 'none'}): choose one with --field=NAME, or read "
                        "conversations with --format=chat")
    # As bytes, so that what isn't UTF-8 is an error of its row alone
    for batch in read([field]):
        for text in batch.column(0).cast("large_binary").to_pylist():
            yield text or b""


def json_rows(name: str) -> Iterator[bytes]:
    """Yield the rows of a file as JSON, UTF-8.

    Dates, times and decimal numbers become text, and bytes their number. Raises UserError, and
    pyarrow's errors.
    """
    schema, read = open_table(name)
    # Alpaca's input may be anything but bytes, whose number would become its text
    for column in schema:
        if column.name == "input" and BYTES.search(str(column.type)):
            raise UserError(f"{name} has bytes in the column 'input', not text: convert it")
    # Without such a column, a row is written at once, which is faster
    has_json = any(JSON_TYPE in str(column.type) for column in schema)
    for batch in read(schema.names):
        for row in batch.to_pylist():
            if has_json:
                fields = [json_field(row[column.name], column) for column in schema]
                text = "{" + ", ".join(fields) + "}"
            else:
                text = plain_json(row)
            yield text.encode(errors="surrogatepass")


def json_field(value: Any, column: Any) -> str:
    """Return a field of an object in JSON: its name and its value. column: Arrow's field."""
    return f"{plain_json(column.name)}: {json_text(value, column.type)}"


def json_text(value: Any, kind: Any) -> str:
    """Return a value of Arrow's type `kind` as JSON.

    What is JSON already stays as it is written: decoding it would drop a field that an object has
    twice, and nobody would see it.
    """
    # From the type, because a text and a JSON value look alike in Python
    if value is not None:
        if is_struct(kind):
            fields = [json_field(value[field.name], field) for field in kind]
            return "{" + ", ".join(fields) + "}"
        if has_one_kind(kind):
            items = [json_text(item, kind.value_type) for item in value]
            return "[" + ", ".join(items) + "]"
        if JSON_TYPE in str(kind):
            DECODER.decode(value)  # raises ValueError if it isn't JSON
            return value
    return plain_json(value)


def plain_json(value: Any) -> str:
    """Return a value as JSON, with text in the place of what JSON can't hold."""
    return json.dumps(value, ensure_ascii=False, default=as_json)


def as_json(value: Any) -> Any:
    """Return what JSON has for a value that it can't hold."""
    if isinstance(value, WRITTEN_AS_TEXT):
        return str(value)
    return {"bytes": len(value)}


def without_descriptions(files: list[str]) -> list[str]:
    """Return the files without what datasets' save_to_disk and load_from_disk keep beside the data.

    Raises UserError if a folder isn't whole.
    """
    # Folders of save_to_disk have both, the data and its description
    with_state = {os.path.dirname(file) for file in files if os.path.basename(file) == "state.json"}
    with_arrow = {os.path.dirname(file) for file in files if file.endswith(".arrow")}
    data = {}  # of each folder of save_to_disk, the names of its data files
    for folder in with_state & with_arrow:
        names = data_files(folder)
        if names is not None:
            data[folder] = names
    above = {os.path.dirname(folder) for folder in data}  # the folders of several splits

    # Leave out caches beside the data, and descriptions there and above
    kept = []
    for file in files:
        folder, name = os.path.split(file)
        is_ours = folder in data or folder in above
        is_cache = folder in data and name.endswith(".arrow") and name not in data[folder]
        if not is_cache and not (is_ours and name in DESCRIPTIONS):
            kept.append(file)
    return kept


def data_files(folder: str) -> set[str] | None:
    """Return the names of the data files of a folder of save_to_disk, or None if it is none.

    Raises UserError if the folder isn't whole.
    """
    # state.json names the files in which datasets has stored the rows
    state = read_json(os.path.join(folder, "state.json"))
    entries = state.get("_data_files")
    if not isinstance(entries, list):  # of another program
        return None

    # Such indices say which rows count, and the data files hold all
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} is of an old version of datasets, and may hold rows that were "
                        "filtered out: load it, and save it with a new one")
    # All files that it names must be there
    names = {str(entry.get("filename")) for entry in entries if isinstance(entry, dict)}
    missing = sorted(names - set(os.listdir(folder)))
    if missing:
        raise UserError(f"{folder} has no {missing[0]}, which its state.json names: copy it again")
    return names
