"""Train GPT-2 with DeepSpeed ZeRO: from scratch, from OpenAI's weights, or from a checkpoint.

One process, without a launcher:

    python train_deepspeed.py config/shakespeare_char_cpu.py

4 GPUs of one node, in one of three ways (torchrun: see docs/trust.md):

    python launch_deepspeed.py --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py
    deepspeed --num_gpus=4 train_deepspeed.py config/xl_shakespeare.py
    torchrun --nproc_per_node=4 train_deepspeed.py config/xl_shakespeare.py

Several nodes (docs/multi_node.md), and to resume:

    python launch_deepspeed.py --nnodes=2 --node_rank=0 --master_addr=node1 ...
    python train_deepspeed.py config/xl_shakespeare.py --init_from=resume

One iteration is one optimizer step, with all of its micro-steps. Exit codes:
docs/troubleshooting.md.
"""

# -----------------------------------------------------------------------------
# The start: what has to come before everything else

import time

_process_start = time.monotonic()

import gc
import math
import os

gc.disable()  # until all is imported: it takes a sixth of the start (results/cpu_startup.json)

# A signal ends this process with one line. Once training has begun, the run saves first
from runtime.cluster.requests import SignalWatch, StopFile

_signals = SignalWatch()

from typing import Literal

import configurator
from runtime.cluster import exit_on_all_ranks
from runtime.output import protect_output

protect_output()

# -----------------------------------------------------------------------------
# Settings: overridden by config files and --key=value, see configurator.py and docs/settings.md.
# In --help, a comment that begins with a capital is a heading, any other continues the one above

# Output
out_dir = "out-shakespeare-xl-deepspeed"  # folder for checkpoints, history.jsonl and settings.json
eval_interval = 5  # iterations between evaluations, each of which saves a checkpoint
log_interval = 1  # iterations between lines on the console
eval_iters = 20  # batches per evaluation and split, over all ranks together: eval_iters x
# batch_size sequences
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # save at every evaluation; False: only if the validation loss
# improved, and at the end
# Initialization
init_from = "gpt2-xl"  # source of the weights: scratch, gpt2*, a folder of weights, a nanoGPT
# ckpt.pt, an earlier run's out_dir (its best checkpoint) or out_dir/tag; resume: this out_dir's
# run; auto: resume if there is one
seed = 1337  # random seed of weights, data order and dropout
# Loggers
wandb_log = False  # log to Weights & Biases; set WANDB_MODE=offline if there is no network
wandb_project = "gpt2-deepspeed"  # project in Weights & Biases
wandb_run_name: str | None = None  # run name in Weights & Biases; None: the name of out_dir
tensorboard_log = False  # log to out_dir/tensorboard
# Data
dataset: str | dict = "shakespeare"  # folder in data/, a path, or a weighted mixture:
# {"mine": 0.3, "other": 0.7}
gradient_accumulation_steps = 32  # micro-steps per GPU and iteration, as in DeepSpeed (nanoGPT:
# over all GPUs)
batch_size: int | Literal["auto"] = 1  # sequences per GPU and micro-step; auto: as many as fit,
# with the same total
batch_ramp: str | None = None  # smaller steps at first: "8@0, 16@0.1, 32@0.3" takes 8 sequences
# per step, 16 after a tenth of all tokens, and then 32, the batch of the other settings
block_size = 1024  # tokens per sequence
length_ramp: str | None = None  # shorter sequences at first: "256@0, 512@0.2, 1024@0.45" cuts them
# to 256 tokens, after a fifth of all tokens to 512, and then trains on all of block_size
# Model
n_layer: int | None = None  # number of blocks; None: from the weights, or 12 from scratch
n_head: int | None = None  # attention heads per block; None: from the weights, or 12 from scratch
n_embd: int | None = None  # embedding width; None: from the weights, or 768 from scratch
bias: bool | None = None  # biases in linear layers and layer norms; None: from the weights,
# or True from scratch
dropout = 0.0  # dropout probability; 0 for pretraining, 0.1 or more for fine-tuning
gradient_checkpointing = False  # recompute activations in backward: less memory, 1.31x to 1.45x
# the time per step
# Optimizer
optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of blocks, AdamW for the
# rest; best from scratch
learning_rate = 3e-5  # peak learning rate of AdamW
muon_learning_rate = 0.02  # peak learning rate of Muon
max_iters = 20  # iterations in total, those before a resume included
weight_decay = 1e-1  # weight decay of matrices; biases and layer norms have none
beta1 = 0.9  # decay rate of the first moment
beta2 = 0.95  # decay rate of the second moment
grad_clip = 1.0  # maximum gradient norm; 0: no clipping
compact_optimizer = False  # 4 bytes of optimizer state per parameter instead of 12 (Muon: 8): 8-bit
# moments, the fp32 weight as bfloat16 and a remainder (bfloat16 at ZeRO-2 without offload)
# Learning rate schedule
decay_lr = True  # follow lr_schedule; False: constant learning_rate without warmup
lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"  # shape after warmup
warmup_iters = 0  # iterations of linear warmup
lr_decay_iters: int | None = None  # iteration at which the learning rate reaches min_lr; None:
# max_iters
min_lr: float | None = None  # final learning rate; None: learning_rate / 10
# System
deepspeed_config = "ds_config_zero2.json"  # DeepSpeed's JSON: ZeRO stage, offload, bucket sizes
device: Literal["auto", "cuda", "cpu"] = "auto"  # hardware; auto: CUDA if there is a GPU
dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # precision; auto: by the GPU,
# float32 on CPU
backend: Literal["auto", "nccl", "gloo"] = "auto"  # communication library; auto: NCCL on GPUs,
# gloo on CPU
compile: bool | Literal["auto"] = "auto"  # Triton kernels and torch.compile; auto: on GPUs of
# compute capability 8.0 and up, if there is a C compiler

