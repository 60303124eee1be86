"""Faster paths through one DeepSpeed engine: gradients, the AdamW step, and micro-steps as a CUDA graph.

GPT-2 XL launches about 2,500 kernels per micro-step. With a small micro-batch, launching them takes the CPU longer than
running them takes the GPU (docs/engineering_notes.md).
"""

import atexit
import contextlib
import math

import torch

from runtime.cluster.ranks import all_reduce_sum, on_shut_down
from runtime.engine.ds_config import supports_fast_gradients


class FastPath:
    """The fast paths that an engine supports. A step leaves its results here for others to read.

    install() is the only place in the project that replaces anything in DeepSpeed's optimizer: process_gradients,
    reduce_ipg_grads, has_overflow, scaled_global_norm, zero_grad, overlap_comm and _use_compact_grad_partition_buffer
    (zero2_gradients.py), independent_gradient_partition_epilogue, all hooks and ipg_buckets (zero3_blocks.py), and step
    (fused_adamw.py). Parameters get a main_grad."""

    def __init__(self, engine=None):
        self.engine = engine
        self.gradients = None  # from zero2_gradients.py or zero3_blocks.py; None: DeepSpeed's own path
        self.fused_step = None  # fused_adamw.install's; None: DeepSpeed's own step
        self.skip_above = math.inf  # skip steps whose gradient norm is not below it
        self.grad_norm = None  # of the last step, before clipping, without the loss scale; None: ask the engine
        self.time_local_work = lambda local: contextlib.nullcontext()  # StragglerDetector's, around this rank's work
        self.launches_left = math.inf  # micro-steps before the capture
        self.graph = None

    def install(self, accumulate_locally=False, fused_step=True, capture=True):
        """Install the paths that the engine supports. All ranks call this. accumulate_locally: this rank has memory for
        the gradients of all parameters, which all ranks need. fused_step: Triton works. capture: use a CUDA graph."""
        from runtime.engine import fused_adamw, zero2_gradients, zero3_blocks

        if supports_fast_gradients(self.engine.config, str(self.engine.get_data_types()[0]).removeprefix("torch.")):
            world_size = torch.distributed.get_world_size(self.engine.optimizer.dp_process_group)
            local = world_size == 1 or all_reduce_sum(accumulate_locally)[0] == world_size
            paths = zero3_blocks if self.engine.zero_optimization_stage() == 3 else zero2_gradients
            self.gradients = paths.install(self.engine, self, local)
        self.fused_step = fused_adamw.install(self.engine, self) if fused_step else None
        if capture and self.gradients and self.fused_step:
            self.capture_micro_steps()

    def capture_micro_steps(self):
        """Run micro-steps as a CUDA graph from the second optimizer step on.

        Every micro-step must do the same work at the same addresses. That holds for ZeRO-2 and 3 with our gradients and
        step, without a loss scale. Each replay draws new random numbers for dropout, the same ones as without a graph.
        The first step runs eagerly, because libraries and DeepSpeed initialize at their first calls. The capture comes
        before the second step, because from then on DeepSpeed's step timer synchronizes the GPU."""
        self.launches_left = self.engine.gradient_accumulation_steps()
        params = [param for param in self.engine.module.parameters() if param.requires_grad]
        self.graph_is_local = (self.engine.zero_optimization_stage() == 2  # no collective in it
                               and all(hasattr(param, "main_grad") for param in params))
        on_shut_down(self.close)
        atexit.register(self.close)  # also after a traceback

    def forward_backward(self, *batch):
        """Run engine(x, y) and engine.backward(loss) for a batch (x, y). For (x, y, weight), the loss is the sum over
        targets, times weight. Returns the detached loss, which the next call may overwrite."""
        if self.gradients:
            self.gradients.before_micro_step()
        if self.launches_left:
            self.launches_left -= 1
            return self._launch(*batch)
        if self.graph is None:
            self.inputs, self.graph = [t.clone() for t in batch], torch.cuda.CUDAGraph()
            # thread_local: other threads read data and write checkpoints during the capture
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self.loss = self._launch(*self.inputs)
        for own, t in zip(self.inputs, batch, strict=True):
            own.copy_(t)
        with self.time_local_work(self.graph_is_local):
            self.graph.replay()
        return self.loss

    def _launch(self, x, y, weight=None):
        with self.time_local_work(self.engine.zero_optimization_stage() < 3):
            loss = self.engine(x, y) if weight is None else self.engine(x, y, "sum") * weight
        self.engine.backward(loss)
        return loss.detach()

    def close(self):
        """Release the graph. Destroying an NCCL process group that a graph still uses hangs."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
            self.graph, self.launches_left = None, math.inf
