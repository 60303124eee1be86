"""Tags: checkpoints of a run in its out_dir. This module finds, checks and removes them.

    out_dir/iter_5/         DeepSpeed's own files and manifest.json, which is written last
    out_dir/best/, final/   the same files as an iteration's tag, by hard links
    out_dir/latest          the newest tag's name, for DeepSpeed's tools
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections import namedtuple
from pathlib import Path

import torch

from model import GPTConfig
from runtime.cluster.ranks import RANK, exit_together, print0
from runtime.files import TEMP_NAME, UserError, file_digest, fsync, replace_dir, write_atomic
from runtime.versions import recorded_versions

CLIENT_STATE_KEY = "gpt2"  # our one key in DeepSpeed's client_state, whose other keys are the engine's own
# What DeepSpeed's optimizer files name beyond tensors and plain containers. Reading a file that names anything else
# could run its author's code.
SAFE_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
MANIFEST = {  # what its readers rely on: types, and of objects the keys
    "tag": str, "iter_num": int, "stage": int, "dtype": str, "world_size": int, "files": dict,
    "versions": {"torch": str, "deepspeed": str},
    "state": {
        "iter_num": int, "best_val_loss": (int, float), "evals_since_best": int, "lineage": list, "seen": dict,
        "grad_norms": list, "lora": (dict, type(None)),
        "model": {"block_size": int, "vocab_size": int, "n_layer": int, "n_head": int, "n_embd": int},
        "data": {"tokenizer": {"kind": str}, "vocab_size": int},
        "settings": {"dataset": (str, dict), "batch_size": int, "gradient_accumulation_steps": int},
    },
}
TAG_NAME = re.compile(r"iter_\d+|best|final")
Tag = namedtuple("Tag", ("name", "manifest"))  # manifest: the content of its file
OTHER_TAG = "choose another tag, or give the run up with --overwrite=True"


class CheckpointError(UserError):
    """A tag that is missing, damaged, unsafe or incompatible."""


class UnreadableError(CheckpointError):
    """A tag that may be intact, but that the system does not let us read: an older one would lose what it holds."""

    @classmethod
    def of(cls, error, path):
        """From an OSError that was met while reading `path`."""
        return cls(f"{error.filename or path} cannot be read ({error.strerror or error}): fix that, or name another "
                   "tag with --resume_tag")


class TagStore:
    """The tags of one out_dir. With read_only=False the folder is locked for this process, and all ranks call it."""

    def __init__(self, out_dir, read_only=True):
        self.out_dir, self.read_only = str(out_dir), read_only
        self._lock = None  # the open file that keeps other runs out
        self.skipped = []  # corrupt tags that newest_intact() met before the one it chose
        if not read_only:
            on_rank_0(self.lock)

    def path(self, tag, suffix=""):
        return os.path.join(self.out_dir, tag + suffix)

    def cache_path(self, tag):  # of its fp32 weights
        return self.path(tag, ".fp32.safetensors")

    def list(self):
        """The names of the complete tags, oldest first, best and final last. Tags that cannot be read are among them.
        Raises UnreadableError if the folder cannot be listed."""
        try:
            names = os.listdir(self.out_dir)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnreadableError(f"{self.out_dir} cannot be listed ({error.strerror}): fix that, or choose another "
                                  "--out_dir=DIR") from None
        tags = [name for name in names if TAG_NAME.fullmatch(name) and self.is_complete(name)]
        return sorted(tags, key=lambda tag: (not tag.startswith("iter_"), len(tag), tag))

    def is_complete(self, tag):
        """Whether a tag's manifest exists, which is written last. Waits up to a second for a tag that replace_dir() has
        just moved away and is about to replace."""
        end = time.monotonic() + 1
        while not exists(self.path(tag, "/manifest.json")):
            if not exists(self.path(tag, ".old/manifest.json")) or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def iteration(self, tag):
        """The iteration that a tag holds. If its manifest cannot be read: what its name says, or -1."""
        try:
            return self.read_manifest(tag)["iter_num"]
        except CheckpointError:
            return int(tag[5:]) if tag.startswith("iter_") else -1

    def newest_first(self):
        """The complete tags, the latest iteration first; of one iteration, its own tag before best and final."""
        return sorted(self.list(), key=lambda tag: (-self.iteration(tag), not tag.startswith("iter_")))

    def newest(self):
        """The name of the newest complete tag, or None."""
        return next(iter(self.newest_first()), None)

    def newer_than(self, iter_num):
        """The tags, best and final among them, of a later iteration than iter_num."""
        return [tag for tag in self.list() if self.iteration(tag) > iter_num]

    def find(self, tag="latest"):
        """The Tag of this name; "latest" is the newest. Raises CheckpointError, which names those there are."""
        names = self.list()
        if not names and not self.is_complete(tag):
            raise CheckpointError(f"{self.out_dir} holds no checkpoint: name another folder with --out_dir=DIR")
        name = self.newest() if tag == "latest" else tag
        if not self.is_complete(name):
            raise CheckpointError(f"{self.out_dir} holds no complete tag '{tag}'; there are {', '.join(names)}")
        return Tag(name, self.read_manifest(name))

    def read_manifest(self, tag):
        """A tag's manifest, checked. Raises CheckpointError."""
        path = self.path(tag, "/manifest.json")
        try:
            with open(path, encoding="utf-8") as f:
                text = f.read()
            manifest = json.loads(text)
        except OSError as error:
            raise UnreadableError.of(error, path) from None
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {OTHER_TAG}") from None
        if not isinstance(manifest, dict) or text != sign_manifest(manifest):
            raise CheckpointError(f"{path} has changed since it was saved (its sha256 differs): {OTHER_TAG}")
        try:
            check_manifest(manifest)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not one that this version can read ({error}): {OTHER_TAG}") from None
        return manifest

    # Changing tags: rank 0 alone

    def alias(self, tag, name):
        """Make out_dir/name the same files as out_dir/tag: hard links, or copies if the file system has no links."""
        source, work = self.path(tag), self.path(name, ".saving")
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)
        try:
            for file in os.listdir(source):
                try:
                    os.link(os.path.join(source, file), os.path.join(work, file))
                except OSError:
                    fsync(shutil.copy2(os.path.join(source, file), work))
            fsync(work)
            replace_dir(work, self.path(name))
        finally:  # after a full disk: make room for the next tag
            shutil.rmtree(work, ignore_errors=True)

    def prune(self, keep_last):
        """Delete all but the newest keep_last iter_* tags; best and final are folders of their own and stay."""
        for tag in [tag for tag in self.list() if tag.startswith("iter_")][:-keep_last]:
            self.delete(tag)

    def delete(self, tag):
        """Delete a tag. Its name goes first: no reader sees half of it, and remove_leftovers() finds the rest."""
        shutil.rmtree(self.move_away(tag, ".saving"))
        Path(self.cache_path(tag)).unlink(missing_ok=True)

    def move_away(self, tag, suffix=".damaged"):
        """Free the name of a tag: its folder gets the suffix. Returns the new path."""
        path = self.path(tag, suffix)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(self.path(tag), path)
        return path

    def remove_leftovers(self):
        """Remove what a run that was killed while saving has left. A tag that was just being replaced comes back; a
        folder of a tag's name without a manifest is quarantined."""
        for name in sorted(os.listdir(self.out_dir)):  # x.old before x.saving
            tag, _, kind = name.partition(".")
            if TEMP_NAME.fullmatch(name) or TAG_NAME.fullmatch(tag) and kind == "fp32.safetensors.tmp":
                os.remove(self.path(name))
            elif not TAG_NAME.fullmatch(tag) or not os.path.isdir(self.path(name)):
                continue  # the user's own
            elif kind == "old" and self.is_complete(name) and not exists(self.path(tag)):
                os.rename(self.path(name), self.path(tag))
            elif kind in ("old", "saving"):
                shutil.rmtree(self.path(name))
            elif kind == "" and not self.is_complete(name):
                print0(f"skipping {self.path(name)}: it has no manifest.json; kept as {name}.damaged")
                self.move_away(name)

    def lock(self):
        """Keep other runs out of out_dir until this process ends. Raises CheckpointError."""
        import fcntl  # not on Windows, where tags can be read

        try:
            os.makedirs(self.out_dir, exist_ok=True)
            self._lock = open(self.path(".lock"), "w")  # noqa: SIM115 (closed with the process)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another run is writing to {self.out_dir}: wait for it, or choose another "
                                  "--out_dir=DIR") from None
        except OSError as error:
            if self._lock is None:  # else the file system has no locks
                raise CheckpointError(f"out_dir={self.out_dir} cannot be written ({error.strerror}): choose another "
                                      "with --out_dir=DIR") from None

    def clean(self, tag=None, overwrite=False, aliases=()):
        """Prepare out_dir for a run that resumes from a Tag, or begins. Leftovers go, skipped tags are quarantined,
        with `overwrite` newer tags go, and the tag gets `aliases`, which a kill may have prevented. All ranks."""
        if not self.read_only:
            on_rank_0(self._clean, tag, overwrite, aliases)

    def _clean(self, tag, overwrite, aliases):
        try:
            self.remove_leftovers()
            for name in self.skipped:
                self.move_away(name)
            for name in self.newer_than(tag.manifest["iter_num"] if tag else -1) if overwrite else ():
                self.delete(name)
            if newest := self.newest():
                write_atomic(self.path("latest"), newest)
            else:
                Path(self.path("latest")).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{error.filename or self.out_dir} cannot be written ({error.strerror}): fix that, "
                                  "or choose another --out_dir=DIR") from None
        for name in aliases if tag and tag.name.startswith("iter_") else ():
            try:
                self.alias(tag.name, name)
            except OSError as error:  # the tag itself is intact
                print0(f"{name} could not be linked to {tag.name} ({error.strerror}); the run continues without: make "
                       "room")


