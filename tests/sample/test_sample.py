"""sample.py for people: prompts, seeds, batches, JSON."""

import json
import os
import pty
import subprocess

import pytest
import torch
from conftest import CHARS, ROOT, ForkedJob, at_once, command_line, done, launch, random_gpt2, small_manifest
from transformers.generation import logits_process

from model import GPT, sample_token
from runtime.checkpoint.manifest import sign_manifest
from runtime.data.tokenizer import tokenizer_of
from runtime.errors import UserError
from runtime.export.hf import char_tokenizer
from runtime.sample import generate as texts
from runtime.sample.generate import escape_note
from runtime.sample.source import find_model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(transformers' GPT-2 with random weights and 28 tokens, its folder)."""
    theirs = random_gpt2(0.15, vocab_size=28, n_positions=24, n_embd=32, bos_token_id=0, eos_token_id=None)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    return theirs, folder


def ids_of(text):
    return [CHARS.index(char) for char in text]


@pytest.fixture(scope="module")
def sample(theirs, characters):
    """sample(args) runs sample.py with these weights and the characters' tokens."""

    def run(*args, **options):
        return launch(ROOT / "sample.py", f"--init_from={theirs[1]}", f"--dataset={characters}", *args, **options)

    return run


def records(run):
    assert run.returncode == 0 and run.stderr == "", run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_greedy_text_is_that_of_transformers(theirs, sample):
    model, folder = theirs
    idx = torch.tensor([ids_of("the cat")])
    ids = model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=17, do_sample=False,
                         pad_token_id=0)[0].tolist()
    n_params = GPT.from_pretrained(str(folder)).num_params()
    run = sample("--start=the cat", "--temperature=0", "--max_new_tokens=17", "--num_samples=1")
    assert run.stdout == f"{folder}: {n_params:,} parameters\n\n{''.join(CHARS[i] for i in ids)}\n"


@pytest.mark.parametrize("options", [
    {"top_p": 0.7}, {"top_p": 0.05}, {"top_p": 0.9, "temperature": 1.5}, {"top_k": 5, "top_p": 0.8},
    {"top_p": 0.8, "temperature": 0.6}], ids=str)
