"""Kill a run at random moments, mostly in the middle of saves, and start it again until it ends.

    python tests/drills/kill.py --kills=20

Everything of a 2-rank run gets SIGKILL at once; the same command starts it again. Its losses must be, to the last
bit, those of a run that was never killed, and no start may go back behind the newest complete tag."""

import functools
import os
import random
import re
import time

from common import arguments, losses, report, run, start
from conftest import wait_until

from runtime.checkpoint.tags import TagStore


def saving(out_dir):
    return out_dir.exists() and any(name.endswith((".saving", ".old")) for name in os.listdir(out_dir))


def moment(out_dir):
    """Wait for a moment to kill at. Lives are of one to three saves."""
    wait = functools.partial(wait_until, seconds=60, every=0.001)
    kind = random.choices(["save", "any", "start"], [7, 2, 1])[0]
    if kind == "start":
        time.sleep(random.uniform(0, 3))
        return
    wait(lambda: not saving(out_dir))  # what the kill before has left, until the new run tidies it away
    for _ in range(random.randint(1, 3)):
        wait(lambda: saving(out_dir))
        time.sleep(random.uniform(0, 0.08))
        if kind == "save" and random.random() < 0.5 and saving(out_dir):
            return
        wait(lambda: not saving(out_dir))
    if kind == "save":
        wait(lambda: saving(out_dir))
    time.sleep(random.uniform(0, 0.05 if kind == "save" else 0.5))


def main():
    args = arguments(__doc__, kills=20)
    options = (f"--max_iters={60 + 20 * args.kills}", "--eval_interval=2", "--eval_iters=1", "--n_layer=1",
               "--lr_decay_iters=1000", "--dropout=0.1")
    run(args.data, args.folder / "whole", *options)
    out_dir, log = args.folder / "killed", args.folder / "killed.log"
    kills, inside, went_back, starts, began = 0, 0, [], 0, time.time()
    behind = -1  # the newest complete tag's iteration at the last kill
    while True:
        starts += 1
        job = start(args.data, out_dir, *options, "--init_from=auto", log=log)
        if kills < args.kills:
            moment(out_dir)
            if job.poll() is None:
                inside += saving(out_dir)
                job.kill()
                kills += 1
        code, words = job.wait(), log.read_text()
        resumed = re.search(r"resuming from .*, iteration (\d+)", words)
        if behind > 0 and "iter " in words and (not resumed or int(resumed[1]) < behind):
            went_back.append((starts, behind, resumed and int(resumed[1])))
        store = TagStore(out_dir)
        newest = store.newest()
        behind = store.iteration(newest) if newest else -1
        if code == 0:
            break
        if code != -9:
            print(words[-3000:])
            report(args, False, why=f"start {starts} ended with exit code {code}")
        if starts > 3 * args.kills + 3:
            report(args, False, why="no end in sight")
    same = losses(out_dir) == losses(args.folder / "whole")
    report(args, same and not went_back and kills == args.kills, kills=kills, kills_inside_a_save=inside,
           starts=starts, iterations=len(losses(out_dir)[0]), losses_equal=same, went_back=went_back,
           seconds=round(time.time() - began))


if __name__ == "__main__":
    main()