def on_rank_0(function, *args):
    """Call it on rank 0, return its result there; all ranks exit if it raises a CheckpointError. All ranks."""
    result, problems = None, []
    if RANK == 0:
        try:
            result = function(*args)
        except CheckpointError as error:
            problems = [str(error)]
    exit_together(problems)
    return result


def exists(path):
    """Whether `path` exists. Only "not found" means that it does not: what the system does not let us see (no
    permission, a stale file handle, an I/O error) may well be there."""
    try:
        os.stat(path)
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def parse_run_path(path):
    """(out_dir, tag) of a run's out_dir, by its best tag or else its newest, or of a tag's own folder; else None."""
    folder, name = os.path.split(os.path.normpath(path))
    store = TagStore(os.path.normpath(path))
    if TagStore(folder).is_complete(name):
        return folder, name
    best, names = store.is_complete("best"), store.list()
    return (store.out_dir, "best" if best else store.newest()) if names else None


def topology(engine):
    """What a manifest says of the engine that saved it: ranks, ZeRO stage, precision, versions."""
    dtype = "float16" if engine.fp16_enabled() else "bfloat16" if engine.bfloat16_enabled() else "float32"
    return {"world_size": engine.world_size, "stage": engine.zero_optimization_stage(), "dtype": dtype,
            "versions": recorded_versions()}


