"""Pictures in folders: order, crops and formats, and those that are bad or somebody else's."""

import io
import itertools
import os
import re
import shutil
import signal
import struct
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from animals90_runs import ESCAPE, EXAMPLE, data, one_sentence, prepare
from conftest import done, launch, patience
from PIL import EpsImagePlugin, Image

from runtime.errors import UserError

pytest_plugins = ["animals90_runs"]  # fixtures


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n, accumulation", [(42, 1), (42, 4), (7, 2), (48, 2)])
def test_each_picture_is_there_once_and_all_ranks_have_as_many_batches(n, accumulation, world_size):
    shares = [
        data.Pictures(
            [None] * n,
            SimpleNamespace(batch_size=4, seed=5),
            SimpleNamespace(rank=rank, world_size=world_size),
            accumulation,
        )
        for rank in range(world_size)
    ]
    count = shares[0].batches_per_epoch
    assert (
        count % accumulation == 0
        and (count - accumulation) * 4 * world_size < n <= count * 4 * world_size
    )
    for epoch in (0, 1):
        ranks = [[*share.batches(epoch)] for share in shares]
        assert {len(batches) for batches in ranks} == {count}
        assert {len(batch) for batches in ranks for batch in batches} == {4}
        order = [item for step in zip(*ranks) for batch in step for item in batch]
        numbers = [number for number, _, counts in order if counts]
        assert sorted(numbers[:n]) == [*range(n)]
        assert numbers[n:] == (numbers * 9)[: len(order) - n] if epoch else len(numbers) == n
        assert (numbers[:n] == [*range(n)]) == (epoch == 0)


def test_the_pictures_of_a_step_do_not_depend_on_ranks_or_workers(pictures):
    _, found, _, _ = data.find_pictures(pictures / "train", pictures / "val")

    def step(batch_size, world_size, accumulation, workers):
        settings = SimpleNamespace(
            batch_size=batch_size, seed=5, image_size=32, num_workers=workers
        )
        shown = []
        for rank in range(world_size):
            ranks = SimpleNamespace(rank=rank, world_size=world_size)
            batches = itertools.islice(
                data.Pictures(found, settings, ranks).load([3]), accumulation
            )
            shown += [
                (x.numpy().tobytes(), int(label)) for batch in batches for x, label in zip(*batch)
            ]
        return sorted(shown)

    assert len(step(8, 1, 1, 0)) == 8
    assert step(8, 1, 1, 0) == step(4, 2, 1, 2) == step(2, 2, 2, 1)


def test_random_crops_have_the_asked_sizes_and_shapes(monkeypatch):
    boxes = []
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, how, box: boxes.append(box) or self
    )
    rng = data.random.Random(0)
    for _ in range(500):
        data.random_crop(Image.new("RGB", (120, 90)), 32, rng)
    shares = [(x2 - x1) * (y2 - y1) / (120 * 90) for x1, y1, x2, y2 in boxes]
    ratios = [(x2 - x1) / (y2 - y1) for x1, y1, x2, y2 in boxes]
    assert min(x1 for x1, *_ in boxes) >= 0 and max(x2 for _, _, x2, _ in boxes) <= 120
    assert 0.25 <= min(shares) < 0.3 and 0.9 < max(shares) <= 1
    assert 0.7499 < min(ratios) < 0.78 and 1.3 < max(ratios) < 1.3334


def test_every_kind_of_picture_becomes_upright_rgb(tmp_path):
    upright, exif = Image.new("RGB", (40, 20), (200, 40, 40)), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    upright.save(tmp_path / "turned.JPG", exif=exif)
    assert data.open_picture(tmp_path / "turned.JPG").size == (20, 40)
    for mode, name in (
        ("L", "grey.png"),
        ("P", "palette.gif"),
        ("CMYK", "print.jpeg"),
        ("RGBA", "alpha.webp"),
        ("1", "bits.bmp"),
        ("LA", "grey_alpha.png"),
    ):
        upright.convert(mode).save(tmp_path / name)
        assert data.open_picture(tmp_path / name).mode == "RGB", name
    Image.fromarray(np.full((20, 40), 40_000, np.uint16)).save(tmp_path / "16_bit.png")
    assert data.open_picture(tmp_path / "16_bit.png").getpixel((0, 0)) == (
        156,
        156,
        156,
    )  # 40,000 / 256


