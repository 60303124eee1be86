"""Score a checkpoint, an exported folder or OpenAI's weights: HellaSwag, LAMBADA, and the loss of a text or a dataset.

    python evaluate.py --out_dir=out-mine --dataset=mine --text=book.txt
    python launch_deepspeed.py --nproc_per_node=4 evaluate.py --init_from=gpt2-xl --hellaswag=hellaswag_val.jsonl"""

from typing import Literal

import configurator
from runtime.cluster import exit_on_all_ranks
from runtime.output import counted, protect_output

protect_output()

init_from = "resume"  # resume: a checkpoint in out_dir; or gpt2*, a folder of weights, a nanoGPT ckpt.pt
out_dir = "out-shakespeare-xl-deepspeed"  # folder of the run
tag: str | None = None  # best, final, iter_20, ... or latest; None: best, or the newest if there is no best
# What to score
hellaswag: str | None = None  # file of JSON lines with ctx, endings and label
lambada: str | None = None  # file of JSON lines with text
text: str | None = None  # file of text
dataset: str | None = None  # prepared dataset, for its validation split; with init_from, also the weights' tokenizer
json = False  # print one JSON object per line, and nothing else
# Machine
batch_tokens = 16384  # tokens per rank and forward, padding included
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if there is a GPU
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: bfloat16 if the GPU has it

globals().update(vars(configurator.settings_of_script(__file__, on_error=exit_on_all_ranks)))

import os
from copy import deepcopy
from json import dumps

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from runtime.cluster.join import join_process_group
from runtime.cluster.ranks import all_exit_on, print0, ranks_from_environment, shut_down
from runtime.data.folder_tokenizer import how_to_prepare
from runtime.data.loader import inputs_and_targets
from runtime.data.mixture import open_datasets, same_tokenizer
from runtime.data.sequences import TokenStream, open_sequences
from runtime.data.tokenizer import token_bytes, tokenizer_of
from runtime.errors import UserError
from runtime.hardware import pick_device, pick_dtype
from runtime.sample.benchmarks import figures_of, read_rows, text_rows
from runtime.sample.generate import read_text
from runtime.sample.source import find_model

LOGITS_ROWS = 8192  # rows of logits in memory at one time: 1.6 GB of GPT-2's in float32


def use_float32_head(model):
    """Make the model's logits float32: GPT-2's are around -100, where bfloat16 has multiples of 0.5. TF32 doesn't round
    half precision further."""
    model.lm_head = deepcopy(model.lm_head).float()  # not tied, so the embedding stays as it is
    model.lm_head.register_forward_pre_hook(lambda head, args: (args[0].float(), *args[1:]))


def score_batch(x, y):
    """Return the losses after x (B, T) of the targets y (B, T) that count, and whether each is the likeliest token,
    (2, n). The logits are the model's, so it is scored as it was edited."""
    results = []
    sequences = max(1, LOGITS_ROWS // x.size(1))
    for own_x, own_y in zip(x.split(sequences), y.split(sequences), strict=True):
        counts = own_y >= 0
        logits = model(own_x)[counts].float()
        losses = F.cross_entropy(logits, own_y[counts], reduction="none")
        hits = logits.argmax(dim=1) == own_y[counts]
        results.append(torch.stack([losses, hits]))
    return torch.cat(results, dim=1)


@torch.no_grad()
def score(rows, name):
    """Return, of each row, the sum of its losses, their number, the last one, whether all its tokens are the likeliest,
    and whether the last one is: (5, N). The ranks share the rows. The longest go first, the most memory with them."""
    results = np.zeros((5, len(rows)))
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))[ranks.rank :: ranks.world_size]
    with tqdm(total=len(order), desc=name, unit="row", disable=None if ranks.rank == 0 else True) as bar:
        while len(order):
            length = min(block_size, -(-(len(rows[order[0]]) - 1) // 32) * 32)  # few shapes: cuDNN plans for each
            chosen, order = np.split(order, [max(1, batch_tokens // length)])
            padded = np.full((len(chosen), length + 1), ~0)
            for place, i in zip(padded, chosen):
                place[: len(rows[i])] = rows[i][-length - 1 :]  # cut on the left, as in lm_eval
            x, y = inputs_and_targets(padded, data["vocab_size"])
            scores = score_batch(x.to(device), y.to(device)).double().cpu().numpy()
            for i, (losses, hits) in zip(chosen, np.split(scores, (y >= 0).sum(dim=1).cumsum(dim=0)[:-1], axis=1)):
                results[:, i] = losses.sum(), len(losses), losses[-1], hits.all(), hits[-1]
            bar.update(len(chosen))
    dist.all_reduce(torch.from_numpy(results))  # in place: each row is one rank's
    with all_exit_on(UserError):
        if not np.isfinite(results).all():
            raise UserError("the model's losses are not finite: check its weights")
    return results


os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed only reads files
ranks = ranks_from_environment()
join_process_group(device)
with all_exit_on(UserError, OSError):
    if (device := pick_device(device, ranks.local_world_size)) == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    dtype = getattr(torch, pick_dtype(dtype, device))
    name, description, data, load = find_model(init_from, out_dir, tag, dataset)
    (encode, _), block_size, sizes = tokenizer_of(data["tokenizer"]), data["block_size"], token_bytes(data)
    files = {"hellaswag": hellaswag, "lambada": lambada}
    tasks = [(task, path, *read_rows(task, path, encode, block_size)) for task, path in files.items() if path]
    if text:
        stream = TokenStream(np.array(encode(read_text(text))), block_size)
        tasks.append(("text", text, *text_rows(stream, sizes)))
    if dataset:
        (source,), meta = open_datasets(dataset, 1)
        if not same_tokenizer(meta, data):
            raise UserError(f"dataset={dataset} has another tokenizer than {name}: "
                            f"{how_to_prepare(data['tokenizer'])}")
        tasks.append(("dataset", dataset, *text_rows(open_sequences(source, "val", block_size), sizes)))
    if not tasks or not all(rows for _, _, rows, _ in tasks):
        raise UserError("nothing to score: give --hellaswag, --lambada, --dataset, or --text of at least 2 tokens")
    model = load(device, dtype)
if device == "cuda" and dtype != torch.float32:
    torch.set_float32_matmul_precision("high")  # TF32 in the head

if not json:
    print0(f"{name}: {model.num_params():,} parameters{description}\n")
use_float32_head(model)
for task, path, rows, answers in tasks:  # answers: the labels, or the bytes of each row of a text
    scores = score(rows, task)
    figures, cut = figures_of(task, scores, answers), sum(len(row) > block_size + 1 for row in rows)
    record = {"model": name, "task": task, "file": path, "rows": len(answers), "tokens": int(scores[1].sum()),
              "cut": cut}
    for key, (value, error) in figures.items():
        record |= {key: value, f"{key}_stderr": error}
    shown = ", ".join(f"{key} {value:.4f} +- {error:.4f}" for key, (value, error) in figures.items())
    if json:
        print0(dumps(record))
    else:
        print0(f"{task} {path}: {shown}" + f" ({counted(cut, 'text')} cut on the left)" * (cut > 0))
shut_down()
