"""What of DeepSpeed's internals is read or replaced. Other files only call the functions and the
engine's methods that DeepSpeed documents.

A Layout shows what ZeRO holds on this rank as tensors. Reductions, steppers, state and checkpoints
take it, and know nothing of DeepSpeed. Methods of DeepSpeed are replaced by subclasses: an object
changes its class, as in PyTorch's fully_shard.

INTERNALS below is the complete table of what this file uses of DeepSpeed 0.19.8.
tests/engine/test_layout_table.py compares it with this file and with the installed version.
"""

import contextlib
import copyreg
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import all_gather_into_tensor_dp_groups
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from runtime.checkpoint.staging import Decoded
from runtime.cluster.ranks import silence_stdout
from runtime.engine.compact import compact_state, placeholder, take_remainder
from runtime.engine.muon import is_muon
from runtime.engine.shard import Piece, Place, Shard, pieces_of


class Internal(NamedTuple):
    """Names that are used of one of DeepSpeed's objects, and what for. owner: see OWNERS."""

    owner: str
    names: str
    use: str


# The variables of this file that hold DeepSpeed's objects
OWNERS = {
    "engine": "DeepSpeedEngine",
    "zero": "the optimizer of stage 2 or 3",
    "zero2": "the optimizer of stage 2",
    "zero3": "the optimizer of stage 3",
    "scaler": "the loss scaler. It is dynamic in float16, unless the JSON has a loss scale",
    "ops": "the package deepspeed.ops",
    "param": "a parameter, to which stage 3 adds attributes",
    "adam": "DeepSpeedCPUAdam",
}
INTERNALS = (
    Internal("engine", "optimizer module checkpoint_engine param_names", "its parts"),
    Internal("engine", "config zero_optimization_stage zero_use_cpu_optimizer", "settings"),
    Internal("engine", "zero_max_live_parameters zero_overlap_comm", "settings of the JSON"),
    Internal("engine", "set_gradient_accumulation_boundary step save_checkpoint", "as documented"),
    Internal("engine", "global_steps global_samples skipped_steps", "counters that a tag records"),
    Internal("engine", "tput_timer", "it waits for the GPU in a forward, which a capture can't"),
    Internal("zero", "optimizer", "the optimizer of PyTorch"),
    Internal("zero", "dp_process_group", "the ranks that share the flat tensors"),
    Internal("zero", "clip_grad loss_scale loss_scaler dtype", "settings of the step"),
    Internal("zero", "overflow _global_grad_norm _update_scale", "what a step reports"),
    Internal("zero", "reduce_bucket_size", "a setting of the JSON"),
    Internal("scaler", "cur_scale min_scale", "the loss scale, and the lowest that it may become"),
    Internal("scaler", "dynamic cur_iter last_overflow_iter cur_hysteresis", "what it has learned"),
    Internal("scaler", "update_scale", "sets the scale of the next step"),
    Internal("scaler", "raise_error_at_min_scale", "at the lowest, skip the step, too"),
    Internal("ops", "__compatible_ops__", "a library that it would compile on a CPU"),
    Internal("zero", "averaged_gradients", "where DeepSpeed looks for gradients"),
    Internal("zero2", "overlap_comm", "True would wait for the GPU after each backward"),
    Internal(
        "zero2",
        "single_partition_of_fp32_groups",
        "the fp32 weights; with offload their .grad, in host memory",
    ),
    Internal("zero2", "bit16_groups_flat parallel_partitioned_bit16_groups", "the weights in use"),
    Internal("zero2", "_build_compact_grad_partition_buffer", "the fp32 gradients"),
    Internal("zero2", "round_robin_bit16_groups round_robin_bit16_offsets", "what lies where"),
    Internal("zero2", "real_dp_process_group", "for the all-gather of the weights"),
    Internal("zero2", "_lazy_init_hp_params_optimizer_state", "shows the optimizer's state"),
    Internal("param", "_hp_mapping", "views of the fp32 weights, which compact state doesn't have"),
    Internal(
        "zero2",
        "param_buffer_of_bit16_for_cpu_offload_groups temp_grad_buffer_for_gpu_offload",
        "buffers of DeepSpeed's step, which ours doesn't use",
    ),
    Internal("zero2", "setup_buckets ready_for_gradients", "allocates buckets: ours use others"),
    Internal("zero2", "process_gradients", "called for each gradient"),
    Internal("zero2", "reduce_ipg_grads", "called after each backward"),
    Internal("zero2", "_use_compact_grad_partition_buffer", "it is False for float32 weights"),
    Internal("zero3", "fp16_groups fp16_partitioned_groups_flat", "parameters, the weights in use"),
    Internal("zero3", "fp32_partitioned_groups_flat", "the fp32 weights"),
    Internal("zero3", "grad_partitions_flat_buffer", "the fp32 gradients"),
    Internal("zero3", "sub_group_to_group_id", "the parameter group of a flat tensor"),
    Internal("zero3", "parameter_offload", "its hooks gather and release parameters"),
    Internal("zero3", "_grad_acc_hooks _leaf_module_hooks", "hooks that reduce gradients"),
    Internal("zero3", "ipg_buckets", "buckets, which ours doesn't use"),
    Internal("zero3", "independent_gradient_partition_epilogue", "called after each backward"),
    Internal("zero3", "_offload_boundary_param_ids", "parameters that have a gradient"),
    Internal("zero", "finalize_gradient_accumulation_boundary", "we call it before its step"),
    Internal("zero", "step", "clipping and the update"),
    Internal("engine", "_copy_recovery_script", "a full disk must not end the save"),
    Internal("engine", "_get_param_fragment_func", "it would copy frozen weights"),
    Internal("adam", "ds_opt_adam opt_id", "a step on a piece of a shard"),
    Internal("param", "ds_id ds_tensor ds_shape ds_numel ds_status", "a parameter's shard"),
)