def test_hidden_files_and_folders_are_skipped(pictures, tmp_path):
    for name in (
        "a/1.jpg",
        "a/.2.jpg",
        "a/.hidden/3.jpg",
        "a/b/.c/d/4.jpg",
        "a/b/5.jpg",
        ".hidden/6.jpg",
        "a/b/notes",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found, notes = data.list_pictures(tmp_path)
    assert {name: [path.name for path in paths] for name, paths in found.items()} == {
        "a": ["1.jpg", "5.jpg"]
    }
    assert notes == [f"1 files in {tmp_path} are not pictures (.jpg .jpeg .png .bmp .gif .webp)"]


def test_pictures_are_split_by_their_bytes_and_duplicates_dropped(pictures, tmp_path):
    source, to = tmp_path / "mine", tmp_path / "data"

    def prepared(val_share):
        """(what was printed, {path} of a picture)."""
        run = done(prepare("--from", source, "--val_share", val_share, to=to))
        return run, {path.relative_to(to) for path in to.rglob("*.jpg")}

    shutil.copytree(pictures / "train", source)
    shutil.copy(source / "class_00" / "00001.jpg", source / "class_00" / "again.jpg")
    (source / "class_01" / "broken.png").write_bytes(b"nothing")
    first, before = prepared(0.3)
    assert "1 duplicate, 1 unreadable" in first.stdout and "broken.png" in first.stderr
    shutil.copytree(pictures / "val", source / "more", dirs_exist_ok=True)
    shutil.copytree(pictures / "val" / "class_02", source / "class_02" / "deeper")
    _, after = prepared(0.3)
    assert (
        len(before) == 42
        and before < after
        and 4 < sum(path.parts[0] == "val" for path in before) < 22
    )
    (source / ".hidden").mkdir()
    for path in source.glob("class_00/*.jpg"):  # relative links instead
        path.rename(source / ".hidden" / path.name)
        path.symlink_to(Path("..", ".hidden", path.name))
    _, moved = prepared(0.7)
    assert {path.parts[1:] for path in moved} == {path.parts[1:] for path in after} and len(
        moved
    ) == len(after)
    assert sum(path.parts[0] == "val" for path in moved) > 0.5 * len(moved)
    assert all((to / path).resolve().is_relative_to(to) for path in moved)
    (source / "class_00").rename(source / "class_other")
    again, _ = prepared(0.7)
    assert (
        again.stderr.count("moved: ") == len([*(source / "class_other").glob("*.jpg")]) - 1
    )  # one is a duplicate
    before = sorted(to.rglob("*"))
    for target, args, sentence in (
        (pictures, ["--from", source], "has other pictures: choose another folder"),
        (to, ["--made_up"], "has other pictures: choose another folder"),
        (tmp_path / "new", ["--from", source / "class_01"], "has no pictures: put those of"),
        (tmp_path / "new", ["--from", "nowhere"], "nowhere does not exist: run python"),
        (to, ["--from", to / "val"], "jpg is in .*data itself: use another --from"),
        (tmp_path / "new", ["--from", source, "--val_share=7"], "must be between 0 and 1"),
        (tmp_path / "new", ["--made_up", "--size=0"], "--size must be at least 8"),
    ):
        refused = prepare(*args, to=target)
        assert (
            refused.returncode == 2
            and re.search(sentence, refused.stderr)
            and refused.stderr.count("\n") == 1
        )
    assert sorted(to.rglob("*")) == before and not (tmp_path / "new").exists()


def png(width, height):
    """A PNG that begins as one of this size does, 1 bit per pixel."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = b"IDAT" + zlib.compress(bytes(100_000))
    chunks = [
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c))
        for c in (header, rows, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def gif(screen, frame):
    """A GIF with a screen and one frame of these sizes, which has no data."""
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", *screen, 0x80, 0, 0)
        + bytes(6)
        + b","
        + struct.pack("<HHHHB", 0, 0, *frame, 0)
        + b"\x02\x00;"
    )


def slow_jpeg(scans):
    """A JPEG of 30 million pixels in a few kB. Each of so many scans takes some 20 ms."""
    file = io.BytesIO()
    Image.new("L", (6000, 5000), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last_scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last_scan * scans + content[-2:]


BAD_PICTURES = {  # {name: (content, what the sentence says)}
    "bomb.png": (
        png(50_000, 50_000),
        "has more than 100,000,000 pixels: make it smaller, or remove it",
    ),
    "limit.png": (
        png(10_001, 10_000),
        "has more than 100,000,000 pixels: make it smaller, or remove it",
    ),
    "screen.gif": (
        gif((50_000, 50_000), (1, 1)),
        "has more than 100,000,000 pixels: make it smaller, or remove it",
    ),
    "frame.gif": (
        gif((1, 1), (50_000, 50_000)),
        "has more than 100,000,000 pixels: make it smaller, or remove it",
    ),
    "short.png": (png(10_000, 10_000), "cannot be read (OSError('image file is truncated"),
    "eps.jpg": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshow\n",
        "(it is none of JPEG, PNG",
    ),
    "svg.png": (
        b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "(it is none of JPEG, PNG, BMP",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:Image size"
)  # as data.py does, but pytest has filters of its own
@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_picture_is_one_sentence_before_it_is_decoded(name, tmp_path, monkeypatch):
    """Pillow would start Ghostscript for an EPS, whatever its name is. Here, gs leaves a mark."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\nmkdir {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    content, sentence = BAD_PICTURES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        data.open_picture(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path}/{name} ") and sentence in str(error.value)
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def test_a_picture_that_takes_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_CPU_SECONDS", 0.5)
    (tmp_path / "slow.jpg").write_bytes(slow_jpeg(2000))
    with pytest.raises(UserError, match="TimeoutError.*takes more than 0.5 seconds of a CPU"):
        data.open_picture(tmp_path / "slow.jpg")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def hostile_pictures(folder, pictures):
    """Copy the pictures, and add bad ones: files, a pipe, links out of the folder, names."""
    shutil.copytree(pictures / "train", folder)
    for name, (content, _) in BAD_PICTURES.items():
        (folder / "class_00" / name).write_bytes(content)
    os.mkfifo(folder / "class_00" / "pipe.jpg")
    (folder / "class_00" / "zero.png").symlink_to("/dev/zero")
    (folder / "class_00" / "loop.gif").symlink_to("loop.gif")
    (folder / "class_01" / f"{ESCAPE}.jpg").write_bytes(b"")
    (folder / "class_02" / "elsewhere.jpg").symlink_to(pictures / "val" / "class_02" / "00000.jpg")
    (folder / "class_03").symlink_to(pictures / "val" / "class_02")
    with open(folder / "class_00" / "huge.bmp", "wb") as file:
        file.truncate(1_000_000_001)


