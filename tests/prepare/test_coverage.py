"""What data/prepare.py prints about a tokenizer that loses text, and the conversations that it refuses for it."""

import json
import random
import re

import pytest
from conftest import ROOT, launch
from small_tokenizers import byte_level_bpe, save_tokenizer, word_piece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.prepare import coverage

TEXTS = [f"The plan {i} is made, and the run {i} begins." for i in range(400)]


def prepare(folder, texts, tokenizer, *args):
    """Prepare texts as JSON lines with a tokenizer's folder."""
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return launch(ROOT / "data" / "prepare.py", file, f"--name={folder}/out", f"--tokenizer={tokenizer}", *args)


def few_letters(folder):
    """A BPE of 12 letters without a token for others: they vanish."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("cathod <")}, []))
    tokenizer.decoder = decoders.Fuse()
    return save_tokenizer(folder, tokenizer, end="<")


def without_decoder(folder):
    """A byte-level BPE whose decoder was not saved: its tokens are joined by spaces."""
    tokenizer = byte_level_bpe()
    content = json.loads(tokenizer.to_str()) | {"decoder": None}
    return save_tokenizer(folder, Tokenizer.from_str(json.dumps(content)))


def words(folder):
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "[UNK]": 1, "cat": 2, "hill": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return save_tokenizer(folder, tokenizer)


LOSSES = {  # (tokenizer, texts, share of the texts that change, share of unknown tokens, an example or None)
    "nothing": (lambda folder: save_tokenizer(folder, byte_level_bpe()), [*TEXTS, "\0 😀 É"], "0.0%", "0.0%", None),
    "letters": (few_letters, ["cat hill road", *(f"cat {'to' * i}" for i in range(1, 80))], "1.2%", "0.0%",
                "'cat hill road', which becomes 'cat h oad'"),
    "words": (words, ["cat hill dog fox", *(f"cat{' hill' * i}" for i in range(30))], "3.2%", "0.4%",
              "'cat hill dog fox', which becomes 'cat hill [UNK] [UNK]'"),
    "no decoder": (without_decoder, TEXTS, "100.0%", "0.0%", "becomes 'T h e Ġ"),
    "capitals": (lambda folder: save_tokenizer(folder, word_piece()), TEXTS, "100.0%", "0.0%", "becomes 'the plan"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_is_lost_is_told(tmp_path, case):
    make, texts, changed, unknown, example = LOSSES[case]
    run = prepare(tmp_path, texts, make(tmp_path / "own"), "--val_fraction=0.3")
    assert run.returncode == 0, run.stderr
    n = min(len(texts), 200)
    line = f"tokenizer: of {n} documents, {changed} change when decoded; {unknown} of their tokens are unknown\n"
    assert line in run.stdout, run.stdout
    if example is None:
        assert run.stderr == ""
    else:
        assert re.fullmatch(r"warning: this tokenizer loses some of the text, such as .*, which becomes .*: train one "
                            "that keeps it, or use --tokenizer=gpt2, which keeps every text\n", run.stderr)
        assert example in run.stderr


@pytest.mark.parametrize("changed, unknown, warns", [(2, 100, False), (3, 0, True), (0, 101, True)])
def test_a_warning_above_one_percent(capsys, changed, unknown, warns):
    coverage.report(coverage.Coverage(200, changed, 10_000, unknown, None))
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: this tokenizer loses some of the text: train one") is warns
    assert printed.out.startswith("tokenizer: of 200 documents, ")


def test_an_example_that_could_rewrite_a_terminal_is_escaped(capsys):
    coverage.report(coverage.Coverage(1, 1, 1, 0, ("\x1b[2J", "\x9b")))
    assert "'\\x1b[2J', which becomes '\\x9b'" in capsys.readouterr().err


def test_the_sample_is_the_same_in_any_order_and_knows_no_split():
    """300 documents of 1,000, of which the longest is cut."""
    hashes = [random.Random(i).getrandbits(64) for i in range(1000)]
    documents = [(number, f"{i} ".encode() * 3000) for i, number in enumerate(hashes)]
    samples = []
    for order in range(2):
        random.Random(order).shuffle(documents)
        sample = coverage.Sample()
        for number, text in documents:
            sample.add(number, text)
        samples.append(sample.texts())
    assert samples[0] == samples[1] and len(samples[0]) == 200
    by_lower_bits = sorted(range(1000), key=lambda i: hashes[i] % 2**32)[:200]
    assert samples[0] == [(f"{i} " * 3000)[:2000] for i in by_lower_bits]
    for_validation = sum(hashes[i] < 2**64 // 10 for i in by_lower_bits)
    assert 8 <= for_validation <= 35  # of 200, a tenth


def chat(folder, tokenizer):
    """Prepare conversations with a tokenizer's folder."""
    lines = [json.dumps({"prompt": f"The plan {i} é?", "completion": f"It is {i}."}) + "\n" for i in range(40)]
    (folder / "chat.jsonl").write_text("".join(lines))
    return launch(ROOT / "data" / "prepare.py", folder / "chat.jsonl", "--format=chat", "--val_fraction=0.3",
                  f"--name={folder}/chat", f"--tokenizer={tokenizer}")


def test_headers_of_roles_are_kept_or_refused(tmp_path):
    """WordPiece makes words of them, and words alone two unknown ones."""
    for name, make in (("words", words), ("pieces", lambda folder: save_tokenizer(folder, word_piece())),
                       ("bare", without_decoder)):
        run = chat(tmp_path, make(tmp_path / name))
        assert run.returncode == 2 and not (tmp_path / "chat" / "train.bin").exists()
        became = {"words": r"'\[UNK\]'", "pieces": r"'\[UNK\] \[UNK\]'", "bare": "'Ċ Ċ S.* : Ċ'"}[name]
        assert re.fullmatch(
            rf"this tokenizer makes {became} of '\\n\\nSystem:\\n', so that a model can't tell who speaks: choose "
            "another for conversations\n", run.stderr), run.stderr
    run = chat(tmp_path, save_tokenizer(tmp_path / "bytes", byte_level_bpe()))
    assert run.returncode == 0, run.stderr
    assert "tokenizer: of 40 documents, 0.0% change when decoded; 0.0% of their tokens are unknown\n" in run.stdout


def test_contents_of_conversations_are_measured(tmp_path):
    """A byte-level BPE without the two letters of é, which keeps the headers."""
    content = json.loads(byte_level_bpe().to_str())
    vocab = content["model"]["vocab"]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "Ã" not in "".join(pair)]
    for token in [token for token in vocab if "Ã" in token]:
        number = vocab.pop(token)
        vocab[f"<{number}>"] = number
    run = chat(tmp_path, save_tokenizer(tmp_path / "own", Tokenizer.from_str(json.dumps(content))))
    assert run.returncode == 0, run.stderr
    assert "tokenizer: of 40 documents, 100.0% change when decoded; 0.0% of" in run.stdout
    assert "'The plan 0 é?" in run.stderr or "é?" in run.stderr
