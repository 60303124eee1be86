"""Compare two tokenizers by the ids that they give to a text, not by their files."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.data.meta import GPT2_VOCAB
from runtime.data.tokenizer import (
    END_OF_TEXT,
    decode_hf,
    encode_hf,
    hf_tokenizer,
    tokenizer_errors,
    tokenizer_of,
)
from runtime.errors import UserError

# Of OpenAI's encoder.json and vocab.bpe, as in tiktoken: GPT-2's is known without a download
GPT2_VOCAB_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# In which normalizers and pre-tokenizers differ: case, accents, digits, white space, punctuation,
# scripts, signs
TEXTS = (
    "Two words", " two  words ", "A\n\nB\n", "a\r\n\tb", "I'll don't WE'VE",
    "naïve nai\u0308ve É", "ﬁ ² Ω ℌ", "12345 1,000.50", "x=[1, 2];",
    "日本語 テスト", "привет", "שלום", "नमस्ते", "😀 👩‍👩‍👧",
    "a\u00a0b\u200bc\u3000d", "\x00\x07\ufeff", "snake_case camelCase",
    "https://example.com/?q=1", "...!!!---", "</s> [UNK] <unk> ▁ Ġ ## @@",
)


@dataclass(frozen=True)
class Ids:
    """What decides the ids that a text gets."""

    tokens: dict[str, int]  # with the added ones
    # Added tokens that stand for nothing in a document, such as end-of-text
    special: frozenset[str]
    words: frozenset[str]  # other added tokens: they are found in a text before anything else
    rules: dict  # of the model: its type, and merges or scores
    # What changes and splits a text, and what stands for unknown ones. None: not known
    before: dict | None
    encode_all: Callable[[list[str]], list]  # the ids of each text, or None where it has no tokens
    decode: Callable[[list[int]], str]


def have_same_ids(a: dict, b: dict) -> bool:
    """Return whether all texts have the same ids with two tokenizers.

    a, b: the "tokenizer" of a meta.json. Each may have special tokens that the other hasn't. Raises
    UserError.
    """
    # What the kinds say, without reading a tokenizer
    kinds = {a["kind"], b["kind"]}
    if kinds == {"gpt2"}:
        return True
    if kinds == {"gpt2", "char"}:
        return False

    # GPT-2's is known by its hashes
    if "gpt2" in kinds:
        other = b if a["kind"] == "gpt2" else a
        return is_gpt2(ids_of(other))
    if kinds == {"hf"} and a.get("sha256") == b.get("sha256"):
        return True
    return are_equal(ids_of(a), ids_of(b))


def ids_of(meta: dict) -> Ids:
    """Return the Ids of a "tokenizer" of the kind char or hf. Raises UserError."""
    if meta["kind"] == "hf":
        return ids_of_tokenizer(hf_tokenizer(meta))

    # Characters are a vocabulary of words with one letter
    encode, decode = tokenizer_of(meta)
    tokens = {char: number for number, char in enumerate(meta["chars"])}
    return Ids(
        tokens=tokens,
        special=frozenset(),
        words=frozenset(),
        rules={"type": "WordLevel"},
        before=None,
        encode_all=functools.partial(encode_each, encode),
        decode=decode,
    )


def ids_of_tokenizer(tokenizer: Any) -> Ids:
    """Return the Ids of a tokenizers.Tokenizer."""
    content = json.loads(tokenizer.to_str())
    added = content["added_tokens"]
    before = {"normalizer": content["normalizer"], "pre_tokenizer": content["pre_tokenizer"]}

    # The model's settings, without those that have their defaults
    rules = {}
    for name, value in content["model"].items():
        is_default = value in (None, "", False)
        is_scores = name == "vocab" and isinstance(value, list)  # Unigram's
        if name in ("unk_token", "unk_id"):
            before[name] = value
        elif not is_default and (is_scores or name != "vocab"):
            rules[name] = value
    return Ids(
        tokens=tokenizer.get_vocab(with_added_tokens=True),
        special=frozenset(token["content"] for token in added if token["special"]),
        words=frozenset(token["content"] for token in added if not token["special"]),
        rules=rules,
        before=before,
        encode_all=functools.partial(encode_batch, tokenizer),
        decode=functools.partial(decode_hf, tokenizer),
    )


def encode_batch(tokenizer: Any, texts: list[str]) -> list[list[int] | None]:
    """Return the ids of each text, or None where a tokenizers.Tokenizer has none for it."""
    try:
        with tokenizer_errors("", ""):
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [each.ids for each in encoded]
    except UserError:  # which doesn't say of which text
        return encode_each(functools.partial(encode_hf, tokenizer), texts)


def encode_each(encode: Callable[[str], list[int]], texts: list[str]) -> list[list[int] | None]:
    """Return the ids of each text, or None where encode() raises UserError."""
    found: list[list[int] | None] = []
    for text in texts:
        try:
            found.append(encode(text))
        except UserError:
            found.append(None)
    return found


def are_equal(a: Ids, b: Ids) -> bool:
    """Return whether two tokenizers give the same ids."""
    # What both have is the same, and what one has alone is special
    for mine, theirs in ((a, b), (b, a)):
        token_of = {number: token for token, number in theirs.tokens.items()}
        for token, number in mine.tokens.items():
            is_theirs = token in theirs.tokens or number in token_of
            if is_theirs and theirs.tokens.get(token) != number:
                return False
            if not is_theirs and token not in mine.special:
                return False

    # How a text becomes tokens, before and in the model
    if a.rules != b.rules or a.words != b.words:
        return False
    if a.before is not None and a.before == b.before:
        return True

    # It may be the same in other words. The text of a token tells whether something splits it, or
    # changes its letters
    both = set(a.tokens.values()) & set(b.tokens.values())
    texts = [*TEXTS, *(a.decode([number]) for number in sorted(both))]
    return a.encode_all(texts) == b.encode_all(texts)


def is_gpt2(ids: Ids) -> bool:
    """Return whether a tokenizer is GPT-2's, perhaps with more special tokens.

    It needs no download: the vocabulary and the merges are known by their hashes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The first tokens, and the merges
    merges = ids.rules.get("merges") or []
    first = {token: number for token, number in ids.tokens.items() if number < GPT2_VOCAB}
    in_order = dict(sorted(first.items(), key=lambda item: item[1]))
    if ids.rules.get("type") != "BPE" or sha256_of(json.dumps(in_order)) != GPT2_VOCAB_SHA256:
        return False
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    if sha256_of("\n".join(lines)) != GPT2_MERGES_SHA256:
        return False

    # GPT-2's own tokenizer, whose other parts are compared
    own = Tokenizer(models.BPE(in_order, [tuple(pair) for pair in merges]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([END_OF_TEXT])
    return are_equal(ids, ids_of_tokenizer(own))


def sha256_of(text: str) -> str:
    """Return the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