def test_chances_are_those_of_transformers(options):
    """200,000 draws: deviation 0.0011 at most. What transformers bars is never drawn."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn((1, 12), generator=generator)
    theirs = logits_process.LogitsProcessorList([
        logits_process.TemperatureLogitsWarper(float(options.get("temperature", 1.0))),
        logits_process.TopKLogitsWarper(options.get("top_k", 12)),
        logits_process.TopPLogitsWarper(options.get("top_p", 1.0))])
    wanted = theirs(torch.tensor([[3]]), logits.clone())[0].softmax(0)
    drawn = sample_token(logits.expand(200_000, -1), options.get("temperature", 1.0), options.get("top_k"),
                         options.get("top_p"), generator)
    chances = drawn.bincount(minlength=12) / 200_000
    assert torch.equal(chances > 0, wanted > 0) and (chances - wanted).abs().max() < 0.006


def test_a_seed_gives_the_same_texts_again(sample):
    """Those of a batch of three and of the next batch, of one; one after another, and the third alone."""
    common = ("--json", "--max_new_tokens=40", "--start=the")
    one_by_one, together, third, again = at_once(
        lambda: sample(*common, "--num_samples=4"), lambda: sample(*common, "--num_samples=4", "--batch_size=3"),
        lambda: sample(*common, "--num_samples=1", "--seed=1339"),
        lambda: sample(*common, "--num_samples=3", "--batch_size=3"))
    told, batches = records(one_by_one), records(together)
    assert [r["seed"] for r in told] == [1337, 1338, 1339, 1340] and len({r["text"] for r in told}) == 4
    assert [r["seed"] for r in batches] == [1337, 1337, 1337, 1338] and len({r["text"] for r in batches}) == 4
    assert records(third) == told[2:3] and records(again) == batches[:3] and len(told[0]["text"]) == 40
    assert {k: v for k, v in told[0].items() if k not in ("model", "text")} == {
        "prompt": "the", "tokens": 40, "seed": 1337, "ended": "length"}


def test_prompts_from_files_and_from_the_keyboard(sample, theirs, tmp_path):
    (tmp_path / "lines.txt").write_text("the cat\n\nseven\n")
    (tmp_path / "one.txt").write_text("two\nlines")
    lines, whole, asked = at_once(
        lambda: sample(f"--prompts_file={tmp_path}/lines.txt", "--max_new_tokens=9"),
        lambda: sample(f"--start=FILE:{tmp_path}/one.txt", "--max_new_tokens=9", "--num_samples=2"),
        lambda: subprocess.run(
            command_line(ROOT / "sample.py", f"--init_from={theirs[1]}", f"--dataset={theirs[1].parent}/characters0",
                         "--interactive", "--max_new_tokens=9", launcher="python"),
            input="the cat\nÉ\nseven\n\nnever\n", capture_output=True, text=True, cwd=ROOT))
    head, first, second = lines.stdout.replace("\n\n", "\n---------------\n", 1).split("\n---------------\n")
    assert first.startswith("the cat") and second.startswith("seven") and len(first) == 7 + 9
    assert whole.stdout.split("\n\n", 1)[1].count("two\nlines") == 2 and "---------------" in whole.stdout
    assert asked.returncode == 0 and asked.stdout == f"{head}\n\n> {first}\n> > {second}> "
    assert asked.stderr == "the character 'É' (U+00C9) is not one of the 28 that this character dataset knows\n"


def test_only_newlines_end_a_prompt(tmp_path):
    (tmp_path / "lines.txt").write_bytes("a\u2028b\fc\r\n\nd\x85\n".encode())
    assert texts.read_prompts("", tmp_path / "lines.txt") == ["a\u2028b\fc", "d\x85"]


def test_what_is_shown_waits_for_whole_characters():
    """Bytes as tokens: the two of é come together, half of one comes at the end, and nothing after end-of-text."""
    shown = []
    stream = texts.TextStream([33], lambda ids: bytes(ids).decode(errors="replace"), 0, shown.append)
    for byte in "aéb".encode() + b"\xc3\0z":
        stream.add(byte)
    assert shown == ["a", "é", "b"] and stream.has_ended and stream.ids == [97, 195, 169, 98, 195]
    stream.flush()
    assert shown[3:] == ["\N{REPLACEMENT CHARACTER}"] and stream.text == "".join(shown)


def test_only_a_terminal_gets_escapes_instead_of_control_characters(theirs, characters, tmp_path):
    """Two characters of the vocabulary are ESC and CSI, with which a text could rewrite the screen or its title."""
    (tmp_path / "meta.json").write_text((characters / "meta.json").read_text().replace("yz", "\\u001b\\u009b"))
    (tmp_path / "prompt").write_text("a\x1b\nb\x9bc")
    args = (f"--init_from={theirs[1]}", f"--dataset={tmp_path}", f"--start=FILE:{tmp_path}/prompt", "--num_samples=1",
            "--max_new_tokens=0")
    master, slave = pty.openpty()
    assert ForkedJob([ROOT / "sample.py", *args], 1, os.ttyname(slave), tmp_path / "stderr").wait() == 0
    assert os.read(master, 4096).decode().endswith("\r\n\r\na\\x1b\r\nb\\x9bc\r\n")
    for end in (master, slave):
        os.close(end)
    assert launch(ROOT / "sample.py", *args).stdout.endswith("\n\na\x1b\nb\x9bc\n")


def test_a_tag_is_refused_where_it_would_be_ignored():
    with pytest.raises(UserError, match="^tag=best is a checkpoint of out_dir, and init_from=gpt2 names other weights: "
                                        "drop one of the two$"):
        find_model("gpt2", "out", "best", None)


@pytest.mark.parametrize("vocab_size, eos, end", [(28, 3, 3), (50257, [3, 4], 3), (50304, None, None), (28, [], None)])
def test_a_folder_of_weights_has_its_own_tokenizer(tmp_path, vocab_size, eos, end):
    """Also with as many tokens as GPT-2's, padded or not; and its chat template, here one of several."""
    char_tokenizer(CHARS).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos, "vocab_size": vocab_size}))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "{{ x }}"}]}')
    _, _, data, _ = find_model(str(tmp_path), None, None, None)
    assert (data["vocab_size"], data["tokenizer"]["end_of_text"], data["template"]) == (28, end, "{{ x }}")
    assert tokenizer_of(data["tokenizer"])[0]("the fox") == ids_of("the fox")


