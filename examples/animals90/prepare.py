"""Pictures into data/train/<class> and data/val/<class>, for train_deepspeed.py.

    python prepare.py --from FOLDER --val_share 0.1     FOLDER/<class>/... by hard link or copy, without duplicates
    python prepare.py --made_up --classes 90 --train 650 --val 139 --size 224     generated pictures
    python prepare.py --check                           name the pictures that can't be read
"""

import argparse
import signal
import sys
from multiprocessing import Pool
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parent / "src"), str(Path(__file__).resolve().parents[2])]

from runtime.errors import UserError  # first: runtime explains a missing package
from runtime.files import file_digest

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from every process

import numpy as np
from PIL import Image, ImageDraw

from data import list_pictures, open_picture


def inspect(path):
    """Return (path, sha256 of a picture's file, why it can't be read, or None)."""
    try:
        open_picture(path)
        return path, file_digest(path)["sha256"], None
    except UserError as error:
        return path, None, str(error)


def inspect_all(folder):
    """Yield what inspect() returns for the pictures of a folder with a folder per class, on all cores."""
    pictures, _ = list_pictures(folder)
    if not any(pictures.values()):
        raise UserError(f"{folder} has no pictures: put those of each class into a folder {folder}/CLASS")
    with Pool() as pool:
        yield from pool.imap(inspect, sum(pictures.values(), []), chunksize=16)


def take(source, to, val_share):
    """Link or copy the pictures of source/<class>/ to to/train/ and to/val/, named and split by their hash."""
    counts, seen = dict.fromkeys(("train", "val", "duplicates", "unreadable"), 0), set()
    earlier = {path.stem: path for path in Path(to).glob("*/*/*")}
    for path, digest, problem in inspect_all(source):
        if path.resolve().is_relative_to(Path(to).resolve()):
            raise UserError(f"{path} is in {to} itself: use another --from or --to")
        if problem or digest in seen:
            print(f"skipped: {problem or f'{path} is a duplicate'}", file=sys.stderr)
            counts["unreadable" if problem else "duplicates"] += 1
            continue
        seen.add(digest)
        split = "val" if int(digest[:8], 16) < val_share * 2**32 else "train"
        counts[split] += 1
        target = Path(to, split, path.relative_to(source).parts[0], digest[:16] + path.suffix.lower())
        target.parent.mkdir(parents=True, exist_ok=True)
        old = earlier.get(target.stem, target)  # with another val_share, it was in the other split
        if old.parent.name != target.parent.name:
            print(f"moved: {old} to {target}", file=sys.stderr)
        old.unlink(missing_ok=True)
        try:
            target.hardlink_to(path.resolve())
        except OSError:  # another disk
            target.write_bytes(path.read_bytes())
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))


def draw(path, seed, n, n_classes, size):
    """Draw a picture of class n: a polygon with its color, corners and frame, at a random place and angle, on noise."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(40, 160, (size // 8 + 1, size // 8 + 1, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((size, size), Image.Resampling.BILINEAR)
    radius, color = rng.uniform(0.2, 0.4) * size, f"hsv({360 * n / n_classes}, 90%, 95%)"
    circle = *rng.uniform(radius, size - radius, 2), radius
    corners, frame = 3 + n % 5, 1 + int(n % 3 * radius / 6)
    ImageDraw.Draw(picture).regular_polygon(circle, corners, rng.uniform(0, 360), color, "black", frame)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=85)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from", dest="source", metavar="FOLDER")
    what.add_argument("--made_up", action="store_true")
    what.add_argument("--check", action="store_true")
    for name, default in dict(classes=90, train=650, val=139, size=224, seed=1337, val_share=0.1, to="data").items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    least = dict(classes=2, train=1, val=1, size=8, seed=0)
    problems = [f"--{name} must be at least {least[name]}" for name in least if getattr(args, name) < least[name]]
    problems += ["--val_share must be between 0 and 1"] * (not 0 < args.val_share < 1)
    if not args.check and any(Path(args.to).glob("train/*/00000.jpg" if args.source else "train/*/")):
        problems.append(f"{args.to} has other pictures: choose another folder with --to, or delete these")
    try:
        if problems:
            raise UserError("\n".join(problems))
        if args.source:
            take(args.source, args.to, args.val_share)
        elif args.made_up:
            jobs = [(Path(args.to, split, f"class_{n:02d}", f"{i:05d}.jpg"), (args.seed, int(split == "val"), n, i), n,
                     args.classes, args.size)
                    for split in ("train", "val") for n in range(args.classes) for i in range(getattr(args, split))]
            with Pool() as pool:
                pool.starmap(draw, jobs, chunksize=64)
            print(f"{len(jobs):,} pictures of {args.classes} classes in {args.to}")
        else:
            found = [problem for split in ("train", "val") for *_, problem in inspect_all(Path(args.to, split))]
            print(*filter(None, found), f"{len(found):,} pictures, {sum(map(bool, found))} unreadable", sep="\n")
            sys.exit(2 * any(found))
    except (OSError, UserError) as error:
        parser.exit(2, f"{error}{': choose another folder with --to' * isinstance(error, OSError)}\n")