# -----------------------------------------------------------------------------
# Settings that most runs leave as they are

# LoRA
lora_rank = 0  # rank of the adapters; 0: train all weights
lora_alpha: float | None = None  # multiply the adapters' output by lora_alpha / lora_rank; None:
# lora_rank
lora_dropout = 0.0  # dropout probability on the adapters' input
lora_target_modules = "attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj"  # matrices of each block
# with adapters
# Length of the run
max_epochs: float | None = None  # length in epochs, instead of max_iters; None: use max_iters
eval_epochs: float | None = None  # epochs between evaluations, instead of eval_interval; None: use
# eval_interval
patience: int | None = None  # evaluations without a better validation loss before the run
# stops; None: never stop early
max_skipped_steps = 10  # consecutive skipped steps (non-finite gradients, spikes) before the run
# saves and exits
skip_grad_spikes = False  # skip steps with a gradient norm far above the recent median
on_rising_norms: Literal["warn", "stop"] = "warn"  # what to do when gradient norms rise; stop:
# save and exit
# Checkpoints
resume_tag = "latest"  # checkpoint to resume from (iter_10, best); latest: the newest intact one
keep_last = 3  # number of newest checkpoints to keep besides best and final; 0: save nothing
async_save = True  # write checkpoints in the background; False: training waits
overwrite = False  # delete the run in out_dir, or the checkpoints newer than resume_tag
# Planning, profiling and samples
dry_run = False  # check everything, print the run and its memory estimate, and exit
target_gpu: float | str | None = None  # GPU for dry_run's estimate, in GB or by name (A100,
# 4090); None: this machine's
profile = False  # write a trace of the 6th and 7th step and the model's FLOPs into out_dir/profile
sample_interval = 0  # iterations between printed samples; 0: none
sample_start = "\n"  # prompt of the samples
sample_tokens = 100  # length of a sample in tokens, at most block_size
# Speed
accumulate_locally: bool | Literal["auto"] = "auto"  # fp32 gradients on each rank, reduced once
# per step (ZeRO-2, 3): faster, but 4 bytes per parameter; auto: if a fifth of the GPU stays free
cuda_graph: bool | Literal["auto"] = "auto"  # replay micro-steps as a CUDA graph, where our
# kernels step; auto: if a proof finds that each micro-step does the same (True: without it): no
# choice by the data, or by Python's own state
fp8 = False  # FP8 matmuls in the blocks; Hopper and later
deterministic = False  # bitwise reproducible on the same GPUs, but slower

settings = configurator.settings_of_script(__file__, on_error=exit_on_all_ranks)  # a dataclass
stop_file = StopFile(os.path.join(settings.out_dir, "STOP"))  # one there now is an earlier run's

# -----------------------------------------------------------------------------
# Imports: here, because PyTorch takes seconds, and a mistake in the settings is reported before

import torch

if settings.device == "cpu" or not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

