"""Hostile files: one row each, with the file that it takes the place of, and what is in it.

A new hostile file is one row here. test_hostile.py gives it to each reader that reads its folder
(readers.py). A reader that can't do without the file must refuse it: exit code 2. Other readers
work, with exit code 0. Where neither holds, `code` says what must happen, and a comment says why.
"""

import functools
import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from conftest import Payload
from PIL import Image

from runtime.checkpoint.manifest import sign_manifest
from runtime.files import file_digest

SECRET = "~~SECRET~~"  # in the private file. No other file has a ~
ESCAPE = "\x1b]0;title\x07\x1b[2J"  # sets a terminal's title, and clears its screen
PADDING = torch.zeros(50_000)  # so that a file isn't refused for its size
DEEP = "[" * 100_000 + "]" * 100_000
HALF = "\ud800"  # half a character, which can't be encoded
NAN = float("nan")
HUGE = 10**400  # float() fails
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = ("{% set ns = namespace(x='x') %}{% for i in range(50) %}{% set ns.x = ns.x + ns.x %}"
          "{% endfor %}{{ ns.x }}")
TEMPLATES = {
    "a loop": LOOP,
    "a string that doubles": DOUBLE,
    "a long string": "{{ 'x' * 10**11 }}",
    "a wide format": "{{ '%100000000000d' % 1 }}",
    "a recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a list that grows": "{% set l = [1] %}{% for i in range(99999) %}{{ l.extend(l) or '' }}"
                         "{% endfor %}",
    "an error with escapes": "{{ raise_exception('" + ESCAPE + "') }}",
    "a syntax error": "{% for %}",
    "a division by zero": "{{ 1 / 0 }}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "Python's classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


class Trap:
    """What a hostile file may set off or change: marks, which code leaves, and private files."""

    def __init__(self, folder: Path):
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.mark = self.marks / "mark"
        self.home = folder / "home"
        self.home.mkdir()
        self.private = self.home / "private"
        self.private.write_text(SECRET)
        self.private_folder = self.home / "folder"
        self.private_folder.mkdir()
        (self.private_folder / "file").write_text(SECRET)
        self.empty_folder = self.home / "empty"
        self.empty_folder.mkdir()
        self.missing = self.home / "missing"
        self.programs = folder / "programs"
        self.programs.mkdir()
        ghostscript = self.programs / "gs"  # Pillow starts it for EPS
        ghostscript.write_text(f"#!/bin/sh\nmkdir '{self.mark}'\n")
        ghostscript.chmod(0o755)
        self.before = self.state()

    def state(self) -> dict[str, bytes | None]:
        """Return what is in the user's folder: {path: content, or None for a folder}."""
        found = {}
        for path in sorted(self.home.rglob("*")):
            found[str(path.relative_to(self.home))] = path.read_bytes() if path.is_file() else None
        return found

    def problems(self) -> list[str]:
        """Return what the hostile file has set off or changed, as sentences."""
        problems = []
        if os.listdir(self.marks):
            problems.append("its code ran")
        if self.state() != self.before:
            problems.append(f"the user's own files changed: {self.state()}")
        return problems


class HostileFile(NamedTuple):
    path: str  # FOLDER/PATH, of the file that it takes the place of
    what: str
    write: Callable[[Path, Trap], None]
    code: int | None = None  # the exit code; None: 2 where the file is read, else 0
    readers: str = "*"  # patterns of the names of the readers that it is for, with | between them
    is_long: bool = False  # only with --all: it takes several seconds


# What writes a file


def write_fifo(path: Path, trap: Trap) -> None:
    os.mkfifo(path)


def write_folder(path: Path, trap: Trap) -> None:
    path.mkdir()


def write_sparse(path: Path, trap: Trap) -> None:
    """Write a file of 200 GB that takes no room."""
    with open(path, "wb") as file:
        file.truncate(200 * 10**9)


def write_zip_pickle(path: Path, trap: Trap) -> None:
    torch.save({"module": Payload(trap.mark), "padding": PADDING}, path)


def write_legacy_pickle(path: Path, trap: Trap) -> None:
    content = {"module": Payload(trap.mark), "padding": PADDING}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def write_plain_pickle(path: Path, trap: Trap) -> None:
    path.write_bytes(pickle.dumps({"module": Payload(trap.mark), "padding": bytes(200_000)}))


def write_object_array(path: Path, trap: Trap) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array([Payload(trap.mark)] * 100, object), allow_pickle=True)


def write_module(path: Path, trap: Trap) -> None:
    path.write_text(f"import os\nos.mkdir({str(trap.mark)!r})\n")


def write_eps(path: Path, trap: Trap) -> None:
    """Write an EPS file, for which Pillow starts Ghostscript."""
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n")


def write_large_picture(path: Path, trap: Trap) -> None:
    """Write 13,000 x 13,000 pixels in a small file."""
    Image.new("1", (13_000, 13_000)).save(path)


def write_huge_picture(path: Path, trap: Trap) -> None:
    """Write a header that announces 10^9 x 10^9 pixels."""
    image = io.BytesIO()
    Image.new("1", (8, 8)).save(image, "PNG")
    header = bytearray(image.getvalue())
    header[16:24] = struct.pack(">II", 10**9, 10**9)
    path.write_bytes(header)


def write_expanded_tensor(path: Path, trap: Trap) -> None:
    """Write a tensor of 10^18 elements, which are the same one."""
    torch.save({"transformer.wte.weight": torch.zeros(1, 1).expand(10**9, 10**9)}, path)


def write_tar(path: Path, trap: Trap) -> None:
    """Write a WebDataset with pickles, and nothing else."""
    for other in path.parent.glob("*.parquet"):
        other.unlink()
    with tarfile.open(path, "w") as archive:
        for name in ("0.pickle", "0.pkl", "0.pyd", "0.pth", "0.npy"):
            content = pickle.dumps(Payload(trap.mark))
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_modules(path: Path, trap: Trap) -> None:
    """Write modules with the names of those that commands import."""
    code = f"import os\nos.makedirs({str(trap.mark)!r}, exist_ok=True)\n"
    for name in ("pip", "torch", "numpy", "json", "argparse", "deepspeed", "model", "configurator",
                 "sitecustomize", "usercustomize", "transformers", "tiktoken", "psutil", "tqdm",
                 "train_deepspeed", "sample", "matplotlib", "PIL", "datasets", "huggingface_hub"):
        (path.parent / f"{name}.py").write_text(code)
    for name in ("runtime", "data", "torch/distributed"):
        (path.parent / name).mkdir(parents=True)
        (path.parent / name / "__init__.py").write_text(code)
    path.touch()


