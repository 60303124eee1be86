"""Pictures into data/train/<class> and data/val/<class>, for train_deepspeed.py.

    python prepare.py --from FOLDER --val_share 0.1     FOLDER/<class>/... by hard link or copy, without duplicates
    python prepare.py --made_up --classes 90 --train 650 --val 139 --size 224     generated pictures
    python prepare.py --check                           name the pictures that can't be read
"""

import argparse
import colorsys
import hashlib
import math
import os
import shutil
import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

sys.path[:1] = [str(Path(__file__).resolve().parent / "src"), str(Path(__file__).resolve().parents[2])]

from data import list_pictures, open_picture
from runtime.files import UserError


def inspect(path):
    """Return (path, sha256 of a picture's file, why it can't be read, or None)."""
    try:
        open_picture(path)
        return path, hashlib.sha256(Path(path).read_bytes()).hexdigest(), None
    except UserError as error:
        return path, None, str(error)


def inspect_all(folder):
    """Yield (class, *inspect()) of the pictures of a folder with a folder per class, on all cores."""
    found = list_pictures(folder)[0]
    names = [name for name, paths in found.items() for _ in paths]
    with Pool() as pool:
        yield from zip(names, pool.imap(inspect, [path for paths in found.values() for path in paths], chunksize=16))


def take(source, to, val_share):
    """Link or copy the pictures of source/<class>/ to to/train/ and to/val/, named and split by their hash."""
    counts, seen = {"train": 0, "val": 0, "duplicates": 0, "unreadable": 0}, set()
    for name, (path, digest, problem) in inspect_all(source):
        split = "unreadable" if problem else "duplicates" if digest in seen else (
            "val" if int(digest[:8], 16) / 2**32 < val_share else "train")
        counts[split] += 1
        seen.add(digest)
        if split in ("unreadable", "duplicates"):
            print(f"skipped: {problem or f'{path} is a duplicate'}", file=sys.stderr)
            continue
        target = Path(to, split, name, digest[:16] + Path(path).suffix.lower())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:  # another disk
            shutil.copy(path, target)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))


def draw(job):
    """Draw a picture of class n with its hue, shape and pattern, at a random place, size and angle on noise. job: path,
    (seed, split, n, index), number of classes, side in pixels."""
    path, key, n_classes, size = job
    rng, n = np.random.default_rng(key), key[2]
    noise = rng.integers(40, 160, (size // 8 + 1, size // 8 + 1, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((size, size), Image.Resampling.BILINEAR)
    color = tuple(int(255 * part) for part in colorsys.hsv_to_rgb(n / n_classes, 0.9, 0.95))
    layer, mask = Image.new("RGB", (size, size), color), Image.new("L", (size, size))
    for i in range(0, size if n % 3 else 0, max(4, size // 12)):  # a plain surface, bars or lines
        ImageDraw.Draw(layer).line((i, 0, i, size) if n % 3 == 1 else (0, i, size, i), "black", 1 + n % 2 * size // 36)
    radius, angle = rng.uniform(0.2, 0.4) * size, rng.uniform(0, 2 * math.pi)
    x, y = rng.uniform(radius, size - radius, 2)
    points = 2 * (3 + n % 5)  # of a star, or nearly a polygon
    radii = [radius, radius * (0.45 if n // 5 % 2 else 0.9)] * (points // 2)
    angles = [angle + 2 * math.pi * i / points for i in range(points)]
    ImageDraw.Draw(mask).polygon([(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles)], fill=255)
    picture.paste(layer, mask=mask)
    picture.save(path, quality=85)


def make_up(to, n_classes, counts, size, seed):
    """Draw counts {split: pictures per class} pictures, on all cores."""
    jobs = []
    for split, (name, count) in enumerate(counts.items()):
        for n in range(n_classes):
            folder = Path(to, name, f"class_{n:02d}")
            folder.mkdir(parents=True)
            jobs += [(folder / f"{i:05d}.jpg", (seed, split, n, i), n_classes, size) for i in range(count)]
    with Pool() as pool:
        pool.map(draw, jobs, chunksize=64)
    print(f"{len(jobs):,} pictures of {n_classes} classes in {to}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from", dest="source", metavar="FOLDER")
    what.add_argument("--made_up", action="store_true")
    what.add_argument("--check", action="store_true")
    for name, default in dict(classes=90, train=650, val=139, size=224, seed=1337, val_share=0.1, to="data").items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    try:
        if args.source:
            take(args.source, args.to, args.val_share)
        elif args.made_up:
            make_up(args.to, args.classes, {"train": args.train, "val": args.val}, args.size, args.seed)
        else:
            results = [result for split in ("train", "val") for _, result in inspect_all(Path(args.to, split))]
            problems = [problem for *_, problem in results if problem]
            print(*problems, f"{len(results):,} pictures, {len(problems)} unreadable", sep="\n")
            sys.exit(2 * bool(problems))
    except (OSError, UserError) as error:
        parser.error(f"{error}: choose another folder with --to")
