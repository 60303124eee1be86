"""Generate text from a checkpoint, from GPT-2 or from nanoGPT's ckpt.pt.

    python sample.py --out_dir=out-shakespeare-xl-deepspeed
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --tag=best --start="To be" --temperature=0.8
    python sample.py --init_from=gpt2-xl --start="The meaning of life is"
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --interactive
    python sample.py --out_dir=out-sft-xl --chat"""

from typing import Literal

import configurator

init_from = "resume"  # resume: a checkpoint in out_dir; or gpt2*, a folder of weights, a nanoGPT ckpt.pt
out_dir = "out-shakespeare-xl-deepspeed"  # folder of the run
tag: str | None = None  # best, final, iter_20, ... or latest; None: best, or the newest if there is no best
dataset: str | None = None  # with init_from, the dataset of these weights; None: GPT-2's or the folder's tokenizer
# What to generate
start = "\n"  # the prompt; FILE:prompt.txt: that file's content
prompts_file: str | None = None  # a file with one prompt per line
interactive = False  # ask for prompts until an empty line or Ctrl-D
chat = False  # talk with a model trained on conversations, or with start or prompts_file, answer each prompt alone
num_samples: int | None = None  # samples per prompt; None: 3, or 1 with prompts_file, interactive or chat
batch_size = 1  # samples to generate at once; above 1 they are printed when they are done
max_new_tokens = 500  # the longest sample; with GPT-2's tokenizer <|endoftext|> ends it earlier
json = False  # print one JSON object per sample, and nothing else
# How to sample
temperature = 0.8  # 0: greedy; below 1 sharpens the distribution, above 1 flattens it
top_k: int | None = 200  # sample from the k likeliest tokens; None: from all
top_p: float | None = None  # sample from the likeliest tokens that together have this probability
seed = 1337  # random seed of the first batch of samples; each next one adds 1
# Machine
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if there is a GPU
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: bfloat16 if the GPU has it

globals().update(vars(configurator.settings_of_script(__file__)))

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
from runtime.sample.generate import ask_for_prompts, escape_note, generate_texts, read_prompts
from runtime.sample.source import find_model

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed only reads files
if num_samples is None:
    num_samples = 1 if prompts_file or interactive or chat else 3
sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
ranges = {  # whether a setting is in its range, and the range
    f"num_samples={num_samples}": (num_samples >= 1, "at least 1"),
    f"batch_size={batch_size}": (batch_size >= 1, "at least 1"),
    f"max_new_tokens={max_new_tokens}": (max_new_tokens >= 0, "at least 0"),
    f"temperature={temperature}": (temperature == 0 or 1e-5 <= temperature < inf, "0, or at least 1e-5"),
    f"top_k={top_k}": (top_k is None or top_k >= 0, "at least 0, or None"),
    f"top_p={top_p}": (top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or None"),
    f"seed={seed}": (0 <= seed < 2**62, "at least 0 and below 2**62")}
given = {"start": start != "\n", "prompts_file": prompts_file is not None, "interactive": interactive}
problems = [f"{' and '.join(filter(given.get, given))} can't be combined: drop one"] if sum(given.values()) > 1 else []
if init_from == "resume" and dataset is not None:
    problems.append(f"dataset={dataset} is for --init_from: a checkpoint of ours knows its dataset")
problems += [f"{setting} must be {what}" for setting, (in_range, what) in ranges.items() if not in_range]
if problems:
    exit_with_error("\n".join(problems))
interactive = interactive or (chat and not any(given.values()))
for stream in filter(None, (sys.stdin, sys.stdout)):  # not every text fits their encoding
    stream.reconfigure(errors="backslashreplace")


def encode_prompt(text):
    """Return the tokens of a prompt; UserError if there are none."""
    ids = talk.encode(text) if chat else encode(text)
    if not ids:
        raise UserError("the prompt is empty: give at least one character, --start=...")
    if max(ids) >= data["vocab_size"]:
        raise UserError(
            f"the tokenizer made token {max(ids)}, which is outside the model's vocabulary of "
            f"{data['vocab_size']}: choose another prompt, or name the right --dataset"
        )
    return ids


def show(text, end=""):
    """Print a text: exactly into a file or a pipe, and without control characters on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


try:
    use_private_compile_cache()
    set_threads(ranks=1)  # a container's CPU quota
    device = pick_device(device)
    dtype = getattr(torch, pick_dtype(dtype, device))
    name, description, data, load = find_model(init_from, out_dir, tag, dataset)
    encode, decode = tokenizer_of(data["tokenizer"])
    end = end_of_text(data["tokenizer"])
    if chat and (end is None or not data["template"]):
        raise UserError(f"{name} has no chat template or end of text: drop --chat, or train on chats (docs/chat.md)")
    talk = Chat(data, encode, decode([end]), max_new_tokens) if chat else None
    if note := escape_note("--start", start):
        print(f"note: {note}", file=sys.stderr)
    prompts = [(text, encode_prompt(text)) for text in ([] if interactive else read_prompts(start, prompts_file))]
    model = load(device, dtype)
except (UserError, OSError) as error:
    exit_with_error(str(error))

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit without a message when nobody reads, as after `| head`
rule = "" if interactive else "---------------\n"  # between samples

if not json:
    print(f"{name}: {model.num_params():,} parameters{description}\n")
if interactive:
    prompts = ask_for_prompts(encode_prompt, "" if json else "> ")
done = 0  # samples so far
for prompt, ids in prompts:
    room = talk.room(ids) if chat else max_new_tokens
    shown = prompt + "\n" * chat if not (chat and interactive) else ""
    try:
        for first in range(0, num_samples, batch_size):
            n_texts = min(batch_size, num_samples - first)
            streamed = n_texts == 1 and not json
            if streamed:
                show(rule * (done > 0) + shown)
            texts = generate_texts(model, ids, n_texts, seed, room, decode, end, show if streamed else None, **sampling)
            for text in texts:
                if json:
                    print(dumps({"model": name, "prompt": prompt, "text": text.text, "tokens": len(text.ids),
                                 "seed": seed, "ended": "end_of_text" if text.has_ended else "length"}), flush=True)
                else:  # a streamed text only needs its newline
                    show("" if streamed else rule * (done > 0) + shown + text.text, end="\n")
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
