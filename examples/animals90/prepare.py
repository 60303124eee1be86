"""Pictures into data/train/<class> and data/val/<class>, for train_deepspeed.py.

python prepare.py --from FOLDER --val_share 0.1     FOLDER/<class>/... by hard link or copy, without duplicates
python prepare.py --made_up --classes 90 --train 650 --val 139 --size 224     generated pictures
python prepare.py --check                           name the pictures that can't be read
"""

import argparse
import hashlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE / "src"), str(HERE.parents[1])]

from runtime.errors import UserError  # first: runtime explains a missing package
from runtime.output import counted, protect_output
from runtime.paths import expand_path
from runtime.untrusted import open_regular

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from every process

import numpy as np
from PIL import Image, ImageDraw

from data import MAX_PICTURE_BYTES, decode_picture, list_pictures, one_line, picture_errors

SPLITS = ("train", "val")


def inspect(path: Path) -> tuple[Path, str | None, str | None]:
    """Return (path, sha256 of a picture's file, None), or (path, None, why it can't be read)."""
    try:
        with picture_errors(path), open_regular(path, MAX_PICTURE_BYTES) as file:
            decode_picture(file)
            file.seek(0)
            return path, hashlib.file_digest(file, "sha256").hexdigest(), None
    except UserError as error:
        return path, None, str(error)


def inspect_all(folder: str | Path) -> Iterator[tuple[Path, str | None, str | None]]:
    """Yield what inspect() returns for the pictures of a folder with a folder per class.

    All cores work on them. Raises UserError and OSError.
    """
    pictures, notes = list_pictures(folder)
    for note in notes:
        print(note, file=sys.stderr)
    paths = list(itertools.chain.from_iterable(pictures.values()))
    if not paths:
        folder = one_line(folder)
        raise UserError(
            f"{folder} has no pictures: put those of each class into a folder {folder}/CLASS"
        )
    try:
        with ProcessPoolExecutor() as pool:
            yield from pool.map(inspect, paths, chunksize=16)
    except BrokenProcessPool:
        raise UserError(
            f"a process that reads {one_line(folder)} was killed: free some memory"
        ) from None


def refuse_links(to: str) -> None:
    """Raise UserError if to/train, to/val or a class in them is a link, which leads elsewhere."""
    for split in SPLITS:
        folder = Path(to, split)
        for path in (folder, *folder.glob("*")):
            if path.is_symlink():
                raise UserError(
                    f"{one_line(path)} is a link, and writing would change its target: "
                    "remove it, or choose another folder with --to"
                )


def take(source: str, to: str, val_share: float) -> None:
    """Put the pictures of source/<class>/ in to/train/ and to/val/, named and split by their hash.

    Raises UserError and OSError.
    """
    counts = dict.fromkeys((*SPLITS, "duplicates", "unreadable"), 0)
    seen = set()
    earlier = {path.stem: path for path in Path(to).glob("*/*/*")}
    for path, digest, problem in inspect_all(source):
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(to)):
            raise UserError(
                f"{one_line(path)} is in {one_line(to)} itself: use another --from or --to"
            )
        if problem:
            counts["unreadable"] += 1
        elif digest in seen:
            counts["duplicates"] += 1
            problem = f"{one_line(path)} is a duplicate"
        if problem:
            print(f"skipped: {problem}", file=sys.stderr)
            continue

        seen.add(digest)
        split = "val" if int(digest[:8], 16) < val_share * 2**32 else "train"
        counts[split] += 1
        class_name = path.relative_to(source).parts[0]
        target = Path(to, split, class_name, digest[:16] + path.suffix.lower())
        target.parent.mkdir(parents=True, exist_ok=True)
        old = earlier.get(target.stem, target)
        if (
            old.parent.name != target.parent.name
        ):  # with another val_share, it was in the other split
            print(f"moved: {one_line(old)} to {one_line(target)}", file=sys.stderr)
        old.unlink(missing_ok=True)
        link_or_copy(path, target)
    duplicates = counted(counts.pop("duplicates"), "duplicate")
    train, val, unreadable = (f"{count:,} {what}" for what, count in counts.items())
    print(f"{train}, {val}, {duplicates}, {unreadable}")


