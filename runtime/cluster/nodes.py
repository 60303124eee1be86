"""Compare the ranks before the run: all need the same settings, data and out_dir, and all exit if one has a problem."""

import hashlib
import importlib.metadata
import json
import os
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import asdict

from runtime.cluster.ranks import RANK, all_gather_objects, exit_with_problems, merge_problems
from runtime.files import nearest_existing_dir


def exit_if_ranks_differ(plan, problems, several_nodes):
    """Exit with code 2 if any rank has problems (messages), or if the ranks differ in something that must be the same.
    plan: a RunPlan, or None if there are problems. All ranks call this."""
    out_dir, probe = plan and plan.settings.out_dir, None
    with ExitStack() as stack:
        if RANK == 0 and plan and several_nodes and plan.settings.keep_last and not plan.settings.eval_only:
            # A temporary file that the other nodes see if they share out_dir
            file = tempfile.NamedTemporaryFile(prefix=".shared-", dir=nearest_existing_dir(out_dir))
            probe = os.path.relpath(stack.enter_context(file).name, out_dir)
        ranks = all_gather_objects((socket.gethostname(), problems, fingerprint(plan) if plan else {}, probe))
        hosts, _, fingerprints, (probe, *_) = zip(*ranks)
        problems = merge_problems([rank[:2] for rank in ranks]) or mismatches(hosts, fingerprints)
        if probe and not problems:
            found = all_gather_objects(is_listed(os.path.join(out_dir, probe)))
            if missing := dict.fromkeys(host for host, sees_probe in zip(hosts, found) if not sees_probe):
                problems = [f"out_dir={out_dir} is not the same folder on {hosts[0]} and {', '.join(missing)}: choose "
                            "one that all nodes share with --out_dir=DIR"]
    exit_with_problems(problems)


def fingerprint(plan):
    """Return what must be the same on all ranks: {name: value}."""
    settings, execution = plan.settings, plan.execution
    facts = {name: value for name, value in asdict(settings).items() if name != "dataset"}
    facts |= {"device": execution.device, "dtype": execution.dtype, "compile": execution.compile,
              "accumulate_locally": plan.accumulate_locally, "the source of the weights": plan.start.init_from,
              "the version of torch": importlib.metadata.version("torch")}
    facts |= {f"the model's {name}": value for name, value in asdict(plan.model).items()}
    for number, data in enumerate(plan.datasets, 1):  # meta.json has the size and hash of each file, wherever it is
        meta = {**data.meta, "tokenizer": {**data.meta["tokenizer"], "file": None}, "share": data.share}
        digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
        facts[f"the hash of dataset {number}"] = digest[:12]
    return facts


def mismatches(hosts, fingerprints):
    """Return a message for each difference between the fingerprints of the ranks, which are on these hosts."""
    places = hosts if len(set(hosts)) > 1 else [f"rank {rank}" for rank in range(len(hosts))]
    messages = []
    for name in fingerprints[0]:
        values = {}
        for place, facts in zip(places, fingerprints):
            values.setdefault(repr(facts.get(name)), []).append(place)
        if len(values) > 1:
            listed = ", ".join(f"{value} on {' and '.join(dict.fromkeys(at))}" for value, at in values.items())
            messages.append(f"the {'nodes' if places is hosts else 'ranks'} differ in {name} ({listed}): make it the "
                            "same on all")
    return messages


def is_listed(path):
    """Return whether a file exists. Reading the folder makes a network file system ask its server again."""
    folder, name = os.path.split(os.path.normpath(path))  # out_dir itself may not exist yet
    return os.path.isdir(folder) and name in os.listdir(folder)
