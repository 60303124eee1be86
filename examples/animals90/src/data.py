"""Pictures in folders to batches: the same for any number of ranks and workers."""

import contextlib
import math
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from runtime.errors import UserError
from runtime.output import printable
from runtime.untrusted import open_regular

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")  # an EPS would start Ghostscript
MAX_PIXELS = 100_000_000
MAX_PICTURE_BYTES = 1_000_000_000  # 100 million pixels of 8 bytes, and more
MAX_CPU_SECONDS = 8.0  # of one picture: a JPEG of 1 MB can take minutes
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # which ImageNet's weights expect

Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses twice as many before it decodes
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # of the other half


def one_line(text: object) -> str:
    """Return a text, such as a path with a name that others chose, as one line that a terminal only shows."""
    return printable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


def list_files(folder: str, root: str) -> tuple[list[Path], int]:
    """Return the files below a folder, without hidden ones, and the number of links in it that lead out of `root`.

    root: a real path. Links to folders aren't followed. Raises OSError.
    """
    files = []
    links_out = 0
    folders = [folder]
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and leads_out(entry.path, root):
                links_out += 1
            elif entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif not os.path.isdir(entry.path):
                files.append(Path(entry.path))
    return sorted(files), links_out


def leads_out(path: str, root: str) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(root)


def list_pictures(folder: str | os.PathLike) -> tuple[dict[str, list[Path]], list[str]]:
    """Return {class: [paths]} of a folder with a folder per class, and notes on what else is there.

    Raises UserError and OSError.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{one_line(folder)} does not exist: "
                        "run python prepare.py --from FOLDER or prepare.py --made_up first")
    root = os.path.realpath(folder)
    pictures = {}
    others = 0
    links_out = 0
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_symlink() and leads_out(entry.path, root):
            links_out += 1
        elif os.path.isdir(entry.path):
            files, links_below = list_files(entry.path, root)
            links_out += links_below
            found = [path for path in files if path.suffix.lower() in SUFFIXES]
            others += len(files) - len(found)
            pictures[entry.name] = found

    notes = []
    if others:
        notes.append(f"{others} files in {one_line(folder)} are not pictures ({' '.join(SUFFIXES)})")
    if links_out:
        notes.append(f"{links_out} links in {one_line(folder)} lead out of it and are skipped: "
                     "replace them with copies")
    return pictures, notes


def find_pictures(train_dir, val_dir):
    """Return (classes, [(path, class number)] to train on, to validate, notes).

    Raises UserError and OSError.
    """
    train, notes = list_pictures(train_dir)
    val, val_notes = list_pictures(val_dir)
    problems = []
    for folder, pictures in ((train_dir, train), (val_dir, val)):
        for name in sorted({*train, *val}):
            if not pictures.get(name):
                problems.append(f"the class {one_line(name)} has no pictures in {one_line(folder)}: "
                                "add some, or remove it from both folders")
    if len(train) < 2:
        problems.append(f"{one_line(train_dir)} has {len(train)} classes: a classifier needs 2 or more")
    notes = [*notes, *val_notes]
    if problems:
        raise UserError("\n".join([*problems, *notes]))

    classes = list(train)
    numbered = []
    for pictures in (train, val):
        numbered.append([(path, n) for n, name in enumerate(classes) for path in pictures[name]])
    return classes, *numbered, notes


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after so many seconds of CPU time. Only in a process's main thread."""

    def stop(number, frame):
        raise TimeoutError(f"it takes more than {seconds:g} seconds of a CPU")

    earlier = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


def decode_picture(file: BinaryIO) -> Image.Image:
    """Return an open file's picture as an RGB image, upright by its EXIF orientation. Raises any exception."""
    with cpu_limit(MAX_CPU_SECONDS), Image.open(file, formats=FORMATS) as image:
        image.decodermaxblock = 8192  # the limit applies after each of these parts of a file
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            image = image.point(lambda value: value / 256)
        if "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB")


def open_picture(path: str | os.PathLike) -> Image.Image:
    """Return a picture as an RGB image, upright by its EXIF orientation. Raises UserError."""
    with picture_errors(path), open_regular(path, MAX_PICTURE_BYTES) as file:
        return decode_picture(file)


@contextlib.contextmanager
def picture_errors(path: str | os.PathLike) -> Iterator[None]:
    """Turn any exception that reading a picture raises into a UserError of one line."""
    try:
        yield
    except UserError as error:  # a pipe, a device or a folder
        raise UserError(one_line(error)) from None
    except Image.DecompressionBombError:
        raise UserError(f"{one_line(path)} has more than {MAX_PIXELS:,} pixels: "
                        "make it smaller, or remove it") from None
    except UnidentifiedImageError:
        raise UserError(f"{one_line(path)} cannot be read (it is none of {', '.join(FORMATS)}): "
                        "remove it; python prepare.py --check finds more") from None
    except Exception as error:  # Pillow's decoders raise many kinds
        raise UserError(f"{one_line(path)} cannot be read ({one_line(repr(error))}): "
                        "remove it; python prepare.py --check finds more") from None


def random_crop(image, size, rng):
    """Return a random part of the image at size x size: 0.25 to 1 of its area, 3:4 to 4:3, mirrored or not."""
    (width, height), ratio = image.size, (4 / 3) ** rng.uniform(-1, 1)
    w = min(math.sqrt(rng.uniform(0.25, 1) * width * height * ratio), width, height * ratio) - 1e-3  # for rounding
    x, y = rng.uniform(0, width - w), rng.uniform(0, height - w / ratio)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=(x, y, x + w, y + w / ratio))
    return ImageOps.mirror(image) if rng.random() < 0.5 else image


class Pictures(Dataset):
    """This rank's share of the pictures [(path, class number)], in whole steps of `accumulation` batches per epoch."""

    def __init__(self, found, settings, ranks, accumulation=1):
        self.found, self.settings, self.ranks = found, settings, ranks
        steps = math.ceil(len(found) / (settings.batch_size * ranks.world_size * accumulation))
        self.batches_per_epoch = steps * accumulation

    def __getitem__(self, item):
        """Return a uint8 tensor (3, size, size) and the class, or -1 if it doesn't count, of an item of batches()."""
        (number, epoch, counts), size = item, self.settings.image_size
        image = open_picture(self.found[number][0])
        if epoch:
            image = random_crop(image, size, random.Random(f"{self.settings.seed} {epoch} {number}"))
        else:  # the middle: 224/256 of the shorter side
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR, bleed=(1 - 224 / 256) / 2)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.found[number][1] if counts else -1

    def batches(self, epoch):
        """Yield lists of (number, epoch, counts), shuffled unless epoch is 0 (validation), filled from the start."""
        n, size, stride = len(self.found), self.settings.batch_size, self.settings.batch_size * self.ranks.world_size
        order = np.random.default_rng((self.settings.seed, epoch)).permutation(n) if epoch else range(n)
        for start in range(self.ranks.rank * size, self.batches_per_epoch * stride, stride):
            yield [(int(order[i % n]), epoch, epoch > 0 or i < n) for i in range(start, start + size)]

    def load(self, epochs):
        """Return an iterator over this rank's batches of all these epochs."""
        return iter(DataLoader(self, batch_sampler=(batch for epoch in epochs for batch in self.batches(epoch)),
                               num_workers=self.settings.num_workers, pin_memory=torch.cuda.is_available()))
