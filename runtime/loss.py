"""The loss of the output layer in chunks of rows: the full logits are never in memory.

LMHead.losses in model.py says what the loss is. chunked_loss() sums it. The gradient comes from
autograd within each chunk. As long as LMHead's functions are ours, it is written by hand, which is
faster.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from runtime.errors import UserError
from runtime.source_hash import function_hash

LOSS_CHUNK = 4096  # rows of logits in memory at one time; 4096 x 50304 in bf16 take 412 MB
EAGER_LOSS_CHUNK = 2048  # without torch.compile, which halves the memory per row
FP16_GRAD_FACTOR = 1024.0  # many gradients of logits are below 3e-8, which float16 rounds to 0

# PyTorch 2.7 doesn't have it
ADDMM_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads() and not torch.version.hip

# Functions of LMHead in model.py that cross_entropy_with_grad implements, and their function_hash
IMPLEMENTED = {"logits": "d72b48d0", "losses": "626fae18"}


def chunked_loss(head: nn.Module, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of the rows of x (N, n_embd), by head.losses(x, targets), a chunk at a time.

    targets: (N,), -1 for a row that doesn't count. reduction: "mean" over the rows that count,
    "sum", or "none" for the loss of each row, (N,). All parameters of the head get their gradients.
    Raises UserError if a tensor outside the head would get none.
    """
    # In a model that torch.compile() compiles as a whole, the gradients below would be zero
    if torch.compiler.is_compiling():
        return loss_outside_of_compilation(head, x, targets, reduction)

    function = chunk_function(head)
    rows = EAGER_LOSS_CHUNK
    # The compiled function, unless the head has got another one since
    known, compiled = getattr(head, "compiled_loss", (None, None))
    if known == function:
        function = compiled
        rows = LOSS_CHUNK

    by_hand = head_is_ours(head)

    # The loss of each row
    if reduction == "none":
        losses = []
        for own_x, own_targets in zip(x.split(rows), targets.split(rows), strict=True):
            if by_hand:
                own_losses, _ = function(own_x @ head.weight.T, own_targets, head.vocab_size)
            else:
                own_losses = counted_losses(function, own_x, own_targets)
            losses.append(own_losses)
        return torch.cat(losses)

    if by_hand:
        total = FusedLinearCrossEntropy.apply(
            x, head.weight, targets, head.vocab_size, function, rows
        )
    else:
        params = [param for param in head.parameters() if param.requires_grad]
        if any(param._backward_hooks for param in params):
            # They would see the gradient of each chunk. So recompute the logits in backward
            total = torch.zeros((), device=x.device)
            for own_x, own_targets in zip(x.split(rows), targets.split(rows), strict=True):
                args = (function, own_x, own_targets)
                total = total + checkpoint(counted_losses, *args, use_reentrant=False).sum()
        else:
            total = LossByAutograd.apply(function, rows, targets, params, x, *params)

    # The sum is over all chunks
    if reduction == "mean":
        total = total / (targets >= 0).sum()
    return total


loss_outside_of_compilation = torch.compiler.disable(chunked_loss)


def chunk_function(head: nn.Module) -> Callable:
    """Return what chunked_loss calls for each chunk."""
    return cross_entropy_with_grad if head_is_ours(head) else head.losses


def compile_loss(head: nn.Module, **options) -> None:
    """Compile what chunked_loss calls for each chunk. options: torch.compile's."""
    function = chunk_function(head)
    head.compiled_loss = (function, torch.compile(function, **options))


def head_is_ours(head: nn.Module) -> bool:
    """Return whether cross_entropy_with_grad computes what head.losses says."""
    # A function that the head has of its own counts as edited, too
    for name, known in IMPLEMENTED.items():
        if name in vars(head) or function_hash(getattr(type(head), name, None)) != known:
            return False
    check_by_hand(cross_entropy_with_grad)
    return True


@functools.cache
def check_by_hand(cross_entropy: Callable) -> None:
    """Raise UserError if the gradient that cross_entropy_with_grad returns isn't that of its
    losses. Somebody may have edited one of the two."""
    # Large logits and small ones, a row that doesn't count, and padding
    logits = torch.linspace(-3.0, 30.0, 6 * 64, device="cpu").sin().reshape(6, 64).requires_grad_()
    targets = torch.tensor([3, 0, -1, 49, 7, 7], device="cpu")
    with torch.enable_grad():
        losses, grad = cross_entropy(20 * logits, targets, 50)
        (exact,) = torch.autograd.grad(losses.sum(), logits)
    if not torch.allclose(20 * grad, exact, rtol=1e-4, atol=1e-5):
        raise UserError(
            "cross_entropy_with_grad in runtime/loss.py returns a gradient that isn't that of its "
            "losses: edit LMHead.losses in model.py instead, whose gradient autograd computes"
        )


def counted_losses(losses: Callable, x: Tensor, targets: Tensor) -> Tensor:
    """Return losses(x, targets), (N,), and 0 for rows that don't count, whatever it gives them."""
    return torch.where(targets >= 0, losses(x, targets), 0.0)


