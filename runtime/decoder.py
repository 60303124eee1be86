"""Text generation with a cache of keys and values: one token at a time, by CUDA graphs on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KVCache:
    """The keys and values of one attention layer, (B, heads, max_length, head size) each.

    They are made when the first keys come, so they have their number of heads, dtype and device. A
    block that runs several times in a forward has keys and values for each time.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.keys: list[Tensor] = []  # of each run of the block
        self.values: list[Tensor] = []
        self.start(max_length)

    def start(self, length: int) -> None:
        """Begin a forward, in which the first `length` positions are read."""
        self.length = length
        self.runs = 0

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, heads, T, head size) at `positions` (T,). Return those of all
        positions, (B, heads, length, head size) each."""
        if self.runs == len(self.keys):
            self.keys.append(k.new_zeros(*k.shape[:2], self.max_length, k.size(3)))
            self.values.append(v.new_zeros(*v.shape[:2], self.max_length, v.size(3)))

        # In place, so that a CUDA graph finds the cache at the same address
        keys = self.keys[self.runs].index_copy_(2, positions, k)
        values = self.values[self.runs].index_copy_(2, positions, v)
        self.runs += 1
        return keys[:, :, : self.length], values[:, :, : self.length]


class Decoder:
    """Computes the next tokens of B sequences, draw(logits (B, vocab_size)), with a KV cache of
    max_length tokens.

    On CUDA, launches take longer than kernels. So with cuda_graphs, decode_one_token captures a
    graph for each cache length: 128, 256, ..., with draw in it, which may use `generator`.
    custom_step (kernels/decode.py) runs in one.
    """

    def __init__(
        self,
        model: nn.Module,
        B: int,
        max_length: int,
        custom_step: Callable[[Tensor, Tensor, list[KVCache]], Tensor] | None = None,
        draw: Callable[[Tensor], Tensor] = lambda logits: logits,
        generator: torch.Generator | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        device = model.transformer.wte.weight.device
        self.model = model
        self.max_length = max_length
        self.custom_step = custom_step
        self.draw = draw
        self.generator = generator
        self.caches = [KVCache(max_length) for _ in range(model.config.n_layer)]
        self.cached = 0  # tokens in the cache
        # What a graph reads: the token of each sequence, and its position
        self.token = torch.zeros((B, 1), dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.use_cuda_graphs = cuda_graphs and device.type == "cuda"
        self.graphs: dict[int, Callable[[], Tensor]] = {}  # {cache length: replay}

    def forward(
        self, idx: Tensor, positions: Tensor, length: int, masked: bool = False
    ) -> Tensor:
        """Return the logits after idx (B, T) at `positions` (T,), which attend to the first
        `length` positions. masked: T is 1, and positions after the token's are masked out."""
        mask = None
        if masked:
            mask = torch.arange(length, device=idx.device) > positions

        # Each block stores the keys and values of these tokens, and reads those before
        for cache in self.caches:
            cache.start(length)
        return self.model(idx, positions=positions, caches=self.caches, mask=mask)[:, 0]

    def prefill(self, idx: Tensor) -> Tensor:
        """Return the tokens drawn after idx (B, T), which replaces what the cache holds."""
        # The prompt's tokens take the first positions
        self.cached = idx.size(1)
        positions = torch.arange(self.cached, device=idx.device)
        return self.draw(self.forward(idx, positions, self.cached))

    def decode_one_token(self, token: Tensor) -> Tensor:
        """Return the tokens drawn after one more token (B, 1). On CUDA the next call overwrites
        them."""
        # A graph reads its input from these tensors
        self.token.copy_(token)
        self.position.fill_(self.cached)

        # What is read: the power of two above what is cached, so that few graphs are captured
        length = min(self.max_length, max(128, 2 ** self.cached.bit_length()))
        if self.custom_step:
            length = 0  # one graph for all lengths
        self.cached += 1
        if not self.use_cuda_graphs:
            return self.draw(self.forward(self.token, self.position, self.cached))

        # A graph replays at the addresses at which it was captured. The first step is the warm-up's
        if length not in self.graphs:
            token = self.warm_up(length)
            step = partial(self.next_token, length)
            self.graphs[length] = capture_cuda_graph(step, self.generator)
            if token is not None:
                return token
        return self.graphs[length]()

    def next_token(self, length: int) -> Tensor:
        """Return the tokens drawn after self.token. A graph repeats this."""
        if self.custom_step:
            return self.draw(self.custom_step(self.token, self.position, self.caches))
        return self.draw(self.forward(self.token, self.position, length, masked=True))

    def warm_up(self, length: int) -> Tensor | None:
        """Return next_token(length) if no decoder of this model has made a step of these shapes,
        else None. Libraries initialize at their first call, which can't be captured."""
        # Once for each combination of shapes, which decides what libraries choose
        shapes = (len(self.token), self.max_length, length)
        if shapes in self.model.decoded_shapes:
            return None
        self.model.decoded_shapes.add(shapes)
        return self.next_token(length)


def capture_cuda_graph(
    step: Callable[[], Tensor], generator: torch.Generator | None
) -> Callable[[], Tensor]:
    """Capture step() in a CUDA graph. Return a function that replays it. Its output is always the
    same tensor."""
    # Each replay has to draw other numbers, so the graph advances the generator
    graph = torch.cuda.CUDAGraph()
    if generator:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token per row of logits (B, vocab_size). Return (B,).

    temperature=0 takes the most likely token. top_k keeps the k most likely tokens, top_p the most
    likely ones that together reach that probability.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature

    # Keep the k likeliest. Sort the rest for top_p: `order` has the tokens' numbers
    order = None
    nucleus = top_p is not None and top_p < 1
    if top_k:  # sorted, as top_p needs
        logits, order = logits.topk(min(top_k, logits.size(-1)))
    elif nucleus:
        logits, order = logits.sort(dim=-1, descending=True)

    # Leave out tokens before which the likelier ones already have top_p
    probs = F.softmax(logits, dim=-1)
    if nucleus:
        beyond = probs.cumsum(-1) - probs >= top_p
        beyond[:, 0] = False  # keep the most likely token
        probs = probs.masked_fill(beyond, 0)

    # As torch.multinomial draws, which can't be captured
    noise = torch.empty_like(probs).exponential_(generator=generator)
    choice = (probs / noise).argmax(-1, keepdim=True)
    if order is not None:
        choice = order.gather(1, choice)
    return choice[:, 0]
