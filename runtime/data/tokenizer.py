"""Encode and decode text: GPT-2's BPE, a token per character, or a Hugging Face tokenizer.json."""

import base64
import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from runtime.data import download
from runtime.data.meta import GPT2_VOCAB, MAX_TOKENIZER_BYTES, MAX_VOCAB
from runtime.errors import UserError
from runtime.files import ROOT, file_digest
from runtime.untrusted import check_regular, parse_json, read_regular

RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
# The same file, in a package
RANKS_WHEEL = "mlx-whisper==0.4.3"
RANKS_IN_WHEEL = "mlx_whisper/assets/gpt2.tiktoken"
# tiktoken expects the same
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
RANKS_FILE = ROOT / "data" / "gpt2.tiktoken"  # our copy, which git ignores

MAX_PIECE = 1000  # characters of a Unigram's token; SentencePiece's default is 16
CODE_POINTS = 0x110000  # in Unicode
END_OF_TEXT = "<|endoftext|>"
MAX_GROWTH = 1000  # of a text by all normalizers and decoders together
MAX_SPACES = 500_000  # in a row, for GPT-2's regex

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def gpt2_ranks() -> dict[bytes, int]:
    """Return GPT-2's 50,256 tokens without <|endoftext|>, in the order in which BPE merges them.

    They come from tiktoken's URL or from a wheel, and are kept in data/gpt2.tiktoken. Raises
    UserError.
    """
    content, _ = download.fetch(
        what="GPT-2's BPE ranks",
        sources=[download.url(RANKS_URL), download.wheel(RANKS_WHEEL, [RANKS_IN_WHEEL])],
        sha256=RANKS_SHA256,
        fix=f"Download {RANKS_URL} on another machine and save it as {RANKS_FILE}",
        keep=RANKS_FILE,
    )

    # A line has a token in base64 and its rank
    ranks = {}
    for line in content.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


@functools.cache
def gpt2_encoding() -> Any:
    """Return GPT-2's tiktoken.Encoding of 50,257 tokens, the last of which is <|endoftext|>.

    Raises UserError.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = gpt2_ranks()
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def check_spaces(text: str) -> str:
    """Return the text.

    Raises UserError if it has more white space in a row than the stack of GPT-2's regex takes.
    """
    # So many fill one of these pieces, which is fast to tell
    pieces = (text[i : i + MAX_SPACES // 2] for i in range(0, len(text), MAX_SPACES // 2))
    if any(piece.isspace() for piece in pieces):
        spaces = re.search(rf"(?<!\s)\s{{{MAX_SPACES}}}", text)
        if spaces:
            before = text[: spaces.start()][-9:]
            raise UserError(
                f"over {MAX_SPACES:,} spaces or line ends in a row after {before!r}: shorten them"
            )
    return text


def tokenizer_of(meta: dict) -> tuple[Encode, Decode]:
    """Return encode(str) -> ids and decode(ids) -> str of the "tokenizer" in a meta.json.

    encode takes <|endoftext|> for GPT-2's token. It raises UserError for unknown characters. Raises
    UserError if a tokenizer.json changed.
    """
    if meta["kind"] == "gpt2":
        return encode_gpt2, gpt2_encoding().decode
    if meta["kind"] == "char":
        # A character's id is its place in "chars"
        ids = {char: i for i, char in enumerate(meta["chars"])}
        encode = functools.partial(encode_chars, ids)
        return encode, lambda tokens: "".join(meta["chars"][token] for token in tokens)
    tokenizer = hf_tokenizer(meta)
    return functools.partial(encode_hf, tokenizer), functools.partial(decode_hf, tokenizer)


def encode_gpt2(text: str) -> list[int]:
    """Return the ids of a text in which <|endoftext|> is a token. Raises UserError."""
    return gpt2_encoding().encode(check_spaces(text), allowed_special="all")


def encode_gpt2_document(text: str) -> np.ndarray:
    """Return the ids of a text in which <|endoftext|> is ordinary text. Raises UserError."""
    return gpt2_encoding().encode_to_numpy(check_spaces(text), disallowed_special=())


def encode_chars(ids: dict[str, int], text: str) -> list[int]:
    """Return the ids of a text's characters. ids: {character: id}. Raises UserError."""
    for char in text:
        if char not in ids:
            raise UserError(
                f"the character {char!r} (U+{ord(char):04X}) is not one of the {len(ids)} that "
                "this character dataset knows"
            )
    return [ids[char] for char in text]


