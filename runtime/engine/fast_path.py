"""Our shortcuts through one DeepSpeed engine: the gradient path, the AdamW step, and micro-steps as a CUDA graph.

GPT-2 XL launches some 2,500 kernels per micro-step. At a small micro-batch that takes a CPU longer than running them
takes the GPU: 32 micro-steps of one sequence took 4,219 ms, as a CUDA graph 909 ms, on an H200 beside a slow CPU
(RESULTS.md).
"""

import atexit
import contextlib
import math

import torch

from runtime.cluster.ranks import on_shut_down


class FastPath:
    """The shortcuts that fit an engine. A step leaves its results here for others to read.

    install() replaces these of DeepSpeed's optimizer, and nothing else in the project does: process_gradients,
    reduce_ipg_grads, has_overflow, scaled_global_norm, zero_grad, overlap_comm and _use_compact_grad_partition_buffer
    (zero2_gradients.py), and step (fused_adamw.py). Parameters get a main_grad.
    """

    def __init__(self, engine=None):
        self.engine = engine
        self.gradients = None  # zero2_gradients.install's; None: DeepSpeed's own path
        self.fused_step = None  # fused_adamw.install's; None: DeepSpeed's own step
        self.skip_above = math.inf  # a step whose gradient norm is not below it is skipped
        self.grad_norm = None  # of the last step, before clipping, without the loss scale; None: ask the engine
        self.time_local_work = lambda local: contextlib.nullcontext()  # StragglerDetector's, around work of this rank
        self.launches_left = math.inf  # micro-steps before the one that is captured
        self.graph = None

    def install(self, accumulate_locally=False, fused_step=True, capture=True):
        """Replace what fits in the engine, and capture micro-steps if `capture` and that is possible. All ranks.
        accumulate_locally: whether ranks have room for the gradients of all parameters. fused_step: whether Triton
        works."""
        from runtime.engine import fused_adamw, zero2_gradients

        self.gradients = zero2_gradients.install(self.engine, self, accumulate_locally)
        self.fused_step = fused_adamw.install(self.engine, self) if fused_step else None
        if capture and self.gradients and self.fused_step:
            self.capture_micro_steps()

    def capture_micro_steps(self):
        """Run micro-steps as a CUDA graph from the second optimizer step on.

        All that a micro-step does must be the same every time, and its memory stay where it is: ZeRO-2 with our
        gradients and step, and no loss scale. Each replay draws new random numbers for dropout, the same as without a
        graph. The first step runs without, for what libraries and DeepSpeed do at their first calls; not the second, as
        DeepSpeed's timer of steps then stops the GPU.
        """
        self.launches_left = self.engine.gradient_accumulation_steps()
        params = [param for param in self.engine.module.parameters() if param.requires_grad]
        self.graph_is_local = all(hasattr(param, "main_grad") for param in params)  # no collective in it
        on_shut_down(self.close)
        atexit.register(self.close)  # also after a traceback

    def forward_backward(self, x, y):
        """engine(x, y) and engine.backward(loss). Returns the loss, detached; the next call may overwrite it."""
        if self.launches_left:
            self.launches_left -= 1
            return self._launch(x, y)
        if self.graph is None:
            self.inputs, self.graph = (x.clone(), y.clone()), torch.cuda.CUDAGraph()
            # other threads read data and write checkpoints meanwhile
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self.loss = self._launch(*self.inputs)
        self.inputs[0].copy_(x)
        self.inputs[1].copy_(y)
        with self.time_local_work(self.graph_is_local):
            self.graph.replay()
        return self.loss

    def _launch(self, x, y):
        with self.time_local_work(self.engine.zero_optimization_stage() < 3):
            loss = self.engine(x, y)
        self.engine.backward(loss)
        return loss.detach()

    def close(self):
        """Release the graph. NCCL, asked to destroy a group that a graph uses, waits forever."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
            self.graph, self.launches_left = None, math.inf
