"""Start training from Python: find the GPUs, start the ranks, pass signals on, and leave no process behind.

    python launch_deepspeed.py config/xl_shakespeare.py --num_gpus=4 --bf16 --batch_size=8 --epochs=3
    python launch_deepspeed.py config/shakespeare_char_cpu.py --num_gpus=2 --max_iters=100 --resume
    python launch_deepspeed.py --headline                what run_deepspeed_xl.sh does once it has made .venv

All other arguments go to train_deepspeed.py unchanged: a configuration, --key=value. runtime/launch.py, which is
torchrun, starts the ranks: the deepspeed command leaves its ranks behind when it is stopped. SIGTERM, SIGUSR1, SIGHUP
and Ctrl-C are passed on: the run saves and ends. A second Ctrl-C ends it at once. The exit code is the run's.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from runtime.output import exit_with_error, protect_output

ROOT = os.path.dirname(os.path.abspath(__file__))
TRAIN = os.path.join(ROOT, "train_deepspeed.py")
STOP_TIMEOUT_S = 315  # runtime/launch.py gives the ranks 300 to save and end, then kills them
OPTIONS = {  # setting: the options that set it, which exclude each other, with their values; None: the user gives it
    "dtype": {"--fp16": "float16", "--bf16": "bfloat16"}, "init_from": {"--resume": "resume"},
    "deepspeed_config": {"--config": None, "--offload_optimizer": "config/ds/zero2_offload.json"},
    "batch_size": {"--batch_size": None}, "gradient_accumulation_steps": {"--gradient_accumulation_steps": None},
    "learning_rate": {"--learning_rate": None}, "max_epochs": {"--epochs": None},
}

# In a process of its own, because CUDA keeps memory of each GPU that a process looks at
LIST_GPUS = """
import json, torch
try:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    why = f"torch {torch.__version__} finds no CUDA device"
except Exception as error:  # a driver too old for this PyTorch: the devices are counted, but none can be used
    gpus, why = [], str(error).splitlines()[0]
