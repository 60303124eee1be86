"""Train ResNet-18 to classify pictures. Started by launch_deepspeed.py, the deepspeed command, torchrun or python."""

import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from every rank
sys.path.append(str(Path(__file__).resolve().parents[3]))  # the project, behind this folder: both have a model.py

import configurator
from runtime.cluster import exit_on_all_ranks
from runtime.output import Explainer, explain_uncaught, protect_output

protect_output()
train_dir = "data/train"  # folder with a folder of training pictures for each class
val_dir = "data/val"  # the same for validation
epochs = 50  # times through the training pictures
batch_size = 16  # pictures per GPU and batch
learning_rate = 0.001  # peak learning rate
num_workers = 2  # processes per GPU that read pictures, in training and as many in validation
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
overwrite = False  # replace the run in checkpoint_dir and log_dir; its checkpoints are deleted at the first save
pretrained = "imagenet"  # initial weights: imagenet, none (random), or a file or folder
image_size = 224  # side of the network's input in pixels
seed = 1337  # random seed of weights, order and cropping
log_dir = "logs"  # folder for training_history.json
settings = configurator.settings_of_script(__file__, on_error=exit_on_all_ranks)
globals().update(vars(settings))

import json
import shutil
import time
from dataclasses import asdict
from types import SimpleNamespace

import torch

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # before deepspeed is imported

import resuming
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from records import json_text
from tqdm import tqdm

import data
from model import ResNet18Animals90
from runtime.cluster.join import join_process_group
from runtime.cluster.ranks import all_exit_on, all_reduce_sum, exit_together, print0, ranks_from_environment, shut_down
from runtime.cluster.shutdown import Shutdown
from runtime.engine import setup
from runtime.engine.ds_config import allowed_keys, complete_config, uses_offload
from runtime.engine.fast_paths import Choice, FastPaths
from runtime.engine.layout import layout_of
from runtime.errors import UserError
from runtime.files import free_bytes, fsync, lock_folder, remove_dir, replace_dir, write_atomic
from runtime.git import git_commit
from runtime.hardware import machine_record, peak_memory

EXAMPLE = Path(__file__).resolve().parents[1]
RATES = {1: 0.001, 128: 0.0015, 256: 0.002, 512: 0.003}  # from so many pictures per step on, in the guides


def explain(error):
    """Print one line for an error that perhaps a single rank meets, and exit. The launcher ends the other ranks."""
    line = str(error).rpartition("UserError: ")[2].strip().partition("\n")[0]  # without a worker's traceback
    if "out of memory" in line:
        line = "out of memory: halve --batch_size and double --gradient_accumulation_steps, or add --offload_optimizer"
    elif isinstance(error, OSError) or any(name in line for name in ("iostream", "inline_container", "DataLoader")):
        shutil.rmtree(Path(checkpoint_dir, ".saving"), ignore_errors=True)
        line = f"a file or a worker failed ({line}): make room, or use fewer --num_workers. Complete checkpoints stay"
    elif not isinstance(error, UserError):
        return
    time.sleep(ranks.rank)  # all ranks may meet it: the first one prints, and the launcher ends the others
    print(data.one_line(line), file=sys.stderr, flush=True)
    os._exit(2)


def read_recipe(path, epoch_steps):
    """Return what DeepSpeed's JSON says, with its checked config in `config`. Raises UserError."""
    adam = {"lr": (learning_rate, "auto"), "betas": ..., "eps": 0.0, "weight_decay": 0.0}  # ...: any value
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": (learning_rate, "auto"), "warmup_num_steps": 0.0}
    profiler = {"enabled": (True, False), "profile_step": 1, "module_depth": -1, "detailed": (True, False)}
    zero = allowed_keys(dtype)["zero_optimization"] | {"stage": (2,), "round_robin_gradients": (True, False)}
    own_keys = {"zero_optimization": zero, "optimizer": {"type": ("AdamW", "Adam"), "params": adam},
                "scheduler": {"type": ("WarmupLR",), "params": warmup},
                "activation_checkpointing": dict.fromkeys(ACT_CHKPT_DEFAULT, ...), "flops_profiler": profiler}
    batch = SimpleNamespace(micro=batch_size, accumulation=gradient_accumulation_steps, world_size=ranks.world_size)
    ds_config, notes = complete_config(path, batch, 0.0, dtype, extra=own_keys)
    optimizer, scheduler = ds_config.pop("optimizer", {}), ds_config.pop("scheduler", {})
    adam, warmup = ({key: value for key, value in block.get("params", {}).items() if value != "auto"}
                    for block in (optimizer, scheduler))
    betas = adam.get("betas", [0.9, 0.999])
    if not isinstance(betas, list) or [type(b) in (int, float) and 0 <= b < 1 for b in betas] != [True, True]:
        raise UserError(f'{path}: "betas" is {json.dumps(betas)}: write two numbers from 0 to below 1')
    recompute = ds_config.pop("activation_checkpointing", None)
    notes += [f"activation_checkpointing ignores {', '.join(recompute or ())}: PyTorch recomputes"] * bool(recompute)
    return SimpleNamespace(
        config=ds_config, notes=notes, recompute=recompute is not None, device="cuda" if on_gpu else "cpu", dtype=dtype,
        adamw={"lr": learning_rate, "weight_decay": 0.0 if optimizer.get("type") == "Adam" else 0.01, **adam},
        start_lr=warmup.get("warmup_min_lr", 0.0),
        warmup_steps=max(1, warmup.get("warmup_num_steps", epoch_steps)) if scheduler else 1)


