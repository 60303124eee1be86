"""Everything that can be known about a run before the expensive part: what it will be, or all reasons why it can't."""

import dataclasses
import math
import os
from types import SimpleNamespace

import torch

from model import GPT, GPTConfig
from runtime.checkpoint.saver import check_disk_space, tag_bytes
from runtime.checkpoint.tags import TAG_NAME, CheckpointError, TagStore, UnreadableError, parse_run_path
from runtime.data.dataset import same_tokenizer
from runtime.data.loader import windows_per_epoch
from runtime.data.mixture import sets
from runtime.data.tokenizer import tokenizer_of
from runtime.engine import ds_config
from runtime.files import UserError, file_digest, format_bytes, free_bytes, nearest_existing_dir
from runtime.hardware import find_gpu, memory_per_rank, pick_compile, pick_device, pick_dtype
from runtime.kernels import runs_on
from runtime.kernels.block import fits
from runtime.lora import TARGET_MODULES, changed_settings, lora_config
from runtime.lora import apply as apply_lora
from runtime.plan.fit import ROOM, parts
from runtime.plan.memory import evaluation, largest_batch
from runtime.versions import deepspeed_problem
from runtime.weights import PRETRAINED, fetch_from_hub, open_weights

SHAPE = ("n_layer", "n_head", "n_embd", "bias")


