"""Start training from Python: detect the GPUs, start one rank per GPU, forward signals and return the run's exit code.

    python launch_deepspeed.py config/xl_shakespeare.py --num_gpus=4 --batch_size=8 --max_epochs=3
    python launch_deepspeed.py config/shakespeare_char_cpu.py --num_gpus=2 --max_iters=100 --resume
    python launch_deepspeed.py --headline                what run_deepspeed_xl.sh runs after it has created .venv

All other arguments (a config file, --key=value) go to train_deepspeed.py. At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, the
run saves a checkpoint and exits. A second Ctrl-C kills it.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from configurator import settings_of_script
from runtime.output import exit_with_error, protect_output

ROOT = os.path.dirname(os.path.abspath(__file__))
TRAIN = os.path.join(ROOT, "train_deepspeed.py")


def fail(message):
    exit_with_error(f"launch_deepspeed.py: {message}")


def parse_arguments():
    """Return (--headline, --num_gpus, the arguments of train_deepspeed.py)."""
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__, usage="%(prog)s [CONFIG.py] [options] [--key=value ...]")
    parser.error = fail
    parser.add_argument("--headline", action="store_true", help="prepare the data, train and sample: GPT-2 XL on "
                        "Shakespeare, or without a GPU a small character-level model")
    parser.add_argument("--num_gpus", type=int, help="number of GPUs, or of CPU processes without a GPU (default: "
                        "all visible GPUs, or 1)")
    parser.add_argument("--resume", nargs="?", const="latest", metavar="TAG", help="resume the run in out_dir, or the "
                        "run or checkpoint of this name (iter_10) or path (out-mine, out-mine/iter_10)")
    named, args = parser.parse_known_args()
    if named.num_gpus is not None and named.num_gpus < 1:
        fail(f"--num_gpus={named.num_gpus} must be at least 1")
    if named.resume is not None:
        if named.resume.endswith(".py"):
            fail(f"--resume={named.resume} is a config, not a checkpoint: write it before --resume")
        path = os.path.normpath(named.resume)
        out_dir, tag = (path, "latest") if os.path.isfile(f"{path}/latest") else os.path.split(path)
        args += ["--init_from=resume", f"--resume_tag={tag}", *[f"--out_dir={out_dir}"] * bool(out_dir)]
    return named.headline, named.num_gpus, args


def protect_launcher():
    """Keep failing prints from ending this process, print lines before the commands do, and exit on signals."""
    protect_output()
    sys.stdout.reconfigure(line_buffering=True)
    exit_on_signals()


def exit_on_signals():
    """Exit with 128 + its number at a signal. subprocess.run() then kills the command that it waits for."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def run_python(*arguments):
    """Run Python in the project's folder. Return its exit code."""
    # In its own process group, so that the terminal's Ctrl-C reaches it through us only
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0).returncode
    return code if code >= 0 else 128 - code


def count_gpus():
    """Return the number of GPUs that PyTorch finds. Exit if there are some that it can't use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch  # after that

    from runtime.hardware import undetected_gpu

    if problem := undetected_gpu():
        fail(": ".join(problem))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def train(ranks, args, script=TRAIN):
    """Train on this node. Exit with the run's exit code, unless it is 0."""
    from runtime import launch  # imports PyTorch

    arguments = ["--standalone", f"--nproc_per_node={ranks}", script, *args]
    print(shlex.join([sys.executable, "-m", "runtime.launch", *arguments]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))  # torchrun's 1 is slow for CPU offload
    if code := launch.run(arguments):
        raise SystemExit(code)
    exit_on_signals()  # torchrun has replaced the handlers


def run_headline(ranks, args):
    """Prepare the data, train and sample: GPT-2 XL, or without a GPU a small character-level model."""
    os.chdir(ROOT)
    if gpus := count_gpus():
        ranks, ours = ranks or gpus, ["config/xl_shakespeare.py"]
    else:
        ranks, ours = ranks or 2, ["config/shakespeare_char_cpu.py", "--out_dir=out-demo"]
        print(f"No CUDA GPU: training a small character-level model on {ranks} CPU processes instead, in out-demo")
        os.environ["DS_ACCELERATOR"] = "cpu"
    settings = settings_of_script(TRAIN, [*ours, *args])  # later arguments win
    keeps = settings.init_from in ("resume", "auto") or settings.eval_only or not os.path.isdir("out-demo")
    if not gpus and settings.out_dir == "out-demo" and not keeps:  # never a folder that the user named
        print("Overwriting out-demo" + ", but not in this dry run" * settings.dry_run)
        ours.append("--overwrite=True")
    data = Path("data", str(settings.dataset))
    if data.parent == Path("data") and (data / "prepare.py").is_file() and not (data / "meta.json").is_file():
        print(f"Preparing {data}")
        if code := run_python(data / "prepare.py"):
            raise SystemExit(code)
    train(ranks, [*ours, *args])
    if settings.keep_last and not (settings.eval_only or settings.dry_run):
        run_python("sample.py", f"--out_dir={settings.out_dir}", "--num_samples=1", "--max_new_tokens=200")


def main():
    protect_launcher()
    headline, ranks, args = parse_arguments()
    if headline:
        run_headline(ranks, args)
    else:
        settings_of_script(TRAIN, args)  # exits for mistakes
        train(ranks or count_gpus() or 1, args)


if __name__ == "__main__":
    main()