def test_prepare_names_bad_pictures_and_skips_links_out_of_the_folder(pictures, tmp_path):
    (tmp_path / "data").mkdir()
    hostile_pictures(tmp_path / "data" / "train", pictures)
    shutil.copytree(pictures / "val", tmp_path / "data" / "val")
    began = time.monotonic()
    checked = prepare("--check", to=tmp_path / "data")
    taken = done(prepare("--from", tmp_path / "data" / "train", to=tmp_path / "new"))
    assert time.monotonic() - began < patience(20)
    links = (
        f"3 links in {tmp_path}/data/train lead out of it and are skipped: "
        "replace them with copies\n"
    )
    assert checked.returncode == 2 and checked.stderr == links
    *lines, last = checked.stdout.splitlines()
    assert (
        last == "68 pictures, 11 unreadable" and len(lines) == 11 and "\x1b" not in checked.stdout
    )
    assert (
        taken.stderr.startswith(links)
        and taken.stderr.count("\nskipped: ") == 11
        and "\x1b" not in taken.stderr
    )
    assert re.search(r"^\d+ train, \d+ val, 0 duplicates, 11 unreadable$", taken.stdout.rstrip())
    for sentence in (
        *(sentence for _, sentence in BAD_PICTURES.values()),
        "pipe.jpg is a pipe or a device, not a file",
        "huge.bmp has 1,000,000,001 bytes, and at most",
        r"\x1b]0;x\x07\x1b[2J\n.jpg cannot be read",
    ):
        assert sentence in checked.stdout and sentence in taken.stderr
    assert len([*(tmp_path / "new").rglob("*.jpg")]) == 42


