"""The commands of the pages, and a small project in which they run.

A command is a line of a code block, or a piece of code in a text, that begins with a program of
PROGRAMS. `Project` is a copy of the programs, with small texts and weights instead of a reader's.
"""

import contextlib
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from conftest import ROOT, SOURCE, done, launch
from small_tokenizers import byte_level_bpe, save_tokenizer, unigram

import configurator
from runtime.data.dataset import write_dataset

# What a command of a page begins with. A script such as ./install.sh is one, too
PROGRAMS = """apt bash cd cp deepspeed docker export git hf mpirun pip podman python rm sbatch sh
    source srun tail tensorboard torchrun touch uv watch wc zgrep""".split()
SCRIPT = re.compile(r"\./[\w/]+\.sh$")
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
RANKS = re.compile(r"--(?:nproc_per_node|num_gpus)=(\d+)")

# In place of what a reader has
WEIGHTS = ("gpt2", "gpt2-xl")
DATASETS = ("shakespeare", "openwebtext")
SMALL_RUN = (
    "--device=cpu",
    "--block_size=64",
    "--batch_size=8",
    "--gradient_accumulation_steps=2",
    "--eval_iters=1",
    "--log_interval=1",
    "--warmup_iters=0",
)
SMALL_SHAPE = ("--n_layer=2", "--n_head=2", "--n_embd=32")
# nanoGPT's own, with a smaller shape
NANOGPT_CONFIG = """
# train a miniature character-level shakespeare model
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False # override via command line if you like
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
"""


# ---------------------------------------------------------------------------------------------
# Where they are


@dataclass(frozen=True)
class Command:
    """A command without its comment, the page that has it, and its line there."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def words_of(text: str) -> list[str]:
    """Return a command's words, without the variables and the nohup before it."""
    try:
        words = shlex.split(text)
    except ValueError:  # prose with an apostrophe
        return []
    while words and (VARIABLE.match(words[0]) or words[0] == "nohup"):
        words.pop(0)
    return words


def is_command(text: str) -> bool:
    """Return whether a line is a command, and not output or the mere name of a program."""
    words = words_of(text)
    if not words:
        return False
    if SCRIPT.match(words[0]):
        return True
    return len(words) > 1 and words[0].removeprefix(".venv/bin/") in PROGRAMS


def without_comment(line: str) -> str:
    return re.sub(r"\s\s+#\s.*", "", line.strip())


def commands_of_page(name: str, text: str) -> list[Command]:
    """Return the commands of a page in Markdown, in their order."""
    found = []
    block = None  # the numbered lines of a code block, while the line is in one
    is_shell = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            if block is None:
                block = []
                is_shell = line.strip() == "```"
            else:
                found += commands_of_block(name, block) if is_shell else []
                block = None
        elif block is not None:
            block.append((number, line.strip()))
        else:
            # In the table of docs/guides.md, the first column is of other guides
            if name == "docs/guides.md":
                line = re.sub(r"^\| .+? \|", "|", line)
            codes = re.findall(r"`([^`]+)`", line)
            found += [Command(name, number, code) for code in codes if is_command(code)]
    return found


def commands_of_block(name: str, block: list[tuple[int, str]]) -> list[Command]:
    """Return the commands of a code block: each line, or those with a prompt if there are such."""
    joined = []
    for number, line in block:
        if joined and joined[-1][1].endswith(("\\", "&&")):
            first, before = joined.pop()
            before = before.removesuffix("\\").strip()
            joined.append((first, f"{before} {line}"))
        elif line:
            joined.append((number, line))
    prompts = [(number, line[2:]) for number, line in joined if line.startswith("$ ")]
    commands = [Command(name, number, without_comment(line)) for number, line in prompts or joined]
    # A block is of commands or of output. In one of commands, each line counts
    return commands if commands and is_command(commands[0].text) else []


