"""Start training from Python, for those without bash.

    python launch_deepspeed.py config/xl_shakespeare.py --num_gpus=4 --bf16 --batch_size=8 --epochs=3
    python launch_deepspeed.py config/shakespeare_char_cpu.py --num_gpus=2 --max_iters=100 --resume

What is not named here goes to train_deepspeed.py as it stands: a configuration, --key=value. The ranks are started by
runtime/launch.py, which is torchrun, as the deepspeed command leaves its ranks behind when it is stopped. SIGTERM,
SIGUSR1, SIGHUP and Ctrl-C are passed on: the run saves and ends. A second Ctrl-C ends it at once. The exit code is the
run's.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys

from configurator import settings_of_script
from runtime.output import protect_output

protect_output()
ROOT = os.path.dirname(os.path.abspath(__file__))
TRAIN = os.path.join(ROOT, "train_deepspeed.py")


def fail(sentence):
    print(f"launch_deepspeed.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                 description=__doc__, usage="%(prog)s [CONFIG.py] [options] [--key=value ...]")
parser.error = fail
parser.add_argument("--num_gpus", type=int, help="ranks, one a GPU; on a machine without GPUs, processes "
                    "(default: all visible GPUs, or 1)")
precision = parser.add_mutually_exclusive_group()
precision.add_argument("--fp16", dest="dtype", action="store_const", const="float16", help="--dtype=float16")
precision.add_argument("--bf16", dest="dtype", action="store_const", const="bfloat16", help="--dtype=bfloat16")
zero = parser.add_mutually_exclusive_group()
zero.add_argument("--config", dest="deepspeed_config", metavar="DS_JSON", help="--deepspeed_config=DS_JSON")
zero.add_argument("--offload_optimizer", dest="deepspeed_config", action="store_const",
                  const="config/ds/zero2_offload.json", help="--deepspeed_config=config/ds/zero2_offload.json")
parser.add_argument("--batch_size", help="sequences in a micro-step of one GPU, or auto")
parser.add_argument("--gradient_accumulation_steps", help="micro-steps a GPU and iteration")
parser.add_argument("--epochs", dest="max_epochs", help="passes over the data: --max_epochs=EPOCHS")
parser.add_argument("--learning_rate", help="the highest")
parser.add_argument("--resume", dest="init_from", action="store_const", const="resume", help="--init_from=resume")
named, args = parser.parse_known_args()

ranks = vars(named).pop("num_gpus")
args += [f"--{name}={value}" for name, value in vars(named).items() if value is not None]
settings_of_script(TRAIN, args)  # refuses what the training script would, before the ranks are there
if ranks is None:
    import torch

    ranks = torch.cuda.device_count() or 1
if ranks < 1:
    fail(f"--num_gpus={ranks} must be at least 1")

command = [sys.executable, "-m", "runtime.launch", "--standalone", f"--nproc_per_node={ranks}", TRAIN, *args]
print(shlex.join(command), flush=True)
threads = str(max(1, (os.cpu_count() or 1) // ranks))  # torchrun's own 1 starves an optimizer that is on the CPU
env = {"OMP_NUM_THREADS": threads, **os.environ,
       "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
job, told = None, []


def pass_on(number, _):
    told.append(number)
    if told[1:] and number == signal.SIGINT:
        import psutil

        for process in [*psutil.Process(job.pid).children(recursive=True), job]:
            process.kill()
    elif job and not told[1:]:  # one is enough: at a second one torchrun would leave its ranks
        job.send_signal(number)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
        signal.signal(number, pass_on)
job = subprocess.Popen(command, env=env, start_new_session=True)  # the terminal's Ctrl-C comes through us alone, once
if told:
    job.send_signal(told[0])
code = job.wait()
raise SystemExit(130 if signal.SIGINT in told[1:] else code if code >= 0 else 128 - code)
