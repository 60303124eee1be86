"""Worker processes that are handed work and give it back in order."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from runtime.data.dataset import DatasetError

AHEAD = 2  # tasks a worker under way or waiting: more would fill the memory


@contextlib.contextmanager
def pool_of(workers, begin, *args):
    """A pool of processes, in each of which begin(*args) is called first."""
    # Forked, they share with us what is loaded already. Elsewhere than on Linux, that is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, begin_worker, (os.getpid(), begin, args))
    pool.submit(int)  # forks them all, now that this process has no other threads
    try:
        yield pool
    except BrokenProcessPool:
        raise DatasetError("a worker process was killed, perhaps for lack of memory: the same command goes on; with "
                           "--workers=N it has fewer of them") from None
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker(parent, begin, args):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    begin(*args)


def end_with(parent):
    """A worker whose parent is killed would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def in_order(pool, tasks):
    """(what, result) for each (what, (function, *arguments)) of `tasks`, in their order. Without a function, the result
    is None."""
    waiting, ahead = deque(), AHEAD * pool._max_workers
    for what, task in tasks:
        waiting.append((what, pool.submit(*task) if task else None))
        while len(waiting) > ahead:
            what, future = waiting.popleft()
            yield what, future.result() if future else None
    while waiting:
        what, future = waiting.popleft()
        yield what, future.result() if future else None
