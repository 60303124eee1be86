"""Will it fit, and what would? The memory plan as a picture, and the nearest settings that fit, the fastest first."""

import dataclasses
import os
from types import SimpleNamespace

from runtime.engine import ds_config
from runtime.files import format_bytes
from runtime.plan.memory import OWN, plan

ROOM = 0.9  # of a card; the rest is for what memory is lost between tensors
PRESETS = ("ds_config_zero2.json", "ds_config_zero3.json", "config/ds/zero2_offload.json",
           "config/ds/zero3_offload.json")
WIDTH = 40  # characters of the picture's bar


def planned(run, s, world_size):
    """The plan of a run as it stands: bytes by what they hold."""
    return parts(run, s, world_size, run.batch_size, accumulate_locally=run.accumulate_locally)


def tensors(run, s, world_size):
    """Bytes of PyTorch's tensors at the peak, by the plan: what torch.cuda.max_memory_allocated is to show."""
    found = planned(run, s, world_size)
    return sum(found.values()) - found.get("CUDA and NCCL", 0)


def parts(run, s, world_size, batch_size, config=None, recompute=None, accumulate_locally=False):
    """The plan of a run, or of one with another batch size, DeepSpeed's configuration or recomputation."""
    recompute = s["gradient_checkpointing"] if recompute is None else recompute
    found = plan(run.model, config or run.config, run.dtype, world_size, run.n_saved, batch_size, run.compile,
                 recompute, accumulate_locally, run.n_trained)
    return {**found, "CUDA and NCCL": OWN[world_size > 1]} if run.device == "cuda" else found


