"""Tags: named, found, checked, and turned back into plain weights.

    out_dir/iter_5/         DeepSpeed's own files and manifest.json, which is written last
    out_dir/best/, final/   the same files as an iteration's tag, by hard links
    out_dir/latest          the newest tag's name

Here tags are found, checked and read; runtime/checkpoint/saver.py writes them. To load for inference, on any machine:

    from runtime.checkpoint import load_model
    model, manifest = load_model("out-shakespeare-xl-deepspeed", "best")
    logits = model(tokens)
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time

import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from runtime.cluster.ranks import gather_unique, print0, silence_stdout
from runtime.files import UserError, file_digest, fsync, replace_dir, write_atomic

STATE = "gpt2"  # our one key in DeepSpeed's client_state, whose other keys are the engine's own
# What DeepSpeed's optimizer files name beyond tensors and plain containers. Reading a file that names anything else
# could run its author's code.
SAFE_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
MAYBE = type(...)  # a key that may be missing
MANIFEST = {  # what its readers rely on: types, and of objects the keys
    "iter_num": int, "stage": int, "dtype": str, "world_size": int, "files": dict,
    "versions": ({"torch": str, "deepspeed": str}, MAYBE),
    "state": {
        "iter_num": int, "best_val_loss": (int, float), "stale": (int, MAYBE), "stages": (list, MAYBE),
        "seen": (dict, MAYBE), "norms": (list, MAYBE), "lora": (dict, type(None), MAYBE), "model": dict,
        "data": {"tokenizer": {"kind": str}, "vocab_size": int},
        "settings": {"dataset": (str, dict), "batch_size": int, "gradient_accumulation_steps": int},
    },
}
OUR_NAMES = re.compile(r"iter_\d+|best|final")
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # of runtime.files.write_temp


class CheckpointError(UserError):
    """A tag that is not there, not whole, not safe or not fit; the message says what to do."""


class UnreadableError(CheckpointError, OSError):
    """A tag that may be whole, but that the system does not let us read."""


def unreadable(error, path):
    """Return the sentence for an OSError met while reading `path`."""
    return (f"{error.filename or path} cannot be read ({error.strerror or error}): fix that, or name another tag with "
            "--resume_tag")


def exists(path):
    """Return whether `path` exists. Only "not found" means that it does not: what the system does not let us look at
    (no permission, a stale file handle, an I/O error) may well be there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def sealed(manifest):
    """A manifest as text, with its own hash in it, so that damage to the manifest is seen too."""
    unsealed = {key: value for key, value in manifest.items() if key != "seal"}
    seal = hashlib.sha256(json.dumps(unsealed).encode()).hexdigest()
    return json.dumps({**unsealed, "seal": seal}, indent=1)


def link(out_dir, tag, name):
    """Make out_dir/name the same files as out_dir/tag: hard links, or copies where the file system has none. Rank 0."""
    source, work = os.path.join(out_dir, tag), os.path.join(out_dir, name + ".saving")
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    try:
        for file in os.listdir(source):
            try:
                os.link(os.path.join(source, file), os.path.join(work, file))
            except OSError:
                fsync(shutil.copy2(os.path.join(source, file), work))
        fsync(work)
    except OSError:  # a full disk: make room for the next tag
        shutil.rmtree(work, ignore_errors=True)
        raise
    replace_dir(work, os.path.join(out_dir, name))


def tags(out_dir):
    """Return the names of the whole tags, oldest first, best and final last; a tag that cannot be read is among them.
    Raises UnreadableError if the folder cannot be listed."""
    try:
        names = os.listdir(out_dir)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(f"{out_dir} cannot be listed ({error.strerror}): fix that, or choose another "
                              "--out_dir=DIR") from None
    found = [t for t in names if OUR_NAMES.fullmatch(t) and is_whole(out_dir, t)]
    return sorted(found, key=lambda t: (0, int(t[5:]), t) if t.startswith("iter_") else (1, 0, t))


def is_whole(out_dir, tag):
    """Return whether a tag's manifest exists, which is written last."""
    return exists(os.path.join(out_dir, tag, "manifest.json"))


