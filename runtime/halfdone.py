"""Half-done work on a data set, in data/NAME/.partial: what lies there counts up to where progress.json says, and what
a kill has left beyond that is cut off.

    asked.json                 what the work was asked for; the same must be asked again to go on
    progress.json              how far it is: the state below, replaced as a whole
    train_00000, val_00000...  tokens of the splits, and the hashes of their documents: they grow
"""

import contextlib
import copy
import fcntl
import json
import os
import shutil

from runtime.data.dataset import SPLITS, DatasetError
from runtime.files import fsync, write_atomic

NAME, LOCK = ".partial", ".lock"
HELD = []  # the lock, for as long as this process lives
FRESH = {
    "source": 0, "sha256": None,  # files done, and the hash of what they hold
    "batches": 0, "digest": None,  # batches of the next file done, and the hash of what they hold
    "read": 0, "read_before": 0, "records": 0,  # bytes of all of them, and of the files that are done; records
    "bytes": {"train": 0, "val": 0, "hashes": 0},  # written, by name
    "open": {},  # by split, the record with which its last document would go on
    "documents": {"train": 0, "val": 0}, "duplicates": 0, "empty": 0, "unreadable": 0,
    "least": 2**64,  # the smallest hash
    "chars": "",  # all characters, where they are the tokens
    "parts": None,  # once the data set is whole: its files, by the name that they are to have
}


def begin(folder, asked, overwrite):
    """(folder of half-done work, its state), kept from other processes until this one ends; None where `folder` holds
    the data set that is asked for. Raises DatasetError where it holds anything else, unless that is to be overwritten.
    """
    partial = folder / NAME
    before = read_json(partial / "asked.json")
    if partial.exists() and not before:  # given up, and killed before all of it was gone
        lock(partial)
        shutil.rmtree(partial)
    if before and before != asked and not overwrite:
        raise DatasetError(f"{folder} holds half-done work {difference(before, asked)}: ask for the same to go on, or "
                           "give it up with --overwrite")
    if not before and not overwrite:
        done = (read_json(folder / "meta.json") or {}).get("asked")
        if done == asked and "-" not in asked["paths"]:
            return None
        if (folder / "meta.json").exists() or (folder / "train.bin").exists():
            raise DatasetError(f"{folder} holds a data set {difference(done, asked)}: choose another --name, or "
                               "give it up with --overwrite")
    partial.mkdir(parents=True, exist_ok=True)
    lock(partial)
    if before != asked:
        for path in partial.iterdir():
            if path.name != LOCK:
                path.unlink()
        write_atomic(partial / "asked.json", json.dumps(asked, indent=1))
    return partial, read_json(partial / "progress.json") or copy.deepcopy(FRESH)


def read_json(path):
    """What a JSON file holds; None where there is none, or one that is damaged."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))


def difference(before, asked):
    if not before:
        return "that was not prepared from this"
    if "-" in asked["paths"] and before == asked:
        return "from standard input, which may hold something else now"
    told = [f"--{key}={before[key]}, not {asked[key]}" for key in asked
            if key not in ("paths", "input") and before.get(key) != asked[key]]
    if before["paths"] != asked["paths"]:
        told.insert(0, f"{' '.join(before['paths'])}, not {' '.join(asked['paths'])}")
    return f"from {'; '.join(told)}" if told else "from the same files, which have changed since"


def lock(partial):
    """Not flock: the workers, who live a second longer than a process that is killed, would hold that too."""
    file = open(partial / LOCK, "w")  # noqa: SIM115 (closed with the process)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise DatasetError(f"another process is working in {partial}: wait for it, or choose another --name") from None
    HELD.append(file)


def grown(partial, name):
    """The files of this name, in order."""
    return sorted(partial.glob(f"{name}_[0-9]*"))


def limit(name, shard_bytes):
    return shard_bytes if name in SPLITS else 2**62


def append(partial, state, name, data, shard_bytes):
    """Let the files of this name grow by `data`, an array; a full one is followed by the next."""
    data, most = memoryview(data).cast("B"), limit(name, shard_bytes)
    while data:
        shard, size = divmod(state["bytes"][name], most)
        if shard == 10**5:
            raise DatasetError("there are more than 100,000 shards to be written: --shard_tokens must be larger")
        piece = data[: most - size]
        with open(partial / f"{name}_{shard:05d}", "ab") as file:
            file.write(piece)
        state["bytes"][name] += len(piece)
        data = data[len(piece):]


def cut_back(partial, state, shard_bytes):
    """Leave of the files that grow what the state says."""
    for name, size in state["bytes"].items():
        most = limit(name, shard_bytes)
        for shard, path in enumerate(grown(partial, name)):
            keep = min(max(0, size - shard * most), most)
            if path.stat().st_size < keep:
                raise DatasetError(f"{path} has lost some of its bytes: begin anew with --overwrite")
            os.truncate(path, keep) if keep else path.unlink()


def commit(partial, state):
    """Make the work so far durable: after a kill it continues from here."""
    before = (read_json(partial / "progress.json") or FRESH)["bytes"]
    for name in state["bytes"]:
        size = 0
        for path in grown(partial, name):
            size += path.stat().st_size
            if size > before[name]:  # else it has not grown since
                fsync(path)
    write_atomic(partial / "progress.json", json.dumps(state))


def give_up(partial):
    """Remove the folder. Without asked.json, it holds nothing for whoever comes next."""
    (partial / "asked.json").unlink()
    shutil.rmtree(partial)
