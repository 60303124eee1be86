"""Train ResNet-18 to classify pictures. Started by launch_deepspeed.py, the deepspeed command, torchrun or python."""

import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from every rank
sys.path.append(str(Path(__file__).resolve().parents[3]))  # the project, behind this folder: both have a model.py

import configurator
from runtime.output import exit_with_error, explain_uncaught, protect_output

protect_output()
train_dir = "data/train"  # folder with a folder of training pictures for each class
val_dir = "data/val"  # the same for validation
epochs = 50  # times through the training pictures
batch_size = 16  # pictures per GPU and batch
learning_rate = 0.001  # peak learning rate
num_workers = 2  # processes per GPU that read pictures
gradient_accumulation_steps = 1  # batches per GPU in one optimizer step
fp16 = False  # half precision with a dynamic loss scale
bf16 = False  # bfloat16
offload_optimizer = False  # the optimizer in host memory: short for --config ds_config_zero2.json
num_gpus: int | None = None  # GPUs, or processes on CPU, that launch_deepspeed.py starts; None: all GPUs, or 1
config: str | None = None  # DeepSpeed's JSON; None: ds_config_rtx5090.json
deepspeed_config: str | None = None  # the same
checkpoint_dir = "checkpoints_deepspeed"  # folder for checkpoints
save_interval = 5  # epochs between saves
resume: str | None = None  # folder of a checkpoint, or checkpoint_dir for its newest one
overwrite = False  # delete the run that checkpoint_dir holds
pretrained = "imagenet"  # initial weights: imagenet, none (random), or a file or folder
image_size = 224  # side of the network's input in pixels
seed = 1337  # random seed of weights, order and cropping
log_dir = "logs"  # folder for training_history.json
plain = False  # baseline: PyTorch's DistributedDataParallel instead of DeepSpeed, without checkpoints
settings = configurator.from_command_line(globals())
globals().update(vars(settings))

import contextlib
import json
import shlex
import shutil
import time

import torch

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # before deepspeed is imported

import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engine import find_checkpoint, read_recipe, save
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import data
from model import ResNet18Animals90
from runtime.cluster.ranks import all_reduce_sum, exit_together, print0, ranks_from_environment, shut_down
from runtime.engine import fixes, setup
from runtime.engine.ds_config import uses_offload
from runtime.files import UserError, free_bytes, write_atomic
from runtime.hardware import peak_memory
from runtime.monitor.runlog import git_commit, machine_record

EXAMPLE = Path(__file__).resolve().parents[1]
RATES = {1: 0.001, 128: 0.0015, 256: 0.002, 512: 0.003}  # from so many pictures per step on, in the guides


def explain(error):
    """Print one line for an error that perhaps a single rank meets, and exit. The launcher ends the other ranks."""
    line = str(error).rpartition("UserError: ")[2].strip()  # without the traceback of a DataLoader's worker
    if "out of memory" in line:
        line = (f"out of memory: use --batch_size {batch_size // 2 or 1} --gradient_accumulation_steps "
                f"{2 * gradient_accumulation_steps}, then also --offload_optimizer")
    elif isinstance(error, OSError) or "PytorchStreamWriter" in line:  # torch.save on a full disk
        line = f"a file can't be written ({line}): make room; complete checkpoints in {checkpoint_dir} stay"
    elif not isinstance(error, UserError):
        return
    print(line, file=sys.stderr, flush=True)
    os._exit(2)


ranks, gpus = ranks_from_environment(), torch.cuda.device_count()
on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
dtype = "float16" if fp16 else "bfloat16" if bf16 else "float32"
json_path = config or deepspeed_config or EXAMPLE / f"ds_config_{'zero2' if offload_optimizer else 'rtx5090'}.json"
least = {"num_workers": 0, "seed": 0, "image_size": 32, "learning_rate": 1e-9}  # of the others: 1
checks = {f"{name}={value} is too small: use --{name} {least.get(name, 1)} or more": not value >= least.get(name, 1)
          for name, value in vars(settings).items() if type(value) in (int, float)} | {
    "--fp16 and --bf16 exclude each other: drop one of them": fp16 and bf16,
    "--offload_optimizer is another JSON: drop it, or --config": offload_optimizer and (config or deepspeed_config),
    "--num_gpus is an option of launch_deepspeed.py: drop it": num_gpus not in (None, ranks.world_size),
    "--plain has no checkpoints and no offload: drop --plain": plain and (resume or offload_optimizer),
    "--fp16 needs a GPU: drop it, or use --bf16": fp16 and not on_gpu,
    "--bf16 needs compute capability 8.0: use --fp16": bf16 and on_gpu and torch.cuda.get_device_capability() < (8, 0),
    f"{ranks.local_world_size} ranks, but {gpus} GPUs: use --num_gpus {gpus}": on_gpu and ranks.local_world_size > gpus}
