"""Find the tokenizer of a folder of weights, or of one that data/prepare.py is to use.

It is the same for training, sampling and evaluating. Data with other ids than the weights' is
refused, with the command that prepares it.
"""

import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from runtime.data.meta import GPT2_VOCAB, MAX_TOKENIZER_BYTES, MAX_VOCAB
from runtime.data.same_ids import have_same_ids
from runtime.data.tokenizer import (
    CODE_POINTS,
    END_OF_TEXT,
    RANKS_SHA256,
    gpt2_encoding,
    tokenizer_file_meta,
    vocabulary_of,
)
from runtime.errors import UserError
from runtime.files import file_digest
from runtime.output import counted
from runtime.pretrained import PRETRAINED
from runtime.untrusted import check_type, read_json, read_regular

PADDED_GPT2_VOCAB = 50304  # nanoGPT's, for a dataset without meta.pkl
GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")  # of vocab.json with merges.txt
# Tokenizers that are in no form that is read here
OTHER_FILES = (
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.pkl",
)
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB)]


def tokenizer_meta(name: str) -> tuple[dict, int]:
    """Return (the "tokenizer" of a dataset's meta.json, its vocabulary size).

    name: gpt2, char, a tokenizer's folder, or the tokenizer.json in it. For char, the vocabulary is
    all of Unicode so far. Raises UserError.
    """
    # Those that need no folder
    if name == "gpt2":
        return {"kind": "gpt2"}, gpt2_encoding().n_vocab
    if name == "char":
        return {"kind": "char"}, CODE_POINTS

    # A folder's, with which a document can be ended
    folder = folder_of_tokenizer(name)
    found = tokenizer_of_folder(folder)
    if found is None:
        raise UserError(
            f"{name} has no tokenizer.json: choose gpt2, char, or a folder in which transformers "
            "has saved a fast tokenizer"
        )

    # GPT-2's own always has an end of text
    tokenizer = found["tokenizer"]
    if tokenizer["kind"] == "gpt2":
        return tokenizer, gpt2_encoding().n_vocab
    check_end_of_text(folder, tokenizer)
    return tokenizer, found["vocab_size"]


def folder_of_tokenizer(name: str) -> Path:
    """Return the folder that --tokenizer names, itself or by the tokenizer.json in it.

    Raises UserError.
    """
    path = Path(name)
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    if path.is_file():
        raise UserError(
            f"--tokenizer={name} is a file: name its folder, in which the tokenizer is a "
            "tokenizer.json, or vocab.json with merges.txt"
        )
    if not path.exists():
        raise UserError(f"--tokenizer={name} does not exist: choose gpt2, char, or the folder of a "
                        "tokenizer")
    return path


def check_end_of_text(folder: Path, tokenizer: dict) -> None:
    """Raise UserError unless the "tokenizer" of a folder has the end of text that the folder
    names."""
    config = folder / "tokenizer_config.json"
    named = text_of_token(config_of(config).get("eos_token"))
    if named is not None and named not in vocabulary_of(tokenizer):
        raise UserError(
            f"the eos_token {named!r} in {config} is none of the tokenizer's tokens: name "
            "one of them, or add it to its tokenizer.json with transformers, by "
            f"{save_line(folder)}"
        )
    if tokenizer["end_of_text"] is None:
        raise UserError(f'{folder} has no end-of-text token: add "eos_token" to its '
                        "tokenizer_config.json")


def tokenizer_of_folder(folder: str | os.PathLike) -> dict | None:
    """Return {"tokenizer", "vocab_size"}, as in a meta.json, of the tokenizer in a folder.

    Returns None if it has none. "end_of_text" is None if the folder names no such token. Raises
    UserError if the folder has a tokenizer in a form that isn't read here.
    """
    folder = Path(folder)

    # A tokenizer.json says all. The older form comes second
    if is_there(folder, "tokenizer.json"):
        meta = tokenizer_file_meta(folder / "tokenizer.json")
    elif is_there(folder, "vocab.json") and is_there(folder, "merges.txt"):
        meta = meta_of_vocab_and_merges(folder)
    else:
        return gpt2_of_ranks(folder)

    # Ids may have gaps, so the largest counts
    ids = vocabulary_of(meta)
    meta["end_of_text"] = end_of_folder(folder, ids)
    return {"tokenizer": meta, "vocab_size": max(ids.values()) + 1}


def is_there(folder: Path, name: str) -> bool:
    """Return whether a folder has a file of this name, even if it is a link that leads nowhere."""
    return os.path.lexists(folder / name)


