"""examples/animals90: the classifier against plain PyTorch and transformers, with real runs on CPU."""

import fcntl
import functools
import importlib.util
import io
import itertools
import json
import os
import pkgutil
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, Payload, done, kill, launch, patience, planted, wait_until
from PIL import EpsImagePlugin, Image
from transformers import ResNetConfig, ResNetForImageClassification

import configurator
from runtime.errors import UserError
from runtime.files import write_atomic
from runtime.torch_files import SAFE_GLOBALS

EXAMPLE = ROOT / "examples" / "animals90"
SCRIPT = EXAMPLE / "src" / "train_deepspeed.py"
PLAIN = EXAMPLE / "measure" / "plain.py"
UTILS = EXAMPLE / "src" / "utils.py"
DEFAULT_JSON = EXAMPLE / "ds_config_rtx5090.json"
DEFAULT = json.loads(DEFAULT_JSON.read_text())
# Adam doesn't make steps of rounding errors, and weight decay is strong
SMOOTH = {**DEFAULT, "optimizer": {"type": "AdamW", "params": {"eps": 1e-1, "weight_decay": 0.5}}}
TWO_RANKS = ("--batch_size=8", "--gradient_accumulation_steps=2")
TIMES = ("seconds", "val_seconds", "images_per_s", "it_per_s", "waited_s", "memory_gb")
DUMP = """
import torch
from runtime.cluster import ranks
shut_down = ranks.shut_down
def dump(code=0):
    if model := sys._getframe(1).f_globals.get("model"):  # not for exit_together()
        torch.save(model.state_dict(), "{folder}/model_%d.pt" % ranks.RANK)
        print("weight decay", sys._getframe(1).f_globals["optimizer"].param_groups[0]["weight_decay"])
    shut_down(code)
ranks.shut_down = dump
"""
NO_COMPILER = """
from deepspeed.ops.op_builder import CPUAdamBuilder
def load(self):
    raise RuntimeError("no compiler")
CPUAdamBuilder.load = load
"""
PRINT_RECIPE = """
import json
from runtime.engine import setup
def print_recipe(recipe, *args):
    print(json.dumps(vars(recipe)))
    raise SystemExit
setup.setup_device = print_recipe
"""


def load(name):
    """A module of the example. Its names model and data are the project's in this process."""
    spec = importlib.util.spec_from_file_location(f"animals90_{Path(name).stem}", EXAMPLE / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model, data = load("src/model.py"), load("src/data.py")
figures = load(EXAMPLE / "measure" / "table.py")


def prepare(*args, to):
    return launch(EXAMPLE / "prepare.py", *args, f"--to={to}")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """3 classes of 14 and 5 pictures: 42 in batches of 4 are 11 batches, the last one of 2."""
    folder = tmp_path_factory.mktemp("animals")
    done(prepare("--made_up", "--classes=3", "--train=14", "--val=5", "--size=40", to=folder / "data"))
    return folder / "data"


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A folder that transformers saved: a ResNet-18 for 3 classes with random weights."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    ResNetForImageClassification(ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], num_labels=3,
                                              hidden_sizes=[64, 128, 256, 512])).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def train(pictures, weights, tmp_path_factory):
    """train("--epochs=2", ranks=2, cwd=..., plant="code", config={...}): a small run. It returns returncode, stdout,
    stderr, cwd, epochs (the history's records without their times) and models (of each rank at the end)."""

    def run(*args, ranks=1, cwd=None, plant="", script=SCRIPT, config=None, **options):
        cwd = cwd or tmp_path_factory.mktemp("run")
        if config:
            (cwd / "ds.json").write_text(json.dumps(config))
            args = [*args, f"--config={cwd}/ds.json"]
        own_path = f"sys.path.insert(0, {str(script.parent)!r})"  # whose model.py is another one than the project's
        file = planted(cwd, f"{own_path}\n{DUMP.format(folder=cwd)}\n{plant}", script)
        ended = launch(file, f"--train_dir={pictures}/train", f"--val_dir={pictures}/val", f"--pretrained={weights}",
                       "--image_size=32", "--num_workers=0", "--batch_size=4", "--epochs=1",
                       f"--log_dir={cwd}/logs", *[f"--checkpoint_dir={cwd}/checkpoints"] * (script != PLAIN), *args,
                       ranks=ranks, **options)
        history = cwd / "logs" / "training_history.json"
        epochs = json.loads(history.read_text())["epochs"] if history.exists() else []
        return SimpleNamespace(returncode=ended.returncode, stdout=ended.stdout, stderr=ended.stderr, cwd=cwd, epochs=[
                {key: value for key, value in epoch.items() if key not in TIMES} for epoch in epochs],
            models=[torch.load(path) for path in sorted(cwd.glob("model_*.pt"))])

    return run


@pytest.fixture(scope="session")
def two_ranks(train):
    """4 epochs on 2 ranks: 42 pictures are 3 batches of each, and with 2 batches per step 4 of them."""
    return done(train("--epochs=4", *TWO_RANKS, "--save_interval=2", f"--deepspeed_config={DEFAULT_JSON}", ranks=2))


def link_tree(source, to):
    """Copy a folder by hard links: a checkpoint has 134 MB."""
    shutil.copytree(source, to, copy_function=os.link)


def edit_info(folder, **changes):
    info = json.loads((folder / "extra_info.json").read_text())
    write_atomic(folder / "extra_info.json", json.dumps(info | changes))  # a new file: the old one has other links


def saved_module(folder):
    (file,) = folder.glob("*/mp_rank_00_model_states.pt")
    return torch.load(file)["module"]


def assert_same_tensors(one, other, tolerance=0.0):
    torch.testing.assert_close(dict(one), dict(other), rtol=tolerance, atol=tolerance)


def test_the_network_is_transformers_resnet_18(weights, tmp_path):
    assert sum(p.numel() for p in model.ResNet18Animals90(pretrained=False).parameters()) == 11_176_512 + 513 * 90
    x = torch.randn(2, 3, 48, 48)
    theirs = ResNetForImageClassification.from_pretrained(weights).eval()
    torch.testing.assert_close(model.ResNet18Animals90(3, weights).eval()(x), theirs(x).logits, rtol=0, atol=1e-6)
    other_head = model.ResNet18Animals90(7, weights).eval()
    torch.testing.assert_close(other_head.resnet(x).pooler_output, theirs.resnet(x).pooler_output, rtol=0, atol=1e-6)
    assert other_head(x).shape == (2, 7)
    torch.save({"module": theirs.state_dict()}, tmp_path / "deepspeed.pt")
    ours = model.ResNet18Animals90(3, tmp_path / "deepspeed.pt").train()
    torch.testing.assert_close(ours(x), theirs.train()(x).logits)
    assert_same_tensors(ours.state_dict(), theirs.state_dict(), 1e-6)  # with the statistics that training moves


