"""Score a checkpoint, an exported folder or OpenAI's weights.

It scores HellaSwag, LAMBADA, and the loss of a text or a dataset.

    python evaluate.py --out_dir=out-mine --dataset=mine --text=book.txt
    python launch_deepspeed.py --nproc_per_node=4 evaluate.py --init_from=gpt2-xl \\
        --hellaswag=hellaswag_val.jsonl
"""

from typing import Literal

import configurator
from runtime.cluster import exit_on_all_ranks
from runtime.output import counted, protect_output

protect_output()

init_from = "resume"  # a checkpoint in out_dir; or gpt2*, a folder of weights, a nanoGPT ckpt.pt
out_dir = "out-shakespeare-xl-deepspeed"  # folder of the run
tag: str | None = None  # best, final, iter_20, ... or latest; None: best, or else the newest
# What to score
hellaswag: str | None = None  # file of JSON lines with ctx, endings and label
lambada: str | None = None  # file of JSON lines with text
text: str | None = None  # file of text
dataset: str | None = None  # for its validation split; with init_from, also the weights' tokenizer
json = False  # print one JSON object per line, and nothing else
# Machine
batch_tokens = 16384  # tokens per rank and forward, padding included
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if there is a GPU
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # bfloat16 if the GPU has it

globals().update(vars(configurator.settings_of_script(__file__, on_error=exit_on_all_ranks)))

# What takes seconds to import comes after the settings are read
import os
from copy import deepcopy
from dataclasses import dataclass
from json import dumps

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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
LENGTHS = 32  # rows are padded to a multiple of this: few shapes, as cuDNN plans for each


@dataclass(frozen=True)
class Task:
    """Something to score."""

    name: str
    path: str
    rows: list[np.ndarray]  # of ids, as read_rows() and text_rows() return them
    answers: np.ndarray  # the labels, or the bytes of each row of a text


def use_float32_head(model: nn.Module) -> None:
    """Make the model's logits float32.

    GPT-2's are around -100, where bfloat16 has multiples of 0.5. TF32 doesn't round half precision
    further.
    """
    model.lm_head = deepcopy(model.lm_head).float()  # not tied, so the embedding stays as it is
    model.lm_head.register_forward_pre_hook(lambda head, args: (args[0].float(), *args[1:]))


