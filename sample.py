"""Text from a checkpoint of train_deepspeed.py, or from GPT-2 itself.

    python sample.py --out_dir=out-shakespeare-xl-deepspeed
    python sample.py --out_dir=out-shakespeare-xl-deepspeed --tag=best --start="To be" --temperature=0.8
    python sample.py --init_from=gpt2-xl --start="The meaning of life is"
"""

from typing import Literal

import configurator

init_from = "resume"  # resume: from out_dir; gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder of weights
out_dir = "out-shakespeare-xl-deepspeed"
tag = "latest"  # latest, best, final, iter_20, ...
start = "\n"  # what the text begins with
num_samples = 3
max_new_tokens = 500  # at most; GPT-2's tokenizer also ends at <|endoftext|>
temperature = 0.8  # 0 takes the likeliest token, below 1 is careful, above 1 is wild
top_k: int | None = 200  # choose among the k likeliest; None: among all
top_p: float | None = None  # choose among the likeliest that together have this probability
seed = 1337
device: Literal["auto", "cuda", "cpu"] = "auto"
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"

settings = configurator.from_command_line(globals())
globals().update(settings)

import os

import torch

from model import GPT, WeightsError
from runtime.checkpoint import CheckpointError, load_model
from runtime.decode import faster
from runtime.dist import refuse
from runtime.fetch import FetchError
from runtime.preflight import pick_device, pick_dtype
from runtime.tokenizer import end_of_text, tokenizer_of

if not torch.cuda.is_available() or device == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
device = pick_device(device)
wrong = [
    f"{name}={settings[name]} must be {what}"
    for name, good, what in (
        ("num_samples", num_samples >= 1, "at least 1"),
        ("max_new_tokens", max_new_tokens >= 0, "at least 0"),
        ("temperature", temperature >= 0, "at least 0"),
        ("top_k", top_k is None or top_k >= 0, "at least 0, or None"),
        ("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or None"),
        ("seed", 0 <= seed < 2**63, "at least 0 and below 2**63"),
    )
    if not good
]
if wrong:
    refuse("\n".join(wrong))
try:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no CUDA GPU here: use --device=cpu")
    dtype = getattr(torch, pick_dtype(dtype, device))
    if init_from == "resume":
        model, manifest = load_model(out_dir, tag)
        model.to(device, dtype)
        kind = manifest["state"]["data"]["tokenizer"]
        name = manifest["tag"] if tag == "latest" else tag
        print(f"{out_dir}/{name}: {model.num_params():,} parameters after {manifest['iter_num']} iterations\n")
    else:
        model = GPT.from_pretrained(init_from, device=device, dtype=dtype)
        kind = {"kind": "gpt2"}
        print(f"{init_from}: {model.num_params():,} parameters\n")
    encode, decode = tokenizer_of(kind)
    prompt = encode(start)
    if not prompt:
        raise ValueError("start is empty: give the text at least one character, --start=...")
except (CheckpointError, WeightsError, FetchError, ValueError) as error:
    refuse(str(error))


class Streamer:
    """Prints a sample while it grows. A character may need several of GPT-2's tokens: half of one waits."""

    def __init__(self):
        self.ids, self.shown = list(prompt), decode(prompt)  # some tokenizers' words depend on what is before them

    def __call__(self, token):
        if token.item() == end_of_text(kind):
            return
        self.ids.append(token.item())
        text = decode(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.shown):], end="", flush=True)
            self.shown = text


model.eval()
torch.manual_seed(seed)
idx = torch.tensor([prompt], device=device)
for n in range(num_samples):
    print(start, end="", flush=True)
    model.generate(idx, max_new_tokens, temperature, top_k, top_p, end_of_text(kind), on_token=Streamer(),
                   one_more=faster(model, len(idx)))
    print("\n---------------" if n + 1 < num_samples else "")
