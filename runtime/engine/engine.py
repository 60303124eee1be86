"""The engine that the training loop uses: DeepSpeed's, with our gradients, step and CUDA graph
where they fit.

Who divides by what. The gradient of a step is the mean over the tokens of all its micro-steps on
all ranks. Each factor has one place:

  tokens of a micro-batch  the loss: the mean; with loader.py's weights, forward_backward.py
                           multiplies it by the number of targets and their weight
  micro-steps              DeepSpeed's backward, by gradient_accumulation_steps; if a step has
                           another number, step.py (or Layout.step_of_deepspeed) divides by their
                           ratio
  ranks                    the reductions: reduce.py, zero3_blocks.py
  loss scale               multiplied by DeepSpeed's backward, divided by step.py; a constant one
                           follows the tokens of the step's micro-batches
  float16's factor         FP16_GRAD_FACTOR, in loss.py alone

On DeepSpeed's own path, it divides by the ranks and by the loss scale itself.
"""

import math
import time
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.manifest import topology
from runtime.checkpoint.model_source import note_edited
from runtime.checkpoint.tag_reader import TagReader, content_errors
from runtime.checkpoint.tags import Tag, TagStore
from runtime.cluster.ranks import all_gather_scalars, print0
from runtime.engine import setup, state
from runtime.engine.any_optimizer import optimizer_name
from runtime.engine.fast_paths import FastPaths
from runtime.engine.forward_backward import ForwardBackward
from runtime.engine.hidden_grads import HiddenGrads
from runtime.engine.layout import layout_of
from runtime.engine.lockstep import Lockstep
from runtime.engine.step import Wanted
from runtime.engine.untouched import Untouched, changed, check_values, sample_differs
from runtime.errors import UserError
from runtime.kernels.fused import FusedBlocks
from runtime.output import counted

