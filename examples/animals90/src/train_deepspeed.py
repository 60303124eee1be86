"""Train ResNet-18 to classify pictures: python launch_deepspeed.py, or

    deepspeed --num_gpus=1 src/train_deepspeed.py --epochs 50 --batch_size 16
    torchrun --nproc_per_node=2 src/train_deepspeed.py --fp16
"""

import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C: no traceback from every rank
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
offload_optimizer = False  # the optimizer in host memory: short for --deepspeed_config ds_config_zero2.json
deepspeed_config: str | None = None  # DeepSpeed's JSON, the launcher's --config; None: ds_config_rtx5090.json
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

import json
import shlex
import shutil
import subprocess
import time
from importlib.metadata import version
from types import SimpleNamespace

import torch

on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
if not on_gpu:
    os.environ["DS_ACCELERATOR"] = "cpu"  # before deepspeed is imported

import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engine import Plain, find_checkpoint, list_checkpoints, read_recipe, save
from torch.nn import functional as F
from tqdm import tqdm

import data
from model import ResNet18Animals90
from runtime.cluster.ranks import all_reduce_sum, print0, ranks_from_environment, shut_down, silence_stdout
from runtime.cluster.shutdown import EXIT_REASONS, Shutdown
from runtime.engine import fixes, setup
from runtime.engine.ds_config import uses_offload
from runtime.files import UserError, format_bytes, free_bytes, write_atomic
from runtime.hardware import peak_memory

EXAMPLE = Path(__file__).resolve().parents[1]
RATES = {1: 0.001, 128: 0.0015, 256: 0.002, 512: 0.003}  # from so many pictures per step on, in the guides
BAD_LOSSES = 10  # in a row, that are not finite: the run stops


def explain(error):
    """Print one line for an error that perhaps a single rank meets, and exit. The other ranks notice."""
    line = str(error).rpartition("UserError: ")[2].strip()  # without the traceback of a DataLoader's worker
    code = 2
    if isinstance(error, RuntimeError) and "killed by signal" in line:  # torchrun's signals reach the workers, too
        line, code = f"stopped: {line} Continue with --resume", shutdown.exit_code or 1
    elif isinstance(error, RuntimeError) and "out of memory" in line:
        line = (f"out of memory: use --batch_size {max(1, batch_size // 2)} --gradient_accumulation_steps "
                f"{2 * gradient_accumulation_steps}, then also --offload_optimizer")
    elif isinstance(error, OSError) or "PytorchStreamWriter" in line:  # torch.save on a full disk
        line = f"a file can't be written ({line}): make room; complete checkpoints in {checkpoint_dir} stay"
    elif not isinstance(error, UserError):
        return
    print(line, file=sys.stderr, flush=True)
    os._exit(code)


def refuse(checks):
    """Raise UserError with the messages of those checks, {message: whether it applies}, that apply."""
    if problems := [message for message, applies in checks.items() if applies]:
        raise UserError("\n".join(problems))


ranks, gpus = ranks_from_environment(), torch.cuda.device_count()
dtype = "float16" if fp16 else "bfloat16" if bf16 else "float32"
json_path = deepspeed_config or ("ds_config_zero2.json" if offload_optimizer else "ds_config_rtx5090.json")
json_path = json_path if os.path.exists(json_path) else EXAMPLE / json_path
least = {"num_workers": 0, "seed": 0, "image_size": 32}  # of the others: 1
old_gpu = on_gpu and torch.cuda.get_device_capability() < (8, 0)
try:
    refuse({f"{name}={value} is too small: use --{name} {least.get(name, 1)} or more": value < least.get(name, 1)
            for name, value in vars(settings).items() if type(value) is int} | {
        f"learning_rate={learning_rate} must be above 0: use --learning_rate 0.001": not 0 < learning_rate < 1e9,
        "--fp16 and --bf16 exclude each other: drop one of them": fp16 and bf16,
        "--offload_optimizer is another JSON: drop it, or --config": offload_optimizer and deepspeed_config,
        "--plain has no checkpoints and no offload: drop --plain": plain and (resume or offload_optimizer),
        "--fp16 needs a GPU: drop it, or use --bf16": fp16 and not on_gpu,
        "--bf16 needs a GPU of compute capability 8.0: use --fp16": bf16 and old_gpu,
        f"{ranks.local_world_size} ranks, but {gpus} GPUs: use --num_gpus {gpus}":
            on_gpu and ranks.local_world_size > gpus})
    classes, train_pictures, val_pictures, notes = data.find_pictures(train_dir, val_dir)
    train_loader = data.make_loader(train_pictures, settings, ranks, gradient_accumulation_steps)
    val_loader = data.make_loader(val_pictures, settings, ranks)
    epoch_steps = len(train_loader) // gradient_accumulation_steps
    recipe = read_recipe(json_path, settings, dtype, ranks.world_size, epoch_steps)
    resume_dir, state = find_checkpoint(resume) if resume else (Path(), {"classes": classes, "image_size": image_size})
    folder, needed = Path(checkpoint_dir).resolve(), 11.3e6 * (4 + 4 + 4 + (2 if fp16 or bf16 else 4))
    folder.mkdir(parents=True, exist_ok=True)
    continues = resume and folder in resume_dir.resolve().parents
    refuse({f"{name} is {value!r}, but {state[name]!r} in {resume}: change it, or drop --resume": value != state[name]
            for name, value in (("classes", classes), ("image_size", image_size))} | {
        f"{checkpoint_dir} holds a run: use --resume {checkpoint_dir}, --overwrite, or another --checkpoint_dir":
            list_checkpoints(folder) and not (overwrite or plain or continues),
        f"{checkpoint_dir} has {format_bytes(free_bytes(folder))} free, and a checkpoint takes {format_bytes(needed)}: "
        "make room": free_bytes(folder) < needed})
    torch.manual_seed(seed)  # the same weights on every rank
    source = {"imagenet": True, "none": False}.get(pretrained, pretrained)
    model = ResNet18Animals90(len(classes), not resume and source)
