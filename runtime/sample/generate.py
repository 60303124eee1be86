"""Texts from a model, with a seed for each, streamed and stopped; the loss of a text; samples during training."""

import contextlib
import sys

import torch

from model import sample_token
from runtime.kernels.decode import decode_step_for

TEMPERATURE, TOP_K = 0.8, 200  # of samples during training; sample.py's defaults


def read_text(path):
    """Return a file's text. Raises ValueError with one sentence."""
    try:
        with open(path, encoding="utf-8", newline="") as f:
            return f.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): name a text file") from None


def read_prompts(start, prompts_file):
    """Return the prompts: the lines of prompts_file, or `start`, or the content of the file in start=FILE:path."""
    if not prompts_file:
        return [read_text(start.removeprefix("FILE:")) if start.startswith("FILE:") else start]
    lines = [line for line in read_text(prompts_file).splitlines() if line]
    if not lines:
        raise ValueError(f"{prompts_file} is empty: write one prompt per line")
    return lines


def prompt_loop(encode, question):
    """Ask for prompts with `question` until an empty line or Ctrl-D, and yield (text, tokens) of each. Where encode
    raises ValueError, print its message and ask again."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (from here on, lines can be edited)
    while True:
        try:
            line = input(question)
        except (EOFError, KeyboardInterrupt):
            print(end="\n" if question else "")
            return
        if not line:
            return
        try:
            tokens = encode(line)
        except ValueError as error:
            print(error, file=sys.stderr)
        else:
            yield line, tokens


class TextStream:
    """The text after a prompt, token by token.

    ids and text hold what was generated; ended is None, "end_of_text" or "stop". show(new) is called with each new
    piece of the text that is final: not with half of a character, which may need several tokens, nor with what may
    become a stop string.
    """

    def __init__(self, prompt, decode, end, stop_strings, show):
        self.prompt, self.decode, self.end, self.stop_strings, self.show = prompt, decode, end, stop_strings, show
        self.prompt_chars = len(decode(prompt))  # decoded together, as some tokenizers' words depend on those before
        self.ids, self.text, self.flushed, self.ended = [], "", 0, None

    def add(self, token):
        if self.ended:
            return
        if token == self.end:
            self.ended = "end_of_text"
            return
        self.ids.append(token)
        text = self.decode(self.prompt + self.ids)[self.prompt_chars:]
        found = min((text.index(stop) for stop in self.stop_strings if stop in text), default=None)
        if found is not None:
            self.text, self.ended = text[:found], "stop"
            return
        self.text = text
        prefixes = (stop[:n] for stop in self.stop_strings for n in range(1, len(stop)))
        held_back = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.flush(held_back)

    def flush(self, held_back=0):
        """Show the text but for its last `held_back` characters."""
        end = len(self.text) - held_back
        if end > self.flushed:
            self.show(self.text[self.flushed:end])
            self.flushed = end


def generate_texts(model, prompt, seeds, max_new_tokens, decode, end=None, stop_strings=(), show=None, **sampling):
    """Return a TextStream per seed, all of one prompt (ids), generated as one batch. end: the id of <|endoftext|>;
    show: see TextStream; sampling: generate()'s temperature, top_k, top_p, repetition_penalty."""
    device = model.lm_head.weight.device
    texts = [TextStream(prompt, decode, end, stop_strings, show or (lambda new: None)) for _ in seeds]

    def on_token(tokens):
        for text, token in zip(texts, tokens.tolist()):
            text.add(token)
        stopped = [text.ended == "stop" for text in texts]
        return torch.tensor(stopped, device=device) if any(stopped) else None

    model.generate(torch.tensor([prompt] * len(seeds), device=device), max_new_tokens, end_of_text=end,
                   on_token=on_token, generator=[torch.Generator(device).manual_seed(seed) for seed in seeds],
                   custom_step=decode_step_for(model, len(seeds)), **sampling)
    for text in texts:
        text.flush()
    return texts


@torch.no_grad()
def score_text(model, ids, stride=None):
    """Return (mean loss, number of predicted tokens) of a text: of all its tokens but the first.

    A longer text is read in windows of block_size tokens, each `stride` after the one before it, by default half of
    block_size. Each token counts once, in the first window that predicts it. Smaller strides take longer and predict
    from more tokens (huggingface.co/docs/transformers/perplexity). Raises ValueError.
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
        window = torch.tensor([ids[start:end + 1]], device=device)
        total += model(window[:, :-1], window[:, 1:], "none")[counted - start:].double().sum().item()
        counted = end
        if end == last:
            break
    return total / last, last


@torch.no_grad()
def sample_from_engine(engine, prompt, n_tokens, seed, device):
    """Return `prompt` (ids) and n_tokens more, as a list. All ranks call it: at stage 3 a forward gathers parameters.
    Each token is a forward of the whole, at its final length, so that compiled code sees one shape."""
    length = min(len(prompt) + n_tokens, engine.module.config.block_size)
    generator = torch.Generator().manual_seed(seed)
    text = torch.zeros((1, length), dtype=torch.long, device=device)
    text[0, : len(prompt)] = torch.tensor(prompt)
    engine.eval()
    for i in range(len(prompt), length):
        logits = engine(text)[:, i - 1].float().cpu()  # causal: the zeros after it do not count
        text[0, i] = sample_token(logits, TEMPERATURE, TOP_K, None, generator).item()
    engine.train()
    return text[0].tolist()
