"""Read weights and optimizer state from a tag's files, of any ZeRO stage and number of ranks.

The files are memory-mapped. DeepSpeed 0.19.8 shards them like this: stage 2 concatenates the
parameters of a group and cuts them into one piece per rank. Stage 3 cuts each parameter into equal,
padded pieces.
"""

import contextlib
import math
import os
import pickle
import pkgutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.checkpoint.errors import OTHER_TAG, CheckpointError, first_line
from runtime.errors import UserError
from runtime.model_parts import ModelTensors, persistent_buffers
from runtime.torch_files import SAFE_GLOBALS, check_torch_file
from runtime.untrusted import check_regular, open_regular

SAME_OPTIMIZER = "use the parameter groups and the optimizer that it was trained with"

# Of a field such as "exp_avg": [rank][group], a flat tensor, or None where an optimizer has no such
Flat = list[list[Tensor | None]]


class GroupState(NamedTuple):
    """What the optimizer keeps of a parameter group."""

    numbers: dict[str, Any]  # such as "step": numbers, and tensors of one
    dtypes: dict[str, torch.dtype]  # of its tensors of the weights' size, such as "exp_avg"


def mmap_load(path: str) -> dict:
    """Return the content of a .pt file, memory-mapped.

    Unpickles only SAFE_GLOBALS and tensors. Raises ValueError, and torch.load's exceptions.
    """
    with open_regular(path, follow_links=False) as file:
        check_torch_file(file, SAFE_GLOBALS)
    safe_classes = [pkgutil.resolve_name(name) for name in SAFE_GLOBALS]
    with torch.serialization.safe_globals(safe_classes):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def numbers_in(name: str) -> list[int]:
    """Return the numbers of a file's name, such as its rank."""
    return [int(part) for part in name.split("_") if part.isdigit()]