except (UserError, OSError) as error:
    exit_with_error(error)

kind = SimpleNamespace(device="cuda" if on_gpu else "cpu", dtype=dtype)
device = setup.setup_device(kind, ranks.local_rank, recipe.config)
explain_uncaught(explain)  # after PyTorch's process group, whose hook redirects sys.stderr
shutdown = Shutdown()  # watches signals, the other ranks and the launcher
model.to(device)
if recipe.recompute:
    model.recompute_activations()
saved_by = [ranks.world_size, dtype, uses_offload(recipe.config)]
if resume and state["saved_by"] != saved_by:
    with silence_stdout():
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(resume_dir))
    notes.append(f"{resume_dir} is of {state['saved_by']} (ranks, precision, offload): Adam's moments begin anew")
optimizer = setup.adamw(model.parameters(), recipe.config, **recipe.adamw)
if plain:
    engine = Plain(model, optimizer, getattr(torch, dtype), gradient_accumulation_steps)
else:
    engine = setup.initialize(model, optimizer, recipe.config)
    print0(f"DeepSpeed uses {setup.describe(engine, recipe.config, dtype)}")
if resume and state["saved_by"] == saved_by:
    engine.load_checkpoint(str(resume_dir), tag=(resume_dir / "latest").read_text())
done, steps, best_val_acc, best_epoch = (state.get(key, 0) for key in ("epoch", "steps", "best_val_acc", "best_epoch"))
mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (data.MEAN, data.STD))


def run_epoch(loader, name):
    """Train on ("Train"), or validate with all batches of the loader. Return this rank's sums (loss, correct,
    pictures), and the seconds that it took and that it waited for pictures."""
    global lr, steps
    engine.train(name == "Train")
    sums, bad, waited = torch.zeros(3, dtype=torch.float64, device=device), 0, 0.0
    bar = tqdm(loader, f"Epoch {epoch}/{epochs} [{name}]", file=sys.stdout,
               disable=ranks.rank > 0 or not sys.stdout.isatty())
    start = ready = time.perf_counter()
    with torch.set_grad_enabled(name == "Train"):
        for batch, (pictures, labels) in enumerate(bar, 1):
            waited += time.perf_counter() - ready
            labels, pictures = (tensor.to(device, non_blocking=True) for tensor in (labels, pictures))
            x = (pictures.float() / 255 - mean) / std
            logits = engine(x if plain else x.to(getattr(torch, dtype)))
            loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
            if name == "Train":
                warm = min(1.0, (steps + 1) / max(1, recipe.warmup_steps))
                lr = recipe.warmup_from + warm * (learning_rate - recipe.warmup_from)
                for group in engine.optimizer.param_groups:
                    group["lr"] = lr
                engine.backward(loss / len(labels))
                engine.step()  # steps the optimizer after gradient_accumulation_steps batches
                if batch % gradient_accumulation_steps == 0:
                    steps += engine.was_step_applied()  # a skipped step is none of the schedule
                    fixes.grow_loss_scale(engine)
            loss = loss.detach()
            sums += torch.stack([loss, (logits.argmax(1) == labels).sum(), (labels >= 0).sum()])
            bad = torch.where(loss.isfinite(), 0, bad + 1)
            if batch % 10 == 0 or batch == len(loader):  # not more often: the CPU waits for the GPU here
                total, correct, count = sums.tolist()
                bar.set_postfix(loss=f"{total / max(1, count):.3f}", acc=f"{100 * correct / max(1, count):.1f}")
                leave_together(int(bad) >= BAD_LOSSES)
            ready = time.perf_counter()
    return sums, time.perf_counter() - start, waited