from runtime import lora
from runtime.check.short import check_before_training
from runtime.checkpoint.load import load_model
from runtime.checkpoint.resume import newest_intact, note_another_schedule
from runtime.checkpoint.saver import Saver
from runtime.checkpoint.tags import TagStore
from runtime.chosen_model import GPT  # another model: change the import there, for all scripts
from runtime.cluster.join import join_process_group
from runtime.cluster.ranks import (
    all_exit_on,
    all_reduce_sum,
    broadcast_from_rank0,
    print0,
    ranks_from_environment,
    shut_down,
)
from runtime.cluster.shutdown import EXIT_REASONS, Shutdown, StopCheck
from runtime.data.loader import TrainBatches, eval_batches, switch_threads_quickly
from runtime.data.permutation import mixed_seed
from runtime.data.tokenizer import token_bytes
from runtime.engine import setup
from runtime.engine.engine import Engine
from runtime.engine.fast_paths import confirm
from runtime.engine.muon import split_matrices
from runtime.errors import UserError
from runtime.model_parts import evaluating
from runtime.monitor.estimate import LossSums
from runtime.monitor.health import StepHealth
from runtime.monitor.profiler import Profiler
from runtime.monitor.runlog import RunLog
from runtime.plan.memory import estimate
from runtime.plan.report import explain_out_of_memory, memory_report, optimizer_line, summary
from runtime.plan.rules import evaluations_through
from runtime.plan.run_plan import plan_run
from runtime.plan.start import check_class, check_model, saved_state
from runtime.sample.generate import sample_while_training

gc.freeze()  # what the imports have made stays, so don't look through it again
gc.enable()

# -----------------------------------------------------------------------------
# Ranks and plan: join the other ranks, and check the settings on this machine. If there are
# problems, all of them are printed, and all ranks exit

ranks = ranks_from_environment(settings.dry_run)
if not settings.dry_run:
    # From here on, watch the other ranks and the launcher, too. The file STOP: see below
    peers = join_process_group(settings.device, settings.backend)
    shutdown = Shutdown(peers, _signals)
elif ranks.rank != 0:
    raise SystemExit(0)  # rank 0 plans for all

plan = plan_run(settings, ranks)
# batch_size and the numbers of iterations are resolved. dtype, compile and others may still be
# "auto": see execution and plan.paths
settings = plan.settings
batch = plan.batch
# How many sequences each step takes, and how long they are. If you rename `ramp`, change
# names_of_ramp() in runtime/plan/ramps.py, too: it looks for ramp.length() and others in the loop
ramp = plan.ramp
execution = plan.execution
globals().update(vars(settings))  # before this, settings' names hold their defaults
print0(summary(plan))
if dry_run:
    print0(memory_report(plan, ranks))
    raise SystemExit(0)

# -----------------------------------------------------------------------------
# Device, output folder, and the tag to resume from

device = setup.setup_device(execution, ranks.local_rank, plan.ds_config, deterministic)
explain_out_of_memory(plan)
store = TagStore(out_dir, read_only=eval_only)  # locked until this process ends
if not eval_only:
    shutdown.watch_stop_file(stop_file)
# All ranks share the hashing of a tag. If nothing is saved, each node may have its own out_dir
hashing_share = (ranks.rank, ranks.world_size)
if eval_only or not keep_last:
    hashing_share = (ranks.local_rank, ranks.local_world_size)
resumes = plan.start.kind == "resume"
# tag: None unless this resumes. corrupt_tags: those that are newer and damaged
tag, corrupt_tags = newest_intact(store, resumes, resume_tag, overwrite, hashing_share)

# -----------------------------------------------------------------------------
# Model

shutdown.exit_if_requested()  # here and below: places where STOP ends a run without a step
torch.manual_seed(seed)  # the same weights on every rank
with all_exit_on(UserError):
    check_class(GPT)
    if plan.start.kind == "earlier run":
        model, _ = load_model(
            *plan.start.parent,
            of_run=plan.model,
            share=(ranks.local_rank, ranks.local_world_size),  # a node may have its own files
            device=device,
            model_class=GPT,
        )
        model.train()
    elif plan.start.kind == "pretrained":
        model = GPT.from_pretrained(
            plan.start.weights,
            dropout=dropout,
            device=device,
            dtype=execution.torch_dtype,
            config=plan.model,
        )
    else:  # from scratch, or to be loaded from the tag to resume from
        with torch.device(device):
            model = GPT(plan.model)
    model.crop_block_size(block_size)
    check_model(plan, model)
