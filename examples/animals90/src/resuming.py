"""Find a checkpoint, check its files and read them, whoever wrote them.

    FOLDER/extra_info.json                  what this example knows about the run (records.py)
    FOLDER/latest                           TAG: best, or epoch_5
    FOLDER/TAG/mp_rank_00_model_states.pt   the weights, in the precision of the training
    FOLDER/TAG/*_optim_states.pt            a rank's part of the float32 weights and Adam's moments

DeepSpeed's own functions unpickle these files, which can run code. So none of them is called:
read_states() opens each file once, refuses what could run code, and unpickles only tensors and
plain values.
"""

import contextlib
import os
import pkgutil
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from records import MAX_BYTES, CheckpointInfo, SavedRun

from data import one_line
from runtime.errors import UserError
from runtime.torch_files import SAFE_GLOBALS, check_stored, check_torch_file
from runtime.untrusted import open_no_follow, open_regular, read_json, read_regular

TAG = re.compile("best|epoch_[0-9]{1,7}")
WRITTEN = re.compile(r"(best_model|epoch_[0-9]+)(\.old)?|\.saving")  # folders of checkpoints
MAX_STATES_BYTES = 1_000_000_000  # of a file: 134 MB with 90 classes, 740 MB with 100,000
SCALER_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass
class RankState:
    """What a rank needs to continue exactly."""

    weights: dict[str, torch.Tensor]  # of the whole model, in the precision of the training
    master: torch.Tensor  # this rank's part of the float32 weights
    moments: dict[str, torch.Tensor]  # Adam's, of this part; none before the first step
    step: float  # Adam's
    loss_scaler: dict[str, float]  # numbers of a dynamic one
    counters: dict[str, int]  # DeepSpeed's


@contextlib.contextmanager
def resume_errors(resume: str) -> Iterator[None]:
    """Turn any exception that reading a checkpoint raises into a UserError of one line."""
    try:
        yield
    except Exception as error:  # a file of others may hold anything
        known = isinstance(error, UserError | OSError)
        why = str(error) if known else f"{type(error).__name__}: {error}"
        why = one_line(why.partition("\n")[0])[:500]
        where = f"resume={one_line(resume)}"
        raise UserError(
            f"{where} is not a complete checkpoint ({why}): change or drop --resume"
        ) from None


def find_checkpoint(resume: str) -> tuple[Path, CheckpointInfo]:
    """Return the folder of the newest checkpoint in `resume`, and its extra_info.json.

    Raises UserError.
    """
    with resume_errors(resume):
        folders = [Path(resume)]
        for folder in sorted(Path(resume).iterdir()):
            if folder.name != ".saving" and folder.is_dir():
                folders.append(folder)
        complete = [folder for folder in folders if os.path.lexists(folder / "extra_info.json")]

        newest = None
        for folder in complete or [Path(resume)]:
            info = read_json(
                folder / "extra_info.json", CheckpointInfo, MAX_BYTES, follow_links=False
            )
            age = (info.get("time", 0), info["epoch"])
            if newest is None or age > newest[0]:
                newest = (age, folder, info)
        _, folder, info = newest
        return folder, info


def is_other_run(path: Path, epochs: list[dict], epoch: int) -> bool:
    """Return whether a JSON file is of another run than one with these epochs, or of the best model
    of an epoch after this one. A damaged file is of another run.
    """
    try:
        info = read_json(path, SavedRun, MAX_BYTES, follow_links=False)
    except (UserError, OSError):
        return True
    is_later = info.get("epoch", 0) > epoch and path.parent.name.startswith("best_model")
    return is_later or info["epochs"][:1] != epochs[:1]  # the times of two runs differ


def refuse_links(checkpoint_dir: str, history_path: Path) -> None:
    """Raise UserError if there is a link where a run puts its files."""
    if os.path.isdir(checkpoint_dir):
        for path in Path(checkpoint_dir).iterdir():
            if WRITTEN.fullmatch(path.name) and (path.is_symlink() or not path.is_dir()):
                raise UserError(
                    f"{one_line(path)} is a link or a file, not a folder with a checkpoint: remove it"
                )
    if os.path.lexists(history_path):
        os.close(open_no_follow(history_path, os.O_RDONLY))


def state_files(folder: Path, info: CheckpointInfo) -> tuple[Path, list[Path]]:
    """Return the paths of a checkpoint's model file and of each rank's optimizer file.

    They follow from extra_info.json and from the tag, so no other name in the folder counts.
    Raises ValueError and OSError.
    """
    tag = read_regular(folder / "latest", max_bytes=100, follow_links=False).decode()
    if not TAG.fullmatch(tag):
        raise ValueError(
            f"{folder / 'latest'} names {tag!r}, and this example writes best or epoch_N"
        )
    world_size, dtype, _ = info["saved_by"]
    prefix = "bf16_zero" if dtype == "bfloat16" else "zero"
    optimizer_files = []
    for rank in range(world_size):
        optimizer_files.append(folder / tag / f"{prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder / tag / "mp_rank_00_model_states.pt", optimizer_files


def read_states(path: Path) -> dict[str, Any]:
    """Return the content of one of DeepSpeed's files, in memory. Raises ValueError and OSError.

    The file is opened once: what is checked is what is read.
    """
    with open_regular(path, MAX_STATES_BYTES, follow_links=False) as file:
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > size:  # torch.save doesn't compress
            raise ValueError(f"{path} unpacks to {unpacked:,} bytes")
        check_stored(file)

        file.seek(0)
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - SAFE_GLOBALS
        if unsafe:
            raise ValueError(f"{path} could run code: {sorted(unsafe)}")

        check_torch_file(file, SAFE_GLOBALS)
        file.seek(0)
        allowed = [pkgutil.resolve_name(name) for name in SAFE_GLOBALS]
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)


