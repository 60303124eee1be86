"""Is this machine ready, and will this run fit?

    python doctor.py                                              the machine
    python doctor.py config/xl_shakespeare.py --num_gpus=4        and that run on it, with its memory plan
    python doctor.py config/xl_shakespeare.py --target_gpu=24         for another card
    python doctor.py --json                                       for programs

OK is as it should be; WARN works, but worse, or hinders some runs; FAIL ends in trouble, and then the exit code is 1.
Each WARN and FAIL says what to do. Settings are those of train_deepspeed.py.
"""

import argparse
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

from configurator import exit_quietly_on_broken_pipe, settings_of_script

ROOT = os.path.dirname(os.path.abspath(__file__))
OK, WARN, FAIL = "OK", "WARN", "FAIL"
INSTALL = "python -m pip install -r requirements.txt"
NEEDED = ("torch", "deepspeed", "numpy", "pydantic", "psutil", "safetensors", "huggingface_hub")  # by what follows
OPTIONAL = ("wandb", "tensorboard", "matplotlib", "pytest", "ruff", "triton")  # without these, most runs go on
SECONDS = 60  # after which a check that asks others is given up


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_gpus", type=int, help="ranks of the run; as many as there are GPUs")
    parser.add_argument("--json", action="store_true")
    args, words = parser.parse_known_args()
    if args.num_gpus is not None and args.num_gpus < 1:
        parser.error(f"--num_gpus={args.num_gpus} must be at least 1")
    if words == ["all_reduce"]:
        return all_reduce_here()
    rows = [*python(), *packages()]
    if all(map(importlib.util.find_spec, NEEDED)):
        if not gpus():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        run = settings_of_script(os.path.join(ROOT, "train_deepspeed.py"), words) if words else None
        ranks = args.num_gpus or (0 if on_cpu(run) else gpus()) or 1
        checks = [pytorch, driver, nvcc, compiler, operations, lambda: cards(run, args.num_gpus),
                  kernels, lambda: exchange(ranks),
                  host_memory, shared_memory, limits, lambda: disk(run), lambda: datasets(run), lambda: weights(run),
                  lambda: wandb_login(run), port]
        rows += [row for check in checks for row in attempt(check)]
    else:
        words = []
    told = plan(run, words, ranks, rows) if words else ""
    exit_quietly_on_broken_pipe()
    if args.json:
        print(json.dumps([dict(zip(("status", "name", "found", "mend"), row)) for row in rows], indent=1))
    else:
        for status, name, found, mend in rows:
            print(f"{status:<4}  {name:<16}  {found}" + (f"\n{'':24}-> {mend}" if mend else ""))
        counts = {status: sum(row[0] == status for row in rows) for status in (OK, WARN, FAIL)}
        print(f"{told}\n{counts[FAIL]} to mend, {counts[WARN]} warnings, {counts[OK]} as they should be")
    return int(any(row[0] == FAIL for row in rows))


def attempt(check):
    """The rows of a check; one that breaks is a warning of its own, not the end of the others."""
    try:
        return list(check())
    except Exception as error:
        name = getattr(check, "__name__", "").strip("<>").replace("lambda", "check")
        return [(WARN, name, f"could not be looked at: {type(error).__name__}: {error}", "tell us, please")]