def commands_of_config(name: str, text: str) -> list[Command]:
    """Return the commands in the comment at the head of a config file."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#"):
            break
        command = without_comment(line[1:])
        if is_command(command):
            found.append(Command(name, number, command))
    return found


# ---------------------------------------------------------------------------------------------
# How they run


@dataclass
class Ran:
    """What a command printed, the settings of a script that has such, and its number of ranks."""

    run: subprocess.CompletedProcess
    settings: Namespace | None = None
    ranks: int = 1


@dataclass(frozen=True)
class Project:
    """A folder with a copy of the programs, in which commands of the pages run."""

    folder: Path

    def run(self, text: str, as_it_stands: bool = False) -> list[Ran]:
        """Run a command as a reader types it, but small; several joined by && are several.

        A script of ours runs by a fork, on as many ranks as its launcher starts, at most 2. The
        launcher itself doesn't run. as_it_stands: without the options that make it small.
        """
        return [self.run_one(part, as_it_stands) for part in text.split(" && ")]

    def run_one(self, text: str, as_it_stands: bool) -> Ran:
        """Run one command. What it prints goes to the file that it names by >, if any."""
        words = words_of(text.removesuffix(" 2>&1 &"))
        if words[0] not in ("python", "deepspeed", "torchrun"):
            return Ran(self.in_shell(text))
        output = None
        if ">" in words:
            output = self.folder / words[-1]
            words = words[: words.index(">")]

        # Before its script a launcher has options, of which the number of ranks counts here
        scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
        place = scripts[0]
        ranks = 1
        if words[place] == "launch_deepspeed.py":
            place = scripts[1]
        if started := RANKS.search(text):
            ranks = min(int(started[1]), 2)

        script = words[place]
        arguments = words[place + 1 :]
        variables = [VARIABLE.match(word) for word in shlex.split(text)]
        env = dict(found.groups() for found in variables if found)
        settings = self.settings_of(script, arguments)
        if not as_it_stands:
            arguments += self.small(script, arguments, settings)
        if settings and "offload" in getattr(settings, "deepspeed_config", ""):
            env["PATH"] = ""  # no compiler: else DeepSpeed compiles its CPU Adam for a minute
        run = launch(self.folder / script, *arguments, ranks=ranks, cwd=self.folder, **env)
        if output:
            output.write_text(run.stdout)
        return Ran(run, settings, ranks)

    def in_shell(self, text: str) -> subprocess.CompletedProcess:
        """Run what is no script of ours."""
        return subprocess.run(["bash", "-c", text], cwd=self.folder, capture_output=True, text=True)

    def settings_of(self, script: str, arguments: list[str]) -> Namespace | None:
        """Return the settings of a script that has such, or None."""
        if script not in ("train_deepspeed.py", "sample.py", "evaluate.py"):
            return None
        if "--help" in arguments:
            return None
        with contextlib.chdir(self.folder):
            return configurator.settings_of_script(script, arguments)

    def small(self, script: str, arguments: list[str], settings: Namespace | None) -> list[str]:
        """Return the options that make a command small, with weights and data that are there."""
        if script == "data/prepare.py" and "--help" not in arguments:
            has_tokenizer = any(word.startswith("--tokenizer") for word in arguments)
            return ["--overwrite"] if has_tokenizer else ["--overwrite", "--tokenizer=weights"]
        if settings is None:
            return []
        if getattr(settings, "target_gpu", ""):  # a dry run: as it stands
            return []
        options = []
        if settings.init_from in WEIGHTS:
            options.append("--init_from=weights")
        if script == "sample.py":
            options += ["--num_samples=1", "--max_new_tokens=5"]
        if script == "train_deepspeed.py":
            options += small_run(settings)
        return options


def small_run(settings: Namespace) -> list[str]:
    """Return options for 2 steps on a CPU, or 2 more if it resumes; an epoch if it says epochs."""
    options = [*SMALL_RUN]
    resumes = settings.init_from == "resume"
    options.append("--dtype=bfloat16" if settings.compact_optimizer else "--dtype=float32")
    if settings.n_layer:
        options += SMALL_SHAPE
    if settings.dataset in DATASETS:
        options.append("--dataset=mine")
    if not resumes:
        options.append("--overwrite=True")  # of an earlier command of the page
    if settings.max_epochs:
        options.append(f"--max_epochs={2 if resumes else 1}")
    else:
        options += [f"--max_iters={4 if resumes else 2}", "--eval_interval=1"]
    return options


# ---------------------------------------------------------------------------------------------
# The project


def made_up_text(paragraphs: int, seed: int) -> str:
    """Return paragraphs of 60 words, with those that the pages' prompts have."""
    words = "To be You may The meaning of life is the cat sat on a mat and saw seven foxes".split()
    choose = random.Random(seed)
    return "\n\n".join(" ".join(choose.choices(words, k=60)) for _ in range(paragraphs))