if plan.lora:
    lora.apply(model, plan.lora)
model.gradient_checkpointing = gradient_checkpointing
flops_per_token = {n: model.flops_per_token(n) for n in ramp.possible_lengths}  # n: context
profiler = Profiler(model, out_dir) if profile else None  # before compiling

# Our Triton kernels where they fit, else torch.compile
plan = confirm(plan, model)  # the model may not be as planned
fused = setup.compile_blocks(model, plan.paths, execution, fp8)
if plan.stage == 3:
    setup.gather_whole_modules(model)

# -----------------------------------------------------------------------------
# Optimizer: one AdamW holds all groups, and engine/step.py steps Muon's by their "kind". If you
# rename `adamw` or make_adamw(), change OUR_OPTIMIZER in plan/report.py: it looks for the text

shutdown.exit_if_requested()
groups = model.parameter_groups(weight_decay)
if optimizer == "muon":
    lr_ratio = muon_learning_rate / learning_rate
    with all_exit_on(UserError):
        groups = split_matrices(groups, model, lr_ratio, batch.world_size)
adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))
print0(optimizer_line(plan, adamw))
masked = bool(plan.data["template"])  # only some tokens are targets
with all_exit_on(UserError):  # a short check of an edited model, or of another optimizer
    check_before_training(
        model, plan.model, adamw, recomputes=gradient_checkpointing, masked=masked
    )

# -----------------------------------------------------------------------------
# Engine: DeepSpeed's, with our gradients and step where they fit

deepspeeds_engine = setup.initialize(
    model, adamw, plan.ds_config, masked=masked, scales_loss=fused is not None
)
print0(f"DeepSpeed uses {setup.describe(deepspeeds_engine, plan.ds_config, execution.dtype)}")
engine = Engine(deepspeeds_engine, plan.paths, fused, masked=masked)

# -----------------------------------------------------------------------------
# The state of the run: that of the tag, or a new one

shutdown.exit_if_requested()
state = {}  # what save() had recorded; manifest.json has it as "state"
if tag:
    with all_exit_on(UserError):
        state = engine.load(store, tag)
iter_num = state.get("iter_num", 0)
first_iter = iter_num
evals_since_best = state.get("evals_since_best", 0)
lr = state.get("lr")  # of the last step
evaluation_is_owed = state.get("evaluation_is_due", False)  # a stop ended it: make it up
vocab_size = plan.data["vocab_size"]

# The bytes of each token, for the loss per byte
sizes = broadcast_from_rank0(token_bytes(plan.data, fetch=False).tolist())
bytes_of_tokens = torch.tensor(sizes, device=device)

# What the run reports, and its watch over gradients
log = RunLog(
    settings,
    plan.start.sources,
    state,
    device,
    plan.datasets,
    flops_per_token=flops_per_token,
    ramp=ramp,
    memory_plan=estimate(plan),
    process_start=_process_start,
)
log.start_loggers()
health = StepHealth(log.warn, state, skip_grad_spikes)

# The training data, from where the tag's run was
switch_threads_quickly()  # a thread reads the batches
mixture = [(source, data.share) for source, data in zip(plan.sequences["train"], plan.datasets)]
position = state.get("sequences", 0)
batches = TrainBatches(mixture, position, batch, ranks.rank, seed, vocab_size, device)

# -----------------------------------------------------------------------------
# The parts of the loop


def get_lr(it: int) -> float:
    """Return the learning rate of the iteration after `it` finished ones."""
    if not decay_lr:
        return learning_rate
    # 1) linear warmup
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if lr_schedule == "constant":
        return learning_rate
    # 2) decay to the lowest, where it stays, by the share of tokens
    decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
    lowest = learning_rate / 10 if min_lr is None else min_lr
    begin = ramp.sequences_before(warmup_iters)
    end = ramp.sequences_before(decay_iters)
    progress = min(1.0, (ramp.sequences_before(it) - begin) / max(1, end - begin))
    if lr_schedule == "linear":
        remaining = 1 - progress
    else:
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return lowest + remaining * (learning_rate - lowest)


