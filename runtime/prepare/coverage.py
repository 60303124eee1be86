"""Tell what a tokenizer loses of the documents of a dataset, on a sample of them.

GPT-2's tokenizer and that of characters lose nothing. A tokenizer.json may: unknown characters
disappear or become one token, capitals become small, and spaces and line ends are dropped.
"""

import heapq
import json
import sys
from dataclasses import dataclass
from typing import Any

from runtime.data.chat import ROLES
from runtime.data.tokenizer import decode_hf, hf_tokenizer, numpy_encoder
from runtime.errors import UserError
from runtime.output import counted, printable

SAMPLE = 200  # documents
MAX_CHARS = 2000  # of a document
MOST_LOST = 0.01  # of the documents or the tokens, without a warning
SHOWN = 40  # characters of an example


class Sample:
    """Keeps the documents with the smallest hashes.

    So the sample doesn't depend on the order of the files. is_chat: whether a document is a
    conversation, as JSON.
    """

    def __init__(self, is_chat: bool = False) -> None:
        self.is_chat = is_chat
        self.kept: list[tuple[int, str]] = []  # a heap of (negative hash, text), largest hash first

    def add(self, number: int, text: bytes) -> None:
        """Offer a document. number: its hash, of 64 bits."""
        key = -(number % 2**32)  # the upper bits choose its split
        # A larger hash than those that are kept
        if len(self.kept) == SAMPLE and key <= self.kept[0][0]:
            return
        if self.is_chat:
            text = "\n".join(message["content"] for message in json.loads(text)).encode()
        # The beginning is enough, and all of a long document would take seconds
        beginning = text[: 4 * MAX_CHARS].decode(errors="ignore")  # a character has up to 4 bytes
        entry = (key, beginning[:MAX_CHARS])
        if len(self.kept) < SAMPLE:
            heapq.heappush(self.kept, entry)
        else:
            heapq.heapreplace(self.kept, entry)

    def texts(self) -> list[str]:
        """Return the texts that were kept, in the order of their hashes."""
        return [text for _, text in sorted(self.kept, reverse=True)]


@dataclass
class Coverage:
    """What a tokenizer lost of some documents."""

    documents: int
    changed: int  # documents that decode to another text
    tokens: int
    unknown: int  # of the tokens
    example: tuple[str, str] | None  # where the first changed one begins to differ: (before, after)


def measure(tokenizer: dict[str, Any], texts: list[str]) -> Coverage:
    """Return the Coverage of texts by a tokenizer. Raises UserError.

    tokenizer: the "tokenizer" of a meta.json, of the kind hf.
    """
    to_ids = numpy_encoder(tokenizer)
    backend = hf_tokenizer(tokenizer)
    unknown_id = id_of_unknown(backend)
    found = Coverage(documents=len(texts), changed=0, tokens=0, unknown=0, example=None)
    for text in texts:
        ids = to_ids(text).tolist()
        decoded = decode_hf(backend, ids)
        found.tokens += len(ids)
        found.unknown += ids.count(unknown_id)
        if decoded != text:
            found.changed += 1
            if found.example is None:
                found.example = first_difference(text, decoded)
    return found


def id_of_unknown(backend: Any) -> int | None:
    """Return the id that a tokenizers.Tokenizer has for what it doesn't know, or None."""
    model = json.loads(backend.to_str())["model"]
    if model.get("unk_id") is not None:  # Unigram's
        return model["unk_id"]
    token = model.get("unk_token")
    if not token:
        return None
    return backend.token_to_id(token)


def first_difference(before: str, after: str) -> tuple[str, str]:
    """Return where two texts begin to differ, with some letters around."""
    shorter = min(len(before), len(after))
    at = 0
    while at < shorter and before[at] == after[at]:
        at += 1
    start = max(0, at - SHOWN // 2)
    return before[start : start + SHOWN], after[start : start + SHOWN]


def report(found: Coverage) -> None:
    """Print what a tokenizer lost, and a warning to stderr if it is much."""
    if not found.documents:
        return
    # Shares of the sample
    changed = found.changed / found.documents
    unknown = found.unknown / max(1, found.tokens)
    sample = counted(found.documents, "document")
    print(f"tokenizer: of {sample}, {changed:.1%} change when decoded; {unknown:.1%} of their "
          "tokens are unknown", flush=True)
    if max(changed, unknown) <= MOST_LOST:
        return
    shown = ""
    if found.example:
        before, after = found.example
        shown = f", such as {before!r}, which becomes {after!r}"
    warning = (f"warning: this tokenizer loses some of the text{shown}: train one that keeps it, "
               "or use --tokenizer=gpt2, which keeps every text")
    print(printable(warning), file=sys.stderr, flush=True)


def check_headers(tokenizer: dict[str, Any]) -> None:
    """Raise UserError if the headers of the roles in a conversation aren't kept.

    tokenizer: the "tokenizer" of a meta.json. For characters, they are part of the vocabulary.
    """
    if tokenizer["kind"] == "char":
        return
    to_ids = numpy_encoder(tokenizer)
    # The headers stand in the middle of a text, and each answer is encoded on its own
    once = to_ids("User:\n").tolist()
    twice = to_ids("User:\nUser:\n").tolist()
    if twice != once + once:
        raise UserError("this tokenizer adds a space before a text, or joins lines: choose another "
                        "for conversations")
    if tokenizer["kind"] == "gpt2":
        return
    backend = hf_tokenizer(tokenizer)
    for role in ROLES:
        header = f"\n\n{role.capitalize()}:\n"
        decoded = decode_hf(backend, to_ids(header).tolist())
        if decoded != header:
            raise UserError(f"this tokenizer makes {decoded!r} of {header!r}, so that a model "
                            "can't tell who speaks: choose another for conversations")