def test_weights_that_do_not_fit_or_could_run_code_are_refused(tmp_path):
    small = ResNetConfig(layer_type="basic", depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512])
    ResNetForImageClassification(small).save_pretrained(tmp_path)
    torch.save({"module": functools.partial(print)}, tmp_path / "code.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"1234567890")
    for source in (tmp_path, tmp_path / "code.pt", tmp_path / "cut.safetensors", tmp_path / "nothing"):
        with pytest.raises(OSError, match=r"--pretrained PATH, .* or --pretrained none"):
            model.ResNet18Animals90(3, str(source))


def test_recomputed_activations_move_the_statistics_once():
    states = []
    for recompute in (False, True):
        torch.manual_seed(1)
        ours = model.ResNet18Animals90(3, pretrained=False)
        if recompute:
            ours.recompute_activations()
        for _ in range(2):
            ours(torch.randn(4, 3, 32, 32)).square().sum().backward()
        states.append(ours.state_dict() | {name: p.grad for name, p in ours.named_parameters()})
    assert_same_tensors(*states)
    assert states[1]["resnet.encoder.stages.0.layers.0.layer.0.normalization.num_batches_tracked"] == 2


def test_statistics_stay_in_float32_in_half_precision():
    torch.manual_seed(1)
    single = model.ResNet18Animals90(3, pretrained=False)
    half = model.ResNet18Animals90(3, pretrained=False)
    half.load_state_dict(single.state_dict())
    half.bfloat16()
    for _ in range(30):
        x = torch.randn(4, 3, 32, 32)
        single(x)
        half(x.bfloat16())
    name = "resnet.embedder.embedder.normalization.running_var"
    assert half.state_dict()[name].dtype == torch.float32 != half.classifier[1].weight.dtype
    torch.testing.assert_close(half.state_dict()[name], single.state_dict()[name], rtol=5e-3, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n, accumulation", [(42, 1), (42, 4), (7, 2), (48, 2)])
def test_each_picture_is_there_once_and_all_ranks_have_as_many_batches(n, accumulation, world_size):
    shares = [data.Pictures([None] * n, SimpleNamespace(batch_size=4, seed=5),
                            SimpleNamespace(rank=rank, world_size=world_size), accumulation)
              for rank in range(world_size)]
    count = shares[0].batches_per_epoch
    assert count % accumulation == 0 and (count - accumulation) * 4 * world_size < n <= count * 4 * world_size
    for epoch in (0, 1):
        ranks = [[*share.batches(epoch)] for share in shares]
        assert {len(batches) for batches in ranks} == {count}
        assert {len(batch) for batches in ranks for batch in batches} == {4}
        order = [item for step in zip(*ranks) for batch in step for item in batch]
        numbers = [number for number, _, counts in order if counts]
        assert sorted(numbers[:n]) == [*range(n)]
        assert numbers[n:] == (numbers * 9)[:len(order) - n] if epoch else len(numbers) == n
        assert (numbers[:n] == [*range(n)]) == (epoch == 0)


def test_the_pictures_of_a_step_do_not_depend_on_ranks_or_workers(pictures):
    _, found, _, _ = data.find_pictures(pictures / "train", pictures / "val")

    def step(batch_size, world_size, accumulation, workers):
        settings = SimpleNamespace(batch_size=batch_size, seed=5, image_size=32, num_workers=workers)
        shown = []
        for rank in range(world_size):
            ranks = SimpleNamespace(rank=rank, world_size=world_size)
            batches = itertools.islice(data.Pictures(found, settings, ranks).load([3]), accumulation)
            shown += [(x.numpy().tobytes(), int(label)) for batch in batches for x, label in zip(*batch)]
        return sorted(shown)

    assert len(step(8, 1, 1, 0)) == 8
    assert step(8, 1, 1, 0) == step(4, 2, 1, 2) == step(2, 2, 2, 1)


def test_random_crops_have_the_asked_sizes_and_shapes(monkeypatch):
    boxes = []
    monkeypatch.setattr(Image.Image, "resize", lambda self, size, how, box: boxes.append(box) or self)
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
    for mode, name in (("L", "grey.png"), ("P", "palette.gif"), ("CMYK", "print.jpeg"), ("RGBA", "alpha.webp"),
                       ("1", "bits.bmp"), ("LA", "grey_alpha.png")):
        upright.convert(mode).save(tmp_path / name)
        assert data.open_picture(tmp_path / name).mode == "RGB", name
    Image.fromarray(np.full((20, 40), 40_000, np.uint16)).save(tmp_path / "16_bit.png")
    assert data.open_picture(tmp_path / "16_bit.png").getpixel((0, 0)) == (156, 156, 156)  # 40,000 / 256


def test_hidden_files_and_folders_are_skipped(pictures, tmp_path):
    for name in ("a/1.jpg", "a/.2.jpg", "a/.hidden/3.jpg", "a/b/.c/d/4.jpg", "a/b/5.jpg", ".hidden/6.jpg", "a/b/notes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found, notes = data.list_pictures(tmp_path)
    assert {name: [path.name for path in paths] for name, paths in found.items()} == {"a": ["1.jpg", "5.jpg"]}
    assert notes == [f"1 files in {tmp_path} are not pictures (.jpg .jpeg .png .bmp .gif .webp)"]


def test_two_ranks_are_distributed_data_parallel(train):
    """Over two epochs, the first of which is the warm-up, against the baseline that table.py measures."""
    # With fewer pixels or pictures per batch norm, and steps that Adam makes of rounding errors, no two programs agree
    options = ("--gradient_accumulation_steps=2", "--learning_rate=1e-4", "--image_size=48", "--batch_size=8",
               "--epochs=2")
    ours = done(train(*options, ranks=2, config=SMOOTH))
    plain = done(train(*options, "--eps=1e-1", "--weight_decay=0.5", ranks=2, script=PLAIN))
    assert ours.epochs[0]["learning_rate"] == 1e-4
    for mine, theirs in zip(ours.epochs, plain.epochs, strict=True):
        for key in ("train_loss", "val_loss", "val_acc"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-5)
    assert_same_tensors(ours.models[0], plain.models[0], 1e-5)


def test_all_ranks_end_with_the_same_statistics(two_ranks):
    assert_same_tensors(*two_ranks.models)


def test_the_best_model_has_the_printed_accuracy(two_ranks, pictures):
    """Section 8's snippet, and a loop of its own over the pictures."""
    best = two_ranks.cwd / "checkpoints" / "best_model"
    net = model.ResNet18Animals90(num_classes=3, pretrained=False)
    net.load_state_dict(torch.load(best / "best" / "mp_rank_00_model_states.pt")["module"])
    net.eval()
    right = []
    for path in sorted(pictures.glob("val/*/*")):
        edge = 40 * 16 / 256
        image = Image.open(path).resize((32, 32), Image.Resampling.BILINEAR, box=(edge, edge, 40 - edge, 40 - edge))
        x = (np.asarray(image) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
        guess = net(torch.tensor(x, dtype=torch.float32).permute(2, 0, 1)[None]).argmax().item()
        right.append(path.parent.name == f"class_{guess:02d}")
    info = json.loads((best / "extra_info.json").read_text())
    assert len(right) == 15 and info["val_acc"] == info["best_val_acc"] == pytest.approx(100 * sum(right) / 15)
    assert info["best_epoch"] == info["epoch"] and info["classes"] == ["class_00", "class_01", "class_02"]


def test_a_resumed_run_is_the_run_that_never_stopped(train, two_ranks):
    cwd = two_ranks.cwd.with_name("resumed")
    cwd.mkdir()
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_2", cwd / "checkpoints" / "epoch_2")
    resumed = done(train("--epochs=4", *TWO_RANKS, f"--resume={cwd}/checkpoints", ranks=2, cwd=cwd))
    assert "Epoch 3/4:" in resumed.stdout and "Epoch 2/4:" not in resumed.stdout
    assert resumed.epochs == two_ranks.epochs and len(resumed.epochs) == 4
    best = json.loads((cwd / "checkpoints" / "best_model" / "extra_info.json").read_text())
    assert best["epoch"] == best["best_epoch"] >= 3  # the best one in this folder
    assert_same_tensors(resumed.models[0], two_ranks.models[0])


@pytest.mark.long
@pytest.mark.parametrize("option, tolerance", [("--bf16", 0.0), ("--offload_optimizer", 1e-5)])
def test_a_resume_goes_on_in_bfloat16_and_with_offload(train, option, tolerance):
    """DeepSpeed's files have other names in bfloat16. With offload, PyTorch's AdamW is on the CPU."""
    options = ("--epochs=2", "--save_interval=1", "--batch_size=8", option)
    whole = done(train(*options, plant=NO_COMPILER))
    resumed = done(train(*options, f"--resume={whole.cwd}/checkpoints/epoch_1", plant=NO_COMPILER))
    assert "Epoch 2/2:" in resumed.stdout and "Epoch 1/2:" not in resumed.stdout
    assert_same_tensors(resumed.models[0], whole.models[0], tolerance)
    assert resumed.epochs[1]["train_loss"] == pytest.approx(whole.epochs[1]["train_loss"], abs=tolerance)


@pytest.mark.long
def test_the_json_counts_after_a_resume_too(train, two_ranks):
    resume = f"--resume={two_ranks.cwd}/checkpoints/epoch_4"
    resumed = done(train(resume, "--epochs=4", *TWO_RANKS, ranks=2, config=SMOOTH))
    assert "weight decay 0.5\n" in resumed.stdout


def test_another_number_of_ranks_takes_the_weights_of_the_newest_epoch(train, two_ranks, tmp_path):
    """The default JSON has round_robin_gradients, with which the places in DeepSpeed's files are wrong."""
    for name in ("epoch_4", "best_model", "epoch_2"):  # in another order than they were saved in
        link_tree(two_ranks.cwd / "checkpoints" / name, tmp_path / name)
        edit_info(tmp_path / name)
    resumed = done(train(f"--resume={tmp_path}", "--epochs=4"))
    assert "Adam's moments begin anew" in resumed.stdout and not resumed.epochs
    assert "has 4 epochs: use --epochs 5 or more to train on" in resumed.stdout
    assert_same_tensors(resumed.models[0], two_ranks.models[0])


def test_a_resume_adds_the_epoch_that_a_kill_after_best_model_left_out(train, two_ranks, tmp_path):
    link_tree(two_ranks.cwd / "checkpoints" / "best_model", tmp_path / "checkpoints" / "best_model")
    best = json.loads((tmp_path / "checkpoints" / "best_model" / "extra_info.json").read_text())
    resumed = done(train(f"--epochs={best['epoch']}", f"--resume={tmp_path}/checkpoints", cwd=tmp_path))
    added = tmp_path / "checkpoints" / f"epoch_{best['epoch']}"
    assert json.loads((added / "extra_info.json").read_text()) == best | {"saved_by": [1, "float32", False]}
    assert_same_tensors(saved_module(added), resumed.models[0])
    assert len([*added.glob("*/*_states.pt")]) == 2


@pytest.mark.long
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(train):
    killed = train("--epochs=3", "--save_interval=1", "--batch_size=16", plant="""
import runtime.files
replace_dir, calls = runtime.files.replace_dir, []
def die(new, path):
    calls.append(path)
    if len(calls) == 2:  # epoch_1, after best_model: the file is there already, half of the renames are done
        os.rename(path.with_name("best_model"), path.with_name("best_model.old"))
        os._exit(9)
    replace_dir(new, path)
runtime.files.replace_dir = die
""")
    checkpoints = killed.cwd / "checkpoints"
    assert killed.returncode == 9 and {path.name for path in checkpoints.iterdir()} == {
        ".lock", ".saving", "best_model.old"}
    resumed = done(train("--epochs=2", "--batch_size=16", f"--resume={checkpoints}", cwd=killed.cwd))
    assert [epoch["epoch"] for epoch in resumed.epochs] == [1, 2]
    assert not (checkpoints / ".saving").exists() and (checkpoints / "epoch_2").exists()


def test_overwriting_keeps_the_earlier_run_until_there_is_a_checkpoint(train, two_ranks, tmp_path):
    """The limit on a file's size makes torch.save raise what a full disk does."""
    for name in ("epoch_4", "best_model", "best_model.old"):
        link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "checkpoints" / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "training_history.json").write_text('{"epochs": 3}')
    stopped = train("--overwrite", cwd=tmp_path, plant="""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, 10_000_000))
""")
    assert stopped.returncode == 2 and re.fullmatch("a file or a worker failed .*: make room, .*\n", stopped.stderr)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        ".lock", "epoch_4", "best_model", "best_model.old"}
    done(train("--overwrite", "--batch_size=16", cwd=tmp_path))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".lock", "best_model", "epoch_1"}


# float16, on CPU: in a copy of the script that doesn't ask for a GPU


FLOAT16 = """
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).is_fp16_supported = lambda self: True
conv2d = torch.nn.functional.conv2d  # in float16, a hundred times slower on CPU
torch.nn.functional.conv2d = lambda x, weight, *args: conv2d(x.float(), weight.float(), *args).to(x.dtype)
"""


@pytest.fixture
def float16(train, tmp_path):
    """float16({"loss_scale_window": 2}): 6 steps in float16, with these keys in the JSON's block."""
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "animals90", ignore=shutil.ignore_patterns("data", "check*"))
    script = tmp_path / "examples" / "animals90" / "src" / "train_deepspeed.py"
    script.write_text(script.read_text().replace("fp16 and not on_gpu", "False"))

    return lambda block: done(train("--fp16", "--batch_size=8", script=script, plant=FLOAT16,
                                    config={**DEFAULT, "fp16": {**DEFAULT["fp16"], **block}}))


