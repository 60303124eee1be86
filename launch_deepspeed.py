"""torchrun that no other user of the machine can reach, that exits with the run's exit code, forwards all signals, and
gives the ranks time to save.

    python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py
    python launch_deepspeed.py --nnodes=4 ...        any arguments of torchrun, with a script to start
    python launch_deepspeed.py --headline            what run_deepspeed_xl.sh runs after it has created .venv

At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, the run saves a checkpoint and exits. A second Ctrl-C kills it."""

import argparse
import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from configurator import settings_of_script
from runtime.files import OWN_DATASETS, ROOT
from runtime.output import exit_with_error, protect_output

TRAIN = str(ROOT / "train_deepspeed.py")
USAGE = "python launch_deepspeed.py [torchrun's options] SCRIPT [its options]"
EXAMPLE = "python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py"
SAVE_TIMEOUT_S = 300  # for the ranks to save after a signal; if a rank has failed, the others get torchrun's 30
WAIT_FOR_NODES_S = 900  # as torchrun waits for all nodes
DEFAULT_PORT = 29500  # torchrun's
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, by the ranks too
    SIGNALS.append(signal.SIGHUP)


def exit_on_signals():
    """Exit with one line and 128 + its number at a signal. subprocess.run() then kills the command
    that it waits for: a preparation or a sample."""

    def stop(number, _):
        print(f"stop requested ({signal.Signals(number).name})", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, stop)


def run_python(*arguments):
    """Run Python. Return its exit code."""
    # In its own process group, so that the terminal's Ctrl-C reaches it through us only
    code = subprocess.run([sys.executable, *arguments], stdin=subprocess.DEVNULL, process_group=0).returncode
    return code if code >= 0 else 128 - code


def count_gpus():
    """Return the number of GPUs that PyTorch finds. Exit if there are some that it can't use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch  # after that

    from runtime.gpu_problems import undetected_gpu

    if problem := undetected_gpu():
        exit_with_error(": ".join(problem))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_torchrun(argv):
    """Run torchrun. Return the exit code of the rank that failed first, or 128 + the signal that killed it. Plain
    torchrun exits with 1 and a traceback, whatever the ranks' exit code. It kills them 30 s after a signal, which may
    be in the middle of a save, doesn't forward SIGUSR1, and dies of SIGHUP even under nohup."""
    for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "PET_SIGNALS_TO_HANDLE"):  # the second in newer PyTorch
        os.environ.setdefault(name, ",".join(number.name for number in SIGNALS))
    from torch.distributed import DistError, run  # after that
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # a failure is reported in one line
    close, codes = PContext.close, []  # codes: exit codes of the closed ranks

    def close_with_save_timeout(self, death_sig=None, timeout=30):
        """PContext.close, which ends the ranks, but with more time after a signal. A second Ctrl-C kills them."""
        if isinstance(sys.exception(), SignalException):
            timeout = SAVE_TIMEOUT_S
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

            def kill_ranks(*_):  # without waiting for them: the interrupted code may hold Popen's lock
                for pid in self.pids().values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os._exit(130)

            signal.signal(signal.SIGINT, kill_ranks)
            print("Stopping: waiting for the ranks; training saves first (Ctrl-C again: kill them)", file=sys.stderr)
        close(self, death_sig, timeout)
        codes.extend(handler.proc.returncode for handler in getattr(self, "subprocess_handlers", {}).values())

    PContext.close = close_with_save_timeout
    for number in SIGNALS:  # Python's handlers don't run while PyTorch waits for other nodes. It sets its own later
        signal.signal(number, signal.SIG_DFL)
    try:
        args = parse_arguments(argv)
        nodes = check_arguments(args)
        if nodes > 1:
            print(f"node {args.node_rank} waits for all {nodes}, at {args.rdzv_endpoint or args.master_addr}")
        else:
            start_without_network(args)
        run.run(args)
    except (AssertionError, ValueError) as error:  # torchrun's checks of its arguments
        exit_with_error(f"torchrun can't use its arguments: {str(error) or 'check --nproc_per_node'}")
    except DistError as error:  # after 15 minutes
        exit_with_error(f"not all nodes joined ({str(error).splitlines()[0]}): check their --node_rank and "
                        "--master_addr, and that --master_port is free")
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: (item[1].exitcode > 0, item[1].timestamp))
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        if first.exitcode < 0:
            print(f"rank {rank} was killed by {first.signal_name()}", file=sys.stderr)
        elif code not in (2, 3, 4) and code < 128:  # these have already been explained
            print(f"rank {rank} failed with exit code {code}: see its error message above", file=sys.stderr)
        return code
    except SignalException as error:
        return 2 if 2 in codes else 128 + error.sigval  # 2: the checkpoint could not be saved
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Return torchrun's arguments. Exit with one line and code 2 if they can't be used, or name no script."""
    from torch.distributed import run

    parser = run.get_args_parser()
    parser.usage = USAGE
    parser.error = exit_with_usage  # instead of printing the usage of torchrun, which has 30 lines
    return parser.parse_args(argv)


def exit_with_usage(problem: str) -> NoReturn:
    """Exit with code 2 and what argparse says is wrong, or what to start if that is missing."""
    if "training_script" in problem:
        problem = "there is no script to start"
    exit_with_error(f"{problem}: run {USAGE}, such as {EXAMPLE}; --help lists the options")


def check_arguments(args):
    """Return the number of nodes of torchrun's arguments. Raises ValueError."""
    from torch.distributed import run

    _, nodes = run.parse_min_max_nnodes(args.nnodes)
    refuse_further_launchers(nodes)
    if nodes > 1:
        wait_for_host(args.master_addr)
    if args.node_rank not in range(nodes):
        raise ValueError(f"--node_rank={args.node_rank} must be 0 to {nodes - 1}")
    if os.path.dirname(os.path.realpath(args.training_script)) == str(ROOT / "config"):
        raise ValueError(f"{args.training_script} is a config: put train_deepspeed.py before it")
    return nodes


