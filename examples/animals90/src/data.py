"""Pictures in folders to batches: the same for any number of ranks and workers."""

import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from runtime.files import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # which ImageNet's weights expect


def list_pictures(root):
    """Return ({class: [paths]} of a folder with a folder per class, and the number of other files)."""
    root, found = Path(root), {}
    if not root.is_dir():
        raise UserError(f"{root} does not exist: run python prepare.py --from FOLDER for your pictures, or python "
                        "prepare.py --made_up for generated ones")
    others = sum(path.is_file() for path in root.glob("[!.]*"))
    for folder in sorted(root.glob("[!.]*/")):
        files = [path for path in sorted(folder.rglob("[!.]*"))
                 if path.is_file() and "/." not in str(path.relative_to(root))]
        found[folder.name] = [path for path in files if path.suffix.lower() in SUFFIXES]
        others += len(files) - len(found[folder.name])
    return found, others


def find_pictures(train_dir, val_dir):
    """Return (names of the classes, [(path, class number)] of training and of validation, notes). Raises UserError."""
    (train, others), (val, val_others) = list_pictures(train_dir), list_pictures(val_dir)
    problems = [f"the class {name} has no pictures in {root}: add some, or remove it from both folders"
                for root, found in ((train_dir, train), (val_dir, val)) for name in sorted({*train, *val})
                if not found.get(name)]
    problems += [f"{train_dir} has {len(train)} classes: a classifier needs 2 or more"] * (len(train) < 2)
    if problems:
        raise UserError("\n".join(problems))
    notes = [f"{others + val_others} files are not pictures ({' '.join(SUFFIXES)})"] * bool(others + val_others)
    numbered = ([(path, n) for n, name in enumerate(train) for path in found[name]] for found in (train, val))
    return [*train], *numbered, notes


def open_picture(path):
    """Return a picture as an RGB image, upright by its EXIF orientation. Raises UserError."""
    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        why = type(error).__name__
        raise UserError(f"{path} cannot be read ({why}): find all such files with python prepare.py --check") from None


def random_crop(image, size, rng):
    """Return a random part of the image at size x size: 0.25 to 1 of its area, 3:4 to 4:3, mirrored or not."""
    (width, height), ratio = image.size, (4 / 3) ** rng.uniform(-1, 1)
    w = min(math.sqrt(rng.uniform(0.25, 1) * width * height * ratio), width, height * ratio)
    w -= 1e-3  # else rounding could leave the image
    x, y = rng.uniform(0, width - w), rng.uniform(0, height - w / ratio)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=(x, y, x + w, y + w / ratio))
    return ImageOps.mirror(image) if rng.random() < 0.5 else image


class Pictures(Dataset):
    """Pictures by (number, epoch, counts): a uint8 tensor (3, size, size) and the class, or -1 if it doesn't count.
    With epoch 0, which is validation, the middle of the picture: 224/256 of its shorter side."""

    def __init__(self, found, size, seed):
        self.found, self.size, self.seed = found, size, seed

    def __getitem__(self, item):
        (number, epoch, counts), size = item, self.size
        image = open_picture(self.found[number][0])
        if epoch:
            image = random_crop(image, size, random.Random(f"{self.seed} {epoch} {number}"))
        else:
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR, bleed=(1 - 224 / 256) / 2)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.found[number][1] if counts else -1


def batches_per_epoch(n, settings, ranks, accumulation=1):
    """Return the number of batches that each rank gets of n pictures. They fill whole optimizer steps."""
    return math.ceil(n / (settings.batch_size * ranks.world_size * accumulation)) * accumulation


def batches(n, epoch, count, settings, ranks):
    """Yield `count` batches of one rank from n pictures: lists of items for Pictures, shuffled unless the epoch is 0.
    The last batches are filled from the beginning."""
    order = np.random.default_rng((settings.seed, epoch)).permutation(n) if epoch else range(n)
    size, stride = settings.batch_size, settings.batch_size * ranks.world_size
    for start in range(ranks.rank * size, count * stride, stride):
        yield [(int(order[i % n]), epoch, epoch > 0 or i < n) for i in range(start, start + size)]


def load(found, epochs, count, settings, ranks):
    """Return an iterator over this rank's batches of `found`, a list of (path, class number), in all these epochs."""
    order = (batch for epoch in epochs for batch in batches(len(found), epoch, count, settings, ranks))
    return iter(DataLoader(Pictures(found, settings.image_size, settings.seed), num_workers=settings.num_workers,
                           batch_sampler=order, pin_memory=torch.cuda.is_available()))
