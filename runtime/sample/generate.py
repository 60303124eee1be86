"""Generate samples from a model. Sample during training."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.chosen_model import GPT
from runtime.errors import UserError
from runtime.kernels.decode import decode_step_for
from runtime.model_parts import evaluating
from runtime.output import printable
from runtime.paths import expand_path
from runtime.untrusted import read_regular

MAX_TEXT_BYTES = 1_000_000_000
OWN_PIPES = ("/dev/stdin", "/dev/fd/")  # of the shell that started this: <(command)
# For samples during training; sample.py's defaults
TEMPERATURE = 0.8
TOP_K = 200


def read_text(path: str | Path) -> str:
    """Return a file's text, with a newline after each line.

    Raises UserError if it can't be read or isn't UTF-8.
    """
    try:
        # A pipe of somebody else could block for ever
        if str(path).startswith(OWN_PIPES):
            content = Path(path).read_bytes()
        else:
            content = read_regular(path, MAX_TEXT_BYTES)
        # Line ends of any system, and without a byte order mark
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): name another file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None


def escape_note(option: str, text: str) -> str | None:
    """Return a note if a prompt has \\n or \\t in it as two characters, or None.

    They stay as they are, as in nanoGPT: they may be LaTeX's or a path's.
    """
    found = re.search(r"\\[nt]", text)
    if not found or text.startswith("FILE:"):
        return None
    letter = found[0][1]
    meant = {"n": "a line end", "t": "a tab"}[letter]
    return (
        f"in {option}, \\{letter} is a backslash and the letter {letter}: for {meant}, write "
        f"{option}=$'a\\{letter}b' in bash or zsh"
    )


def read_prompts(start: str, prompts_file: str | None) -> list[str]:
    """Return the prompts: the lines of prompts_file, or `start`, which may be FILE:path.

    Raises UserError.
    """
    if not prompts_file and start.startswith("FILE:"):
        return [read_text(expand_path(start.removeprefix("FILE:")))]
    if not prompts_file:
        return [start]
    lines = [line for line in read_text(prompts_file).split("\n") if line]
    if not lines:
        raise UserError(f"{prompts_file} is empty: write one prompt per line")
    return lines


def ask_for_prompts(
    encode: Callable[[str], list[int]], question: str
) -> Iterator[tuple[str, list[int]]]:
    """Ask for prompts until an empty line or Ctrl-D, and yield (text, tokens) of each.

    The UserErrors of `encode` are printed.
    """
    # With arrow keys and a history, where Python has them
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (enables line editing)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(question)
            if not line:
                return
            try:
                yield line, encode(line)
            except UserError as error:
                print(printable(str(error)), file=sys.stderr)


class TextStream:
    """The text after a prompt, token by token: .ids and .text.

    has_ended: whether it ended with `end`. show(new) is called with each piece of text that ends in
    a complete character.
    """

    def __init__(
        self,
        prompt: list[int],
        decode: Callable[[list[int]], str],
        end: int | None,
        show: Callable[[str], None] | None,
    ) -> None:
        self.prompt = prompt
        self.decode = decode
        self.end = end
        self.show = show
        # Some tokenizers need context, so the prompt is decoded with the text
        self.prompt_chars = len(decode(prompt))
        self.ids: list[int] = []
        self.text = ""
        self.shown = 0  # characters
        self.has_ended = False

    def add(self, token: int) -> None:
        """Add a token. After `end`, nothing is added."""
        self.has_ended = self.has_ended or token == self.end
        if self.has_ended:
            return

        # Decoded anew: a token's text may depend on those before it
        self.ids.append(token)
        self.text = self.decode(self.prompt + self.ids)[self.prompt_chars :]
        # A character may take several tokens
        if not self.text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.flush()

    def flush(self) -> None:
        """Show the rest of the text."""
        if self.show is not None and len(self.text) > self.shown:
            self.show(self.text[self.shown :])
            self.shown = len(self.text)


def generate_texts(
    model: GPT,
    prompt: list[int],
    n_texts: int,
    seed: int,
    max_new_tokens: int,
    decode: Callable[[list[int]], str],
    end: int | None = None,
    show: Callable[[str], None] | None = None,
    **sampling: Any,
) -> list[TextStream]:
    """Generate n_texts from a prompt (ids), as one batch, and return their TextStreams.

    end: the id of <|endoftext|>. show: as for a TextStream. sampling: generate()'s temperature,
    top_k and top_p.
    """
    # All texts of a batch begin with the same prompt, and draw their own tokens
    device = next(model.parameters()).device
    texts = [TextStream(prompt, decode, end, show) for _ in range(n_texts)]

    def on_token(tokens: Tensor) -> None:
        for text, token in zip(texts, tokens.tolist()):
            text.add(token)

    model.generate(
        torch.tensor([prompt] * n_texts, device=device),
        max_new_tokens,
        end_of_text=end,
        on_token=on_token,
        generator=torch.Generator(device).manual_seed(seed),
        custom_step=decode_step_for(model),
        **sampling,
    )

    # A text may end in the middle of a character
    for text in texts:
        text.flush()
    return texts


class StoppedError(Exception):
    """A stop was requested in the middle of a sample."""


def sample_while_training(
    model: GPT,
    vocab_size: int,
    prompt: list[int],
    n_tokens: int,
    seed: int,
    is_stopped: Callable[[], bool],
) -> list[int] | None:
    """Return the prompt (ids) and n_tokens more of the data's vocabulary.

    Return None if is_stopped() is true after a token. All ranks call it, and none stops at an
    end_of_text: ZeRO-3 gathers parameters. There are no CUDA graphs: capturing them takes memory
    and disturbs other threads.
    """

    def on_token(_: Tensor) -> None:
        if is_stopped():
            raise StoppedError

    # Tokens beyond the data's vocabulary are padding, and none is generated
    device = next(model.parameters()).device

    # The head's own vocabulary comes back below
    whole = model.lm_head.vocab_size
    n_tokens = min(n_tokens, model.config.block_size - len(prompt))
    model.lm_head.vocab_size = vocab_size
    try:
        with evaluating(model):
            ids = model.generate(
                torch.tensor([prompt], device=device),
                n_tokens,
                TEMPERATURE,
                TOP_K,
                generator=torch.Generator(device).manual_seed(seed),
                on_token=on_token,
                cuda_graphs=False,
            )
    except StoppedError:
        return None
    finally:
        model.lm_head.vocab_size = whole
    return ids[0].tolist()