def wait_for_host(host: str) -> None:
    """Return when this machine can resolve the name of a host. Raise ValueError after 15 minutes.

    The name of another container or job may appear after this one has started.
    """
    deadline = time.monotonic() + WAIT_FOR_NODES_S
    is_reported = False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            why = error.strerror
        except UnicodeError:  # a part of the name is empty, or too long
            raise ValueError(f"--master_addr={host} is not the name of a host") from None
        if time.monotonic() > deadline:
            raise ValueError(f"--master_addr={host} can't be resolved ({why})")
        if not is_reported:
            print(f"waiting for --master_addr={host}, which can't be resolved ({why}): check its spelling, or give "
                  "the IP address of node 0", file=sys.stderr, flush=True)
            is_reported = True
        time.sleep(1)


def refuse_further_launchers(nodes: int) -> None:
    """Exit if srun or mpirun has started more than one of this launcher for each node.

    Each would be a run of its own, with a part of the batch.
    """
    # This import also sets RANK and the like, as for ranks of srun. torchrun sets them again
    from runtime.cluster.launchers import STARTED_BY, several_launchers

    if STARTED_BY is None:
        return
    count = os.environ[STARTED_BY.size]
    if int(count) > nodes:
        exit_with_error(several_launchers(STARTED_BY, count))


def start_without_network(args):
    """Change torchrun's arguments for one node, so that torchrun opens no port.

    Its own store listens on all network interfaces and asks nobody who he is. With --standalone, it
    also holds a pickle that torchrun loads, so any user of this machine could run code. The ranks
    meet in a file that only this user can open: see runtime/cluster/store.py.
    """
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class OneNode(RendezvousHandler):
        """A rendezvous of one torchrun: there is nobody to wait for."""

        use_agent_store = False  # the ranks have their own

        def __init__(self, parameters):
            self.run_id = parameters.run_id

        def next_rendezvous(self):
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

        def get_backend(self):
            return "one-node"

        def get_run_id(self):
            return self.run_id

        def is_closed(self):
            return False

        def set_closed(self):
            pass

        def num_nodes_waiting(self):
            return 0

        def shutdown(self):
            return True

    # MASTER_PORT, for scripts that open a store of their own
    chosen = args.master_port if args.master_port != DEFAULT_PORT else 0
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", chosen))
        except (OSError, OverflowError) as error:
            raise ValueError(f"--master_port={chosen} can't be used ({error})") from None
        port = probe.getsockname()[1]

    rendezvous_handler_registry.register("one-node", OneNode)
    args.standalone = False
    args.rdzv_backend = "one-node"


def train(ranks, script, args):
    """Run a training script in so many processes on this machine. Return its exit code."""
    arguments = [f"--nproc_per_node={ranks}", str(script), *args]
    print(shlex.join(["launch_deepspeed.py", *arguments]), flush=True)
    return run_torchrun(arguments)


