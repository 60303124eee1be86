"""Start training from Python: detect the GPUs, start one rank per GPU, forward signals and return the run's exit code.

    python launch_deepspeed.py config/xl_shakespeare.py --num_gpus=4 --batch_size=8 --max_epochs=3
    python launch_deepspeed.py config/shakespeare_char_cpu.py --num_gpus=2 --max_iters=100 --resume
    python launch_deepspeed.py --headline                what run_deepspeed_xl.sh runs after it has created .venv

All other arguments (a config file, --key=value) go to train_deepspeed.py. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C are
forwarded: the run saves a checkpoint and exits. A second Ctrl-C kills it. The ranks are started
by runtime/launch.py, a wrapper of torchrun: stopping the deepspeed command can leave ranks running.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from runtime.output import exit_with_error, protect_output

ROOT = os.path.dirname(os.path.abspath(__file__))
TRAIN = os.path.join(ROOT, "train_deepspeed.py")
STOP_TIMEOUT_S = 315  # runtime/launch.py kills the ranks 300 s after a signal

# Runs in its own process, because CUDA keeps memory on each GPU that a process looks at
LIST_GPUS = """
import json, torch
from runtime.hardware import run_command, unsupported_gpu
try:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    why = f"torch {torch.__version__} finds no CUDA device"
except Exception as error:  # the driver is too old for this PyTorch: devices are counted, but can't be used
    gpus, why = [], str(error).splitlines()[0]
problem = None
if not gpus and run_command("nvidia-smi", "-L").startswith("GPU "):
    problem = unsupported_gpu() or (why, "update the driver or install a PyTorch built for it")
print(json.dumps([[f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus], problem]))
"""


def fail(message):
    exit_with_error(f"launch_deepspeed.py: {message}")


def parse_arguments():
    """Return (--headline, --num_gpus, the arguments of train_deepspeed.py)."""
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__, usage="%(prog)s [CONFIG.py] [options] [--key=value ...]")
    parser.error = fail
    parser.add_argument("--headline", action="store_true", help="prepare the data, check the run, train and sample: "
                        "GPT-2 XL on Shakespeare, or without a GPU a small character-level model")
    parser.add_argument("--num_gpus", type=int, help="number of GPUs, or of CPU processes without a GPU (default: "
                        "all visible GPUs, or 1)")
    parser.add_argument("--resume", nargs="?", const="latest", metavar="TAG", help="resume the run in out_dir, or the "
                        "checkpoint of this name (iter_10) or path (out-mine/iter_10)")
    named, args = parser.parse_known_args()
    if named.num_gpus is not None and named.num_gpus < 1:
        fail(f"--num_gpus={named.num_gpus} must be at least 1")
    if named.resume:
        out_dir, tag = os.path.split(os.path.normpath(named.resume))
        args += ["--init_from=resume", f"--resume_tag={tag}", *[f"--out_dir={out_dir}"] * bool(out_dir)]
    return named.headline, named.num_gpus, args


class Commands:
    """Runs commands one after another. A signal stops the current command and then this program."""

    stopping = "the run finishes its step, saves and exits"

    def __init__(self):
        self.process = self.stopped_by = None  # the current command; the first signal
        self.env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self.on_signal)
        signal.signal(signal.SIGALRM, lambda *_: self.kill())

    def run(self, *arguments, stdout=None, check=True, **env):
        """Run Python with these arguments. Return (exit code, output if stdout is a pipe). check: exit if it fails."""
        # In its own session, so that the terminal's Ctrl-C reaches it through us only, once
        self.process = subprocess.Popen([sys.executable, *arguments], env=self.env | env, text=True, stdout=stdout,
                                        stdin=subprocess.DEVNULL, start_new_session=True)
        self.forward()  # a signal that came just before
        printed, code = self.process.communicate()[0], self.process.returncode
        code = code if code >= 0 else 128 - code
        if self.stopped_by and not 1 < code < 128:  # 2 stays: the checkpoint could not be saved
            code = 128 + self.stopped_by
        if self.stopped_by or (code and check):
            raise SystemExit(code)
        return code, printed

    def on_signal(self, number, _):
        """Forward the first signal only: at a second one, torchrun would leave its ranks behind."""
        if not self.stopped_by:
            self.stopped_by = number
            signal.alarm(STOP_TIMEOUT_S)
            print(f"Stopping: {self.stopping} (Ctrl-C again: kill it)", file=sys.stderr)
            self.forward()
        elif number == signal.SIGINT:
            self.kill()

    def forward(self):
        """Send the signal to the session of the current command. Torchrun's ranks have sessions of their own."""
        if self.process and self.stopped_by:
            training = "runtime.launch" in self.process.args
            with contextlib.suppress(ProcessLookupError):  # others would print a traceback at SIGINT
                os.killpg(self.process.pid, self.stopped_by if training else signal.SIGTERM)

    def kill(self):
        """Kill the current command and all processes below it."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for one in [*process.children(recursive=True), process]:
                one.kill()

    def list_gpus(self):
        """Return a description of each visible GPU."""
        if os.environ.get("DS_ACCELERATOR") == "cpu":
            self.env["CUDA_VISIBLE_DEVICES"] = ""
        gpus, problem = json.loads(self.run("-W", "ignore", "-c", LIST_GPUS, stdout=subprocess.PIPE)[1])
        if problem and self.env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            fail(f"nvidia-smi lists GPUs, but {': '.join(problem)}, check CUDA_VISIBLE_DEVICES, or run on CPU with "
                 "DS_ACCELERATOR=cpu")
        return gpus

    def read_settings(self, args):
        """Return train_deepspeed.py's settings for these arguments, or exit with code 2 if they are wrong."""
        return json.loads(self.run(TRAIN, *args, "--print_settings", stdout=subprocess.PIPE)[1].splitlines()[-1])

    def train(self, ranks, args, script=TRAIN):
        command = ["-m", "runtime.launch", "--standalone", f"--nproc_per_node={ranks}", script, *args]
        print(shlex.join([sys.executable, *command]))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))  # torchrun's 1 is slow for CPU offload
        self.run(*command)


def run_headline(commands, ranks, args):
    """Prepare the data, check the run, train and sample: GPT-2 XL, or without a GPU a small character-level model."""
    if gpus := commands.list_gpus():
        ranks, ours = ranks or len(gpus), ["config/xl_shakespeare.py"]
        print(f"{len(gpus)} GPUs: {'; '.join(gpus)}")
    else:
        ranks, ours = ranks or 2, ["config/shakespeare_char_cpu.py", "--out_dir=out-demo"]
        print(f"No CUDA GPU: training a small character-level model on {ranks} CPU processes instead, in out-demo")
        commands.env["DS_ACCELERATOR"] = "cpu"
    settings = commands.read_settings([*ours, *args])  # later arguments win
    keeps = settings["init_from"] == "resume" or settings["eval_only"] or settings["dry_run"]
    if not gpus and settings["out_dir"] == "out-demo" and not keeps:  # never a folder that the user named
        print("Overwriting out-demo")
        ours.append("--overwrite=True")
    data = Path("data", str(settings["dataset"]))
    if data.parent == Path("data") and (data / "prepare.py").is_file() and not (data / "meta.json").is_file():
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
    sys.stdout.reconfigure(line_buffering=True)  # print before the commands do
    headline, ranks, args = parse_arguments()
    commands = Commands()
    if headline:
        os.chdir(ROOT)
        run_headline(commands, ranks, args)
    else:
        commands.read_settings(args)
        commands.train(ranks or len(commands.list_gpus()) or 1, args)


if __name__ == "__main__":
    main()