def said(*command):
    """What a command prints, stripped; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gpus():
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_cpu(run):
    return bool(run) and run["device"] == "cpu"


def elsewhere(run):
    """Whether a run is reckoned for another machine: what this one lacks is no reason to fail then."""
    return bool(run) and run["target_gpu"] is not None


def graver(run):
    """How grave it is that this machine lacks what a run needs."""
    return FAIL if run and not elsewhere(run) else WARN


# Each check yields rows: (status, name, what was found, what to do or "")


def python():
    version = platform.python_version()
    good = sys.version_info[:2] in ((3, 11), (3, 12))
    yield (OK, "Python", version, "") if good else (
        WARN if sys.version_info >= (3, 11) else FAIL, "Python", f"{version}; tested are 3.11 and 3.12",
        "install Python 3.12, and set PYTHON to it for the shell scripts")


def packages():
    """Each package of requirements.txt, and whether its version is the one that was tested."""
    with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as f:
        pins = re.findall(r"^([\w.-]+)==([\w.]+)", f.read(), re.M)
    for name, wanted in pins:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield WARN if name in OPTIONAL else FAIL, name, f"not installed; {wanted} is wanted", INSTALL
            continue
        if version.partition("+")[0] == wanted:
            yield OK, name, version, ""
        elif name == "deepspeed":
            yield (FAIL, name, f"{version}; neighbours of {wanted} behave differently",
                   f"python -m pip install {name}=={wanted}")
        else:
            yield WARN, name, f"{version}; tested with {wanted}", INSTALL


def pytorch():
    import torch

    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if gpus():
        yield OK, "CUDA", f"PyTorch {torch.__version__}, {built}", ""
    elif said("nvidia-smi", "-L"):
        yield (FAIL, "CUDA", f"nvidia-smi lists GPUs, but PyTorch {torch.__version__}, {built}, sees none",
               "update the driver, or install a PyTorch built for it; look at CUDA_VISIBLE_DEVICES")
    else:
        yield (WARN, "CUDA", f"no GPU; PyTorch {torch.__version__}, {built}",
               "small models train here; GPT-2 XL wants a GPU (--target_gpu=24 reckons for one)")


def driver():
    if gpus():
        version = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield (OK, "driver", version.splitlines()[0], "") if version else (
            WARN, "driver", "nvidia-smi does not answer", "install the driver's tools")


def nvcc():
    """CUDA's compiler builds DeepSpeed's Adam for offload, and nothing else that we use."""
    import torch

    if not gpus():
        return
    told = re.search(r"release ([\d.]+)", said("nvcc", "--version") or "")
    if not told:
        yield WARN, "nvcc", "not there; only offload needs it", "install CUDA's toolkit before config/ds/*_offload.json"
    elif told[1].split(".")[0] != torch.version.cuda.split(".")[0]:
        yield (WARN, "nvcc", f"{told[1]}, PyTorch's CUDA is {torch.version.cuda}; only offload minds",
               f"install CUDA {torch.version.cuda}'s nvcc, or set DS_SKIP_CUDA_CHECK=1")
    else:
        yield OK, "nvcc", told[1], ""


def compiler():
    from runtime.hardware import missing_compiler

    why = missing_compiler()
    yield (WARN, "C compiler", f"{why}: on GPUs nothing is compiled, and steps are slower",
           "apt install gcc python3-dev, or the like") if why else (OK, "C compiler", "there, and Python's headers", "")


def operations():
    """Which of DeepSpeed's own kernels could be built. Offload's Adam alone is used here."""
    import contextlib
    import io

    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        real = {name: builder for name, builder in ALL_OPS.items() if name != "deepspeed_not_implemented"}
        can = [name for name, builder in real.items() if builder.is_compatible(verbose=False)]
        adam = CPUAdamBuilder().is_compatible(verbose=False) and shutil.which("ninja") and shutil.which("g++")
    yield (OK if adam else WARN, "DeepSpeed's ops", f"{len(can)} of {len(real)} could be built"
           + (", cpu_adam among them" if adam else "; cpu_adam not: offload takes PyTorch's slower AdamW"),
           "" if adam else "for offload: apt install g++, pip install ninja")


def cards(run, asked):
    import torch

    if on_cpu(run) or elsewhere(run):
        yield (OK, "GPUs", f"{gpus()}; the run is for the CPU" if on_cpu(run) else
               f"{gpus()} here; the plan is for {asked or gpus() or 1} of target_gpu={run['target_gpu']}", "")
    elif asked is not None and asked != gpus():
        yield (FAIL if asked > gpus() else OK, "GPUs", f"{gpus()}, and {asked} are asked for",
               "give --num_gpus as many as there are, or --device=cpu" if asked > gpus() else "")
    for i in range(gpus()):
        card, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        half = "bfloat16" if (card.major, card.minor) >= (8, 0) else "float16"
        words = (f"{card.name}, {total / 1e9:.1f} GB, {free / 1e9:.1f} free, capability {card.major}.{card.minor}: "
                 f"{half}")
        taken = free < 0.9 * total
        yield WARN if taken else OK, f"GPU {i}", words, "end what else runs there (nvidia-smi)" if taken else ""


def kernels():
    """One block of GPT-2 XL's width by our Triton kernels, and by plain PyTorch, on this GPU."""
    import torch

    from runtime.hardware import missing_compiler, pick_dtype
    from runtime.kernels import is_supported

    if not gpus() or missing_compiler() or not is_supported(torch.empty(0, device="cuda")):
        return
    from runtime.kernels.block import compare_with_plain

    dtype = pick_dtype("auto", "cuda")
    (loss, grads), (plain_loss, plain_grads) = compare_with_plain("cuda", getattr(torch, dtype))
    good = grads < 1.5 * plain_grads and loss < plain_loss + 0.01
    yield (OK if good else FAIL, "our kernels",
           f"one block in {dtype} against float32: gradients {100 * grads:.2f}% apart, loss {loss:.1e} (plain PyTorch: "
           f"{100 * plain_grads:.2f}%, {plain_loss:.1e})", "" if good else "--compile=False trains without them")