def save(folder, info):
    """Save the engine and the dict `info` as `folder`, which appears when it is complete. All ranks call this."""
    new = folder.with_name(".saving")
    if ranks.rank == 0:
        remove_dir(new, ignore_errors=True)  # of a run that was killed
    engine.save_checkpoint(str(new), tag=folder.name.removesuffix("_model"))  # best, epoch_5
    if ranks.rank == 0:
        for path in new.rglob("*"):
            fsync(path)
        write_atomic(new / "extra_info.json", json_text(info))  # last: now it is complete
        replace_dir(new, folder)
        for other in {path.parent for path in replaced} - {folder, history_path.parent}:
            shutil.rmtree(other, ignore_errors=True)  # not before there is something instead
        replaced.clear()
    torch.distributed.barrier()


def run_epoch(name, batches, count):
    """Run "Train" or "Val" on the next `count` batches. Return (loss, percent right, seconds, seconds without data)."""
    global lr, steps, bad
    training = name == "Train"
    engine.train(training)
    torch.set_grad_enabled(training)
    bar = tqdm(range(1, count + 1), f"Epoch {epoch}/{epochs} [{name}]", file=sys.stdout, disable=ranks.rank > 0 or None)
    sums, waited, start = torch.zeros(3, dtype=torch.float64, device=device), 0.0, time.perf_counter()
    for batch in bar:
        if shutdown.exit_code:  # the launcher has been killed
            os._exit(shutdown.exit_code)
        ready = time.perf_counter()
        pictures, labels = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        waited += time.perf_counter() - ready
        logits = engine(((pictures.float() / 255 - mean) / std).to(getattr(torch, dtype)))
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        if training:
            lr = recipe.start_lr + (learning_rate - recipe.start_lr) * min(1.0, (steps + 1) / recipe.warmup_steps)
            optimizer.param_groups[0]["lr"] = lr
            engine.backward(loss / len(labels))
            engine.step()
            if batch % gradient_accumulation_steps == 0:
                steps += engine.was_step_applied()  # a skipped step is none of the schedule
        sums += torch.stack([loss.detach(), (logits.argmax(1) == labels).sum(), (labels >= 0).sum()])
        bad = torch.where(loss.isfinite(), 0, bad + 1)
        if batch % 10 == 0 or batch == count:  # not more often: the CPU waits for the GPU here
            total, right, seen = sums.tolist()
            bar.set_postfix({"loss": f"{total / max(1, seen):.3f}", "acc": f"{100 * right / max(1, seen):.1f}"})
            exit_together(["10 batches had no finite loss: lower --learning_rate, or drop --fp16"] * (int(bad) >= 10))
    total, right, seen = all_reduce_sum(*sums)
    return total / seen, 100 * right / seen, time.perf_counter() - start, waited