def encode_hf(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text. Raises UserError."""
    with tokenizer_errors(f"the tokenizer knows no tokens for {text[:100]!r} (", ")"):
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def decode_hf(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids. Raises UserError."""
    with tokenizer_errors("the tokenizer can't decode (", "): restore it"):
        return tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def tokenizer_errors(before: str, after: str) -> Iterator[None]:
    """Turn an error of the tokenizers library into a UserError, with its reason between two texts.

    It raises Exception itself, and where its Rust code panics, what is no Exception.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{before}{reason}{after}") from None


def numpy_encoder(meta: dict) -> Callable[[str], np.ndarray]:
    """Return encode(str) -> array of ids for a dataset's documents, where special tokens are text.

    A character's id is its code point, because a dataset's characters are only known when all of it
    is read.
    """
    if meta["kind"] == "gpt2":
        return encode_gpt2_document
    if meta["kind"] == "char":
        return lambda text: np.frombuffer(text.encode("utf-32-le"), "<u4")
    tokenizer = hf_tokenizer(meta)

    # In a document, the text of a special token is only text
    tokenizer.encode_special_tokens = True
    return lambda text: np.array(encode_hf(tokenizer, text), np.uint32)


def tokenizer_file_meta(file: str | os.PathLike, end_of_text: int | None = None) -> dict:
    """Return the "tokenizer" of a meta.json for a tokenizer.json. Raises UserError.

    end_of_text: the id of that token, or None.
    """
    check_regular(file, MAX_TOKENIZER_BYTES)
    return {
        "kind": "hf",
        "file": os.path.abspath(file),
        "end_of_text": end_of_text,
        "sha256": file_digest(file)["sha256"],
    }


def vocabulary_of(meta: dict) -> dict[str, int]:
    """Return {token: id} of a "tokenizer" of the kind hf, which isn't empty. Raises UserError."""
    ids = hf_tokenizer(meta).get_vocab()
    if not ids:
        raise UserError(f"the tokenizer {meta['file']} has no tokens: choose another")

    # The embedding has a row for each id up to the largest
    largest = max(ids.values())
    if largest >= MAX_VOCAB:
        raise UserError(
            f"the tokenizer {meta['file']} has token {largest:,}, and at most {MAX_VOCAB:,} tokens "
            "are plausible: choose another"
        )
    return ids


def tokenizer_content(meta: dict) -> bytes:
    """Return the tokenizer.json of a "tokenizer" of the kind hf. Raises UserError.

    It is in the file "file", or in "content" if it was made of other files.
    """
    file = ROOT / (meta.get("file") or "tokenizer.json")
    with tokenizer_errors(f"the tokenizer {file} can't be used (", "): restore it"):
        # The hash says whether it is still the tokenizer of the data
        content = meta.get("content")
        if content is None:
            content = read_regular(file, MAX_TOKENIZER_BYTES)
        if hashlib.sha256(content).hexdigest() != meta["sha256"]:
            raise ValueError("it is not the one that the data was prepared with")
    return content


def hf_tokenizer(meta: dict) -> Any:
    """Return the tokenizers.Tokenizer of a "tokenizer" of the kind hf. Raises UserError."""
    from tokenizers import Tokenizer

    content = tokenizer_content(meta)
    with tokenizer_errors(f"the tokenizer {meta.get('file')} can't be used (", "): restore it"):
        # Before the library reads it, which may not return
        parsed = parse_json(content)
        check_growth(parsed)
        check_pieces(parsed)

        # It may come with settings that cut or pad all texts
        with silent_panics():
            tokenizer = Tokenizer.from_str(content.decode("utf-8"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            probe(tokenizer)
    return tokenizer


def check_growth(content: Any) -> None:
    """Raise ValueError if the replacements of a tokenizer.json can make a text huge.

    A chain of them that doubles a letter 40 times fills the memory, and nothing stops the library.
    A letter becomes as many as a Replace has, one more for a Prepend, and two for a ByteLevel.
    """
    # Level by level, whatever the depth: normalizers may be in a sequence of them
    growth = 1.0
    level = [content]
    while level:
        containers = [item for item in level if isinstance(item, dict | list)]
        for item in containers:
            growth *= growth_by(item)
        if growth > MAX_GROWTH:
            raise ValueError("its replacements make a text far longer")
        level = []
        for item in containers:
            level.extend(item.values() if isinstance(item, dict) else item)


def check_pieces(content: Any) -> None:
    """Raise ValueError if a Unigram's piece is so long that the library's recursion fails."""
    # The content is not trusted, so each level may be of another type
    model = content.get("model") if isinstance(content, dict) else None
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(pieces, list):
        return
    for piece in pieces:
        if isinstance(piece, list) and piece and len(str(piece[0])) > MAX_PIECE:
            raise ValueError(f"it has a token of more than {MAX_PIECE:,} characters")


def growth_by(item: Any) -> float:
    """Return how many times longer one part of a tokenizer.json can make a text."""
    if not isinstance(item, dict):
        return 1.0
    match item.get("type"):
        case "Replace":
            pattern = item.get("pattern")
            found = pattern.get("String", "") if isinstance(pattern, dict) else ""
            return max(1.0, len(str(item.get("content", ""))) / max(1, len(str(found))))
        case "Prepend":
            return 1.0 + len(str(item.get("prepend", "")))
        case "ByteLevel":
            return 2.0
    return 1.0


def probe(tokenizer: Any) -> None:
    """Encode and decode a little, so that a tokenizer that panics is refused when it is loaded."""
    # That it has no such characters is no fault
    with contextlib.suppress(Exception):
        tokenizer.encode_batch_fast(["Two words, and 3 é.\n\n  ok"], add_special_tokens=False)
    tokenizer.decode([0, 1, 2], skip_special_tokens=False)


@contextlib.contextmanager
def silent_panics() -> Iterator[None]:
    """Keep Rust code that panics from printing its stack to stderr: what it raises is enough."""
    # The panic is printed by Rust, past sys.stderr, so file descriptor 2 is replaced
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def end_of_text(meta: dict) -> int | None:
    """Return the id of <|endoftext|>, or None if the tokenizer has none (characters)."""
    if meta["kind"] == "gpt2":
        return GPT2_VOCAB - 1
    return meta.get("end_of_text")


def token_bytes(data: dict, fetch: bool = True) -> np.ndarray:
    """Return the number of UTF-8 bytes of each token, (vocab_size + 1,) int64.

    They are zeros if it is unknown. End-of-text has 0, and so has the last element, for a target of
    -1, which doesn't count. data: a dict with "tokenizer" and "vocab_size", as meta.json. fetch:
    GPT-2's tokens may be downloaded.
    """
    n = data["vocab_size"]
    # Training doesn't need the bytes, so what is wrong with a tokenizer is no reason to stop
    tokens: Collection[bytes | str] = []
    with contextlib.suppress(UserError):
        tokens = _tokens_in_bytes(data["tokenizer"], n, fetch)

    sizes = np.zeros(n + 1, np.int64)
    sizes[: len(tokens)] = [len(token) for token in tokens]

    end = end_of_text(data["tokenizer"])
    sizes[n if end is None else end] = 0
    return sizes


def _tokens_in_bytes(meta: dict, n: int, fetch: bool) -> Collection[bytes | str]:
    """Return n tokens, by id, of a byte or a letter for each of their bytes, or none if unknown.

    Raises UserError if the tokenizer has changed, or can't encode some text.
    """
    if meta["kind"] == "char":
        return [char.encode() for char in meta["chars"]]
    if meta["kind"] == "gpt2":
        is_there = fetch or RANKS_FILE.exists()
        return gpt2_ranks() if n == GPT2_VOCAB and is_there else []

    # It is known if it encodes any text exactly, with a letter per byte, as GPT-2's does
    encode, decode = tokenizer_of(meta)

    # All characters below the surrogates, which UTF-8 doesn't have
    text = "".join(map(chr, range(1, 0xD800)))
    tokenizer = hf_tokenizer(meta)
    is_by_bytes = type(tokenizer.decoder).__name__ == "ByteLevel"
    if not is_by_bytes or decode(encode(text)) != text:
        return []
    return [tokenizer.id_to_token(i) or "" for i in range(n)]
