"""Check this machine, and whether a run starts and fits on it.

    python doctor.py                                              this machine
    python doctor.py config/xl_shakespeare.py --num_gpus=4        also a run, with its memory estimate
    python doctor.py config/xl_shakespeare.py --target_gpu=24     a run on another GPU

WARN: slower, or some runs won't work. FAIL: the run won't start, and the exit code is 1. Each of them has its fix.
The settings are those of train_deepspeed.py.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace

from configurator import exit_quietly_on_broken_pipe, settings_of_script

ROOT = os.path.dirname(os.path.abspath(__file__))
OK, WARN, FAIL = "OK", "WARN", "FAIL"
NEEDED = ("torch", "deepspeed", "numpy", "pydantic", "psutil", "safetensors", "huggingface_hub", "tiktoken")  # to train
COMPLETE = all(map(importlib.util.find_spec, NEEDED))
if COMPLETE:
    import psutil
    import torch

    from runtime import hardware
    from runtime.data.dataset import check_dataset, dataset_dirs
    from runtime.files import UserError, file_digest, format_bytes, free_bytes
    from runtime.weights import HUB, fetch_from_hub

    GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def row(name, detail, fix="", severity=WARN):
    """Return the result of a check: OK without a fix, else WARN or FAIL."""
    return {"status": severity if fix else OK, "name": name, "detail": detail, "fix": fix}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_gpus", type=int, help="number of ranks; default: one per GPU")
    args, argv = parser.parse_known_args()
    if args.num_gpus is not None and args.num_gpus < 1:
        parser.error(f"--num_gpus={args.num_gpus} must be at least 1")
    if argv == ["all_reduce"]:
        return measure_all_reduce()
    rows, report = [*python(), *packages()], ""
    if COMPLETE:
        report = check_machine_and_run(rows, args.num_gpus, argv)
    count = Counter(line["status"] for line in rows)
    exit_quietly_on_broken_pipe()
    for line in rows:
        print("{status:<4}  {name:<16}  {detail}".format(**line))
        if line["fix"]:
            print(f"{'':24}-> {line['fix']}")
    print(f"{report}\n{count[FAIL]} to fix, {count[WARN]} warnings, {count[OK]} OK")
    return int(count[FAIL] > 0)


def check_machine_and_run(rows, num_gpus, argv):
    """Add the rows of all checks. Return the summary and memory estimate of the run, or ""."""
    if not GPUS:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    settings = settings_of_script(os.path.join(ROOT, "train_deepspeed.py"), argv) if argv else None
    severity = FAIL if argv and settings.target_gpu is None else WARN  # of what is missing on this machine
    ranks = num_gpus or (0 if argv and settings.device == "cpu" else GPUS) or 1
    report = []
    for check, *arguments in ((cuda,), (gpus,), (offload,), (kernels,), (check_all_reduce,), (host,),
                              (disk, settings), (datasets, settings), (weights, settings, severity),
                              (the_run, settings, ranks, report)):
        try:
            rows += check(*arguments)
        except Exception as error:  # the other checks still run
            rows.append(row(check.__name__, f"could not be checked: {type(error).__name__}: {error}",
                            "please report this"))
    return "".join(report)


# The run


def the_run(settings, ranks, report):
    """Check what training would report, and add the text of a dry run to `report`."""
    if not settings:
        return
    from runtime.cluster.ranks import Ranks
    from runtime.plan.run_plan import Problems, make_plan

    problems, notes, ranks = Problems(), [], Ranks(0, 0, ranks, ranks)
    plan = make_plan(replace(settings, dry_run=settings.target_gpu is not None), ranks, problems, notes, fetch=False)
    yield from (row("the run", "won't start", line, FAIL) for line in "\n".join(problems).splitlines())
    if plan:
        yield from (row("the run", "needs on the other machine", line) for line in plan.notes[len(notes):])
        fix = "add one of the settings below" if plan.advice() else ""
        yield row("the run", "doesn't fit" if fix else "fits", fix, FAIL)
        report.append(f"\n{plan.summary()}\n{plan.memory_report(ranks)}")


def disk(settings):
    """Check the space for a checkpoint of GPT-2 XL. The plan of a run checks the space for its own."""
    if not settings:
        free = free_bytes(".")
        yield row("disk", f"{format_bytes(free)} free here; a GPT-2 XL checkpoint takes 21.80 GB",
                  "make room, or choose another folder with --out_dir=DIR" if free < 21.8e9 else "")


def datasets(settings):
    """Check the hashes of the run's datasets."""
    for folder in dataset_dirs(settings.dataset) if settings else ():
        with contextlib.suppress(UserError):  # the plan reports it
            meta = check_dataset(folder)
            changed = [file for file, prepared in meta["files"].items()
                       if prepared != file_digest(os.path.join(folder, file))]
            yield row(f"data {os.path.basename(os.path.normpath(folder))}",
                      f"{', '.join(changed)} changed since preparation" if changed else
                      f"{meta['train_tokens']:,} and {meta['val_tokens']:,} tokens, hashes match",
                      "prepare it again" if changed else "", FAIL)


def weights(settings, severity):
    """Check that GPT-2's weights are in the cache or the hub answers. The plan checks other weights."""
    name, problem = settings.init_from if settings else "gpt2-xl", ""
    if name in HUB:
        try:
            fetch_from_hub(name, download=False)
        except UserError as error:
            problem = str(error)
        detail, _, fix = problem.partition(": ")
        yield row("weights", detail or f"{name} is in the cache, or the hub answers", fix, severity)


# The machine