def wait_for(out_dir, tag):
    """Wait up to a second for a tag that replace_dir() has just moved away and is about to replace."""
    end = time.monotonic() + 1
    while not is_whole(out_dir, tag) and is_whole(out_dir, tag + ".old") and time.monotonic() < end:
        time.sleep(0.01)


def iteration(out_dir, tag):
    """The iteration that a tag holds; where its manifest cannot be read, what its name says, or -1."""
    try:
        return find_tag(out_dir, tag)[1]["iter_num"]
    except CheckpointError:
        return int(tag[5:]) if tag.startswith("iter_") else -1


def newest_first(out_dir):
    """The whole tags, the latest iteration first; of the same iteration, its own tag before best and final."""
    return sorted(tags(out_dir), key=lambda tag: (-iteration(out_dir, tag), not tag.startswith("iter_")))


def newest_tag(out_dir):
    """The name of the newest whole tag, None without any."""
    return (newest_first(out_dir) or [None])[0]


def prune(out_dir, keep_last):
    """Remove all but the newest keep_last iter_* tags; best and final are folders of their own and stay. Rank 0."""
    for tag in [t for t in tags(out_dir) if t.startswith("iter_")][:-keep_last]:
        remove(out_dir, tag)


def remove(out_dir, tag):
    """Remove one tag; its name goes first, so that a reader never sees half of it, and tidy() finds what is left."""
    doomed = os.path.join(out_dir, tag + ".saving")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(os.path.join(out_dir, tag), doomed)
    shutil.rmtree(doomed)
    with contextlib.suppress(FileNotFoundError):
        os.remove(cache_path(out_dir, tag))


def earlier_run(path):
    """(out_dir, tag) of a run's out_dir, whose best tag or else newest is meant, or of a tag's own folder; or None."""
    path = os.path.normpath(path)
    wait_for(*os.path.split(path))
    if is_whole(*os.path.split(path)):
        return os.path.split(path)
    wait_for(path, "best")
    there = tags(path)
    return (path, "best" if "best" in there else newest_tag(path)) if there else None


def newer_tags(out_dir, iter_num):
    """The tags, best and final among them, that hold a later iteration than iter_num."""
    return [tag for tag in tags(out_dir) if iteration(out_dir, tag) > iter_num]