def check_run(settings, root, world_size, local_world_size, asked=None):
    """(run, problems). run tells what the settings come to on this machine: device, dtype, config (for DeepSpeed),
    data folder and meta, init_from, model (GPTConfig), tags to resume from (the first that is whole), the bytes of a
    tag, batch_size and accumulation, notes. problems: one sentence each. asked: what init_from and batch_size are
    where they are 'auto': what to begin with without a tag, and by which the sequences of a step are counted."""
    run = SimpleNamespace(notes=[], tag=None, candidates=(), config=None, meta=None, model=None, before=None,
                          lineage=[])
    problems = []
    asked = asked or settings
    s = {**settings, "batch_size": asked["batch_size"]}

    def attempt(step, *args):
        try:
            return step(*args)
        except (UserError, ValueError) as error:
            problems.append(str(error))

    for name in ("batch_size", "gradient_accumulation_steps", "block_size", "eval_interval", "eval_iters",
                 "log_interval", "patience", "profile_start", "profile_iters", "sample_tokens"):
        if s[name] is not None and s[name] < 1:
            problems.append(f"{name}={s[name]} must be at least 1")
    for name in ("keep_last", "max_iters", "max_skipped_steps", "sample_interval", "warmup_iters",
                 "learning_rate", "grad_clip", "weight_decay"):
        if s[name] < 0:
            problems.append(f"{name}={s[name]} must not be negative")
    for name, value in s.items():
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name}={value} must be a finite number")
    if s["decay_lr"] and s["min_lr"] is not None and not 0 <= s["min_lr"] <= s["learning_rate"]:
        problems.append(f"min_lr={s['min_lr']} must be between 0 and learning_rate={s['learning_rate']}")
    for name in ("lr_decay_iters", "cooldown_iters"):
        if s[name] is not None and s[name] < 0:
            problems.append(f"{name}={s[name]} must not be negative")
    if s["max_epochs"] is not None and s["max_epochs"] <= 0:
        problems.append(f"max_epochs={s['max_epochs']:g} must be above 0")
    for name in ("dropout", "beta1", "beta2"):
        if not 0 <= s[name] < 1:
            problems.append(f"{name}={s[name]} must be at least 0 and below 1")
    if not 0 <= s["seed"] < 2**63:
        problems.append(f"seed={s['seed']} must be at least 0 and below 2**63")
    reckoned = s["target_gpu"] is not None  # for a card that need not be here
    if reckoned and not s["dry_run"]:
        problems.append("target_gpu reckons for another machine: add --dry_run=True")
    if reckoned and s["device"] == "cpu":
        problems.append("target_gpu is of a GPU, and device=cpu: leave one out")
    if problem := deepspeed_problem(s["any_deepspeed"]):
        return run, [problem]  # the rest would ask it
    run.target_gpu, run.gpu, run.world_size = s["target_gpu"], None, world_size
    run.device = "cuda" if reckoned else pick_device(s["device"])
    if run.device == "cuda" and not reckoned and not torch.cuda.is_available():
        problems.append("device=cuda, but PyTorch sees no CUDA GPU here: --device=cpu, or look at nvidia-smi")
        return run, problems
    gpus = torch.cuda.device_count() if run.device == "cuda" and not reckoned else None
    if gpus is not None and local_world_size > gpus:
        problems.append(f"{local_world_size} ranks, but {gpus} GPUs on this machine: start {gpus} ranks, or use "
                        "--device=cpu")
        return run, problems  # the rest would ask GPUs that are not there
    if s["backend"] == "nccl" and run.device == "cpu":
        problems.append("backend=nccl needs CUDA GPUs: --backend=gloo, or leave it on auto")
    if reckoned:
        run.gpu = attempt(find_gpu, s["target_gpu"])
        run.room, half = (int(run.gpu.gb * 1e9), run.gpu.half_dtype) if run.gpu else (0, None)
        run.dtype, run.compile = half if s["dtype"] == "auto" else s["dtype"], s["compile"] is not False
        if half == "float16" and run.dtype == "bfloat16":
            problems.append(f"target_gpu={s['target_gpu']} has no bfloat16: --dtype=float16, or leave it on auto")
    else:
        run.room = memory_per_rank(run.device, local_world_size)
        run.dtype = attempt(pick_dtype, s["dtype"], run.device)
        run.compile, note = pick_compile(s["compile"], run.device)
        run.notes += [note] if note else []
    if run.dtype:
        path = ds_config.find(s["deepspeed_config"], root)
        resolved = attempt(ds_config.resolve, path, s, world_size, run.dtype, run.compile)
        if resolved:
            run.config, notes = resolved
            run.notes += notes
            if s["skip_grad_spikes"] and (
                    run.dtype == "float16" or not ds_config.supports_fast_gradients(run.config, run.dtype)):
                problems.append("skip_grad_spikes=True works at ZeRO-2 in bfloat16 or float32, with sums in float32 "
                                "and without offload: leave it out otherwise")
            elif s["skip_grad_spikes"] and s["any_deepspeed"]:
                problems.append("skip_grad_spikes=True needs our own gradient path, which any_deepspeed=True turns "
                                "off: leave one of them out")
    run.sets, run.meta = attempt(sets, s["dataset"], root, s["block_size"]) or ([], None)
    run.notes += [f"{one.name} has no meta.json: its tokens are taken for {one.meta['tokenizer']['kind']}'s"
                  for one in run.sets if not os.path.exists(os.path.join(one.folder, "meta.json"))]
    run.max_iters = s["max_iters"]
    if s["max_epochs"] is not None and run.meta and not problems:
        run.max_iters = iterations(run, s, world_size)
        run.notes.append(f"max_epochs={s['max_epochs']:g} is {run.max_iters:,} iterations; max_iters does not count")
    unused = {"lora_alpha": None, "lora_dropout": 0.0, "lora_target_modules": ", ".join(TARGET_MODULES)}
    problems += [f"{name}={s[name]} is for LoRA: add --lora_rank=64, or leave it out"
                 for name, value in unused.items() if s[name] != value and not s["lora_rank"]]
    problems += look_at_schedule(run, s)
    if s["lora_rank"] and s["init_from"] == "scratch":
        problems.append("lora_rank with init_from=scratch would leave random weights as they are: name weights, or "
                        "leave it out")
    if s["profile"] and s["eval_only"]:
        problems.append("profile=True traces training: leave out eval_only")
    elif s["profile"] and run.max_iters < s["profile_start"] + s["profile_iters"]:
        problems.append(f"profile=True traces {s['profile_iters']} iterations after {s['profile_start']}, and there "
                        "are fewer: more --max_iters, or a smaller --profile_start")
    run.lora = attempt(lora_config, s)
    run.init_from = s["init_from"]
    try:
        newest = TagStore(s["out_dir"]).newest()
    except UnreadableError as error:
        return run, [*problems, str(error)]  # the rest depends on whether there is a run to resume
    if run.init_from == "auto":
        run.init_from = "resume" if newest or s["resume_tag"] != "latest" else asked["init_from"]
    if s["init_from"] not in ("resume", "auto"):
        unsaid = {"resume_tag": "latest", "resume_weights_only": False}
        problems += [f"{name}={s[name]} is for going on with a run: add --init_from=resume"
                     for name, value in unsaid.items() if s[name] != value]
    if run.init_from == "resume":
        attempt(check_resume, run, s)
    else:
        run.model = attempt(check_start, run, s)
        if newest and not s["overwrite"] and not s["eval_only"]:
            problems.append(f"{s['out_dir']} already holds a run ({newest}): continue it with --init_from=resume, "
                            "choose another --out_dir=DIR, or give it up with --overwrite=True")
    if not s["eval_only"]:
        attempt(check_writable, s["out_dir"])
    if run.meta and s["sample_interval"]:
        attempt(check_sample, run, s)
    if run.model and run.lora and s["lora_rank"] > run.model.n_embd:
        problems.append(f"lora_rank={s['lora_rank']} is above n_embd={run.model.n_embd}, all that such a matrix has: "
                        "choose one far below")
    if run.model and s["fp8"]:
        attempt(check_fp8, run)
    if run.model and run.config and (reckoned or not problems):
        attempt(check_space, run, s)
        choose_batch(run, s, settings["batch_size"] == "auto", world_size)
    return run, problems


