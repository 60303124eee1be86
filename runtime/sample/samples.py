"""A short text from the weights as they are in training, at every ZeRO stage."""

import torch

TEMPERATURE, TOP_K = 0.8, 200  # as sample.py's


@torch.no_grad()
def sample_from_engine(engine, prompt, n_tokens, seed, device):
    """Return `prompt` (ids) and n_tokens more, as a list. All ranks call it: at stage 3 a forward gathers parameters.

    Each token is a forward of the whole, at its final length, so that compiled code sees one shape. The random numbers
    are the text's own.
    """
    length = min(len(prompt) + n_tokens, engine.module.config.block_size)
    generator = torch.Generator().manual_seed(seed)
    text = torch.zeros((1, length), dtype=torch.long, device=device)
    text[0, : len(prompt)] = torch.tensor(prompt)
    engine.eval()
    for i in range(len(prompt), length):
        logits = engine(text)[0, i - 1].float().cpu() / TEMPERATURE  # causal: the zeros after it do not count
        top, ids = logits.topk(min(TOP_K, len(logits)))
        text[0, i] = ids[torch.multinomial(top.softmax(0), 1, generator=generator)].item()
    engine.train()
    return text[0].tolist()