def leave_together(diverged):
    """Exit on all ranks if one of them got a signal, or if the loss has not been finite for too long."""
    code, diverged = shutdown.agree(diverged)
    if diverged or code is not None:
        why = (f"the loss was not finite for {BAD_LOSSES} batches in a row: lower --learning_rate, or drop --fp16"
               if diverged else f"stopped in epoch {epoch} by {EXIT_REASONS[code]}: continue with --resume")
        if ranks.rank == 0:
            print(why, file=sys.stderr, flush=True)
        shut_down(2 if diverged else code)
        raise SystemExit(2 if diverged else code)


history_path = Path(log_dir, "training_history.json")
history_path.parent.mkdir(parents=True, exist_ok=True)
commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=EXAMPLE, capture_output=True, text=True).stdout.strip()
hardware = f"{ranks.world_size} x {torch.cuda.get_device_name() if on_gpu else 'CPU'}"
facts = {"command": shlex.join(sys.argv), "settings": vars(settings), "hardware": hardware, "commit": commit,
         "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers", "pillow")}}
past = json.loads(history_path.read_text())["epochs"] if resume and history_path.exists() else []
history = [record for record in past if record["epoch"] <= done]
per_step = batch_size * ranks.world_size * gradient_accumulation_steps
if learning_rate != (usual := [rate for least, rate in RATES.items() if least <= per_step][-1]):
    notes.append(f"learning_rate={learning_rate}, but the guides have {usual} for {per_step} pictures per step")
if num_workers * ranks.local_world_size > os.cpu_count():
    notes.append(f"{num_workers} workers for each of {ranks.local_world_size} ranks, but {os.cpu_count()} cores")
print0(f"pictures   {len(train_pictures):,} to train on, {len(val_pictures):,} to validate; {len(classes)} classes\n"
       f"hardware   {hardware}, {dtype}, {'DistributedDataParallel' if plain else 'ZeRO-2'} ({json_path})\n"
       f"batch      {batch_size} x {ranks.world_size} x {gradient_accumulation_steps} = {per_step} pictures per step, "
       f"{epoch_steps} steps per epoch" + "".join(f"\nnote       {note}" for note in notes + recipe.notes))
for folder in list_checkpoints(checkpoint_dir) if overwrite and ranks.rank == 0 and not (resume or plain) else ():
    shutil.rmtree(folder)
for epoch in range(done + 1, epochs + 1):
    train_loader.batch_sampler.epoch, before = epoch, steps
    train_sums, seconds, waited = run_epoch(train_loader, "Train")
    for name, buffer in model.named_buffers():
        if "running" in name:  # the batch norms' statistics, for which each rank has seen other pictures
            dist.all_reduce(buffer)
            buffer /= ranks.world_size
    val_sums, val_seconds, _ = run_epoch(val_loader, "Val")
    loss, right, count, val_loss, val_right, val_count = all_reduce_sum(*train_sums, *val_sums, device=device)
    new = {"epoch": epoch, "train_loss": loss / count, "train_acc": 100 * right / count,
           "val_loss": val_loss / val_count, "val_acc": 100 * val_right / val_count, "learning_rate": lr,
           "seconds": seconds, "val_seconds": val_seconds, "waited_s": waited, "images_per_s": count / seconds,
           "it_per_s": len(train_loader) / seconds, "memory_gb": peak_memory(device) / 1e9,
           "skipped_steps": epoch_steps + before - steps,
           "loss_scale": engine.scaler.get_scale() if plain else engine.optimizer.loss_scaler.cur_scale}
    if improved := new["val_acc"] > best_val_acc or not best_epoch:
        best_val_acc, best_epoch = new["val_acc"], epoch
    print0(f"\nEpoch {epoch}/{epochs}:\n"
           f"  Train Loss: {new['train_loss']:.4f} | Train Acc: {new['train_acc']:.2f}%\n"
           f"  Val Loss: {new['val_loss']:.4f} | Val Acc: {new['val_acc']:.2f}%\n"
           f"  Learning Rate: {lr:.6f}\n"
           f"  Best Val Acc: {best_val_acc:.2f}% (Epoch {best_epoch})")
    history.append(new)
    best = {"epoch": best_epoch, "val_acc": best_val_acc}
    if ranks.rank == 0:
        write_atomic(history_path, json.dumps({**facts, "epochs": history, "best": best}, indent=1) + "\n")
    info = {**new, **facts, "best_val_acc": best_val_acc, "best_epoch": best_epoch, "steps": steps, "classes": classes,
            "image_size": image_size, "mean": data.MEAN, "std": data.STD, "world_size": ranks.world_size,
            "saved_by": saved_by}
    names = ["best_model"] * improved + [f"epoch_{epoch}"] * (epoch % save_interval == 0 or epoch == epochs)
    for name in names if not plain else ():
        save(engine, Path(checkpoint_dir, name), info)
print0(f"\nepoch {best_epoch} is the best" + f": {checkpoint_dir}/best_model" * (not plain)
       + f"\nfor the curves: python src/utils.py --history {history_path} --output curves.png")
shut_down()
