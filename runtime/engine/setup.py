"""Set up what training needs: the device, compiled blocks, the optimizer, DeepSpeed's engine, and
our gradients and step in it."""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from runtime.cluster.ranks import all_exit_on, all_reduce_sum, print0, silence_stdout
from runtime.engine.any_optimizer import (
    check_elementwise,
    check_state,
    describe_optimizer,
    is_adamw,
    keep_rates_of_groups,
    optimizer_name,
    satisfy_scheduler,
)
from runtime.engine.ds_config import takes_our_gradients, uses_offload
from runtime.engine.fast_paths import FastPaths, check_trainable
from runtime.engine.forward_backward import use_stream_for_capture
from runtime.engine.layout import (
    Layout,
    avoid_compilation,
    save_stage_by_its_class,
    set_loss_scale,
    skip_at_lowest_scale,
)
from runtime.engine.muon import is_muon
from runtime.engine.reduce import BucketedAllReduce, LocalAccumulation
from runtime.engine.step import OurStep, Reduction
from runtime.engine.zero3_blocks import Zero3Blocks, blocks_to_gather
from runtime.errors import UserError
from runtime.hardware import Execution, attention_backends
from runtime.kernels.fit import blocks_of, why_changed

if TYPE_CHECKING:
    from runtime.kernels.fused import FusedBlocks


def setup_device(
    execution: Execution, local_rank: int, ds_config: Mapping, deterministic: bool = False
) -> torch.device:
    """Set up this rank's device, and DeepSpeed on the process group. Return the torch.device."""
    device = torch.device("cpu")
    if execution.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if takes_our_gradients(ds_config):  # DeepSpeed's stage 3 relies on the default stream
            use_stream_for_capture()
        torch.set_float32_matmul_precision("high")  # TF32 for matmuls that are still in float32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    # DeepSpeed uses old names
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    avoid_compilation()
    save_stage_by_its_class()
    level = "INFO" if ds_config.get("wall_clock_breakdown") else "WARNING"
    deepspeed.utils.logger.setLevel(level)
    deepspeed.init_distributed(verbose=False)
    return device


def compile_blocks(
    model: nn.Module, paths: FastPaths, execution: Execution, fp8: bool = False
) -> "FusedBlocks | None":
    """Run those blocks by our Triton kernels that the paths say, and the others by torch.compile if
    the execution does. Return our blocks, or None."""
    fused = None
    choose_attention_backends(model)
    if paths.kernels.taken:
        # Not at the top of the file: examples/animals90 has no such blocks
        from runtime.kernels.fused import use_fused_blocks

        with all_exit_on(UserError):
            fused = use_fused_blocks(model, fp8, paths.copies.taken)
        if not fused.blocks:  # the script has changed all of them since the paths were chosen
            fused = None

    # The blocks that our kernels don't run
    blocks = list(dict.fromkeys(blocks_of(model)))
    if fused is not None:
        for block in blocks:
            if block not in fused.blocks:
                compile_block(block)
    elif execution.compile and hasattr(model, "compile_blocks"):
        model.compile_blocks()
    elif execution.compile:
        for block in blocks:
            compile_block(block)
    return fused