def iterations(run, s, world_size):
    """As many as max_epochs passes over the windows of all data sets take."""
    windows = sum(windows_per_epoch(one.meta["train_tokens"], s["block_size"])[0] for one in run.sets)
    return math.ceil(s["max_epochs"] * windows / (s["batch_size"] * s["gradient_accumulation_steps"] * world_size))


def look_at_schedule(run, s):
    """Note a learning rate that does not come to its end with the run; returns the problems: what can't be meant."""
    last, end = run.max_iters, run.max_iters if s["lr_decay_iters"] is None else s["lr_decay_iters"]
    warmup, cooldown, falls = s["warmup_iters"], s["cooldown_iters"], s["decay_lr"] and s["lr_schedule"] != "constant"
    problems = []
    if cooldown is not None and not (falls and s["lr_schedule"] == "wsd"):
        problems.append(f"cooldown_iters={cooldown} is of --lr_schedule=wsd: add that, or leave it out")
    elif cooldown is not None and warmup + cooldown > end and warmup < last:
        problems.append(f"cooldown_iters={cooldown} and warmup_iters={warmup} are more than the {end} iterations until "
                        f"the learning rate is at its lowest: at most --cooldown_iters={max(0, end - warmup)}")
    if s["decay_lr"] and warmup >= last > 0:
        run.notes.append(f"the run ends after {last:,} iterations, within its warm-up: learning_rate is not reached "
                         f"(warmup_iters={warmup:,})")
    elif falls and end > last > 0:
        run.notes.append(f"the run ends after {last:,} iterations, before the learning rate is at its lowest "
                         f"(lr_decay_iters={end:,})")
    elif falls and end < last:
        run.notes.append(f"the learning rate is at its lowest after {end:,} of {last:,} iterations, and stays there "
                         f"(lr_decay_iters={end:,})")
    return problems


def check_sample(run, s):
    """Set run.tokenizer; ValueError or FetchError where no text can be made."""
    run.tokenizer = encode, _ = tokenizer_of(run.meta["tokenizer"])
    n = len(encode(s["sample_start"]))
    if not 1 <= n <= s["block_size"]:
        raise ValueError(f"sample_start has {n} tokens: 1 to block_size={s['block_size']} are wanted")


def check_fp8(run):
    """ValueError unless this machine and model can have products in 8 bits."""
    if run.gpu and not run.gpu.fp8 or run.target_gpu is None and (
            run.device == "cpu" or torch.cuda.get_device_capability() < (9, 0)):
        raise ValueError("fp8=True needs a GPU of compute capability 9.0 (H100, H200, B200, ...): leave it out")
    if run.lora:
        raise ValueError("fp8=True is for training whole weights: leave it out with lora_rank")
    if run.dtype != "bfloat16" or not run.compile or not runs_on(torch.empty(0)):
        raise ValueError("fp8=True needs our kernels: leave dtype and compile on auto; a C compiler must be there")
    if not fits(run.model) or run.model.n_embd % 16:
        raise ValueError("fp8=True needs --dropout=0, biases, GPT-2's GELU, and n_embd a multiple of 16 up to 4,096")


