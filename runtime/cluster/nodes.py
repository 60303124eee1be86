"""Compare the ranks before the run: all need the same settings, data and out_dir, and all exit if
one has a problem."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import socket
import tempfile
from dataclasses import asdict
from typing import Any

from runtime.cluster.ranks import RANK, all_gather_objects, broadcast_from_rank0, exit_together
from runtime.files import nearest_existing_dir


def exit_if_ranks_differ(plan: Any, several_nodes: bool) -> None:
    """Exit with code 2 if the ranks' RunPlans differ in something that must be the same.

    All ranks call this.
    """
    of_ranks = all_gather_objects((socket.gethostname(), fingerprint(plan)))
    hosts = [host for host, _ in of_ranks]
    fingerprints = [facts for _, facts in of_ranks]
    exit_together(mismatches(hosts, fingerprints))

    # What is saved in parts by several nodes has to be in one folder
    settings = plan.settings
    if several_nodes and settings.keep_last and not settings.eval_only:
        exit_if_not_shared(settings.out_dir, hosts)


def exit_if_not_shared(out_dir: str, hosts: list[str]) -> None:
    """Exit with code 2 if out_dir is not the same folder for all ranks. All ranks call this.

    hosts: of the ranks.
    """
    with contextlib.ExitStack() as stack:
        # Rank 0 writes a temporary file, and the others look for it. out_dir itself may not exist
        # yet: then the file is in a folder above it
        probe = None
        if RANK == 0:
            existing = nearest_existing_dir(out_dir)
            file = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=".shared-", dir=existing)
            )
            probe = os.path.relpath(file.name, out_dir)
        probe = broadcast_from_rank0(probe)
        place = os.path.normpath(os.path.join(out_dir, probe))  # without the .. of a missing folder
        seen = all_gather_objects(os.path.exists(place))

    others = []
    for host, sees_probe in zip(hosts, seen):
        if not sees_probe and host not in others:
            others.append(host)
    problems = []
    if others:
        problems.append(
            f"out_dir={out_dir} is not the same folder on {hosts[0]} and {', '.join(others)}: "
            "choose one that all nodes share with --out_dir=DIR"
        )
    exit_together(problems)


def fingerprint(plan: Any) -> dict[str, Any]:
    """Return what must be the same on all ranks, of a RunPlan: {name: value}."""
    facts = asdict(plan.settings)
    del facts["dataset"]  # a path, which may differ: its content counts
    facts["device"] = plan.execution.device
    facts["dtype"] = plan.execution.dtype
    facts["compile"] = plan.execution.compile
    facts["accumulate_locally"] = plan.accumulate_locally
    facts["the source of the weights"] = plan.start.init_from
    facts["the version of torch"] = importlib.metadata.version("torch")
    for name, value in asdict(plan.model).items():
        facts[f"the model's {name}"] = value
    for key, value in plan.ds_config.items():
        facts[f"the DeepSpeed JSON's {key}"] = json.dumps(value, sort_keys=True)

    # meta.json has the size and hash of each file of a dataset, wherever it is
    for number, data in enumerate(plan.datasets, 1):
        tokenizer = {**data.meta["tokenizer"], "file": None}
        meta = {**data.meta, "tokenizer": tokenizer, "share": data.share}
        text = json.dumps(meta, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        facts[f"the hash of dataset {number}"] = digest[:12]
    return facts


def mismatches(hosts: list[str], fingerprints: list[dict[str, Any]]) -> list[str]:
    """Return a message for each difference between the fingerprints of the ranks.

    hosts: of the ranks. On one host, the messages name the ranks.
    """
    if len(set(hosts)) > 1:
        kind = "nodes"
        places = hosts
    else:
        kind = "ranks"
        places = [f"rank {rank}" for rank in range(len(hosts))]

    # In the order in which the ranks have the names
    names = {}
    for facts in fingerprints:
        names.update(dict.fromkeys(facts))

    messages = []
    for name in names:
        places_of: dict[str, list[str]] = {}  # {a value as text: where it is}
        for place, facts in zip(places, fingerprints):
            value = repr(facts.get(name))
            places_of.setdefault(value, []).append(place)
        if len(places_of) > 1:
            values = []
            for value, found_at in places_of.items():
                values.append(f"{value} on {' and '.join(dict.fromkeys(found_at))}")
            messages.append(
                f"the {kind} differ in {name} ({', '.join(values)}): make it the same on all"
            )
    return messages