def test_the_loss_scale_grows(float16):
    run = float16({"initial_scale_power": 4, "loss_scale_window": 2})
    assert run.epochs[0]["loss_scale"] == 2.0**6  # after 3 and 5 steps
    assert run.epochs[0]["skipped_steps"] == 0


def test_a_skipped_step_is_none_of_the_schedule_and_statistics_stay_float32(float16):
    run = float16({"initial_scale_power": 18, "hysteresis": 1})
    skipped = run.epochs[0]["skipped_steps"]
    assert 0 < skipped < 6 and run.epochs[0]["learning_rate"] == pytest.approx(0.001 * (6 - skipped) / 6)
    info = json.loads((run.cwd / "checkpoints" / "epoch_1" / "extra_info.json").read_text())
    assert info["steps"] == 6 - skipped
    module = saved_module(run.cwd / "checkpoints" / "epoch_1")
    assert {str(tensor.dtype) for name, tensor in module.items() if "running" in name} == {"torch.float32"}
    assert {str(tensor.dtype) for name, tensor in module.items() if "weight" in name} == {"torch.float16"}


def test_the_json_says_which_adam_and_whether_there_is_a_warmup(train):
    def recipe(config, *args):
        config = {"zero_optimization": {"stage": 2}, **config}
        return json.loads(done(train(*args, plant=PRINT_RECIPE, config=config)).stdout)

    found = recipe({"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": "auto"}},
                    "flops_profiler": {"profile_step": 10, "module_depth": -1, "detailed": True}}, f"--seed={9**30}")
    assert found["adamw"] == {"lr": 0.001, "weight_decay": 0.0, "betas": [0.8, 0.9]} and found["warmup_steps"] == 1
    found = recipe({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_min_lr": 1e-4}}})
    assert found["adamw"] == {"lr": 0.001, "weight_decay": 0.01}
    assert (found["start_lr"], found["warmup_steps"]) == (1e-4, 11)


@pytest.mark.parametrize("config, sentences", [
    ({"optimizer": {"type": "Lamb", "params": {"learning_rate": 1, "weight_decy": 1, "lr": 0.1}},
      "scheduler": {"type": "OneCycle"}, "train_batch_size": 5, "zero_optimization": {"stage": 3}},
     ['"optimizer.type" is "Lamb": write "AdamW" or "Adam"',
      '"optimizer.params.learning_rate" is not supported: remove it',
      '"optimizer.params.weight_decy" is not supported: did you mean',
      '"optimizer.params.lr" is 0.1: write 0.001 or "auto"', '"scheduler.type" is "OneCycle": write "WarmupLR"',
      '"train_batch_size" is 5, but the script sets it to 4', '"zero_optimization.stage" is 3: write 2']),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
      "optimizer": {"params": {"weight_decay": "0.1", "eps": float("inf")}}, "fp16": {"enabled": True},
      "scheduler": {"params": {"warmup_num_steps": -3}}, "flops_profiler": {"enabled": 1, "profile_step": "1"}},
     ['no effect below stage 3: remove it',
      '"optimizer.params.weight_decay" is "0.1": write a number of at least 0.0, or "auto"',
      '"optimizer.params.eps" is Infinity: write a number', '"scheduler.params.warmup_num_steps" is -3: write a number',
      '"fp16.enabled" is true, but dtype=float32: write "auto", or train in float16',
      '"flops_profiler.enabled" is 1: write true or false',
      '"flops_profiler.profile_step" is "1": write a whole number of at least 1']),
    ({"zero_optimization": {"stage": 2}, "optimizer": {"params": {"betas": [0.9, 1]}}}, ['"betas" is [0.9, 1]: write']),
    ({"zero_optimization": {"stage": 2}, "optimizer": {"params": 3}}, ['"optimizer.params" must be an object'])])
