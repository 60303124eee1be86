"""Fill the disk under a run: before a save, and in the middle of one.

    python tests/drills/diskfull.py --most=5

The run writes to a file system of a few MB, of its own (in a mount namespace; needs Linux and the right to make one).
A save that finds no room deletes the oldest tag that is neither the newest nor best. If there is none, the tag leaves
nothing behind, the run stops, and it resumes from the one before. At last, a run as long as the default one has a file
system in which its checkpoints take as much as GPT-2 XL's take of 50 GB."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import arguments, losses, report, run, start
from conftest import patience, planted, wait_until

from runtime.checkpoint.tags import TagStore
from runtime.checkpoint.verify import verify_files

OPTIONS = ("--max_iters=8", "--lr_decay_iters=8", "--eval_interval=2", "--keep_last=20")
PAGE = 4096  # bytes that the file system gives at a time
INSIDE = "DRILL_INSIDE"
GPT2_XL, DISK = 21.81, 50  # GB
HOLD = """
import time
from runtime.checkpoint.saver import Saver
save = Saver.save
def later(self, tag, *rest):
    print(f"held before {tag}", flush=True)
    while tag == os.environ["DRILL_HELD"] and not os.path.exists(os.environ["DRILL_FILLED"]):
        time.sleep(0.01)
    save(self, tag, *rest)
