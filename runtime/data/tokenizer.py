"""Text to tokens and back: GPT-2's BPE, one token a character, or a tokenizer in Hugging Face's form."""

import base64
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np

from runtime.data import download
from runtime.files import UserError, file_digest

RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
RANKS_WHEEL = "mlx-whisper==0.4.3", ["mlx_whisper/assets/gpt2.tiktoken"]  # the same file, in a package
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # the one tiktoken demands
ROOT = Path(__file__).resolve().parents[2]
RANKS_FILE = ROOT / "data" / "gpt2.tiktoken"  # kept here, git-ignored

CODE_POINTS = 0x110000  # of all characters in Unicode
END_OF_TEXT = "<|endoftext|>"
# GPT-2's split (encoder.py of the gpt-2 repository), possessive (++) as in tiktoken: the same pieces, but a text
# that ends in a million spaces doesn't overflow the stack of tiktoken's regex.
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def gpt2_ranks():
    """GPT-2's 50,256 tokens without <|endoftext|>, {bytes: id}, in the order in which BPE merges them.

    They come from tiktoken's cache or address, or a wheel, and are kept in data/gpt2.tiktoken. Raises UserError.
    """
    cache = (os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
             or os.path.join(tempfile.gettempdir(), "data-gym-cache"))  # as in tiktoken/load.py
    cached = Path(cache) / hashlib.sha1(RANKS_URL.encode()).hexdigest()
    sources = [download.local(cached), download.url(RANKS_URL), download.wheel(*RANKS_WHEEL)]
    data, _ = download.fetch("GPT-2's BPE ranks", sources, RANKS_SHA256, keep=RANKS_FILE,
                             fix=f"Bring the file {RANKS_URL} from another machine and save it as {RANKS_FILE}")
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}


@functools.cache
def gpt2_encoding():
    """GPT-2's tiktoken.Encoding: 50,257 tokens, of which 50256 is <|endoftext|>. Raises UserError."""
    import tiktoken

    ranks = gpt2_ranks()
    return tiktoken.Encoding(name="gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(ranks)}, explicit_n_vocab=len(ranks) + 1)


def tokenizer_of(meta):
    """Return (encode, decode) for the "tokenizer" entry of a dataset's meta.json (dataset.py).

    encode(str) -> list of ids, decode(list of ids) -> str. GPT-2's makes <|endoftext|> in the text one token. encode
    raises ValueError for unknown characters; UserError is raised if a tokenizer.json has changed.
    """
    if meta["kind"] == "gpt2":
        encoding = gpt2_encoding()
        return functools.partial(encoding.encode, allowed_special="all"), encoding.decode
    if meta["kind"] == "char":
        chars = meta["chars"]
        return (functools.partial(_encode_chars, {char: i for i, char in enumerate(chars)}),
                lambda ids: "".join(chars[i] for i in ids))
    if meta["kind"] == "hf":
        tokenizer = hf_tokenizer(meta)
        return functools.partial(_encode_hf, tokenizer), functools.partial(tokenizer.decode, skip_special_tokens=False)
    raise ValueError(f"unknown tokenizer kind {meta['kind']!r}; known are 'gpt2', 'char' and 'hf'")


def _encode_chars(ids, text):
    try:
        return [ids[char] for char in text]
    except KeyError as error:
        char = error.args[0]
        raise ValueError(f"the character {char!r} (U+{ord(char):04X}) is not one of the {len(ids)} that this character "
                         "dataset knows") from None


def _encode_hf(tokenizer, text):
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library's own have no class of theirs
        raise ValueError(f"the tokenizer knows no tokens for {text!r} ({error})") from None


def numpy_encoder(meta):
    """encode(str) -> array of ids, for the documents of a dataset: special tokens in their text are text.

    Characters are their code points, as a dataset's characters are known only when all of it is read.
    """
    if meta["kind"] == "gpt2":
        return functools.partial(gpt2_encoding().encode_to_numpy, disallowed_special=())
    if meta["kind"] == "char":
        return lambda text: np.frombuffer(text.encode("utf-32-le"), "<u4")
    tokenizer = hf_tokenizer(meta)

    def encode(text):
        tokenizer.encode_special_tokens = True  # as text; on the way to a worker process, this is lost
        return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.uint32)

    return encode


def tokenizer_meta(name):
    """(the "tokenizer" entry for a dataset's meta.json, vocabulary size) of gpt2, char, or a folder with a tokenizer
    that transformers has saved. Characters are those of all of Unicode here. Raises UserError."""
    if name == "gpt2":
        return {"kind": "gpt2"}, gpt2_encoding().n_vocab
    if name == "char":
        return {"kind": "char"}, CODE_POINTS
    saved = Path(name, "tokenizer.json")
    if not saved.is_file():
        raise UserError(f"{name} has no tokenizer.json: --tokenizer takes gpt2, char, or a folder in which "
                        "transformers has saved a fast tokenizer")
    meta, config = tokenizer_file_meta(saved), {}
    tokenizer = hf_tokenizer(meta)
    for file in map(saved.with_name, ("config.json", "special_tokens_map.json", "tokenizer_config.json")):
        try:
            config |= json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file} cannot be read ({error}): restore it, or remove it") from None
    end = config.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    end = tokenizer.token_to_id(end) if isinstance(end, str) else config.get("eos_token_id")
    if not isinstance(end, int) or tokenizer.id_to_token(end) is None:
        raise UserError(f'{name} names no end-of-text token that its tokenizer has: put "eos_token" into its '
                        "tokenizer_config.json")
    return meta | {"end_of_text": end}, max(tokenizer.get_vocab().values()) + 1


def tokenizer_file_meta(file, end_of_text=None):
    """The "tokenizer" entry of a tokenizer.json; end_of_text: the id of that token, or None."""
    return {"kind": "hf", "file": os.path.abspath(file), "end_of_text": end_of_text,
            "sha256": file_digest(file)["sha256"]}


def hf_tokenizer(meta):
    """The tokenizers.Tokenizer of a "tokenizer" entry of the kind hf. Raises UserError."""
    from tokenizers import Tokenizer

    file = ROOT / meta["file"]
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"the tokenizer {file} can't be read ({error.strerror}): bring it back") from None
    if hashlib.sha256(data).hexdigest() != meta["sha256"]:
        raise UserError(f"the tokenizer {file} is not the one that the data was prepared with: bring that back")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # as above
        raise UserError(f"{file} is not a tokenizer ({error}): restore it, or take another") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(meta):
    """The id of <|endoftext|>, or None for a tokenizer that has none (characters)."""
    return 50256 if meta["kind"] == "gpt2" else meta.get("end_of_text")