def test_jsons_are_refused(config, sentences, train):
    refused = train(config=config)
    assert refused.returncode == 2 and not [text for text in sentences if text not in refused.stderr], refused.stderr
    assert refused.stderr.count("\n") == len(sentences)


@pytest.mark.long
def test_offload_does_without_a_compiler(train):
    run = done(train("--offload_optimizer", "--batch_size=14", plant=NO_COMPILER))
    assert "cannot build DeepSpeed's CPU Adam (RuntimeError), so PyTorch's slower AdamW is used" in run.stdout
    assert run.epochs[0]["train_loss"] > 0


@pytest.mark.parametrize("arguments, sentence", [
    (["--train_dir=nowhere"], r"nowhere does not exist: .*prepare.py --from FOLDER .*prepare.py --made_up .*"),
    (["--train_dir={pictures}/val/class_00"], "the class class_00 has no pictures .* has 0 classes: .* 2 or more"),
    (["--batch_size=0", "--learning_rate=0", "--image_size=31", "--fp16", "--bf16", "--config=x.json",
      "--offload_optimizer", "--resume="],
     "batch_size=0 is too small: .*\nlearning_rate=0.0 is too small: .*\nimage_size=31 is too small: .*\n"
     "--resume has no value: write --resume PATH\n--fp16 and --bf16 exclude .*\n"
     "use one --config, or --offload_optimizer instead\n--fp16 needs a GPU: .*"),
    (["--batch_size=1", "--num_gpus=3"], "--num_gpus is an option of launch_deepspeed.py: .*\n--batch_size 1 needs .*"),
    (["--pretrained=nowhere"], "pretrained=nowhere isn't available or doesn't fit .*--pretrained none"),
    (["--resume={pictures}"], "resume=.* is not a complete checkpoint .*No such file.* drop --resume"),
    (["--log_dir={pictures}/train/class_00/00000.jpg"], "cannot write .*jpg .File exists.: .* another --log_dir=DIR")])
def test_mistakes_are_refused_in_one_sentence(train, pictures, arguments, sentence):
    refused = train(*(argument.format(pictures=pictures) for argument in arguments))
    assert refused.returncode == 2 and re.search(f"^{sentence}\\n$", refused.stderr, re.S), refused.stderr
    assert not refused.stdout


