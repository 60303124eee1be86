"""A process that has imported torch and DeepSpeed, and forks for each run of a script: python fork_server.py SOCKET

The imports take 5 s per process, and the runs of most tests less than one. A forked rank is a real process: it has its
own session, environment, folder, standard streams and signals, and gloo connects it with the other ranks. The server
imports no module of the project and starts no thread, so that a rank begins as with `python script.py`. Tests of
launchers don't use it. The server ends when its standard input does.

A client connects to the Unix socket SOCKET and sends one line of JSON: argv (the script first), env, cwd, stdout and
stderr (files), ranks, port. It receives a line with the process ids of the ranks at once, and the exit code at the end:
of the rank that failed first, or 0; negative for a signal. If the client shuts the connection down before, the ranks
are killed."""

import atexit
import contextlib
import gc
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time

import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # initialize() imports it, and with it the next two
import numpy  # noqa: F401
import psutil  # noqa: F401
import safetensors.torch  # noqa: F401
import torch._dynamo  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401
import torch.utils.data  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
import transformers.models.resnet.modeling_resnet  # noqa: F401

PATIENCE = 30  # seconds between SIGTERM and SIGKILL for the ranks that are left when one has failed


def become_rank(request, rank):
    """Give this process the environment, folder, streams and arguments of a rank."""
    os.setsid()
    for number, handler in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL),
                            (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    random.seed()
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(request["env"])
    if request["ranks"] > 1:
        ranks = str(request["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
    os.chdir(request["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_RDWR | os.O_APPEND | os.O_CREAT), fd)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))


def wait_for(ranks, connection):
    """Wait for the ranks with these process ids -> the exit code of the one that failed first, or 0. If one fails,
    end the others; if the client has gone, all."""
    code, kill_at = 0, None
    while ranks:
        if select.select([connection], [], [], 0.01)[0] and not connection.recv(1):
            kill_at = 0.0
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
                code = code or os.waitstatus_to_exitcode(status)
        if code and kill_at is None:
            kill_at = time.monotonic() + PATIENCE
            for pid in ranks:
                os.kill(pid, signal.SIGTERM)
        if kill_at is not None and time.monotonic() > kill_at:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):  # it has not called setsid yet, and gets the next one
                    os.killpg(pid, signal.SIGKILL)  # with its children
    return code


def serve_one(connection):
    """Fork the ranks that the client asks for and report how they ended -> True in the ranks, once they are ready."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, ranks = json.loads(connection.makefile().readline()), []
    for rank in range(request["ranks"]):
        ranks.append(os.fork())
        if not ranks[-1]:
            connection.close()
            become_rank(request, rank)
            return True
    try:
        connection.sendall(json.dumps(ranks).encode() + b"\n")
        connection.sendall(b"%d" % wait_for(ranks, connection))
    finally:
        os._exit(0)


def serve(path):
    """Accept clients until standard input ends. Returns in the forked ranks alone, and there with True."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that serve one client
    hasattr(deepspeed.ops, "__compatible_ops__")  # looks for a compiler, which else each initialize() does
    gc.freeze()  # else the garbage collector of each rank writes to, and so copies, the memory of all imports
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(16)
        while sys.stdin not in (ready := select.select([server, sys.stdin], [], [])[0]):
            connection, _ = ready[0].accept()
            if not os.fork():
                server.close()
                return serve_one(connection)
            connection.close()
    return False


def run_script():
    """Run the script of sys.argv as __main__, then what the interpreter runs at its end, and end with the script's exit
    code. Modules are not torn down: after so many imports that takes 0.35 s, half of what a small run takes."""
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream and not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__" and serve(sys.argv[1]):
    run_script()
