"""The plan of a run: what the settings come to on this machine, or every reason why they can't."""

import os
import sys
from dataclasses import dataclass, replace

import torch

from model import GPT
from runtime.checkpoint.saver import check_disk_space, tag_bytes
from runtime.checkpoint.tags import TagStore
from runtime.cluster.machines import compare_machines
from runtime.data.dataset import open_datasets
from runtime.data.tokenizer import tokenizer_of
from runtime.engine import ds_config
from runtime.files import UserError, format_bytes, free_bytes, nearest_existing_dir
from runtime.hardware import find_gpu, memory_per_rank, pick_compile, pick_device, pick_dtype
from runtime.kernels import is_supported
from runtime.kernels.block import supports
from runtime.lora import apply as apply_lora
from runtime.lora import lora_config
from runtime.output import explain_uncaught
from runtime.plan import memory
from runtime.plan.memory import Batch, Hardware, Job, ParamCount
from runtime.plan.rules import broken_rules, plan_iterations
from runtime.plan.start import Start, find_start
from runtime.versions import deepspeed_problem


@dataclass(frozen=True, kw_only=True)
class RunPlan(Job):
    """All that is decided before a run. It is complete, and does not change."""

    settings: object  # configurator.py's, with batch_size, gradient_accumulation_steps and max_iters resolved
    datasets: tuple
    data: dict | None  # {"tokenizer", "vocab_size", "train_tokens", "val_tokens"} of all together
    start: Start
    lora: dict | None
    eval_windows: int  # per evaluation, over all ranks
    tag_bytes: int
    tokenizer: tuple | None  # (encode, decode), where samples are asked for
    notes: tuple[str, ...]

    def advice(self):
        """Return lines with commands that fit, where this run does not."""
        return memory.advice(self, self.settings, sys.argv[1:], not self.lora and self.start.kind != "scratch")

    @property
    def estimated_bytes(self):
        """Bytes of PyTorch's tensors at the peak, per GPU."""
        return memory.torch_bytes(self)

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
        return {"lineage": list(self.start.lineage), "memory_plan": memory.estimate(self)}

    def explain_out_of_memory(self):
        """From now on, end a process whose GPU has no memory left with exit code 2, and with commands that fit and take
        a tenth less than this run. The other ranks notice, and exit too; checkpoints on the disk are intact."""
        def explain(error):
            if not isinstance(error, RuntimeError) or "out of memory" not in str(error):  # PyTorch's, and CUDA's own
                return
            try:
                taken = memory.gpu_bytes(self)
                hardware = replace(self.hardware, memory=min(self.hardware.memory, taken - 1))
                print(f"out of memory: this run was estimated to take {format_bytes(taken)} on each GPU, and others "
                      "may use it (nvidia-smi).", *replace(self, hardware=hardware).advice(), sep="\n",
                      file=sys.stderr, flush=True)
            finally:
                os._exit(2)

        explain_uncaught(explain)

    def memory_report(self, ranks):
        """Return the memory estimate as text: what a GPU and the host hold, and what would fit where this does not."""
        host = memory.host_estimate(self, ranks.local_world_size, self.tag_bytes if self.settings.keep_last else 0)
        return "\n".join([
            *memory.format_breakdown("each GPU" if self.hardware.device == "cuda" else "each rank",
                                     memory.estimate(self), self.hardware.memory),
            *memory.format_breakdown("host", host), *self.advice()])

    def summary(self):
        """Return the run as text: model, data, hardware, batch, output, and a note on each thing that was decided."""
        s, batch, hardware, data = self.settings, self.batch, self.hardware, self.data
        sequences = f"{batch.micro} x {batch.world_size} x {batch.accumulation}"
        notes = [f"note       {note}" for note in self.notes]
        if hardware.gpu:  # a plan for another machine, perhaps without data
            return "\n".join([f"plan       {sequences} sequences, {hardware.dtype}, ZeRO-{self.stage}", *notes])
        name = "CPU"
        if hardware.device == "cuda":
            name = f"{torch.cuda.get_device_name()}, {format_bytes(torch.cuda.get_device_properties().total_memory)}"
        start = f"resumed from {self.start.tag}" if self.start.tag else f"from {self.start.init_from}"
        lora = f"; LoRA of rank {self.lora['rank']}: {self.params.trainable:,} trainable" if self.lora else ""
        lines = [
            f"model      {self.params.total:,} parameters {start}, block_size {self.model.block_size}{lora}",
            f"data       {' and '.join(d.name for d in self.datasets)}: {data['train_tokens']:,} tokens to train on, "
            f"{data['val_tokens']:,} to validate",
            f"hardware   {batch.world_size} x {name}, {hardware.dtype}, ZeRO-{self.stage} ({s.deepspeed_config})"
            + ", compiled" * hardware.compile,
            f"batch      {sequences} = {batch.sequences:,} sequences, {batch.tokens:,} tokens per step; "
            f"{data['train_tokens'] / batch.tokens:,.1f} steps per epoch",
            f"output     {s.out_dir}"]
        if s.keep_last and not s.eval_only:
            most = min(s.keep_last, -(-s.max_iters // s.eval_interval)) + 2  # best, and the one being written
            lines.append(f"space      {format_bytes(self.tag_bytes)} per checkpoint, up to {most} of them; "
                         f"{format_bytes(free_bytes(s.out_dir))} free")
        if len(self.datasets) > 1:
            lines.append("mixture    " + ", ".join(f"{d.name} {d.share}" for d in self.datasets)
                         + f" of each {sum(d.share for d in self.datasets):,} sequences")
        if batch.world_size > 1:
            lines.append("note       gradient_accumulation_steps is per GPU, as in DeepSpeed (nanoGPT's is the total)")
        advice = [] if s.dry_run else self.advice()  # a dry run prints it after the estimate
        return "\n".join(lines + notes + advice)


class Problems(list):
    """Collects every problem, each once, so that all are printed together."""

    def add(self, *sentences):
        self.extend(sentence for sentence in sentences if sentence not in self)

    def attempt(self, function, *args):
        """Return function(*args), or None where it raises UserError or ValueError, whose sentence is added."""
        try:
            return function(*args)
        except (UserError, ValueError) as error:
            self.add(str(error))


def plan_run(settings, ranks):
    """Return the RunPlan of the settings, or end all ranks of all machines with every problem and exit code 2.

    All that can be checked is checked before anything expensive begins. ranks: runtime/cluster/ranks.py's.
    """
    problems = Problems()
    plan = make_plan(settings, ranks, problems, [])
    compare_machines(plan, vars(settings), problems)
    return plan


def make_plan(settings, ranks, problems, notes, fetch=True):
    """Return the RunPlan, or None where `problems` has come to hold some.

    With target_gpu, problems with this machine's files are only notes, after those in `notes`, and the plan may be
    without data and weights. fetch: whether pretrained weights are fetched; for target_gpu they are not.
    """
    s, files = settings, Problems()  # files: problems with this machine's
    micro = s.before_auto["batch_size"] if s.batch_size == "auto" else s.batch_size
    batch = Batch(micro, s.gradient_accumulation_steps, ranks.world_size, s.block_size)
    problems.add(*broken_rules(s, micro))
    if reason := deepspeed_problem(s.any_deepspeed):
        problems[:] = [reason]  # the rest would use it
        return None
    hardware = problems.attempt(detect_hardware, s, ranks, problems, notes)
    if hardware is None:  # the rest would use it too
        return None
    config = problems.attempt(resolve_ds_config, s, batch, hardware, notes)
    datasets, data = files.attempt(open_datasets, s.dataset, ds_config.ROOT, s.block_size) or ((), None)
    notes += [f"{d.name} has no meta.json: its tokens are taken for {d.meta['tokenizer']['kind']}'s"
              for d in datasets if not os.path.exists(os.path.join(d.folder, "meta.json"))]
    max_iters = plan_iterations(s, datasets, batch, problems, notes)
    lora = problems.attempt(lora_config, vars(s))
    start = files.attempt(find_start, s, data, lora, batch.sequences, notes, fetch and s.target_gpu is None)
    tokenizer = files.attempt(sample_tokenizer, s, data) if data and s.sample_interval else None
    params, size = None, 0
    if start:
        problems.attempt(check_model, s, start.model, hardware, lora)
    if start and not problems:
        params = count_params(start.model, lora)
        size = tag_bytes(params.stored, hardware.dtype, config["zero_optimization"]["stage"], params.trainable)
    files.attempt(check_out_dir, s, start, size)
    if s.target_gpu is None or start is None:
        problems.add(*files)
    if problems:
        return None
    job = Job(start.model, hardware, batch, params, config, s.gradient_checkpointing)
    if s.batch_size == "auto":
        batch = memory.fit_batch(job)
        job = replace(job, batch=batch, ds_config=ds_config.with_batch(config, batch))
        notes.append(f"batch_size=auto: {batch.micro} sequences at a time take about "
                     f"{format_bytes(memory.bytes_with_eval(job))} of {format_bytes(hardware.memory)}")
    if accumulates_locally(s, job):
        job = replace(job, accumulate_locally=True)
        notes.append(f"each rank accumulates gradients in {format_bytes(4 * params.trainable)} of its own, and ranks "
                     "reduce them once per step; --accumulate_locally=False reduces at each micro-step")
    s = replace(s, batch_size=batch.micro, gradient_accumulation_steps=batch.accumulation, max_iters=max_iters)
    return RunPlan(**vars(job), settings=s, datasets=tuple(datasets), data=data, start=start, lora=lora,
                   eval_windows=s.eval_iters * micro, tag_bytes=size, tokenizer=tokenizer,
                   notes=(*notes, *"\n".join(files).splitlines()))


def detect_hardware(s, ranks, problems, notes):
    """Return the Hardware of each rank. Raises UserError or ValueError where nothing more can be checked."""
    if s.target_gpu is not None:
        gpu = find_gpu(s.target_gpu)
        dtype = gpu.half_dtype if s.dtype == "auto" else s.dtype
        if dtype == "bfloat16" and not gpu.bf16:
            raise UserError(f"target_gpu={s.target_gpu} has no bfloat16: --dtype=float16, or leave it on auto")
        return Hardware("cuda", dtype, s.compile is not False, int(gpu.gb * 1e9), gpu)
    device = pick_device(s.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but PyTorch sees no CUDA GPU here: --device=cpu, or look at nvidia-smi")
    if device == "cuda" and ranks.local_world_size > (gpus := torch.cuda.device_count()):
        raise UserError(f"{ranks.local_world_size} ranks, but {gpus} GPUs on this machine: start {gpus} ranks, or use "
                        "--device=cpu")
    if s.backend == "nccl" and device == "cpu":
        problems.add("backend=nccl needs CUDA GPUs: --backend=gloo, or leave it on auto")
    dtype = problems.attempt(pick_dtype, s.dtype, device) or "float32"
    compiled, note = pick_compile(s.compile, device)
    notes += filter(None, [note])
    return Hardware(device, dtype, compiled, memory_per_rank(device, ranks.local_world_size))


def resolve_ds_config(s, batch, hardware, notes):
    """Return the config for deepspeed.initialize. Raises UserError."""
    config, repairs = ds_config.resolve(ds_config.find(s.deepspeed_config), batch, s.grad_clip, hardware.dtype,
                                        hardware.compile)
    notes += repairs
    if s.skip_grad_spikes and (hardware.dtype == "float16"
                               or not ds_config.supports_fast_gradients(config, hardware.dtype)):
        raise UserError("skip_grad_spikes=True works at ZeRO-2 in bfloat16 or float32, with gradients in float32 and "
                        "without offload: leave it out otherwise")
    return config


def sample_tokenizer(s, data):
    """Return (encode, decode) for samples; raise UserError where none can be made."""
    encode, decode = tokenizer_of(data["tokenizer"])
    n = len(encode(s.sample_start))
    if not 1 <= n <= s.block_size:
        raise UserError(f"sample_start has {n} tokens: it needs 1 to block_size={s.block_size}")
    return encode, decode


def check_model(s, model, hardware, lora):
    """Raise UserError unless LoRA's rank fits the model, and this machine and model can have fp8's matmuls."""
    if lora and s.lora_rank > model.n_embd:
        raise UserError(f"lora_rank={s.lora_rank} is above n_embd={model.n_embd}, the most that it can be: choose one "
                        "far below")
    if not s.fp8:
        return
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
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return ParamCount(total, sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable))


def accumulates_locally(s, job):
    """Whether gradients are accumulated on each rank and reduced once per step (engine/zero2_gradients.py)."""
    possible = (ds_config.supports_fast_gradients(job.ds_config, job.hardware.dtype) and not s.any_deepspeed
                and job.batch.world_size > 1 and job.batch.accumulation > 1)
    with_room = memory.bytes_with_eval(replace(job, accumulate_locally=True)) <= 0.8 * job.hardware.memory
    return possible and (s.accumulate_locally is True or s.accumulate_locally == "auto" and with_room)


def check_out_dir(s, start, size):
    """Raise UserError unless out_dir can be written, has space for a tag of `size` bytes and holds no other run, and
    its name is no pattern."""
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
    if s.keep_last and (problem := check_disk_space(s.out_dir, size)):
        raise UserError(f"{problem}: make room, or choose another --out_dir=DIR")
