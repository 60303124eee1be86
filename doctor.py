"""Is this machine ready, and will this run fit?

    python doctor.py                                              the machine
    python doctor.py config/xl_shakespeare.py --num_gpus=4        and that run on it, with its memory estimate
    python doctor.py config/xl_shakespeare.py --target_gpu=24     for another card
    python doctor.py --json                                       for programs

OK needs nothing; WARN works, but is slower, or hinders some runs; FAIL stops a run, and then the exit code is 1.
Each WARN and FAIL comes with its fix. Settings are those of train_deepspeed.py.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

from configurator import exit_quietly_on_broken_pipe, settings_of_script

ROOT = os.path.dirname(os.path.abspath(__file__))
OK, WARN, FAIL = "OK", "WARN", "FAIL"
OPTIONAL = ("wandb", "tensorboard", "matplotlib", "pytest", "ruff", "triton")  # most runs do without
TIMEOUT_S = 60  # of a command
NEEDED = ("torch", "deepspeed", "numpy", "pydantic", "psutil", "safetensors", "huggingface_hub")  # by most checks
COMPLETE = all(map(importlib.util.find_spec, NEEDED))
if COMPLETE:
    import psutil
    import torch

    from runtime.data.dataset import DatasetError, check_dataset, dataset_dirs
    from runtime.files import file_digest, format_bytes, free_bytes, nearest_existing_dir
    from runtime.hardware import available_memory, memory_per_rank, missing_compiler, pick_dtype
    from runtime.weights import HUB

    GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def row(name, found, fix="", severity=WARN):
    """What a check found: OK if there is nothing to fix, else of this severity."""
    return {"status": severity if fix else OK, "name": name, "found": found, "fix": fix}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_gpus", type=int, help="ranks of the run; as many as there are GPUs")
    parser.add_argument("--json", action="store_true")
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
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        for line in rows:
            print("{status:<4}  {name:<16}  {found}".format(**line))
            if line["fix"]:
                print(f"{'':24}-> {line['fix']}")
        print(f"{report}\n{count[FAIL]} to fix, {count[WARN]} warnings, {count[OK]} OK")
    return int(count[FAIL] > 0)


def check_machine_and_run(rows, num_gpus, argv):
    """Add the rows of all checks. Returns what a dry run of the run shows, or ""."""
    if not GPUS:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    settings = settings_of_script(os.path.join(ROOT, "train_deepspeed.py"), argv) if argv else None
    for_cpu = settings is not None and settings.device == "cpu"
    for_other_machine = settings is not None and settings.target_gpu is not None
    severity = FAIL if settings and not for_other_machine else WARN  # of what this machine does not have
    ranks = num_gpus or (0 if for_cpu else GPUS) or 1
    if num_gpus and num_gpus > GPUS and not for_cpu and not for_other_machine:
        rows.append(row("GPUs", f"{GPUS}, and {num_gpus} are requested",
                        "give --num_gpus as many as there are, or --device=cpu", FAIL))
        if settings and GPUS:  # the plan is for as many such GPUs
            settings = replace(settings, target_gpu=memory_per_rank("cuda", GPUS) / 1e9)
    plan, report = None, ""
    for check, *arguments in ((cuda,), (gpus,), (offload,), (kernels,), (check_all_reduce, ranks), (host,),
                              (datasets, settings), (weights, settings, severity), (wandb_login, settings, severity)):
        with keep_going(rows, check.__name__):
            rows += check(*arguments)
    if settings:
        with keep_going(rows, "the run"):
            plan, report = plan_settings(rows, settings, ranks)
    rows += disk(settings, plan)
    return report


@contextlib.contextmanager
def keep_going(rows, name):
    """A check that breaks is a warning of its own, not the end of the others."""
    try:
        yield
    except Exception as error:
        rows.append(row(name, f"could not be checked: {type(error).__name__}: {error}", "report this, please"))


def run_command(*command):
    """Return what a command prints, stripped; "" if there is no such command, or it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# The run


def plan_settings(rows, settings, ranks):
    """Add the rows of what training would refuse. Returns (its RunPlan or None, what a dry run shows)."""
    from runtime.cluster.ranks import Ranks
    from runtime.plan.run_plan import Problems, make_plan

    problems, notes, ranks = Problems(), [], Ranks(0, 0, ranks, ranks)
    plan = make_plan(replace(settings, dry_run=True), ranks, problems, notes, fetch=False)
    rows += [row("the run", "would not start", line, FAIL) for line in "\n".join(problems).splitlines()]
    if plan is None:
        return None, ""
    rows += [row("the run", "needs on its machine", line) for line in plan.notes[len(notes):]]
    fix = "use the settings below" if plan.advice() else ""
    rows.append(row("the run", "does not fit" if fix else "fits", fix, FAIL))
    return plan, f"\n{plan.summary()}\n{plan.memory_report(ranks)}"