def python():
    tested = sys.version_info[:2] in ((3, 11), (3, 12))
    yield row("Python", platform.python_version(), "" if tested else
              "install Python 3.12, and set PYTHON to its path for the shell scripts: 3.11 and 3.12 are tested")


def packages():
    """Compare the packages with the tested versions in requirements.txt, or in requirements-volta.txt."""
    other, severity = {}, WARN
    file = f"requirements{'-volta' * (COMPLETE and torch.__version__.startswith('2.7.'))}.txt"
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        pins = re.findall(r"^([\w.-]+)==([\w.]+)", f.read(), re.M)
    for name, tested in pins:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version.partition("+")[0] != tested:
            other[f"{name}=={tested}"] = f"; {name} {version}"
            if name == "deepspeed" or version == "not installed" and name.replace("-", "_") in NEEDED:
                severity = FAIL
    yield row("packages", f"{len(pins) - len(other)} as in {file}" + "".join(other.values()),
              f"python -m pip install {' '.join(other)}" if other else "", severity)


def cuda():
    built = f"PyTorch {torch.__version__}, for CUDA {torch.version.cuda}"
    every = map(torch.cuda.get_device_capability, range(GPUS))
    if problem := hardware.undetected_gpu() or hardware.unsupported_gpu(every):
        yield row("CUDA", *problem, FAIL)
    elif GPUS:
        yield row("CUDA", built)
    else:
        yield row("CUDA", f"no GPU; {built}",
                  "small models train on CPU; GPT-2 XL needs a GPU (estimate for one with --target_gpu=24)")


def offload():
    """Check what builds DeepSpeed's CPU Adam, its only kernel that we use: a C++ compiler, without nvcc."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    good = CPUAdamBuilder().is_compatible(verbose=False) and shutil.which("ninja") and shutil.which("g++")
    yield row("DeepSpeed ops", "cpu_adam can be built" if good else
              "cpu_adam can't be built, so offload uses PyTorch's slower AdamW",
              "" if good else "for offload: apt install g++, pip install ninja")


def gpus():
    for i in range(GPUS):
        gpu, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        dtype = "bfloat16" if (gpu.major, gpu.minor) >= (8, 0) else "float16"
        yield row(f"GPU {i}", f"{gpu.name}, {format_bytes(total)}, {format_bytes(free)} free, compute capability "
                  f"{gpu.major}.{gpu.minor}, {dtype}",
                  "stop other processes on it (see nvidia-smi)" if free < 0.9 * total else "")


def kernels():
    """Compare our Triton kernels with plain PyTorch, in one block of GPT-2 XL's width on this GPU."""
    from runtime.kernels import is_supported
    from runtime.kernels.block import compare_with_plain
    from runtime.kernels.edits import edited_functions

    why = hardware.missing_compiler()
    yield row("C compiler", why or "installed, with Python's headers",
              "apt install gcc python3-dev, or train slower on GPUs" if why else "")
    if edited := edited_functions():
        yield row("Triton kernels", f"not used, because model.py was edited ({', '.join(edited)})")
    elif GPUS and not why and is_supported(torch.empty(0, device="cuda")):
        dtype = hardware.pick_dtype("auto", "cuda")
        (loss, grads), (plain_loss, plain_grads) = compare_with_plain("cuda", getattr(torch, dtype))
        good = grads < 1.5 * plain_grads and loss < plain_loss + 0.01
        yield row("Triton kernels", f"error in {dtype} against float32: gradients {100 * grads:.2f}%, loss {loss:.1e} "
                  f"(plain PyTorch: {100 * plain_grads:.2f}%, {plain_loss:.1e})",
                  "" if good else "train without them: --compile=False", FAIL)


def check_all_reduce():
    """Run an all-reduce over all GPUs."""
    if GPUS < 2:
        return
    speed = hardware.run_command(sys.executable, "-m", "torch.distributed.run", "--standalone",
                                 f"--nproc_per_node={GPUS}", __file__, "all_reduce")
    if not speed:
        yield row("all-reduce", f"{GPUS} GPUs: an error, or no answer within {hardware.COMMAND_TIMEOUT_S} s",
                  "set NCCL_DEBUG=INFO to see more, or NCCL_P2P_DISABLE=1 if peer-to-peer is broken", FAIL)
    else:
        yield row("all-reduce", f"{GPUS} GPUs: {speed} GB/s",
                  "slow links: use ZeRO-2 with few, large micro-batches" if float(speed) < 5 else "")


def measure_all_reduce():
    """Run one rank of check_all_reduce(). Print the bus bandwidth in GB/s, as nccl-tests counts it."""
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    numbers, ranks = torch.ones(2**28, dtype=torch.bfloat16, device="cuda"), dist.get_world_size()
    dist.all_reduce(numbers)
    assert (numbers == ranks).all(), "wrong sum"
    seconds = Timer("all_reduce(numbers)", globals={"all_reduce": dist.all_reduce, "numbers": numbers}).timeit(4).mean
    if dist.get_rank() == 0:
        print(f"{2 * (ranks - 1) / ranks * numbers.nbytes / seconds / 1e9:.1f}")
    dist.destroy_process_group()


def host():
    """Check the host's memory."""
    free = hardware.available_memory()
    yield row("host memory", f"{free / 1e9:.1f} GB free of {psutil.virtual_memory().total / 1e9:.1f}",
              "close other programs or add swap, or processes may be killed (exit code -9)" if free < 8e9 else "")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        yield row("shared memory", f"{free / 1e9:.2f} GB in /dev/shm", "too small for NCCL: docker run --ipc=host, or "
                  "--shm-size=8g" if free < 1e9 else "")


if __name__ == "__main__":
    sys.exit(main())