@contextlib.contextmanager
def content_errors(folder: str) -> Iterator[None]:
    """Turn what reading unexpected content raises into a CheckpointError.

    The files are as their manifest says, but somebody else may have written both.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        # Its message advises to let the file run code
        if isinstance(error, pickle.UnpicklingError):
            why = "it is damaged, or contains what could run code"
        raise CheckpointError(
            f"{folder} does not hold what a checkpoint holds ({why}): {OTHER_TAG}"
        ) from error


class TagReader:
    """The tensors of a tag, whose files verify_files() has checked.

    shapes ({name: size}): of the parameters, by the name under which the files hold them. ties: a
    list of names for each parameter that has several. buffers ({name: tensor}): the persistent ones
    of rank 0. Also step, loss_scaler and model_state, the content of the first model file.
    """

    def __init__(self, folder: str, manifest: dict):
        with content_errors(folder):
            self.read(folder, manifest)

    def read(self, folder: str, manifest: dict) -> None:
        """Open the files, and set the attributes. Raises any exception."""
        # Links and devices are refused before any file is opened
        for name in manifest["files"]:
            check_regular(os.path.join(folder, name), follow_links=False)
        by_rank = sorted(manifest["files"], key=numbers_in)
        models = [
            mmap_load(os.path.join(folder, name)) for name in by_rank if "model_states" in name
        ]
        optimizers = [mmap_load(os.path.join(folder, name)) for name in by_rank if "optim" in name]

        # Parameters and buffers, as the model files name them
        self.folder = folder
        self.source = manifest["state"].get("model_source")
        self.model_state = models[0]
        # Of the optimizer; at stage 3 their sub-groups, each with a flat tensor and a state
        self.groups: list[dict] = self.model_state["param_shapes"]
        weights, shapes = self.read_models(models, manifest["stage"])
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        module = self.model_state["module"]
        self.buffers = {name: module[name] for name in self.model_state["buffer_names"]}
        self.read_ties(manifest["state"].get("ties"))
        self.check_names(module)

        # [field][name]: the pieces of a tensor, from all ranks
        self.pieces: dict[str, dict[str, list[Tensor]]] = {"weight": weights}
        states = [content["optimizer_state_dict"] for content in optimizers]
        self.read_optimizers(states, manifest["stage"])

    def read_models(self, models: list[dict], stage: int) -> tuple[dict, dict]:
        """Return ({name: [pieces of the weight]}, {name: shape}) of what the model files hold.

        At stage 3 they hold the frozen parameters, sharded over the ranks. Below, they hold all, in
        the model's precision: the optimizer has the trained ones in its own.
        """
        frozen = self.model_state["frozen_param_shapes"] or {}
        trained = {}
        for group in self.groups:
            trained.update(group)
        weights = {}
        if stage == 3:
            for name in frozen:
                weights[name] = [rank["frozen_param_fragments"][name] for rank in models]
            return weights, {**trained, **frozen}
        shapes = {}
        for name in (*trained, *frozen):
            weight = self.model_state["module"][name]
            weights[name] = [weight]
            shapes[name] = weight.shape
        return weights, shapes

    def read_ties(self, ties: list[list[str]] | None) -> None:
        """Set .ties, and .stored_as: {another name of a parameter: the one in the files}.

        ties: of the manifest. Before it had them, DeepSpeed's files alone had.
        """
        self.stored_as = {}
        if ties is None:
            self.stored_as = dict(self.model_state["shared_params"])
        for group in ties or []:
            stored = [name for name in group if name in self.shapes]
            if len(stored) != 1:
                raise ValueError(f"{' is '.join(group)} is {len(stored)} parameters")
            self.stored_as.update({name: stored[0] for name in group if name != stored[0]})

        # The other way round: all names of each parameter
        names_of = defaultdict(list)
        for name, stored in self.stored_as.items():
            names_of[stored].append(name)
        self.ties = [[stored, *names] for stored, names in names_of.items()]

    def check_names(self, module: Iterable[str]) -> None:
        """Raise ValueError unless each tensor of the module is a parameter or a buffer."""
        for name in module:
            if name not in self.shapes and name not in self.stored_as and name not in self.buffers:
                raise ValueError(f"{name} is no parameter and no buffer")

    def read_optimizers(self, optimizers: list[dict], stage: int) -> None:
        """Add what the optimizers' files keep flat: one tensor per field, rank and group.

        optimizers: the state of each rank's. Sets .group_states, the GroupState of each group,
        .step, that of the first group, and .loss_scaler.
        """
        # DeepSpeed's names of the float32 weights, and of the optimizer's state
        if stage == 3:
            weights_key = "fp32_flat_groups"
            states_key = "optimizer_state_dict"
        else:
            weights_key = "single_partition_of_fp32_groups"
            states_key = "base_optimizer_state"
        self.loss_scaler = optimizers[0].get("loss_scaler")

        # [rank][group]. An optimizer without a state has no entry
        weights: Flat = [rank[weights_key] for rank in optimizers]
        states = []
        for rank in optimizers:
            by_group = rank[states_key]["state"]
            states.append([by_group.get(i, {}) for i in range(len(self.groups))])
        self.group_states = self.read_group_states(states[0], weights[0], len(optimizers))
        self.step = float(self.group_states[0].numbers.get("step", 0.0))

        # What has the weights' size is cut as the weights are. Some groups may have more of it
        flat = {"weight": weights}
        for group_state in self.group_states:
            for field in group_state.dtypes:
                flat.setdefault(field, [[state.get(field) for state in rank] for rank in states])
        for field, tensors in flat.items():
            if stage == 3:
                pieces = self.pieces_of_stage_3(tensors)
            else:
                pieces = self.pieces_of_stage_2(tensors)
            self.pieces.setdefault(field, {}).update(pieces)

    def pieces_of_stage_2(self, flat: Flat) -> dict[str, list[Tensor]]:
        """Return {name: [the tensor]} of the parameters that have a field.

        A group's parameters are one after another in the concatenation of the ranks' tensors.
        """
        pieces = {}
        of_groups = zip(*flat)
        for group, of_ranks in zip(self.groups, of_groups):
            for name, piece in self.cut(group, of_ranks, parts=1):
                pieces[name] = [piece]
        return pieces

    def pieces_of_stage_3(self, flat: Flat) -> dict[str, list[Tensor]]:
        """Return {name: [the piece of each rank]} of the parameters that have a field.

        Each rank has its pieces of a group's parameters one after another. The last rank's have
        padding.
        """
        # Rank by rank, so that the pieces of a parameter are in the order of the ranks
        pieces = defaultdict(list)
        for of_groups in flat:
            for group, tensor in zip(self.groups, of_groups, strict=True):
                for name, piece in self.cut(group, [tensor], parts=len(flat)):
                    pieces[name].append(piece)
        return pieces

    def cut(
        self, names: Iterable[str], tensors: Sequence[Tensor | None], parts: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, its part) of parameters that follow one another in flat tensors.

        parts: into how many equal parts each parameter is cut. One of them is in these tensors (1
        at stage 2, otherwise the number of ranks). Yields nothing if the first tensor is None:
        Muon's group has no exp_avg_sq.
        """
        if tensors[0] is None:
            return

        # The parameters have no gap between them
        start = 0
        for name in names:
            size = math.ceil(self.shapes[name].numel() / parts)
            yield name, slice_flat(tensors, start, size)
            start += size

    def read_group_states(
        self, groups: list[dict], weights: list[Tensor], ranks: int
    ) -> list[GroupState]:
        """Tell the optimizer's numbers from its tensors, and return what each group has.

        groups: the first rank's state of each parameter group. weights: its flat weights.
        """
        group_states = []
        for state, flat in zip(groups, weights, strict=True):
            numbers = {}
            dtypes = {}
            # DeepSpeed pads a group to a multiple of twice the ranks, and saves the weights without
            # that
            sizes = range(flat.numel(), flat.numel() + 2 * ranks)
            for key, value in state.items():
                if not torch.is_tensor(value):
                    numbers[key] = value
                elif value.dim() == 1 and value.numel() in sizes:
                    dtypes[key] = value.dtype
                elif value.numel() == 1:
                    numbers[key] = value
                else:
                    raise CheckpointError(
                        f"{self.folder} has the optimizer's '{key}' in an unknown shape: "
                        f"{OTHER_TAG}"
                    )
            group_states.append(GroupState(numbers, dtypes))
        return group_states

    def group_state_of(self, names: Sequence[str]) -> GroupState:
        """Return what the optimizer kept of these parameters, which are one group now.

        The tag may have them in several groups, of other numbers than the groups have now. Raises
        CheckpointError if the optimizer's numbers of these differ, or if it didn't train one.
        """
        # The first parameter's group counts, and the others have to agree with it
        found: GroupState | None = None
        for name in names:
            state = self.group_state_of_parameter(name)
            if found is None:
                found = state
            elif state is not found and not same_numbers(state.numbers, found.numbers):
                raise CheckpointError(
                    f"{self.folder} has other numbers of the optimizer for {name} than for "
                    f"{names[0]}, which are in one parameter group here: {SAME_OPTIMIZER}"
                )
        return found or GroupState({}, {})

    def group_state_of_parameter(self, name: str) -> GroupState:
        """Return what the optimizer kept of the group of a parameter. Raises CheckpointError."""
        stored = self.stored_as.get(name, name)
        for group, state in zip(self.groups, self.group_states, strict=True):
            if stored in group:
                return state
        raise CheckpointError(
            f"{self.folder} has no state of the optimizer for {name}, which was frozen: "
            f"{SAME_OPTIMIZER}"
        )

    def tensors(self) -> ModelTensors:
        """Return the names and shapes of what the tag has."""
        # A parameter that has several names is listed under each of them
        params = dict(self.shapes)
        for name, stored in self.stored_as.items():
            params[name] = self.shapes[stored]
        buffers = {name: buffer.shape for name, buffer in self.buffers.items()}
        return ModelTensors(params, frozenset(map(frozenset, self.ties)), buffers)

    def fields(self, name: str) -> list[str]:
        """Return what the tag has of a parameter.

        It is "weight", and the optimizer's tensors of its size, such as "exp_avg" and "exp_avg_sq"
        of AdamW.
        """
        name = self.stored_as.get(name, name)
        return [field for field in self.pieces if name in self.pieces[field]]

    def get(self, name: str, field: str = "weight") -> Tensor:
        """Return a field of a parameter in fp32 on the CPU. It may be a view of the file."""
        with content_errors(self.folder):
            # Any name of a parameter will do: the files have one
            name = self.stored_as.get(name, name)
            shape = self.shapes[name]
            pieces = [piece.flatten() for piece in self.pieces[field][name]]
            flat = slice_flat(pieces, 0, shape.numel())
            return flat.view(shape).detach().float()

    def copy_buffers(self, model: nn.Module) -> None:
        """Copy the persistent buffers into a model that has the same ones."""
        with content_errors(self.folder), torch.no_grad():
            for name, buffer in persistent_buffers(model).items():
                buffer.copy_(self.buffers[name])


def same_numbers(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two groups have equal numbers under equal names."""
    if some.keys() != others.keys():
        return False
    return all(bool(some[key] == others[key]) for key in some)


def slice_flat(tensors: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Return `length` elements from `start` of the concatenation of 1-dimensional tensors.

    It is a view if they are in one tensor.
    """
    # The slice may begin in one rank's tensor and end in another's
    parts = []
    for tensor in tensors:
        # start is the place in this tensor: below 0 if the slice began in one before
        end = start + length
        part = tensor[max(start, 0) : max(end, 0)]
        if len(part):
            parts.append(part)
        start -= tensor.numel()
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)