def link(to: str) -> Callable:
    """A link to an attribute of the Trap, such as "private", or to a path."""

    def write(path: Path, trap: Trap) -> None:
        path.symlink_to(getattr(trap, to, to))

    return write


def text(content: str | bytes) -> Callable:
    def write(path: Path, trap: Trap) -> None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def append(line: str) -> Callable:
    """The file as it was, and one more line."""

    def write(path: Path, trap: Trap) -> None:
        path.write_text(trap.replaced.decode() + line + "\n")

    return write


def folder_of(name: str, write_file: Callable) -> Callable:
    """A folder with one file."""

    def write(path: Path, trap: Trap) -> None:
        path.mkdir()
        write_file(path / name, trap)

    return write


def edit(key: str, value: Any) -> Callable:
    """The JSON as it was, with another value of a key, such as "state.model.n_embd".

    A manifest and a dataset's meta.json get their right hashes. value: a function takes the Trap.
    """

    def write(path: Path, trap: Trap) -> None:
        content = json.loads(trap.replaced)
        *parents, last = key.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        new = value(trap) if callable(value) else value
        place[int(last) if isinstance(place, list) else last] = new
        path.write_text(sign(path, content))

    return write


def sign(path: Path, content: Any) -> str:
    """Return a JSON file's text. A manifest has its own hash in it."""
    if path.name == "manifest.json":
        return sign_manifest(content)
    return json.dumps(content)


def in_tag(write_file: Callable) -> Callable:
    """A file of a checkpoint, whose manifest then has the right size and hash."""

    def write(path: Path, trap: Trap) -> None:
        write_file(path, trap)
        manifest_path = path.parent / "manifest.json"
        manifest = json.loads(manifest_path.read_text())
        manifest["files"][path.name] = file_digest(path)
        manifest_path.write_text(sign_manifest(manifest))

    return write


def in_dataset(write_file: Callable) -> Callable:
    """A dataset's tokenizer.json, whose hash meta.json then has."""

    def write(path: Path, trap: Trap) -> None:
        write_file(path, trap)
        meta_path = path.parent / "meta.json"
        meta = json.loads(meta_path.read_text())
        meta["tokenizer"]["sha256"] = file_digest(path)["sha256"]
        meta_path.write_text(json.dumps(meta))

    return write


def edit_pickle(change: Callable) -> Callable:
    """A file of torch.save() as it was, with a change."""

    def write(path: Path, trap: Trap) -> None:
        content = torch.load(io.BytesIO(trap.replaced), weights_only=False)  # our own
        change(content)
        torch.save(content, path)

    return write


def in_pickle(operations: bytes) -> Callable:
    """A file of torch.save() as it was, with one more value in its pickle, which these make."""

    def write(path: Path, trap: Trap) -> None:
        archive = zipfile.ZipFile(io.BytesIO(trap.replaced))
        writer = torch._C.PyTorchFileWriter(str(path))
        for member in archive.namelist():
            name = member.split("/", 1)[1]
            content = archive.read(member)
            if name == "data.pkl":
                content = content[:-1] + b"X\1\0\0\0x" + operations + b"s."
            if name.startswith("data"):  # it writes the others itself
                writer.write_record(name, content, len(content))
        writer.write_end_of_file()

    return write


def doubled_tuple() -> bytes:
    """Return a pickle's operations for a dict whose key is hashed in 2^60 steps."""
    operations = b"})"
    for i in range(60):
        operations += b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86"  # twice the tuple before
    return operations + b"K\1s"


def write_two_directories(path: Path, trap: Trap) -> None:
    """Write a compressed file with two tables of contents, of which Python's zipfile sees one.

    The other, which PyTorch reads, has a record that unpacks to 100 MB.
    """
    packed = io.BytesIO()
    plain = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(trap.replaced)) as old, zipfile.ZipFile(packed, "w") as new, \
            zipfile.ZipFile(plain, "w") as seen:
        for member in old.namelist():
            seen.writestr(member, b"")
            if member.endswith("/version"):
                new.writestr(member, b"3" + b"\n" * 10**8, zipfile.ZIP_DEFLATED)
            else:
                new.writestr(member, old.read(member))
    contents = [packed.getvalue(), plain.getvalue()]
    ends = [content.rindex(b"PK\5\6") for content in contents]
    starts = [struct.unpack_from("<I", content, end + 16)[0] for content, end in zip(contents, ends)]
    seen_directory = contents[1][starts[1] : ends[1]]
    assert ends[0] - starts[0] == len(seen_directory)
    path.write_bytes(contents[0][: ends[0]] + seen_directory + contents[0][ends[0] :])


def write_large_tag(path: Path, trap: Trap) -> None:
    """Write a file of 200 GB, which the manifest confirms."""
    write_sparse(path, trap)
    manifest_path = path.parent / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": "0" * 64}
    manifest_path.write_text(sign_manifest(manifest))


def write_many_tags(path: Path, trap: Trap) -> None:
    """Make 5,000 tags without a manifest."""
    path.mkdir()
    for i in range(10, 5010):
        (path.parent / f"iter_{i}").mkdir()


def outside(trap: Trap) -> dict:
    """Entries of a manifest for a file elsewhere, with its right hash."""
    path = Path("/etc/hostname")
    return {"../../../../../../../../../../etc/hostname": file_digest(path)}


def bomb(content: bytes, times: int) -> Callable:
    """A compressed file of so many frames, each of which holds 64 times this content of 1 MB."""

    def write(path: Path, trap: Trap) -> None:
        frame = compressed(content * 64, path.suffix)
        with open(path, "wb") as file:
            for _ in range(times):
                file.write(frame)

    return write


@functools.cache
def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def safetensors(header: dict | bytes, size: int | None = None) -> Callable:
    """A file of safetensors with this header, which announces another size of itself."""

    def write(path: Path, trap: Trap) -> None:
        content = header if isinstance(header, bytes) else json.dumps(header).encode()
        length = len(content) if size is None else size
        path.write_bytes(struct.pack("<Q", length) + content + bytes(64))

    return write


def parquet(columns: dict) -> Callable:
    def write(path: Path, trap: Trap) -> None:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)

    return write


def arrow(columns: dict) -> Callable:
    def write(path: Path, trap: Trap) -> None:
        table = pyarrow.table(columns)
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)

    return write


def deep_list(depth: int) -> list:
    """A list in lists."""
    return [deep_list(depth - 1)] if depth else []


def change(old: bytes, new: bytes) -> Callable:
    """The file as it was, with other bytes in one place."""

    def write(path: Path, trap: Trap) -> None:
        assert old in trap.replaced
        path.write_bytes(trap.replaced.replace(old, new, 1))

    return write