def disk(settings, plan):
    """Space for all checkpoints that a run keeps, or for one of GPT-2 XL."""
    out_dir = settings.out_dir if settings else "."
    free, needed, what = free_bytes(out_dir), 22e9, "a checkpoint of GPT-2 XL takes"
    if plan and settings.keep_last:
        needed, what = plan.tag_bytes * (settings.keep_last + 2), "a run's checkpoints may take"
    yield row("disk", f"{format_bytes(free)} free in {nearest_existing_dir(out_dir)}; {what} {format_bytes(needed)}",
              "free some, keep fewer (--keep_last=1), or choose another --out_dir" if free < needed else "")


def datasets(settings):
    """Whether the run's datasets, or all of data/, have the hashes that they were prepared with."""
    folders = dataset_dirs(settings.dataset, ROOT) if settings else sorted(
        entry.path for entry in os.scandir(os.path.join(ROOT, "data")) if entry.is_dir())
    for folder in folders:
        name = f"data {os.path.basename(os.path.normpath(folder))}"
        try:
            meta = check_dataset(folder)
        except DatasetError as error:
            if not settings:  # a run's plan reports it
                problem, _, fix = str(error).splitlines()[0].rpartition(": ")
                yield row(name, problem, fix)
            continue
        changed = [file for file, prepared in meta["files"].items()
                   if prepared["sha256"] and prepared != file_digest(os.path.join(folder, file))]
        yield row(name, f"{', '.join(changed)} changed since preparation" if changed else
                  f"{meta['train_tokens']:,} and {meta['val_tokens']:,} tokens, hashes as prepared",
                  "prepare it again" if changed else "", FAIL)


def weights(settings, severity):
    """Whether GPT-2's weights are here, or the hub answers. The plan checks other weights."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    name = settings.init_from if settings else "gpt2-xl"
    if name not in HUB:
        return
    repo, revision = f"openai-community/{name}", HUB[name][0]
    found, fix = f"{name} is in the cache", ""
    if not isinstance(try_to_load_from_cache(repo, "model.safetensors", revision=revision), str):
        found = f"{name} can be fetched from {constants.ENDPOINT}"
        try:
            HfApi().model_info(repo, revision=revision, timeout=5)
        except Exception as error:  # httpx, hub and OS errors have no common base
            found = f"{name} is not here, and {constants.ENDPOINT} does not answer ({type(error).__name__})"
            fix = "HF_ENDPOINT=a mirror, or --init_from=DIR with config.json and model.safetensors"
    yield row("weights", found, fix, severity)


def wandb_login(settings, severity):
    """Whether a run that logs to wandb has a key."""
    import netrc

    if settings and settings.wandb_log and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        known = "WANDB_API_KEY" in os.environ
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            known = known or netrc.netrc().authenticators("api.wandb.ai")
        yield row("wandb", "has a key" if known else "wandb_log=True, but there is no key",
                  "" if known else "wandb login, or WANDB_MODE=offline", severity)


# The machine


def python():
    version, tested = platform.python_version(), sys.version_info[:2] in ((3, 11), (3, 12))
    yield row("Python", version if tested else f"{version}; 3.11 and 3.12 are tested",
              "" if tested else "install Python 3.12, and set PYTHON to it for the shell scripts",
              WARN if sys.version_info >= (3, 11) else FAIL)


def packages():
    """Each package of requirements.txt, and whether its version is the tested one."""
    with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as f:
        pins = re.findall(r"^([\w.-]+)==([\w.]+)", f.read(), re.M)
    for name, tested in pins:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        good = version.partition("+")[0] == tested
        needed = name == "deepspeed" or version == "not installed" and name not in OPTIONAL
        yield row(name, version if good else f"{version}; {tested} is tested",
                  "" if good else f"python -m pip install {name}=={tested}", FAIL if needed else WARN)


def cuda():
    built = f"PyTorch {torch.__version__}, for CUDA {torch.version.cuda}"
    if GPUS:
        yield row("CUDA", built)
        version = run_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield row("driver", version.partition("\n")[0] or "nvidia-smi does not answer",
                  "" if version else "install the driver's tools")
    elif run_command("nvidia-smi", "-L"):
        yield row("CUDA", f"nvidia-smi lists GPUs, but {built}, sees none",
                  "update the driver, or install a PyTorch built for it; check CUDA_VISIBLE_DEVICES", FAIL)
    else:
        yield row("CUDA", f"no GPU; {built}",
                  "small models train here; GPT-2 XL needs a GPU (--target_gpu=24 estimates for one)")


def offload():
    """What builds DeepSpeed's CPU Adam, the one of its own kernels that is used here."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if GPUS:
        release = re.search(r"release ([\d.]+)", run_command("nvcc", "--version"))
        same = release and release[1].split(".")[0] == torch.version.cuda.split(".")[0]
        yield row("nvcc", release[1] if release else "not installed", "" if same else
                  f"for offload: install CUDA {torch.version.cuda}'s, or set DS_SKIP_CUDA_CHECK=1 for another one")
    good = CPUAdamBuilder().is_compatible(verbose=False) and shutil.which("ninja") and shutil.which("g++")
    yield row("DeepSpeed's ops", "cpu_adam can be built" if good else
              "cpu_adam can't be built: offload uses PyTorch's slower AdamW",
              "" if good else "for offload: apt install g++, pip install ninja")


