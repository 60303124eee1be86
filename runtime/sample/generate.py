"""Texts from a model: several at once, each drawn with its own seed, shown while they grow, ended by a stop string."""

import contextlib
import sys

import torch

from runtime.kernels.decode import faster


def read(path):
    """A file's text; ValueError with a sentence."""
    try:
        with open(path, encoding="utf-8", newline="") as f:
            return f.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}): name a text file") from None


def starts(start, prompts):
    """What texts are to begin with: the lines of the file prompts, or start, which FILE: may send to a file."""
    if not prompts:
        return [read(start.removeprefix("FILE:")) if start.startswith("FILE:") else start]
    lines = [line for line in read(prompts).splitlines() if line]
    if not lines:
        raise ValueError(f"{prompts} is empty: write a beginning on each line")
    return lines


def typed(tokens_of, mark):
    """(text, tokens) of lines that are asked for with `mark`, until an empty one or Ctrl-D. One that tokens_of cannot
    take is told of, and the next is asked for."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (from here on, lines can be edited)
    while True:
        try:
            line = input(mark)
        except (EOFError, KeyboardInterrupt):
            print(end="\n" if mark else "")
            return
        if not line:
            return
        try:
            tokens = tokens_of(line)
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        yield line, tokens


class Growing:
    """What follows a prompt (ids) while it is made: ids, text, and ended: None, 'end_of_text' or 'stop'. show is called
    with what can be added to what it was called with before; a character may need several tokens, and half of one
    waits, as does what may become a stop string."""

    def __init__(self, prompt, decode, end, stops, show):
        self.prompt, self.decode, self.end, self.stops, self.show = prompt, decode, end, stops, show
        self.before = len(decode(prompt))  # with it, as some tokenizers' words depend on those before them
        self.ids, self.text, self.shown, self.ended = [], "", 0, None

    def add(self, token):
        if self.ended:
            return
        if token == self.end:
            self.ended = "end_of_text"
            return
        self.ids.append(token)
        text = self.decode(self.prompt + self.ids)[self.before:]
        stop = min((text.index(stop) for stop in self.stops if stop in text), default=None)
        if stop is not None:
            self.text, self.ended = text[:stop], "stop"
            return
        self.text = text
        waiting = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.tell(len(text) - waiting)

    def tell(self, end):
        """Show the text up to here."""
        if end > self.shown:
            self.show(self.text[self.shown:end])
            self.shown = end


def write(model, prompt, seeds, max_new_tokens, decode, end=None, stops=(), show=None, **drawing):
    """A Growing for each seed, all of the same prompt (ids) and made together. end: the id of <|endoftext|>; show: see
    Growing; drawing: generate()'s temperature, top_k, top_p, repetition_penalty."""
    device = model.lm_head.weight.device
    texts = [Growing(prompt, decode, end, stops, show or (lambda new: None)) for _ in seeds]

    def hear(tokens):
        for text, token in zip(texts, tokens.tolist()):
            text.add(token)
        stopped = [text.ended == "stop" for text in texts]
        return torch.tensor(stopped, device=device) if any(stopped) else None

    model.generate(torch.tensor([prompt] * len(seeds), device=device), max_new_tokens, end_of_text=end, on_token=hear,
                   generator=[torch.Generator(device).manual_seed(seed) for seed in seeds],
                   custom_step=faster(model, len(seeds)), **drawing)
    for text in texts:
        text.tell(len(text.text))
    return texts
