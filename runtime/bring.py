"""A model.py of others, such as nanoGPT's, behind the methods that our programs call.

runtime/chosen_model.py calls adapted() on the GPT that it imports. A GPT whose forward has a
`reduction`, as ours has, stays as it is. One whose forward(idx, targets) returns (logits, loss) is
trained as it is written: its initial weights, its forward and its loss. Adapter adds the rest, in
plain PyTorch: no kernels and no KV cache. CONTRIBUTING.md has the mapping.
"""

import contextlib
import inspect
import io
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.decoder import sample_token
from runtime.errors import UserError

# What our programs call
METHODS = (
    "num_params",
    "flops_per_token",
    "parameter_groups",
    "muon_matrices",
    "crop_block_size",
    "crop_vocab_size",
    "generate",
    "from_pretrained",
)
FIELDS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")  # of GPTConfig
MODULES = ("transformer.wte", "transformer.h", "lm_head")
HOW = 'see "Bring your model.py" in CONTRIBUTING.md'


@contextlib.contextmanager
def import_errors() -> Iterator[None]:
    """Turn the ImportError of a model.py into a UserError."""
    try:
        yield
    except ImportError as error:
        # The file whose import failed: a package may be missing far below the model
        frames = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in frames if not frame.filename.startswith("<frozen ")]
        if isinstance(error, ModuleNotFoundError) and Path(files[-1]).name != "chosen_model.py":
            raise UserError(
                f"{files[-1]} imports {error.name}, which Python doesn't find: install that "
                "package (python -m pip install -r requirements.txt for what this project needs), "
                "or put the file beside model.py"
            ) from None
        raise UserError(
            f"runtime/chosen_model.py can't import the model ({error}): {HOW}") from None


