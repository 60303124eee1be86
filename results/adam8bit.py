"""Train as transformers' Trainer does with bitsandbytes' 8-bit AdamW, on the tokens of train_deepspeed.py.

    pip install transformers accelerate bitsandbytes
    python results/adam8bit.py FILE.json config/train_gpt2_xl.py --dataset=packages --max_iters=300

For the comparison with --compact_optimizer: GPT-2 from random weights in float32, autocast to
bfloat16, with the same windows in the same order, batch, rates, decay and clipping. All other
arguments are those of train_deepspeed.py. Writes the milliseconds of each step, the peak of
PyTorch's memory and the last validation loss. --optim=NAME is another optimizer of the Trainer.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import transformers
from torch.nn.functional import cross_entropy

from configurator import settings_of_script
from runtime.git import git_commit
from runtime.hardware import machine_record


class Windows(torch.utils.data.IterableDataset):
    """The sequences that train_deepspeed.py trains on, one after the other."""

    def __init__(self, batches: Any, accumulation: int) -> None:
        self.batches = batches
        self.accumulation = accumulation

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for micro_batch in self.batches.next_step(self.accumulation):
                for sequence in micro_batch[0].clone():
                    # GPT2LMHeadModel shifts its labels itself
                    yield {"input_ids": sequence, "labels": sequence}


class StepTimes(transformers.TrainerCallback):
    """Milliseconds of each step, with the GPU's work."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ms.append(1000 * (time.perf_counter() - self.start))


def trainer_arguments(s: Any, optim: str, folder: str) -> transformers.TrainingArguments:
    """Return the Trainer's settings that are those of train_deepspeed.py."""
    if s.batch_ramp or s.length_ramp or s.lora_rank:
        sys.exit("the Trainer takes all weights and steps of one size: leave out ramps and LoRA")
    if s.lr_schedule != "linear" or s.min_lr or s.dropout:
        sys.exit("the Trainer's linear schedule ends at 0: --lr_schedule=linear --min_lr=0 --dropout=0")
    return transformers.TrainingArguments(
        output_dir=folder,
        max_steps=s.max_iters,
        per_device_train_batch_size=s.batch_size,
        gradient_accumulation_steps=s.gradient_accumulation_steps,
        gradient_checkpointing=s.gradient_checkpointing,
        bf16=torch.cuda.is_available(),
        optim=optim,
        learning_rate=s.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=s.warmup_iters,
        weight_decay=s.weight_decay,
        adam_beta1=s.beta1,
        adam_beta2=s.beta2,
        max_grad_norm=s.grad_clip,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        seed=s.seed,
    )


@torch.no_grad()
def validation_loss(model: torch.nn.Module, windows: Any, device: torch.device) -> float:
    """Return the mean loss per token of train_deepspeed.py's validation windows."""
    model.eval()
    total = 0.0
    count = 0
    for x, y in windows:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(x).logits
        loss = cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum")
        total += loss.double().item()
        count += int((y >= 0).sum())
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--optim", default="adamw_bnb_8bit")
    args, argv = parser.parse_known_args()
    s = settings_of_script(str(ROOT / "train_deepspeed.py"), argv)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    from runtime.cluster.join import join_process_group
    from runtime.cluster.ranks import ranks_from_environment
    from runtime.data.loader import TrainBatches, eval_batches
    from runtime.plan.run_plan import plan_run

    # The same plan of data as ours
    ranks = ranks_from_environment()
    join_process_group(s.device, s.backend)
    plan = plan_run(s, ranks)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocab_size = plan.data["vocab_size"]
    mixture = [(plan.sequences["train"][0], 1)]
    batches = TrainBatches(mixture, 0, plan.batch, 0, s.seed, vocab_size, torch.device("cpu"))

    # GPT-2 of transformers from random weights, without dropout as ours
    shape = transformers.GPT2Config(
        n_layer=plan.model.n_layer,
        n_head=plan.model.n_head,
        n_embd=plan.model.n_embd,
        n_positions=plan.model.block_size,
        vocab_size=plan.model.vocab_size,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.manual_seed(s.seed)
    with device:
        model = transformers.GPT2LMHeadModel(shape)

    # Train and measure
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=trainer_arguments(s, args.optim, folder),
            train_dataset=Windows(batches, s.gradient_accumulation_steps),
            callbacks=[times],
        )
        trainer.train()
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    val_windows = eval_batches(plan.sequences["val"][0], plan.eval_windows, plan.batch, 0, vocab_size, device)
    loss = validation_loss(model, val_windows, device)

    versions = {"transformers": transformers.__version__}
    if "bnb" in args.optim:
        import bitsandbytes

        versions["bitsandbytes"] = bitsandbytes.__version__
    machine = machine_record(device)
    record = {
        "what": f"transformers' Trainer with {args.optim}",
        "command": " ".join(["results/adam8bit.py", *sys.argv[1:]]),
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "hardware": machine["hardware"],
        "versions": machine["versions"] | versions,
        "ms": times.ms,
        "peak_gb": peak,
        "val_loss": loss,
        "losses": [one["loss"] for one in trainer.state.log_history if "loss" in one],
    }
    Path(args.file).write_text(json.dumps(record) + "\n")
    steady = sorted(times.ms[len(times.ms) // 5 :])
    print(f"{steady[len(steady) // 2]:.0f} ms, peak {peak} GB, val loss {loss:.4f}")


if __name__ == "__main__":
    main()