def set_aside(out_dir, tag):
    """Free the name of a damaged tag, and keep what is left of it as tag.damaged."""
    aside = os.path.join(out_dir, tag + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(os.path.join(out_dir, tag), aside)


def name_latest(out_dir):
    """Let `latest` name the newest tag, for DeepSpeed's tools; without any tag there is no such file."""
    path, newest = os.path.join(out_dir, "latest"), newest_tag(out_dir)
    if newest:
        write_atomic(path, newest)
    elif os.path.exists(path):
        os.remove(path)


def take(out_dir):
    """(what keeps other runs out of out_dir as long as it is held, why it cannot be had: sentences)."""
    try:
        os.makedirs(out_dir, exist_ok=True)
        held = lock(out_dir)
    except OSError as error:
        return None, [f"out_dir={out_dir} cannot be written ({error.strerror}): choose another with --out_dir=DIR"]
    if held is None:
        return None, [f"another run is writing to {out_dir}: wait for it, or choose another --out_dir=DIR"]
    return held, []


def lock(out_dir):
    """Keep other runs out of out_dir as long as this process lives: the open file, or None if another has it."""
    file = open(os.path.join(out_dir, ".lock"), "w")  # noqa: SIM115 (closed with the process)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        pass  # a file system without locks
    return file


def make_ready(out_dir, iter_num, passed_over, overwrite):
    """Clear the folder of a run that goes on after iteration iter_num, or begins with -1: leftovers of what was killed
    go, tags that were passed over are set aside, and with overwrite newer ones go."""
    tidy(out_dir)
    for tag in passed_over:
        set_aside(out_dir, tag)
    if overwrite:
        for tag in newer_tags(out_dir, iter_num):
            remove(out_dir, tag)
    name_latest(out_dir)


def tidy(out_dir):
    """Clear away what a run that was killed while saving has left; a tag that was just being replaced comes back, and
    a folder of a tag's name without a manifest is set aside."""
    for name in sorted(os.listdir(out_dir)):  # x.old before x.saving
        tag, _, kind = name.partition(".")
        path, final = os.path.join(out_dir, name), os.path.join(out_dir, tag)
        if TEMPORARY.fullmatch(name):
            os.remove(path)
        elif not OUR_NAMES.fullmatch(tag):
            continue  # the user's own
        elif kind == "fp32.safetensors.tmp":
            os.remove(path)
        elif not os.path.isdir(path):
            continue
        elif kind == "old" and is_whole(out_dir, name) and not exists(final):
            os.rename(path, final)
        elif kind in ("old", "saving"):
            shutil.rmtree(path)
        elif kind == "" and not is_whole(out_dir, name):
            print0(f"passing over {path}: it has no manifest.json; kept as {name}.damaged")
            set_aside(out_dir, name)


def find_tag(out_dir, tag="latest"):
    """(tag, manifest) of a whole tag; 'latest' takes the newest. Raises CheckpointError, naming those there are."""
    wait_for(out_dir, tag)
    there = tags(out_dir)
    if not there and not is_whole(out_dir, tag):
        raise CheckpointError(f"{out_dir} holds no checkpoint: name another folder with --out_dir=DIR")
    tag = newest_tag(out_dir) if tag == "latest" else tag
    if not is_whole(out_dir, tag):
        raise CheckpointError(f"{out_dir} holds no whole tag '{tag}'; there are {', '.join(there)}")
    try:
        with open(os.path.join(out_dir, tag, "manifest.json"), encoding="utf-8") as f:
            text = f.read()
        manifest = json.loads(text)
        missing = {"iter_num", "stage", "dtype", "world_size", "files", "state"} - manifest.keys()
    except OSError as error:
        raise UnreadableError(unreadable(error, os.path.join(out_dir, tag))) from None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{out_dir}/{tag}/manifest.json cannot be read: {error}; choose another tag, or give the "
                              "run up with --overwrite=True") from None
    if missing:
        raise CheckpointError(f"{out_dir}/{tag}/manifest.json lacks {', '.join(sorted(missing))}: not one of ours")
    if manifest.get("format") != 1 and text != sealed(manifest):  # format 1 had no seal
        raise CheckpointError(f"{out_dir}/{tag}/manifest.json has changed since it was saved (its seal differs)")
    try:
        check_shape(manifest, MANIFEST, "it")
        for name, entry in manifest["files"].items():
            check_shape(entry, {"bytes": int, "sha256": str}, name)
        state, tokenizer = manifest["state"], manifest["state"]["data"]["tokenizer"]
        for name, count in state.get("seen", {}).items():
            check_shape(count, int, f"seen {name}")
        for norm in state.get("norms", []):
            check_shape(norm, (int, float), "norms")
        if tokenizer["kind"] == "char":
            check_shape(tokenizer.get("chars", ...), (str, list), "chars")
        if manifest["stage"] not in (0, 1, 2, 3) or manifest["world_size"] < 1:
            raise ValueError(f"stage {manifest['stage']}, world_size {manifest['world_size']}")
        GPTConfig.from_dict(manifest["state"]["model"])
    except ValueError as error:
        raise CheckpointError(f"{out_dir}/{tag}/manifest.json is not one that this version can read ({error}): choose "
                              "another tag, or give the run up with --overwrite=True") from None
    return tag, manifest


def check_shape(node, shape, where):
    """Raise ValueError unless a node of a JSON file is as MANIFEST describes its parts."""
    if isinstance(shape, tuple) and isinstance(shape[0], dict):  # an object that may be missing
        shape = dict if node is ... else shape[0]
        node = {} if node is ... else node
    if isinstance(node, bool) or not isinstance(node, dict if isinstance(shape, dict) else shape):
        raise ValueError(f"{where} is missing" if node is ... else f"{where} is {node!r:.40}")
    for key in shape if isinstance(shape, dict) else ():
        check_shape(node.get(key, ...), shape[key], key)