def gpus():
    for i in range(GPUS):
        card, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        dtype = "bfloat16" if (card.major, card.minor) >= (8, 0) else "float16"
        yield row(f"GPU {i}", f"{card.name}, {format_bytes(total)}, {format_bytes(free)} free, capability "
                  f"{card.major}.{card.minor}: {dtype}",
                  "end what else runs there (nvidia-smi)" if free < 0.9 * total else "")


def kernels():
    """One block of GPT-2 XL's width by our Triton kernels, and by plain PyTorch, on this GPU."""
    from runtime.kernels import is_supported
    from runtime.kernels.block import compare_with_plain

    why = missing_compiler()
    yield row("C compiler", why or "installed, with Python's headers", "apt install gcc python3-dev, or the like: "
              "without, nothing is compiled on GPUs, and steps are slower" if why else "")
    if GPUS and not why and is_supported(torch.empty(0, device="cuda")):
        dtype = pick_dtype("auto", "cuda")
        (loss, grads), (plain_loss, plain_grads) = compare_with_plain("cuda", getattr(torch, dtype))
        good = grads < 1.5 * plain_grads and loss < plain_loss + 0.01
        yield row("our kernels", f"one block in {dtype} against float32: gradients {100 * grads:.2f}% apart, loss "
                  f"{loss:.1e} (plain PyTorch: {100 * plain_grads:.2f}%, {plain_loss:.1e})",
                  "" if good else "--compile=False trains without them", FAIL)


def check_all_reduce(ranks):
    """A real all-reduce over as many processes as the run would have, at most 8."""
    if GPUS == 1:
        yield row("all-reduce", "one GPU: nothing to reduce")
        return
    ranks = max(2, min(ranks, GPUS, 8))
    output = run_command(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                         os.path.join(ROOT, "doctor.py"), "all_reduce")
    where, rate = f"{ranks} GPUs, NCCL" if GPUS else f"{ranks} processes, gloo", output.removesuffix(" GB/s")
    if rate == output:
        yield row("all-reduce", f"{where}: an error, or no answer within {TIMEOUT_S} s",
                  "NCCL_DEBUG=INFO shows more; NCCL_P2P_DISABLE=1 helps on boards whose peer-to-peer is broken" if GPUS
                  else "is the loopback interface up, and does this host's name resolve (/etc/hosts)?", FAIL)
        return
    yield row("all-reduce", f"{where}: {output}", "as over PCIe or slower: ZeRO-2 with few, large micro-batches suits "
              "it best" if GPUS and float(rate) < 5 else "")
    if GPUS:
        pairs = [torch.cuda.can_device_access_peer(a, b) for a in range(ranks) for b in range(a)]
        yield row("links", f"{sum(pairs)} of {len(pairs)} pairs of GPUs reach one another",
                  "" if all(pairs) else "the others go through host memory: slower")


def measure_all_reduce():
    """One rank of check_all_reduce(): the bus bandwidth of the last of five, as NCCL's own tests count it."""
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
    synchronize = torch.cuda.synchronize if GPUS else lambda: None
    if GPUS:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if GPUS else "gloo")
    numbers = torch.ones(2**28 if GPUS else 2**22, dtype=torch.bfloat16 if GPUS else torch.float32, device=device)
    world_size = dist.get_world_size()
    for _ in range(5):
        numbers.fill_(1)
        synchronize()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        synchronize()
        seconds = time.perf_counter() - start
    right = bool((numbers == world_size).all())
    if dist.get_rank() == 0 and right:
        print(f"{2 * (world_size - 1) / world_size * numbers.nbytes / seconds / 1e9:.1f} GB/s")
    dist.barrier()
    dist.destroy_process_group()
    return int(not right)


def host():
    """The host's memory and limits."""
    free = available_memory()
    yield row("host memory", f"{free / 1e9:.1f} GB free of {psutil.virtual_memory().total / 1e9:.1f}",
              "processes may be killed (exit code -9): close others, add swap" if free < 8e9 else "")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        yield row("shared memory", f"{free / 1e9:.2f} GB in /dev/shm", "a container's default is too small for NCCL: "
                  "docker run --ipc=host, or --shm-size=8g" if free < 2**30 else "")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield row("open files", str(files), "ulimit -n 65536" if 0 <= files < 4096 else "")  # -1: unlimited
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = locked != resource.RLIM_INFINITY
    yield row("locked memory", f"{locked / 1e6:.1f} MB" if limited else "unlimited", "InfiniBand needs more: "
              "ulimit -l unlimited" if limited and os.path.isdir("/sys/class/infiniband") else "")
    port = int(os.environ.get("MASTER_PORT", 29500))  # where ranks meet by default
    with socket.socket() as s:
        taken = s.connect_ex(("127.0.0.1", port)) == 0
    yield row(f"port {port}", "taken" if taken else "free",
              "torchrun --standalone, or --master_port=29501" if taken else "")


if __name__ == "__main__":
    sys.exit(main())
