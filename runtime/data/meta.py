"""Parse a dataset's meta.json, or the meta.pkl of nanoGPT's scripts. Others may have written it."""

import io
import pickle
import pickletools
import re
from typing import Annotated, NoReturn, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from runtime.untrusted import STRICT, check_type, parse_json

GPT2_VOCAB = 50257
MAX_VOCAB = 2**24  # tokens; the largest known vocabularies have 2**18
MAX_TOKENIZER_BYTES = 200_000_000  # of a tokenizer.json; the largest known ones have 35 MB
MAX_TEMPLATE_CHARS = 1_000_000
KINDS = ("gpt2", "char", "hf")
# What pickle writes for dicts, lists, strings and numbers. Without tuples, whose hash can crash
# Python if they are nested, and without long numbers, of which a dict can take hours
PLAIN_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "BINFLOAT",
    "NONE", "NEWTRUE", "NEWFALSE"}

Count = Annotated[int, Field(ge=1, le=2**50)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB)]
VocabSize = Annotated[int, Field(ge=1, le=MAX_VOCAB)]
Sha256 = Annotated[str, Field(pattern=re.compile("^[0-9a-f]{64}$"))]
Character = Annotated[str, Field(min_length=1, max_length=1)]


@with_config(STRICT)
class Tokenizer(TypedDict):
    kind: str
    chars: NotRequired[str]
    sha256: NotRequired[Sha256]
    end_of_text: NotRequired[TokenId | None]


@with_config(STRICT)
class FileEntry(TypedDict):
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


@with_config(STRICT)
class Meta(TypedDict):
    """What a reader needs of meta.json. See runtime/data/dataset.py."""

    format: int
    tokenizer: Tokenizer
    vocab_size: VocabSize
    dtype: str
    train_tokens: Count
    val_tokens: Count
    files: dict[str, FileEntry]
    template: NotRequired[Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)]]


@with_config(STRICT)
class NanoGPTMeta(TypedDict):
    """What a reader needs of nanoGPT's meta.pkl."""

    vocab_size: VocabSize
    itos: NotRequired[dict[int, Character]]


def parse_meta(content: bytes) -> dict:
    """Return the meta of the content of a meta.json. Raises ValueError."""
    meta = parse_json(content)
    check_type(meta, Meta)
    check_meta(meta)
    return meta


def check_meta(meta: dict) -> None:
    """Raise ValueError where the values of a Meta don't fit together."""
    # A format that this version knows
    tokenizer = meta["tokenizer"]
    kind = tokenizer["kind"]
    vocab_size = meta["vocab_size"]
    if meta["format"] != 1 or meta["dtype"] not in ("uint16", "uint32") or kind not in KINDS:
        raise ValueError(
            f"unknown format {meta['format']}, dtype {meta['dtype']} or tokenizer {kind}"
        )
    if kind == "char":
        chars = tokenizer.get("chars", "")
        if len(chars) != vocab_size:
            raise ValueError(f"its {len(chars)} characters don't make a vocabulary of {vocab_size}")
        # Half a character is a UnicodeEncodeError, which is a ValueError
        chars.encode()
    if kind == "hf" and "sha256" not in tokenizer:
        raise ValueError("its tokenizer has no sha256")

    # Documents end with a token of the vocabulary
    end = tokenizer.get("end_of_text")
    if end is not None and end >= vocab_size:
        raise ValueError(f"its end of text, token {end}, is outside its vocabulary of {vocab_size}")


def parse_meta_of_nanogpt(pickled: bytes | None, tokens: dict[str, int]) -> dict | None:
    """Return the meta of nanoGPT's dataset, or None if its meta.pkl says that there is a meta.json.

    pickled: the content of meta.pkl, or None if there is none. tokens: {"train_tokens",
    "val_tokens"}. Raises ValueError, and other errors if the pickle is corrupt.
    """
    # What nanoGPT's scripts write without a meta.pkl: GPT-2's tokens
    meta = {
        "format": 1,
        "tokenizer": {"kind": "gpt2"},
        "vocab_size": GPT2_VOCAB,
        "dtype": "uint16",
        **tokens,
        "files": {},
    }
    # Its scripts write a meta.pkl for characters only
    if pickled is not None:
        check_plain_pickle(pickled)
        content = PlainUnpickler(io.BytesIO(pickled)).load()
        if isinstance(content, dict) and "described_by" in content:
            return None
        check_type(content, NanoGPTMeta)
        meta["vocab_size"] = content["vocab_size"]
        if "itos" in content:
            chars = [content["itos"][i] for i in range(content["vocab_size"])]
            meta["tokenizer"] = {"kind": "char", "chars": "".join(chars)}
    check_type(meta, Meta)
    check_meta(meta)
    return meta


def check_plain_pickle(content: bytes) -> None:
    """Raise an error unless a pickle holds only PLAIN_OPCODES, with a memo no larger than needed.

    The C unpickler allocates its memo up to the largest index in the file: 5 bytes can ask for
    32 GB.
    """
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        # It names code: PlainUnpickler stops there, and says which
        if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
            return
        if opcode.name not in PLAIN_OPCODES:
            raise pickle.UnpicklingError(
                f"it holds {opcode.name}, but a meta.pkl holds only dicts, strings and numbers"
            )
        if opcode.name in ("BINPUT", "LONG_BINPUT") and argument > number:
            raise pickle.UnpicklingError(
                f"its memo has an entry {argument} after {number} operations"
            )


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, strings and numbers only. Code that a pickle names is not imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Raise UnpicklingError."""
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, but a meta.pkl holds only dicts, strings and numbers"
        )
