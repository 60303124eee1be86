"""The baseline of table.py: the same training with PyTorch's DistributedDataParallel, without DeepSpeed.

    torchrun --nproc_per_node=2 examples/animals90/measure/plain.py --batch_size=64 --fp16

Pictures, network and warmup are those of examples/animals90. It writes training_history.json with the keys that
table.py reads, and no checkpoints.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT / "examples" / "animals90" / "src")
sys.path.append(str(ROOT))  # behind it: both have a model.py

import configurator

train_dir = "data/train"  # folder with a folder of training pictures for each class
val_dir = "data/val"  # the same for validation
epochs = 2  # times through the training pictures
batch_size = 16  # pictures per GPU and batch
learning_rate = 0.001  # peak learning rate
weight_decay = 0.01  # AdamW's
eps = 1e-8  # AdamW's
num_workers = 2  # processes per GPU that read pictures
gradient_accumulation_steps = 1  # batches per GPU in one optimizer step
fp16 = False  # autocast to float16, with a loss scale
pretrained = "none"  # initial weights: imagenet, none (random), or a file or folder
image_size = 224  # side of the network's input in pixels
seed = 1337  # random seed of weights, order and cropping
log_dir = "logs"  # folder for training_history.json
settings = configurator.settings_of_script(__file__)
globals().update(vars(settings))

import time

import torch
import torch.distributed as dist
from records import json_text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import data
from model import ResNet18Animals90
from runtime.cluster.ranks import all_reduce_sum, print0, ranks_from_environment, shut_down
from runtime.files import write_atomic
from runtime.hardware import peak_memory

ranks = ranks_from_environment()
device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_float32_matmul_precision("high")  # as setup.setup_device() does
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")  # sums of scalars are on CPU
classes, found, val_found, _ = data.find_pictures(train_dir, val_dir)
train = data.Pictures(found, settings, ranks, gradient_accumulation_steps)
val = data.Pictures(val_found, settings, ranks)
train_batches, val_batches = train.load(range(1, epochs + 1)), val.load([0] * epochs)
torch.manual_seed(seed)
model = ResNet18Animals90(len(classes), {"imagenet": True, "none": False}.get(pretrained, pretrained)).to(device)
ddp = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, eps=eps, weight_decay=weight_decay, fused=True)
epoch_steps = train.batches_per_epoch // gradient_accumulation_steps
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / epoch_steps))
scaler = torch.amp.GradScaler(device.type, enabled=fp16)
mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (data.MEAN, data.STD))


def run_epoch(batches, count, training):
    """Train on, or validate with, the next `count` batches. Return (mean loss, accuracy in percent) of all ranks, the
    seconds that it took, and the seconds that this rank waited for pictures."""
    ddp.train(training)
    torch.set_grad_enabled(training)
    sums, waited, start = torch.zeros(3, dtype=torch.float64, device=device), 0.0, time.perf_counter()
    for batch in range(1, count + 1):
        ready = time.perf_counter()
        pictures, labels = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        waited += time.perf_counter() - ready
        with torch.autocast(device.type, torch.float16, enabled=fp16):
            logits = ddp((pictures.float() / 255 - mean) / std)
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        if training:
            scaler.scale(loss / len(labels) / gradient_accumulation_steps).backward()
        if training and batch % gradient_accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        sums += torch.stack([loss.detach(), (logits.argmax(1) == labels).sum(), (labels >= 0).sum()])
    total, right, seen = all_reduce_sum(*sums)
    return total / seen, 100 * right / seen, time.perf_counter() - start, waited


history = []
for epoch in range(1, epochs + 1):
    train_loss, train_acc, seconds, waited = run_epoch(train_batches, train.batches_per_epoch, True)
    for name, buffer in model.named_buffers():
        if "running" in name:
            dist.all_reduce(buffer)
            buffer /= ranks.world_size
    val_loss, val_acc, _, _ = run_epoch(val_batches, val.batches_per_epoch, False)
    it_per_s = train.batches_per_epoch / seconds
    history.append({"epoch": epoch, "train_loss": train_loss, "train_acc": train_acc, "val_loss": val_loss,
                    "val_acc": val_acc, "seconds": seconds, "waited_s": waited, "it_per_s": it_per_s,
                    "images_per_s": it_per_s * batch_size * ranks.world_size, "memory_gb": peak_memory(device) / 1e9})
    print0(history[-1])
if ranks.rank == 0:
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    write_atomic(Path(log_dir, "training_history.json"), json_text({"epochs": history}))
shut_down()