def test_refusals(sample, theirs, characters, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "tokenizer_config.json").write_text("[]")
    for tag in ("iter_5", "best"):
        (tmp_path / "run" / tag).mkdir(parents=True)
        (tmp_path / "run" / tag / "manifest.json").write_text(sign_manifest(small_manifest(5)))
    cases = [
        (["--top_p=0", "--num_samples=0"],
         ["num_samples=0 must be at least 1", "top_p=0.0 must be above 0 and at most 1, or None"]),
        (["--temperature=1e-40", "--seed=99999999999999999999", "--interactive", "--prompts_file="],
         ["prompts_file and interactive can't be combined: drop one", "temperature=1e-40 must be 0, or at least 1e-5",
          "seed=99999999999999999999 must be at least 0 and below 2**62"]),
        (["--device=cuda"], ["device=cuda, but PyTorch finds no CUDA GPU: use --device=cpu, or check nvidia-smi"]),
        ([f"--prompts_file={tmp_path}/none.txt"],
         [f"{tmp_path}/none.txt can't be read (No such file or directory): name another file"]),
        ([f"--prompts_file={tmp_path}/empty.txt"], [f"{tmp_path}/empty.txt is empty: write one prompt per line"]),
        ([f"--start=FILE:{tmp_path}/bytes"],
         [f"{tmp_path}/bytes is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 2: invalid start byte): "
          "save it as UTF-8"]),
        ([f"--init_from={tmp_path}/hf"],
         [f"{tmp_path}/hf/tokenizer_config.json cannot be read (ValueError: its content is []: Input should be a valid "
          "dictionary): fetch it again, or choose other weights with --init_from=PATH"]),
        ([f"--init_from={tmp_path}/run/iter_5"], [f"init_from={tmp_path}/run/iter_5 has checkpoints of "
                                                  f"train_deepspeed.py: use --out_dir={tmp_path}/run --tag=iter_5"]),
        (["--chat"], [f"{theirs[1]} has no chat template or end of text: drop --chat, or train on chats "
                      "(docs/chat.md)"]),
        (["--dataset=None"], [f"the tokenizer of {theirs[1]} is unknown (28 tokens): name the dataset that it was "
                              "trained on with --dataset=NAME or a path"])]
    runs = at_once(*(lambda args=args: sample(*args) for args, _ in cases))
    for (args, sentences), run in zip(cases, runs):
        assert (run.returncode, run.stdout, run.stderr.splitlines()) == (2, "", sentences), args


@pytest.mark.parametrize("start, shown", [
    (r"\na", r"in --start, \n is a backslash and the letter n: for a line end, write --start=$'a\nb' in bash or zsh"),
    (r"a\tb", r"in --start, \t is a backslash and the letter t: for a tab, write --start=$'a\tb' in bash or zsh"),
    ("a\nb", None), ("a\\b", None), ("FILE:C:\\new", None)])
def test_a_backslash_and_an_n_stay_and_are_told_of(start, shown):
    assert escape_note("--start", start) == shown


def test_the_note_on_a_backslash_goes_before_what_the_tokenizer_says(sample):
    """These weights' characters have no backslash. A real line end is one, without a note."""
    run = sample(r"--start=the\ncat", "--json")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("note: in --start, \\n is a backslash and the letter n: for a line end, write ")
    assert "the character '\\\\' (U+005C) is not one of the 28" in run.stderr.splitlines()[1]
    run = done(sample("--start=the\ncat", "--json", "--num_samples=1", "--max_new_tokens=3"))
    assert json.loads(run.stdout)["prompt"] == "the\ncat" and "note" not in run.stderr
