"""Make the plan of a run: all that its settings amount to on this machine, or every reason why they can't work."""

import os
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from runtime.bring import Adapter
from runtime.checkpoint.saver import tag_bytes
from runtime.checkpoint.tags import TagStore
from runtime.chosen_model import GPT
from runtime.cluster.nodes import exit_if_ranks_differ
from runtime.cluster.ranks import exit_together
from runtime.data.dataset import SPLITS
from runtime.data.loader import Batch
from runtime.data.mixture import open_datasets
from runtime.data.sequences import open_sequences
from runtime.data.tokenizer import tokenizer_of
from runtime.engine import ds_config, fixes
from runtime.engine.fast_paths import Choice, check_trainable, first_reason, inspect_model
from runtime.engine.zero3_blocks import blocks_to_gather
from runtime.errors import UserError
from runtime.files import format_bytes, free_bytes, nearest_existing_dir, refuse_broken_link
from runtime.hardware import Execution, available_memory, find_gpu, pick_compile, pick_device, pick_dtype
from runtime.kernels import device_has_triton
from runtime.lora import apply as apply_lora
from runtime.lora import lora_config
from runtime.model_parts import without_memory
from runtime.output import counted
from runtime.plan import memory
from runtime.plan.advice import fit_batch
from runtime.plan.memory import MemoryInputs, ParamCount
from runtime.plan.rules import broken_rules, evaluations_through, plan_iterations
from runtime.plan.start import Start, find_start
from runtime.plan.unread import unread_settings
from runtime.sample.generate import escape_note


@dataclass(frozen=True, kw_only=True)
class RunPlan(MemoryInputs):
    """Everything that is decided before a run starts, the same on all ranks."""

    settings: object  # from configurator.py, with "auto" resolved
    datasets: tuple
    data: dict | None  # {"tokenizer", "vocab_size", "template", "train_tokens", "val_tokens"} of all datasets together
    tokens: dict | None  # {split: the Sequences of each dataset}
    windows: int | None  # sequences per epoch
    start: Start
    lora: dict | None
    eval_windows: int  # per evaluation, over all ranks
    tag_bytes: int
    tokenizer: tuple | None  # (encode, decode), if sample_interval is set
    notes: tuple[str, ...]


class Problems(list):
    """All problems of the settings, each once, so that the user sees them together."""

    def add(self, *messages):
        self.extend(message for message in messages if message not in self)

    def attempt(self, function, *args):
        """Return function(*args). If it raises UserError or OSError, add the message and return None."""
        try:
            return function(*args)
        except (UserError, OSError) as error:
            self.add(str(error))


def plan_run(settings, ranks):
    """Return the RunPlan of the settings, the same on all ranks. If any rank has problems, print them all and exit with
    code 2 on all ranks. Everything that can be checked is checked here, before anything expensive starts."""
    problems = Problems()
    plan = make_plan(settings, ranks, problems, [])
    exit_together(problems)
    exit_if_ranks_differ(plan, ranks.local_world_size < ranks.world_size and not settings.dry_run)
    return plan


