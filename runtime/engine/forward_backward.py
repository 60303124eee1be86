"""Run the forward and backward of micro-steps, as a CUDA graph if possible.

GPT-2 XL launches about 2,500 kernels per micro-step. With a small micro-batch, launching them takes
the CPU longer than running them takes the GPU (docs/engineering_notes.md).
"""

import atexit
from collections.abc import Callable

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from runtime.cluster.ranks import on_shut_down, print0
from runtime.engine.guards import Guards
from runtime.engine.layout import without_throughput_timer
from runtime.engine.local_timer import LocalTimer
from runtime.errors import UserError


class ForwardBackward:
    """Runs forward and backward of a batch. .timer measures this rank's own work.

    With `capture`, micro-steps run as a CUDA graph from the second optimizer step on. Every
    micro-step must do the same work at the same addresses: our gradients and step do, if the loss
    scale is constant. Each replay draws dropout's random numbers, the same ones as without a graph.
    The first step runs eagerly, because libraries initialize at their first calls, and compiled
    code is made. The capture comes before the second step.

    A batch of another shape, as a ramp makes, begins anew: its first step runs eagerly, and
    the capture comes before its second step. So there is one graph at a time.
    """

    def __init__(self, deepspeed: DeepSpeedEngine, capture: bool, is_local: bool) -> None:
        """is_local: a micro-step has no collectives."""
        self.deepspeed = deepspeed
        self.timer = LocalTimer(deepspeed.device)
        self.stage = int(deepspeed.zero_optimization_stage())
        self.capture = capture
        self.is_local = is_local
        self.is_warm = False  # libraries have initialized, for batches of these shapes
        self.shapes: list[torch.Size] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.guards: Guards | None = None
        self.inputs: list[Tensor] = []  # what the graph reads
        self.loss: Tensor | None = None  # what it writes
        # Attributes that a micro-step sets, such as metrics: (owner, name, tensor)
        self.left: list[tuple[dict, str, Tensor]] = []
        if capture:
            on_shut_down(self.close)
            atexit.register(self.close)  # also after a traceback

    def after_step(self) -> None:
        """Note that an optimizer step has ended."""
        self.is_warm = True

    def __call__(self, *batch: Tensor) -> Tensor:
        """Run a batch, as for Engine.micro_step(). Return the detached loss, which the next call
        may overwrite."""
        if self.capture:
            self.follow_shapes(batch)
        if self.capture and self.is_warm:
            self.check()
        if not (self.capture and self.is_warm):
            return self.run_eagerly(*batch)
        if self.graph is None:
            self.make_graph(batch)
        for own, t in zip(self.inputs, batch, strict=True):
            own.copy_(t)
        with self.timer.time(self.is_local):
            self.graph.replay()
        # Python may have set them to other tensors, such as in an evaluation
        for owner, name, tensor in self.left:
            owner[name] = tensor
        return self.loss

    def follow_shapes(self, batch: tuple[Tensor, ...]) -> None:
        """Release the graph if it is of other shapes: a copy into its inputs could broadcast."""
        shapes = [t.shape for t in batch]
        if shapes != self.shapes:
            self.release()
            self.shapes = shapes
            self.is_warm = False

    def check(self) -> None:
        """Go on without a graph if what it takes for fixed has changed.

        A loop may change it between any two micro-steps, so each is checked, while the GPU works on
        what came before.
        """
        reason = None
        # The first time, see what there is. Later, see what has changed
        if self.guards is None:
            self.guards = Guards(self.deepspeed.module)
            on_cpu = self.guards.cpu_tensor()
            if on_cpu:
                reason = f"{on_cpu} is a tensor on the CPU"
        else:
            changed = self.guards.changed()
            if changed:
                reason = f"{changed} has changed"
        if reason:
            print0(
                f"note       {reason}, which a CUDA graph can't follow: micro-steps go on without "
                "one"
            )
            self.close()

    def make_graph(self, batch: tuple[Tensor, ...]) -> None:
        """Capture a micro-step, on the stream of use_stream_for_capture(). Raises UserError if it
        can't be captured."""
        self.inputs = [t.clone() for t in batch]
        graph = torch.cuda.CUDAGraph()
        # Destructors that call CUDA would end the capture
        torch.compiler.config.force_cudagraph_gc = True
        stream = torch.cuda.current_stream()
        try:
            # thread_local: other threads read data and write checkpoints during the capture
            with (
                without_throughput_timer(self.deepspeed),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.loss = self.run_eagerly(*self.inputs)
        except (RuntimeError, UserError) as error:
            raise capture_error(error) from error
        self.graph = graph
        self.left = self.guards.after_capture()

    def run_eagerly(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Run a batch without a graph, and return the detached loss."""
        with self.timer.time(self.stage < 3):
            if weight is None:
                loss = self.deepspeed(x, y)
            else:
                loss = loss_of_targets(self.deepspeed, x, y, weight)
        self.deepspeed.backward(loss)
        return loss.detach()

    def close(self) -> None:
        """Release the graph, and make no other. Destroying an NCCL process group that a graph still
        uses hangs."""
        self.capture = False
        self.release()

    def release(self) -> None:
        """Release the graph, if there is one. The next one has guards of its own."""
        self.guards = None
        self.left = []
        self.inputs = []
        self.loss = None
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
            self.graph = None


def use_stream_for_capture() -> None:
    """Work on a stream of our own from now on: the default stream can't be captured."""
    torch.cuda.set_stream(torch.cuda.Stream())


def loss_of_targets(model: Callable[..., Tensor], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of a micro-batch in which only some targets count, where y isn't -1: the
    model's own mean times their number and weight.

    So what the model adds to its mean, such as an auxiliary loss, counts as often as the
    micro-batch has targets.
    """
    count = (y >= 0).sum()  # on the GPU, where the CPU doesn't wait for it
    # A mean over no targets is not a number. So if none count, take other ones, and multiply by 0
    targets = torch.where(count > 0, y, y.clamp(min=0))
    return model(x, targets) * (count * weight)


def capture_error(error: Exception) -> Exception:
    """Return what to raise for an error while a micro-step was captured: one sentence, or the error
    itself if the GPU was out of memory or the user made a mistake."""
    # The end of the capture fails, too, with another message. So take the first error
    earlier = error.__context__
    while earlier is not None:
        if isinstance(earlier, (RuntimeError, UserError)):
            error = earlier
        earlier = earlier.__context__
    first_line = str(error).partition("\n")[0]
    if isinstance(error, UserError) or "out of memory" in str(error):
        return error
    if type(error).__module__.startswith("torch._dynamo"):
        return UserError(
            f"a micro-step can't be captured in a CUDA graph ({first_line}): torch.compile "
            "compiled a block anew, as it does if an attribute that its code reads was set in the "
            "first step: set --cuda_graph=False"
        )
    return UserError(
        f"a micro-step can't be captured in a CUDA graph ({first_line}). Most often it waits for "
        "the GPU, as code that looks at values does: leave out --cuda_graph=True, or set "
        "--cuda_graph=False"
    )