def parquet_of(size: int, times: int) -> Callable:
    """A small Parquet file with the same text of so many bytes in so many rows."""

    def write(path: Path, trap: Trap) -> None:
        indices = np.zeros(times, np.int32)
        column = pyarrow.DictionaryArray.from_arrays(indices, ["ab " * (size // 3)])
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")

    return write


def words(vocabulary: dict) -> dict:
    return {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<end>"}


def doubling(times: int) -> dict:
    """A normalizer that makes 2^times letters of each letter o."""
    return {"type": "Sequence", "normalizers": [replace("o", "oo")] * times}


def replace(letter: str, by: str) -> dict:
    return {"type": "Replace", "pattern": {"String": letter}, "content": by}


# The rows. NOT_A_FILE: what no reader may open, whatever it expects there

NOT_A_FILE = [("a pipe", write_fifo), ("endless zeros", link("/dev/zero")),
              ("a folder", write_folder)]
PICKLES = [("a pickle in torch's zip format", write_zip_pickle),
           ("a pickle in torch's old format", write_legacy_pickle),
           ("a plain pickle", write_plain_pickle)]
NOT_JSON = [("nothing", text("")), ("a list", text("[]")), ("a string", text('"text"')),
            ("a number", text("NaN")), ("deep nesting", text(DEEP)),
            ("a deep dict", text('{"a":' * 100_000 + "1" + "}" * 100_000)),
            ("bytes", text(b"\xff\xfe\x00\x1b[2J")), ("200 GB", write_sparse),
            ("a private file", link("private"))]


SLOW_PICKLES = [("a key that is hashed for years", in_pickle(doubled_tuple())),
                ("a key of 300,000 tuples", in_pickle(b"})" + b"\x85" * 300_000 + b"K\1s")),
                ("2 GB of zeros", in_pickle(b"cbuiltins\nbytearray\nJ\0\0\0\x7f\x85R"))]


def rows(path: str, contents: list, wrap: Callable = lambda write: write, **options: Any) -> list:
    """Return a row for each of the contents, as (what, write)."""
    return [HostileFile(path, what, wrap(write), **options) for what, write in contents]


def edits(path: str, values: list, wrap: Callable = lambda write: write, **options: Any) -> list:
    """Return a row for each (key, value) of a JSON file, or (key, value, what the value is)."""
    found = []
    for key, value, *name in values:
        shown = name[0] if name else json.dumps(value)[:30]
        write = wrap(edit(key, value))
        found.append(HostileFile(path, f"{key} = {shown}", write, **options))
    return found


MANIFEST = "run/iter_2/manifest.json"
MODEL = "run/iter_2/mp_rank_00_model_states.pt"
OPTIMIZER = "run/iter_2/zero_pp_rank_0_mp_rank_00_optim_states.pt"
META = "letters/meta.json"
CONFIG = "weights/config.json"
CHECKING = "resume|dry run*|train from a run|sample*|evaluate*|export"  # not "without a check"
INDEX = "weights_shards/model.safetensors.index.json"
HISTORY = "run/history.jsonl"
PICTURE = "pictures/train/class_00/00000.jpg"

RUN = [
    *rows(MANIFEST, NOT_A_FILE + NOT_JSON),
    *edits(MANIFEST, [
        ("iter_num", "2"), ("iter_num", NAN), ("iter_num", HUGE, "10^400"), ("iter_num", -1),
        ("iter_num", [2]), ("state", []), ("state", None), ("state.model", "gpt2"),
        ("state.model.n_embd", 10**9), ("state.model.n_embd", "32"), ("state.model.n_embd", NAN),
        ("state.model.n_embd", HUGE, "10^400"), ("state.model.n_embd", 0),
        ("state.model.n_layer", 10**9), ("state.model.n_head", 0),
        ("state.model.vocab_size", 10**15), ("state.model.block_size", 10**15),
        ("state.data", []), ("state.data.vocab_size", "28"), ("state.data.vocab_size", 10**15),
        ("state.data.tokenizer", []), ("state.data.tokenizer.kind", ESCAPE, "escapes"),
        ("state.data.tokenizer.kind", []), ("state.data.tokenizer.chars", 5),
        ("state.data.tokenizer.chars", "ab"), ("state.settings", []), ("state.lora", "yes"),
        ("state.data.tokenizer",
         {"kind": "hf", "file": "/dev/zero", "sha256": "0" * 64, "end_of_text": 0}, "/dev/zero"),
        ("world_size", 10**9), ("world_size", "1"), ("stage", "2"), ("stage", 3),
        ("format", HUGE, "10^400"), ("files", []), ("files", {}),
        ("files", outside, "another folder's file"), ("dtype", [])]),
    *edits(MANIFEST, [("state.improved", "yes"), ("state.best_val_loss", "low"),
                      ("state.data.datasets", [ESCAPE], "escapes"),
                      ("state.settings.seed", ESCAPE, "escapes"),
                      ("state.sources", 5), ("state.best_val_loss", NAN),
                      ("state.wandb_id", "../../x"), ("state.grad_norms", ["x"]),
                      ("state.settings.dataset", "x" * 10**6, "a long name"),
                      ("state.iter_num", HUGE, "10^400"), ("state.iter_num", 2**61),
                      ("state.sequences", HUGE, "10^400"), ("state.sequences", "8"),
                      ("state.sequences", 2**62)],
           readers="*resume"),
    *edits(MANIFEST, [("tag", "../iter_2"), ("state.model.gelu", ESCAPE, "escapes"),
                      ("state.model.width", 5),
                      ("state.ties", 5), ("state.ties", [["one"]]),
                      ("state.model_source.file", "../model.py"),
                      ("state.data.tokenizer.chars", HALF * 28, "half characters")]),
    # These are only printed, or not even that
    *edits(MANIFEST, [("state.sources", [ESCAPE], "escapes"),
                      ("versions.torch", ESCAPE, "escapes")], code=0),
    *edits(MANIFEST, [("state.settings.dataset", ESCAPE, "escapes")], readers="*resume", code=0),
    # Its template is rendered in a chat alone, and others copy it
    *edits(MANIFEST, [("state.data.template", value, what) for what, value in TEMPLATES.items()],
           readers="chat with a run", code=2),
    *rows(MODEL, NOT_A_FILE + [("200 GB", write_sparse), ("nothing", text("")),
                               ("a private file", link("private"))]),
    *rows(MODEL, PICKLES + [("an expanded tensor", write_expanded_tensor),
                            ("noise", text(b"PK\x03\x04" + bytes(range(256))))], in_tag),
    *rows(OPTIMIZER, PICKLES, in_tag),
    *rows(MODEL, SLOW_PICKLES, in_tag, readers=CHECKING),
    HostileFile(MODEL, "two tables of contents", in_tag(write_two_directories),
                readers=CHECKING),
    HostileFile(MODEL, "200 GB that are in the manifest", write_large_tag),
    *rows(MODEL, [
        ("no weights", lambda c: c.update(module={})),
        ("a number as weights", lambda c: c.update(module=5)),
        ("a string as a tensor", lambda c: c["module"].update({"transformer.ln_f.weight": "x"})),
        ("a sparse tensor", lambda c: c["module"].update(
            {"transformer.ln_f.weight": torch.sparse_coo_tensor(size=(10**9, 10**9))})),
        ("no shapes", lambda c: c.update(param_shapes=[])),
        ("a large shape", lambda c: c["param_shapes"][0].update(
            {"transformer.ln_f.weight": torch.Size([10**9, 10**9])}))],
        lambda change: in_tag(edit_pickle(change))),
    # A dry run doesn't compare the names with those of model.py
    *rows(MODEL, [("a name with escapes", lambda c: c["module"].update({ESCAPE: torch.ones(2)}))],
          lambda change: in_tag(edit_pickle(change)),
          readers="resume|train from*|sample*|evaluate*|export"),
    # The float32 weights are in the optimizer's file
    *rows(MODEL, [("a tensor without memory", lambda c: c["module"].update(
        {"transformer.ln_f.weight": torch.empty(32, device="meta")}))],
        lambda change: in_tag(edit_pickle(change)), code=0),
    *rows(OPTIMIZER, [
        ("nothing in it", lambda c: c.clear()),
        ("a list as state", lambda c: c.update(optimizer_state_dict=[])),
        ("a short tensor", lambda c: c["optimizer_state_dict"].update(
            single_partition_of_fp32_groups=[torch.ones(2)] * 2)),
        ("a step of 10^400", lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][
            0].update(step=HUGE)),
        ("a string as step", lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][
            0].update(step="x"))],
        lambda change: in_tag(edit_pickle(change))),
    HostileFile(OPTIMIZER, "a pipe", write_fifo),
    # A line that isn't a record is skipped
    *rows(HISTORY, [("a list", append("[]")), ("NaN", append('{"iter": NaN, "loss": NaN}')),
                    ("10^400", append('{"iter": 1' + "0" * 400 + ', "loss": 1}')),
                    ("a loss of 10^400", append('{"iter": 1, "loss": 1' + "0" * 400 + "}")),
                    ("10^5000", append('{"iter": 1' + "0" * 5000 + ', "loss": 1}')),
                    ("1e400", append('{"iter": 1e400, "loss": 1e400}')),
                    ("a string", append('{"iter": "1", "loss": 1}')),
                    ("a string as loss", append('{"iter": 1, "loss": "low"}')),
                    ("true", append('{"iter": true, "loss": true}')),
                    ("deep nesting", append('{"iter": 1, "loss": ' + DEEP + "}")),
                    ("escapes", append('{"iter": "' + ESCAPE + '"}')),
                    ("numbers that no picture can hold", append(
                        '{"iter": 1, "loss": 1.7e308}\n{"iter": 2, "loss": -1.7e308}')),
                    ("10 MB in a line", append("x" * 10**7))], readers="resume|plot", code=0),
    HostileFile(HISTORY, "a million lines", append("x\n" * 10**6), readers="resume|plot",
                code=2),
    *rows(HISTORY, NOT_A_FILE + [("200 GB", write_sparse), ("a private file", link("private")),
                                 ("a missing file", link("missing"))], readers="resume|plot"),
    HostileFile(HISTORY, "a pipe", write_fifo, readers="dry run*", code=2),
    HostileFile(HISTORY, "a pipe", write_fifo, readers="sample*|evaluate*|export", code=0),
    *rows("run/settings.json", [("a pipe", write_fifo), ("endless zeros", link("/dev/zero"))],
          readers="resume", code=2),
    HostileFile("run/latest", "a pipe", write_fifo, readers="resume", code=2),
    # A new file takes the place of these
    *rows("run/settings.json", [("a private file", link("private"))], code=0),
    *rows("run/latest", [("a private file", link("private")), ("escapes", text(ESCAPE)),
                         ("another folder", text("../..")), ("200 GB", write_sparse)], code=0),
    *rows("run/zero_to_fp32.py", [("a private file", link("private")),
                                  ("a missing file", link("missing"))], code=0),
    *rows("run/iter_4.saving", [("a private folder", link("private_folder")),
                                ("a link in it", folder_of("manifest.json", link("private")))],
          code=0),
    *rows("run/best.saving", [("a private folder", link("private_folder"))], code=0),
    *rows("run/iter_4.old", [("a private folder", link("private_folder"))], code=0),
    *rows("run/best", [("a private folder", link("private_folder")), ("a pipe", write_fifo),
                       ("a link in it", folder_of("manifest.json", link("private")))],
          readers="*resume", code=0),
    *rows("run/STOP", [("a private file", link("private")), ("a private folder",
                       link("private_folder")), ("a pipe", write_fifo)], code=0),
    HostileFile("run/STOP", "a folder", folder_of("file", text("")), readers="resume", code=0),
    # A damaged checkpoint is renamed, and the one before it is taken
    HostileFile("run/iter_4/manifest.json", "a dict", text("{}"), readers="resume", code=0),
    HostileFile("run/iter_4/manifest.json", "a private file", link("private"), readers="resume",
                code=2),
    *rows("run/iter_99999999999999999999/manifest.json", [("a dict", text("{}"))],
          readers="resume", code=0),
    *rows("run/iter_4", [("a private folder", link("private_folder")), ("a pipe", write_fifo)],
          readers="resume", code=0),
    HostileFile("run/.manifest.json.01234567.tmp", "a folder", write_folder, readers="resume",
                code=2),
    HostileFile("run/.manifest.json.01234567.tmp", "a private file", link("private"),
                readers="resume", code=0),
    *rows("run/iter_4.saving", [("a pipe", write_fifo)], readers="resume", code=0),
    HostileFile("run/iter_9", "5,000 tags", write_many_tags, readers="resume", code=0),
    HostileFile("run/.lock", "a private file", link("private"), readers="resume", code=2),
    HostileFile("run/.lock", "a pipe", write_fifo, readers="resume", code=2),
    *rows("run/curves.png", [("a private file", link("private")), ("a pipe", write_fifo)],
          readers="plot", code=0),
    *rows("run/hf-iter_2", [("a private folder", link("private_folder")),
                            ("an empty folder", link("empty_folder")), ("a pipe", write_fifo)]),
]

OUT = [
    *rows("out/.lock", [("a private file", link("private")), ("a missing file", link("missing")),
                        ("a pipe", write_fifo), ("endless zeros", link("/dev/zero"))]),
    *rows("out/history.jsonl", [("a private file", link("private")), ("a pipe", write_fifo),
                                ("a missing file", link("missing")),
                                ("endless zeros", link("/dev/zero"))]),
    # A new file takes the place of these
    *rows("out/settings.json", [("a private file", link("private"))], code=0),
    *rows("out/latest", [("a private file", link("private"))], code=0),
    *rows("out/zero_to_fp32.py", [("a private file", link("private")),
                                  ("a missing file", link("missing"))], code=0),
    *rows("out/zero_to_torch.py", [("a private file", link("private"))], code=0),
    *rows("out/STOP", [("a private file", link("private")), ("a pipe", write_fifo)], code=0),
    *rows("out/iter_2.saving", [("a private folder", link("private_folder")),
                                ("a link in it", folder_of("mp_rank_00_model_states.pt",
                                                           link("private")))], code=0),
    *rows("out/best.saving", [("a private folder", link("private_folder"))], code=0),
    *rows("out/iter_2.old", [("a private folder", link("private_folder"))], code=0),
    *rows("out/iter_2", [("a private folder", link("private_folder")), ("a pipe", write_fifo)],
          readers="train into*", code=0),
    *rows("out/best", [("a private folder", link("private_folder")), ("a pipe", write_fifo)],
          readers="train into*", code=0),
    *rows("out/tensorboard", [("a private folder", link("private_folder"))],
          readers="log and trace", code=2),
    *rows("out/profile", [("a private folder", link("private_folder"))],
          readers="log and trace", code=0),
    HostileFile("out/.train.bin.01234567.tmp", "a folder", write_folder, code=2),
    HostileFile("out/.train.bin.01234567.tmp", "a private file", link("private"), code=0),
    *rows("out/curves.png", [("a private file", link("private"))], readers="draw into*"),
    *rows("out/train.bin", [("a private file", link("private"))], readers="prepare*", code=2),
    *rows("out/meta.json", [("a private file", link("private"))], readers="prepare*", code=0),
    *rows("out/tokenizer.json", [("a private file", link("private"))], readers="prepare*",
          code=0),
]

DATASETS = [
    *rows(META, NOT_A_FILE + NOT_JSON),
    *edits(META, [
        ("format", "1"), ("format", HUGE, "10^400"), ("dtype", ["uint16"]),
        ("dtype", ESCAPE, "escapes"),
        ("vocab_size", "28"), ("vocab_size", NAN), ("vocab_size", 10**12),
        ("train_tokens", HUGE, "10^400"), ("train_tokens", 1.5), ("tokenizer", []),
        ("tokenizer.kind", []), ("tokenizer.kind", ESCAPE, "escapes"), ("tokenizer.chars", 28),
        ("tokenizer.chars", [[i] for i in range(28)], "lists"),
        ("tokenizer.chars", [HUGE] * 28, "10^400"), ("files", [])]),
    *edits(META, [("tokenizer.chars", HALF * 28, "half characters")]),
    *edits(META, [("source.name", ESCAPE, "escapes")], code=0),  # it isn't read
    *edits("chats/meta.json", [("template", 5), ("template", ["x"])]),
    *edits("chats/meta.json", [("tokenizer.end_of_text", value) for value in
                               ("0", 10**9, -1, [0], NAN)]),
    *rows("letters/train.bin", NOT_A_FILE + [("200 GB", write_sparse), ("nothing", text("")),
                                             ("a private file", link("private"))]),
    *rows("letters/val.bin", NOT_A_FILE),
    *rows("chats/train_mask.bin", NOT_A_FILE),
    *rows("chats/val.bin", [("a pipe", write_fifo), ("a private file", link("private"))]),
    # Training takes ids alone
    *rows("words/tokenizer.json", NOT_A_FILE + [("200 GB", write_sparse)], code=0),
    *rows("words/tokenizer.json", NOT_JSON[:7], in_dataset, code=0),
    # Made by nanoGPT
    *rows("nanogpt/data/meta.pkl", NOT_A_FILE + PICKLES + [
        ("nothing", text("")), ("200 GB", write_sparse), ("a private file", link("private")),
        ("a list", text(pickle.dumps([1]))), ("10^400", text(pickle.dumps({"vocab_size": HUGE}))),
        ("a large vocabulary", text(pickle.dumps({"vocab_size": 10**12}))),
        ("10^10 of a byte", text(b"\x80\x04\x8e" + struct.pack("<Q", 10**10) + b"x.")),
        ("lists in lists", text(b"(l." + b"a" * 10 + b"(" * 10**6 + b"l" * 10**6 + b".")),
        ("an index of 2^31", text(b"\x80\x02Nr\xff\xff\xff\x7f.")),
        ("escapes", text(pickle.dumps({"vocab_size": ESCAPE})))]),
    *rows("nanogpt/data/train.bin", NOT_A_FILE, readers="train*"),
]

TOKENIZERS = [
    *rows("tokenizer/tokenizer.json", NOT_A_FILE + NOT_JSON),
    *rows("tokenizer/tokenizer_config.json", NOT_A_FILE + NOT_JSON),
    *edits("tokenizer/tokenizer_config.json", [("eos_token", HUGE, "10^400"), ("eos_token", []),
                                               ("eos_token", {"content": ["x"]}),
                                               ("eos_token", ESCAPE, "escapes")]),
    *edits("tokenizer/tokenizer.json", [
        ("model", []), ("model", words({}), "no words"), ("model", words({"a": -1})),
        ("model", words({"<end>": 0, "a": 2**32 - 1}), "an id of 2^32"),
        ("model", words({"<end>": 0, "a": 2**31}), "an id of 2^31"),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}, "a merge of nothing"),
        ("model", {"type": "Unigram", "vocab": [], "unk_id": 5}, "an empty Unigram"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                           "invert": False}, "half a regex"),
        ("normalizer", doubling(40), "2^40 letters"),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}, "10^6 letters"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30},
         "2^30 bytes"),
        ("model", {"type": "Unigram", "vocab": [["<end>", 0.0], ["a" * 10**6, -1.0]],
                   "unk_id": 0}, "a word of 10^6 letters"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "a wrong map"),
        ("added_tokens", [{"id": 2**31, "content": ESCAPE}], "escapes")]),
    # Truncation and padding are switched off, and Oniguruma gives up a slow regex
    *edits("tokenizer/tokenizer.json", [
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(?:(?:\\w|\\s)+)+$X"},
                           "behavior": "Isolated", "invert": False}, "a slow regex"),
        ("padding", {"strategy": {"Fixed": 10**15}, "direction": "Right", "pad_id": 0,
                     "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "x"}, "10^15"),
        ("truncation", {"max_length": 0, "strategy": "LongestFirst", "stride": 10**9,
                        "direction": "Right"}, "0")], code=0),
]