def make_plan(settings, ranks, problems, notes):
    """Return the RunPlan, or None if there are `problems`. With target_gpu, problems with this machine's files are only
    notes, and the plan may have no data or weights."""
    s, file_problems = settings, Problems()  # the latter: with the files of this machine, which may not be the target
    micro = s.requested["batch_size"] if s.batch_size == "auto" else s.batch_size
    batch = Batch(micro, s.gradient_accumulation_steps, ranks.world_size, s.block_size)
    problems.add(*broken_rules(s, micro), *unread_settings(s))
    if reason := fixes.unusable_deepspeed():
        problems[:] = [reason]  # the rest would use it
        return None
    execution = problems.attempt(detect_hardware, s, ranks, problems, notes)
    if execution is None:  # the rest would use it too
        return None
    config = problems.attempt(resolve_ds_config, s, batch, execution, notes)
    datasets, data = file_problems.attempt(open_datasets, s.dataset, s.block_size) or ((), None)
    notes += [f"{d.name} has no meta.json: assuming the {d.meta['tokenizer']['kind']} tokenizer"
              for d in datasets if not os.path.exists(os.path.join(d.folder, "meta.json"))]
    notes += ["without its dataset, the plan takes GPT-2's vocabulary"] * (data is None and s.init_from == "scratch")
    tokens, windows = not problems and file_problems.attempt(open_epoch, datasets, s.block_size, notes) or (None, None)
    s = plan_iterations(s, windows, batch, notes)
    lora = problems.attempt(lora_config, s)
    start = file_problems.attempt(find_start, s, data, lora, batch, notes)
    tokenizer = file_problems.attempt(sample_tokenizer, s, data, notes) if data and s.sample_interval else None
    params, facts, size = None, None, 0
    if start and not problems:
        params, facts = problems.attempt(count_params, start.model, lora, s.optimizer == "muon") or (None, None)
    if params:
        problems.attempt(check_kernels, s, start.model, execution, facts)
    if params and not problems:
        if params.muon and start.optimizer == "adamw":
            notes.append("optimizer=muon is for runs from scratch: measurements elsewhere favor AdamW for weights that "
                         "AdamW has trained (arXiv:2605.10468)")
        size = tag_bytes(params, execution.dtype, config["zero_optimization"]["stage"])
    file_problems.attempt(check_out_dir, s, start, size * (ranks.rank == 0), notes)
    if s.target_gpu is None or start is None:
        problems.add(*file_problems)
    if problems:
        return None
    run = MemoryInputs(start.model, execution, batch, params, config, s.gradient_checkpointing, fp8=s.fp8,
                       pretrained=start.kind == "pretrained", facts=facts, cuda_graph=s.cuda_graph,
                       whole_logits=issubclass(GPT, Adapter))
    if s.batch_size == "auto":
        batch = fit_batch(run)
        run = replace(run, batch=batch, ds_config=ds_config.with_batch(config, batch))
        notes.append(f"batch_size=auto: a micro-batch of {batch.micro} takes about "
                     f"{format_bytes(memory.bytes_with_eval(run))} with evals, of {format_bytes(execution.memory)}")
    local = local_accumulation(s, run)
    run = replace(run, accumulate_locally=local.taken, no_local=local.reason)
    if local.taken:
        notes.append(f"each rank accumulates gradients locally, in {format_bytes(4 * params.trainable)}; use "
                     "--accumulate_locally=False to save this memory")
    s = replace(s, batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation)
    run = replace(run, ds_config=MappingProxyType(run.ds_config))  # nobody changes it from here on
    return RunPlan(**vars(run), settings=s, datasets=tuple(datasets), data=data, tokens=tokens, windows=windows,
                   start=start, lora=lora, eval_windows=s.eval_iters * micro, tag_bytes=size,
                   tokenizer=tokenizer, notes=(
                       *notes, *repeats_in_a_step(s, datasets, tokens, batch),
                       *(f"on this machine, {line}" for line in "\n".join(file_problems).splitlines())))


def open_epoch(datasets, block_size, notes):
    """Return ({split: [Sequences]}, sequences per epoch). Note cut conversations. Raises UserError."""
    tokens = {split: [open_sequences(dataset, split, block_size) for dataset in datasets] for split in SPLITS}
    for dataset, source in zip(datasets, tokens["train"]):
        if source.cut:
            notes.append(f"{dataset.name}: {counted(source.cut, 'conversation')} longer than block_size={block_size}, "
                         f"cut at the end; {source.dropped:,} of them without an answer left, dropped")
    return tokens, sum(source.per_epoch for source in tokens["train"])


def repeats_in_a_step(s, datasets, tokens, batch):
    """Return a sentence for each dataset of which a step takes more sequences than an epoch has."""
    if s.eval_only or not tokens:
        return []
    shares = sum(dataset.share for dataset in datasets)
    sentences = []
    for dataset, source in zip(datasets, tokens["train"], strict=True):
        per_epoch = source.per_epoch
        per_step = batch.sequences * dataset.share / shares
        if per_step > per_epoch:
            sentences.append(
                f"{dataset.name} has {counted(per_epoch, 'sequence')} of block_size={batch.block_size}, and each step "
                f"takes {per_step:,.0f}, which are {per_step / per_epoch:.1f} epochs: use a smaller "
                "--gradient_accumulation_steps, or more data")
    return sentences


