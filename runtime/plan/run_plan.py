"""The plan of a run: what the settings come to on this machine, or every reason why they can't.

plan_run() checks all that can be checked before anything expensive begins. It returns a RunPlan, which is complete and
does not change, or it ends all ranks of all machines with one sentence per problem and exit code 2.
"""

import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from model import GPT
from runtime.checkpoint.saver import check_disk_space, tag_bytes
from runtime.checkpoint.tags import TagStore, UnreadableError
from runtime.cluster.machines import compare_machines
from runtime.data.dataset import open_datasets
from runtime.data.loader import windows_per_epoch
from runtime.data.tokenizer import tokenizer_of
from runtime.engine import ds_config
from runtime.files import UserError, format_bytes, free_bytes, nearest_existing_dir
from runtime.hardware import Gpu, find_gpu, memory_per_rank, pick_compile, pick_device, pick_dtype
from runtime.kernels import is_supported
from runtime.kernels.block import supports
from runtime.lora import apply as apply_lora
from runtime.lora import lora_config
from runtime.output import explain_uncaught
from runtime.plan import memory
from runtime.plan.rules import broken_rules, check_schedule
from runtime.plan.start import Start, find_start
from runtime.versions import deepspeed_problem


@dataclass(frozen=True)
class Hardware:
    """What each rank runs on: here, or with target_gpu elsewhere."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "bfloat16", "float16" or "float32"
    compile: bool
    memory: int  # bytes that a rank may use
    gpu: Gpu | None = None  # target_gpu's; None: the card that is here

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Batch:
    """The sequences of one optimizer step."""

    micro: int  # per GPU and micro-step
    accumulation: int  # micro-steps per GPU
    world_size: int
    block_size: int

    @property
    def sequences(self):
        return self.micro * self.accumulation * self.world_size

    @property
    def tokens(self):
        return self.sequences * self.block_size


@dataclass(frozen=True)
class ParamCount:
    total: int  # as printed
    stored: int  # with the vocabulary's padding
    trainable: int


@dataclass(frozen=True)
class RunPlan:
    """All that is decided before a run. See plan_run()."""

    settings: object  # configurator.py's
    hardware: Hardware
    batch: Batch
    datasets: tuple
    data: dict | None  # {"tokenizer", "vocab_size", "train_tokens", "val_tokens"} of all together
    start: Start
    lora: dict | None
    params: ParamCount
    ds_config: dict  # for deepspeed.initialize
    max_iters: int
    eval_windows: int  # per evaluation, over all ranks
    accumulate_locally: bool
    tag_bytes: int
    tokenizer: tuple | None  # (encode, decode), where samples are asked for
    notes: tuple[str, ...]

    @property
    def model(self):
        return self.start.model

    @property
    def stage(self):
        return self.ds_config["zero_optimization"]["stage"]

    @property
    def job(self):
        """What the memory of the run depends on."""
        return memory.Job(self.model, self.hardware, self.batch, self.params, self.ds_config,
                          self.settings.gradient_checkpointing, self.accumulate_locally)

    def advice(self, job=None):
        """Return lines with commands that fit, where the run, or `job`, does not."""
        return memory.advice(job or self.job, self.settings, sys.argv[1:],
                             not self.lora and self.start.kind != "scratch")

    @property
    def estimated_bytes(self):
        """Bytes of PyTorch's tensors at the peak, per GPU."""
        return memory.torch_bytes(self.job)

    def resolved_settings(self):
        """Return as a command line what "auto" is resolved to, which all ranks must agree on."""
        return (f"--batch_size={self.batch.micro} --gradient_accumulation_steps={self.batch.accumulation} "
                f"--dtype={self.hardware.dtype} --compile={self.hardware.compile} "
                f"--accumulate_locally={self.accumulate_locally}")

    def saved_state(self, resumed):
        """Return what a tag says of the run. resumed: the state of the tag that it resumes from, or {}."""
        base = resumed["lora"]["base"] if resumed and self.lora else self.start.init_from
        return {"model": vars(self.model), "lineage": list(self.start.lineage),
                "lora": self.lora and {**self.lora, "base": None if self.start.parent else base},
                "data": {key: self.data[key] for key in ("tokenizer", "vocab_size")}}

    def record(self):
        """Return what settings.json says of the plan."""
        return {"lineage": list(self.start.lineage), "memory_plan": memory.estimate(self.job)}

    def explain_out_of_memory(self):
        """From now on, end a process whose GPU has no memory left with commands that fit, and exit code 2.

        The other ranks notice, and exit too; checkpoints on the disk are intact.
        """
        def explain(error):
            if isinstance(error, RuntimeError) and "out of memory" in str(error):  # PyTorch's, and CUDA's own
                try:
                    print(self.out_of_memory(), file=sys.stderr, flush=True)
                finally:
                    os._exit(2)

        explain_uncaught(explain)

    def out_of_memory(self):
        """Return what to say when the GPU's memory has run out: what fits and takes a tenth less than this run."""
        job = self.job
        taken = memory.gpu_bytes(job)
        smaller = replace(job, hardware=replace(job.hardware, memory=min(job.hardware.memory, taken - 1)))
        return "\n".join([f"out of memory: this run was estimated to take {format_bytes(taken)} on each GPU, and "
                          "others may use it (nvidia-smi).", *self.advice(smaller)])

    def memory_report(self, ranks):
        """Return the memory estimate as text: what a GPU and the host hold, and what would fit where this does not."""
        lines = memory.format_breakdown("each GPU" if self.hardware.device == "cuda" else "each rank",
                                        memory.estimate(self.job), self.hardware.memory)
        tag = self.tag_bytes if self.settings.keep_last else 0
        lines += memory.format_breakdown("host", memory.host_estimate(self.job, ranks.local_world_size, tag))
        return "\n".join(lines + self.advice())

    def summary(self):
        """Return the run as text: model, data, hardware, batch, output, and a note on each thing that was decided."""
        s, batch, hardware = self.settings, self.batch, self.hardware
        notes = [f"note       {note}" for note in self.notes]
        if hardware.gpu:  # a plan for another machine, perhaps without data
            return "\n".join([f"plan       {batch.micro} x {batch.world_size} x {batch.accumulation} sequences, "
                              f"{hardware.dtype}, ZeRO-{self.stage}", *notes])
        name = "CPU"
        if hardware.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            name = f"{torch.cuda.get_device_name(0)}, {format_bytes(total)}"
        start = f"resumed from {self.start.tag}" if self.start.tag else f"from {self.start.init_from}"
        tokens = self.data["train_tokens"]
        lines = [
            f"model      {self.params.total:,} parameters {start}, block_size {self.model.block_size}"
            + (f"; LoRA of rank {self.lora['rank']}: {self.params.trainable:,} trainable" if self.lora else ""),
            f"data       {' and '.join(d.name for d in self.datasets)}: {tokens:,} tokens to train on, "
            f"{self.data['val_tokens']:,} to validate",
            f"hardware   {batch.world_size} x {name}, {hardware.dtype}, ZeRO-{self.stage} ({s.deepspeed_config})"
            + (", compiled" if hardware.compile else ""),
            f"batch      {batch.micro} x {batch.world_size} x {batch.accumulation} = {batch.sequences:,} sequences, "
            f"{batch.tokens:,} tokens per step; {tokens / batch.tokens:,.1f} steps per epoch",
            f"output     {s.out_dir}"]
        if s.keep_last and not s.eval_only:
            most = min(s.keep_last, -(-self.max_iters // s.eval_interval)) + 2  # best, and the one being written
            lines.append(f"space      {format_bytes(self.tag_bytes)} per checkpoint, up to {most} of them; "
                         f"{format_bytes(free_bytes(s.out_dir))} free")
        if len(self.datasets) > 1:
            lines.append("mixture    " + ", ".join(f"{d.name} {d.share}" for d in self.datasets)
                         + f" of each {sum(d.share for d in self.datasets):,} sequences")
        if batch.world_size > 1:
            lines.append("note       gradient_accumulation_steps is per GPU, as in DeepSpeed (nanoGPT's is the total)")
        return "\n".join(lines + notes)


class Problems(list):
    """Collects every problem, so that all are printed at once."""

    def add(self, *sentences):
        self.extend(sentences)

    @contextmanager
    def catch(self):
        """Run a block that may raise UserError or ValueError. Its problem is kept, and the plan goes on without it."""
        try:
            yield
        except UnreadableError:  # what can't be read is neither there nor missing
            raise
        except (UserError, ValueError) as error:
            self.append(str(error))


def plan_run(settings, ranks):
    """Return the RunPlan of the settings, or end all ranks with every problem and exit code 2.

    ranks: runtime/cluster/ranks.py's. With target_gpu, problems with this machine's files are only notes, and the plan
    may be without data and weights.
    """
    problems, notes = Problems(), []
    plan = make_plan(settings, ranks, problems, notes)
    compare_machines(plan, vars(settings), problems)
    return plan


def make_plan(settings, ranks, problems, notes, fetch=True):
    """Return the RunPlan, or None where `problems` has come to hold some.

    With target_gpu, its notes are `notes` and then the problems with this machine's files. fetch: whether pretrained
    weights are fetched; for target_gpu they are not.
    """
    s = settings
    micro = s.batch_size if s.batch_size != "auto" else s.before_auto["batch_size"]
    problems.add(*broken_rules(s, micro))
    if reason := deepspeed_problem(s.any_deepspeed):
        problems[:] = [reason]  # the rest would use it
        return None
    hardware = detect_hardware(s, ranks, problems, notes)
    if hardware is None:
        return None
    here = Problems() if s.target_gpu is not None else problems  # problems with this machine's files
    batch, config, start = Batch(micro, s.gradient_accumulation_steps, ranks.world_size, s.block_size), None, None
    lora, datasets, data, tokenizer = None, (), None, None
    with problems.catch():
        config, more = ds_config.resolve(ds_config.find(s.deepspeed_config), batch, s.grad_clip, hardware.dtype,
                                         hardware.compile)
        notes += more
        fast = ds_config.supports_fast_gradients(config, hardware.dtype)
        if s.skip_grad_spikes and (hardware.dtype == "float16" or not fast):
            raise UserError("skip_grad_spikes=True works at ZeRO-2 in bfloat16 or float32, with gradients in float32 "
                            "and without offload: leave it out otherwise")
    with here.catch():
        datasets, data = open_datasets(s.dataset, ds_config.ROOT, s.block_size)
        notes += [f"{d.name} has no meta.json: its tokens are taken for {d.meta['tokenizer']['kind']}'s"
                  for d in datasets if not os.path.exists(os.path.join(d.folder, "meta.json"))]
    max_iters = s.max_iters
    if s.max_epochs is not None and data and not problems:
        windows = sum(windows_per_epoch(d.meta["train_tokens"], s.block_size)[0] for d in datasets)
        max_iters = math.ceil(s.max_epochs * windows / batch.sequences)
        notes.append(f"max_epochs={s.max_epochs:g} is {max_iters:,} iterations; max_iters does not count")
    check_schedule(s, max_iters, problems, notes)
    with problems.catch():
        lora = lora_config(vars(s))
    try:
        with here.catch():
            start = find_start(s, data, lora, batch.sequences, notes, fetch and here is problems)
        with here.catch():
            check_out_dir(s, start)
    except UnreadableError as error:
        problems.add(str(error))  # the rest depends on whether there is a run to resume
        return None
    if data and s.sample_interval:
        with here.catch():
            tokenizer = sample_tokenizer(s, data)
    with problems.catch():
        if start and lora and s.lora_rank > start.model.n_embd:
            raise UserError(f"lora_rank={s.lora_rank} is above n_embd={start.model.n_embd}, the most that it can be: "
                            "choose one far below")
        if start and s.fp8:
            check_fp8(start.model, hardware, lora)
    if start is None or config is None or problems:
        problems.add(*(here if here is not problems else ()))
        return None
    params = count_params(start.model, lora)
    job = memory.Job(start.model, hardware, batch, params, config, s.gradient_checkpointing)
    if s.batch_size == "auto":
        batch = memory.fit_batch(job)
        job = replace(job, batch=batch, config=ds_config.with_batch(config, batch))
        notes.append(f"batch_size=auto: {batch.micro} sequences at a time take about "
                     f"{format_bytes(memory.bytes_with_eval(job))} of {format_bytes(hardware.memory)}")
    job = replace(job, accumulate_locally=decide_local_accumulation(s, job))
    if job.accumulate_locally:
        notes.append(f"each rank accumulates gradients in {format_bytes(4 * params.trainable)} of its own, and ranks "
                     "reduce them once per step; --accumulate_locally=False reduces at each micro-step")
    size = tag_bytes(params.stored, hardware.dtype, job.stage, params.trainable)
    with here.catch():
        problem = check_disk_space(s.out_dir, size)
        if problem and s.keep_last and not s.eval_only:
            raise UserError(f"{problem}: make room, or choose another --out_dir=DIR")
    if here is not problems:
        notes = [*notes, *"\n".join(here).splitlines()]
    elif problems:
        return None
    return RunPlan(s, hardware, batch, tuple(datasets), data, start, lora, params, job.config, max_iters,
                   s.eval_iters * micro, job.accumulate_locally, size, tokenizer, tuple(notes))


def detect_hardware(s, ranks, problems, notes):
    """Return the Hardware of each rank, or None where nothing more can be checked."""
    if s.target_gpu is not None:
        with problems.catch():
            gpu = find_gpu(s.target_gpu)
            dtype = gpu.half_dtype if s.dtype == "auto" else s.dtype
            if dtype == "bfloat16" and not gpu.bf16:
                raise UserError(f"target_gpu={s.target_gpu} has no bfloat16: --dtype=float16, or leave it on auto")
            return Hardware("cuda", dtype, s.compile is not False, int(gpu.gb * 1e9), gpu)
        return None
    device = pick_device(s.device)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not torch.cuda.is_available():
        problems.add("device=cuda, but PyTorch sees no CUDA GPU here: --device=cpu, or look at nvidia-smi")
        return None
    if device == "cuda" and ranks.local_world_size > gpus:
        problems.add(f"{ranks.local_world_size} ranks, but {gpus} GPUs on this machine: start {gpus} ranks, or use "
                     "--device=cpu")
        return None
    if s.backend == "nccl" and device == "cpu":
        problems.add("backend=nccl needs CUDA GPUs: --backend=gloo, or leave it on auto")
    dtype = "float32"
    with problems.catch():
        dtype = pick_dtype(s.dtype, device)
    compiled, note = pick_compile(s.compile, device)
    notes += [note] if note else []
    return Hardware(device, dtype, compiled, memory_per_rank(device, ranks.local_world_size))


def sample_tokenizer(s, data):
    """Return (encode, decode) for samples; raise UserError where none can be made."""
    encode, decode = tokenizer_of(data["tokenizer"])
    n = len(encode(s.sample_start))
    if not 1 <= n <= s.block_size:
        raise UserError(f"sample_start has {n} tokens: it needs 1 to block_size={s.block_size}")
    return encode, decode


def check_fp8(model, hardware, lora):
    """Raise UserError unless this machine and model can have FP8 matmuls."""
    if not (hardware.gpu.fp8 if hardware.gpu else hardware.device == "cuda"
            and torch.cuda.get_device_capability() >= (9, 0)):
        raise UserError("fp8=True needs a GPU of compute capability 9.0 (H100, H200, B200, ...): leave it out")
    if lora:
        raise UserError("fp8=True is for training all weights: leave it out with lora_rank")
    if hardware.dtype != "bfloat16" or not hardware.compile or not is_supported(torch.empty(0)):
        raise UserError("fp8=True needs our kernels: leave dtype and compile on auto; a C compiler must be there")
    if not supports(model) or model.n_embd % 16:
        raise UserError("fp8=True needs --dropout=0, biases, GPT-2's GELU, and n_embd a multiple of 16 up to 4,096")


def count_params(config, lora):
    """Return the ParamCount of a model, without making it."""
    with torch.device("meta"):
        model = GPT(config)
    total = model.num_params()
    if lora:
        apply_lora(model, lora)
    return ParamCount(total, sum(p.numel() for p in model.parameters()),
                      sum(p.numel() for p in model.parameters() if p.requires_grad))


def decide_local_accumulation(s, job):
    """Whether gradients are accumulated on each rank and reduced once per step (engine/zero2_gradients.py)."""
    possible = (ds_config.supports_fast_gradients(job.config, job.hardware.dtype) and not s.any_deepspeed
                and job.batch.world_size > 1 and job.batch.accumulation > 1)
    with_room = memory.bytes_with_eval(replace(job, accumulate_locally=True)) <= 0.8 * job.hardware.memory
    return possible and (s.accumulate_locally is True or s.accumulate_locally == "auto" and with_room)


def check_out_dir(s, start):
    """Raise UserError unless out_dir can be written and holds no other run, and its name is no pattern."""
    if s.eval_only:
        return
    newest = TagStore(s.out_dir).newest()
    if newest and start and start.kind != "resume" and not s.overwrite:
        raise UserError(f"{s.out_dir} already holds a run ({newest}): continue it with --init_from=resume, choose "
                        "another --out_dir=DIR, or give it up with --overwrite=True")
    if set(s.out_dir) & set("*?["):
        raise UserError(f"out_dir={s.out_dir} has *, ? or [ in it, which DeepSpeed takes for a pattern when it loads: "
                        "choose another with --out_dir=DIR")
    folder = nearest_existing_dir(s.out_dir)
    if not s.out_dir or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UserError(f"out_dir={s.out_dir} cannot be written: choose another with --out_dir=DIR")