def check_tensor(what: str, tensor: Any, shape: torch.Size | tuple[int, ...]) -> None:
    """Raise ValueError unless this is a tensor of numbers, of this shape, each in memory once."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        raise ValueError(f"{what} is no tensor of numbers")
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_complex():
        raise ValueError(f"{what} is no tensor of numbers in memory")
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}, not {tuple(shape)}")


def check_number(what: str, value: Any, least: float, most: float = 1e12) -> float | int:
    """Return a number, or that of a tensor with one element, in this range. Raises ValueError."""
    if type(value) is torch.Tensor and value.numel() == 1:
        value = value.item()
    if type(value) not in (int, float) or not least <= value <= most:  # NaN isn't in a range
        raise ValueError(f"{what} is no number from {least} to {most}")
    return value


def read_module(path: Path, model: torch.nn.Module) -> dict[str, Any]:
    """Return the content of the model file, once "module" is known to have this model's tensors.

    Raises any exception; see resume_errors().
    """
    states = read_states(path)
    weights = states["module"]
    expected = model.state_dict()
    if weights.keys() != expected.keys():
        raise ValueError(f"{path} has another model")
    for name, tensor in expected.items():
        check_tensor(name, weights[name], tensor.shape)
    return states


def read_weights(
    folder: Path, info: CheckpointInfo, model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return all weights in float32, and the statistics, of any number of ranks and any precision.

    DeepSpeed concatenates the parameters in the order of "param_shapes" and gives each rank a part.
    Raises any exception; see resume_errors().
    """
    model_file, optimizer_files = state_files(folder, info)
    states = read_module(model_file, model)
    parts = []
    for path in optimizer_files:
        (part,) = read_states(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        check_tensor(f"a part of {path}", part, (len(part),))
        parts.append(part.float())
    flat = torch.cat(parts)

    params = dict(model.named_parameters())
    (shapes,) = states["param_shapes"]
    total = sum(param.numel() for param in params.values())
    if shapes.keys() != params.keys() or len(flat) != total:
        raise ValueError(f"{folder} has {len(flat):,} weights, not {total:,}")
    weights = dict(states["module"])
    for name, values in zip(
        shapes, flat.split([params[name].numel() for name in shapes]), strict=True
    ):
        weights[name] = values.view(params[name].shape)
    return weights


def read_rank(folder: Path, info: CheckpointInfo, model: torch.nn.Module, rank: int) -> RankState:
    """Return what a rank needs to continue exactly.

    Raises any exception; see resume_errors().
    """
    model_file, optimizer_files = state_files(folder, info)
    states = read_module(model_file, model)
    optimizer = read_states(optimizer_files[rank])["optimizer_state_dict"]
    (master,) = optimizer["single_partition_of_fp32_groups"]
    check_tensor("the part of the weights", master, (len(master),))

    adam = optimizer["base_optimizer_state"]["state"].get(0, {})
    moments = {}
    if adam:
        for name in ("exp_avg", "exp_avg_sq"):
            check_tensor(name, adam[name], (len(adam["exp_avg"]),))
            moments[name] = adam[name]

    scaler = vars(optimizer["loss_scaler"])
    loss_scaler = {}
    if scaler["dynamic"] is True:
        for name in SCALER_NUMBERS:
            loss_scaler[name] = check_number(name, scaler[name], least=-1)
    counters = {}
    for name in COUNTERS:
        counters[name] = int(check_number(name, states[name], least=0))
    return RankState(
        weights=states["module"],
        master=master,
        moments=moments,
        step=check_number("step", adam.get("step", 0), least=0),
        loss_scaler=loss_scaler,
        counters=counters,
    )


@torch.no_grad()
def restore(engine: Any, saved: RankState) -> None:
    """Copy a rank's state into a new engine of DeepSpeed, at ZeRO-2.

    The settings of the optimizer and of the loss scaler stay those of this run. Raises ValueError
    and RuntimeError.
    """
    zero = engine.optimizer
    (master,) = zero.single_partition_of_fp32_groups
    length = len(master) - zero.groups_padding[0]
    check_tensor("the part of the weights", saved.master, (length,))
    for name, moment in saved.moments.items():
        check_tensor(name, moment, (len(master),))

    engine.module.load_state_dict(saved.weights)
    master[:length].copy_(saved.master)
    if saved.moments:
        adam = zero.optimizer
        step = int(saved.step)
        if isinstance(adam, torch.optim.AdamW):  # DeepSpeed's CPU Adam counts with an int
            device = master.device if adam.param_groups[0].get("fused") else "cpu"
            step = torch.tensor(float(step), device=device)
        adam.state[master] = {"step": step}
        for name, moment in saved.moments.items():
            adam.state[master][name] = torch.zeros_like(master).copy_(moment)
        zero._lazy_init_hp_params_optimizer_state()
    if getattr(zero.loss_scaler, "dynamic", False):
        for name, value in saved.loss_scaler.items():
            setattr(zero.loss_scaler, name, value)
    for name, value in saved.counters.items():
        setattr(engine, name, value)
