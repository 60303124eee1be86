"""Checks of a model's logits: in eval mode, of the future, and with a cache."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from runtime import decoder
from runtime.check.calls import ATOL, at_position, calls_of, up_to_position, where_differs
from runtime.check.tiny import Different, T, Tiny, Unchecked, describe_error, set_seed, tokens

PROMPT = 7  # tokens
LAST = T - 1


@torch.no_grad()
def eval_repeats(tiny: Tiny) -> str:
    """Check that a model in eval mode draws no random numbers, such as dropout's."""
    # With dropout in the configuration, a forward that ignores eval mode shows
    changed = {"dropout": 0.5} if hasattr(tiny.config, "dropout") else {}
    model = tiny.stirred(**changed).eval()
    idx = tokens()
    outputs = []

    def run(seed: int) -> None:
        set_seed(seed)
        outputs.append(model(idx))

    # Other seeds, so random numbers would differ
    first = calls_of(model, lambda: run(1))
    second = calls_of(model, lambda: run(2))
    if not torch.equal(*outputs):
        whole = up_to_position(LAST)
        where = where_differs(model, first, whole, second, whole)
        raise Different(
            "two forwards in eval mode differ, with dropout=0.5 in the configuration: look at "
            f"{where}, which may ignore self.training"
        )
    return "two forwards in eval mode have the same logits, with dropout=0.5 in the configuration"


@torch.no_grad()
def future_is_hidden(tiny: Tiny) -> str:
    """Check that the logits after a token don't depend on later tokens."""
    model = tiny.stirred().eval()
    idx = tokens()
    other = idx.clone()
    # The same tokens, and others after the prompt
    other[:, PROMPT:] = (other[:, PROMPT:] + 1) % tiny.config.vocab_size
    outputs = []

    def run(sequences: Tensor) -> None:
        set_seed(0)
        outputs.append(model(sequences)[:, :PROMPT])

    first = calls_of(model, lambda: run(idx))
    second = calls_of(model, lambda: run(other))
    if not torch.allclose(*outputs, rtol=1e-4, atol=ATOL):
        # A module whose output differs before the change
        past = up_to_position(PROMPT - 1)
        where = where_differs(model, first, past, second, past)
        raise Different(
            f"the logits after {PROMPT} tokens depend on the tokens that follow: look at the mask "
            f"in {where}"
        )
    return "the logits after a token depend on no later token"


@torch.no_grad()
def cached_logits(tiny: Tiny) -> str:
    """Check that logits with a KV cache are those without: after a prompt, after each further
    token, and with the mask that CUDA graphs need."""
    model = tiny.stirred().eval()
    if "caches" not in inspect.signature(model.forward).parameters:
        raise Unchecked(f"{type(model).__name__}.forward takes no caches")
    idx = tokens()
    set_seed(0)
    # All logits at once, and what each module makes of them
    whole = model(idx)
    full = calls_of(model, lambda: model(idx))
    used = decoder_of(model)(model, len(idx), T, cuda_graphs=False)

    def compare(where_called: str, position: int, step: Callable[[], Tensor]) -> None:
        logits = []
        try:
            cached = calls_of(model, lambda: logits.append(step()))
        except Exception as error:  # without a cache, the model has run
            raise Different(
                f"with a cache the model raises {describe_error(error)}, {where_called}: look at "
                "what it does with cache, positions and mask"
            ) from None
        if not torch.allclose(logits[0], whole[:, position], rtol=1e-4, atol=ATOL):
            where = where_differs(model, full, at_position(position), cached, at_position(-1))
            raise Different(
                f"logits with a cache are not those without, {where_called}: look at {where}, and "
                "at what it does with cache, positions and mask"
            )

    # The prompt, and then a token at a time
    compare(f"after a prompt of {PROMPT} tokens", PROMPT - 1, lambda: used.prefill(idx[:, :PROMPT]))
    for at in range(PROMPT, T):
        # Once as without a graph, and once with its mask of fixed length
        token = idx[:, at : at + 1]
        positions = torch.tensor([at])
        compare(f"of token {at + 1}", at, lambda token=token: used.decode_one_token(token))
        compare(
            f"of token {at + 1} with the mask of a CUDA graph",
            at,
            lambda token=token, positions=positions: used.forward(token, positions, T, masked=True),
        )
    return f"logits with a cache are those without, after a prompt and each of {T - PROMPT} tokens"


def decoder_of(model: nn.Module) -> type:
    """Return the Decoder that a model's generate() uses, or that of runtime/decoder.py."""
    generate = inspect.unwrap(getattr(type(model), "generate", decoder.sample_token))
    return generate.__globals__.get("Decoder", decoder.Decoder)