ranks, gpus = ranks_from_environment(), torch.cuda.device_count()
on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu"
dtype = "float16" if fp16 else "bfloat16" if bf16 else "float32"
json_path = config or deepspeed_config or EXAMPLE / f"ds_config_{'zero2' if offload_optimizer else 'rtx5090'}.json"
history_path = Path(log_dir, "training_history.json")
least = {"num_workers": 0, "seed": 0, "image_size": 32, "learning_rate": 1e-9}  # of the others: 1
checks = {f"{name}={value} is too small: use --{name} {least.get(name, 1)} or more": not value >= least.get(name, 1)
          for name, value in asdict(settings).items() if type(value) in (int, float)} | {
    f"--{name} has no value: write --{name} PATH": value == "" for name, value in asdict(settings).items()} | {
    "--fp16 and --bf16 exclude each other: drop one of them": fp16 and bf16,
    "use one --config, or --offload_optimizer instead": bool(config) + bool(deepspeed_config) + offload_optimizer > 1,
    "--num_gpus is an option of launch_deepspeed.py: drop it": (num_gpus or 0) > 0 and num_gpus != ranks.world_size,
    "--fp16 needs a GPU: drop it, or use --bf16": fp16 and not on_gpu,
    "--bf16 needs compute capability 8.0: use --fp16": bf16 and on_gpu and torch.cuda.get_device_capability() < (8, 0),
    f"{ranks.local_world_size} ranks, but {gpus} GPUs: use --num_gpus {gpus}": on_gpu and ranks.local_world_size > gpus,
    "--batch_size 1 needs --image_size 33 or more: a batch norm needs two values": batch_size == 1 and image_size == 32,
    f"{checkpoint_dir} has less than 180 MB free, a checkpoint's size: make room": free_bytes(checkpoint_dir) < 18e7}
shutdown = Shutdown(join_process_group("auto" if on_gpu else "cpu"))  # ends this rank if another or the launcher ends
with all_exit_on(UserError, OSError):
    if any(checks.values()):
        raise UserError("\n".join(problem for problem, applies in checks.items() if applies))
    classes, found, val_found, picture_notes = data.find_pictures(train_dir, val_dir)
    train = data.Pictures(found, settings, ranks, gradient_accumulation_steps)
    val = data.Pictures(val_found, settings, ranks)
    epoch_steps = train.batches_per_epoch // gradient_accumulation_steps
    recipe = read_recipe(json_path, epoch_steps)
    new = {"saved_by": [ranks.world_size, dtype, uses_offload(recipe.config)], "classes": classes,
           "image_size": image_size, "epoch": 0, "epochs": [], "steps": 0, "best_val_acc": 0.0, "best_epoch": 0}
    resume_dir, state = resuming.find_checkpoint(resume) if resume else (None, new)
    if state["image_size"] != image_size:
        raise UserError(f"{resume} has other image_size ({state['image_size']}): drop --resume")
    if state["classes"] != classes:
        raise UserError(f"{resume} has other classes ({len(state['classes'])}): drop --resume")
    resuming.refuse_links(checkpoint_dir, history_path)
    replaced = []  # what this run would replace, but doesn't continue
    for path in (*Path(checkpoint_dir).glob("[!.]*/extra_info.json"), history_path):
        if os.path.lexists(path) and resuming.is_other_run(path, state["epochs"], state["epoch"]):
            replaced.append(path)
    if replaced and not overwrite:
        raise UserError(f"{data.one_line(replaced[0])} is of another run or later epoch: "
                        "use --resume, other folders or --overwrite")
    locks = ranks.rank == 0 and [lock_folder(checkpoint_dir, "--checkpoint_dir"), lock_folder(log_dir, "--log_dir")]
    torch.manual_seed(seed % 2**63)  # the same weights on every rank
    model = ResNet18Animals90(len(classes), not resume and {"imagenet": True, "none": ""}.get(pretrained, pretrained))
    rank_state = None  # of an earlier run with as many ranks, and the same precision and offload
    if state["saved_by"] != new["saved_by"]:
        with resuming.resume_errors(resume):
            model.load_state_dict(resuming.read_weights(resume_dir, state, model))
        recipe.notes.append(f"{resume} is of {state['saved_by']} (ranks, precision, offload): "
                            "Adam's moments begin anew")
    elif resume:
        with resuming.resume_errors(resume):
            rank_state = resuming.read_rank(resume_dir, state, model, ranks.rank)

device = setup.setup_device(recipe, ranks.local_rank, recipe.config)
# After PyTorch's process group, whose hook redirects sys.stderr
explain_uncaught(Explainer.USER_ERROR, explain)
sys.unraisablehook = lambda _: None  # PyTorch may raise a killed worker's error inside a __del__; the next batch fails
model.to(device)
if recipe.recompute:
    model.recompute_activations()
optimizer = setup.make_adamw([*model.parameters()], recipe.config, **recipe.adamw)
engine = setup.initialize(model, optimizer, recipe.config)
layout = layout_of(engine)
if layout.stage == 2:
    paths = FastPaths(gradients=Choice(True), local=Choice(True))  # ours, in the place of DeepSpeed's
    setup.replace_gradients_and_step(layout, paths)
