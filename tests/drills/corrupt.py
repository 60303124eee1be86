"""Damage each kind of file of a tag in each way, and see that it is noticed, reported and survived.

    python tests/drills/corrupt.py --resumes=6      so many of them by a whole run, all of them by the reader

Damaged: cut short, one bit flipped, deleted, swapped with the same file of another tag, or of another rank. A run that
resumes takes the tag before and ends with the losses of one that was never damaged; a run that names the corrupt tag is
refused."""

import os
import random
import re
import shutil
import time

from common import arguments, losses, report, run
from conftest import STAGES

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.load import load_model
from runtime.checkpoint.tags import TagStore
from runtime.checkpoint.verify import verify_files

OPTIONS = ("--max_iters=4", "--lr_decay_iters=6", "--eval_interval=2", "--n_layer=1")


def cut(path, _):
    path.write_bytes(path.read_bytes()[:random.randrange(path.stat().st_size)])


def flip(path, _):
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def delete(path, _):
    path.unlink()


def swap_tags(path, out_dir):
    shutil.copy(out_dir / "iter_2" / path.name, path)


def swap_ranks(path, _):
    other = path.with_name(re.sub(r"pp_rank_([01])_mp", lambda m: f"pp_rank_{1 - int(m[1])}_mp", path.name))
    content = path.read_bytes()
    shutil.copy(other, path)
    other.write_bytes(content)


def damaged(whole, out_dir, name, way):
    """A copy of a run with a file of its newest tag damaged; best and final, which are copies of it, are not there."""
    shutil.rmtree(out_dir, ignore_errors=True)
    shutil.copytree(whole, out_dir, ignore=shutil.ignore_patterns("best", "final"))
    way(out_dir / "iter_4" / name, out_dir)


def noticed(out_dir):
    """What the reader says of the newest tag, '' if nothing."""
    try:
        _, manifest = TagStore(out_dir).find("iter_4")
        found = verify_files(out_dir / "iter_4", manifest["files"])
    except CheckpointError as error:
        return str(error)
    if found:
        try:
            load_model(out_dir, "iter_4")[0].state_dict()
        except CheckpointError:
            return found[0]
    return ""


def main():
    args = arguments(__doc__, resumes=6)
    began, tried, missed, wrong = time.time(), 0, [], []
    cases = []
    for stage in (2, 3):
        json_file, whole = STAGES[stage], args.folder / f"stage-{stage}"
        run(args.data, whole, *OPTIONS, f"--deepspeed_config={json_file}")
        run(args.data, args.folder / f"longer-{stage}", *OPTIONS, f"--deepspeed_config={json_file}", "--max_iters=6")
        for name in sorted(os.listdir(whole / "iter_4")):
            ways = [cut, flip, flip, flip, delete, swap_tags] + [swap_ranks] * ("pp_rank_" in name)
            cases += [(stage, whole, name, way) for way in ways if (name, way) != ("manifest.json", swap_tags)]
    for stage, whole, name, way in cases:
        damaged(whole, args.folder / "damaged", name, way)
        tried += 1
        if not noticed(args.folder / "damaged"):
            missed.append([stage, name, way.__name__])
    for stage, whole, name, way in random.sample(cases, args.resumes):
        out_dir = args.folder / "damaged"
        damaged(whole, out_dir, name, way)
        options = (*OPTIONS, f"--deepspeed_config={STAGES[stage]}", "--max_iters=6", "--init_from=resume")
        refused = True
        if (out_dir / "iter_4" / "manifest.json").exists():
            words = run(args.data, out_dir, *options, "--resume_tag=iter_4", expect=2)
            refused = f"{out_dir}/iter_4" in words and "train_deepspeed.py\", line" not in words
        words = run(args.data, out_dir, *options)
        told = "skipping" in words
        same = losses(out_dir) == losses(args.folder / f"longer-{stage}")
        print(f"stage {stage}, {name}, {way.__name__}: " + "; ".join(re.findall("skipping.*|resuming.*", words)))
        if not (told and same and "resuming from" in words and "iteration 2" in words):
            wrong.append([stage, name, way.__name__, told, same])
        if not refused:
            wrong.append([stage, name, way.__name__, "not refused when named"])
    report(args, not missed and not wrong, tried=tried, noticed=tried - len(missed), missed=missed,
           resumes=args.resumes, wrong=wrong, seconds=round(time.time() - began))


if __name__ == "__main__":
    main()