def addmm_fp32(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `total` in place, in float32, and return it. On CUDA this is one GEMM.

    total: (rows, columns). a: (rows, n), b: (n, columns), of one dtype.
    """
    # On CUDA, the GEMM itself sums in float32
    if a.is_cuda and a.dtype != total.dtype and ADDMM_OUT_DTYPE:
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    if a.dtype == torch.float16:  # in float16 the sum would overflow
        return total.add_(a.float() @ b.float())
    return total.add_(a @ b)


def cross_entropy_with_grad(
    logits: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row and its gradient with respect to the logits.

    logits: (N, padded_vocab_size), of which padding columns are ignored. targets: (N,), -1 to
    ignore a row. Returns (N,) in fp32, and a gradient like logits. In float16 it is multiplied by
    FP16_GRAD_FACTOR.
    """
    # The vocabulary's padding gets no probability
    columns = torch.arange(logits.size(1), device=logits.device)
    logits32 = logits.float().masked_fill(columns >= vocab_size, float("-inf"))
    log_z = torch.logsumexp(logits32, dim=1, keepdim=True)
    # A row that doesn't count has neither loss nor gradient
    valid = (targets >= 0).unsqueeze(1)
    row_target = targets.clamp(min=0).unsqueeze(1)
    losses = (log_z - logits32.gather(1, row_target)) * valid
    grad = (torch.exp(logits32 - log_z) - (columns == row_target).float()) * valid
    if logits.dtype == torch.float16:
        grad = grad * FP16_GRAD_FACTOR
    return losses.squeeze(1), grad.to(logits.dtype)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Computes the sum of the cross-entropy of x @ weight.T, some rows at a time.

    Forward computes each chunk's gradients from its logits, so the full logits are never in memory
    (Liger Kernel, arXiv:2410.10989). Backward scales them in float32, because a scale rounded to
    bfloat16 can be off by 0.4%.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        cross_entropy: Callable = cross_entropy_with_grad,
        chunk: int = EAGER_LOSS_CHUNK,
    ) -> Tensor:
        """Return the loss of x (N, n_embd). cross_entropy: cross_entropy_with_grad, maybe compiled.
        chunk: rows at a time."""
        # Gradients of a loss of 1, which backward scales
        grad_x = torch.empty_like(x)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=x.device)
        for first in range(0, x.size(0), chunk):
            rows = slice(first, first + chunk)
            losses, grad = cross_entropy(x[rows] @ weight.T, targets[rows], vocab_size)
            total += losses.sum()
            grad_x[rows] = grad @ weight
            if grad_weight is not None:
                addmm_fp32(grad_weight, grad.T, x[rows])
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight."""
        grad_x, grad_weight = ctx.saved_tensors
        scale = scale_of(grad_loss, grad_x.dtype)
        grad_weight = scaled(grad_weight, scale, grad_x.dtype)
        grad_x = grad_x.float().mul_(scale).to(grad_x.dtype)
        return grad_x, grad_weight, None, None, None, None


class LossByAutograd(torch.autograd.Function):
    """Computes the sum of losses(x, targets), some rows at a time, with autograd in each chunk.

    As above, forward computes the gradients. Those of the parameters are summed in float32.
    """

    @staticmethod
    def forward(
        ctx,
        losses: Callable,
        chunk: int,
        targets: Tensor,
        params: list[nn.Parameter],
        x: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        """Return the loss of x (N, n_embd). params: what losses() uses and has to get gradients.
        They also are `tensors`, for autograd to know."""
        # Sums over the chunks
        needs_grad = any(ctx.needs_input_grad)
        factor = FP16_GRAD_FACTOR if x.dtype == torch.float16 else 1.0
        grad_x = torch.zeros_like(x)
        grads: list[Tensor | None] = [None] * len(params)
        total = torch.zeros((), device=x.device)
        for first in range(0, x.size(0), chunk):
            rows = slice(first, first + chunk)
            own_x = x[rows].detach().requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                loss = counted_losses(losses, own_x, targets[rows]).sum()
                scaled_loss = loss * factor
            total += loss.detach()
            if not needs_grad:
                continue
            if first == 0:
                check_leaves(loss, [own_x, *params])
            # The gradients of this chunk
            found = torch.autograd.grad(scaled_loss, [own_x, *params], allow_unused=True)
            if found[0] is not None:
                grad_x[rows] = found[0]
            for i, grad in enumerate(found[1:]):
                if grads[i] is None and grad is not None:
                    # Not in the parameter's shape: at ZeRO-3 it has none outside its module
                    grads[i] = torch.zeros_like(grad, dtype=torch.float32)
                if grad is not None:
                    grads[i] += grad
        ctx.save_for_backward(grad_x, *grads)
        ctx.dtypes = [param.dtype for param in params]
        return total

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the parameters."""
        grad_x, *grads = ctx.saved_tensors

        # All gradients by the factor of this loss
        scale = scale_of(grad_loss, grad_x.dtype)
        grad_x = (grad_x * scale).to(grad_x.dtype)
        grads = [scaled(grad, scale, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return None, None, None, None, grad_x, *grads


def scale_of(grad_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what multiplies the gradients of a loss in this dtype, in float32."""
    if dtype == torch.float16:
        return grad_loss.float() / FP16_GRAD_FACTOR
    return grad_loss.float()


def scaled(grad: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return grad * scale in a dtype. Scale and round in one pass: GPT-2 XL has 80M of these
    weights."""
    if grad is None:
        return None
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def graph_nodes(loss: Tensor) -> Iterator[Node]:
    """Return the nodes of the graph of a loss, each once."""
    # Without recursion: a graph may be deeper than Python's stack
    nodes = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]


def check_leaves(loss: Tensor, known: list[Tensor]) -> None:
    """Raise UserError if the graph of the loss reaches a leaf that isn't known."""
    ids = {id(tensor) for tensor in known}
    for node in graph_nodes(loss):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            raise UserError(
                f"LMHead.losses uses a tensor of shape {tuple(leaf.shape)} outside the head, which "
                "would get no gradient: make it a parameter or a module of LMHead"
            )
