"""ZeRO-2's optimizer step in host memory, in pieces. The gradients are on the GPU.

The GPU sends the gradients of all pieces to the host. The CPU steps a piece once its gradients are there, and the GPU
fetches its weights and rounds them while the CPU steps the next one. So the copies overlap with the CPU's Adam."""

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.optim.adamw import adamw

PIECE = 2**26  # elements; the fp32 weights of a piece, which are on the GPU for a moment, take 268 MB


def step_on_host(p, state, optimizer):
    """Step a Partition whose fp32 weights, moments and master.grad are in host memory, which has to be pinned for the
    copies to run at the same time. optimizer: DeepSpeedCPUAdam or torch.optim.AdamW."""
    host = p.master.data, p.master.grad, state["exp_avg"], state["exp_avg_sq"]
    pieces, sent = list(zip(*(tensor.split(PIECE) for tensor in (p.grads, p.half, *host)), strict=True)), []
    for grads, _, _, host_grads, *_ in pieces:
        host_grads.copy_(grads, non_blocking=True)
        sent.append(torch.cuda.current_stream().record_event() if grads.is_cuda else None)
    step_piece = cpu_adam if isinstance(optimizer, DeepSpeedCPUAdam) else adamw_by_pytorch
    if step_piece is cpu_adam:
        # It multiplies powers of beta from step to step. After step 0 it computes them, as after a resume
        cpu_adam(optimizer, p.group, -1, *(tensor[:0] for tensor in host))
    for (_, half, *tensors), event in zip(pieces, sent):
        if event:
            event.synchronize()
        step_piece(optimizer, p.group, int(state["step"]), *tensors)
        half.copy_(tensors[0], non_blocking=True)  # the GPU rounds


def step_by_pytorch(p, state, optimizer):
    """Step a Partition by PyTorch's AdamW, all of it at once."""
    adamw_by_pytorch(optimizer, p.group, state["step"], p.master.data, p.grads, state["exp_avg"], state["exp_avg_sq"])
    p.half.copy_(p.master.data)


def cpu_adam(optimizer, group, step, master, grads, exp_avg, exp_avg_sq):
    """Make a step of DeepSpeedCPUAdam on flat tensors, with a parameter group's options. step: of those before."""
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step + 1, group["lr"], *group["betas"], group["eps"],
                                      group["weight_decay"], True, master, grads, exp_avg, exp_avg_sq)


def adamw_by_pytorch(optimizer, group, step, master, grads, exp_avg, exp_avg_sq):
    """Make a step of torch.optim.AdamW, with the same arguments."""
    beta1, beta2 = group["betas"]
    step = torch.as_tensor(step, dtype=torch.float32, device=master.device).clone()  # adamw() increases it
    adamw([master], [grads], [exp_avg], [exp_avg_sq], [], [step], fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
          lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"], maximize=False)