def check_start(run, s):
    """The model's shape for a fresh start, GPTConfig; ValueError or WeightsError where the settings contradict it."""
    given = [name for name in SHAPE if s[name] is not None]
    if run.init_from == "scratch":
        shape = {name: s[name] for name in given}
        return GPTConfig(block_size=s["block_size"], vocab_size=run.meta["vocab_size"] if run.meta else 50257,
                         dropout=s["dropout"], **shape)
    folder, name = os.path.split(os.path.normpath(run.init_from))
    if TAG_NAME.fullmatch(name) and TagStore(folder).list():
        TagStore(folder).find(name)
    if not os.path.exists(run.init_from) and run.init_from not in PRETRAINED:
        raise ValueError(f"init_from={run.init_from} is neither 'scratch', 'resume', 'auto', one of "
                         f"{', '.join(PRETRAINED)}, nor a folder of weights or of an earlier run, nor a ckpt.pt of "
                         "nanoGPT's")
    if "bias" in given:  # as nanoGPT does, whose default it is not to have them
        run.notes.append(f"bias={s['bias']} is for training from scratch: these weights bring their own, or none")
        given.remove("bias")
    run.before = parse_run_path(run.init_from)
    if run.before:
        return check_stage(run, s, given)
    if given:
        raise ValueError(f"{', '.join(given)} given, but init_from={run.init_from} brings its own shape: remove them, "
                         "or add --init_from=scratch")
    if s["target_gpu"] is not None and run.init_from in PRETRAINED:
        n_layer, n_head, n_embd = PRETRAINED[run.init_from]
        if s["block_size"] > 1024:
            raise ValueError(f"block_size={s['block_size']} is beyond the 1024 positions that the weights know: "
                             "--block_size=1024")
        return GPTConfig(s["block_size"], 50257, n_layer, n_head, n_embd, s["dropout"])
    run.weights = run.init_from if os.path.exists(run.init_from) else fetch_from_hub(run.init_from)
    config = GPTConfig.from_weights(run.weights)
    open_weights(run.weights)  # refuses what cannot be read
    if s["block_size"] > config.block_size:
        raise ValueError(f"block_size={s['block_size']} is beyond the {config.block_size} positions that the weights "
                         f"know: --block_size={config.block_size}")
    if run.meta and run.meta["vocab_size"] > config.vocab_size:
        raise ValueError(f"the data set's vocabulary of {run.meta['vocab_size']} is beyond the weights' "
                         f"{config.vocab_size}: prepare the data with the weights' tokenizer")
    if run.meta and run.meta["tokenizer"]["kind"] != "gpt2" and not brings(run.weights, run.meta["tokenizer"]):
        run.notes.append(f"the data's tokens are not GPT-2's ({run.meta['tokenizer']['kind']}), nor does the weights' "
                         "folder hold their tokenizer: the weights' knowledge of words is lost")
    return dataclasses.replace(config, block_size=s["block_size"], dropout=s["dropout"])


def check_stage(run, s, given):
    """The model of the earlier stage run.before, GPTConfig, and run.lineage, the runs up to it; ValueError or
    CheckpointError where this one cannot follow."""
    (folder, tag), where = run.before, os.path.join(*run.before)
    _, manifest = TagStore(folder).find(tag)
    state = manifest["state"]
    if os.path.realpath(folder) == os.path.realpath(s["out_dir"]):
        raise ValueError(f"init_from={run.init_from} is out_dir itself: go on with it by --init_from=resume, or choose "
                         "another --out_dir=DIR")
    shape = state["model"]
    other = [name for name in given if s[name] != shape[name]]
    if other:
        raise ValueError(f"{where} has {', '.join(f'{name}={shape[name]}' for name in other)}, and the settings say "
                         f"otherwise: {' '.join(f'--{name}=None' for name in other)} takes what it has")
    if s["block_size"] > state["model"]["block_size"]:
        raise ValueError(f"block_size={s['block_size']} is beyond the {state['model']['block_size']} positions that "
                         f"{where} knows: --block_size={state['model']['block_size']}")
    if run.meta and not same_tokenizer(run.meta, state["data"]):
        raise ValueError(f"{where} was trained on another tokenizer's data than data set '{s['dataset']}': prepare it "
                         "with that one")
    run.lineage = [*state["lineage"], {
        "out_dir": folder, "tag": manifest["tag"], "iter_num": manifest["iter_num"],
        "dataset": state["settings"]["dataset"], "val_loss": state["best_val_loss"]}]
    run.notes.append(f"the weights are those of {where}, iteration {manifest['iter_num']}; the optimizer begins anew")
    return GPTConfig(**{**state["model"], "block_size": s["block_size"], "dropout": s["dropout"]})


