"""torchrun that no other user of the machine can reach, that exits with the run's exit code,
forwards all signals, and gives the ranks time to save.

    python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py
    python launch_deepspeed.py --nnodes=4 ...    any arguments of torchrun, with a script to start
    python launch_deepspeed.py --headline        what run_deepspeed_xl.sh runs, once .venv is there

At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, the run saves a checkpoint and exits. A second Ctrl-C kills
it."""

import argparse
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from configurator import settings_of_script

# This also sets RANK and the like, as for ranks of srun. torchrun sets them again
from runtime.cluster import launchers
from runtime.cluster.rendezvous import start_without_network, wait_for_host
from runtime.files import OWN_DATASETS, ROOT
from runtime.output import exit_with_error, protect_output
from runtime.version import version_line

TRAIN = str(ROOT / "train_deepspeed.py")
USAGE = "python launch_deepspeed.py [torchrun's options] SCRIPT [its options]"
EXAMPLE = (
    "python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py"
)
# For the ranks to save after a signal. If a rank has failed, the others get torchrun's 30
SAVE_TIMEOUT_S = 300
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, by the ranks too
    SIGNALS.append(signal.SIGHUP)
# Exit codes of ranks that have explained themselves: a mistake of the user, skipped steps, norms
EXPLAINED_CODES = (2, 3, 4)


def main() -> None:
    protect_output()
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=True)  # print lines before the commands do
    exit_on_signals()
    if sys.argv[1:2] == ["--headline"]:
        run_headline(sys.argv[2:])
    else:
        raise SystemExit(run_torchrun(sys.argv[1:]))


# -----------------------------------------------------------------------------
# torchrun


def run_torchrun(argv: list[str]) -> int:
    """Run torchrun. Return the exit code of the rank that failed first.

    It is 128 + the signal's number if a signal killed the rank. Plain torchrun exits with 1 and a
    traceback, whatever the ranks' exit code. It kills them 30 s after a signal, which may be in the
    middle of a save, doesn't forward SIGUSR1, and dies of SIGHUP even under nohup.
    """
    # Before torch is imported. The second is its name in newer PyTorch
    names = ",".join(number.name for number in SIGNALS)
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", names)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", names)
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # a failure is reported in one line
    codes = give_time_to_save()

    # Python's handlers don't run while PyTorch waits for other nodes. It sets its own later
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        args = parse_arguments(argv)
        nodes = check_arguments(args)
        if nodes > 1:
            address = args.rdzv_endpoint or args.master_addr
            print(f"node {args.node_rank} waits for all {nodes}, at {address}")
        else:
            start_without_network(args)
        run.run(args)
    except (AssertionError, ValueError) as error:  # torchrun's checks of its arguments
        problem = str(error) or "check --nproc_per_node"
        exit_with_error(f"torchrun can't use its arguments: {problem}")
    except DistError as error:  # after 15 minutes
        exit_with_error(
            f"not all nodes joined ({str(error).splitlines()[0]}): check their --node_rank and "
            "--master_addr, and that --master_port is free"
        )
    except ChildFailedError as error:
        return code_of_failure(error)
    except SignalException as error:
        if 2 in codes:  # the checkpoint could not be saved
            return 2
        return 128 + error.sigval
    return 0


def give_time_to_save() -> list[int]:
    """Have torchrun wait longer for its ranks after a signal. A second Ctrl-C kills them.

    Return a list, to which the exit codes of the ranks are added when they have ended.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    close = PContext.close
    codes = []

    def close_with_save_timeout(
        self: Any, death_sig: signal.Signals | None = None, timeout: int = 30
    ) -> None:
        """PContext.close, which ends the ranks."""
        # After a signal, and not after a rank's failure. From now on only Ctrl-C counts
        if isinstance(sys.exception(), SignalException):
            timeout = SAVE_TIMEOUT_S
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda *_: kill_ranks([*self.pids().values()]))
            print(
                "Stopping: waiting for the ranks; training saves first (Ctrl-C again: kill them)",
                file=sys.stderr,
            )
        close(self, death_sig, timeout)
        for handler in getattr(self, "subprocess_handlers", {}).values():
            codes.append(handler.proc.returncode)

    context: Any = PContext
    context.close = close_with_save_timeout
    return codes


def kill_ranks(pids: list[int]) -> NoReturn:
    """Kill the ranks and exit, without waiting: the interrupted code may hold Popen's lock."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(130)