def score_batch(x: Tensor, y: Tensor) -> Tensor:
    """Return (2, n): the losses of the n targets that count, and whether each is the likeliest.

    x: ids (B, T). y: their targets (B, T), -1 where one doesn't count. The logits are the model's,
    so it is scored as it was edited.
    """
    results = []
    sequences = max(1, LOGITS_ROWS // x.size(1))
    for own_x, own_y in zip(x.split(sequences), y.split(sequences), strict=True):
        # Padding, and what a row only begins with, is not scored
        counts = own_y >= 0
        logits = model(own_x)[counts].float()
        losses = F.cross_entropy(logits, own_y[counts], reduction="none")
        hits = logits.argmax(dim=1) == own_y[counts]
        results.append(torch.stack([losses, hits]))
    return torch.cat(results, dim=1)


def padded_length(row: np.ndarray) -> int:
    """Return the number of inputs to which a row is padded, or cut."""
    # The last token is only a target, so there is one input less
    multiple = -(-(len(row) - 1) // LENGTHS) * LENGTHS
    return min(block_size, multiple)


def padded_windows(rows: list[np.ndarray], length: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets (B, length) of rows.

    A longer row is cut on the left, as in lm_eval.
    """
    # What isn't filled is padding
    padded = np.full((len(rows), length + 1), ~0)  # ~0: no target
    for place, row in zip(padded, rows):
        cut = row[-length - 1 :]
        place[: len(cut)] = cut
    return inputs_and_targets(padded, data["vocab_size"])


@torch.no_grad()
def score(rows: list[np.ndarray], name: str) -> np.ndarray:
    """Return figures of each row, (5, N). Raises UserError on all ranks.

    They are the sum of its losses, their number, the last one, whether all its tokens are the
    likeliest, and whether the last one is. The ranks share the rows. The longest go first, and the
    most memory with them.
    """
    # This rank's rows: the figures of others stay 0 here
    results = np.zeros((5, len(rows)))
    by_length = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    waiting = by_length[ranks.rank :: ranks.world_size]

    # One bar, and with None only on a terminal
    no_bar = None
    if ranks.rank > 0:
        no_bar = True
    # As many rows at once as have batch_tokens with their padding
    with tqdm(total=len(waiting), desc=name, unit="row", disable=no_bar) as bar:
        while waiting:
            length = padded_length(rows[waiting[0]])
            n_rows = max(1, batch_tokens // length)
            chosen = waiting[:n_rows]
            waiting = waiting[n_rows:]
            x, y = padded_windows([rows[i] for i in chosen], length)
            scores = score_batch(x.to(device), y.to(device)).double().cpu().numpy()

            # The targets of a row end where those of the next one begin
            ends = (y >= 0).sum(dim=1).cumsum(dim=0)
            for i, (losses, hits) in zip(chosen, np.split(scores, ends[:-1], axis=1)):
                results[:, i] = losses.sum(), len(losses), losses[-1], hits.all(), hits[-1]
            bar.update(len(chosen))
    # Each row is one rank's, so the sum over the ranks has them all
    dist.all_reduce(torch.from_numpy(results))  # in place
    with all_exit_on(UserError):
        if not np.isfinite(results).all():
            raise UserError("the model's losses are not finite: check its weights")
    return results


def read_tasks() -> list[Task]:
    """Return what the settings ask for. Raises UserError."""
    # The weights' own tokenizer, and the bytes of its tokens for bits per byte
    sizes = token_bytes(data)
    encode, _ = tokenizer_of(data["tokenizer"])
    # Lines of JSON
    tasks = []
    for task, path in (("hellaswag", hellaswag), ("lambada", lambada)):
        if path:
            rows, labels = read_rows(task, path, encode, block_size)
            tasks.append(Task(task, path, rows, labels))
    # Texts, of which each token is predicted
    if text:
        stream = TokenStream(np.array(encode(read_text(text))), block_size)
        tasks.append(Task("text", text, *text_rows(stream, sizes)))
    if dataset:
        (source,), meta = open_datasets(dataset, 1)
        if not same_tokenizer(meta, data):
            raise UserError(f"dataset={dataset} has another tokenizer than {name}: "
                            f"{how_to_prepare(data['tokenizer'])}")
        sequences = open_sequences(source, "val", block_size)
        tasks.append(Task("dataset", dataset, *text_rows(sequences, sizes)))
    if not tasks or not all(task.rows for task in tasks):
        raise UserError("nothing to score: give --hellaswag, --lambada, --dataset, or --text of at "
                        "least 2 tokens")
    return tasks


def report(task: Task, scores: np.ndarray) -> None:
    """Print the figures of a task. scores: what score() returns of its rows."""
    # What is printed, and how many rows were longer than the model's context
    figures = figures_of(task.name, scores, task.answers)
    cut = sum(len(row) > block_size + 1 for row in task.rows)
    # A line of JSON, or one to read
    if json:
        record = {
            "model": name,
            "task": task.name,
            "file": task.path,
            "rows": len(task.answers),
            "tokens": int(scores[1].sum()),
            "cut": cut,
        }
        for key, (value, error) in figures.items():
            record[key] = value
            record[f"{key}_stderr"] = error
        print0(dumps(record))
        return
    parts = [f"{key} {value:.4f} +- {error:.4f}" for key, (value, error) in figures.items()]
    line = f"{task.name} {task.path}: {', '.join(parts)}"
    if cut:
        line += f" ({counted(cut, 'text')} cut on the left)"
    print0(line)


os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed only reads files
# The ranks, the model and what it is to score. A mistake ends all ranks
ranks = ranks_from_environment()
join_process_group(device)
with all_exit_on(UserError, OSError):
    if batch_tokens < 1:
        raise UserError(f"batch_tokens={batch_tokens} must be at least 1")
    device = pick_device(device, ranks.local_world_size)
    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    dtype = getattr(torch, pick_dtype(dtype, device))
    name, description, data, load = find_model(init_from, out_dir, tag, dataset)
    block_size = data["block_size"]
    tasks = read_tasks()
    model = load(device, dtype)
if device == "cuda" and dtype != torch.float32:
    torch.set_float32_matmul_precision("high")  # TF32 in the head

# The scores
if not json:
    print0(f"{name}: {model.num_params():,} parameters{description}\n")
use_float32_head(model)
for task in tasks:
    scores = score(task.rows, task.name)
    report(task, scores)
shut_down()
