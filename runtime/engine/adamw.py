"""AdamW (Loshchilov and Hutter, 2019) on a shard: clipping, the update and the half-precision copy
of the weights in one kernel, or by PyTorch where Triton doesn't run."""

import torch
from torch import Tensor
from torch.optim.adamw import adamw as pytorchs_adamw

from runtime.engine.clip import Clip
from runtime.engine.shard import Shard
from runtime.kernels import jit, tl, triton

BLOCK = 1024  # elements per program


@jit
def adamw_kernel(
    master,
    grads,
    exp_avg,
    exp_avg_sq,
    half,
    step,
    grad_norm,
    n,
    lr,
    keep,
    beta1,
    beta2,
    eps,
    inverse_scale,
    max_norm,
    skip_above,
    BLOCK: tl.constexpr,
):
    """Step n elements and clear their grads. If grad_norm is not below skip_above, only clear
    grads.

    keep: what weight decay leaves of a weight, 1 - lr * weight_decay. step: number of steps before
    this one. inverse_scale: as in Clip; grads are to be multiplied by it, and grad_norm has been.
    """
    # The elements of this program, and those that the step changes
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    norm = tl.load(grad_norm)
    commit = i < tl.where(norm < skip_above, n, 0)

    # The bias corrections of this step
    t = tl.load(step) + 1
    step_size = lr / (1 - tl.exp2(t * tl.log2(beta1)))
    bias_correction2_sqrt = tl.sqrt(1 - tl.exp2(t * tl.log2(beta2)))

    # The clipped gradient, the moments, and the weights
    g = tl.load(grads + i, mask=mask, other=0.0)
    g = g * (inverse_scale * tl.minimum(1.0, max_norm / (norm + 1e-6)))
    m = tl.load(exp_avg + i, mask=mask, other=0.0)
    m += (g - m) * (1 - beta1)
    v = tl.load(exp_avg_sq + i, mask=mask, other=0.0) * beta2 + g * g * (1 - beta2)
    weight = tl.load(master + i, mask=mask, other=0.0) * keep
    weight -= step_size * m / (tl.sqrt(v) / bias_correction2_sqrt + eps)

    tl.store(master + i, weight, mask=commit)
    tl.store(exp_avg + i, m, mask=commit)
    tl.store(exp_avg_sq + i, v, mask=commit)
    tl.store(half + i, weight.to(half.dtype.element_ty), mask=commit)
    tl.store(grads + i, tl.zeros([BLOCK], tl.float32), mask=mask)


def step_by_kernel(shard: Shard, clip: Clip) -> None:
    """Step a shard on a GPU, unless the norm is too large, and clear its gradients."""
    options = shard.options
    state = shard.state
    n = shard.grads.numel()
    lr = float(options["lr"])
    beta1, beta2 = options["betas"]
    adamw_kernel[(triton.cdiv(n, BLOCK),)](
        shard.master.data,
        shard.grads,
        state["exp_avg"],
        state["exp_avg_sq"],
        shard.half,
        state["step"],
        clip.norm,
        n,
        lr,
        1 - lr * options["weight_decay"],
        beta1,
        beta2,
        options["eps"],
        clip.inverse_scale,
        clip.max_norm,
        clip.skip_above,
        BLOCK=BLOCK,
    )


def step_by_pytorch(shard: Shard, clip: Clip) -> None:
    """Do what step_by_kernel() does where Triton doesn't run. The CPU waits for the norm."""
    if clip.applies():
        shard.grads.mul_(clip.factor())
        state = shard.state
        adamw_by_pytorch(
            shard.options,
            state["step"],
            shard.master.data,
            shard.grads,
            state["exp_avg"],
            state["exp_avg_sq"],
        )
        shard.half.copy_(shard.master.data)
    shard.grads.zero_()


def adamw_by_pytorch(
    options: dict,
    step: Tensor | int,
    master: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> None:
    """Make a step of torch.optim.AdamW on flat tensors. options: a parameter group. step: the
    number of steps before this one."""
    beta1, beta2 = options["betas"]
    count = torch.as_tensor(step, dtype=torch.float32, device=master.device)
    pytorchs_adamw(
        [master],
        [grads],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count.clone()],  # it increases it
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        maximize=False,
    )