def detect_hardware(s, ranks, problems, notes):
    """Return the Execution of each rank. Raises UserError if there is none."""
    if s.target_gpu is not None:
        gpu = find_gpu(s.target_gpu)
        dtype = ("bfloat16" if gpu.bf16 else "float16") if s.dtype == "auto" else s.dtype
        if dtype == "bfloat16" and not gpu.bf16:
            problems.add(f"dtype=bfloat16 needs compute capability 8.0, but target_gpu={s.target_gpu} has less: use "
                         "--dtype=float16 or --dtype=auto")
        return Execution("cuda", dtype, s.compile is True or (s.compile and gpu.bf16), int(gpu.gb * 1e9), gpu)
    device = pick_device(s.device, ranks.local_world_size)
    accelerator = os.environ.get("DS_ACCELERATOR") or device
    if accelerator != device:  # DeepSpeed would put the model there
        raise UserError(f"DS_ACCELERATOR={accelerator} is in the environment, but device={device}: run unset "
                        f"DS_ACCELERATOR, or add --device={accelerator}")
    if device == "cpu" and s.backend == "nccl":
        raise UserError("backend=nccl needs GPUs: use --backend=auto")
    dtype = problems.attempt(pick_dtype, s.dtype, device) or "float32"
    compiled, note = pick_compile(s.compile, device)
    notes += filter(None, [note])
    size = (available_memory() / ranks.local_world_size if device == "cpu" else
            min(torch.cuda.get_device_properties(i).total_memory for i in range(ranks.local_world_size)))
    return Execution(device, dtype, compiled, size)


def resolve_ds_config(s, batch, execution, notes):
    """Return the config for deepspeed.initialize. Raises UserError."""
    config, repairs = ds_config.complete_config(s.deepspeed_config, batch, s.grad_clip, execution.dtype,
                                                execution.compile)
    notes += repairs
    stage, fits = config["zero_optimization"]["stage"], ds_config.takes_our_gradients(config)
    fits = fits and execution.dtype != "float16"
    if s.skip_grad_spikes and not fits:
        raise UserError("skip_grad_spikes=True needs bfloat16 or float32, and no offload at ZeRO-3: drop it")
    if s.optimizer == "muon" and not (fits and stage == 2 and not ds_config.uses_offload(config)):
        raise UserError(f"optimizer=muon can't train with {s.deepspeed_config} in {execution.dtype}: use bfloat16 or "
                        "float32 with --deepspeed_config=ds_config_zero2.json, or start a run with --optimizer=adamw "
                        "and its own --learning_rate")
    return config


def sample_tokenizer(s, data, notes):
    """Return (encode, decode) for samples. Raises UserError."""
    notes += filter(None, [escape_note("--sample_start", s.sample_start)])
    encode, decode = tokenizer_of(data["tokenizer"])
    n = len(encode(s.sample_start))
    if not 1 <= n <= s.block_size:
        raise UserError(f"sample_start has {counted(n, 'token')}: use 1 to {s.block_size} (block_size)")
    return encode, decode


def check_kernels(s, model, execution, facts):
    """Raise UserError if fp8 is set and this GPU or model can't use our FP8 kernels."""
    has_fp8 = execution.gpu.fp8 if execution.gpu else (execution.device == "cuda"
                                                       and torch.cuda.get_device_capability() >= (9, 0))
    fits = (execution.dtype == "bfloat16" and execution.compile and device_has_triton(torch.empty(0))
            and not facts.no_chain and model.n_embd % 16 == s.block_size % 16 == 0 and not s.lora_rank)
    if s.fp8 and not (has_fp8 and fits):
        raise UserError("fp8=True needs compute capability 9.0 (H100, H200, B200, ...), bfloat16, compile=auto, a C "
                        "compiler, no LoRA, --dropout=0, biases, tanh GELU, unedited blocks in model.py, and "
                        "multiples of 16 for block_size and n_embd, the latter up to 4,096: drop it")


def count_params(config, lora, muon):
    """Return the ParamCount of a model without allocating it, and its ModelFacts. muon: whether the blocks' matrices
    are Muon's. Raises UserError if DeepSpeed can't train it."""
    model = without_memory(lambda: GPT(config))
    check_trainable(model)
    total = model.num_params()
    blocks, _ = blocks_to_gather(model)
    block = sum(p.numel() for p in blocks[0].parameters() if p.dim() > 1) if blocks else 0
    matrices = [param for block in model.muon_matrices() for param, _ in block] if muon else []
    if lora:
        apply_lora(model, lora)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    params = ParamCount(
        total,
        stored=sum(size for size, _ in sizes),
        trainable=sum(size for size, trainable in sizes if trainable),
        flops=model.flops_per_token(),
        muon=sum(param.numel() for param in set(matrices)),
        block=block,
    )
    return params, inspect_model(model)