def choose_attention_backends(model: nn.Module) -> None:
    """Set what CausalSelfAttention would set in its first forward. Compiled blocks would be
    compiled anew at the second one, which may be in the capture of a CUDA graph."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return
    for block in blocks_of(model):
        attention = getattr(block, "attn", None)
        if getattr(attention, "backends", ()) is None:
            attention.backends = attention_backends(device)


def gather_whole_modules(model: nn.Module) -> None:
    """Have DeepSpeed's own ZeRO-3 gather the weights of a whole block at a time, not of each layer:
    7.4 instead of 12.5 s per step on 4 H200s at 1 x 32. Then compiled code has no hooks inside, on
    which dynamo fails. Where our gradients are taken, connect() removes these hooks, and
    Zero3Blocks gathers.

    Also those of an edited output layer with layers in it, because its forward runs backward, too.
    """
    # Each class once: DeepSpeed looks for its modules by class
    classes = list(dict.fromkeys(type(block) for block in blocks_of(model)))
    head = getattr(model, "lm_head", None)
    if head is not None and len(list(head.children())):
        classes.append(type(head))
    if classes:
        deepspeed.utils.set_z3_leaf_modules(model, classes)


def compile_block(block: nn.Module) -> None:
    """Compile a block's forward without a cache, with which each length would be compiled anew.
    Hooks stay outside compiled code."""
    # Our blocks have a forward without a cache, which alone is compiled
    if hasattr(block, "forward_uncached"):
        block.forward_uncached = torch.compile(block.forward_uncached)
        return
    eager = block.forward
    compiled = torch.compile(eager)
    plain = (torch.Tensor, bool, int, float, type(None))

    def forward(*args: Any, **named: Any) -> Any:
        # A cache is an object of its own
        has_cache = any(not isinstance(value, plain) for value in (*args, *named.values()))
        if has_cache:
            return eager(*args, **named)
        return compiled(*args, **named)

    block.forward = forward


def make_adamw(groups: list, ds_config: Mapping, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW for these parameter groups. options: lr and betas.

    With offload it is DeepSpeed's CPU Adam, which is compiled on first use, or PyTorch's if that
    fails.
    """
    if not uses_offload(ds_config):
        return torch.optim.AdamW(groups, fused=True, **options)
    print0(
        "note       offload: DeepSpeed compiles its CPU Adam on first use, in a minute or more; if "
        "it hangs, delete the file `lock` that an interrupted build left under "
        "~/.cache/torch_extensions"
    )
    try:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    except Exception as error:  # the build raises many kinds
        print0(
            f"note       cannot build DeepSpeed's CPU Adam ({type(error).__name__}), so PyTorch's "
            "slower AdamW is used: install a C++ compiler and ninja"
        )
        return torch.optim.AdamW(groups, **options)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ds_config: Mapping,
    masked: bool = False,
    scales_loss: bool = False,
) -> DeepSpeedEngine:
    """Return DeepSpeed's engine, with buckets no larger than all gradients: DeepSpeed allocates two
    of `reduce_bucket_size` however small the model is, 2 GB in float16 by default.

    scales_loss: parts of a bfloat16 model's backward are in float16. masked: only some tokens are
    targets. Each of them has a larger gradient then, so the loss scale that keeps float16 in range
    is smaller.
    """
    # What can't be trained ends all ranks here, and not in the middle of a collective
    with all_exit_on(UserError):
        check_state(optimizer)
        keep_rates_of_groups(optimizer)
        check_trainable(model)
        changed = why_changed(model)
        if changed:
            raise UserError(changed)

    if satisfy_scheduler(optimizer):
        print0(
            "note       no checkpoint has the state of an lr_scheduler: save it in save() and load "
            "it after a resume, or write the schedule in get_lr()"
        )

    # The config, with what depends on the model and the optimizer
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    zero = dict(ds_config["zero_optimization"])
    zero["reduce_bucket_size"] = min(trained, int(zero.get("reduce_bucket_size", 5e8)))
    config = {**ds_config, "zero_optimization": zero}
    if not isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam):  # not built, or not wanted
        config["zero_force_ds_cpu_optimizer"] = False
    if not is_adamw(optimizer):
        with all_exit_on(UserError):
            check_groups(optimizer)
            check_elementwise(optimizer, list(model.parameters()))
        config["zero_allow_untested_optimizer"] = True
        print0(
            f"note       the optimizer {optimizer_name(optimizer)} is stepped by its own step(), "
            "not by our kernels"
        )

    with silence_stdout(), without_warning("untested optimizer"):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    skip_at_lowest_scale(engine)
    if engine.bfloat16_enabled() and scales_loss:
        fit_loss_scale(engine, planned_tokens(engine), masked)
    return engine


def planned_tokens(engine: DeepSpeedEngine) -> int:
    """Return the tokens of a micro-batch, by the settings."""
    return engine.train_micro_batch_size_per_gpu() * engine.module.config.block_size