def host_parts(run, config, local_world_size, world_size, saves):
    """Bytes of a machine's memory, by what they hold: its ranks' share of the states where they are offloaded, and of
    a tag that is being written; a process with PyTorch takes 2 GB (bench.py's host_gb, four processes on H200)."""
    zero, share = config["zero_optimization"], local_world_size / world_size
    moved = [(zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in ("optimizer", "param")]
    found = {"processes": 2e9 * local_world_size, "optimizer and gradients": 16 * run.n_trained * share * moved[0],
             "weights": 2 * run.n_saved * share * moved[1],
             "tag being written": run.tag_bytes * share * (saves and not moved[0])}
    return {name: int(size) for name, size in found.items() if size}


def picture(title, found, room):
    """Lines: the sum of the parts against the room, and a bar for each part."""
    total = sum(found.values())
    word = f" of {format_bytes(room)}" if room else ""
    if room and total > ROOM * room:
        word += ": too much, as a tenth stays free"
    lines = [f"{title:<10} {format_bytes(total)}{word}"]
    for name, size in sorted(found.items(), key=lambda item: -item[1]):
        if size >= 1e6:
            bar = "█" * max(1, round(WIDTH * size / max(total, room or 0)))
            lines.append(f"           {format_bytes(size):>9}  {bar} {name}")
    return lines


def slowness(batch_size, recompute, preset):
    """The time of a step, in units of the fastest setting's. From GPT-2 XL on H200 (RESULTS.md): 606 ms at 32 x 1, 635
    at 8, 853 at 1; ZeRO-3 1.12 times as long at 32, 1.53 at 16 and 2.3 at 8, where it waits for the CPU; with offload,
    recomputed at 8 x 4, 2,230 and 2,850, most of it the 16 CPU cores' work, which is taken to be the same elsewhere.
    Recomputation 1.31 times as long at 8 x 4."""
    if "offload" in preset:
        return ((1390 if "zero2" in preset else 2010) + 606 * slowness(batch_size, recompute, "zero2")) / 606
    time = (598 + 255 / batch_size) / 606 * (1.31 if recompute else 1)
    return time * (1.12 + max(0.0, 12.3 / batch_size - 0.35) if "zero3" in preset else 1)


def nearest_settings(run, s, world_size, root, most=5):
    """[(words for the command line, bytes a GPU, slowness)]: settings that fit, with as many sequences a step, the
    fastest first; of each kind the largest micro-batch."""
    sequences, found = run.batch_size * run.accumulation, []
    for preset in PRESETS:
        if "zero3" in preset and world_size == 1 and "offload" not in preset:
            continue
        for recompute in (False, True):
            for batch_size in (b for b in range(sequences, 0, -1) if sequences % b == 0):
                split = {"batch_size": batch_size, "gradient_accumulation_steps": sequences // batch_size}
                config, _ = ds_config.resolve(os.path.join(root, preset), {**s, **split}, world_size, run.dtype,
                                              run.compile)
                total = sum(parts(run, s, world_size, batch_size, config, recompute).values())
                if total <= ROOM * run.room:
                    words = [f"--{name}={value}" for name, value in split.items()]
                    words += ["--gradient_checkpointing=True"] * recompute
                    words += [f"--deepspeed_config={preset}"] * (preset != "ds_config_zero2.json")
                    found.append((words, total, slowness(batch_size, recompute, preset)))
                    break
    return sorted(found, key=lambda item: item[2])[:most]


def without(argv, *names):
    """The arguments but for some settings, whether written --name=value or --name value."""
    kept, skipped = [], False
    for argument in argv:
        of_a_skipped = skipped and not argument.startswith("--") and not argument.endswith(".py")
        skipped = argument.partition("=")[0].removeprefix("--") in names and argument.startswith("--")
        if not skipped and not of_a_skipped:
            kept.append(argument)
        skipped = skipped and "=" not in argument
    return kept


def too_much(run, s, world_size, root, argv):
    """Lines that tell what to type instead of a run that does not fit; [] if it does. argv: its arguments."""
    if sum(planned(run, s, world_size).values()) <= ROOM * run.room:
        return []
    choices = nearest_settings(run, s, world_size, root)
    start = "python" if world_size == 1 else f"torchrun --nproc_per_node={world_size}"
    kept = without(argv, "dry_run", "target_gpu", "batch_size", "gradient_accumulation_steps")
    thin = thin_matrices(run, s, world_size, [start, "train_deepspeed.py", *kept])
    if not choices and not thin:
        return [f"It does not fit, and nothing does {what_would(run, s, world_size, root)}"]
    lines = ["It does not fit. What does, the fastest first:" if choices else "It does not fit, but with LoRA it does."]
    for words, total, slow in choices:
        lines += [f"  {format_bytes(total)}, about {slow:.1f} times the fastest step's time:",
                  f"    {' '.join([start, 'train_deepspeed.py', *kept, *words])}"]
    return lines + thin


def what_would(run, s, world_size, root):
    """The end of the sentence that nothing fits: where, and which number of GPUs or shorter sequences would."""
    def fits(ranks, block_size):
        other = {**vars(run), "model": dataclasses.replace(run.model, block_size=block_size)}
        return nearest_settings(SimpleNamespace(**other), s, ranks, root)

    whole, counts = s["block_size"], [2**i for i in range(7)]
    if run.device != "cuda":  # ranks share the machine's memory: more of them have less each
        counts = []
    counts = sorted({*counts, world_size} - {world_size}, key=lambda n: (n < world_size, abs(n - world_size)))
    longest = {n: next((whole >> i for i in range(5) if fits(n, whole >> i)), 0) for n in (world_size, *counts)}
    best = max(longest, key=longest.get)  # of the same, the nearest number
    found = [f"--block_size={longest[world_size]} would"] * (longest[world_size] > 0)
    if longest[best] > longest[world_size]:
        found.append(f"{best} GPU{'s' * (best > 1)} would"
                     + (f" with --block_size={longest[best]}" if longest[best] < whole else ""))
    return (f"on {world_size} GPU{'s' * (world_size > 1)} of {format_bytes(run.room)}: "
            f"{', and '.join(found) or 'larger ones are needed, or a smaller model'}")


def thin_matrices(run, s, world_size, command):
    """Lines that tell of LoRA where it fits and is not taken: rank 64, one sequence at a time, recomputed."""
    if run.lora or run.init_from == "scratch":
        return []
    n_trained = 64 * 16 * run.model.n_embd * run.model.n_layer  # in and out of a block's matrices: 16 times its width
    total = sum(parts(SimpleNamespace(**{**vars(run), "n_trained": n_trained}), s, world_size, 1,
                      recompute=True).values())
    words = ["--batch_size=1", f"--gradient_accumulation_steps={run.batch_size * run.accumulation}",
             "--gradient_checkpointing=True", "--lora_rank=64", "--learning_rate=2e-4"]
    return [f"Or by LoRA (config/lora_xl_r64.py), {format_bytes(total)}:", f"    {' '.join([*command, *words])}"] * (
        total <= ROOM * run.room)


def run_out(run, s, world_size, root, argv):
    """What to type after memory has run out: settings that fit by the plan and take a tenth less than these."""
    taken = sum(planned(run, s, world_size).values())
    run.room = min(run.room, taken - 1)
    lines = too_much(run, s, world_size, root, argv)
    return "\n".join([f"out of memory; by the plan this run takes {format_bytes(taken)} on each GPU, and others may "
                      "use it (nvidia-smi).", *lines])


def report(run, s, world_size, local_world_size, root, argv):
    """The plan as text: what a GPU and the host would hold, and where it does not fit, what would."""
    lines = [f"plan       {run.batch_size} x {world_size} x {run.accumulation} sequences, {run.dtype}, "
             f"ZeRO-{run.config['zero_optimization']['stage']}"] if s["target_gpu"] is not None else []
    lines += picture("each GPU" if run.device == "cuda" else "each rank", planned(run, s, world_size), run.room)
    lines += picture("host", host_parts(run, run.config, local_world_size, world_size, s["keep_last"] > 0), None)
    return "\n".join(lines + too_much(run, s, world_size, root, argv))