try:
    if any(checks.values()):
        raise UserError("\n".join(problem for problem, applies in checks.items() if applies))
    classes, train_pictures, val_pictures, notes = data.find_pictures(train_dir, val_dir)
    train_count = data.batches_per_epoch(len(train_pictures), settings, ranks, gradient_accumulation_steps)
    val_count = data.batches_per_epoch(len(val_pictures), settings, ranks)
    epoch_steps = train_count // gradient_accumulation_steps
    recipe = read_recipe(json_path, settings, ranks.world_size, epoch_steps, "cuda" if on_gpu else "cpu", dtype)
    resume_dir, state = find_checkpoint(resume) if resume else (None, {"classes": classes, "image_size": image_size})
    for name, value in (("classes", classes), ("image_size", image_size)):
        if value != state[name]:
            raise UserError(f"{name} is {value!r}, but {state[name]!r} in {resume}: change it, or drop --resume")
    Path(checkpoint_dir).mkdir(parents=True, exist_ok=True)
    earlier = [path.parent for path in Path(checkpoint_dir).glob("*/extra_info.json")]
    if earlier and not (resume or overwrite or plain):
        raise UserError(f"{checkpoint_dir} holds a run: use --resume {checkpoint_dir}, --overwrite, or another "
                        "--checkpoint_dir")
    if free_bytes(checkpoint_dir) < 180e6:  # float32; 157 MB in half precision
        raise UserError(f"{checkpoint_dir} has less than the 180 MB free that a checkpoint takes: make room")
    torch.manual_seed(seed)  # the same weights on every rank
    source = {"imagenet": True, "none": False}.get(pretrained, pretrained)
    model = ResNet18Animals90(len(classes), not resume and source)
except (UserError, OSError) as error:
    exit_with_error(error)

device = setup.setup_device(recipe, ranks.local_rank, recipe.config)
explain_uncaught(explain)  # after PyTorch's process group, whose hook redirects sys.stderr
model.to(device)
if recipe.recompute:
    model.recompute_activations()
saved_by = [ranks.world_size, dtype, uses_offload(recipe.config)]
if resume and state["saved_by"] != saved_by:
    with contextlib.redirect_stdout(None):
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(resume_dir))
    notes.append(f"{resume_dir} is of {state['saved_by']} (ranks, precision, offload): Adam's moments begin anew")
optimizer = setup.adamw(model.parameters(), recipe.config, **recipe.adamw)
scaler = torch.amp.GradScaler(enabled=fp16)  # of --plain: DeepSpeed has its own
if plain:
    engine = DistributedDataParallel(model, broadcast_buffers=False)
else:
    engine = setup.initialize(model, optimizer, recipe.config)
    print0(f"DeepSpeed uses {setup.describe(engine, recipe.config, dtype)}")
if resume and state["saved_by"] == saved_by:
    engine.load_checkpoint(str(resume_dir))
done, steps, best_val_acc, best_epoch = (state.get(key, 0) for key in ("epoch", "steps", "best_val_acc", "best_epoch"))
train_batches = data.load(train_pictures, range(done + 1, epochs + 1), train_count, settings, ranks)
val_batches = data.load(val_pictures, [0] * (epochs - done), val_count, settings, ranks)
mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (data.MEAN, data.STD))


def update(loss, last):
    """Backpropagate a batch's loss. Step the optimizer if the batch is the last one of an accumulation."""
    global lr, steps
    warm = min(1.0, (steps + 1) / max(1, recipe.warmup_steps))
    lr = recipe.warmup_from + warm * (learning_rate - recipe.warmup_from)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not plain:
        engine.backward(loss)
        engine.step()
        if last:
            steps += engine.was_step_applied()  # a skipped step is none of the schedule
            fixes.grow_loss_scale(engine)
        return
    scaler.scale(loss / gradient_accumulation_steps).backward()
    if last:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        steps += scaler.get_scale() >= scale
        optimizer.zero_grad()


def run_epoch(name, batches, count):
    """Train on ("Train"), or validate with, the next `count` batches. Return (mean loss, accuracy in percent) of all
    ranks, the seconds that it took, and the seconds that this rank waited for pictures."""
    training, half = name == "Train", getattr(torch, dtype)
    engine.train(training)
    torch.set_grad_enabled(training)
    sums, bad, waited = torch.zeros(3, dtype=torch.float64, device=device), 0, 0.0  # sums: loss, correct, pictures
    bar = tqdm(range(1, count + 1), f"Epoch {epoch}/{epochs} [{name}]", file=sys.stdout,
               disable=ranks.rank > 0 or not sys.stdout.isatty())
    start = time.perf_counter()
    for batch in bar:
        ready = time.perf_counter()
        pictures, labels = next(batches)
        waited += time.perf_counter() - ready
        pictures, labels = (tensor.to(device, non_blocking=True) for tensor in (pictures, labels))
        x = (pictures.float() / 255 - mean) / std
        with torch.autocast(device.type, half, enabled=plain and dtype != "float32"):
            logits = engine(x if plain else x.to(half))
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        if training:
            update(loss / len(labels), batch % gradient_accumulation_steps == 0)
        loss = loss.detach()
        sums += torch.stack([loss, (logits.argmax(1) == labels).sum(), (labels >= 0).sum()])
        bad = torch.where(loss.isfinite(), 0, bad + 1)
        if batch % 10 == 0 or batch == count:  # not more often: the CPU waits for the GPU here
            total, right, seen = sums.tolist()
            bar.set_postfix(loss=f"{total / max(1, seen):.3f}", acc=f"{100 * right / max(1, seen):.1f}")
            exit_together(["10 batches had no finite loss: lower --learning_rate, or drop --fp16"] * (int(bad) >= 10))
    seconds = time.perf_counter() - start
    total, right, seen = all_reduce_sum(*sums, device=device)
    return total / seen, 100 * right / seen, seconds, waited


