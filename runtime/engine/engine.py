"""The engine that the training loop uses: DeepSpeed's, with our gradients, step and CUDA graph where they fit."""

import math
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.checkpoint.shards import TagReader, content_errors
from runtime.checkpoint.tags import CheckpointError, topology
from runtime.cluster.ranks import print0, silence_stdout
from runtime.engine import override, setup, state
from runtime.engine.any_optimizer import optimizer_name
from runtime.engine.launch import Launch
from runtime.errors import UserError


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on all ranks."""

    grad_norm: float | None  # before clipping, without the loss scale; None: DeepSpeed has none
    applied: bool  # False: all ranks skipped it
    loss_scale: float | None  # float16's scale for the next step, else None
    min_loss_scale: float  # the lowest that the scale may become; infinite if it is constant
    grad_shares: dict | None = None  # {parameter: its share of the squared norm} of the three largest; see Engine.step


class Engine:
    """DeepSpeed's engine and model, behind what a training loop needs. All ranks call its methods together.

    deepspeed: what deepspeed.initialize returned. accumulate_locally: this rank has memory for the fp32 gradients of
    all parameters, which all ranks need. use_triton: our AdamW kernel runs here. capture: run micro-steps as a CUDA
    graph if our gradients and step are in use."""

    def __init__(self, deepspeed, accumulate_locally=False, use_triton=False, capture=False):
        self.deepspeed, self.module, self.device = deepspeed, deepspeed.module, deepspeed.device
        self.world_size, self.stage = deepspeed.world_size, deepspeed.zero_optimization_stage()
        self.dtype = str(deepspeed.get_data_types()[0]).removeprefix("torch.")
        self.optimizer = optimizer_name(deepspeed.optimizer.optimizer)
        self.offloads_optimizer = deepspeed.zero_use_cpu_optimizer()
        self.fused_step = setup.replace_gradients_and_step(deepspeed, accumulate_locally, use_triton)
        self.launch = Launch(deepspeed, capture and self.fused_step is not None and self.fused_step.use_kernel)
        self.micro_steps = 0  # since the last optimizer step
        self.copy_weights = getattr(self.module, "copy_weights", lambda: None)  # see kernels.block.use_fused_blocks

    def micro_step(self, *batch):
        """Run forward and backward on (x, y), or on (x, y, weight) with the sum over targets times weight as the loss.
        Return the detached loss, which the next call may overwrite."""
        if self.micro_steps:
            self.deepspeed.step()  # of the micro-step before this one; it only counts
        else:  # the weights have changed
            self.copy_weights()
            if self.fused_step and self.stage == 3:
                self.fused_step.gradients.gather_first()
        self.micro_steps += 1
        return self.launch(*batch)

    def step(self, skip_above=math.inf, with_shares=False):
        """Reduce and clip the gradients, step the optimizer, and return the StepResult. The step is skipped if the
        gradient norm isn't finite, or with our gradients, isn't below skip_above. with_shares: return grad_shares too,
        if the norm is finite, at ZeRO-2 with our gradients. Raises UserError if DeepSpeed would not step here."""
        wanted = self.deepspeed.gradient_accumulation_steps()
        if self.micro_steps != wanted:  # DeepSpeed would only count, and half of the updates would be missing
            raise UserError(f"an optimizer step had {self.micro_steps} micro-steps, but gradient_accumulation_steps="
                            f"{wanted}: make as many in each step of the training loop")
        if self.fused_step:
            self.fused_step.skip_above = skip_above
            self.fused_step.with_shares = with_shares and self.stage != 3
        self.deepspeed.step()  # the step of the last micro-step is the optimizer's
        self.micro_steps = 0
        scaler = self.deepspeed.optimizer.loss_scaler if self.dtype == "float16" else None
        norm = self.fused_step.grad_norm if self.fused_step else self.deepspeed.get_global_grad_norm()
        return StepResult(None if norm is None else float(norm), self.deepspeed.was_step_applied(),
                          scaler and scaler.cur_scale, getattr(scaler, "min_scale", math.inf), self.largest_shares())

    def largest_shares(self):
        shares = self.fused_step and self.fused_step.shares
        if shares is None or not shares.isfinite().all():
            return None
        params = [param for places in self.fused_step.gradients.places for param, _ in places]
        largest = shares.argsort(descending=True)[:3]
        return {self.deepspeed.param_names[params[i]]: round(shares[i].item(), 4) for i in largest}

    @torch.no_grad()
    def evaluate(self, x, y):
        """Return the loss of each target, with the shape of y. At ZeRO-3, a forward gathers the weights."""
        self.copy_weights()
        return self.deepspeed(x, y, "none").view(y.shape)

    def checkpoint_files(self, out_dir, tag):
        """Return [(path, content)] of the files of this rank for out_dir/tag, with the engine's own tensors."""
        files = []
        override(self.deepspeed.checkpoint_engine, save=lambda state_dict, path: files.append((path, state_dict)))
        override(self.deepspeed, _copy_recovery_script=lambda folder: None)  # copy_recovery_script() does it
        if self.stage < 3:
            override(self.deepspeed, _get_param_fragment_func=torch.Tensor.detach)  # don't copy frozen weights
        with silence_stdout():
            self.deepspeed.save_checkpoint(out_dir, tag=tag, save_latest=False)
        return files

    def copy_recovery_script(self, out_dir):
        """Write DeepSpeed's zero_to_fp32.py and zero_to_torch.py into a folder."""
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            path = os.path.join(out_dir, name)
            if os.path.islink(path):  # DeepSpeed would overwrite its target
                os.remove(path)
        type(self.deepspeed)._copy_recovery_script(self.deepspeed, out_dir)

    def load(self, store, tag):
        """Load a tag's weights, optimizer state and loss scale, and return the state that was saved with it. Re-shard
        them if the number of ranks, the ZeRO stage or the precision has changed."""
        start, manifest, path = time.monotonic(), tag.manifest, store.path(tag.name)
        was, now = ("{world_size} ranks at ZeRO stage {stage} in {dtype}".format(**recorded)
                    for recorded in (manifest, topology(self)))
        if was != now:
            print0(f"re-sharding {path}: saved by {was}, now {now}")
        if manifest["optimizer"] != self.optimizer:
            raise CheckpointError(f"{path} was trained with the optimizer {manifest['optimizer']}, and this run has "
                                  f"{self.optimizer}: use the same, or start a new stage with --init_from={path}")
        with content_errors(path):
            state.copy_into(self.deepspeed, TagReader(path, manifest))
        dist.barrier()
        print0(f"loaded in {time.monotonic() - start:.1f} s")
        return manifest["state"]