def brings(weights, tokenizer):
    """Whether a folder of weights holds the tokenizer.json that data was prepared with, or its characters. A ckpt.pt
    holds none, and may well be of this data."""
    path = os.path.join(weights, "tokenizer.json")
    if tokenizer["kind"] == "char" and os.path.exists(path):
        from tokenizers import Tokenizer

        try:
            vocab = Tokenizer.from_file(path).get_vocab()
        except Exception as error:  # the library has no class for its own
            raise ValueError(f"{path} is not a tokenizer ({error}): restore it, or remove it") from None
        return vocab == {c: i for i, c in enumerate(tokenizer["chars"])}
    return os.path.isfile(weights) or os.path.exists(path) and file_digest(path)["sha256"] == tokenizer.get("sha256")


def check_resume(run, s):
    """Set run.candidates, tags newest first or the named one, and run.model; CheckpointError if they don't fit."""
    named = s["resume_tag"] != "latest"
    store = TagStore(s["out_dir"])
    run.candidates = [s["resume_tag"]] if named else store.newest_first() or ["latest"]
    run.tag, manifest = first_readable(store, run.candidates)
    newer = store.newer_than(manifest["iter_num"])
    if newer and named and not s["overwrite"] and not s["eval_only"]:
        raise CheckpointError(f"resuming from {s['out_dir']}/{run.tag} gives up {', '.join(newer)}, which are newer: "
                              "say so with --overwrite=True, or copy the tag into a folder of its own")
    run.model = GPTConfig(**{**manifest["state"]["model"], "dropout": s["dropout"]})
    run.check_compatible = lambda manifest: check_fit(run, s, manifest)
    run.check_compatible(manifest)


def first_readable(store, names):
    """Return (tag, manifest) of the first tag whose manifest is intact. Raises the first one's CheckpointError if none
    is, and UnreadableError at a tag that cannot be read, because what it holds would be lost to an older one."""
    first_error = None
    for tag in names:
        try:
            return store.find(tag)
        except UnreadableError:
            raise
        except CheckpointError as error:
            first_error = first_error or error
    raise first_error


def check_fit(run, s, m):
    """CheckpointError unless this run's model and data are those of the tag whose manifest is m."""
    where = f"{s['out_dir']}/{m['tag']}"
    saved = GPTConfig(**m["state"]["model"])
    differing = [f"{k}={getattr(saved, k)}" for k in ("block_size", *SHAPE)
                 if getattr(saved, k) != (getattr(run.model, k) if s[k] is None else s[k])]
    if differing:
        raise CheckpointError(f"{where} holds a model with {', '.join(differing)}: the settings say otherwise")
    if run.meta and run.meta["vocab_size"] != m["state"]["data"]["vocab_size"]:
        raise CheckpointError(f"{where} was trained on another vocabulary than data set '{s['dataset']}' has")
    before, now = ((x["dataset"], x["batch_size"] * x["gradient_accumulation_steps"] * ranks) for x, ranks in (
        (m["state"]["settings"], m["world_size"]), (s, run.world_size)))
    if before != now and len({str(before[0]), str(now[0])}) > 1:
        run.notes.append(f"{where} was trained on {before[0]}: this goes on in the order of {now[0]}")
    elif before != now:
        run.notes.append(f"{where} was trained with {before[1]:,} sequences a step, this goes on with {now[1]:,}: some "
                         "are seen again, or passed over")
    was, now = changed_settings(m["state"]["lora"], run.lora)
    if was != now:
        raise CheckpointError(f"{where} was trained with {was}, and the settings say {now}")


def check_space(run, s):
    """Set run.n_params, run.n_saved, run.n_trained and run.tag_bytes; ValueError if tags are to be saved and not even
    one has room."""
    with torch.device("meta"):
        model = GPT(run.model)
    run.n_params = model.num_params()
    if run.lora:
        apply_lora(model, run.lora)
    params = list(model.parameters())  # with the vocabulary's padding
    run.n_saved, run.n_trained = (sum(p.numel() for p in params if p.requires_grad or every) for every in (True, False))
    run.tag_bytes = tag_bytes(run.n_saved, run.dtype, run.config["zero_optimization"]["stage"], run.n_trained)
    problem = check_disk_space(s["out_dir"], run.tag_bytes)
    if problem and s["keep_last"] and not s["eval_only"]:
        raise ValueError(f"{problem}: make room, or choose another --out_dir=DIR")


