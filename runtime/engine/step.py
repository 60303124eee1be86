"""One optimizer step on this rank's shards, at ZeRO-2 and 3: the norm, clipping, and the update.

DeepSpeed makes one pass for each and synchronizes three times in between to check whether a number
is finite. Here one kernel of AdamW clips, updates, and clears the gradients for the next step, and
the CPU reads the norm while the kernel runs. The results and the state in checkpoints are the same.
Who makes the update:

  another optimizer than AdamW   its own step(), for all groups: any_optimizer.py
  a group with kind="muon"       muon.py
  any other group                adamw.py, compact_adamw.py, or offload.py with the state in host
                                 memory
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.engine.adamw import step_by_kernel, step_by_pytorch
from runtime.engine.any_optimizer import is_adamw, step_by_itself
from runtime.engine.clip import Clip, in_float32
from runtime.engine.compact import placeholder
from runtime.engine.compact_adamw import step_by_kernel as step_compact_by_kernel
from runtime.engine.compact_adamw import step_by_pytorch as step_compact_by_pytorch
from runtime.engine.layout import Hooks, Layout
from runtime.engine.muon import Muon, is_muon, moments_of
from runtime.engine.offload import HostAdam, PyTorchsAdam, step_on_host
from runtime.engine.reduce import global_norm
from runtime.engine.shard import Shard


class Reduction(Protocol):
    """What takes the gradients of a backward to the shards.

    At ZeRO-3 also what gathers the weights: prepare() and gathered_parts() of Zero3Blocks.
    """

    reduces_in_backward: bool

    def on_grad_ready(self, param: torch.nn.Parameter) -> None:
        """Take a parameter's gradient."""

    def finish_backward(self) -> None:
        """End a backward."""

    def reduce_at_step(self) -> None:
        """Leave the averaged gradients in the shards."""


@dataclass(frozen=True)
class Wanted:
    """What a step should do.

    loss_factor: the number of its micro-steps, relative to what their losses were divided by.
    skip_above: skip the step unless the norm is below it.
    """

    loss_factor: float = 1.0
    skip_above: float = math.inf


@dataclass(frozen=True)
class Report:
    """What a step did, the same on all ranks. norm: before clipping, without the loss scale."""

    norm: float
    applied: bool


class OurStep:
    """Makes the steps of a Layout, in the place of DeepSpeed's.

    use_kernel: AdamW and Muon run on Triton, else on PyTorch. check_turn: called before each
    gradient is taken.
    """

    def __init__(
        self,
        layout: Layout,
        reduction: Reduction,
        use_kernel: bool,
        check_turn: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.reduction = reduction
        self.use_kernel = use_kernel
        self.check_turn = check_turn

        # The stepper: of the optimizer itself, of the host, or of each parameter group
        self.steps_itself = not is_adamw(layout.optimizer)
        self.on_host: HostAdam | None = None
        if layout.offloads:
            self.on_host = layout.cpu_adam or PyTorchsAdam()
        self.muon: dict[int, Muon] = {}  # of a parameter group, made at the first step

        # DeepSpeed calls these
        layout.connect(
            Hooks(
                on_grad_ready=self.take_gradient,
                finish_backward=reduction.finish_backward,
                step=lambda: self.step(Wanted()),
            )
        )

    def take_gradient(self, param: torch.nn.Parameter) -> None:
        """Take a parameter's gradient, if this is the time for it."""
        self.check_turn()
        self.reduction.on_grad_ready(param)

    def make(self, wanted: Wanted) -> Report:
        """Make a step. All ranks call this.

        DeepSpeed counts steps, so it has to make them: step_by() calls engine.step(), which calls
        OurStage2.step() or OurStage3.step(), which calls the hook, which calls step() below.
        """
        reports: list[Report] = []
        self.layout.step_by(lambda: reports.append(self.step(wanted)))
        (report,) = reports
        return report

    def step(self, wanted: Wanted) -> Report:
        """Reduce, clip and update. Called within DeepSpeed's step, which counts."""
        layout = self.layout
        self.reduction.reduce_at_step()

        # The gradients have the loss scale in them, and the mean over another number of micro-steps
        scale = layout.loss_scale * wanted.loss_factor
        norm = global_norm([shard.grads for shard in layout.shards], layout.group) / scale
        norm_on_cpu = norm.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None

        # The update, or nothing if the norm is too large
        limit = in_float32(wanted.skip_above)
        clip = Clip(norm, 1 / scale, layout.max_norm, limit)
        if self.steps_itself:
            step_by_itself(layout.optimizer, layout.shards, clip)
        else:
            for shard in layout.shards:
                self.update(shard, clip)
        layout.show_state()
        layout.gather_weights()

        # By now, the GPU has been given the whole update, so it has work while the CPU waits
        if copied:
            copied.synchronize()
        applied = norm_on_cpu.item() < limit
        layout.publish(norm_on_cpu.item(), applied)
        return Report(norm_on_cpu.item(), applied)

    def update(self, shard: Shard, clip: Clip) -> None:
        """Step a shard by AdamW or Muon, unless the norm is too large, and clear its gradients."""
        # The state of the first step
        state = shard.state
        if not state:  # as torch.optim.AdamW begins
            state["step"] = 0
            for moment in moments_of(shard.options):
                if shard.compact:
                    state[moment] = placeholder(shard.half.numel(), shard.half.device)
                else:
                    state[moment] = torch.zeros_like(shard.master.data)
        # DeepSpeed's CPU Adam begins with a number
        device = shard.master.device
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)

        # The stepper of this kind of group
        if is_muon(shard.options):
            if shard.group_index not in self.muon:
                self.muon[shard.group_index] = Muon(
                    shard.places,
                    shard.options["parts"],
                    size=shard.grads.numel(),
                    group=self.layout.group,
                    use_kernels=self.use_kernel,
                )
            self.muon[shard.group_index].step(shard, clip)
        elif shard.compact and self.use_kernel:
            step_compact_by_kernel(shard, clip)
        elif shard.compact:
            step_compact_by_pytorch(shard, clip)
        elif self.on_host:
            step_on_host(shard, clip, self.on_host)
        elif self.use_kernel:
            step_by_kernel(shard, clip)
        else:
            step_by_pytorch(shard, clip)

        # A skipped step doesn't count
        state["step"] += clip.applies().to(device)
