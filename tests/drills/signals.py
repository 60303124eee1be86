"""Stop runs with each signal under each launcher at random moments, and kill a rank or the launcher.

    python tests/drills/signals.py --each=2      --resume=0: without resuming
    python tests/drills/signals.py --moments=40  instead, one run after another that evaluates half of the time

A stopped run saves a checkpoint of the last step that it printed, exits with the documented code within 60 s and leaves
no process behind. After a resume, its losses are those of an uninterrupted run. When a rank or the launcher is killed,
all processes exit within 60 s.

With --moments, SIGTERM, Ctrl-C and STOP come at random moments of steps and evaluations. Each run announces the stop,
saves a tag of its last step, and after a resume has the losses and evaluations of an uninterrupted run."""

import os
import random
import re
import signal
import subprocess
import sys
import time

from common import ROOT, arguments, losses, naming, report, run, start
from conftest import SMALL, patience, read_history, wait_until, write_characters

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


# 100 steps and an evaluation take about two seconds each
EVALUATING = ("--max_iters=100000", "--lr_decay_iters=1000", "--eval_interval=100", "--eval_iters=2400",
              "--keep_last=2")


def stop_at_a_moment(args, what, number):
    """Stop a run on two ranks at a random moment after its first step, and resume it for nine steps. -> figures"""
    out_dir = args.folder / f"moment-{number}"
    log = args.folder / f"{out_dir.name}.log"
    job = start(args.data, out_dir, *EVALUATING, "--log_interval=1", log=log)
    assert wait_until(lambda: last_step(log) > 0, 300), log.read_text()
    time.sleep(random.uniform(0, 4))
    before, began = last_step(log), time.monotonic()
    if what == "STOP":
        (out_dir / "STOP").touch()
    else:
        job.send_signal(ASK[what])
    announced = wait_until(lambda: "stop requested (" in log.read_text(), 60)
    said_after = time.monotonic() - began
    code = job.wait(patience(60))
    seconds = time.monotonic() - began
    store = TagStore(out_dir)
    tag = store.newest()
    saved = store.iteration(tag) if tag else -1
    inside = "the evaluation is not finished" in log.read_text()
    history = read_history(out_dir)
    evaluating = sum(record.get("eval_s", 0) for record in history)
    stepping = sum(record.get("ms", 0) for record in history) / 1000
    run(args.data, out_dir, *EVALUATING, f"--max_iters={saved + 9}", "--init_from=resume", log=args.folder / "log")
    return {"what": what, "exit_code": code, "announced_s": round(said_after, 2), "seconds": round(seconds, 2),
            "in_an_evaluation": inside, "saved": saved, "evaluating": round(evaluating / (evaluating + stepping), 2),
            "passed": bool(announced) and code == CODES["python"][what][0] and saved == last_step(log) >= before}


def stop_at_moments(args):
    """The drill of --moments."""
    began = time.time()
    args.data = args.folder / "more_characters"  # an evaluation uses each window once
    write_characters(args.data, times=100)
    results = []
    for number in range(args.moments):
        results.append(stop_at_a_moment(args, ("SIGTERM", "SIGINT", "STOP")[number % 3], number))
        print(results[-1], flush=True)
    most = max(result["saved"] for result in results) + 9
    run(args.data, args.folder / "whole", *EVALUATING, f"--max_iters={most}")
    steps, evaluations = losses(args.folder / "whole")
    for number, result in enumerate(results):
        got_steps, got_evaluations = losses(args.folder / f"moment-{number}")
        last = result["saved"] + 9  # there it has evaluated too, as every run does at its end
        due = [it for it in evaluations if it < last]
        result["losses_equal"] = got_steps == {it: steps[it] for it in range(1, last + 1)}
        result["evaluations_equal"] = {it: got_evaluations.get(it) for it in due} == {it: evaluations[it] for it in due}
        result["passed"] &= result["losses_equal"] and result["evaluations_equal"]
    report(args, all(result["passed"] for result in results), trials=len(results),
           failed=[result for result in results if not result["passed"]],
           in_an_evaluation=sum(result["in_an_evaluation"] for result in results),
           evaluating=round(sum(result["evaluating"] for result in results) / len(results), 2),
           latest_announcement_s=max(result["announced_s"] for result in results),
           slowest=max(result["seconds"] for result in results), each=results, seconds=round(time.time() - began))


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` starts it with SIGINT ignored
    args = arguments(__doc__, each=1, resume=1, launchers=",".join(LAUNCHERS), only="", moments=0)
    if args.moments:
        stop_at_moments(args)
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
