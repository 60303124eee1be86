"""Call a function in a process of its own, with limits of time and memory.

Chat templates of others are rendered so.
"""

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

MAX_SECONDS = 6  # of the clock
MAX_CPU_SECONDS = 5
MAX_MORE_BYTES = 1_000_000_000  # of memory, more than this process has
MAX_ANSWER_BYTES = 5_000_000
TOO_MUCH = "it takes too much time or memory"


def call_limited(function: Callable[[], Any]) -> Any:
    """Return what function() returns, which must be a value of JSON.

    It runs in a fork, so it may only do what needs no other thread: plain Python, and nothing on a
    GPU. Raises ValueError, with a reason, if it fails, or takes too much time or memory.
    """
    # If this is set, the tokenizers library prints no warning in a fork
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer_and_exit(function, writer)
    os.close(writer)
    try:
        answer = read_answer(reader)
    finally:
        # If the child has ended, it is there until waitpid()
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    # The system has ended a child that wrote nothing
    if not answer:
        raise ValueError(TOO_MUCH)
    answer = json.loads(answer)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def read_answer(reader: int) -> bytearray:
    """Return what the child has written when it ends. reader: the pipe.

    Raises ValueError if it takes too long or writes too much.
    """
    deadline = time.monotonic() + MAX_SECONDS
    answer = bytearray()
    while True:
        left = max(0, deadline - time.monotonic())
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            raise ValueError(TOO_MUCH)
        piece = os.read(reader, 2**20)
        if not piece:
            return answer
        answer += piece
        if len(answer) > MAX_ANSWER_BYTES:
            raise ValueError(f"its text has more than {MAX_ANSWER_BYTES:,} bytes")


def answer_and_exit(function: Callable[[], Any], writer: int) -> NoReturn:
    """Write the value or the error of function() as JSON, and exit, whatever happens."""
    try:
        limit_this_process()
        try:
            answer = {"value": function()}
        except MemoryError:
            answer = {"error": TOO_MUCH}
        except Exception as error:
            reason = " ".join(str(error).split())
            answer = {"error": f"{type(error).__name__}: {reason[:300]}"}
        with open(writer, "w", encoding="ascii") as file:
            json.dump(answer, file)
    finally:
        os._exit(0)


def limit_this_process() -> None:
    """Limit the time and the memory of this process, and write no core if it exceeds them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    # Not on macOS, where time is the only limit
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