hardware = f"{ranks.world_size} x {torch.cuda.get_device_name() if on_gpu else 'CPU'}"
facts = machine_record(device) | {"hardware": hardware, "command": shlex.join(sys.argv), "settings": vars(settings),
                                  "commit": git_commit()}
history_path = Path(log_dir, "training_history.json")
history_path.parent.mkdir(parents=True, exist_ok=True)
history = state.get("epochs", [])
per_step = batch_size * ranks.world_size * gradient_accumulation_steps
if learning_rate != (usual := [rate for least, rate in RATES.items() if least <= per_step][-1]):
    notes.append(f"learning_rate={learning_rate}, but the guides have {usual} for {per_step} pictures per step")
if num_workers * ranks.local_world_size > os.cpu_count():
    notes.append(f"{num_workers} workers for each of {ranks.local_world_size} ranks, but {os.cpu_count()} cores")
print0(f"pictures   {len(train_pictures):,} to train on, {len(val_pictures):,} to validate; {len(classes)} classes\n"
       f"hardware   {hardware}, {dtype}, {'DistributedDataParallel' if plain else 'ZeRO-2'} ({json_path})\n"
       f"batch      {batch_size} x {ranks.world_size} x {gradient_accumulation_steps} = {per_step} pictures per step, "
       f"{epoch_steps} steps per epoch" + "".join(f"\nnote       {note}" for note in notes + recipe.notes))
for folder in earlier if overwrite and ranks.rank == 0 and not (resume or plain) else ():
    shutil.rmtree(folder)
for epoch in range(done + 1, epochs + 1):
    before = steps
    train_loss, train_acc, seconds, waited = run_epoch("Train", train_batches, train_count)
    for name, buffer in model.named_buffers():
        if "running" in name:  # the batch norms' statistics, for which each rank has seen other pictures
            dist.all_reduce(buffer)
            buffer /= ranks.world_size
    val_loss, val_acc, val_seconds, _ = run_epoch("Val", val_batches, val_count)
    if improved := val_acc > best_val_acc or not best_epoch:
        best_val_acc, best_epoch = val_acc, epoch
    print0(f"\nEpoch {epoch}/{epochs}:\n"
           f"  Train Loss: {train_loss:.4f} | Train Acc: {train_acc:.2f}%\n"
           f"  Val Loss: {val_loss:.4f} | Val Acc: {val_acc:.2f}%\n"
           f"  Learning Rate: {lr:.6f}\n"
           f"  Best Val Acc: {best_val_acc:.2f}% (Epoch {best_epoch})")
    record = {"epoch": epoch, "train_loss": train_loss, "train_acc": train_acc, "val_loss": val_loss,
              "val_acc": val_acc, "learning_rate": lr, "seconds": seconds, "val_seconds": val_seconds,
              "waited_s": waited, "images_per_s": train_count * batch_size * ranks.world_size / seconds,
              "it_per_s": train_count / seconds, "memory_gb": peak_memory(device) / 1e9,
              "skipped_steps": epoch_steps + before - steps,
              "loss_scale": scaler.get_scale() if plain else engine.optimizer.loss_scaler.cur_scale}
    history.append(record)
    log = {**facts, "epochs": history, "best": {"epoch": best_epoch, "val_acc": best_val_acc}}
    if ranks.rank == 0:
        write_atomic(history_path, json.dumps(log, indent=1) + "\n")
    info = {**record, **log, "best_val_acc": best_val_acc, "best_epoch": best_epoch, "steps": steps,
            "classes": classes, "image_size": image_size, "mean": data.MEAN, "std": data.STD,
            "world_size": ranks.world_size, "saved_by": saved_by}
    names = ["best_model"] * improved + [f"epoch_{epoch}"] * (epoch % save_interval == 0 or epoch == epochs)
    for name in names if not plain else ():
        save(engine, Path(checkpoint_dir, name), info)
print0(f"\nepoch {best_epoch} is the best" + f": {checkpoint_dir}/best_model" * (not plain)
       + f"\nfor the curves: python src/utils.py --history {history_path} --output curves.png")
shut_down()