def exchange(ranks):
    """A real all-reduce over as many processes as the run would have, at most 8."""
    ranks = max(2, min(ranks, gpus(), 8))
    if gpus() == 1:
        yield OK, "all-reduce", "one GPU: nothing to exchange", ""
        return
    told = said(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                os.path.join(ROOT, "doctor.py"), "all_reduce")
    how = f"{ranks} GPUs, NCCL" if gpus() else f"{ranks} processes, gloo"
    rate = re.search(r"([\d.]+) GB/s", told or "")
    if not rate:
        yield (FAIL, "all-reduce", f"{how}: no answer within {SECONDS} s or an error",
               "NCCL_DEBUG=INFO tells more; NCCL_P2P_DISABLE=1 helps on boards whose peer-to-peer is broken" if gpus()
               else "is the loopback interface up, and does this host's name resolve (/etc/hosts)?")
        return
    slow = gpus() and float(rate[1]) < 5
    yield (WARN if slow else OK, "all-reduce", f"{how}: {rate[1]} GB/s",
           "as over PCIe or slower: ZeRO-2 with few, large micro-batches suits it best" if slow else "")
    if gpus():
        import torch

        pairs = [torch.cuda.can_device_access_peer(a, b) for a in range(ranks) for b in range(a)]
        yield (OK if all(pairs) else WARN, "links", f"{sum(pairs)} of {len(pairs)} pairs of GPUs reach one another",
               "" if all(pairs) else "the others go through host memory: slower")


def all_reduce_here():
    """One rank of exchange(): the bus bandwidth of the last of five, as NCCL's own tests count it."""
    import time

    import torch
    import torch.distributed as dist

    cuda, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    size, world_size = 2**28 if cuda else 2**22, dist.get_world_size()
    numbers = torch.ones(size, dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else "cpu")
    for _ in range(5):
        numbers.fill_(1)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    right = bool((numbers == world_size).all())
    rate = 2 * (world_size - 1) / world_size * numbers.nbytes / seconds / 1e9
    if rank == 0 and right:
        print(f"{rate:.1f} GB/s")
    dist.barrier()
    dist.destroy_process_group()
    return int(not right)


def host_memory():
    import psutil

    from runtime.hardware import available_memory

    free, total = available_memory(), psutil.virtual_memory().total
    low = free < 8e9
    yield (WARN if low else OK, "host memory", f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}",
           "processes may be killed (exit code -9): close others, add swap" if low else "")


def shared_memory():
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        low = free < 2**30
        yield (WARN if low else OK, "shared memory", f"{free / 1e9:.2f} GB in /dev/shm",
               "a container's default is too small for NCCL: docker run --ipc=host, or --shm-size=8g" if low else "")


def limits():
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = files != resource.RLIM_INFINITY and files < 4096
    yield WARN if low else OK, "open files", str(files), "ulimit -n 65536" if low else ""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 1e6:.1f} MB"
    low = locked != resource.RLIM_INFINITY and os.path.isdir("/sys/class/infiniband")
    yield WARN if low else OK, "locked memory", words, "InfiniBand wants more: ulimit -l unlimited" if low else ""


def disk(run):
    """Room in the output folder; for a run, against the tags that it keeps."""
    from runtime.files import free_bytes, nearest_existing_dir

    out_dir = run["out_dir"] if run else "."
    free, folder = free_bytes(out_dir), nearest_existing_dir(out_dir)
    needed = bytes_of_tag(run) * (run["keep_last"] + 2) if run and run["keep_last"] else 22e9
    why = "a run's tags may take" if run else "GPT-2 XL's tag takes"
    low = free < needed
    yield (WARN if low else OK, "disk", f"{free / 1e9:.1f} GB free in {folder}; {why} {needed / 1e9:.1f}",
           "make room, keep fewer (--keep_last=1), or choose another --out_dir" if low else "")


def bytes_of_tag(run):
    """Bytes of a tag of a run: as many as the tag that it goes on from has, else by its model's shape."""
    from runtime.checkpoint.saver import tag_bytes
    from runtime.checkpoint.tags import TagStore
    from runtime.plan.start import first_readable

    store = TagStore(run["out_dir"])
    there = store.newest_first() if run["init_from"] in ("resume", "auto") else []
    if there:
        _, manifest = first_readable(store, [run["resume_tag"], *there])
        return sum(entry["bytes"] for entry in manifest["files"].values())
    return tag_bytes(parameters(run), "bfloat16", 2)