def adapted(model_class: type[nn.Module], config_class: type) -> type[nn.Module]:
    """Return a GPT that our programs can train: the class itself, or a subclass with an Adapter.

    Raises UserError with what the class or its GPTConfig has to have.
    """
    file = f"{model_class.__module__}.py"
    if not is_dataclass(config_class):
        raise UserError(
            f"GPTConfig of {file} is no dataclass, so no checkpoint can record it: {HOW}")
    # What is missing in its configuration and its methods, all at once
    known = [field.name for field in fields(config_class)]
    missing = [f"GPTConfig.{name}" for name in FIELDS if name not in known]
    is_ours = has_our_forward(model_class)
    if is_ours:
        missing += [f"GPT.{name}" for name in METHODS if not hasattr(model_class, name)]
    else:
        taken = inspect.signature(model_class.forward).parameters.values()  # with self
        takes_any = any(each.kind is each.VAR_POSITIONAL for each in taken)
        if len(taken) < 3 and not takes_any:
            missing.append("targets in GPT.forward(idx, targets)")
    if missing:
        raise UserError(f"{file} has no {', '.join(missing)}, which training needs: {HOW}")
    if is_ours:
        return model_class
    # Its own methods come before Defaults', and Adapter's before its own
    names = {"__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, (Adapter, model_class, Defaults), names)


def has_our_forward(model_class: type[nn.Module]) -> bool:
    """Return whether a GPT's forward is called as that of our model.py is.

    One that takes anything, as in a decorator, is ours if the class has our other methods.
    """
    # A forward with `reduction` is written for our programs
    taken = inspect.signature(model_class.forward).parameters
    if "reduction" in taken:
        return True
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return takes_any and all(hasattr(model_class, name) for name in METHODS)


class Adapter(nn.Module):
    """What our programs need, in front of a GPT of others in the order of classes."""

    def __init__(self, config: Any) -> None:
        file = f"{type(self).__module__}.py"
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # nanoGPT's prints its size
                super().__init__(config)
        except (AssertionError, TypeError, ValueError) as error:
            # An assertion without words has only its line
            line = traceback.extract_tb(error.__traceback__)[-1].line
            why = str(error) or line
            raise UserError(f"{file} refuses {config} ({type(error).__name__}: {why})") from None
        self.config = config
        # What compiles, recomputes and samples goes by these names
        for path in MODULES:
            try:
                self.get_submodule(path)
            except AttributeError:
                raise UserError(
                    f"the GPT of {file} has no {path}, which training needs: {HOW}") from None
        self.lm_head.vocab_size = config.vocab_size  # tokens that may be generated
        # Losses are in float32, as torch.autocast computes them
        self.lm_head.register_forward_hook(to_float32)

    def logits_and_loss(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the model's own forward returns for idx and targets, both (B, T).

        That is logits (B, T, vocab_size) and the loss. Raises UserError for something else.
        """
        # nanoGPT's loss has targets.view(-1), which a slice of longer sequences can't have
        result = super().forward(idx.contiguous(), targets.contiguous())
        is_pair = isinstance(result, tuple) and len(result) == 2
        is_pair = is_pair and all(map(torch.is_tensor, result))
        if not is_pair or result[0].numel() % idx.numel() or result[1].numel() != 1:
            raise UserError(
                f"GPT.forward(idx, targets) of {type(self).__module__}.py doesn't return the "
                f"logits of all tokens and the loss: {HOW}"
            )
        logits, loss = result
        return logits.reshape(*idx.shape, -1), loss

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Return logits (B, T, vocab_size) of idx (B, T), or the loss of targets (B, T).

        "mean" is the model's own loss. "none", that of each token (B * T,), is the cross-entropy of
        its logits, without targets of -1.
        """
        if targets is None:
            # Without targets, nanoGPT's has the logits of the last token alone
            logits, _ = self.logits_and_loss(idx, idx)
            return logits[..., : self.lm_head.vocab_size]
        if reduction == "mean":
            _, loss = self.logits_and_loss(idx, targets)
            return loss
        # Its own loss would be a mean, and may not take -1
        logits, _ = self.logits_and_loss(idx, targets.clamp(min=0))
        logits = logits.flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks compute their activations again in backward."""
        return getattr(self, "recomputes", False)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        if value and not self.gradient_checkpointing:
            for block in dict.fromkeys(self.transformer.h):
                block.forward = recomputed(block.forward)
        elif self.gradient_checkpointing and not value:
            raise ValueError("gradient_checkpointing can't be taken back")
        self.recomputes = value

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the context, by the model's own crop_block_size.

        Raises UserError if it has none, or if the context is shorter.
        """
        if block_size == self.config.block_size:
            return
        if block_size > self.config.block_size:
            raise UserError(
                f"block_size={block_size} is above the {self.config.block_size} positions that "
                f"the model has: use --block_size={self.config.block_size}"
            )

        # Only the model knows which of its tensors have the length of the context
        own = getattr(super(), "crop_block_size", None)
        if own is None:
            raise UserError(f"block_size={block_size} needs GPT.crop_block_size: {HOW}")
        own(block_size)

    def crop_vocab_size(self, vocab_size: int) -> None:
        """Leave out the tokens from `vocab_size` on: padding, which no tokenizer produces."""
        self.lm_head.vocab_size = vocab_size

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        end_of_text: int | None = None,
        generator: torch.Generator | None = None,
        on_token: Callable[[Tensor], object] | None = None,
        **speed: Any,
    ) -> Tensor:
        """Continue idx (B, T) by up to max_new_tokens, as GPT.generate of our model.py does.

        Each token takes a full forward. speed: its options for a cache and CUDA graphs, which
        nothing here has.
        """
        # Sequences that have ended get only end_of_text
        done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[:, -1]
            token = sample_token(logits.float(), temperature, top_k, top_p, generator=generator)
            if end_of_text is not None:
                token = token.masked_fill(done, end_of_text)
                done.logical_or_(token == end_of_text)
            idx = torch.cat([idx, token[:, None]], dim=1)
            if on_token is not None:
                on_token(token)
            if end_of_text is not None and done.all():
                break
        return idx

    @classmethod
    def from_pretrained(cls, name_or_path: str, **options: Any) -> NoReturn:
        """Raise UserError: whether weights of others fit this model isn't known."""
        raise UserError(no_weights(name_or_path, cls.__module__))


class Defaults:
    """What a GPT of others may have itself, and gets from here otherwise."""

    def num_params(self) -> int:
        """Return the number of parameters. A tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int | None = None) -> int:
        """Return the FLOPs of forward and backward per token with a context of T.

        They are 6 N + 12 n_layer n_embd T (PaLM, arXiv:2204.02311, appendix B). N excludes
        embeddings that are only looked up.
        """
        # An embedding that is the head's matrix, too, is multiplied
        T = T or self.config.block_size
        looked_up = {layer.weight for layer in self.modules() if isinstance(layer, nn.Embedding)}
        looked_up -= set(self.lm_head.parameters())
        N = self.num_params() - sum(p.numel() for p in looked_up)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """Return the optimizer's parameter groups, as nanoGPT's configure_optimizers has them.

        Parameters of two dimensions and more decay.
        """
        # As in nanoGPT: embeddings decay too, and biases and layer norms don't
        params = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in params if p.dim() >= 2]
        vectors = [p for p in params if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def muon_matrices(self) -> NoReturn:
        """Raise UserError: only the model knows which matrices are several in one."""
        raise UserError(
            f"optimizer=muon needs GPT.muon_matrices, which {type(self).__module__}.py doesn't "
            "have: add it as in our model.py, or use --optimizer=adamw"
        )


def no_weights(source: str, module: str) -> str:
    """Return the sentence for weights that a model of others can't load."""
    return (
        f"init_from={source} can't be loaded into {module}.py, which doesn't say how: use "
        "--init_from=scratch and load them in GPT.__init__ (docs/bring_your_model.md, Old "
        "checkpoints), or our model.py"
    )


def to_float32(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """Return the output of a module in float32: a forward hook."""
    return output.float()


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a block's forward that computes its activations again in backward."""

    def run(*args: Any, **named: Any) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, **named)

    return run
