"""Generate text from a checkpoint, from GPT-2 or from nanoGPT's ckpt.pt.

    python sample.py --out_dir=out-shakespeare-xl-deepspeed
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --start="To be" --temperature=0.8
    python sample.py --init_from=gpt2-xl --start="The meaning of life is"
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --interactive
    python sample.py --out_dir=out-sft-xl --chat
"""

from collections.abc import Iterable
from typing import Literal

import configurator

init_from = "resume"  # a checkpoint in out_dir; or gpt2*, a folder of weights, a nanoGPT ckpt.pt
out_dir = "out-shakespeare-xl-deepspeed"  # folder of the run
tag: str | None = None  # best, final, iter_20, ... or latest; None: best, or else the newest
dataset: str | None = None  # with init_from, their dataset; None: GPT-2's or the folder's tokenizer
# What to generate
start = "\n"  # the prompt; FILE:prompt.txt: that file's content
prompts_file: str | None = None  # a file with one prompt per line
interactive = False  # ask for prompts until an empty line or Ctrl-D
chat = False  # talk with a model of conversations; with start or prompts_file, answer each alone
num_samples: int | None = None  # per prompt; None: 3, or 1 with prompts_file, interactive or chat
batch_size = 1  # samples to generate at once; above 1 they are printed when they are done
max_new_tokens = 500  # the longest sample; with GPT-2's tokenizer <|endoftext|> ends it earlier
json = False  # print one JSON object per sample, and nothing else
# How to sample
temperature = 0.8  # 0: greedy; below 1 sharpens the distribution, above 1 flattens it
top_k: int | None = 200  # sample from the k likeliest tokens; None: from all
top_p: float | None = None  # sample from the likeliest that together have this probability
seed = 1337  # random seed of the first batch of samples; each next one adds 1
# Machine
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if there is a GPU
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # bfloat16 if the GPU has it

globals().update(vars(configurator.settings_of_script(__file__)))

# What takes seconds to import comes after the settings are read
import os
import signal
import sys
from json import dumps
from math import inf

import torch

from runtime.cluster.join import set_threads
from runtime.data.chat import Chat
from runtime.data.tokenizer import end_of_text, tokenizer_of
from runtime.errors import UserError
from runtime.files import use_private_compile_cache
from runtime.hardware import pick_device, pick_dtype
from runtime.output import exit_with_error, printable
from runtime.sample.generate import (
    TextStream,
    ask_for_prompts,
    escape_note,
    generate_texts,
    read_prompts,
)
from runtime.sample.source import find_model

RULE = "---------------\n"  # between samples


def encode_prompt(text: str) -> list[int]:
    """Return the tokens of a prompt. Raises UserError if there are none."""
    if chat:
        ids = talk.encode(text)
    else:
        ids = encode(text)
    if not ids:
        raise UserError("the prompt is empty: give at least one character, --start=...")
    # People add tokens to a tokenizer, and not to its model
    if max(ids) >= data["vocab_size"]:
        raise UserError(
            f"the tokenizer made token {max(ids)}, which is outside the model's vocabulary of "
            f"{data['vocab_size']}: choose another prompt, or name the right --dataset"
        )
    return ids


def show(text: str, end: str = "") -> None:
    """Print a text: exactly into a file or a pipe, and without control characters on a terminal."""
    if sys.stdout.isatty():
        text = printable(text)
    print(text, end=end, flush=True)


def opening(prompt: str) -> str:
    """Return what stands before a sample: a line between samples, and the prompt."""
    text = ""
    if done and not interactive:
        text = RULE
    if not chat:
        text += prompt
    elif not interactive:  # there, the prompt stands on the terminal
        text += f"{prompt}\n"
    return text


def show_json(prompt: str, text: TextStream) -> None:
    """Print a sample as a line of JSON."""
    # Why the text ends: it has as many tokens as asked for, or the model has ended it
    ended = "length"
    if text.has_ended:
        ended = "end_of_text"

    # One object per line, for other programs
    record = {
        "model": name,
        "prompt": prompt,
        "text": text.text,
        "tokens": len(text.ids),
        "seed": seed,
        "ended": ended,
    }
    print(dumps(record), flush=True)