def run_headline(args):
    """Prepare the data, train and sample: GPT-2 XL, or without a GPU a small character-level model."""
    refuse_further_launchers(nodes=1)
    gpus = count_gpus()
    on_cpu = not gpus and settings_of_script(TRAIN, args).target_gpu is None
    ranks = gpus or 1 + on_cpu
    config = ROOT / "config" / ("shakespeare_char_cpu.py" if on_cpu else "xl_shakespeare.py")
    ours = [os.path.relpath(config)]  # not one of that name in the working directory
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        if not any(argument.endswith(".py") for argument in args):
            ours.append("--out_dir=out-demo")
    settings = settings_of_script(TRAIN, [*ours, *args])  # later arguments win
    if on_cpu:
        print(f"No CUDA GPU (check: python doctor.py): {ranks} processes train a small model in {settings.out_dir}")
    if on_cpu and settings.out_dir == "out-demo" and settings.init_from not in ("resume", "auto"):
        ours.append("--overwrite=True")
    prepare_own_dataset(settings.dataset)
    earlier = checkpoint_times(settings.out_dir)
    if code := train(ranks, TRAIN, [*ours, *args]):
        raise SystemExit(code)
    exit_on_signals()  # torchrun has replaced the handlers
    if settings.eval_only or settings.dry_run:
        return
    found = checkpoint_times(settings.out_dir)
    if not found.items() - earlier.items():
        print_no_sample(settings.out_dir, bool(found))
        return
    run_python(ROOT / "sample.py", f"--out_dir={settings.out_dir}", "--num_samples=1", "--max_new_tokens=200")
    print_next_commands(ranks, [ours[0], *(arg for arg in args if arg.endswith(".py"))], on_cpu)


def checkpoint_times(out_dir: str) -> dict[str, int]:
    """Return {tag: when it was saved, in ns} of the checkpoints in a folder, which may be missing."""
    manifests = Path(out_dir).glob("iter_*/manifest.json")
    return {manifest.parent.name: os.lstat(manifest).st_mtime_ns for manifest in manifests}


def print_no_sample(out_dir: str, has_checkpoints: bool) -> None:
    """Say why there is no sample after a run that has saved nothing: it was stopped at its start, or had no steps left.

    has_checkpoints: whether earlier runs have left some in out_dir.
    """
    print("no checkpoint was saved in this run, so there is no sample of it")
    if has_checkpoints:
        sample = shlex.join([shown(sys.executable), shown(ROOT / "sample.py"), f"--out_dir={out_dir}"])
        print(f"{out_dir} has checkpoints from before: {sample}")


def shown(path: str | os.PathLike) -> str:
    """Return the shorter way to write a path: from the working directory, or as it is."""
    return min(str(path), os.path.relpath(path), key=len)


def prepare_own_dataset(name):
    """Run the prepare.py of a dataset that this project brings. Those of other folders are code of others."""
    folder = ROOT / "data" / str(name)
    if name in OWN_DATASETS and not (folder / "train.bin").exists():
        print(f"Preparing {name}")
        if code := run_python(folder / "prepare.py"):
            raise SystemExit(code)


def print_next_commands(ranks, configs, on_cpu):
    """Print the commands that train with these configs on the user's own text."""
    python = shlex.quote(shown(sys.executable))
    prepare = shlex.quote(shown(ROOT / "data" / "prepare.py"))
    launch = shlex.quote(shown(ROOT / "launch_deepspeed.py"))
    script = shlex.quote(shown(TRAIN))
    sample = shlex.quote(shown(ROOT / "sample.py"))
    epochs = [] if on_cpu else ["--max_epochs=3", "--eval_epochs=1"]
    options = shlex.join([*configs, "--dataset=mine", "--out_dir=out-mine", *epochs])
    print("To train on your own text, a file or folder MY_TEXT, and sample:")
    print(f"  {python} {prepare} MY_TEXT --name=mine{' --tokenizer=char' * on_cpu}")
    print(f"  {python} {launch} --nproc_per_node={ranks} {script} {options}")
    print(f"  {python} {sample} --out_dir=out-mine")


def main():
    protect_output()
    sys.stdout.reconfigure(line_buffering=True)  # print lines before the commands do
    exit_on_signals()
    if sys.argv[1:2] == ["--headline"]:
        run_headline(sys.argv[2:])
    else:
        raise SystemExit(run_torchrun(sys.argv[1:]))


if __name__ == "__main__":
    main()
