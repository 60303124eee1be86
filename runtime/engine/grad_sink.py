"""Where the gradient of a parameter goes: the only attribute that we set on a parameter.

A kernel or a hook looks for param.grad_sink. With one, it adds the gradient there in one
pass, most often in float32, and gives none to autograd.
"""

import torch
from torch import Tensor, nn

from runtime.loss import addmm_fp32


class GradSink:
    """Takes the gradients of a parameter.

    total: in the parameter's shape. It holds the sum over micro-steps, or with one_backward only
    that of the present one, such as the buffer of a reduce_scatter in half precision.
    """

    def __init__(self, total: Tensor, one_backward: bool = False) -> None:
        self.total = total
        self.one_backward = one_backward
        self.is_empty = one_backward  # what total holds doesn't count yet

    def add(self, grad: Tensor) -> None:
        """Add a gradient in the parameter's shape."""
        if self.is_empty:
            self.total.copy_(grad)
            self.is_empty = False
        else:
            self.total.add_(grad)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b, in one GEMM if it can. a: (rows, n), b: (n, columns), of the total's shape."""
        if not self.one_backward:
            addmm_fp32(self.total, a, b)
        # The first product can be written in place of what total held
        elif self.is_empty and a.dtype == self.total.dtype:
            torch.mm(a, b, out=self.total)
            self.is_empty = False
        else:
            product = a.new_zeros(self.total.shape, dtype=torch.float32)
            self.add(addmm_fp32(product, a, b))

    def finish_backward(self) -> None:
        """Make total the sum of what came in this backward: zero if nothing did."""
        if self.is_empty:
            self.total.zero_()
        self.is_empty = self.one_backward


def sink_of(param: nn.Parameter) -> GradSink | None:
    """Return where the gradient of a parameter goes, or None: to autograd."""
    return getattr(param, "grad_sink", None)


def set_sink(param: nn.Parameter, sink: GradSink) -> None:
    """Send the gradient of a parameter to a sink from now on."""
    param.grad_sink = sink


def take_grad(param: nn.Parameter) -> None:
    """Move the gradient that autograd has left to the sink. There is none if a kernel used it."""
    grad = param.grad
    param.grad = None
    if grad is not None:
        sink_of(param).add(grad)