def gpt2_of_ranks(folder: Path) -> dict | None:
    """Return {"tokenizer", "vocab_size"} of GPT-2's own ranks in a .tiktoken file.

    Returns None if there is no tokenizer. Raises UserError for another one.
    """
    # One file of the older form can't be read alone
    for name, other in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if is_there(folder, name):
            raise UserError(
                f"{folder} has {name} without {other}: restore it, or {how_to_convert(folder)}"
            )

    # OpenAI's ranks are known by their hash
    ranks = sorted(folder.glob("*.tiktoken"))
    others = [folder / name for name in OTHER_FILES if is_there(folder, name)]
    if len(ranks) == 1 and not others and file_digest(ranks[0])["sha256"] == RANKS_SHA256:
        return {"tokenizer": {"kind": "gpt2"}, "vocab_size": GPT2_VOCAB}

    # Another tokenizer here would give other ids, so it is refused
    unread = [*others, *ranks]
    if unread:
        raise UserError(
            f"{unread[0]} is a tokenizer in a form that isn't read here: {how_to_convert(folder)}"
        )
    return None


def how_to_convert(folder: Path) -> str:
    """Return the advice to write a tokenizer.json."""
    return f"write its tokenizer.json with transformers, by {save_line(folder)}"


def save_line(folder: Path) -> str:
    """Return the line of Python that writes the tokenizer.json of a folder anew."""
    return f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"


def config_of(file: Path) -> dict:
    """Return the content of a JSON file, or {} if there is none. Raises UserError."""
    try:
        return read_json(file)
    except FileNotFoundError:
        return {}


def end_of_folder(folder: Path, ids: dict[str, int]) -> int | None:
    """Return the id of the end-of-text token of a tokenizer, or None.

    ids: {token: id}. The tokenizer's own word comes first: config.json often has GPT-2's default,
    50256, for other tokenizers. Raises UserError.
    """
    token = text_of_token(config_of(folder / "tokenizer_config.json").get("eos_token"))
    if token in ids:
        return ids[token]

    # Then that of the weights, or of the dataset, in the folder
    end = config_of(folder / "config.json").get("eos_token_id")
    described = config_of(folder / "meta.json").get("tokenizer")
    if isinstance(described, dict):
        end = described.get("end_of_text")
    candidates = end if isinstance(end, list) else [end]
    known = set(ids.values())
    for candidate in candidates:
        if type(candidate) is int and candidate in known:
            return candidate
    return ids.get(END_OF_TEXT)