def local_accumulation(s, run: MemoryInputs) -> Choice:
    """Return whether each rank accumulates gradients, to reduce them once per step (see runtime/engine)."""
    has_whole_sums = run.stage == 3 and not run.paths.by_block.taken
    total = memory.bytes_with_eval(replace(run, accumulate_locally=True))
    lacks_room = s.accumulate_locally == "auto" and total > 0.8 * run.execution.memory
    return first_reason(
        (run.batch.world_size == 1, "one rank"),
        (not run.paths.gradients.taken, run.paths.gradients.reason),
        (has_whole_sums, "without blocks, ZeRO-3 has float32 sums of all gradients on each rank anyway"),
        (run.batch.accumulation == 1, "one micro-step per step"),
        (s.accumulate_locally is False, "accumulate_locally=False"),
        (
            lacks_room,
            f"with {format_bytes(4 * run.params.trainable)} of float32 gradients on each rank, less than a fifth of "
            "the memory would stay free",
        ),
    )


def check_out_dir(s, start, tag_bytes, notes):
    """Raise UserError if out_dir can't be written, holds another run, or has no space. tag_bytes: 0 skips the last."""
    if s.eval_only:
        return
    refuse_broken_link(s.out_dir, "--out_dir")
    newest = TagStore(s.out_dir).newest()
    if newest and start and start.kind != "resume" and not s.overwrite:
        problem = (f"{s.out_dir} already holds a run ({newest}): resume it with --init_from=resume, choose another "
                   "--out_dir=DIR, or delete it with --overwrite=True")
        if not s.dry_run:
            raise UserError(problem)
        notes.append(problem)
    if newest and s.overwrite and start and start.parent and os.path.samefile(start.parent[0], s.out_dir):
        raise UserError(f"overwrite=True would delete init_from={s.init_from}: choose another --out_dir=DIR")
    if os.path.exists(os.path.join(s.out_dir, "manifest.json")):
        raise UserError(f"out_dir={s.out_dir} is a checkpoint of a run: choose another with --out_dir=DIR")
    folder = nearest_existing_dir(s.out_dir)
    if not s.out_dir or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UserError(f"out_dir={s.out_dir} cannot be written: choose another with --out_dir=DIR")
    for name in ("history.jsonl", "settings.json", "latest"):
        path = os.path.join(s.out_dir, name)
        if os.path.exists(path) and not (os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK)):
            raise UserError(f"{path} cannot be read and written: fix that, or choose another --out_dir=DIR")
    if s.keep_last and tag_bytes:
        check_disk(s, start, tag_bytes)


def check_disk(s, start, tag_bytes):
    """Raise UserError unless the disk has room for the newest checkpoint, the best one and the one being written, of
    tag_bytes each. It need not have room for keep_last of them: a save that finds none deletes the oldest one."""
    store, kept, first_iter = TagStore(s.out_dir), {}, 0
    if start.kind == "resume":  # TagStore.clean() and Saver delete all others
        first_iter = store.iteration(start.tag)
        needed = {store.iteration(tag) for tag in (start.tag, "best", "final")}
        kept = {tag: iter_num for tag in store.list() if (iter_num := store.iteration(tag)) in needed}
    held = len(set(kept.values()))  # best and final are links
    saves = evaluations_through(s.max_iters - 1, s) + 1 - evaluations_through(first_iter, s)  # one is at the end
    # Unless only better ones are saved, best is older than newest. final stays until the end
    most = max(held + 1, min(held + saves, 2 + s.always_save_checkpoint + ("final" in kept)))
    free = free_bytes(s.out_dir) + store.bytes_besides(kept)
    room = held + int(free // (1.02 * tag_bytes))  # tag_bytes is an estimate
    if saves > 0 and most > room:
        fix = ("add --always_save_checkpoint=False" if room == most - 1 > 1 and s.always_save_checkpoint else
               f"save once, at the end, with --eval_interval={s.max_iters}{' --eval_epochs=None' * bool(s.eval_epochs)}"
               if room > held else "save none with --keep_last=0")
        raise UserError(f"{most} checkpoints of {format_bytes(tag_bytes)} exist at the same time, but the disk of "
                        f"{s.out_dir} has room for {room}: {fix}, make room, or choose another --out_dir=DIR")