def link_or_copy(path: Path, target: Path) -> None:
    """Make a new file of a picture: a hard link, or a copy on another disk. Raises OSError."""
    try:
        target.hardlink_to(os.path.realpath(path))
    except OSError:  # another disk
        with open_regular(path) as file, open(target, "xb") as copy:  # x: never an existing file
            shutil.copyfileobj(file, copy)


def draw(path: Path, seed: tuple[int, ...], n: int, n_classes: int, size: int) -> None:
    """Draw a new picture of class n: a polygon with its color, corners and frame, at a random place
    and angle, on noise. Raises OSError."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(40, 160, (size // 8 + 1, size // 8 + 1, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((size, size), Image.Resampling.BILINEAR)
    radius = rng.uniform(0.2, 0.4) * size
    color = f"hsv({360 * n / n_classes}, 90%, 95%)"
    circle = *rng.uniform(radius, size - radius, 2), radius
    corners = 3 + n % 5
    frame = 1 + int(n % 3 * radius / 6)
    ImageDraw.Draw(picture).regular_polygon(
        circle, corners, rng.uniform(0, 360), color, "black", frame
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:  # x: never an existing file
        picture.save(file, "JPEG", quality=85)


def make_up(args: argparse.Namespace) -> None:
    """Draw pictures of args.classes classes. Raises OSError."""
    jobs = []
    for split in SPLITS:
        for n in range(args.classes):
            for i in range(getattr(args, split)):
                path = Path(args.to, split, f"class_{n:02d}", f"{i:05d}.jpg")
                seed = (args.seed, int(split == "val"), n, i)
                jobs.append((path, seed, n, args.classes, args.size))
    with ProcessPoolExecutor() as pool:
        list(
            pool.map(draw, *zip(*jobs, strict=True), chunksize=64)
        )  # list(): raise what a process raised
    print(f"{len(jobs):,} pictures of {args.classes} classes in {args.to}")


def check(to: str) -> bool:
    """Print the pictures that can't be read, and return whether there are any.

    Raises UserError and OSError.
    """
    count = 0
    unreadable = 0
    for split in SPLITS:
        for _, _, problem in inspect_all(Path(to, split)):
            count += 1
            if problem:
                unreadable += 1
                print(problem)
    print(f"{count:,} pictures, {unreadable} unreadable")
    return unreadable > 0


def parse_arguments() -> argparse.Namespace:
    """Return the checked options. Raises UserError, which names all that are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from", dest="source", metavar="FOLDER", type=expand_path)
    what.add_argument("--made_up", action="store_true")
    what.add_argument("--check", action="store_true")
    defaults = dict(classes=90, train=650, val=139, size=224, seed=1337, val_share=0.1)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--to", metavar="FOLDER", type=expand_path, default="data")
    args = parser.parse_args()

    problems = []
    for name, least in dict(classes=2, train=1, val=1, size=8, seed=0).items():
        if getattr(args, name) < least:
            problems.append(f"--{name} must be at least {least}")
    if not 0 < args.val_share < 1:
        problems.append("--val_share must be between 0 and 1")
    if problems:
        raise UserError("\n".join(problems))
    return args


def main() -> int:
    """Do what the command line says, and return the exit code. Raises UserError and OSError."""
    args = parse_arguments()
    if args.check:
        return 2 if check(args.to) else 0
    refuse_links(args.to)
    pattern = "*/00000.jpg" if args.source else "*/"  # generated pictures, or any class
    others = [path for split in SPLITS for path in Path(args.to, split).glob(pattern)]
    if others:
        raise UserError(
            f"{args.to} has other pictures: choose another folder with --to, or delete these"
        )
    if args.source:
        take(args.source, args.to, args.val_share)
    else:
        make_up(args)
    return 0


if __name__ == "__main__":
    protect_output()  # also: names that aren't UTF-8 are printed with escapes
    try:
        raise SystemExit(main())
    except UserError as error:
        message = str(error)
    except OSError as error:
        message = f"{one_line(error)}: choose another folder with --to"
    print(message, file=sys.stderr)
    raise SystemExit(2)