def text_of_token(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, or None if there is none.

    It is a string, or in "content".
    """
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def meta_of_vocab_and_merges(folder: Path) -> dict:
    """Return the "tokenizer" of a meta.json for GPT-2's form, a vocab.json with a merges.txt.

    Its "content" is the tokenizer.json that they amount to. Raises UserError.
    """
    # Other classes have such files, too
    config = config_of(folder / "tokenizer_config.json")
    if config.get("tokenizer_class") not in GPT2_CLASSES:
        raise UserError(
            f"{folder} has vocab.json and merges.txt of a {config['tokenizer_class']}, and without "
            f"a tokenizer.json only GPT-2's form is read: {how_to_convert(folder)}"
        )

    # The tokenizer.json that transformers would write
    vocab = read_json(folder / "vocab.json", dict[str, TokenId], MAX_TOKENIZER_BYTES)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": config.get("add_prefix_space") is True,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "vocab": vocab,
        "merges": read_merges(folder / "merges.txt"),
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(folder, config, vocab),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    encoded = json.dumps(content).encode()
    return {
        "kind": "hf",
        "file": os.path.abspath(folder / "vocab.json"),
        "content": encoded,
        "end_of_text": None,
        "sha256": hashlib.sha256(encoded).hexdigest(),
    }


def read_merges(file: Path) -> list[list[str]]:
    """Return the pairs of tokens of a merges.txt, in order. Raises UserError."""
    # The first line may name the version of the format
    try:
        lines = read_regular(file, MAX_TOKENIZER_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} can't be used ({error}): restore it") from None
    if lines[0].startswith("#version"):
        lines = lines[1:]
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip()]
    for pair in pairs:
        if len(pair) != 2:
            line = " ".join(pair)
            raise UserError(
                f"{file} can't be used ({line[:40]!r} is not a pair of tokens): restore it"
            )
    return pairs


def added_tokens(folder: Path, config: dict, vocab: dict[str, int]) -> list[dict]:
    """Return the "added_tokens" of a tokenizer.json.

    They are found in a text before anything else. config: of tokenizer_config.json. Raises
    UserError.
    """
    # Special tokens are those that the configuration gives a role
    added = dict(config_of(folder / "added_tokens.json"))
    special = {END_OF_TEXT}
    for name in ("eos_token", "bos_token", "unk_token", "pad_token"):
        text = text_of_token(config.get(name))
        if text is not None:
            special.add(text)

    # The configuration describes them, too, by their ids
    described = config.get("added_tokens_decoder")
    if not isinstance(described, dict):
        described = {}
    for number, token in described.items():
        content = text_of_token(token)
        if content and number.isdecimal():
            added[content] = int(number)
            if isinstance(token, dict) and token.get("special") is True:
                special.add(content)

    # Special tokens of the vocabulary are looked for, too
    for token in special & vocab.keys():
        added[token] = vocab[token]

    # Somebody else may have written these files
    try:
        check_type(added, dict[str, TokenId])
    except ValueError as error:
        raise UserError(
            f"the added tokens of {folder} can't be used ({error}): restore them"
        ) from None

    # As transformers writes them, in the order of their ids
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = []
    for token, number in sorted(added.items(), key=lambda item: item[1]):
        tokens.append({"id": number, "content": token, "special": token in special, **flags})
    return tokens


def tokenizer_of_weights(source: str, vocab_size: int) -> dict | None:
    """Return {"tokenizer", "vocab_size"} of weights, or None if nothing says which they have.

    source: a GPT-2 on the hub, a folder of weights or a ckpt.pt. vocab_size: rows of their
    embedding, of which some may be padding. Raises UserError.
    """
    if os.path.isdir(source):
        found = tokenizer_of_folder(source)
        # People add tokens to a tokenizer, and not to its weights
        if found and found["vocab_size"] > vocab_size:
            end = found["tokenizer"].get("end_of_text")
            if end is not None and end >= vocab_size:
                found["tokenizer"]["end_of_text"] = None
            found["vocab_size"] = vocab_size
        return found
    if source in PRETRAINED and not os.path.exists(source):
        return {"tokenizer": {"kind": "gpt2"}, "vocab_size": GPT2_VOCAB}
    return None


def assumed_tokenizer(source: str, vocab_size: int) -> tuple[dict | None, str]:
    """Return (the tokenizer that their size suggests of weights without one, a note).

    The first is {"tokenizer", "vocab_size"}, or None. source, vocab_size: see
    tokenizer_of_weights().
    """
    # Only these two sizes are GPT-2's own
    if vocab_size not in (GPT2_VOCAB, PADDED_GPT2_VOCAB):
        return None, ""
    assumed = {"tokenizer": {"kind": "gpt2"}, "vocab_size": GPT2_VOCAB}
    return assumed, f"{source} has no tokenizer: its {vocab_size:,} tokens are taken for GPT-2's"


def how_to_prepare(tokenizer: dict, folder: str | None = None) -> str:
    """Return the advice to prepare data with a "tokenizer" of a meta.json.

    folder: where it is, if not at its "file".
    """
    if tokenizer["kind"] == "char":
        return "prepare texts of exactly the same characters with --tokenizer=char"
    option = ""
    if tokenizer["kind"] == "hf":
        place = folder or os.path.dirname(tokenizer.get("file") or "DIR/")
        option = f" --tokenizer={shlex.quote(place)}"
    return f"prepare its texts with python data/prepare.py PATH{option} --name=NAME"


def check_ids(dataset: Any, data: dict, source: str, vocab_size: int) -> str:
    """Return a note on a dataset for weights, or "". Raises UserError if its ids aren't theirs.

    dataset: the setting. data: {"tokenizer", "vocab_size"} of the dataset. source, vocab_size: see
    tokenizer_of_weights().
    """
    # Another tokenizer, if the weights' is known
    known = tokenizer_of_weights(source, vocab_size)
    if known and not have_same_ids(data["tokenizer"], known["tokenizer"]):
        how = how_to_prepare(known["tokenizer"], source)
        raise UserError(f"dataset={dataset} has another tokenizer than {source}: {how}")

    # More tokens than the weights have
    tokens = counted(data["vocab_size"], "token")
    if data["vocab_size"] > vocab_size:
        problem = f"dataset={dataset} has {tokens}, and {source} has {vocab_size:,}"
        if known:
            raise UserError(
                f"{problem}: remove those from its tokenizer that were added without weights, and "
                "prepare the data again"
            )
        raise UserError(f"{problem}: prepare the data with the weights' tokenizer")
    if known:
        return ""

    # Nothing says which tokenizer the weights have
    assumed, note = assumed_tokenizer(source, vocab_size)
    if assumed and data["tokenizer"]["kind"] == "gpt2":
        return note
    return (
        f"{source} has no tokenizer to compare with that of dataset={dataset}: its weights must "
        f"have been trained on the same {tokens}"
    )
