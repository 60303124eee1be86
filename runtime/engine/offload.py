"""ZeRO-2's optimizer step in host memory, in pieces. The gradients are on the GPU.

The GPU sends the gradients of all pieces to the host. The CPU steps a piece once its gradients are
there, and the GPU fetches its weights and rounds them while the CPU steps the next one. So the
copies overlap with the CPU's Adam.
"""

from typing import Protocol

import torch
from torch import Tensor

from runtime.engine.adamw import adamw_by_pytorch
from runtime.engine.clip import Clip
from runtime.engine.shard import Shard

# Elements. The fp32 weights of a piece, which are on the GPU for a moment, take 268 MB
PIECE = 2**26


class HostAdam(Protocol):
    """Steps of AdamW on flat tensors in host memory."""

    def begin(self, options: dict) -> None:
        """Begin the pieces of a shard. options: a parameter group."""

    def step(
        self,
        options: dict,
        done: int,
        master: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> None:
        """Step tensors. done: the number of steps before this one."""


class PyTorchsAdam:
    """A HostAdam where DeepSpeed's could not be built."""

    def begin(self, options: dict) -> None:
        """Do nothing."""

    def step(
        self,
        options: dict,
        done: int,
        master: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> None:
        """Step tensors. done: the number of steps before this one."""
        adamw_by_pytorch(options, done, master, grads, exp_avg, exp_avg_sq)


def step_on_host(shard: Shard, clip: Clip, adam: HostAdam) -> None:
    """Step a shard whose fp32 weights and moments are in host memory, unless the norm is too large,
    and clear its gradients. For the copies to run at the same time, that memory has to be pinned,
    also that of master.grad, which takes the gradients. The CPU waits for the norm."""
    if clip.applies():
        shard.grads.mul_(clip.factor())
        step_pieces(shard, adam)
    shard.grads.zero_()


def step_pieces(shard: Shard, adam: HostAdam) -> None:
    """Send the gradients, step on the host, and fetch the weights, piece by piece."""
    state = shard.state
    # Pieces of all that a step needs
    done = int(state["step"])
    masters = shard.master.data.split(PIECE)
    host_grads = shard.master.grad.split(PIECE)  # DeepSpeed allocates it, with offload
    exp_avgs = state["exp_avg"].split(PIECE)
    exp_avg_sqs = state["exp_avg_sq"].split(PIECE)

    # Send the gradients of all pieces
    adam.begin(shard.options)
    sent = []
    for grads, target in zip(shard.grads.split(PIECE), host_grads, strict=True):
        target.copy_(grads, non_blocking=True)
        sent.append(torch.cuda.current_stream().record_event() if grads.is_cuda else None)

    # Step each piece when its gradients are there
    for i, half in enumerate(shard.half.split(PIECE)):
        if sent[i]:
            sent[i].synchronize()
        adam.step(shard.options, done, masters[i], host_grads[i], exp_avgs[i], exp_avg_sqs[i])
        half.copy_(masters[i], non_blocking=True)  # the GPU rounds
