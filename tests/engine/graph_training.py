"""Training of an edited model.py in plain PyTorch, and what graph_worker.py shares with it: sizes,
data, and the ways to train. This file imports neither DeepSpeed nor our engine."""

from types import ModuleType

import torch

from runtime import lora

STEPS = 8
SEQUENCES = 12  # of a step, over all ranks: for up to 3 ranks and 2 micro-steps
T = 16  # tokens of a sequence
VOCAB = 61
LAYERS = 4
CLIP = 1.0  # norms are 0.5 to 6
DECAY = 0.1
# With this epsilon, elements of nearly no gradient don't take full steps by their rounding
ADAM = {"betas": (0.9, 0.95), "eps": 1e-5}
# c_attn has 3,072 elements and c_fc 4,096, so some gradients have a bucket of their own
BUCKETS = {"reduce_bucket_size": 2500, "allgather_bucket_size": 2500}
TWO_BLOCKS = {"stage3_max_live_parameters": 0}  # no more than two are whole at a time
# Prefetch settings that aren't ours, so that DeepSpeed gathers and reduces
DEEPSPEEDS = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": list(lora.TARGET_MODULES)}

WAYS = {  # name: options of graph_worker.train()
    "ZeRO-2": {"stage": 2},
    "ZeRO-2, buckets": {"stage": 2, "zero": BUCKETS},
    "ZeRO-2, 2 micro-steps": {"stage": 2, "accumulation": 2},
    "ZeRO-2, 2 micro-steps, buckets": {"stage": 2, "accumulation": 2, "zero": BUCKETS},
    "ZeRO-2, 2 micro-steps, local": {"stage": 2, "accumulation": 2, "local": True},
    "ZeRO-3": {"stage": 3},
    "ZeRO-3, two blocks": {"stage": 3, "zero": TWO_BLOCKS},
    "ZeRO-3, DeepSpeed's": {"stage": 3, "zero": DEEPSPEEDS},
    "ZeRO-3, DeepSpeed's, 2 micro-steps": {"stage": 3, "zero": DEEPSPEEDS, "accumulation": 2},
    "ZeRO-3, 2 micro-steps": {"stage": 3, "accumulation": 2},
    "ZeRO-3, 2 micro-steps, local": {"stage": 3, "accumulation": 2, "local": True},
    "ZeRO-2, recomputed": {"stage": 2, "recompute": True},
    "ZeRO-3, recomputed": {"stage": 3, "recompute": True},
    "ZeRO-2, LoRA": {"stage": 2, "with_lora": True},
    "ZeRO-3, peeking": {"stage": 3, "zero": TWO_BLOCKS, "accumulation": 2, "peek": True},
    "ZeRO-3, LoRA": {"stage": 3, "with_lora": True},
}


def learning_rate(step: int) -> float:
    return 1e-2 * (1 - step / (2 * STEPS))


def data(step: int) -> torch.Tensor:
    """Return the sequences of a step, (SEQUENCES, T + 1). A token follows from the one before, so
    that there is something to learn."""
    first = torch.randint(VOCAB, (SEQUENCES,), generator=torch.Generator().manual_seed(step))
    tokens = [first]
    for _ in range(T):
        tokens.append((7 * tokens[-1] + 3) % VOCAB)
    return torch.stack(tokens, dim=1)


def fresh_model(module: ModuleType, with_lora: bool = False) -> torch.nn.Module:
    """Return the GPT of a model.py, the same in each process."""
    torch.manual_seed(0)
    model = module.GPT(
        module.GPTConfig(block_size=T, vocab_size=VOCAB, n_layer=LAYERS, n_head=2, n_embd=32)
    )
    if with_lora:
        lora.apply(model, LORA)
    return model


def train_plainly(module: ModuleType, micro_batches: int = 1, with_lora: bool = False) -> dict:
    """Train in plain PyTorch. Return the "losses" and "norms" of the steps, and the last "weights".

    micro_batches: of a step. The mean of their losses is the loss of the step. 1: all data at once.
    """
    model = fresh_model(module, with_lora)
    optimizer = torch.optim.AdamW(model.parameter_groups(DECAY), lr=0.0, **ADAM)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = []
    norms = []
    for step in range(STEPS):
        model.step = step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for p in trained.values():  # a gradient that doesn't come is zero
            p.grad = torch.zeros_like(p)
        total = 0.0
        for sequences in data(step).chunk(micro_batches):
            loss = model(sequences[:, :-1], sequences[:, 1:])
            (loss / micro_batches).backward()
            total += loss.item()
        losses.append(total / micro_batches)
        grads = torch.cat([p.grad.flatten() for p in trained.values()])
        norms.append(grads.double().norm().item())  # that of clip_grad_norm_ is less exact
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
    weights = {name: p.detach() for name, p in trained.items()}
    return {"losses": losses, "norms": norms, "weights": weights}