def estimate_loss() -> dict[str, list] | None:
    """Return {split: an Estimate of each dataset}, or None if a stop is requested meanwhile."""
    stop_check = StopCheck(shutdown)
    losses: dict[str, list] = {"train": [], "val": []}
    with evaluating(model):
        for split, estimates in losses.items():
            for source in plan.sequences[split]:  # the same windows each time
                sums = LossSums(device)
                own_batches = eval_batches(
                    source, plan.eval_windows, batch, ranks.rank, vocab_size, device
                )
                for x, y in own_batches:
                    sums.add(engine.evaluate(x, y), y, bytes_of_tokens[y])
                    if stop_check.is_requested():
                        return None
                estimates.append(sums.estimate())  # over all ranks
    return losses


def evaluate() -> float | None:
    """Print and record the losses. Return that of validation, or None if a stop is requested."""
    start = time.monotonic()
    losses = estimate_loss()
    if losses is None:
        print0(f"step {iter_num}: the evaluation is not finished")
        return None
    return log.evaluation(iter_num, losses, time.monotonic() - start)  # which weighs a mixture


def evaluate_and_save() -> bool:
    """Evaluate, and save a tag if one is due. Return whether this iteration's tag is settled: it is
    being saved, or its loss is not finite. If a stop ends the evaluation, a resume makes it up."""
    global best_val_loss, evals_since_best, evaluation_is_owed, code_if_finished
    was_owed = evaluation_is_owed
    val_loss = evaluate()
    evaluation_is_owed = val_loss is None
    if evaluation_is_owed:
        return False

    improved = val_loss < best_val_loss
    best_val_loss = min(best_val_loss, val_loss)  # in this order, NaN doesn't become the best
    evals_since_best = 0 if improved else evals_since_best + 1
    # was_owed: the tag on the disk says that an evaluation is due, so it is written again
    if not (improved or always_save_checkpoint or finished() or was_owed):
        return False
    if math.isfinite(val_loss):
        save(improved)
        code_if_finished = 0
    else:
        log.not_saved()
        code_if_finished = 2
    return True


def loss_is_finite() -> bool:
    """Return whether a validation batch's loss is finite on all ranks: NaN weights make it NaN."""
    source = plan.sequences["val"][0]
    own_batches = eval_batches(source, plan.eval_windows, batch, ranks.rank, vocab_size, device)
    x, y = next(own_batches)
    with evaluating(model):
        loss = engine.evaluate(x, y).masked_fill(y < 0, 0).double().sum()
    (total,) = all_reduce_sum(loss)
    return math.isfinite(total)


def steps_done(in_epochs: bool) -> float:
    """Return iter_num; for a length in epochs, the sequences so far, in steps of planned size."""
    return batches.position / batch.sequences if in_epochs else iter_num


def evaluations_so_far() -> int:
    """Return how many evaluations a run up to here makes."""
    return evaluations_through(steps_done(in_epochs=eval_epochs is not None), settings)


def at_end() -> bool:
    """Return whether all iterations, or with max_epochs all epochs, are done."""
    return steps_done(in_epochs=max_epochs is not None) >= max_iters


def finished() -> bool:
    """Return whether the run and its last evaluation are done, or patience has run out."""
    if evaluation_is_owed:
        return False
    return at_end() or (patience is not None and evals_since_best >= patience)


def aliases(improved: bool | None) -> list[str]:
    """Return the other names of this iteration's tag: best if the loss improved, final if done."""
    names = []
    if improved:
        names.append("best")
    if finished():
        names.append("final")
    return names


def save(improved: bool) -> None:
    """Start saving this iteration's tag, with all that a resume needs besides the engine's."""
    record = {
        "iter_num": iter_num,
        "sequences": batches.position,  # of the training data so far
        "best_val_loss": best_val_loss if math.isfinite(best_val_loss) else None,
        "evals_since_best": evals_since_best,
        "lr": lr,
        "improved": improved,
        "evaluation_is_due": evaluation_is_owed,
        "wandb_id": log.wandb_id,
        "grad_norms": list(health.spikes.norms),
        "grad_norm_ratios": list(health.spikes.ratios),
        **saved_state(plan, model),
    }
    saver.save(f"iter_{iter_num}", aliases(improved), record)


# -----------------------------------------------------------------------------
# Before the loop: open the output after all checks, because it may delete, and evaluate

with all_exit_on(OSError):
    store.clean(tag, corrupt_tags, overwrite, aliases(state.get("improved")))
    best = store.find_best() if ranks.rank == 0 else None