def write_texts(folder: Path) -> None:
    """Write the files that the pages name: texts, prompts, conversations and tasks."""
    for name in ("my_texts", "corpus"):
        (folder / name).mkdir()
    for number in range(30):
        text = made_up_text(1, seed=500 + number)  # by their hashes, 5 are to validate
        (folder / "my_texts" / f"{number}.txt").write_text(text)
    (folder / "my.txt").write_text(made_up_text(400, seed=107))  # so are 3 documents of this
    (folder / "val.txt").write_text(made_up_text(5, seed=101))
    (folder / "book.txt").write_text(made_up_text(5, seed=102))
    (folder / "corpus" / "a.txt").write_text(made_up_text(30, seed=103))
    (folder / "prompt.txt").write_text("To be")
    (folder / "lines.txt").write_text("To be\nYou may\n")

    texts = [{"text": made_up_text(1, seed=200 + number)} for number in range(5)]
    asked = [f"What is {number} + 1?" for number in range(100)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": str(number + 1)},
            ]
        }
        for number, question in enumerate(asked)
    ]
    endings = ["on a mat", "of life", "seven", "foxes"]
    rows = {
        "corpus/valid.jsonl": texts,
        "chat.jsonl": chats,
        "hellaswag_val.jsonl": [{"ctx": "the cat sat", "endings": endings, "label": 0}],
        "lambada_test.jsonl": [{"text": "the cat sat on a mat"}],
    }
    for name, objects in rows.items():
        lines = "".join(json.dumps(one) + "\n" for one in objects)
        (folder / name).write_text(lines)


def write_tokens(folder: Path) -> None:
    """Write shards as llm.c has them, files without a header, and Shakespeare as GPT-2's tokens."""
    generator = np.random.default_rng(0)
    (folder / "fineweb10B").mkdir()
    (folder / "other").mkdir()
    for name, size in (("fineweb_val_000000.bin", 1000), ("fineweb_train_000001.bin", 5000)):
        header = np.array([20240520, 1, size, *[0] * 253], "<i4")
        tokens = generator.integers(0, 320, size).astype("<u2")
        (folder / "fineweb10B" / name).write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("train.bin", "val.bin"):
        generator.integers(0, 320, 3000).astype("<u4").tofile(folder / "other" / name)
    train, val = generator.integers(0, 50257, (2, 3000))
    write_dataset(folder / "data" / "shakespeare", train, val, {"kind": "gpt2"}, 50257, SOURCE)


def make_project(folder: Path) -> Project:
    """Make a project with texts, data and weights, as a reader has them, but small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    for name in ("runtime", "config", "examples/instructions"):
        ignored = shutil.ignore_patterns("__pycache__", "*.jsonl")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.json")]:
        shutil.copy2(path, folder)
    (folder / "data").mkdir()
    shutil.copy2(ROOT / "data" / "prepare.py", folder / "data")
    (folder / ".venv").symlink_to(sys.prefix)
    write_texts(folder)
    write_tokens(folder)

    # Two models in the form of OpenAI's: one for GPT-2's names, and one with another tokenizer
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32}
    config = GPT2Config(vocab_size=320, bos_token_id=0, eos_token_id=0, **shape)
    for name, tokenizer in (("weights", byte_level_bpe()), ("my-weights", unigram())):
        GPT2LMHeadModel(config).save_pretrained(folder / name)
        save_tokenizer(folder / name, tokenizer)

    project = Project(folder)
    for name, options in (("mine", ""), ("characters", "--tokenizer=char")):
        text = f"python data/prepare.py my_texts --val=val.txt --name={name} {options}"
        done(project.run(text)[0].run)
    data = folder / "data"
    (data / "characters").rename(data / "shakespeare_char")
    shutil.copytree(data / "mine", data / "fineweb10B")

    theirs = folder.parent / "nanoGPT"
    (theirs / "config").mkdir(parents=True)
    (theirs / "config" / "train_shakespeare_char.py").write_text(NANOGPT_CONFIG)
    shutil.copytree(data / "shakespeare_char", theirs / "data" / "shakespeare_char")
    return project


def copy_project(project: Project, folder: Path) -> Project:
    """Copy a project, and the nanoGPT beside it, to below an empty folder."""
    shutil.copytree(project.folder.parent, folder, symlinks=True, dirs_exist_ok=True)
    return Project(folder / project.folder.name)
