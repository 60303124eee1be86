"""torchrun with the run's own exit code: python -m runtime.launch --nproc_per_node=4 train_deepspeed.py ...

torchrun itself ends with 1 whatever its workers ended with, below a traceback of its own."""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(argv):
    """Run torchrun; the exit code of the rank that failed first, 128 + the signal's number for one that was killed."""
    try:
        main(argv)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        if code != 2:  # 2 is a refusal, which has told its reason
            print(f"rank {rank} ended with exit code {code}: its own words are above", file=sys.stderr)
        return code
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
