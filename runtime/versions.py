"""Versions: which DeepSpeed this code was measured with, and what it needs of it.

The fast paths replace methods of DeepSpeed's optimizer. Another release may lack what they build on, or compute
something else with it: under 0.19.7 the ZeRO-2 path failed at the first micro-step, and under 0.17.6 a run in bfloat16
at stage 1 ended with exit code 0 and a gradient norm 65,536 times too large.
"""

import importlib
import importlib.metadata

from runtime.cluster.ranks import print0

DEEPSPEED = "0.19.8"  # as in requirements.txt
RECORDED = ("torch", "deepspeed")  # in each checkpoint's manifest


def installed(name):
    """Return the version of an installed package, without a local build's suffix."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:  # from a folder on PYTHONPATH
        return importlib.import_module(name).__version__.partition("+")[0]


def deepspeed_problem(any_deepspeed):
    """Return why the installed DeepSpeed is refused, or None."""
    if any_deepspeed or installed("deepspeed") == DEEPSPEED:
        return None
    return (f"DeepSpeed {installed('deepspeed')} is installed, and this code was tested with {DEEPSPEED} alone: "
            f"python -m pip install deepspeed=={DEEPSPEED}, or accept it with --any_deepspeed=True, which is slower")


def recorded_versions():
    """Return what a checkpoint's manifest records: {package: version}."""
    return {name: installed(name) for name in RECORDED}


def version_note(recorded):
    """Return a line if a checkpoint was written under other versions than the installed ones, or None."""
    other = {name: version for name, version in recorded.items()
             if name in RECORDED and version.partition("+")[0] != installed(name)}
    if not other:
        return None
    return "note       the checkpoint was written under " + ", ".join(
        f"{name} {version} (installed: {installed(name)})" for name, version in other.items())


def has_all(target, names, path):
    """Return whether an object of DeepSpeed's has all these names. If not, print that its own `path` is used."""
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        print0(f"note       DeepSpeed {installed('deepspeed')} has no {', '.join(missing)}: its own {path} is used, "
               "which is slower")
    return not missing
