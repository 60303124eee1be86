"""torchrun with the run's own exit code: python -m runtime.launch --nproc_per_node=4 train_deepspeed.py ...

torchrun itself ends with 1 whatever its workers ended with, below a traceback of its own; it kills them 30 s after a
signal, in the middle of a large save; SIGUSR1 it does not pass on at all; and SIGHUP ends it under nohup, too."""

import os
import signal
import sys

from runtime.output import protect_output

SIGNALS = ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, for the ranks too
    SIGNALS.append("SIGHUP")
for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "PET_SIGNALS_TO_HANDLE"):  # the second since PyTorch 2.13
    os.environ.setdefault(name, ",".join(SIGNALS))

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

PATIENCE = 300  # seconds that the ranks get to save after a signal; for a rank that failed torchrun's 30 stay
close = PContext.close


def patient_close(self, death_sig=None, timeout=30):
    """PContext.close, which ends the ranks, with more time where a signal is the reason."""
    close(self, death_sig, PATIENCE if isinstance(sys.exception(), SignalException) else timeout)
    codes.extend(handler.proc.returncode for handler in getattr(self, "subprocess_handlers", {}).values())


PContext.close = patient_close
codes = []  # of the ranks that were closed


def run(argv):
    """Run torchrun; the exit code of the rank that failed first, 128 + the signal's number for one that was killed."""
    protect_output()
    try:
        main(argv)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        if code != 2:  # 2 is a refusal, which has told its reason
            print(f"rank {rank} ended with exit code {code}: its own words are above", file=sys.stderr)
        return code
    except SignalException as error:
        return 2 if 2 in codes else 128 + error.sigval  # 2: told to stop, they could not save
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