Saver.save = later
"""  # that save begins when the disk is as full as the case says


def fill(folder, leave):
    """Write a file that leaves so many bytes free. The run may write meanwhile: then its pages count, too."""
    with open(folder / "filler", "wb", buffering=0) as f:
        try:
            while (free := shutil.disk_usage(folder).free) > leave:
                f.write(b"\0" * (free - leave))
        except OSError as error:
            if leave or error.errno != errno.ENOSPC:  # some file systems count pages as free that they do not give
                raise


def whole_tags(out_dir):
    """The tags, all of them whole, and nothing half-written beside them."""
    store = TagStore(out_dir)
    for tag in store.list():
        assert not verify_files(out_dir / tag, store.find(tag).manifest["files"]), tag
    assert not [name for name in os.listdir(out_dir) if name.endswith((".saving", ".old"))], os.listdir(out_dir)
    return [tag for tag in store.list() if tag.startswith("iter_")]


def size_of(out_dir, tag):
    return sum(entry["bytes"] for entry in TagStore(out_dir).find(tag).manifest["files"].values())


def pages_of(out_dir, tag):
    """The bytes that the files of a tag take, its manifest too."""
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in (out_dir / tag).iterdir())


def main():
    args = arguments(__doc__, most=6)
    os.environ.pop("FORK_SERVER", None)  # one that is outside of the mount namespace
    if INSIDE not in os.environ:  # once more, in a mount namespace
        command = ["unshare", "--mount", *(["--map-root-user", "--user"] if os.getuid() else [])]
        mount = ["mount", "-t", "tmpfs", "none", str(args.folder)]  # seen by nobody, and gone at once
        trial = subprocess.run([*command, *mount], capture_output=True, text=True)
        if trial.returncode:
            print(f"no right to mount a file system of its own here: {trial.stderr.strip()}", file=sys.stderr)
            raise SystemExit(77)
        command += [sys.executable, *sys.argv, "--folder", str(args.folder)]
        done = subprocess.run(command, env={**os.environ, INSIDE: "1"})
        raise SystemExit(done.returncode)
    began, found = time.time(), {}
    os.environ["DRILL_FILLED"] = str(args.folder / "filled")
    run(args.data, args.folder / "whole", *OPTIONS)
    whole = losses(args.folder / "whole")
    tag_size, disk = size_of(args.folder / "whole", "iter_2"), args.folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={5 * tag_size}", "none", str(disk)], check=True)

    def case(name, leave, held, stand, words):
        """Fill the disk up to `leave` bytes before the save of `held`, and see how and with which tags the run ends."""
        before = f"iter_{int(held[5:]) - 2}"
        os.environ["DRILL_HELD"] = held
        out_dir, log = disk / "out", args.folder / f"{name}.log"
        shutil.rmtree(out_dir, ignore_errors=True)
        (disk / "filler").unlink(missing_ok=True)
        filled = Path(os.environ["DRILL_FILLED"])
        filled.unlink(missing_ok=True)
        job = start(args.data, out_dir, *OPTIONS, log=log, script=planted(args.folder, HOLD))
        assert wait_until(lambda: log.read_text().count(f"held before {held}") == 2  # on both ranks
                        and f'"saved": "{before}"' in (out_dir / "history.jsonl").read_text(), 120)
        with open(out_dir / "history.jsonl", "a") as history:  # its last page: new, or without a byte left
            history.write(" " * (-history.tell() % PAGE - (not leave)) + "\n")
        fill(disk, leave)
        filled.touch()
        code, said = job.wait(patience(120)), log.read_text()
        found_tags, final = whole_tags(out_dir), code or TagStore(out_dir).iteration("final")
        (disk / "filler").unlink()
        run(args.data, out_dir, *OPTIONS, "--init_from=resume", log=args.folder / "resumed.log")  # there is room again
        f = found[name] = {"exit_code": code, "final": final, "stand": found_tags, "told": words in said,
                           "losses_equal": losses(out_dir) == whole}
        f["passed"] = ((code == 0) == ("iter_8" in stand) and final in (code, 8) and f["told"] and f["losses_equal"]
                       and found_tags == stand
                       and "Traceback (most recent call last):\n  File \"" + os.getcwd() not in said)
        print(name, json.dumps(f), flush=True)

    def default_run(name, *options, best, stand):
        """Run 20 iterations on a disk of 50 / 21.81 checkpoints, evaluating every 5, by the option that is named."""
        out_dir, log = disk / "out", args.folder / "50gb.log"
        shutil.rmtree(out_dir, ignore_errors=True)
        fill(disk, int(tag_size * DISK / GPT2_XL))
        options = ("--max_iters=20", "--eval_interval=5", *options)
        said = run(args.data, out_dir, *options, log=log, expect=2)
        run(args.data, out_dir, *options, "--always_save_checkpoint=False", log=log)
        (disk / "filler").unlink()
        f = found[name] = {"stand": whole_tags(out_dir), "best": TagStore(out_dir).iteration("best"),
                           "told": "has room for 2: add --always_save_checkpoint=False" in said}
        f["passed"] = f["told"] and f["stand"] == stand and f["best"] == best
        print(name, json.dumps(f), flush=True)

    cases = [
        # room for the estimate, and not for the manifest, folders and best's links that come with it
        ("full in the middle of a save", tag_size + PAGE, "iter_4", ["iter_2"], "the disk is full"),
        ("full in the middle of a save, with an older tag", tag_size + PAGE, "iter_6", ["iter_6", "iter_8"],
         "no room for the next checkpoint: deleted"),
        ("full when the last tag is there, before latest, best and final", pages_of(args.folder / "whole", "iter_2"),
         "iter_8", ["iter_4", "iter_6", "iter_8"], "no room for the next checkpoint: deleted"),
        ("not a byte left, for the history either", 0, "iter_4", ["iter_2"], "the disk is full"),
        ("no room before a save", tag_size // 2, "iter_4", ["iter_2"], "the disk is full"),
        ("no room before a save, with an older tag", tag_size // 2, "iter_6", ["iter_6", "iter_8"],
         "no room for the next checkpoint: deleted")]
    for one in cases[:args.most]:
        case(*one)
    default_run("50 GB, each loss is better", best=20, stand=["iter_15", "iter_20"])
    default_run("50 GB, none is better", "--learning_rate=0", best=5, stand=["iter_5", "iter_20"])
    report(args, all(f["passed"] for f in found.values()), cases=found, seconds=round(time.time() - began))


if __name__ == "__main__":
    main()