def damages(path, files, rank=0, world_size=1, strangers=True):
    """Return what is wrong with files (name -> bytes, sha256) of a tag, one sentence each; nothing if they are whole.
    The ranks share the hashing. strangers: whether files that are not listed are looked for. Raises OSError where a
    file cannot be read, which says nothing about what it holds."""
    found = []
    for number, (name, entry) in enumerate(files.items()):
        file = os.path.join(path, name)
        try:
            size = os.stat(file).st_size
        except (FileNotFoundError, NotADirectoryError):
            found.append(f"{file} is missing")
            continue
        if size != entry["bytes"]:
            found.append(f"{file} has {size} bytes, not {entry['bytes']}")
        elif number % world_size == rank and file_digest(file)["sha256"] != entry["sha256"]:
            found.append(f"{file} has changed since it was saved (its sha256 differs)")
        elif name.endswith(".pt"):
            try:
                unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - SAFE_GLOBALS
            except OSError:
                raise
            except Exception as error:  # not torch's zip format, or a pickle that ends in the middle
                found.append(f"{file} cannot be checked ({error}); not read")
                continue
            if unsafe:
                found.append(f"{file} names {', '.join(sorted(unsafe))}, which no checkpoint of ours does; not read")
    for name in sorted(set(os.listdir(path)) - set(files)):
        if strangers and name.endswith(".pt"):  # DeepSpeed reads what it finds, listed or not
            found.append(f"{os.path.join(path, name)} is not in the tag's manifest; not read")
    return found


def first_whole(out_dir, names, fits, weights_only=False):
    """(tag, manifest, passed_over) of the first of these tags that is whole on all ranks and that fits(tag, manifest)
    lets pass; passed_over: {tag: why not, sentences} of those before it. (None, None, ...) if there is none. With
    weights_only the optimizer's files are not looked at where the weights are not in them. A tag that cannot be read
    ends the search: it is not damaged, and what it holds would be lost to an older one. All ranks."""
    rank, world_size, passed_over = dist.get_rank(), dist.get_world_size(), {}
    for tag in names:
        barred = []
        try:
            _, manifest = find_tag(out_dir, tag)
            fits(tag, manifest)
            files = {name: entry for name, entry in manifest["files"].items()
                     if "optim" not in name or manifest["stage"] == 3 or not weights_only}
            problems = damages(os.path.join(out_dir, tag), files, rank, world_size, strangers=not weights_only)
        except UnreadableError as error:
            problems = barred = [str(error)]
        except OSError as error:
            problems = barred = [unreadable(error, os.path.join(out_dir, tag))]
        except CheckpointError as error:
            problems = [str(error)]
        passed_over[tag], barred = gather_unique(problems), gather_unique(barred)
        if barred:
            return None, None, {tag: barred}
        if not passed_over[tag]:
            del passed_over[tag]
            return tag, manifest, passed_over
    return None, None, passed_over


def load(engine, out_dir, tag, manifest, fresh_manifest, weights_only=False):
    """Put a tag's weights, optimizer and loss scale into the engine, all ranks. fresh_manifest: what a tag saved now
    would say of its ranks, stage and dtype; where they differ, everything is dealt out anew."""
    from runtime.checkpoint.shards import Shards, put

    was, now = ("{world_size} ranks at ZeRO stage {stage} in {dtype}".format(**m) for m in (manifest, fresh_manifest))
    if weights_only and manifest["stage"] < 3 and manifest["dtype"] != "float32":
        print0(f"note       weights of {out_dir}/{tag} are read in {manifest['dtype']}, as its model file has them: "
               "resume without --resume_weights_only=True to keep their float32 precision")
    if was != now or weights_only:
        print0(f"re-sharding {out_dir}/{tag}: saved by {was}, now {now}{', weights only' if weights_only else ''}")
        put(engine, Shards(os.path.join(out_dir, tag), manifest, weights_only), weights_only)
        return
    ours = [{key: group[key] for key in ("betas", "weight_decay")} for group in engine.optimizer.param_groups]
    with silence_stdout():
        path, _ = engine.load_checkpoint(out_dir, tag=tag)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {out_dir}/{tag}")
    for group, settings in zip(engine.optimizer.param_groups, ours):
        group.update(settings)  # DeepSpeed brings back the saved ones