_, best_val_loss = broadcast_from_rank0(best)  # of the tags that are left, not of `state`
log.open_files()
saver = Saver(engine, store, keep_last, plan.tag_bytes, async_save, on_saved=log.saved)
exit_code = None  # of a stop
code_if_finished = 0  # 2: the last loss is not finite. A stop in the last step doesn't count
if iter_num == 0 or eval_only:
    evaluate()
elif at_end() and not evaluation_is_owed:
    longer = "--max_iters" if max_epochs is None else "--max_epochs"
    path = store.path(tag.name)
    print0(f"{path} is at iteration {iter_num} already: resume with a larger {longer}")
elif not at_end():
    note_another_schedule(lr, get_lr(iter_num - 1), get_lr(iter_num), iter_num)

shutdown.exit_if_requested()
if not eval_only:
    shutdown.begin_training()  # a stop saves from here on
    if evaluation_is_owed:
        evaluate_and_save()
        exit_code, _ = shutdown.agree()

# -----------------------------------------------------------------------------
# The loop

if profiler:
    profiler.start()
log.restart_clock(iter_num, batches)  # starts it
while not finished() and not eval_only and exit_code is None:
    evaluations_before = evaluations_so_far()

    # the learning rate, and dropout's random numbers, which are the same after a resume
    torch.manual_seed(mixed_seed(seed, iter_num, ranks.rank))
    lr = get_lr(iter_num)
    for group in adamw.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1)  # of a group with its own

    # one optimizer step
    micro_steps = ramp.micro_steps(iter_num)
    micro = ramp.micro(iter_num)  # sequences per GPU in each
    loss = torch.zeros((), device=device)
    for micro_batch in batches.next_step(micro_steps, ramp.length(iter_num), micro):
        loss += engine.micro_step(*micro_batch)  # forward and backward
    iter_num += 1
    step = engine.step(skip_above=health.skip_above())  # reduce and clip the gradients, update
    loss /= micro_steps  # as the gradients: the mean over the step

    # check and log it
    health.check(step, loss, iter_num)  # warns about a skipped step, a spike or norms that rise
    if iter_num % log_interval == 0 or iter_num == first_iter + 1 or at_end():
        share = steps_done(in_epochs=max_epochs is not None) / max_iters  # of the run
        if batch_ramp:
            share = ramp.sequences_before(iter_num) / ramp.total
        log.step(
            iter_num, loss, lr, step, batches, share=share, own_work_s=engine.own_work_seconds()
        )

    # evaluate, and save a tag
    tag_is_settled = False
    if evaluations_so_far() > evaluations_before or at_end():
        tag_is_settled = evaluate_and_save()

    # print a sample
    if sample_interval and iter_num % sample_interval == 0:
        encode, decode = plan.tokenizer
        ids = sample_while_training(
            model,
            vocab_size,
            encode(sample_start),
            sample_tokens,
            seed=(seed + iter_num) % 2**63,
            is_stopped=StopCheck(shutdown).is_requested,
        )
        if ids is not None:
            log.sample(iter_num, decode(ids))

    # no step's time includes an evaluation, a sample or the end of a trace
    trace_ends = profiler is not None and profiler.step()
    log.restart_clock(iter_num, batches, paused=trace_ends)

    # exit together: a signal, STOP, norms that rise, a failed save, or too many skipped steps
    if health.rise and on_rising_norms == "stop":
        shutdown.request_exit(4)  # on all ranks
    exit_code, save_failed = shutdown.agree(bool(saver.failed))
    if health.skipped_in_a_row > max_skipped_steps:
        exit_code = 3
        shutdown.announce(f"stop requested ({EXIT_REASONS[3]})")
    if save_failed:
        saver.wait_or_exit()
    if exit_code is not None and not finished():
        print0(f"exiting after step {iter_num}")
        if not tag_is_settled:
            is_finite = True
            if health.skipped_in_a_row:  # maybe because the weights are NaN
                is_finite = loss_is_finite()
            if is_finite:
                save(improved=False)
            else:
                log.not_saved()

# -----------------------------------------------------------------------------
# The end

if profiler:
    profiler.close()
saver.wait_or_exit()
log.close(
    finished=finished() and not eval_only,
    evals_since_best=None if at_end() else evals_since_best,  # the run has stopped early
)
if finished():
    exit_code = code_if_finished
shut_down(exit_code or 0)