def parameters(run):
    """Parameters of a run's model, from its shape; for weights in a folder, from their configuration, and for an
    earlier stage, from its manifest."""
    import torch

    from model import GPT, GPTConfig
    from runtime.checkpoint.tags import TagStore, parse_run_path
    from runtime.weights import PRETRAINED

    stage = parse_run_path(run["init_from"])
    if stage:
        config = GPTConfig(**TagStore(stage[0]).find(stage[1]).manifest["state"]["model"])
    elif os.path.exists(run["init_from"]):
        config = GPTConfig.from_weights(run["init_from"])
    else:
        shape = dict(zip(("n_layer", "n_head", "n_embd"), PRETRAINED.get(run["init_from"], (12, 12, 768))))
        config = GPTConfig(run["block_size"], **{k: run[k] or v for k, v in shape.items()})
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def datasets(run):
    """Each prepared data set, or the run's: whole, and with the hashes that it was prepared with."""
    from runtime.data.dataset import DatasetError, check_dataset
    from runtime.files import file_digest

    asked = run["dataset"] if run else None
    names = asked if isinstance(asked, dict) else [asked]
    folders = [name if os.sep in name else os.path.join(ROOT, "data", name) for name in names] if asked else sorted(
        entry.path for entry in os.scandir(os.path.join(ROOT, "data")) if entry.is_dir())
    for folder in folders:
        name = f"data {os.path.basename(folder)}"
        try:
            meta = check_dataset(folder, run["block_size"] if run else 1)
        except DatasetError as error:
            script = os.path.join(folder, "prepare.py")
            mend = f"python {os.path.relpath(script)}" if os.path.exists(script) else "prepare it"
            yield graver(run), name, str(error).splitlines()[0], mend
            continue
        changed = [file for file, was in meta["files"].items()
                   if was["sha256"] and was != file_digest(os.path.join(folder, file))]
        yield (FAIL if changed else OK, name, f"{', '.join(changed)} changed since preparation" if changed else
               f"{meta['train_tokens']:,} and {meta['val_tokens']:,} tokens, hashes as prepared",
               "prepare it anew" if changed else "")


def weights(run):
    """Whether GPT-2's weights are here, or the hub answers."""
    import urllib.request

    from huggingface_hub import constants, try_to_load_from_cache

    from runtime.weights import HUB, PRETRAINED

    name = run["init_from"] if run else "gpt2-xl"
    if name not in PRETRAINED:
        there = os.path.exists(name) or name in ("scratch", "resume", "auto")
        yield (OK, "weights", name, "") if there else (graver(run), "weights", f"{name} is not there",
                                                       "--init_from=PATH")
        return
    if isinstance(try_to_load_from_cache(f"openai-community/{name}", "model.safetensors", revision=HUB[name][0]), str):
        yield OK, "weights", f"{name} is in the cache", ""
        return
    address = f"{constants.ENDPOINT}/openai-community/{name}/resolve/{HUB[name][0]}/config.json"
    try:
        with urllib.request.urlopen(address, timeout=5):
            yield OK, "weights", f"{name} can be fetched from {constants.ENDPOINT}", ""
    except OSError as error:
        yield (graver(run), "weights", f"{name} is not here, and the hub does not answer ({error})",
               "HF_ENDPOINT=a mirror, or --init_from=DIR with config.json and model.safetensors")


def wandb_login(run):
    """Looked at where a run logs there."""
    import netrc

    if not run or not run["wandb_log"] or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return
    try:
        known = bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators("api.wandb.ai"))
    except (OSError, netrc.NetrcParseError):
        known = False
    yield (OK, "wandb", "a key is there", "") if known else (
        graver(run), "wandb", "wandb_log=True, but no key", "wandb login, or WANDB_MODE=offline")


def port():
    """Where ranks meet unless told otherwise; torchrun --standalone and a run without a launcher take a free one."""
    number = int(os.environ.get("MASTER_PORT", 29500))
    with socket.socket() as s:
        taken = s.connect_ex(("127.0.0.1", number)) == 0
    yield (WARN if taken else OK, f"port {number}", "taken" if taken else "free",
           "torchrun --standalone, or --master_port=29501" if taken else "")


def plan(run, words, ranks, rows):
    """The run's memory plan, as --dry_run shows it, for the cards that are here or that --target_gpu names."""
    import torch

    if gpus() and not elsewhere(run) and not on_cpu(run):
        room = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus()))
        words = [*words, f"--target_gpu={room / 1e9:.1f}"]
    done = subprocess.run([sys.executable, os.path.join(ROOT, "train_deepspeed.py"), *words, "--dry_run=True"],
                          capture_output=True, text=True, env={**os.environ, "WORLD_SIZE": str(ranks)})
    if done.returncode == 0 and "too much" in done.stdout:
        rows.append((FAIL, "the run", "does not fit", "see below what does"))
    elif done.returncode:
        rows += [(FAIL, "the run", line, "") for line in done.stderr.splitlines() if line.strip()]
    return "\n" + done.stdout


if __name__ == "__main__":
    sys.exit(main())