print(json.dumps([[f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus], why]))
"""


def fail(sentence):
    exit_with_error(f"launch_deepspeed.py: {sentence}")


def parse_arguments():
    """Return (--headline, --num_gpus, the arguments of train_deepspeed.py)."""
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__, usage="%(prog)s [CONFIG.py] [options] [--key=value ...]")
    parser.error = fail
    parser.add_argument("--headline", action="store_true", help="data, checks, training and a sample of GPT-2 XL on "
                        "Shakespeare, or without a GPU of a small demonstration; other arguments change its settings")
    parser.add_argument("--num_gpus", type=int, help="ranks, one a GPU; on a machine without GPUs, processes "
                        "(default: all visible GPUs, or 1)")
    for setting, options in OPTIONS.items():
        group = parser.add_mutually_exclusive_group()
        for name, value in options.items():
            how = {"action": "store_const", "const": value} if value else {"metavar": "VALUE"}
            group.add_argument(name, dest=setting, help=f"the same as --{setting}={value or 'VALUE'}", **how)
    named, args = parser.parse_known_args()
    args += [f"--{name}={value}" for name, value in vars(named).items() if name in OPTIONS and value is not None]
    if named.num_gpus is not None and named.num_gpus < 1:
        fail(f"--num_gpus={named.num_gpus} must be at least 1")
    return named.headline, named.num_gpus, args


class Commands:
    """Run commands one after another. A signal ends the one that runs, and then this program."""

    def __init__(self):
        self.process = self.stopped_by = None  # the command that runs; the first signal
        # XL_RUN marks all processes below this one: torchrun's ranks have sessions of their own, and a killed torchrun
        # leaves them to init, so neither process group nor parent finds them
        python_path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        self.env = os.environ | {"XL_RUN": f"{os.getpid()}.{time.time_ns()}", "PYTHONPATH": python_path}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self.on_signal)
        signal.signal(signal.SIGALRM, lambda *_: self.signal_all(signal.SIGKILL))

    def run(self, *arguments, stdout=None, check=True, **env):
        """Run Python with these arguments; return (exit code, output if stdout is a pipe). check: exit if it fails."""
        # A session of its own, so that the terminal's Ctrl-C comes through us alone, once
        self.process = subprocess.Popen([sys.executable, *arguments], env=self.env | env, text=True, stdout=stdout,
                                        stdin=subprocess.DEVNULL, start_new_session=True)
        self.pass_on()  # a signal that came just before
        printed, code = self.process.communicate()[0], self.process.returncode
        code = code if code >= 0 else 128 - code
        if self.stopped_by and not 1 < code < 128:  # 1 is any failure and 128 and up a signal's; 2: it could not save
            code = 128 + self.stopped_by
        if self.stopped_by or (code and check):
            raise SystemExit(code)
        return code, printed

    def on_signal(self, number, _):
        """Pass on the first signal alone: at a second one torchrun would leave its ranks."""
        if not self.stopped_by:
            self.stopped_by = number
            signal.alarm(STOP_TIMEOUT_S)
            print("Stopping: the processes finish their step, save and end (Ctrl-C: at once)", file=sys.stderr)
            self.pass_on()
        elif number == signal.SIGINT:
            self.signal_all(signal.SIGKILL)

    def pass_on(self):
        if self.process and self.stopped_by:  # others than the ranks would print a traceback at a Ctrl-C
            self.process.send_signal(self.stopped_by if "runtime.launch" in self.process.args else signal.SIGTERM)

    def signal_all(self, number):
        """Send a signal to all processes with our mark; return how many there are."""
        count = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or it has ended
                if process.environ().get("XL_RUN") == self.env["XL_RUN"]:
                    process.send_signal(number)
                    count += 1
        return count

    def end_stragglers(self):
        """SIGTERM to what still runs, and after 5 s SIGKILL."""
        for attempt in range(100):
            if not self.signal_all(signal.SIGTERM if attempt < 50 else signal.SIGKILL):
                return
            time.sleep(0.1)

    def list_gpus(self):
        """Return a description of each visible GPU."""
        if os.environ.get("DS_ACCELERATOR") == "cpu":
            self.env["CUDA_VISIBLE_DEVICES"] = ""
        code, printed = self.run("-W", "ignore", "-c", LIST_GPUS, stdout=subprocess.PIPE, check=False)
        if code:
            fail(f"{sys.executable} cannot import PyTorch: see above; reinstall it (rm -rf .venv for ours)")
        gpus, why = json.loads(printed)
        if not gpus and self.env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and shutil.which("nvidia-smi"):
            if subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.startswith(b"GPU "):
                fail(f"nvidia-smi lists GPUs, but {why}: update the driver or install a PyTorch built for it, check "
                     "CUDA_VISIBLE_DEVICES, or run on CPU with DS_ACCELERATOR=cpu")
        return gpus

    def read_settings(self, args):
        """Return the settings that train_deepspeed.py makes of these arguments. It ends wrong ones with exit code 2."""
        return json.loads(self.run(TRAIN, *args, "--print_settings", stdout=subprocess.PIPE)[1].splitlines()[-1])

    def train(self, ranks, args):
        command = ["-m", "runtime.launch", "--standalone", f"--nproc_per_node={ranks}", TRAIN, *args]
        print(shlex.join([sys.executable, *command]))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # torchrun's own 1 starves an optimizer that is on the CPU
        self.env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        self.run(*command)


def run_headline(commands, ranks, args):
    """Data, checks, training and a sample, for GPT-2 XL or without a GPU for the demonstration."""
    gpus = commands.list_gpus()
    if gpus:
        ranks, ours = ranks or len(gpus), ["config/xl_shakespeare.py"]
        print(f"GPUs: {len(gpus)} ({', '.join(gpus)})")
    else:
        ranks, ours = ranks or 2, ["config/shakespeare_char_cpu.py", "--out_dir=out-demo"]
        print(f"No CUDA GPU: a small demonstration on CPU instead of GPT-2 XL, with {ranks} processes, in out-demo")
        commands.env["DS_ACCELERATOR"] = "cpu"
    settings = commands.read_settings([*ours, *args])  # later ones win
    # out-demo is the demonstration's own. A folder that the user names is never overwritten without their word.
    keeps = settings["init_from"] == "resume" or settings["eval_only"] or settings["dry_run"]
    if not gpus and settings["out_dir"] == "out-demo" and not keeps:
        print("out-demo is made anew")
        ours.append("--overwrite=True")
    data = Path("data", str(settings["dataset"]))
    if (data.parent == Path("data") and (data / "prepare.py").is_file()
            and not all((data / name).is_file() for name in ("train.bin", "val.bin", "meta.json"))):
        print(f"Preparing {data}")
        commands.run(data / "prepare.py")
    commands.run(TRAIN, *ours, *args, "--dry_run=True", WORLD_SIZE=str(ranks))
    if settings["dry_run"]:
        return
    commands.train(ranks, [*ours, *args])
    if settings["keep_last"] and not settings["eval_only"]:
        code, _ = commands.run("sample.py", f"--out_dir={settings['out_dir']}", "--num_samples=1",
                               "--max_new_tokens=200", check=False)
        if code:
            print(f"launch_deepspeed.py: training succeeded, but sampling failed (exit code {code})", file=sys.stderr)


def main():
    protect_output()
    sys.stdout.reconfigure(line_buffering=True)  # our lines come before those of the commands
    headline, ranks, args = parse_arguments()
    commands = Commands()
    try:
        if headline:
            os.chdir(ROOT)
            run_headline(commands, ranks, args)
        else:
            commands.read_settings(args)
            commands.train(ranks or len(commands.list_gpus()) or 1, args)
    finally:
        commands.end_stragglers()


if __name__ == "__main__":
    main()
