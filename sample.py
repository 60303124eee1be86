"""Text from a checkpoint of train_deepspeed.py, from GPT-2 itself, or from nanoGPT's ckpt.pt; and how likely a text is.

    python sample.py --out_dir=out-shakespeare-xl-deepspeed
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --tag=best --start="To be" --temperature=0.8
    python sample.py --init_from=gpt2-xl --start="The meaning of life is"
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --interactive
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --score=text.txt
"""

from typing import Literal

import configurator

init_from = "resume"  # resume: from out_dir; gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder of weights, or nanoGPT's
# ckpt.pt
out_dir = "out-shakespeare-xl-deepspeed"
tag = "latest"  # latest, best, final, iter_20, ...
dataset: str | None = None  # whose tokenizer and train.bin are meant; None: of what the weights were trained on
# What to write
start = "\n"  # what the text begins with; FILE:prompt.txt: with what that file holds
prompts: str | None = None  # a file of beginnings, one a line
interactive = False  # ask for beginnings, until an empty line or Ctrl-D
num_samples: int | None = None  # texts for each beginning; None: 3, and 1 with prompts or interactive
batch_size = 1  # of them at once; above 1 they are shown when they are done
max_new_tokens = 500  # at most; GPT-2's tokenizer also ends at <|endoftext|>
stop: str | list | None = None  # a text ends before this, or before the first of a list of such
json = False  # one JSON object a line for each text, and nothing else
# How to draw
temperature = 0.8  # 0 takes the likeliest token, below 1 is careful, above 1 is wild
top_k: int | None = 200  # choose among the k likeliest; None: among all
top_p: float | None = None  # choose among the likeliest that together have this probability
repetition_penalty = 1.0  # above 1, tokens that are there already become less likely
seed = 1337  # of the first text; the next one has the next
# Or how likely a text is
score: str | None = None  # a file: its mean loss and perplexity, and no text is made
stride: int | None = None  # tokens from one window of a long text to the next; None: half of the context
# Machine
device: Literal["auto", "cuda", "cpu"] = "auto"
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"

settings = configurator.from_command_line(globals())
globals().update(vars(settings))

import os
from json import dumps

import torch

from runtime.data.tokenizer import end_of_text, tokenizer_of
from runtime.files import UserError
from runtime.hardware import pick_device, pick_dtype
from runtime.monitor import runlog as metrics
from runtime.output import exit_with_error
from runtime.sample import generate as texts
from runtime.sample import source

ROOT = os.path.dirname(os.path.abspath(__file__))
if not torch.cuda.is_available() or device == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
device = pick_device(device)
num_samples = num_samples if num_samples is not None else 1 if prompts or interactive else 3
stops = [stop] if isinstance(stop, str) else stop or []
rule = "" if interactive else "---------------\n"  # between texts
drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty}
wrong = [
    f"{name}={globals()[name]} must be {what}"
    for name, good, what in (
        ("num_samples", num_samples >= 1, "at least 1"),
        ("batch_size", batch_size >= 1, "at least 1"),
        ("max_new_tokens", max_new_tokens >= 0, "at least 0"),
        ("stop", all(isinstance(text, str) and text for text in stops), "a text or a list of texts, and not empty"),
        ("temperature", temperature >= 0, "at least 0"),
        ("top_k", top_k is None or top_k >= 0, "at least 0, or None"),
        ("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or None"),
        ("repetition_penalty", repetition_penalty > 0, "above 0: 1 for none, 1.1 for a little"),
        ("seed", 0 <= seed < 2**63, "at least 0 and below 2**63"),
        ("stride", stride is None or stride >= 1, "at least 1"),
    )
    if not good
]
said = [name for name in ("prompts", "interactive", "score") if globals()[name]] + ["start"] * (start != "\n")
if len(said) > 1:
    wrong.append(f"{' and '.join(said)} each say what to work on: give one of them")
if stride is not None and not score:
    wrong.append("stride is for long texts whose loss is told: add --score=FILE")
if wrong:
    exit_with_error("\n".join(wrong))


def tokens_of_start(text):
    """The tokens that a text begins with; ValueError if there are none."""
    ids = encode(text)
    if not ids:
        raise ValueError("start is empty: give the text at least one character, --start=...")
    return ids


try:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no CUDA GPU here: use --device=cpu")
    dtype = getattr(torch, pick_dtype(dtype, device))
    found = source.find(init_from, out_dir, tag, dataset, ROOT)
    encode, decode = tokenizer_of(found.data["tokenizer"])
    end = end_of_text(found.data["tokenizer"])
    given = [] if interactive or score else texts.read_prompts(start, prompts)
    given = [(text, tokens_of_start(text)) for text in given]
    scored = encode(texts.read_text(score)) if score else None
    model = found.load(device, dtype)
    if score:
        loss, n = texts.score_text(model, scored, stride)
except (UserError, ValueError) as error:
    exit_with_error(str(error))


configurator.exit_quietly_on_broken_pipe()


def show(new):
    print(new, end="", flush=True)


def tell(text, one, own_seed, shown):
    """Print a text that is done, or what is left to say of one that was shown while it grew."""
    if json:
        print(dumps({"model": found.name, "prompt": text, "text": one.text, "tokens": len(one.ids), "seed": own_seed,
                     "ended": one.ended or "length"}), flush=True)
    else:
        print("" if shown else rule * (own_seed > seed) + text + one.text)


if not json:
    print(f"{found.name}: {model.num_params():,} parameters{found.about}\n")
if score:
    result = {"model": found.name, "file": score, "tokens": n, "loss": loss, "perplexity": metrics.perplexity(loss)}
    print(dumps(result) if json else
          f"{score}: {n:,} tokens, loss {loss:.4f}, perplexity {result['perplexity']:.2f}")
made = 0  # texts so far
for text, prompt in texts.prompt_loop(tokens_of_start, "" if json else "> ") if interactive else given:
    try:
        for first in range(0, num_samples, batch_size):
            seeds = [seed + made + i for i in range(min(batch_size, num_samples - first))]
            grows = len(seeds) == 1 and not json
            if grows:
                show(rule * (made > 0) + text)
            batch = texts.generate_texts(model, prompt, seeds, max_new_tokens, decode, end, stops,
                                         show if grows else None, **drawing)
            for one, own_seed in zip(batch, seeds):
                tell(text, one, own_seed, grows)
            made += len(seeds)
    except KeyboardInterrupt:  # ends this text, and the program unless it asks for another
        if not interactive:
            raise SystemExit(130) from None
        print()