def fit_loss_scale(engine: DeepSpeedEngine, micro_tokens: int, masked: bool) -> None:
    """Set the loss scale for kernels that are in float16. micro_tokens: of a micro-batch. masked:
    only some of them are targets."""
    # DeepSpeed divides the loss, a mean, by its number of micro-steps, whatever a step makes
    tokens = micro_tokens * engine.gradient_accumulation_steps()
    # float16 then sees each target's gradient times 16 to 32. With a mask, it sees it times 1 to 2,
    # divided by the share of the tokens that are targets
    largest = tokens if masked else 16 * tokens
    set_loss_scale(engine, 2.0 ** largest.bit_length())


@contextlib.contextmanager
def without_warning(words: str) -> Iterator[None]:
    """Keep DeepSpeed from logging a warning with these words. It would contradict what is printed
    here."""

    def is_other(record: logging.LogRecord) -> bool:
        return words not in record.getMessage()

    logger = deepspeed.utils.logger
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def silence_skipped_steps() -> None:
    """Keep DeepSpeed from logging that the gradients of a skipped step weren't finite. They may
    only have been too large, and StepResult says what happened."""
    deepspeed.utils.logger.addFilter(is_of_no_skipped_step)


def is_of_no_skipped_step(record: logging.LogRecord) -> bool:
    """Return whether DeepSpeed logs something else than a skipped step."""
    return "Skipping step" not in record.getMessage()


def check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the groups of an optimizer of another kind are Muon's: their matrices
    would get Muon's learning rate."""
    if any(is_muon(group) for group in optimizer.param_groups):
        raise UserError(
            "optimizer=muon gives the matrices of the blocks a learning rate for Muon, and the "
            f"optimizer is {describe_optimizer(optimizer)}: add --optimizer=adamw, or put AdamW "
            "back"
        )


def describe(engine: DeepSpeedEngine, ds_config: Mapping, dtype: str) -> str:
    """Return one line on what the engine uses. Raises RuntimeError if it differs from the
    settings."""
    # What the engine says of itself, and what it was asked for
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    weights, grads = engine.get_data_types()
    used = {
        "stage": int(engine.zero_optimization_stage()),
        "micro-batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "dtype": str(weights).removeprefix("torch."),
        "gradients": str(grads).removeprefix("torch."),
    }
    wanted = {
        "stage": ds_config["zero_optimization"]["stage"],
        "micro-batch": ds_config["train_micro_batch_size_per_gpu"],
        "accumulation": ds_config["gradient_accumulation_steps"],
        "clipping": ds_config["gradient_clipping"],
        "dtype": dtype,
        "gradients": names[ds_config.get("data_types", {}).get("grad_accum_dtype", "fp32")],
    }
    wrong = []
    for name, value in used.items():
        if value != wanted[name]:
            wrong.append(f"{name} {value}, not {wanted[name]}")
    if wrong:
        raise RuntimeError(f"DeepSpeed uses {'; '.join(wrong)}")
    return ", ".join(f"{name} {value}" for name, value in used.items())


def replace_gradients_and_step(
    layout: Layout, paths: FastPaths, check_turn: Callable[[], None] = lambda: None
) -> OurStep | None:
    """Replace DeepSpeed's gradients and step where the paths take ours. Return our step, or None.

    check_turn: called before each gradient is taken.
    """
    if not paths.gradients.taken:
        return None
    if paths.compact.taken:
        with all_exit_on(UserError):
            if not is_adamw(layout.optimizer):
                raise UserError(
                    "compact_optimizer=True is for AdamW and Muon, and the optimizer is "
                    f"{describe_optimizer(layout.optimizer)}: drop the setting"
                )
        layout.make_compact()
    # Do the gradients of micro-steps stay on their rank? One rank has nothing to reduce, whatever
    # paths.local says. A plan is the same on all ranks, but a caller may come without one
    local = layout.world_size == 1
    if not local:
        local = all_reduce_sum(paths.local.taken)[0] == layout.world_size

    # What takes the gradients to the shards
    reduction: Reduction
    if layout.stage == 3:
        blocks: list[nn.Module] = []
        if paths.by_block.taken:
            blocks, _ = blocks_to_gather(layout.module)
        reduction = Zero3Blocks(layout, blocks, local)
    elif local:
        reduction = LocalAccumulation(layout)
    else:
        reduction = BucketedAllReduce(layout)
    return OurStep(layout, reduction, use_kernel=paths.step.taken, check_turn=check_turn)