def test_prepare_reads_and_writes_below_the_home_folder(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(pictures / "train", tmp_path / "mine")
    done(launch(EXAMPLE / "prepare.py", "--from=~/mine", "--to=~/new"))
    refused = launch(EXAMPLE / "prepare.py", "--from=$NOT_SET/mine", "--to=~/other")
    assert len([*(tmp_path / "new").rglob("*.jpg")]) == 42 and not (tmp_path / "other").exists()
    assert (refused.returncode, refused.stderr) == (
        2,
        "$NOT_SET/mine: the variable NOT_SET is not set: set it, or write the folder itself\n",
    )


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("bomb.png", "/bomb.png has more than 100,000,000 pixels: make it smaller"),
        ("pipe.jpg", "/pipe.jpg is a pipe or a device, not a file: replace it"),
    ],
)
def test_a_bad_picture_ends_training_in_one_sentence(train, pictures, tmp_path, name, sentence):
    shutil.copytree(pictures / "train", tmp_path / "train")
    if name == "pipe.jpg":
        os.mkfifo(tmp_path / "train" / "class_01" / name)
    else:
        (tmp_path / "train" / "class_01" / name).write_bytes(BAD_PICTURES[name][0])
    one_sentence(train(f"--train_dir={tmp_path}/train", "--num_workers=1"), sentence)


def test_an_unreadable_picture_ends_the_run_with_its_name(train, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    broken = tmp_path / "data" / "train" / "class_01" / "00003.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    refused = train(f"--train_dir={tmp_path}/data/train", "--num_workers=1")
    assert refused.returncode == 2
    assert re.search(
        rf"^{broken} cannot be read \(OSError\(.*\): remove it; python prepare.py --check",
        refused.stderr,
    )
    checked = prepare("--check", to=tmp_path / "data")
    assert checked.returncode == 2 and checked.stdout.count("cannot be read") == 1
    assert str(broken) in checked.stdout and "57 pictures, 1 unreadable" in checked.stdout


def test_links_out_of_a_folder_are_not_trained_on(train, pictures, tmp_path):
    shutil.copytree(pictures / "train", tmp_path / "train")
    for path in (tmp_path / "train" / "class_01").iterdir():
        path.unlink()
        path.symlink_to(pictures / "train" / "class_01" / path.name)
    refused = train(f"--train_dir={tmp_path}/train")
    assert refused.returncode == 2 and refused.stderr == (
        f"the class class_01 has no pictures in {tmp_path}/train: add some, or remove it from both "
        "folders\n"
        f"14 links in {tmp_path}/train lead out of it and are skipped: replace them with copies\n"
    )


def test_names_of_others_are_printed_without_escapes(train, pictures, tmp_path):
    for name in ("class_00", "class_01", ESCAPE):
        (tmp_path / name).mkdir()
    refused = train(f"--train_dir={tmp_path}")
    assert (
        refused.returncode == 2 and refused.stderr.count("\n") == 5 and "\x1b" not in refused.stderr
    )
    assert rf"the class \x1b]0;x\x07\x1b[2J\n has no pictures in {tmp_path}: add" in refused.stderr


def test_prepare_writes_through_no_link(pictures, tmp_path):
    precious = tmp_path / "precious"
    shutil.copytree(pictures / "val" / "class_00", precious)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in precious.iterdir()}
    made_up = ("--made_up", "--classes=2", "--train=2", "--val=2", "--size=8")
    for i, (link, target) in enumerate(
        (
            ("train", tmp_path),
            ("val", tmp_path),
            ("train/class_00", precious),
            ("val/class_01", precious),
        )
    ):
        to = tmp_path / str(i)
        (to / link).parent.mkdir(parents=True)
        (to / link).symlink_to(target)
        for arguments in (["--from", pictures / "train"], made_up):
            one_sentence(
                prepare(*arguments, to=to),
                f"{to}/{link} is a link, and writing would change its target",
            )
        assert [*to.rglob("*")] == [
            *filter(None, [(to / link).parent if "/" in link else None]),
            to / link,
        ]
    assert before == {path: (path.stat().st_ino, path.read_bytes()) for path in precious.iterdir()}