def sign_manifest(manifest):
    """A manifest as text with its own hash in it, so that damage to the manifest is seen too."""
    unsigned = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    sha256 = hashlib.sha256(json.dumps(unsigned).encode()).hexdigest()
    return json.dumps({**unsigned, "manifest_sha256": sha256}, indent=1)


def check_manifest(manifest):
    """Raise ValueError or TypeError unless a manifest holds what its readers rely on."""
    check_shape(manifest, MANIFEST, "it")
    state, tokenizer = manifest["state"], manifest["state"]["data"]["tokenizer"]
    for where, items, shape in (("files", manifest["files"].values(), {"bytes": int, "sha256": str}),
                                ("seen", state["seen"].values(), int),
                                ("grad_norms", state["grad_norms"], (int, float))):
        for item in items:
            check_shape(item, shape, where)
    if tokenizer["kind"] == "char":
        check_shape(tokenizer.get("chars", ...), (str, list), "chars")
    if manifest["stage"] not in (0, 1, 2, 3) or manifest["world_size"] < 1:
        raise ValueError(f"stage {manifest['stage']}, world_size {manifest['world_size']}")
    GPTConfig(**state["model"])


def check_shape(node, shape, where):
    """Raise ValueError unless a node of a JSON file is of the type `shape`, or has the keys and types of a dict."""
    if isinstance(node, bool) or not isinstance(node, dict if isinstance(shape, dict) else shape):
        raise ValueError(f"{where} is missing" if node is ... else f"{where} is {node!r:.40}")
    for key in shape if isinstance(shape, dict) else ():
        check_shape(node.get(key, ...), shape[key], key)


def verify_files(folder, files, rank=0, world_size=1, reject_unlisted=True):
    """What is wrong with the `files` {name: {"bytes", "sha256"}} of a tag, one sentence each.

    The ranks share the hashing. reject_unlisted: DeepSpeed reads .pt files that it finds, listed or not. Raises OSError
    if a file cannot be read, which says nothing about what it holds.
    """
    problems = []
    for number, (name, entry) in enumerate(files.items()):
        file = os.path.join(folder, name)
        if not exists(file):
            problems.append(f"{file} is missing")
        elif (size := os.path.getsize(file)) != entry["bytes"]:
            problems.append(f"{file} has {size} bytes, not {entry['bytes']}")
        elif number % world_size == rank and file_digest(file)["sha256"] != entry["sha256"]:
            problems.append(f"{file} has changed since it was saved (its sha256 differs)")
        elif name.endswith(".pt"):
            try:
                if unsafe := set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - SAFE_GLOBALS:
                    problems.append(f"{file} names {', '.join(sorted(unsafe))}, which no checkpoint of ours does; not "
                                    "read")
            except OSError:
                raise
            except Exception as error:  # not torch's zip format, or a pickle that ends in the middle
                problems.append(f"{file} cannot be checked ({error}); not read")
    if reject_unlisted:
        problems += [f"{os.path.join(folder, name)} is not in the tag's manifest; not read"
                     for name in sorted(set(os.listdir(folder)) - set(files)) if name.endswith(".pt")]
    return problems
