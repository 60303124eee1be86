"""Resume from a tag with other numbers of ranks and at other ZeRO stages, optimizer state and all.

    python tests/drills/reshard.py --most=1000      every change among 1, 2 and 4 ranks and stages 2 and 3

The losses after the change must be those of the run that never changed, to rounding."""

import itertools
import random
import shutil
import time

from common import arguments, losses, report, run
from conftest import STAGES

WAYS = list(itertools.product((1, 2, 4), (2, 3)))  # ranks, stage
FIRST = ((2, 2), (1, 2)), ((2, 2), (4, 2)), ((2, 2), (2, 3)), ((2, 3), (4, 2)), ((4, 3), (1, 3))


def options(ranks, stage):
    """8 iterations of 8 sequences; parameters of 30, 90, 120 elements, which 4 does not divide."""
    return ("--max_iters=8", "--lr_decay_iters=8", "--eval_interval=4", "--n_layer=1", "--n_embd=30", "--n_head=3",
            f"--batch_size={8 // 2 // ranks}", "--eval_iters=1" if ranks == 4 else f"--eval_iters={4 // ranks}",
            f"--deepspeed_config={STAGES[stage]}")


def main():
    # tolerance: relative; the sum over ranks is taken in another order
    args = arguments(__doc__, most=12, dtype="float32", tolerance=2e-6)
    dtype = f"--dtype={args.dtype}"
    began, worst, changes = time.time(), 0.0, []
    rest = [pair for pair in itertools.permutations(WAYS, 2) if pair not in FIRST]
    pairs = [*FIRST, *random.sample(rest, max(0, min(len(rest), args.most - len(FIRST))))][:args.most]
    run(args.data, args.folder / "whole", *options(2, 2), dtype, ranks=2)
    whole, whole_evals = losses(args.folder / "whole")
    for source, target in pairs:
        half = args.folder / f"half-{source[0]}-{source[1]}"
        if not half.exists():
            run(args.data, half, *options(*source), dtype, "--max_iters=4", ranks=source[0])
        out_dir = args.folder / "changed"
        shutil.rmtree(out_dir, ignore_errors=True)
        shutil.copytree(half, out_dir)
        words = run(args.data, out_dir, *options(*target), dtype, "--init_from=resume", ranks=target[0])
        assert "re-sharding" in words, words
        got, evals = losses(out_dir)
        assert list(got) == list(whole) and list(evals) == list(whole_evals), (list(got), list(whole))
        apart = max(abs(got[it] / whole[it] - 1) for it in whole)
        worst = max(worst, apart)
        changes.append({"from": source, "to": target, "apart": apart})
        print(f"{source[0]} ranks, stage {source[1]} -> {target[0]} ranks, stage {target[1]}: losses apart {apart:.1e}",
              flush=True)
    report(args, worst < args.tolerance, changes=len(changes), worst=worst, tolerance=args.tolerance, each=changes,
           seconds=round(time.time() - began))


if __name__ == "__main__":
    main()