# What float16's dynamic scaler has learned. Its window is that of this run's JSON
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


# Before there is a Layout


def avoid_compilation() -> None:
    """Keep DeepSpeed from compiling a library for collectives on a CPU. Call this first."""
    ops = deepspeed.ops
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def save_stage_by_its_class() -> None:
    """Have pickle save DeepSpeed's ZeroStageEnum as a call of its class, as Python 3.11.4 does.

    Python 3.11.0 to 3.11.3, as in Debian 12, save an Enum as a getattr. That could run code, so
    nothing that reads with care takes it.
    """
    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (int(stage),)))


def skip_at_lowest_scale(engine: DeepSpeedEngine) -> None:
    """Skip a step with float16's lowest loss scale, too, if its gradients aren't finite. DeepSpeed
    would raise."""
    zero = engine.optimizer
    scaler = zero.loss_scaler
    if scaler.dynamic:
        scaler.raise_error_at_min_scale = False


def set_loss_scale(engine: DeepSpeedEngine, scale: float) -> None:
    """Multiply the loss by this from now on."""
    zero = engine.optimizer
    zero.loss_scale = scale


@contextlib.contextmanager
def without_throughput_timer(engine: DeepSpeedEngine) -> Iterator[None]:
    """Stop the timer that DeepSpeed's forward starts: from the third step on, it waits for the GPU,
    which a capture can't."""
    config = engine.tput_timer.config
    was_enabled = config.enabled
    config.enabled = False
    try:
        yield
    finally:
        config.enabled = was_enabled