def cache_path(out_dir, tag):
    return os.path.join(out_dir, f"{tag}.fp32.safetensors")


def fp32_weights(out_dir, tag):
    """name -> fp32 tensor of a tag's model, for GPT.load_state_dict; cached as safetensors beside the tag, from where
    they are mapped.

    Every file is checked against the manifest and against SAFE_GLOBALS before it is read. Raises CheckpointError.
    """
    path, cache = os.path.join(out_dir, tag), cache_path(out_dir, tag)
    seal = file_digest(os.path.join(path, "manifest.json"))["sha256"]
    weights = read_cache(cache, seal)
    if weights:
        return tied(weights)
    _, manifest = find_tag(out_dir, tag)
    found = damages(path, manifest["files"])
    if found:
        raise CheckpointError("\n".join(found))
    from runtime.checkpoint.shards import Shards

    shards = Shards(path, manifest)
    with contextlib.suppress(OSError):  # a folder that is full or not ours can be sampled from all the same
        write_cache(cache, shards, seal)
    return tied(read_cache(cache, seal) or {name: shards.get(name).clone() for name in shards.shapes})


def read_cache(cache, seal):
    """The weights in a cache file that was made of the tag whose manifest has this hash and has not changed since;
    None if there is none."""
    from safetensors import safe_open

    with contextlib.suppress(Exception), safe_open(cache, framework="pt") as f:  # a bad cache is made anew
        metadata = f.metadata()
        with open(cache, "rb") as raw:
            length = raw.read(8)
            header = length + raw.read(int.from_bytes(length, "little"))
            sha256 = hashlib.sha256(header.replace(metadata["sha256"].encode(), b"0" * 64))
            while part := raw.read(2**20):
                sha256.update(part)
        if metadata == {"manifest": seal, "sha256": sha256.hexdigest()}:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no mapping)


def write_cache(cache, shards, seal):
    """Write fp32 weights as safetensors, a parameter at a time: the library's own writer wants them all in memory.
    The form (huggingface.co/docs/safetensors): the header's length in 8 bytes, the header in JSON, the tensors."""
    # the hash is of the header with zeros in its place, and of the rest
    header, end, sha256 = {"__metadata__": {"manifest": seal, "sha256": "0" * 64}}, 0, hashlib.sha256()
    for name, shape in shards.shapes.items():
        start, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    sha256.update(text)
    try:
        with open(cache + ".tmp", "wb") as f:
            f.write(text)
            for name in shards.shapes:
                content = shards.get(name).contiguous().view(-1).numpy().data
                sha256.update(content)
                f.write(content)
            f.seek(text.index(b"0" * 64))
            f.write(sha256.hexdigest().encode())
        os.replace(cache + ".tmp", cache)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(cache + ".tmp")


def load_model(out_dir, tag="latest", dropout=None):
    """(GPT in eval mode with a tag's fp32 weights, on the CPU; the tag's manifest). Holds the weights once. Tags of any
    stage, precision and number of ranks; what LoRA has learnt is added to the weights. Raises CheckpointError."""
    from runtime.lora import merge

    tag, manifest = find_tag(out_dir, tag)
    with torch.device("meta"):
        kept = {} if dropout is None else {"dropout": dropout}
        model = GPT(GPTConfig(**{**manifest["state"]["model"], **kept}))
    try:
        weights = fp32_weights(out_dir, tag)
        if manifest["state"].get("lora"):
            merge(weights, manifest["state"]["lora"])
        model.load_state_dict(weights, assign=True)
    except UnreadableError:
        raise
    except FileNotFoundError as error:  # a run that writes beside us has pruned or replaced it
        raise CheckpointError(f"{out_dir}/{tag} went away while it was read ({error.strerror}): try again") from None
    except OSError as error:
        raise UnreadableError(unreadable(error, os.path.join(out_dir, tag))) from None
    model.lm_head.weight = model.transformer.wte.weight
    return model.eval(), manifest


def tied(weights):
    """The output layer is the token embedding; files hold it once."""
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights
