"""torchrun with the run's own exit code: python -m runtime.launch --nproc_per_node=4 train_deepspeed.py ...

torchrun itself ends with 1 whatever its workers ended with, below a traceback of its own; it kills them 30 s after a
signal, in the middle of a large save; SIGUSR1 it does not pass on at all; and SIGHUP ends it under nohup, too."""

import os
import signal
import sys

from runtime.output import protect_output

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C during the imports, without a traceback
SIGNALS = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, for the ranks too
    SIGNALS += ",SIGHUP"
for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "PET_SIGNALS_TO_HANDLE"):  # the second since PyTorch 2.13
    os.environ.setdefault(name, SIGNALS)

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

SAVE_TIMEOUT_S = 300  # for the ranks to save after a signal; when a rank has failed the others get torchrun's 30


def run(argv):
    """Run torchrun; return the exit code of the rank that failed first, 128 + the signal's number if it was killed."""
    protect_output()
    close, codes = PContext.close, []  # codes: of the ranks that were closed

    def close_with_save_timeout(self, death_sig=None, timeout=30):
        """PContext.close, which ends the ranks, with more time where a signal is the reason."""
        close(self, death_sig, SAVE_TIMEOUT_S if isinstance(sys.exception(), SignalException) else timeout)
        codes.extend(handler.proc.returncode for handler in getattr(self, "subprocess_handlers", {}).values())

    PContext.close = close_with_save_timeout
    try:
        main(argv)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        if code != 2:  # 2 is a mistake of the user's, which is printed already
            print(f"rank {rank} ended with exit code {code}: see its output above", file=sys.stderr)
        return code
    except SignalException as error:
        return 2 if 2 in codes else 128 + error.sigval  # 2: they could not save
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