def code_of_failure(error: Any) -> int:
    """Return the exit code of the rank that failed first, of a ChildFailedError.

    Print a line, unless the rank has explained itself.
    """

    def order(item: tuple[int, Any]) -> tuple[int, float]:
        failure = item[1]
        if failure.exitcode == -signal.SIGTERM:  # torchrun has ended it after another one's failure
            return 2, failure.timestamp
        if failure.exitcode > 0:
            return 1, failure.timestamp
        return 0, failure.timestamp  # a rank that was killed has made the others fail

    rank, first = min(error.failures.items(), key=order)

    # A signal ends it before it could explain anything
    if first.exitcode < 0:
        print(f"rank {rank} was killed by {first.signal_name()}", file=sys.stderr)
        return 128 - first.exitcode

    # Ranks that have not explained themselves have printed a traceback
    code = first.exitcode
    if code not in EXPLAINED_CODES and code < 128:
        print(
            f"rank {rank} failed with exit code {code}: see its error message above",
            file=sys.stderr,
        )
    return code


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return torchrun's arguments.

    Exit with one line and code 2 if they can't be used, or name no script.
    """
    from torch.distributed import run

    parser: Any = run.get_args_parser()
    parser.usage = USAGE
    parser.add_argument("--version", action="version", version=version_line())
    parser.error = exit_with_usage  # instead of printing the usage of torchrun, which has 30 lines
    return parser.parse_args(argv)


def exit_with_usage(problem: str) -> NoReturn:
    """Exit with code 2 and what argparse says is wrong, or what to start if that is missing."""
    if "training_script" in problem:
        problem = "there is no script to start"
    exit_with_error(f"{problem}: run {USAGE}, such as {EXAMPLE}; --help lists the options")


def check_arguments(args: argparse.Namespace) -> int:
    """Return the number of nodes of torchrun's arguments. Raises ValueError."""
    # How many nodes there are says which of the other arguments count
    from torch.distributed import run

    _, nodes = run.parse_min_max_nnodes(args.nnodes)
    refuse_further_launchers(nodes)
    if nodes > 1:
        wait_for_host(args.master_addr)
    if args.node_rank not in range(nodes):
        raise ValueError(f"--node_rank={args.node_rank} must be 0 to {nodes - 1}")
    # A usual slip: the config is an argument of the script
    folder = os.path.dirname(os.path.realpath(args.training_script))
    if folder == str(ROOT / "config"):
        raise ValueError(f"{args.training_script} is a config: put train_deepspeed.py before it")
    return nodes


def refuse_further_launchers(nodes: int) -> None:
    """Exit if srun or mpirun has started more than one of this launcher for each node.

    Each would be a run of its own, with a part of the batch.
    """
    # Under srun, one launcher for each node is right, and more are not
    launcher = launchers.STARTED_BY
    if launcher is None:
        return
    count = os.environ[launcher.size]
    if int(count) > nodes:
        exit_with_error(launchers.several_launchers(launcher, count))


# -----------------------------------------------------------------------------
# The headline: prepare, train and sample


def run_headline(args: list[str]) -> None:
    """Prepare the data, train and sample: GPT-2 XL, or without a GPU a small character-level model.

    args: a config and settings of train_deepspeed.py.
    """
    refuse_further_launchers(nodes=1)

    # What it trains. With --target_gpu, it is planned for a card that isn't here
    gpus = count_gpus()
    on_cpu = not gpus and settings_of_script(TRAIN, args).target_gpu is None
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        ranks = 2
        config = ROOT / "config" / "shakespeare_char_cpu.py"
    else:
        ranks = gpus or 1
        config = ROOT / "config" / "xl_shakespeare.py"

    # By its path, the config is ours, and not one of that name in the working directory. What the
    # user has given comes later, and wins
    ours = [os.path.relpath(config)]
    configs = [arg for arg in args if arg.endswith(".py")]
    if on_cpu and not configs:
        ours.append("--out_dir=out-demo")
    settings = settings_of_script(TRAIN, [*ours, *args])
    if on_cpu:
        print(
            f"No CUDA GPU (check: python doctor.py): {ranks} processes train a small model in "
            f"{settings.out_dir}"
        )
    is_demo = on_cpu and settings.out_dir == "out-demo"
    if is_demo and settings.init_from not in ("resume", "auto"):
        ours.append("--overwrite=True")
    prepare_own_dataset(settings.dataset)

    # Train
    earlier = checkpoint_times(settings.out_dir)
    code = train(ranks, TRAIN, [*ours, *args])
    if code:
        raise SystemExit(code)
    exit_on_signals()  # torchrun has replaced the handlers
    if settings.eval_only or settings.dry_run:
        return

    # A run that was stopped at its start has saved nothing, and an earlier one's may be there
    found = checkpoint_times(settings.out_dir)
    if not found.items() - earlier.items():
        print_no_sample(settings.out_dir, bool(found))
        return

    # Sample
    run_python(
        ROOT / "sample.py",
        f"--out_dir={settings.out_dir}",
        "--num_samples=1",
        "--max_new_tokens=200",
    )
    print_next_commands(ranks, [ours[0], *configs], on_cpu)