def choose_batch(run, s, auto, world_size):
    """Set run.batch_size and run.accumulation: as they are asked for, or with auto the largest micro-batch that leaves
    a tenth of memory free and makes a step of as many sequences. And run.accumulate_locally: whether there is room to
    sum gradients on each rank before they are summed over the ranks (runtime/engine/zero2_gradients.py)."""
    run.batch_size, run.accumulation = s["batch_size"], s["gradient_accumulation_steps"]
    def planned(batch_size, accumulate_locally=False):
        found = parts(run, s, world_size, batch_size, accumulate_locally=accumulate_locally)
        return sum(found.values()) + (evaluation(run.model, run.dtype, batch_size) if run.compile else 0)

    if auto:
        sequences = run.batch_size * run.accumulation
        run.batch_size = largest_batch(sequences, ROOM * run.room, planned)
        run.accumulation = sequences // run.batch_size
        run.config.update(train_micro_batch_size_per_gpu=run.batch_size, gradient_accumulation_steps=run.accumulation)
        run.notes.append(f"batch_size=auto: {run.batch_size} sequences at a time take about "
                         f"{format_bytes(planned(run.batch_size))} of {format_bytes(run.room)}")
    possible = (ds_config.supports_fast_gradients(run.config, run.dtype) and not s["any_deepspeed"] and world_size > 1
                and run.accumulation > 1)
    roomy = s["accumulate_locally"] == "auto" and planned(run.batch_size, True) <= 0.8 * run.room
    run.accumulate_locally = possible and (roomy or s["accumulate_locally"] is True)
    if run.accumulate_locally:
        run.notes.append(f"gradients are summed on each rank first, in {format_bytes(4 * run.n_trained)} for which "
                         "there is room, and once per step over the ranks; --accumulate_locally=False does it at each "
                         "micro-step")


def check_writable(out_dir):
    """ValueError unless out_dir, or the folder it will be made in, can be written, and its name is no pattern."""
    if set(out_dir) & set("*?["):
        raise ValueError(f"out_dir={out_dir} has *, ? or [ in it, which DeepSpeed takes for a pattern when it loads: "
                         "choose another with --out_dir=DIR")
    folder = nearest_existing_dir(out_dir)
    if not out_dir or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"out_dir={out_dir} cannot be written: choose another with --out_dir=DIR")


def describe_run(run, s, world_size):
    """The picture of the run, for the screen."""
    sequences = s["batch_size"] * world_size * s["gradient_accumulation_steps"]
    stage = run.config["zero_optimization"]["stage"]
    if run.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        hardware = f"{world_size} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
    else:
        hardware = f"{world_size} x CPU"
    tokens = run.meta["train_tokens"]
    step = sequences * s["block_size"]
    start = f"resumed from {run.tag}" if run.tag else f"from {run.init_from}"
    lines = [
        f"model      {run.n_params:,} parameters {start}, block_size {run.model.block_size}"
        + (f"; LoRA of rank {run.lora['rank']}: {run.n_trained:,} learn" if run.lora else ""),
        f"data       {' and '.join(one.name for one in run.sets)}: {tokens:,} tokens to train on, "
        f"{run.meta['val_tokens']:,} to validate",
        f"hardware   {hardware}, {run.dtype}, ZeRO-{stage} ({s['deepspeed_config']})"
        + (", compiled" if run.compile else ""),
        f"batch      {s['batch_size']} x {world_size} x {s['gradient_accumulation_steps']} = {sequences:,} sequences, "
        f"{step:,} tokens a step; {tokens / step:,.1f} steps an epoch",
        f"output     {s['out_dir']}",
    ]
    if s["keep_last"] and not s["eval_only"]:
        most = min(s["keep_last"], -(-s["max_iters"] // s["eval_interval"])) + 2  # best, and the one being written
        lines.append(f"space      {format_bytes(run.tag_bytes)} a tag, up to {most} of them; "
                     f"{format_bytes(free_bytes(s['out_dir']))} free")
    if len(run.sets) > 1:
        each = sum(one.share for one in run.sets)
        lines.append("mixture    " + ", ".join(f"{one.name} {one.share}" for one in run.sets)
                     + f" of each {each:,} sequences")
    if world_size > 1:
        lines.append("note       gradient_accumulation_steps is per GPU, as in DeepSpeed (nanoGPT's is the total)")
    return "\n".join([*lines, *(f"note       {note}" for note in run.notes)])