# Steps in which all weights are compared with the optimizer's: the first ones, and later each of so
# many. In all others, a sample
CHECKED_STEPS = 2
CHECKED_EVERY = 100


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on all ranks."""

    grad_norm: float | None  # before clipping, without the loss scale; None: DeepSpeed has none
    applied: bool  # False: all ranks skipped it
    loss_scale: float | None  # float16's scale for the next step, else None
    min_loss_scale: float  # the lowest that the scale may become; infinite if it is constant


class Engine:
    """DeepSpeed's engine and model, behind what a training loop needs. All ranks call its methods
    together.

    deepspeed: what deepspeed.initialize returned. paths: the fast paths to take. fused: the model's
    fused blocks, or None. masked: whether only some tokens are targets.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        paths: FastPaths,
        fused: FusedBlocks | None = None,
        masked: bool = False,
    ) -> None:
        self.deepspeed = deepspeed
        self.module = deepspeed.module
        self.device = deepspeed.device
        self.world_size = deepspeed.world_size
        self.stage = int(deepspeed.zero_optimization_stage())
        self.dtype = str(deepspeed.get_data_types()[0]).removeprefix("torch.")
        self.offloads_optimizer = deepspeed.zero_use_cpu_optimizer()
        self.layout = layout_of(deepspeed)
        self.optimizer = optimizer_name(self.layout.optimizer)

        # Our gradients and step, or a watch over DeepSpeed's own path
        self.hidden_grads = HiddenGrads(self.module)
        check_turn = self.hidden_grads.check_turn
        self.our_step = setup.replace_gradients_and_step(self.layout, paths, check_turn)
        reduces_in_backward = True
        self.lockstep: Lockstep | None = None
        if self.our_step:
            reduces_in_backward = self.our_step.reduction.reduces_in_backward
        elif self.stage == 3:
            self.lockstep = Lockstep(self.module, self.world_size)
            self.hidden_grads.watch_backward()

        # Does a micro-step have no collectives? At ZeRO-3 it gathers weights, also if it reduces
        # nothing
        is_local = self.stage == 2 and not reduces_in_backward

        # If one rank ends its step while another begins a micro-step, their collectives would be
        # paired wrongly. Ours only queue up on a GPU, so the comparison in step() comes in time.
        # Those of gloo, and of DeepSpeed's own path, wait: compare in each micro-step
        on_cpu = self.device.type == "cpu"
        self.checks_micro_steps = not is_local and (on_cpu or self.our_step is None)

        # Forward and backward
        self.forward_backward = ForwardBackward(deepspeed, paths.graph.taken, is_local)
        self.fused = fused

        # Where our kernels in a bfloat16 model are in float16, setup.initialize() has set a loss
        # scale for micro-batches of so many tokens
        self.masked = masked
        self.scaled_tokens: int | None = None
        if fused and self.dtype == "bfloat16":
            self.scaled_tokens = setup.planned_tokens(deepspeed)

        # What has been done
        self.micro_steps = 0  # since the last optimizer step
        self.steps = 0  # of this process
        self.untouched = Untouched(
            self.module, self.layout.optimizer, keeps_places=self.our_step is not None
        )
        self.accept_weights()
        self.hidden_grads.accept_hooks(self.without_hooks(paths))
        self.layout.optimizer.zero_grad = self.hidden_grads.refuse_clearing
        setup.silence_skipped_steps()
        deepspeed.set_gradient_accumulation_boundary(False)

    def without_hooks(self, paths: FastPaths) -> set[torch.nn.Parameter]:
        """Return the parameters of which no new gradient hook would run."""
        if paths.graph.taken:
            return set(self.module.parameters())
        in_kernels: set[torch.nn.Parameter] = set()
        if self.fused:
            for block in self.fused.blocks:
                in_kernels |= set(block.parameters())
        return in_kernels

    def micro_step(self, *batch: Tensor) -> Tensor:
        """Run forward and backward on (x, y), or on (x, y, weight) with the mean over targets times
        their number and weight as the loss.

        A step may have any number of micro-steps, the same on all ranks. Its gradient is the mean
        over them. Return the detached loss, which the next call may overwrite. Raises UserError if
        another rank ends its step here.
        """
        if self.checks_micro_steps:
            self.check_ranks(micro_steps=self.micro_steps, ends=False)
        if self.micro_steps and self.deepspeed.wall_clock_breakdown():
            self.deepspeed.step()  # in the middle of a step it only prints its times
        # Begin an optimizer step
        if not self.micro_steps:
            self.untouched.check()
            if self.fused:  # the weights have changed
                self.fused.copy_weights()
            if self.scaled_tokens is not None:
                self.follow_micro_batch(batch)
        # Each micro-step: the weights with which a forward begins
        if self.our_step and self.stage == 3:
            self.our_step.reduction.prepare()

        self.micro_steps += 1
        with self.hidden_grads.micro_step():
            loss = self.forward_backward(*batch)
            if self.lockstep:
                self.lockstep.end_backward()
        loss.backward = refuse_backward  # type: ignore[method-assign]
        return loss

    def follow_micro_batch(self, batch: tuple[Tensor, ...]) -> None:
        """Fit the loss scale to the micro-batches of the step that begins with this one, which a
        batch ramp may make smaller."""
        tokens = batch[0].numel()
        if tokens != self.scaled_tokens:
            setup.fit_loss_scale(self.deepspeed, tokens, self.masked)
            self.scaled_tokens = tokens

    def check_ranks(self, micro_steps: int, ends: bool) -> None:
        """Raise UserError unless all ranks make the same micro-step, or end their step with it.

        Otherwise their collectives would not match.
        """
        if self.world_size == 1:
            return

        # The number of micro-steps so far, and whether the step ends
        ranks = all_gather_scalars(micro_steps, ends)
        if any(other != ranks[0] for other in ranks):
            # The micro-step that begins now counts, too
            made = [int(n) if end else int(n) + 1 for n, end in ranks]
            counts = ", ".join(map(str, made))
            raise UserError(
                "the ranks make different numbers of micro-steps in one optimizer step "
                f"({counts}): make as many on all ranks"
            )

    def step(self, skip_above: float = math.inf) -> StepResult:
        """End an optimizer step: reduce and clip the gradients, step the optimizer, and return the
        StepResult.

        The step is skipped if the gradient norm isn't finite, or isn't below skip_above, which
        needs our gradients. Raises UserError if there was no micro-step, or if the ranks made
        different numbers of them.
        """
        if not self.micro_steps:
            raise UserError(
                "an optimizer step had no micro-step: call engine.micro_step() before it"
            )

        if self.our_step is None and skip_above != math.inf:
            raise UserError(
                "engine.step(skip_above=...) can't skip a step on DeepSpeed's own path, which "
                "ZeRO-3 with offload takes: leave it out, or use "
                "--deepspeed_config=config/ds/zero2_offload.json"
            )

        # Before the first collective of the step, which would hang if the ranks differ
        self.check_ranks(self.micro_steps, ends=True)
        self.hidden_grads.take_back()
        self.untouched.check()
        self.untouched.check_parts()
        values_differ = self.check_values()

        # DeepSpeed has divided by gradient_accumulation_steps
        loss_factor = self.micro_steps / self.deepspeed.gradient_accumulation_steps()
        self.micro_steps = 0

        # The step itself, DeepSpeed's or ours
        if self.our_step is None:
            self.layout.step_of_deepspeed(loss_factor)
            norm = self.deepspeed.get_global_grad_norm()
            if norm is not None:
                norm = float(norm)
            applied = self.deepspeed.was_step_applied()
        else:
            report = self.our_step.make(Wanted(loss_factor, skip_above))
            norm = report.norm
            applied = report.applied
            if values_differ.item():  # the CPU has waited for the norm, which came later
                raise UserError(changed("the model"))
        self.forward_backward.after_step()
        self.accept_weights()
        self.steps += 1
        scale = self.layout.loss_scale if self.dtype == "float16" else None
        return StepResult(norm, applied, scale, self.layout.min_loss_scale)

    def check_values(self) -> Tensor:
        """Compare the weights in use with the optimizer's: all of them now and then, else a sample.

        Raises UserError if they differ. For a sample, and for compact state, return a bool that is
        on its way to the CPU.
        """
        if self.our_step is None:
            return torch.tensor(False)

        # All of them in the first steps. Later not with offload, where that takes seconds
        found = []
        pairs = self.layout.weights_in_use()
        is_due = self.steps % CHECKED_EVERY == 0 and not self.offloads_optimizer
        if self.steps < CHECKED_STEPS or is_due:
            check_values(pairs)
            if self.stage == 3:
                check_values(self.our_step.reduction.gathered_parts())
        else:
            found += sample_differs(pairs)

        # With compact state, the weights in use are the optimizer's
        for now, before in zip(self.layout.compact_sums(), self.compact_sums, strict=True):
            found.append(now != before)
        if not found:
            return torch.tensor(False)
        return torch.stack(found).any().to("cpu", non_blocking=True)

    def accept_weights(self) -> None:
        """Take the weights as they are, after what may change them."""
        self.untouched.accept()
        self.compact_sums = self.layout.compact_sums()

    def own_work_seconds(self) -> float:
        """Return the seconds that this rank worked in the first micro-step since the last call,
        without waiting for others, or 0 if that isn't known."""
        return self.forward_backward.timer.seconds()

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each target, with the shape of y. At ZeRO-3, a forward gathers
        weights."""
        if self.fused:
            self.fused.copy_weights()
        return self.deepspeed(x, y, "none").view(y.shape)

    def checkpoint_files(self, out_dir: str, tag: str) -> list[tuple[str, dict]]:
        """Return [(path, content)] of the files of this rank for out_dir/tag, with the engine's own
        tensors. Raises UserError in the middle of a step, whose gradients no checkpoint has."""
        if self.micro_steps:
            raise UserError(
                "a checkpoint between engine.micro_step() and engine.step() would lose the "
                "gradients of this step: save after engine.step()"
            )
        for now, before in zip(self.layout.compact_sums(), self.compact_sums, strict=True):
            if now.item() != before.item():
                raise UserError(changed("the model"))
        return self.layout.checkpoint_files(out_dir, tag)

    def copy_recovery_script(self, out_dir: str) -> None:
        """Write DeepSpeed's zero_to_fp32.py and zero_to_torch.py into a folder."""
        self.layout.copy_recovery_script(out_dir)

    def load(self, store: TagStore, tag: Tag) -> dict:
        """Load a tag's weights, optimizer state and loss scale, and return the state that was saved
        with it. Re-shard them if the number of ranks, the ZeRO stage or the precision has
        changed."""
        start = time.monotonic()
        manifest = tag.manifest
        path = store.path(tag.name)
        # What differs from the run that saved it
        was = describe_topology(manifest)
        now = describe_topology(topology(self))
        if was != now:
            print0(f"re-sharding {path}: saved by {was}, now {now}")
        if manifest["optimizer"] != self.optimizer:
            raise CheckpointError(
                f"{path} was trained with the optimizer {manifest['optimizer']}, and this run has "
                f"{self.optimizer}: use the same, or start a new stage with --init_from={path}"
            )
        note_edited(path, manifest["state"], self.module)

        # The state itself
        with content_errors(path):
            state.copy_into(self.layout, TagReader(path, manifest))
        self.accept_weights()
        dist.barrier()
        print0(f"loaded in {time.monotonic() - start:.1f} s")
        return manifest["state"]


def refuse_backward(*args: object, **named: object) -> NoReturn:
    """Stand in for backward() of the loss that micro_step() returns."""
    raise UserError(
        "engine.micro_step() has made the backward of its loss already: leave loss.backward() out"
    )


def describe_topology(saved: dict) -> str:
    """Return topology() as it is printed."""
    ranks = counted(saved["world_size"], "rank")
    return f"{ranks} at ZeRO stage {saved['stage']} in {saved['dtype']}"
