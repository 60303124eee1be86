"""torchrun with the run's own exit code: python -m runtime.launch --nproc_per_node=4 train_deepspeed.py ...

Plain torchrun exits with 1 and a traceback, whatever the ranks' exit code. It kills them 30 s after a signal, which may
be in the middle of a save, doesn't forward SIGUSR1, and dies of SIGHUP even under nohup."""

import logging
import os
import signal
import sys

from runtime.output import protect_output

SIGNALS = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup, the ranks ignore it too
    SIGNALS += ",SIGHUP"
for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "PET_SIGNALS_TO_HANDLE"):  # the second one since PyTorch 2.13
    os.environ.setdefault(name, SIGNALS)

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

SAVE_TIMEOUT_S = 300  # for the ranks to save after a signal; if a rank has failed, the others get torchrun's 30


def run(argv):
    """Run torchrun. Return the exit code of the rank that failed first, or 128 + the signal that killed it."""
    protect_output()
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.multiprocessing.errors"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # run() reports a failure in one line
    close, codes = PContext.close, []  # codes: exit codes of the closed ranks

    def close_with_save_timeout(self, death_sig=None, timeout=30):
        """PContext.close, which ends the ranks, but with more time after a signal. A second Ctrl-C kills them."""
        if isinstance(sys.exception(), SignalException):
            timeout = SAVE_TIMEOUT_S
            for name in SIGNALS.split(","):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda *_: close(self, signal.SIGKILL) or os._exit(130))
            print("Stopping: waiting for the ranks; training saves first (Ctrl-C again: kill them)", file=sys.stderr)
        close(self, death_sig, timeout)
        codes.extend(handler.proc.returncode for handler in getattr(self, "subprocess_handlers", {}).values())

    PContext.close = close_with_save_timeout
    try:
        main(argv)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        if code != 2:  # 2 is a user error, already printed
            print(f"rank {rank} failed with exit code {code}: see its error message above", file=sys.stderr)
        return code
    except SignalException as error:
        return 2 if 2 in codes else 128 + error.sigval  # 2: the checkpoint could not be saved
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