# What a Layout consists of


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter at ZeRO-3, of which each rank holds a flat part."""

    param: nn.Parameter
    flat: Tensor  # this rank's part, with padding at the end of the last one
    grads: Tensor | None  # fp32 gradients of that part; None: the parameter is frozen
    shape: torch.Size
    numel: int

    def whole(self, flat: Tensor) -> Tensor:
        """Return a flat tensor of all ranks' parts in the parameter's shape, without padding."""
        return flat[: self.numel].view(self.shape)

    def show(self, full: Tensor) -> None:
        """Make the parameter this whole tensor."""
        param = self.param
        param.data = full
        param.ds_status = ZeroParamStatus.AVAILABLE

    def hide(self) -> None:
        """Make the parameter empty."""
        param = self.param
        param.data = param.data.new_empty(0)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE


class Hooks(NamedTuple):
    """What DeepSpeed calls instead of its own code."""

    on_grad_ready: Callable[[nn.Parameter], None]  # for each gradient of a backward
    finish_backward: Callable[[], None]  # after each backward
    step: Callable[[], object]  # unless Layout.step_by() gives another one


class Layout:
    """What ZeRO holds on this rank. Make one with layout_of().

    stage, group (of the ranks), world_size, rank, module, optimizer (PyTorch's), names
    ({parameter: name}), shards and max_norm (of clipping; infinite: none) don't change.
    """

    def __init__(self, engine: DeepSpeedEngine, shards: tuple[Shard, ...]) -> None:
        zero = engine.optimizer
        self.engine = engine
        self.shards = shards
        self.stage = int(engine.zero_optimization_stage())

        # The ranks that share it
        self.group = zero.dp_process_group
        self.world_size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)

        # What is trained
        self.module = engine.module
        self.optimizer = zero.optimizer
        self.names = engine.param_names

        # How: settings of the script and of the JSON
        self.config = engine.config
        self.max_norm = zero.clip_grad or math.inf
        self.dtype = zero.dtype
        self.bucket_size = int(zero.reduce_bucket_size)
        self.offloads = engine.zero_use_cpu_optimizer()
        self.max_live_parameters = engine.zero_max_live_parameters()
        self.overlaps = engine.zero_overlap_comm()

    @property
    def cpu_adam(self) -> "DeepSpeedsAdam | None":
        """DeepSpeed's Adam in host memory, if it could be built and the state is there."""
        if self.offloads and isinstance(self.optimizer, DeepSpeedCPUAdam):
            return DeepSpeedsAdam(self.optimizer)
        return None

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied by. The gradients have it in them."""
        zero = self.engine.optimizer
        return zero.loss_scale

    @property
    def min_loss_scale(self) -> float:
        """The lowest that the loss scale may become; infinite if it is constant."""
        zero = self.engine.optimizer
        scaler = zero.loss_scaler
        return scaler.min_scale if scaler.dynamic else math.inf

    def restore_scale(self, saved: object) -> None:
        """Continue with the loss scale of a tag's scaler, if that one and this run's are
        dynamic."""
        zero = self.engine.optimizer
        scaler = zero.loss_scaler
        if scaler.dynamic and getattr(saved, "dynamic", False):
            for name in SCALER_FIELDS:
                setattr(scaler, name, getattr(saved, name))

    def connect(self, hooks: Hooks) -> None:
        """Let DeepSpeed call these hooks."""
        raise NotImplementedError

    def publish(self, norm: float, applied: bool) -> None:
        """Tell DeepSpeed how a step went. norm: of the gradients, before clipping."""
        zero = self.engine.optimizer
        zero.overflow = not applied
        zero._update_scale(zero.overflow)
        zero._global_grad_norm = norm if math.isfinite(norm) else math.inf

    def weights_in_use(self) -> list[tuple[Tensor, Tensor]]:
        """Return [(this rank's weights as forward uses them, the optimizer's fp32 weights)],
        flat."""
        # With compact state, the weights in use are the optimizer's
        return [(shard.half, shard.master) for shard in self.shards if shard.compact is None]

    def compact_sums(self) -> list[Tensor]:
        """Return the sums of the bits of this rank's weights with compact state. They have no other
        copy to compare them with."""
        compact = [shard.half for shard in self.shards if shard.compact]
        return [half.view(torch.int16).sum(dtype=torch.int64) for half in compact]

    def gather_weights(self) -> None:
        """Bring what a step has changed to all ranks. All ranks call this."""
        raise NotImplementedError

    def show_state(self) -> None:
        """Let DeepSpeed's functions find an optimizer's state that was created outside of them."""

    def weight_pieces(self, param: nn.Parameter) -> list[tuple[Tensor, int]]:
        """Return [(flat tensor, its first element in the flat parameter)] of the weights in use."""
        raise NotImplementedError

    def step_by(self, make_step: Callable[[], None]) -> None:
        """Let DeepSpeed call make_step() as its step, and count it."""
        engine = self.engine
        zero = engine.optimizer

        # The next call of DeepSpeed's step makes this one
        zero.hooks = zero.hooks._replace(step=make_step)
        # The engine steps only at a boundary of the accumulation
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        engine.set_gradient_accumulation_boundary(False)

    def step_of_deepspeed(self, loss_factor: float) -> None:
        """Let DeepSpeed make its own step, after any number of micro-steps.

        loss_factor: the number of micro-steps, relative to gradient_accumulation_steps.
        """
        engine = self.engine
        zero = engine.optimizer
        scaler = zero.loss_scaler
        # engine.step() leaves this to backward, where it manages the boundaries. Ours are here
        zero.finalize_gradient_accumulation_boundary()
        # The step divides by the scale, and the gradients are a mean over another number
        scale = scaler.cur_scale
        scaler.cur_scale = scale * loss_factor
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        engine.set_gradient_accumulation_boundary(False)
        # The scale of the next step
        scaler.cur_scale = scale
        scaler.update_scale(zero.overflow)

    def restore_counters(self, saved: dict) -> None:
        """Take DeepSpeed's counters from the content of a tag's model file."""
        engine = self.engine
        engine.global_steps = int(saved["global_steps"])
        engine.global_samples = int(saved["global_samples"])
        engine.skipped_steps = int(saved["skipped_steps"])

    def checkpoint_files(self, out_dir: str, tag: str) -> list[tuple[str, dict]]:
        """Return [(path, content)] of this rank's files for out_dir/tag. Contents are not copies.

        From the first call on, the engine's own save_checkpoint() writes nothing.
        """
        engine = self.engine

        # From the first save on, DeepSpeed's writes go to the Collector
        if type(engine) is DeepSpeedEngine:
            engine.__class__ = QuietEngine
            engine.checkpoint_engine.__class__ = Collector

        # This rank's files, without what DeepSpeed prints about them
        saved: list[tuple[str, dict]] = []
        engine.checkpoint_engine.files = saved
        with silence_stdout():
            engine.save_checkpoint(out_dir, tag=tag, save_latest=False)
        engine.checkpoint_engine.files = []

        # DeepSpeed's ZeroStageEnum as a number, so that a reader needs no class of DeepSpeed's, and
        # Python 3.11.0 to 3.11.3 no getattr, which could run code. save_stage_by_its_class() is for
        # what DeepSpeed writes itself, as in examples/animals90
        for _, content in saved:
            state = content.get("optimizer_state_dict", {})
            if "zero_stage" in state:
                stage = int(state["zero_stage"])
                content["optimizer_state_dict"] = {**state, "zero_stage": stage}
        return saved

    def copy_recovery_script(self, out_dir: str) -> None:
        """Write DeepSpeed's zero_to_fp32.py and zero_to_torch.py into a folder."""
        engine = self.engine
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            path = os.path.join(out_dir, name)
            if os.path.islink(path):  # DeepSpeed would overwrite its target
                os.remove(path)
        DeepSpeedEngine._copy_recovery_script(engine, out_dir)


def layout_of(engine: DeepSpeedEngine) -> Layout:
    """Return the Layout of an engine that deepspeed.initialize has made, at stage 2 or 3.

    This changes the engine: gradients land in the Layout's tensors, and DeepSpeed's own step is
    right after any number of micro-steps (ExactStage2 and 3), until connect() puts ours in its
    place (OurStage2 and 3).
    """
    if engine.zero_optimization_stage() == 3:
        return zero3_layout(engine)
    return zero2_layout(engine)


def shape_of(param: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter, whole also at ZeRO-3."""
    return getattr(param, "ds_shape", param.shape)


# Checkpoints


class QuietEngine(DeepSpeedEngine):
    """DeepSpeed's engine, without what is not wanted in the middle of a save."""

    def _copy_recovery_script(self, save_path: str) -> None:
        """Do nothing. Layout.copy_recovery_script() does it."""

    def _get_param_fragment_func(self, param: nn.Parameter) -> Tensor:
        """Return what a model file holds of a frozen parameter. At stage 2, that is no copy."""
        if self.zero_optimization_stage() == 3:
            return super()._get_param_fragment_func(param)
        return param.detach()


class Collector(TorchCheckpointEngine):
    """Collects what DeepSpeed would write in .files, [(path, content)]. The saver writes it."""

    files: list[tuple[str, dict]] = []

    def save(self, state_dict: dict, path: str) -> None:
        """Collect a file."""
        self.files.append((path, state_dict))


# ZeRO-2


class OurStage2(DeepSpeedZeroOptimizer):
    """DeepSpeed's stage 2 with gradients and a step of ours. hooks: set by Layout.connect()."""

    hooks: Hooks

    def setup_buckets(self) -> None:
        """Allocate nothing: DeepSpeed's buckets would take reduce_bucket_size twice."""
        self.ready_for_gradients = True

    def process_gradients(self, param: nn.Parameter, i: int) -> None:
        """Take a gradient. DeepSpeed calls this when backward has computed it."""
        self.hooks.on_grad_ready(param)

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """End a backward. DeepSpeed calls this after each of them."""
        self.hooks.finish_backward()

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Return True: the gradients are in flat buffers for weights of any dtype."""
        return True

    def step(self, closure: None = None) -> None:
        """Make a step."""
        self.hooks.step()


class ExactStage2(DeepSpeedZeroOptimizer):
    """DeepSpeed's stage 2, after any number of micro-steps.

    No run steps by it, because stage 2 takes our step. A check without fast paths does.
    """

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Keep the loss scale during a step: Layout.step_of_deepspeed() sets the next one."""


class Zero2Layout(Layout):
    """The Layout of stage 2."""

    def __init__(self, engine: DeepSpeedEngine, shards: tuple[Shard, ...]) -> None:
        super().__init__(engine, shards)
        zero2 = engine.optimizer
        zero2.__class__ = ExactStage2  # until connect()

    def connect(self, hooks: Hooks) -> None:
        zero2 = self.engine.optimizer
        zero2.__class__ = OurStage2
        zero2.hooks = hooks
        zero2.overlap_comm = False  # its CPU would wait; our side stream goes by Layout.overlaps
        if self.offloads:  # for GPT-2 XL 3.1 GB of host memory and 161 MB on the GPU
            zero2.param_buffer_of_bit16_for_cpu_offload_groups = []
            zero2.temp_grad_buffer_for_gpu_offload = None

    def gather_weights(self) -> None:
        zero2 = self.engine.optimizer
        all_gather_into_tensor_dp_groups(
            zero2.bit16_groups_flat,
            zero2.parallel_partitioned_bit16_groups,
            zero2.real_dp_process_group,
        )  # on one rank, does nothing

    def show_state(self) -> None:
        zero2 = self.engine.optimizer
        if not self.is_compact:
            zero2._lazy_init_hp_params_optimizer_state()

    @property
    def is_compact(self) -> bool:
        """Whether the shards have compact state."""
        return any(shard.compact for shard in self.shards)

    def make_compact(self) -> None:
        """Give the shards compact state, and free the fp32 weights. Call this before connect()."""
        shards = []
        for shard in self.shards:
            # DeepSpeed has views of them; safe_get_full_fp32_param() returns None then
            for param in [place.param for place in shard.places]:
                del param._hp_mapping
            half = shard.half
            # DeepSpeed has made the fp32 weights from half: there is no tie that this would round
            remainder = take_remainder(shard.master.data, half)
            shard.master.data = placeholder(half.numel(), half.device)
            # The moments, now that this shard's fp32 weights are gone
            compact = compact_state(half, remainder, is_muon(shard.options))
            shards.append(replace(shard, compact=compact))
        self.shards = tuple(shards)

    def checkpoint_files(self, out_dir: str, tag: str) -> list[tuple[str, dict]]:
        files = super().checkpoint_files(out_dir, tag)
        for _, content in files:
            if self.is_compact and "optimizer_state_dict" in content:
                saved = with_fp32(content["optimizer_state_dict"], self.shards)
                content["optimizer_state_dict"] = saved
        return files

    def weight_pieces(self, param: nn.Parameter) -> list[tuple[Tensor, int]]:
        return [(param.data.view(-1), 0)]

    @property
    def flat_sizes(self) -> list[int]:
        """Elements of all ranks' shards together, of each parameter group."""
        return [shard.master.numel() * self.world_size for shard in self.shards]


def with_fp32(saved: dict, shards: tuple[Shard, ...]) -> dict:
    """Return what DeepSpeed would write of shards, with fp32 tensors instead of placeholders."""
    weights = []
    states = {}
    base = saved["base_optimizer_state"]
    for i, shard in enumerate(shards):
        # DeepSpeed leaves the padding at the end of the weights out
        n = saved["single_partition_of_fp32_groups"][i].numel()
        device = shard.half.device
        if n:
            weights.append(Decoded(n, device, partial(shard.compact.copy_to, "weight")))
        else:  # this rank's part of a small group is all padding
            weights.append(torch.empty(0))
        if i in base["state"]:
            states[i] = dict(base["state"][i])
            for field in shard.compact.moments:
                copy_to = partial(shard.compact.copy_to, field)
                states[i][field] = Decoded(shard.half.numel(), device, copy_to)
    base = {**base, "state": states}
    return {**saved, "single_partition_of_fp32_groups": weights, "base_optimizer_state": base}


def zero2_layout(engine: DeepSpeedEngine) -> Zero2Layout:
    """Return the Layout of stage 2: it concatenates a group's parameters and cuts them per rank."""
    zero2 = engine.optimizer
    rank = dist.get_rank(zero2.dp_process_group)
    shards = []
    for i, master in enumerate(zero2.single_partition_of_fp32_groups):
        # Where each parameter is in the group's flat tensor
        params = zero2.round_robin_bit16_groups[i]
        offsets = zero2.round_robin_bit16_offsets[i]
        places = tuple(Place(param, offset) for param, offset in zip(params, offsets, strict=True))
        # This rank's gradients, which DeepSpeed looks for. Its "compact" means a flat buffer of
        # them, and has nothing to do with make_compact()
        buffer = zero2._build_compact_grad_partition_buffer(i)
        zero2.averaged_gradients[i] = buffer
        shards.append(
            Shard(
                master=master,
                half=zero2.parallel_partitioned_bit16_groups[i][rank],
                grads=buffer.flat_partition,
                optimizer=zero2.optimizer,
                group_index=i,
                pieces=pieces_of(places, size=master.numel(), rank=rank),
                places=places,
            )
        )
    return Zero2Layout(engine, tuple(shards))


# ZeRO-3


class OurStage3(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's stage 3 with gradients and a step of ours. hooks: set by Layout.connect()."""

    hooks: Hooks

    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward. DeepSpeed calls this after each of them."""
        self.hooks.finish_backward()

    def step(self, closure: None = None) -> None:
        """Make a step."""
        self.hooks.step()


class ExactStage3(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's stage 3, right for parameters without a gradient in some micro-steps, and for a
    loss scale that changes.

    DeepSpeed sets the next loss scale before it divides the gradients by it: where the scale grows,
    they would be halved. Here, Layout.step_of_deepspeed() sets it after the step.

    DeepSpeed copies the gradients of the first micro-step over those of the last step, and adds
    those of the others. So a parameter that the first one doesn't use would keep the last step's.
    With offload, it leaves out parameters that the last micro-step doesn't use. Here, a step begins
    with zeros, and all gradients count.
    """

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Count each parameter as one with a gradient, and end the accumulation.

        step_of_deepspeed() calls it.
        """
        for group in self.fp16_groups:
            for param in group:
                self._offload_boundary_param_ids.add(param.ds_id)
        super().finalize_gradient_accumulation_boundary()

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Keep the loss scale during a step."""

    def step(self, closure: None = None) -> None:
        """Make a step, and begin the next one with zeros."""
        super().step(closure)
        self.grad_partitions_flat_buffer.zero_()


class Zero3Layout(Layout):
    """The Layout of stage 3. params: of all parameters, in the order of module.parameters()."""

    def __init__(self, engine: DeepSpeedEngine, shards: tuple[Shard, ...]) -> None:
        super().__init__(engine, shards)
        # The gradients of each parameter's part
        grads = {}
        for shard in shards:
            for piece in shard.pieces:
                size = piece.param.ds_tensor.numel()
                grads[piece.param] = shard.grads.narrow(0, piece.offset, size)
        self.params = tuple(
            ShardedParameter(
                param=param,
                flat=param.ds_tensor,
                grads=grads.get(param),
                shape=param.ds_shape,
                numel=param.ds_numel,
            )
            for param in engine.module.parameters()
        )
        self.of = {sharded.param: sharded for sharded in self.params}
        zero3 = engine.optimizer
        zero3.__class__ = ExactStage3  # until connect()

    def connect(self, hooks: Hooks) -> None:
        zero3 = self.engine.optimizer
        zero3.parameter_offload.destroy()  # its hooks gather and release
        for hook in [*zero3._grad_acc_hooks, *zero3._leaf_module_hooks]:  # they reduce
            hook.remove()
        for bucket in zero3.ipg_buckets.values():
            bucket.buffer = None

        # From here on, our gradients and our step
        zero3.__class__ = OurStage3
        zero3.hooks = hooks
        for sharded in self.params:
            if sharded.grads is not None:
                sharded.param.register_post_accumulate_grad_hook(hooks.on_grad_ready)

    def publish(self, norm: float, applied: bool) -> None:
        super().publish(norm, applied)
        zero3 = self.engine.optimizer
        zero3.averaged_gradients = {}

    def gather_weights(self) -> None:
        """Do nothing: each rank's part is gathered when a forward needs it."""

    def weight_pieces(self, param: nn.Parameter) -> list[tuple[Tensor, int]]:
        sharded = self.of[param]
        start = self.rank * sharded.flat.numel()
        flat = sharded.flat.data[: max(0, sharded.numel - start)]  # the rest is padding
        return [(flat, start)] if flat.numel() else []


def zero3_layout(engine: DeepSpeedEngine) -> Zero3Layout:
    """Return the Layout of stage 3: it cuts each parameter, and concatenates a rank's parts."""
    zero3 = engine.optimizer
    rank = dist.get_rank(zero3.dp_process_group)
    # Flat tensors of the sub-groups
    halves = zero3.fp16_partitioned_groups_flat
    grads = zero3.grad_partitions_flat_buffer.split([half.numel() for half in halves])
    shards = []
    for i, master in enumerate(zero3.fp32_partitioned_groups_flat):
        # A sub-group's parts lie one after another, each with its padding at the end
        pieces = []
        offset = 0
        for param in zero3.fp16_groups[i]:
            size = param.ds_tensor.numel()
            start = rank * size
            pieces.append(Piece(param, start, offset, max(0, min(size, param.ds_numel - start))))
            offset += size
        shards.append(
            Shard(
                master=master,
                half=halves[i],
                grads=grads[i],
                optimizer=zero3.optimizer,
                group_index=zero3.sub_group_to_group_id[i],
                pieces=tuple(pieces),
            )
        )
    return Zero3Layout(engine, tuple(shards))


# The optimizer in host memory


class DeepSpeedsAdam:
    """Steps of AdamW on flat tensors in host memory, by DeepSpeed's CPU Adam: see
    offload.HostAdam."""

    def __init__(self, adam: DeepSpeedCPUAdam) -> None:
        self.adam = adam

    def begin(self, options: dict) -> None:
        """Begin the pieces of a shard.

        CPU Adam multiplies powers of beta from step to step. After step 0 it computes them, as
        after a resume.
        """
        nothing = torch.empty(0)
        self.step(options, -1, nothing, nothing, nothing, nothing)

    def step(
        self,
        options: dict,
        done: int,
        master: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> None:
        """Step tensors. done: the number of steps before this one."""
        adam = self.adam
        beta1, beta2 = options["betas"]
        bias_correction = True
        adam.ds_opt_adam.adam_update(
            adam.opt_id,
            done + 1,
            options["lr"],
            beta1,
            beta2,
            options["eps"],
            options["weight_decay"],
            bias_correction,
            master,
            grads,
            exp_avg,
            exp_avg_sq,
        )