def exit_on_signals() -> None:
    """Exit with one line and 128 + its number at a signal.

    subprocess.run() then kills the command that it waits for: a preparation or a sample.
    """

    def stop(number: int, _: object) -> NoReturn:
        print(f"stop requested ({signal.Signals(number).name})", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, stop)


def run_python(*arguments: str | os.PathLike) -> int:
    """Run Python. Return its exit code."""
    # In its own process group, so that the terminal's Ctrl-C reaches it through us only
    done = subprocess.run(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, process_group=0
    )
    if done.returncode < 0:  # a signal
        return 128 - done.returncode
    return done.returncode


def count_gpus() -> int:
    """Return the number of GPUs that PyTorch finds. Exit if there are some that it can't use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch  # after that

    from runtime.gpu_problems import undetected_gpu

    # A GPU that is there but can't be used is an error, and no reason to train on the CPU
    problem = undetected_gpu()
    if problem:
        exit_with_error(": ".join(problem))
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def train(ranks: int, script: str | os.PathLike, args: list[str]) -> int:
    """Run a training script in so many processes on this machine. Return its exit code."""
    arguments = [f"--nproc_per_node={ranks}", str(script), *args]
    print(shlex.join(["launch_deepspeed.py", *arguments]), flush=True)
    return run_torchrun(arguments)


def prepare_own_dataset(name: str | dict) -> None:
    """Run the prepare.py of a dataset that this project brings, if it has not run yet.

    Those of other folders are code of others.
    """
    # Only a missing dataset is made, so that a repeated start is fast
    folder = ROOT / "data" / str(name)
    if name not in OWN_DATASETS or (folder / "train.bin").exists():
        return
    print(f"Preparing {name}")
    code = run_python(folder / "prepare.py")
    if code:
        raise SystemExit(code)


def checkpoint_times(out_dir: str) -> dict[str, int]:
    """Return {tag: when it was saved, in ns} of the checkpoints in a folder, if it is there."""
    manifests = Path(out_dir).glob("iter_*/manifest.json")
    return {manifest.parent.name: os.lstat(manifest).st_mtime_ns for manifest in manifests}


def print_no_sample(out_dir: str, has_checkpoints: bool) -> None:
    """Say that there is no sample, after a run that has saved nothing.

    It was stopped at its start, or had no steps left. has_checkpoints: whether earlier runs have
    left some in out_dir.
    """
    print("no checkpoint was saved in this run, so there is no sample of it")
    if has_checkpoints:
        sample = [shown(sys.executable), shown(ROOT / "sample.py"), f"--out_dir={out_dir}"]
        print(f"{out_dir} has checkpoints from before: {shlex.join(sample)}")


def print_next_commands(ranks: int, configs: list[str], on_cpu: bool) -> None:
    """Print the commands that train with these configs on the user's own text."""
    # So that they can be pasted into the shell where this was started
    python = shlex.quote(shown(sys.executable))
    prepare = shlex.quote(shown(ROOT / "data" / "prepare.py"))
    launch = shlex.quote(shown(ROOT / "launch_deepspeed.py"))
    script = shlex.quote(shown(TRAIN))
    sample = shlex.quote(shown(ROOT / "sample.py"))

    # On a CPU, the demo's own length and characters as tokens. On GPUs, three epochs of any text
    options = [*configs, "--dataset=mine", "--out_dir=out-mine"]
    tokenizer = ""
    if on_cpu:
        tokenizer = " --tokenizer=char"
    else:
        options += ["--max_epochs=3", "--eval_epochs=1"]

    print("To train on your own text, a file or folder MY_TEXT, and sample:")
    print(f"  {python} {prepare} MY_TEXT --name=mine{tokenizer}")
    print(f"  {python} {launch} --nproc_per_node={ranks} {script} {shlex.join(options)}")
    print(f"  {python} {sample} --out_dir=out-mine")


def shown(path: str | os.PathLike) -> str:
    """Return the shorter way to write a path: from the working directory, or as it is."""
    return min(str(path), os.path.relpath(path), key=len)


if __name__ == "__main__":
    main()