WEIGHTS = [
    *rows(CONFIG, NOT_A_FILE + NOT_JSON),
    *edits(CONFIG, [
        ("n_embd", 10**9), ("n_embd", "32"), ("n_embd", NAN), ("n_embd", HUGE, "10^400"),
        ("n_embd", [32]), ("n_embd", 0), ("n_layer", 10**9), ("n_layer", "2"), ("n_head", 0),
        ("n_head", HUGE, "10^400"), ("vocab_size", 10**12), ("vocab_size", -1),
        ("n_positions", 10**12), ("n_positions", NAN), ("activation_function", []),
        ("activation_function", ESCAPE, "escapes"),
        ("activation_function", "x" * 10**6, "a long name"), ("model_type", ESCAPE, "escapes")]),
    *edits(CONFIG, [("eos_token_id", HUGE, "10^400")], readers="sample weights"),
    # No token has this id: a text goes on
    *edits(CONFIG, [("eos_token_id", value) for value in ([10**9], -5, "0", NAN)],
           readers="sample weights", code=0),
    *rows("weights/model.safetensors", NOT_A_FILE + PICKLES + [
        ("200 GB", write_sparse), ("nothing", text("")), ("a private file", link("private")),
        ("a header of 10^18 bytes", safetensors({}, 10**18)),
        ("a header of lists", safetensors(DEEP.encode())),
        ("10^18 numbers", safetensors({"transformer.wte.weight": {
            "dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 64]}})),
        ("offsets beyond its end", safetensors({"transformer.wte.weight": {
            "dtype": "F32", "shape": [4, 4], "data_offsets": [10**15, 10**15 + 64]}})),
        ("a name with escapes", safetensors({ESCAPE: {
            "dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}))]),
    *rows("weights_bin/pytorch_model.bin", NOT_A_FILE + PICKLES + [
        ("200 GB", write_sparse), ("nothing", text("")), ("a private file", link("private")),
        ("an expanded tensor", write_expanded_tensor)]),
    *rows(INDEX, NOT_A_FILE + NOT_JSON),
    *edits(INDEX, [("weight_map", []), ("weight_map", {"a": 5}), ("weight_map", {"a": ["b"]}),
                   ("weight_map", {"a": ESCAPE}, "escapes"), ("weight_map", {}),
                   ("weight_map", {"a": "../" * 12 + "etc/hostname"}, "another folder's file"),
                   ("weight_map", {"a": "/dev/zero"}), ("weight_map", {"a": "\0"})]),
    *rows("weights/tokenizer.json", NOT_A_FILE + NOT_JSON),
    *edits("weights/tokenizer.json", [
        ("model", words({}), "no words"), ("model.vocab.b", 2**31),
        ("normalizer", doubling(40), "2^40 letters"),
        ("decoder", {"type": "Sequence", "decoders": [replace("a", "aa")] * 40}, "2^40 letters")],
        readers="sample weights"),
    *rows("weights/tokenizer_config.json", NOT_A_FILE + NOT_JSON, readers="*weights"),
    *edits("weights/tokenizer_config.json", [
        ("chat_template", value, what) for what, value in TEMPLATES.items()],
        readers="chat with weights"),
    *edits("weights/tokenizer_config.json", [
        ("chat_template", HALF, "half a character"), ("chat_template", [5]),
        ("chat_template", [{"name": [], "template": 5}])],
        readers="chat with weights"),
    *rows("weights/chat_template.jinja", NOT_A_FILE + [
        ("200 GB", write_sparse), ("bytes", text(b"\xff\xfe"))], readers="*weights"),
    *rows("weights/chat_template.jinja", [(what, text(value)) for what, value in
                                          TEMPLATES.items()], readers="chat with weights"),
    *rows("nanogpt/ckpt.pt", NOT_A_FILE + PICKLES + SLOW_PICKLES + [
        ("two tables of contents", write_two_directories),
        ("200 GB", write_sparse), ("nothing", text("")), ("a private file", link("private"))]),
]


CHECKPOINTS = rows("nanogpt/ckpt.pt", [
    ("n_embd = 10^9", lambda c: c["model_args"].update(n_embd=10**9)),
    ("n_embd = 10^400", lambda c: c["model_args"].update(n_embd=HUGE)),
    ("n_layer = 10^9", lambda c: c["model_args"].update(n_layer=10**9)),
    ("n_layer is a list", lambda c: c["model_args"].update(n_layer=[2])),
    ("block_size = 10^12", lambda c: c["model_args"].update(block_size=10**12)),
    ("vocab_size = NaN", lambda c: c["model_args"].update(vocab_size=NAN)),
    ("n_head is a tensor", lambda c: c["model_args"].update(n_head=torch.ones(2))),
    ("a number as a tensor's name", lambda c: c["model"].update({5: torch.ones(2)})),
    ("escapes as a tensor's name", lambda c: c["model"].update({ESCAPE: torch.ones(2)})),
    ("a string as a tensor", lambda c: c["model"].update(
        {"transformer.ln_f.weight": "text"})),
    ("a sparse tensor", lambda c: c["model"].update(
        {"transformer.wte.weight": torch.sparse_coo_tensor(size=(10**9, 10**9))})),
    ("a tensor without memory", lambda c: c["model"].update(
        {"transformer.wte.weight": torch.empty(28, 32, device="meta")})),
    ("a quantized tensor", lambda c: c["model"].update(
        {"transformer.wte.weight": torch.quantize_per_tensor(torch.ones(28, 32), 1, 0,
                                                             torch.qint8)})),
], edit_pickle)

TEXTS = [
    *rows("texts/prompts.txt", NOT_A_FILE + [("200 GB", write_sparse), ("nothing", text("")),
                                             ("bytes", text(b"\xff\x00\x1b[2J"))]),
    *rows("texts/text.txt", NOT_A_FILE + [("200 GB", write_sparse),
                                          ("bytes", text(b"\xff\x00\x1b[2J")),
                                          ("escapes", text(ESCAPE))]),
    *rows("texts/hellaswag.jsonl", NOT_A_FILE + NOT_JSON),
    *rows("texts/hellaswag.jsonl", [
        ("10^400", text('{"ctx": "a", "endings": ["a", "b", "c", "d"], "label": 1'
                        + "0" * 400 + "}")),
        ("a label of 1e400", text('{"ctx": "a", "endings": ["a", "b", "c", "d"], '
                                  '"label": 1e400}')),
        ("escapes", text(json.dumps({"ctx": ESCAPE, "endings": ["a"] * 4, "label": 0})))]),
    *rows("texts/hellaswag.jsonl", [("half a character", text(json.dumps(
        {"ctx": HALF, "endings": ["a"] * 4, "label": 0})))]),
    *rows("texts/ds.json", NOT_A_FILE + NOT_JSON + [
        ("10^400", text('{"train_batch_size": 1' + "0" * 400 + "}")),
        ("10^5000", text('{"train_batch_size": 1' + "0" * 5000 + "}")),
        ("a key with escapes", text(json.dumps({ESCAPE: 1})))]),
    *rows("texts/lambada.jsonl", NOT_A_FILE + NOT_JSON + [
        ("half a character", text(json.dumps({"text": "a " + HALF}))),
        ("escapes", text(json.dumps({"text": f"a {ESCAPE}"}))),
        ("a text of 5", text('{"text": 5}'))]),
]

PREPARED = [
    *rows("corpus/a.txt", [("a pipe", write_fifo), ("endless zeros", link("/dev/zero")),
                           ("a private file", link("private"))]),
    *rows("corpus/private", [("a private folder", link("private_folder"))]),
    *rows("corpus/a.txt", [("bytes", text(b"\xff\xfe\x1b[2J")), ("zeros", write_sparse)]),
    *rows("corpus/b.jsonl", [("deep nesting", text(DEEP)), ("a list", text("[]\n")),
                             ("NaN", text('{"text": NaN}\n')), ("zeros", write_sparse),
                             ("10^5000", text('{"text": 1' + "0" * 5000 + "}\n")),
                             ("half a character", text(json.dumps({"text": HALF}) + "\n")),
                             ("escapes", text(json.dumps({ESCAPE: "text"}) + "\n"))]),
    HostileFile("corpus/c.parquet", "64 times 40 MB", parquet_of(40_000_000, 64),
                is_long=True),
    HostileFile("corpus/x\x1b[2J.jsonl", "a name with escapes", text("[]")),
    *rows("corpus/c.parquet", PICKLES + [
        ("nothing", text("")), ("200 GB", write_sparse), ("no text", parquet({"text": [5]})),
        ("a column with escapes", parquet({ESCAPE: ["text"]})),
        ("a broken footer", text(b"PAR1" + b"\xff" * 100 + struct.pack("<I", 90) + b"PAR1"))]),
    *rows("corpus/d.txt.gz", [("no gzip", text("text")),
                              ("1.3 GB of zeros", bomb(bytes(10**6), 20)),
                              ("1.3 GB of spaces", bomb(b" " * 10**6, 20)),
                              ("1.3 GB of a letter", bomb(b"x" * 10**6, 20))]),
    *rows("corpus/e.txt.zst", [("no zstd", text("text")),
                               ("1.3 GB of zeros", bomb(bytes(10**6), 20)),
                               ("1.3 GB of a letter", bomb(b"x" * 10**6, 20))]),
    *rows("corpus/f.jsonl.gz", [("1.3 GB in a line", bomb(b"x" * 10**6, 20)),
                                ("1.3 GB of empty lines", bomb(b"\n" * 10**6, 20))]),
    *rows("corpus/g.csv", [("zeros", write_sparse), ("an open quote", text('text\n"' + "x\n" * 10**6)),
                           ("a column with escapes", text(f"{ESCAPE}\ntext\n")),
                           ("a row of 10^7 fields", text("text\n" + "," * 10**7 + "\n"))]),
    *rows("conversations/chats.jsonl", [
        ("deep nesting", text(DEEP)), ("numbers", text('{"messages": [1, 2]}\n')),
        ("an escape as role", text(json.dumps({"messages": [{"role": ESCAPE, "content": "a"}]}))),
        ("10^5000", text('{"messages": 1' + "0" * 5000 + "}\n")),
        ("a field with escapes", text(json.dumps({ESCAPE: 1, "messages": []})))]),
    *rows("conversations/chats.json", [
        ("deep nesting", text(DEEP)), ("open brackets", text("[" * 10**6)), ("one bracket", text("[")),
        ("an open text", text('[{"a": "' + "x" * 60_000_000)), ("bytes", text(b'[{"a": "\xff')),
        ("more after it", text("[]\n[]")), ("10^5000", text("[1" + "0" * 5000 + "]"))]),
    *rows("conversations/chats.parquet", PICKLES + NOT_A_FILE[1:2] + [
        ("nothing", text("")), ("200 GB", write_sparse),
        ("bytes as input", parquet({"instruction": ["a"], "input": [b"\xff"], "output": ["a"]})),
        ("bytes as messages", parquet({"messages": [b"\xff"]})),
        ("a column with escapes", parquet({ESCAPE: ["text"]})),
        ("a deep column", parquet({"messages": [deep_list(50)]})),
        ("a broken footer", text(b"PAR1" + b"\xff" * 100 + struct.pack("<I", 90) + b"PAR1"))]),
    *rows("conversations/saved/data.arrow", PICKLES + [
        ("nothing", text("")), ("200 GB", write_sparse), ("a private file", link("private")),
        ("a message of 2 GB", text(struct.pack("<iI", -1, 0x7FFFFFF0))),
        ("a file's beginning", text(b"ARROW1\0\0" + bytes(1000))),
        ("places outside of it", change(struct.pack("<iiii", 0, 4, 13, 17),  # of texts
                                        struct.pack("<iiii", 0, 4, 2**28, 17))),
        ("a column with escapes", arrow({ESCAPE: ["text"]}))]),
    *rows("conversations/saved/state.json", NOT_A_FILE[1:2] + [
        *NOT_JSON, ("no file", text('{"_data_files": [{"filename": "../../private"}]}')),
        ("escapes", text(json.dumps({"_data_files": [{"filename": ESCAPE}]}))),
        ("other types", text(json.dumps({"_data_files": [{"filename": []}, 5, None]})))]),
    *rows("tokens/train_0.npy", PICKLES + NOT_A_FILE[2:] + [
        ("an object array", write_object_array), ("200 GB", write_sparse), ("nothing", text("")),
        ("a private file", link("private")),
        ("10^18 tokens", text(b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<u2', 'fortran_order': "
                              b"False, 'shape': (1000000000000000000,), }".ljust(117) + b"\n")),
        ("deep nesting", text(b"\x93NUMPY\x01\x00\x30\x75" + b"(" * 30_000))]),
    *rows("tokens/val_0.bin", [("200 GB", write_sparse), ("nothing", text("")),
                               ("a private file", link("private")),
                               ("-5 tokens", text(np.array([20240520, 1, -5] + [0] * 253,
                                                           np.int32).tobytes()))]),
    *rows("hub/train-00000-of-00001.parquet", NOT_A_FILE[:2] + PICKLES[2:] + [
        ("nothing", text("")), ("200 GB", write_sparse), ("numbers", parquet({"text": [5] * 2500})),
        ("a private file", link("private")), ("a column with escapes", parquet({ESCAPE: ["a"]}))]),
    *rows("hub/hub.py", [("code", write_module)]),
    *rows("hub/train.tar", [("pickles", write_tar)]),
    *rows("hub/README.md", NOT_A_FILE[:2] + [
        ("Python's objects", text("---\nconfigs: !!python/object/apply:os.abort []\n---\n")),
        ("a bomb", text("---\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{after}: &{after} [{','.join(['*' + before] * 9)}]\n"
            for before, after in zip("abcdefghijk", "bcdefghijkl")) + "configs: *l\n---\n")),
        ("another folder's file", text(
            "---\nconfigs:\n- config_name: default\n  data_files: ../../../../etc/hostname\n"
            "---\n"))]),
]

PICTURES = [
    # A picture that can't be read ends training, and is skipped by prepare.py --from
    *rows(PICTURE, PICKLES[2:] + [
        ("nothing", text("")), ("EPS", write_eps), ("10^18 pixels", write_huge_picture),
        ("zeros", write_sparse)]),
    # A link that leads out of the folder is skipped, and said
    *rows(PICTURE, [("a private file", link("private")), ("endless zeros", link("/dev/zero"))],
          code=0),
    HostileFile("pictures/train/class_00/large.png", "169 million pixels", write_large_picture),
    HostileFile("pictures/train/class_00/more.jpg", "a pipe", write_fifo),
    HostileFile("pictures/train/class_00/x\x1b[2J.jpg", "a name with escapes", text("text")),
    HostileFile("pictures/train/\x1b[2J", "a class without pictures", write_folder,
                readers="train on pictures"),
    *rows("animals/best_model/latest", NOT_A_FILE + [
        ("nothing", text("")), ("200 GB", write_sparse), ("a private file", link("private")),
        ("another folder", text("../../..")), ("escapes", text(ESCAPE)), ("a NUL", text("\0"))],
        readers="resume on pictures"),
    *rows("animals/best_model/extra_info.json", NOT_A_FILE + NOT_JSON,
          readers="resume on pictures"),
    *edits("animals/best_model/extra_info.json", [
        ("epoch", HUGE, "10^400"), ("epoch", "1"), ("epoch", -1), ("steps", NAN),
        ("classes", [ESCAPE], "escapes"), ("saved_by", []), ("saved_by", ["1", 2, 3]),
        ("epochs", [5]), ("best_val_acc", HUGE, "10^400"), ("time", "now"),
        ("time", HUGE, "10^400")], readers="resume on pictures"),
    *rows("animals/best_model/best/mp_rank_00_model_states.pt", NOT_A_FILE + PICKLES + [
        ("200 GB", write_sparse), ("nothing", text("")), ("a private file", link("private"))],
        readers="resume on pictures*"),
    *rows("animals/best_model/best/zero_pp_rank_0_mp_rank_00_optim_states.pt", PICKLES,
          readers="resume on pictures*"),
    *rows("animals/.lock", [("a private file", link("private")), ("a pipe", write_fifo)],
          readers="train in place*", code=2),
    *rows("animals/.saving", [("a private folder", link("private_folder"))],
          readers="train in place*", code=2),
    # A history that isn't a regular file is refused, and what is damaged is replaced
    *rows("logs/training_history.json", NOT_A_FILE[:2] + NOT_JSON, readers="draw*"),
    *rows("logs/training_history.json", NOT_A_FILE[:2], readers="train in place*", code=2),
    *rows("logs/training_history.json", NOT_JSON[:7], readers="train in place*", code=0),
    *rows("animals/best_model/extra_info.json", NOT_A_FILE[:2] + NOT_JSON[:7],
          readers="train in place*", code=0),
    *rows("resnet/model.safetensors", NOT_A_FILE + PICKLES + [
        ("200 GB", write_sparse), ("nothing", text("")),
        ("10^18 numbers", safetensors({"classifier.1.bias": {
            "dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 64]}}))],
        readers="*weights"),
    *rows("resnet/weights.pt", SLOW_PICKLES, readers="train from pictures' .pt"),
    *rows("animals/best_model/best/mp_rank_00_model_states.pt", SLOW_PICKLES,
          readers="resume on pictures"),
    *rows("resnet/weights.pt", NOT_A_FILE + PICKLES + [
        ("200 GB", write_sparse), ("nothing", text("")),
        ("an expanded tensor", write_expanded_tensor)], readers="*.pt*"),
]

WORKING_DIRECTORY = [
    HostileFile("work/modules", "modules with known names", write_modules),
    HostileFile("work/config/shakespeare_char_cpu.py", "a config", write_module,
                readers="train a config*"),
    HostileFile("project/data/theirs/prepare.py", "a dataset's own prepare.py", write_module,
                code=0),
    *rows("work/matplotlibrc", [("LaTeX", text("text.usetex: True\nfigure.dpi: 1e9\n")),
                                ("a pipe", write_fifo), ("endless zeros", link("/dev/zero"))],
          readers="plot in a folder", code=0),
    HostileFile("work/bench.json", "a private file", link("private"), readers="bench*", code=0),
    HostileFile("work/curves.png", "a private file", link("private"), readers="draw*", code=0),
]


def best_with_a_space(path: Path, trap: Trap) -> None:
    """Write a `latest` for a harmless folder "best " beside a hostile one, "best"."""
    own = path.parent / "best"
    own.rename(path.parent / "best ")
    own.mkdir()
    for file in (path.parent / "best ").iterdir():
        write_zip_pickle(own / file.name, trap)
    path.write_text("best ")


def without_meta(path: Path, trap: Trap) -> None:
    """Write a prepare.py where a dataset has no meta.json."""
    write_module(path, trap)
    (path.parent / "meta.json").unlink()


SPECIAL = [
    HostileFile("animals/best_model/latest", "best with a space", best_with_a_space,
                readers="resume on pictures"),
    HostileFile("project/data/theirs/prepare.py", "a prepare.py, and no meta.json", without_meta),
]
FILES = [*RUN, *OUT, *DATASETS, *TOKENIZERS, *WEIGHTS, *CHECKPOINTS, *TEXTS, *PREPARED, *PICTURES,
         *WORKING_DIRECTORY, *SPECIAL]
