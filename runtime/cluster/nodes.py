"""Compare the ranks before the run: all need the same settings, data and out_dir, and all exit if one has a problem."""

import hashlib
import importlib.metadata
import json
import os
import socket
import tempfile
from contextlib import nullcontext
from dataclasses import asdict

from runtime.cluster.ranks import RANK, all_gather_objects, broadcast_from_rank0, exit_together
from runtime.files import nearest_existing_dir


def exit_if_ranks_differ(plan, several_nodes):
    """Exit with code 2 if the ranks' RunPlans differ in something that must be the same. All ranks call this."""
    hosts, fingerprints = zip(*all_gather_objects((socket.gethostname(), fingerprint(plan))))
    exit_together(mismatches(hosts, fingerprints))
    out_dir = plan.settings.out_dir
    if several_nodes and plan.settings.keep_last and not plan.settings.eval_only:
        # Write a temporary file that the other nodes see if they share out_dir
        with (tempfile.NamedTemporaryFile(prefix=".shared-", dir=nearest_existing_dir(out_dir)) if RANK == 0
              else nullcontext()) as file:
            probe = broadcast_from_rank0(file and os.path.relpath(file.name, out_dir))
            # normpath: out_dir itself may not exist yet
            sees_probe = all_gather_objects(os.path.exists(os.path.normpath(os.path.join(out_dir, probe))))
        others = dict.fromkeys(host for host, sees in zip(hosts, sees_probe) if not sees)
        exit_together([f"out_dir={out_dir} is not the same folder on {hosts[0]} and {', '.join(others)}: choose one "
                       "that all nodes share with --out_dir=DIR"] if others else [])


def fingerprint(plan):
    """Return what must be the same on all ranks: {name: value}."""
    settings, execution = plan.settings, plan.execution
    facts = {name: value for name, value in asdict(settings).items() if name != "dataset"}
    facts |= {"device": execution.device, "dtype": execution.dtype, "compile": execution.compile,
              "accumulate_locally": plan.accumulate_locally, "the source of the weights": plan.start.init_from,
              "the version of torch": importlib.metadata.version("torch")}
    facts |= {f"the model's {name}": value for name, value in asdict(plan.model).items()}
    facts |= {f"the DeepSpeed JSON's {key}": json.dumps(value, sort_keys=True) for key, value in plan.ds_config.items()}
    for number, data in enumerate(plan.datasets, 1):  # meta.json has the size and hash of each file, wherever it is
        meta = {**data.meta, "tokenizer": {**data.meta["tokenizer"], "file": None}, "share": data.share}
        digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
        facts[f"the hash of dataset {number}"] = digest[:12]
    return facts


def mismatches(hosts, fingerprints):
    """Return a message for each difference between the fingerprints of the ranks, which are on these hosts."""
    places = hosts if len(set(hosts)) > 1 else [f"rank {rank}" for rank in range(len(hosts))]
    messages = []
    for name in dict.fromkeys(name for facts in fingerprints for name in facts):
        values = {}
        for place, facts in zip(places, fingerprints):
            values.setdefault(repr(facts.get(name)), []).append(place)
        if len(values) > 1:
            listed = ", ".join(f"{value} on {' and '.join(dict.fromkeys(at))}" for value, at in values.items())
            messages.append(f"the {'nodes' if places is hosts else 'ranks'} differ in {name} ({listed}): make it the "
                            "same on all")
    return messages