def test_a_checkpoint_of_other_pictures_or_of_another_run_is_refused(train, two_ranks, tmp_path):
    checkpoints = two_ranks.cwd / "checkpoints"
    lock = open(tmp_path / ".lock", "w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    for name in ("other", "later"):
        link_tree(checkpoints / "best_model", tmp_path / name / "best_model")
    edit_info(tmp_path / "other" / "best_model", epochs=[{"epoch": 1, "seconds": 1.0}])
    edit_info(tmp_path / "later" / "best_model", epoch=9)
    resume, other = f"--resume={checkpoints}/epoch_4", "is of another run or later epoch: use --resume, other folders"
    for arguments, sentence in (
            ([resume, "--image_size=48"], r"epoch_4 has other image_size \(32\): drop --resume"),
            ([], f"^[^\n]*checkpoints/\\w+/extra_info.json {other} or --overwrite\n$"),
            ([resume, f"--checkpoint_dir={tmp_path}/other"], f"other/best_model/extra_info.json {other}"),
            ([resume, f"--checkpoint_dir={tmp_path}/later"], f"later/best_model/extra_info.json {other}"),
            ([f"--checkpoint_dir={tmp_path}"], f"^another run is writing to {tmp_path}: .*--checkpoint_dir=DIR\n$"),
            ([f"--checkpoint_dir={tmp_path}/x", f"--log_dir={tmp_path}"], f"writing to {tmp_path}: .*--log_dir=DIR\n$"),
            ([f"--checkpoint_dir={tmp_path}/x", f"--log_dir={two_ranks.cwd}/logs"], f"training_history.json {other}")):
        refused = train(f"--checkpoint_dir={checkpoints}", *arguments)
        assert refused.returncode == 2 and re.search(sentence, refused.stderr), refused.stderr


def test_an_incomplete_or_dangerous_checkpoint_is_refused(train, two_ranks, tmp_path):
    def dangerous(folder, file):
        file.unlink()
        torch.save({"x": functools.partial(print)}, file)

    for i, (damage, sentence) in enumerate((
            (lambda folder, file: file.unlink(), "No such file or directory: '"),
            (lambda folder, file: write_atomic(file, file.read_bytes()[:-100]), "File is not a zip file): change"),
            (lambda folder, file: (folder / "latest").unlink(), "latest'): change or drop"),
            (lambda folder, file: edit_info(folder, steps="4", classes=None), "classes is None: Input should be"),
            (dangerous, "could run code: ['builtins.print', 'functools.partial']"))):
        folder = tmp_path / str(i)
        link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", folder)
        damage(folder, next(folder.glob("epoch_4/*zero_pp_rank_1*")))
        refused = train(f"--resume={folder}")
        assert refused.returncode == 2 and sentence in refused.stderr, refused.stderr
        assert refused.stderr.count("\n") == 1


def test_an_unreadable_picture_ends_the_run_with_its_name(train, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    broken = tmp_path / "data" / "train" / "class_01" / "00003.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    refused = train(f"--train_dir={tmp_path}/data/train", "--num_workers=1")
    assert refused.returncode == 2
    assert re.search(rf"^{broken} cannot be read \(OSError\(.*\): remove it; python prepare.py --check", refused.stderr)
    checked = prepare("--check", to=tmp_path / "data")
    assert checked.returncode == 2 and checked.stdout.count("cannot be read") == 1
    assert str(broken) in checked.stdout and "57 pictures, 1 unreadable" in checked.stdout


@pytest.mark.long
def test_a_killed_worker_ends_the_run_in_one_sentence(train):
    """Also if PyTorch's signal handler raises inside a __del__, which Python can only report."""
    stopped = train("--num_workers=1", plant="""
import data, signal, time
data.random_crop = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
class Slow:
    def __del__(self):
        time.sleep(600)
def load(self, epochs, load=data.Pictures.load):
    batches = load(self, epochs)
    if self.batches_per_epoch == 11:
        Slow()
    return batches
data.Pictures.load = load
""")
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr
    *_, line = stopped.stderr.splitlines()  # the signal's exception may first meet tqdm, which prints a warning
    assert re.match(r"a file or a worker failed \(DataLoader worker .*\): .* fewer --num_workers", line)


def test_a_loss_that_stays_nan_ends_the_run(train):
    """With 3 batches to train on and one to validate in each epoch."""
    stopped = train("--learning_rate=1e30", "--batch_size=16", "--epochs=9", "--save_interval=9")
    assert stopped.returncode == 2
    assert stopped.stderr == "10 batches had no finite loss: lower --learning_rate, or drop --fp16\n"


def test_a_loss_that_is_not_finite_is_null_in_the_files(train, tmp_path):
    """The 3 batches of an epoch are too few to end the run. A resume takes the files, and curves have a gap there."""
    first = done(train("--learning_rate=1e30", "--batch_size=16", "--epochs=1", "--save_interval=1"))
    history = first.cwd / "logs" / "training_history.json"
    info = first.cwd / "checkpoints" / "epoch_1" / "extra_info.json"
    for file in (history, info):
        assert not re.search("NaN|Infinity", file.read_text()), file
    assert json.loads(history.read_text())["epochs"][0]["val_loss"] is None
    second = done(train("--learning_rate=1e-3", "--batch_size=16", "--epochs=2", f"--resume={first.cwd}/checkpoints",
                        cwd=first.cwd))
    assert [epoch["epoch"] for epoch in second.epochs] == [1, 2] and second.epochs[0] == first.epochs[0]
    done(launch(UTILS, f"--history={history}", f"--output={tmp_path}/curves.png"))


@pytest.mark.long
def test_a_killed_launcher_leaves_no_process_and_no_traceback(pictures, tmp_path):
    command = [sys.executable, EXAMPLE / "launch_deepspeed.py", "--num_gpus=2", f"--train_dir={pictures}/train",
               f"--val_dir={pictures}/val", "--pretrained=none", "--image_size=32", "--num_workers=1", "--epochs=5000"]
    with open(tmp_path / "output", "w") as output:
        job = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True)
        try:
            wait_until(lambda: "Epoch 1/5000:" in (tmp_path / "output").read_text() or job.poll() is not None, 200)
            processes = psutil.Process(job.pid).children(recursive=True)
            job.kill()
        finally:
            kill(job)
    assert "Traceback" not in (tmp_path / "output").read_text() and len(processes) >= 5
    assert not psutil.wait_procs(processes, timeout=patience(100))[1]


def test_every_command_of_the_readme_that_trains_is_accepted():
    blocks = re.findall(r"^```\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.M | re.S)
    commands = [shlex.split(line, comments=True) for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    trained = [words[words.index(script) + 1:] for words in commands
               for script in ("launch_deepspeed.py", "src/train_deepspeed.py") if script in words]
    for arguments in trained:
        configurator.settings_of_script(SCRIPT, arguments)
    assert len(trained) >= 18


def test_the_readme_shows_the_table_of_what_was_measured():
    assert f"<!-- figures -->\n{figures.table()}\n<!-- end -->" in (EXAMPLE / "README.md").read_text()


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
    assert len(before) == 42 and before < after and 4 < sum(path.parts[0] == "val" for path in before) < 22
    (source / ".hidden").mkdir()
    for path in source.glob("class_00/*.jpg"):  # relative links instead
        path.rename(source / ".hidden" / path.name)
        path.symlink_to(Path("..", ".hidden", path.name))
    _, moved = prepared(0.7)
    assert {path.parts[1:] for path in moved} == {path.parts[1:] for path in after} and len(moved) == len(after)
    assert sum(path.parts[0] == "val" for path in moved) > 0.5 * len(moved)
    assert all((to / path).resolve().is_relative_to(to) for path in moved)
    (source / "class_00").rename(source / "class_other")
    again, _ = prepared(0.7)
    assert again.stderr.count("moved: ") == len([*(source / "class_other").glob("*.jpg")]) - 1  # one is a duplicate
    before = sorted(to.rglob("*"))
    for target, args, sentence in ((pictures, ["--from", source], "has other pictures: choose another folder"),
                                   (to, ["--made_up"], "has other pictures: choose another folder"),
                                   (tmp_path / "new", ["--from", source / "class_01"], "has no pictures: put those of"),
                                   (tmp_path / "new", ["--from", "nowhere"], "nowhere does not exist: run python"),
                                   (to, ["--from", to / "val"], "jpg is in .*data itself: use another --from"),
                                   (tmp_path / "new", ["--from", source, "--val_share=7"], "must be between 0 and 1"),
                                   (tmp_path / "new", ["--made_up", "--size=0"], "--size must be at least 8")):
        refused = prepare(*args, to=target)
        assert refused.returncode == 2 and re.search(sentence, refused.stderr) and refused.stderr.count("\n") == 1
    assert sorted(to.rglob("*")) == before and not (tmp_path / "new").exists()


# Files of others: nothing of them runs, hangs, ends in a traceback, or is written to through a link


ESCAPE = "\x1b]0;x\a\x1b[2J\n"  # a title, a clear screen and a new line


def one_sentence(run, *parts):
    """Assert that a run ended with exit code 2 and one line, which has these parts and no escape sequences."""
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.count("\n") == 1 and "\x1b" not in run.stdout + run.stderr, run.stderr
    assert not [part for part in parts if part not in run.stderr], run.stderr


def png(width, height):
    """A PNG that begins as one of this size does, 1 bit per pixel."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = b"IDAT" + zlib.compress(bytes(100_000))
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, rows, b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def gif(screen, frame):
    """A GIF with a screen and one frame of these sizes, which has no data."""
    return (b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(6) + b","
            + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x00;")


def slow_jpeg(scans):
    """A JPEG of 30 million pixels in a few kB. Each of so many scans takes some 20 ms."""
    file = io.BytesIO()
    Image.new("L", (6000, 5000), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last_scan = content[content.rindex(b"\xff\xda"):-2]
    return content[:-2] + last_scan * scans + content[-2:]


BAD_PICTURES = {  # {name: (content, what the sentence says)}
    "bomb.png": (png(50_000, 50_000), "has more than 100,000,000 pixels: make it smaller, or remove it"),
    "limit.png": (png(10_001, 10_000), "has more than 100,000,000 pixels: make it smaller, or remove it"),
    "screen.gif": (gif((50_000, 50_000), (1, 1)), "has more than 100,000,000 pixels: make it smaller, or remove it"),
    "frame.gif": (gif((1, 1), (50_000, 50_000)), "has more than 100,000,000 pixels: make it smaller, or remove it"),
    "short.png": (png(10_000, 10_000), "cannot be read (OSError('image file is truncated"),
    "eps.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshow\n", "(it is none of JPEG, PNG"),
    "svg.png": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "(it is none of JPEG, PNG, BMP"),
}


@pytest.mark.filterwarnings("ignore:Image size")  # as data.py does, but pytest has filters of its own
@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_picture_is_one_sentence_before_it_is_decoded(name, tmp_path, monkeypatch):
    """Pillow would start Ghostscript for an EPS, whatever its name is. Here that is a script which leaves a mark."""
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
    """Copy the pictures, and add those that are bad: files, a pipe, links out of the folder, names."""
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
    links = f"3 links in {tmp_path}/data/train lead out of it and are skipped: replace them with copies\n"
    assert checked.returncode == 2 and checked.stderr == links
    *lines, last = checked.stdout.splitlines()
    assert last == "68 pictures, 11 unreadable" and len(lines) == 11 and "\x1b" not in checked.stdout
    assert taken.stderr.startswith(links) and taken.stderr.count("\nskipped: ") == 11 and "\x1b" not in taken.stderr
    assert re.search(r"^\d+ train, \d+ val, 0 duplicates, 11 unreadable$", taken.stdout.rstrip())
    for sentence in (*(sentence for _, sentence in BAD_PICTURES.values()), "pipe.jpg is a pipe or a device, not a file",
                     "huge.bmp has 1,000,000,001 bytes, and at most", r"\x1b]0;x\x07\x1b[2J\n.jpg cannot be read"):
        assert sentence in checked.stdout and sentence in taken.stderr
    assert len([*(tmp_path / "new").rglob("*.jpg")]) == 42


def test_prepare_reads_and_writes_below_the_home_folder(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(pictures / "train", tmp_path / "mine")
    done(launch(EXAMPLE / "prepare.py", "--from=~/mine", "--to=~/new"))
    refused = launch(EXAMPLE / "prepare.py", "--from=$NOT_SET/mine", "--to=~/other")
    assert len([*(tmp_path / "new").rglob("*.jpg")]) == 42 and not (tmp_path / "other").exists()
    assert (refused.returncode, refused.stderr) == (
        2, "$NOT_SET/mine: the variable NOT_SET is not set: set it, or write the folder itself\n")


@pytest.mark.parametrize("name, sentence", [("bomb.png", "/bomb.png has more than 100,000,000 pixels: make it smaller"),
                                            ("pipe.jpg", "/pipe.jpg is a pipe or a device, not a file: replace it")])
def test_a_bad_picture_ends_training_in_one_sentence(train, pictures, tmp_path, name, sentence):
    shutil.copytree(pictures / "train", tmp_path / "train")
    if name == "pipe.jpg":
        os.mkfifo(tmp_path / "train" / "class_01" / name)
    else:
        (tmp_path / "train" / "class_01" / name).write_bytes(BAD_PICTURES[name][0])
    one_sentence(train(f"--train_dir={tmp_path}/train", "--num_workers=1"), sentence)


def test_links_out_of_a_folder_are_not_trained_on(train, pictures, tmp_path):
    shutil.copytree(pictures / "train", tmp_path / "train")
    for path in (tmp_path / "train" / "class_01").iterdir():
        path.unlink()
        path.symlink_to(pictures / "train" / "class_01" / path.name)
    refused = train(f"--train_dir={tmp_path}/train")
    assert refused.returncode == 2 and refused.stderr == (
        f"the class class_01 has no pictures in {tmp_path}/train: add some, or remove it from both folders\n"
        f"14 links in {tmp_path}/train lead out of it and are skipped: replace them with copies\n")


def test_names_of_others_are_printed_without_escapes(train, pictures, tmp_path):
    for name in ("class_00", "class_01", ESCAPE):
        (tmp_path / name).mkdir()
    refused = train(f"--train_dir={tmp_path}")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 5 and "\x1b" not in refused.stderr
    assert rf"the class \x1b]0;x\x07\x1b[2J\n has no pictures in {tmp_path}: add" in refused.stderr


def attack(folder, tag, file, payload):
    """Replace a file of a tag by one whose pickle leaves a mark."""
    path = folder / tag / file
    path.unlink()
    torch.save(payload, path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_latest_cannot_name_another_folder_than_the_one_that_is_checked(train, two_ranks, tmp_path, ranks):
    """DeepSpeed strips "best " to "best"."""
    folder, mark = tmp_path / "best_model", tmp_path / "ran"
    link_tree(two_ranks.cwd / "checkpoints" / "best_model", folder)
    link_tree(folder / "best", folder / "best ")
    for path in [*(folder / "best").iterdir()]:
        attack(folder, "best", path.name, Payload(mark))
    (folder / "latest").unlink()
    (folder / "latest").write_text("best ")
    refused = train(f"--resume={folder}", "--epochs=4", *TWO_RANKS, ranks=ranks)
    assert not mark.exists()
    one_sentence(refused, "/best_model/latest names 'best ', and this example writes best or epoch_N): change or drop")


@pytest.mark.parametrize("tag", ["../epoch_4/epoch_4", "/tmp", "epoch_4/", "epoch_4\n", "epoch_4/../epoch_4", "",
                                 "epoch_\N{ARABIC-INDIC DIGIT FOUR}", "epoch_4" + 99 * " ", "\x1b[2J"])
def test_latest_is_a_name_that_the_example_writes(train, two_ranks, tmp_path, tag):
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    (tmp_path / "epoch_4" / "latest").unlink()
    (tmp_path / "epoch_4" / "latest").write_text(tag)
    one_sentence(train(f"--resume={tmp_path}/epoch_4"), "is not a complete checkpoint (", "latest", "): change or drop")


MODEL, FIRST, SECOND = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
                        "zero_pp_rank_1_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("file", [MODEL, SECOND])
def test_no_pickle_of_a_checkpoint_runs_code(train, two_ranks, tmp_path, file, ranks):
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    attack(tmp_path / "epoch_4", "epoch_4", file, {"module": Payload(tmp_path / "ran")})
    refused = train(f"--resume={tmp_path}", "--epochs=4", *TWO_RANKS, ranks=ranks)
    assert not (tmp_path / "ran").exists()
    one_sentence(refused, f"{file} could run code: ['posix.mkdir']): change or drop --resume")


def test_a_checkpoint_that_changes_after_its_check_runs_no_code(train, two_ranks, tmp_path):
    """Each file is opened once. Here another user replaces it as soon as the classes in it have been listed."""
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    torch.save({"module": Payload(tmp_path / "ran")}, tmp_path / "evil.pt")
    resumed = train(f"--resume={tmp_path}/epoch_4", "--epochs=4", plant=f"""
import shutil, torch
check = torch.serialization.get_unsafe_globals_in_checkpoint
def check_and_replace(file):
    found = check(file)
    path = os.readlink(f"/proc/self/fd/{{file.fileno()}}") if hasattr(file, "fileno") else file
    os.unlink(path)
    shutil.copy({str(tmp_path / "evil.pt")!r}, path)
    return found
torch.serialization.get_unsafe_globals_in_checkpoint = check_and_replace
""")
    assert not (tmp_path / "ran").exists()
    assert_same_tensors(done(resumed).models[0], two_ranks.models[0])
    assert (tmp_path / "epoch_4" / "epoch_4" / SECOND).read_bytes() == (tmp_path / "evil.pt").read_bytes()


def edit_states(path, change):
    """Change the content of one of DeepSpeed's files."""
    safe = [pkgutil.resolve_name(name) for name in SAFE_GLOBALS]
    with torch.serialization.safe_globals(safe):
        content = torch.load(path)
    change(content)
    path.unlink()
    torch.save(content, path)


def pack(path):
    """Compress the records of a file, which torch.save doesn't do: 1 MB may unpack to 1 GB."""
    content = path.read_bytes()
    path.unlink()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(len(old.read(name))) if "/data/" in name else old.read(name))


def replace_by(make):
    """A damage: unlink a file, and make something else there."""
    def damage(path):
        path.unlink()
        make(path)
    return damage


def optimizer_with(**values):
    return lambda path: edit_states(path, lambda states: states["optimizer_state_dict"].update(values))


def scaler_with(**values):
    return lambda path: edit_states(
        path, lambda states: vars(states["optimizer_state_dict"]["loss_scaler"]).update(values))


def adam_with(**values):
    return lambda path: edit_states(
        path, lambda states: states["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(values))


DAMAGES = {  # {name: (ranks, file, damage, what the sentence says)}
    "pipe": (1, MODEL, replace_by(os.mkfifo), "is a pipe or a device, not a file"),
    "device": (1, SECOND, replace_by(lambda path: path.symlink_to("/dev/zero")), "is a link, which is not followed"),
    "folder": (1, MODEL, replace_by(os.mkdir), "Is a directory"),
    "no pickle": (1, MODEL, replace_by(lambda path: path.write_bytes(b"nothing")), "File is not a zip file"),
    "packed": (1, SECOND, pack, "_optim_states.pt unpacks to 67,071,189 bytes"),
    "large": (1, FIRST, lambda path: os.truncate(path, 1_000_000_001), "has 1,000,000,001 bytes, and at most"),
    "no module": (1, MODEL, lambda path: edit_states(path, lambda states: states.pop("module")), "KeyError: 'module'"),
    "list": (1, MODEL, replace_by(lambda path: torch.save([1], path)), "TypeError: list indices"),
    "other model": (1, MODEL, lambda path: edit_states(path, lambda states: states["module"].popitem()),
                    "mp_rank_00_model_states.pt has another model"),
    "other shape": (1, MODEL, lambda path: edit_states(
        path, lambda states: states["module"].update({"classifier.1.bias": torch.zeros(4)})), "shape (4,), not (3,)"),
    "expanded": (1, FIRST, optimizer_with(single_partition_of_fp32_groups=[torch.zeros(1).expand(2**40)]), "no tensor"),
    "meta": (1, FIRST, optimizer_with(single_partition_of_fp32_groups=[torch.zeros(9, device="meta")]), "no tensor of"),
    "short part": (1, FIRST, optimizer_with(single_partition_of_fp32_groups=[torch.zeros(9)]),
                   " weights, not 11,178,051"),
    "short rank": (2, FIRST, optimizer_with(single_partition_of_fp32_groups=[torch.zeros(9)]), "has shape (9,), not ("),
    "moments": (2, SECOND, adam_with(exp_avg=torch.zeros(9), exp_avg_sq=torch.zeros(9)), "exp_avg has shape (9,), not"),
    "step": (2, SECOND, adam_with(step=float("nan")), "step is no number from 0 to"),
    "loss scale": (2, FIRST, scaler_with(dynamic=True, cur_scale="1" * 99), "cur_scale is no number from -1 to"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_a_checkpoint_is_one_sentence(train, two_ranks, tmp_path, name):
    ranks, file, damage, sentence = DAMAGES[name]
    link_tree(two_ranks.cwd / "checkpoints" / "epoch_4", tmp_path / "epoch_4")
    path = tmp_path / "epoch_4" / "epoch_4" / file
    shutil.copy2(path, tmp_path / "copy")  # the other links stay as they are
    (tmp_path / "copy").replace(path)
    damage(path)
    refused = train(f"--resume={tmp_path}/epoch_4", "--epochs=4", *TWO_RANKS, ranks=ranks, timeout=60)
    one_sentence(refused, f"resume={tmp_path}/epoch_4 is not a complete checkpoint (", sentence, "): change or drop")


HUGE = "1" + "0" * 400
BAD_INFOS = {  # {name: (key, JSON, what the sentence says)}
    "NaN": ("best_val_acc", "NaN", "best_val_acc is nan: Input should be"),
    "infinity": ("time", "1e999", "time is inf: Input should be less than or equal to"),
    "number as text": ("steps", '"4"', "steps is '4': Input should be a valid integer"),
    "boolean": ("epoch", "true", "epoch is True: Input should be a valid integer"),
    "many digits": ("epoch", HUGE, "it holds a number of 401 digits"),
    "nesting": ("extra", "[" * 100_000 + "]" * 100_000, "it is nested more than 50 deep"),
    "ranks": ("saved_by", f'[{"9" * 30}, "float32", false]', "saved_by.0 is 99999999999"),
    "precision": ("saved_by", f'[1, "{"x" * 1000}", false]', "Input should be 'float32', 'float16' or 'bfloat16'"),
    "epochs": ("epochs", "[[]]", "epochs.0 is []: Input should be a valid dictionary"),
    "escapes": ("image_size", json.dumps(ESCAPE), r"image_size is '\x1b]0;x\x07\x1b[2J\n': Input should"),
}


@pytest.mark.parametrize("name", BAD_INFOS)
def test_a_json_of_others_is_one_sentence(train, tmp_path, name):
    key, value, sentence = BAD_INFOS[name]
    keys = {"saved_by": '[1, "float32", false]', "classes": "[]", "image_size": "32", "epoch": "1", "epochs": "[]",
            "steps": "1", "best_val_acc": "50", "best_epoch": "1", key: value}
    text = ", ".join(f'"{name}": {json}' for name, json in keys.items())
    (tmp_path / "extra_info.json").write_text("{" + text + "}")
    refused = train(f"--resume={tmp_path}", timeout=60)
    one_sentence(refused, "extra_info.json can't be used (", sentence, "): change or drop --resume")


NO_FILES = {  # {name: (what makes it, what the sentence says)}
    "pipe": (os.mkfifo, "is a pipe or a device, not a file: replace it with a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device, not a file"),
    "large": (lambda path: (path.touch(), os.truncate(path, 20_000_001)), "has 20,000,001 bytes, and at most 20,000"),
    "text": (lambda path: path.write_text(ESCAPE), "can't be used (Expecting value: line 1 column 1"),
    "array": (lambda path: path.write_text("[]"), "can't be used (its content is []: Input should be a valid dict"),
    "none": (lambda path: path.write_text('{"epochs": []}'), "List should have at least 1 item"),
    "text as number": (lambda path: path.write_text('{"epochs": [{"epoch": 1, "train_loss": "2"}]}'),
                       "epochs.0.train_loss is '2': Input should be a valid number"),
    "digits": (lambda path: path.write_text(f'{{"epochs": [{{"epoch": {HUGE}}}]}}'), "it holds a number of 401 digits"),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_a_history_of_others_is_one_sentence(tmp_path, name):
    make, sentence = NO_FILES[name]
    make(tmp_path / "history.json")
    drawn = launch(UTILS, f"--history={tmp_path}/history.json", f"--output={tmp_path}/curves.png", timeout=60)
    one_sentence(drawn, "can't draw: ", sentence)
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"),
                                  lambda path: path.write_text("[" * 100_000)], ids=["pipe", "device", "nesting"])
def test_what_cannot_be_read_in_checkpoint_dir_is_of_another_run(train, tmp_path, make):
    (tmp_path / "checkpoints" / "best_model").mkdir(parents=True)
    make(tmp_path / "checkpoints" / "best_model" / "extra_info.json")
    one_sentence(train(cwd=tmp_path, timeout=60), "best_model/extra_info.json is of another run or later epoch: use")


@pytest.mark.parametrize("make", [
    os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: torch.save(functools.partial(print), path)],
    ids=["pipe", "device", "code"])
def test_pretrained_weights_of_others_are_one_sentence(train, tmp_path, make):
    make(tmp_path / "weights.pt")
    refused = train(f"--pretrained={tmp_path}/weights.pt", timeout=60)
    one_sentence(refused, f"pretrained={tmp_path}/weights.pt isn't available or doesn't fit (", "): use --pretrained")
    assert "weights_only" not in refused.stderr


def test_training_writes_through_no_link(train, tmp_path):
    """Into a folder where others have put links to a file and to a folder of the user."""
    precious = tmp_path / "precious"
    (precious / "best").mkdir(parents=True)
    for name in ("latest", "best/mp_rank_00_model_states.pt", "zero_to_fp32.py", "extra_info.json"):
        (precious / name).write_text('{"epochs": []}')
    before = {path: path.stat().st_mtime_ns for path in precious.rglob("*")}
    for i, (link, target, sentence) in enumerate((
            ("checkpoints/.saving", precious, "/.saving is a link or a file, not a folder with a checkpoint: remove"),
            ("checkpoints/best_model", precious, "/best_model is a link or a file, not a folder with a checkpoint"),
            ("checkpoints/epoch_1", tmp_path / "none", "/epoch_1 is a link or a file, not a folder with a checkpoint"),
            ("logs/training_history.json", precious / "latest", "training_history.json is a link, and writing would"))):
        path = tmp_path / str(i) / link
        path.parent.mkdir(parents=True)
        path.symlink_to(target)
        for arguments in ([], ["--overwrite"]):
            one_sentence(train(*arguments, cwd=tmp_path / str(i)), sentence)
        assert path.readlink() == target
    assert before == {path: path.stat().st_mtime_ns for path in precious.rglob("*")}
    assert not (tmp_path / "none").exists()


def test_curves_are_written_through_no_link(two_ranks, tmp_path):
    history = two_ranks.cwd / "logs" / "training_history.json"
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link.png").symlink_to("precious")
    os.link(tmp_path / "precious", tmp_path / "hard_link.png")
    os.mkfifo(tmp_path / "pipe.png")
    for name, sentence in (("link", "is a link, and writing would change its target: remove it"),
                           ("pipe", "is a pipe or a device, not a file: replace it with a file")):
        refused = launch(UTILS, f"--history={history}", f"--output={tmp_path}/{name}.png", timeout=60)
        one_sentence(refused, f"{name}.png {sentence}")
    done(launch(UTILS, f"--history={history}", f"--output={tmp_path}/hard_link.png"))
    assert (tmp_path / "precious").read_text() == "mine"
    assert Image.open(tmp_path / "hard_link.png").size == (1200, 800)


def test_prepare_writes_through_no_link(pictures, tmp_path):
    precious = tmp_path / "precious"
    shutil.copytree(pictures / "val" / "class_00", precious)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in precious.iterdir()}
    made_up = ("--made_up", "--classes=2", "--train=2", "--val=2", "--size=8")
    for i, (link, target) in enumerate((("train", tmp_path), ("val", tmp_path), ("train/class_00", precious),
                                        ("val/class_01", precious))):
        to = tmp_path / str(i)
        (to / link).parent.mkdir(parents=True)
        (to / link).symlink_to(target)
        for arguments in (["--from", pictures / "train"], made_up):
            one_sentence(prepare(*arguments, to=to), f"{to}/{link} is a link, and writing would change its target")
        assert [*to.rglob("*")] == [*filter(None, [(to / link).parent if "/" in link else None]), to / link]
    assert before == {path: (path.stat().st_ino, path.read_bytes()) for path in precious.iterdir()}