# The settings
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed only reads files
if num_samples is None:
    num_samples = 3
    if prompts_file or interactive or chat:
        num_samples = 1
# How tokens are drawn, and where the prompts come from
sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
given = []
if start != "\n":
    given.append("start")
if prompts_file is not None:
    given.append("prompts_file")
if interactive:
    given.append("interactive")

# (whether it is right, what is wrong with it otherwise)
checks = [
    (len(given) <= 1, f"{' and '.join(given)} can't be combined: drop one"),
    (init_from != "resume" or dataset is None,
     f"dataset={dataset} is for --init_from: a checkpoint of ours knows its dataset"),
    (num_samples >= 1, f"num_samples={num_samples} must be at least 1"),
    (batch_size >= 1, f"batch_size={batch_size} must be at least 1"),
    (max_new_tokens >= 0, f"max_new_tokens={max_new_tokens} must be at least 0"),
    (temperature == 0 or 1e-5 <= temperature < inf,
     f"temperature={temperature} must be 0, or at least 1e-5"),
    (top_k is None or top_k >= 0, f"top_k={top_k} must be at least 0, or None"),
    (top_p is None or 0 < top_p <= 1, f"top_p={top_p} must be above 0 and at most 1, or None"),
    (0 <= seed < 2**62, f"seed={seed} must be at least 0 and below 2**62"),
]
problems = [problem for is_right, problem in checks if not is_right]
if problems:
    exit_with_error("\n".join(problems))
if chat and not given:
    interactive = True
for stream in (sys.stdin, sys.stdout):
    if stream is not None:  # not every text fits their encoding
        stream.reconfigure(errors="backslashreplace")

# The model and the prompts
try:
    use_private_compile_cache()
    set_threads(ranks=1)  # a container's CPU quota
    device = pick_device(device)
    dtype = getattr(torch, pick_dtype(dtype, device))
    name, description, data, load = find_model(init_from, out_dir, tag, dataset)
    encode, decode = tokenizer_of(data["tokenizer"])
    end = end_of_text(data["tokenizer"])
    if chat:
        if end is None or not data["template"]:
            raise UserError(f"{name} has no chat template or end of text: drop --chat, or train on "
                            "chats (docs/chat.md)")
        talk = Chat(data, encode, decode([end]), max_new_tokens)
    # Before what the tokenizer says of a backslash
    note = escape_note("--start", start)
    if note:
        print(f"note: {note}", file=sys.stderr)
    prompts: Iterable[tuple[str, list[int]]] = []  # the text and the tokens of each
    if not interactive:
        prompts = [(text, encode_prompt(text)) for text in read_prompts(start, prompts_file)]
    model = load(device, dtype)
except (UserError, OSError) as error:
    exit_with_error(str(error))

# Exit without a message when nobody reads, as after `| head`
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
question = "> "
if json:
    question = ""
else:
    print(f"{name}: {model.num_params():,} parameters{description}\n")
if interactive:
    prompts = ask_for_prompts(encode_prompt, question)

# The samples
done = 0
for prompt, ids in prompts:
    # A conversation has to fit the context, so its answer may be shorter
    room = max_new_tokens
    if chat:
        room = talk.room(ids)
    try:
        for first in range(0, num_samples, batch_size):
            n_texts = min(batch_size, num_samples - first)
            streamed = n_texts == 1 and not json
            # A single sample is shown while it is generated, others when they are done
            show_piece = None
            if streamed:
                show(opening(prompt))
                show_piece = show
            texts = generate_texts(
                model, ids, n_texts, seed, room, decode, end, show=show_piece, **sampling)
            for text in texts:
                if json:
                    show_json(prompt, text)
                elif streamed:
                    show("", end="\n")
                else:
                    show(opening(prompt) + text.text, end="\n")
                done += 1
            seed += 1
            if chat and interactive:
                talk.add_answer(texts[-1].text)
    except KeyboardInterrupt:  # ends this text, and without --interactive the program
        if not interactive:
            raise SystemExit(130) from None
        print()
    except UserError as error:  # the tokenizer can't decode what the model generated
        exit_with_error(str(error))
