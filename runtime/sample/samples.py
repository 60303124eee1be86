"""A short text from the weights as they are in training, at every ZeRO stage."""

import torch

TEMPERATURE, TOP_K = 0.8, 200  # as sample.py's


@torch.no_grad()
def write(engine, start, n_tokens, seed, device):
    """The tokens of a text: `start`, a list, and n_tokens more. All ranks call it, as a forward gathers at stage 3.

    Each token is a forward of the whole, at its final length, so that what is compiled sees one shape. The numbers that
    are drawn are the text's own.
    """
    length = min(len(start) + n_tokens, engine.module.config.block_size)
    generator = torch.Generator().manual_seed(seed)
    text = torch.zeros((1, length), dtype=torch.long, device=device)
    text[0, : len(start)] = torch.tensor(start)
    engine.eval()
    for place in range(len(start), length):
        logits = engine(text)[0, place - 1].float().cpu() / TEMPERATURE  # later places have no part in it
        likeliest, ids = logits.topk(min(TOP_K, len(logits)))
        text[0, place] = ids[torch.multinomial(likeliest.softmax(0), 1, generator=generator)].item()
    engine.train()
    return text[0].tolist()
