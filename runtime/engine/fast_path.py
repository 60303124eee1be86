"""A micro-step's launches, recorded once and replayed as one.

GPT-2 XL launches some 2,500 kernels a micro-step. At a small micro-batch that takes a CPU longer than the GPU needs to
run them: 32 micro-steps of one sequence took 4,219 ms launched and 909 ms replayed on an H200 beside a slow CPU.
"""

import atexit
import math
from dataclasses import dataclass

import torch

from runtime.cluster.ranks import on_shut_down

GRAPHS = []  # what is recorded


@dataclass
class FastPath:
    """Our shortcuts through one DeepSpeed engine, and what a step leaves for others to read. Each shortcut names what
    it replaces in DeepSpeed's optimizer in its REPLACES."""

    gradients: object = None  # zero2_gradients.install's; None: DeepSpeed's own path
    fused_step: object = None  # fused_adamw.install's; None: DeepSpeed's own step
    skip_above: float = math.inf  # a step whose gradient norm is not below it is skipped
    grad_norm: float | None = None  # of the last step, before clipping, without the loss scale; None: only DeepSpeed's


def on_own_stream():
    """Leave CUDA's default stream, which cannot be recorded. Before anything else runs on the GPU."""
    torch.cuda.set_stream(torch.cuda.Stream())


def micro_step(engine, record, stragglers):
    """A function (x, y) -> the loss, detached, of engine(x, y) and engine.backward; if `record`, one that replays it.
    stragglers: a StragglerDetector.

    To record, all that a micro-step does must be the same every time, and its memory stay where it is: ZeRO-2 with
    zero2_gradients.py and fused_adamw.py, no loss scale; PyTorch sees to it that each replay draws its own numbers
    for dropout, the same that launching would draw. The first step runs unrecorded, for what
    libraries and DeepSpeed do at their first calls; not two, as DeepSpeed's timer of steps then stops the GPU. The loss
    is overwritten by the next call.
    """
    launches_left, graph, inputs, output = engine.gradient_accumulation_steps(), None, None, None
    forward_alone = engine.zero_optimization_stage() < 3
    params = [param for param in engine.module.parameters() if param.requires_grad]
    alone = all(hasattr(param, "main_grad") for param in params)  # see runtime/engine/zero2_gradients.py

    def launched(x, y):
        with stragglers.time_local_work(forward_alone):
            loss = engine(x, y)
        engine.backward(loss)
        return loss.detach()

    def replayed(x, y):
        nonlocal launches_left, graph, inputs, output
        if launches_left:
            launches_left -= 1
            return launched(x, y)
        if graph is None:
            inputs, graph = (x.clone(), y.clone()), torch.cuda.CUDAGraph()
            # other threads read data and write checkpoints meanwhile
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                output = launched(*inputs)
            GRAPHS.append(graph)
        inputs[0].copy_(x)
        inputs[1].copy_(y)
        with stragglers.time_local_work(alone):
            graph.replay()
        return output

    return replayed if record else launched


def forget():
    """Give up what is recorded. NCCL, asked to destroy a group that a recording uses, waits for ever."""
    while GRAPHS:
        torch.cuda.synchronize()
        GRAPHS.pop().reset()


on_shut_down(forget)
atexit.register(forget)  # after a traceback, too
