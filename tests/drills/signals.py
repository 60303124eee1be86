"""Stop runs with each signal under each launcher at random moments, and kill a rank or the launcher.

    python tests/drills/signals.py --each=2      --resume=0: without resuming

A stopped run saves a checkpoint of the last step that it printed, exits with the documented code within 60 s and leaves
no process behind. After a resume, its losses are those of an uninterrupted run. When a rank or the launcher is killed,
all processes exit within 60 s."""

import os
import random
import re
import signal
import subprocess
import sys
import time

from common import ROOT, arguments, losses, naming, report, run, start
from conftest import SMALL, wait_until

from runtime.checkpoint.tags import TagStore

OPTIONS = ("--max_iters=100000", "--lr_decay_iters=1000", "--eval_interval=40", "--eval_iters=40", "--n_layer=1")
LAUNCHERS = ("torchrun", "deepspeed", "run_deepspeed_xl.sh", "python")
ASK = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGINT": signal.SIGINT, "STOP": None}
# The launcher's exit code: ours forwards the run's own, the others have codes for signals
CODES = {"torchrun": {"SIGTERM": (1,), "SIGUSR1": (-10,), "SIGINT": (1, -2), "STOP": (0,)},
         "deepspeed": {"SIGTERM": (-15,), "SIGUSR1": (-10,), "SIGINT": (1, -2), "STOP": (0,)},
         "run_deepspeed_xl.sh": {"SIGTERM": (143,), "SIGUSR1": (138,), "SIGINT": (130,), "STOP": (0,)},
         "python": {"SIGTERM": (143,), "SIGUSR1": (138,), "SIGINT": (130,), "STOP": (0,)}}


def begin(args, out_dir, launcher, log):
    if launcher != "run_deepspeed_xl.sh":
        return start(args.data, out_dir, *OPTIONS, launcher=launcher, log=log)
    command = [ROOT / launcher, *SMALL, f"--dataset={args.data}", f"--out_dir={out_dir}", *OPTIONS, "--log_interval=1"]
    with open(log, "w") as words:
        return subprocess.Popen(command, env={**os.environ, "PYTHON": sys.executable}, stdout=words,
                                stderr=subprocess.STDOUT, start_new_session=True)


def last_step(log):
    """Return the last step that the run has printed, or 0."""
    return max(map(int, re.findall(r"^iter (\d+):", log.read_text(), re.M)), default=0)


def trial(args, launcher, what, number):
    """Start a run, stop it or kill one of its processes, and return {"passed": ..., figures}."""
    out_dir = args.folder / f"{launcher}-{what}-{number}"
    log = args.folder / f"{out_dir.name}.log"
    job = begin(args, out_dir, launcher, log)
    if not wait_until(lambda: last_step(log) > 1, 300):
        for process in naming(str(out_dir)):
            process.kill()
        return {"passed": False, "why": "it did not start: " + log.read_text()[-2000:]}
    time.sleep(random.uniform(0, 3))
    before, began = last_step(log), time.monotonic()
    ranks = [p for p in naming(str(out_dir)) if any(arg.endswith("train_deepspeed.py") for arg in p.cmdline())
             and not {"torch.distributed.run", "torchrun", "deepspeed.launcher.runner",
                      "deepspeed.launcher.launch"} & set(p.cmdline()) and "bash" not in p.name()]
    if what == "a rank killed":
        random.choice(ranks).kill()
    elif what == "launcher killed":
        job.kill()
    elif what == "STOP":
        (out_dir / "STOP").touch()
    else:
        os.kill(job.pid, ASK[what])
    gone = wait_until(lambda: job.poll() is not None and not naming(str(out_dir)), 60)
    seconds, left = time.monotonic() - began, len(naming(str(out_dir)))
    store = TagStore(out_dir)
    tag = store.newest()
    saved, said = store.iteration(tag) if tag else -1, log.read_text()
    result = {"launcher": launcher, "what": what, "exit_code": job.returncode, "seconds": round(seconds, 1),
              "left": left, "last_step": last_step(log), "saved": saved}
    if what == "a rank killed":
        told = ["killed by SIGKILL"] if launcher == "run_deepspeed_xl.sh" else ["died", "exitcode", "return code"]
        good = job.returncode and any(words in said for words in told)
    elif what == "launcher killed":
        good = saved == last_step(log) >= before
    else:
        good = saved == last_step(log) >= before and job.returncode in CODES[launcher][what]
    result["passed"] = good and gone and not left
    for process in naming(str(out_dir)):
        process.kill()
    if result["passed"] and saved > 0 and number == 0 and args.resume:
        how = {"ranks": 1 if launcher == "python" else 2,
               "config": ["config/shakespeare_char_cpu.py"] if launcher == "run_deepspeed_xl.sh" else []}  # its own
        options = (*OPTIONS, "--log_interval=1", f"--max_iters={saved + 5}")
        run(args.data, out_dir, *options, "--init_from=resume", log=args.folder / "resumed.log", **how)
        run(args.data, args.folder / "whole", *options, "--overwrite=True", **how)
        got, expected = (losses(folder)[0] for folder in (out_dir, args.folder / "whole"))
        result["losses_equal"] = got == {it: loss for it, loss in expected.items() if it in got} and len(got) > saved
        result["passed"] &= result["losses_equal"]
    if not result["passed"]:
        print(said[-3000:])
    return result


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` starts it with SIGINT ignored
    args = arguments(__doc__, each=1, resume=1, launchers=",".join(LAUNCHERS), only="")
    began, results = time.time(), []
    for launcher in args.launchers.split(","):
        kills = ["a rank killed", "launcher killed"] if launcher in ("torchrun", "deepspeed") else []
        for what in [what for what in [*ASK, *kills] if args.only in ("", what)]:
            for number in range(args.each):
                results.append(trial(args, launcher, what, number))
                print(results[-1], flush=True)
    report(args, all(r["passed"] for r in results), trials=len(results), failed=[r for r in results if not r["passed"]],
           slowest=max(r.get("seconds", 0) for r in results), orphans=sum(r.get("left", 0) for r in results),
           each=results, seconds=round(time.time() - began))


if __name__ == "__main__":
    main()
