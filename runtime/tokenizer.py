"""Text to tokens and back: GPT-2's BPE, or one token a character."""

import base64
import functools
import hashlib
import os
import tempfile
from pathlib import Path

from runtime import fetch

RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
RANKS_WHEEL = "mlx-whisper==0.4.3", ["mlx_whisper/assets/gpt2.tiktoken"]  # the same file, in a package
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # the one tiktoken demands
RANKS_FILE = Path(__file__).resolve().parent.parent / "data" / "gpt2.tiktoken"  # kept here, git-ignored

END_OF_TEXT = "<|endoftext|>"
# GPT-2's split (encoder.py of the gpt-2 repository), possessive (++) as in tiktoken: the same pieces, but a text
# that ends in a million spaces doesn't overflow the stack of tiktoken's regex.
SPLIT = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def ranks_sources():
    """Where GPT-2's BPE ranks may be had, in order: tiktoken's cache, tiktoken's address, a wheel."""
    # The same rule as tiktoken/load.py.
    cache = (os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
             or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    cached = Path(cache) / hashlib.sha1(RANKS_URL.encode()).hexdigest()
    return [fetch.local(cached), fetch.url(RANKS_URL), fetch.wheel(*RANKS_WHEEL)]


def gpt2_ranks():
    """GPT-2's 50,256 tokens but <|endoftext|>, {bytes: id}, in the order in which BPE merges them.

    They come from data/gpt2.tiktoken, or from the first of ranks_sources() that works, and are then
    kept in data/gpt2.tiktoken. Raises fetch.FetchError when there is none.
    """
    data, _ = fetch.fetch(
        "GPT-2's BPE ranks", ranks_sources(), RANKS_SHA256, keep=RANKS_FILE,
        mend=f"Bring the file {RANKS_URL} from another machine and save it as {RANKS_FILE}")
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}


@functools.cache
def gpt2_encoding():
    """GPT-2's tiktoken.Encoding: 50,257 tokens, of which 50256 is <|endoftext|>. Raises fetch.FetchError."""
    import tiktoken

    ranks = gpt2_ranks()
    return tiktoken.Encoding(name="gpt2", pat_str=SPLIT, mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(ranks)}, explicit_n_vocab=len(ranks) + 1)


def tokenizer_of(meta):
    """Return (encode, decode) for the "tokenizer" entry of a data set's meta.json.

    encode(str) -> list of ids, decode(list of ids) -> str. With {"kind": "gpt2"}, <|endoftext|> in the text
    is token 50256. With {"kind": "char", "chars": all characters in id order}, encode raises ValueError
    on a character that isn't one of them.
    """
    if meta["kind"] == "gpt2":
        encoding = gpt2_encoding()
        return functools.partial(encoding.encode, allowed_special="all"), encoding.decode
    if meta["kind"] == "char":
        return _char_tokenizer(meta["chars"])
    raise ValueError(f"unknown tokenizer kind {meta['kind']!r}; known are 'gpt2' and 'char'")


def _char_tokenizer(chars):
    stoi = {char: i for i, char in enumerate(chars)}

    def encode(text):
        try:
            return [stoi[char] for char in text]
        except KeyError as error:
            char = error.args[0]
            raise ValueError(f"the character {char!r} (U+{ord(char):04X}) is not one of the {len(chars)} "
                             "that this character data set knows") from None

    def decode(ids):
        return "".join(chars[i] for i in ids)

    return encode, decode


def end_of_text(meta):
    """The id of <|endoftext|>, or None for a tokenizer that has none (characters)."""
    return 50256 if meta["kind"] == "gpt2" else None