if rank_state:
    with all_exit_on(UserError), resuming.resume_errors(resume):
        resuming.restore(engine, rank_state)
    rank_state = None  # frees its memory
done, steps, best_val_acc, best_epoch = (state[key] for key in ("epoch", "steps", "best_val_acc", "best_epoch"))
if not {*Path(checkpoint_dir).glob("best_model*")} - {path.parent for path in replaced}:
    best_val_acc = best_epoch = 0  # in this folder
train_batches, val_batches = train.load(range(done + 1, epochs + 1)), val.load([0] * (epochs - done))
mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (data.MEAN, data.STD))
facts = machine_record(device) | {"command": sys.argv, "settings": asdict(settings), "commit": git_commit()}
facts["hardware"] = f"{ranks.world_size} x {torch.cuda.get_device_name() if on_gpu else 'CPU'}"
history, bad, per_step = state["epochs"], 0, recipe.config["train_batch_size"]  # bad: batches with a non-finite loss
notes = recipe.notes + picture_notes
notes += [f"{resume} has {done} epochs: use --epochs {done + 1} or more to train on"] * (done >= epochs)
usual = max(rate for least, rate in RATES.items() if least <= per_step)
notes += [f"the guides' learning_rate is {usual} for {per_step} pictures per step"] * (learning_rate != usual)
print0(f"pictures   {len(found):,} to train on, {len(val_found):,} to validate; {len(classes)} classes\n"
       f"hardware   {facts['hardware']}, {setup.describe(engine, recipe.config, dtype)} ({json_path})\n"
       f"batch      {batch_size} x {ranks.world_size} x {gradient_accumulation_steps} = {per_step} pictures per step, "
       f"{epoch_steps} steps per epoch" + "".join(f"\nnote       {note}" for note in notes))
kept = {*range(save_interval, epochs + 1, save_interval), epochs}
if done in kept and resume_dir.parent.samefile(checkpoint_dir) and not Path(checkpoint_dir, f"epoch_{done}").exists():
    save(Path(checkpoint_dir, f"epoch_{done}"), {**state, "saved_by": new["saved_by"]})  # killed after best_model
for epoch in range(done + 1, epochs + 1):
    before = steps
    train_loss, train_acc, seconds, waited = run_epoch("Train", train_batches, train.batches_per_epoch)
    for statistics in (buffer for name, buffer in model.named_buffers() if "running" in name):  # of batch norms
        torch.distributed.all_reduce(statistics)  # each rank has seen other pictures
        statistics /= ranks.world_size
    val_loss, val_acc, val_seconds, _ = run_epoch("Val", val_batches, val.batches_per_epoch)
    if improved := val_acc > best_val_acc or not best_epoch:
        best_val_acc, best_epoch = val_acc, epoch
    print0(f"\nEpoch {epoch}/{epochs}:\n  Train Loss: {train_loss:.4f} | Train Acc: {train_acc:.2f}%\n"
           f"  Val Loss: {val_loss:.4f} | Val Acc: {val_acc:.2f}%\n  Learning Rate: {lr:.6f}\n"
           f"  Best Val Acc: {best_val_acc:.2f}% (Epoch {best_epoch})")
    history.append(dict(
        epoch=epoch, train_loss=train_loss, train_acc=train_acc, val_loss=val_loss, val_acc=val_acc, learning_rate=lr,
        seconds=seconds, val_seconds=val_seconds, waited_s=waited, images_per_s=per_step * epoch_steps / seconds,
        it_per_s=train.batches_per_epoch / seconds, memory_gb=peak_memory(device) / 1e9,
        skipped_steps=epoch_steps + before - steps, loss_scale=engine.optimizer.loss_scaler.cur_scale))
    log = {**facts, "epochs": history, "best": {"epoch": best_epoch, "val_acc": best_val_acc}}
    if ranks.rank == 0:
        write_atomic(history_path, json_text(log))
    info = {**new, **history[-1], **log, "best_val_acc": best_val_acc, "best_epoch": best_epoch, "steps": steps,
            "mean": data.MEAN, "std": data.STD, "time": time.time()}
    for name in ["best_model"] * improved + [f"epoch_{epoch}"] * (epoch in kept):
        save(Path(checkpoint_dir, name), info)
print0(f"\nbest epoch {best_epoch}: {checkpoint_dir}/best_model\ncurves: python src/utils.py --history {history_path}")
shut_down()
