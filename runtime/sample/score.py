"""How likely a model finds a text."""

import torch


@torch.no_grad()
def score_text(model, ids, stride=None):
    """Return (mean loss, number of predicted tokens) of a text: of all its tokens but the first.

    A text longer than the context is read in windows of block_size tokens, each `stride` after the one before it, by
    default half of block_size. Each token counts once, in the first window that predicts it. With stride=block_size
    windows don't overlap, and a token at a window's start is predicted from little; smaller strides take longer and
    come closer to what the model can do (huggingface.co/docs/transformers/perplexity). Raises ValueError.
    """
    device = model.lm_head.weight.device
    block_size, last = model.config.block_size, len(ids) - 1  # tokens that are predicted
    stride = stride or max(1, block_size // 2)
    if last < 1:
        raise ValueError(f"a text of {len(ids)} tokens has no loss: it needs at least 2, as the first is not predicted")
    if stride > block_size:
        raise ValueError(f"stride={stride} would skip tokens: at most the context, --stride={block_size}")
    total, counted = 0.0, 0
    for start in range(0, last, stride):
        end = min(start + block_size, last)
        x = torch.tensor([ids[start:end]], device=device)
        y = torch.tensor([ids[start + 1:end + 1]], device=device)
        total += model(x, y, "none")[counted - start:].double().sum().item()
        counted = end
        if end == last:
            break
    return total / last, last
