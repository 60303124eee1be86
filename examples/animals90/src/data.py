"""Pictures in folders to batches: the same for any number of ranks and workers."""

import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from runtime.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # which ImageNet's weights expect


def list_pictures(root):
    """Return ({class: [paths]} of a folder with a folder per class, and the number of other files in these)."""
    if not Path(root).is_dir():
        raise UserError(f"{root} does not exist: run python prepare.py --from FOLDER or prepare.py --made_up first")
    files = {folder.name: [path for path in sorted(folder.rglob("[!.]*"))
                           if path.is_file() and "/." not in f"/{path.relative_to(folder)}"]
             for folder in sorted(Path(root).glob("[!.]*/"))}
    found = {name: [path for path in paths if path.suffix.lower() in SUFFIXES] for name, paths in files.items()}
    return found, sum(map(len, files.values())) - sum(map(len, found.values()))


def find_pictures(train_dir, val_dir):
    """Return (classes, [(path, class number)] to train on, to validate, number of other files). Raises UserError."""
    (train, others), (val, val_others) = list_pictures(train_dir), list_pictures(val_dir)
    problems = [f"the class {name} has no pictures in {root}: add some, or remove it from both folders"
                for root, found in ((train_dir, train), (val_dir, val)) for name in sorted({*train, *val})
                if not found.get(name)]
    problems += [f"{train_dir} has {len(train)} classes: a classifier needs 2 or more"] * (len(train) < 2)
    if problems:
        raise UserError("\n".join(problems))
    numbered = [[(path, n) for n, name in enumerate(train) for path in found[name]] for found in (train, val)]
    return [*train], *numbered, others + val_others


def open_picture(path):
    """Return a picture as an RGB image, upright by its EXIF orientation. Raises UserError."""
    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            image = image.point(lambda value: value / 256) if image.mode.startswith("I;16") else image
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        raise UserError(f"{path} cannot be read ({error!r}): remove it; python prepare.py --check finds more") from None


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
