"""Versions: which DeepSpeed this code was measured with, and what it needs of it.

The fast paths replace methods of DeepSpeed's optimizer, and another release may compute something else with them: under
0.17.6 a run in bfloat16 at stage 1 ended with exit code 0 and a gradient norm 65,536 times too large.
"""

import importlib.metadata

DEEPSPEED = "0.19.8"  # as in requirements.txt


def installed(name):
    """Return the version of an installed package, without a local build's suffix."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:  # from a folder on PYTHONPATH
        return importlib.import_module(name).__version__.partition("+")[0]


def deepspeed_problem(any_deepspeed):
    """Return why the installed DeepSpeed is refused, or None."""
    if not any_deepspeed and (version := installed("deepspeed")) != DEEPSPEED:
        return (f"DeepSpeed {version} is installed, and this code was tested with {DEEPSPEED} alone: python -m pip "
                f"install deepspeed=={DEEPSPEED}, or accept it with --any_deepspeed=True, which is slower")


def recorded_versions():
    """Return what a checkpoint's manifest records: {package: version}."""
    return {name: installed(name) for name in ("torch", "deepspeed")}


def version_note(recorded):
    """Return a line if a checkpoint was written under other versions than the installed ones, or None."""
    other = [f"{name} {recorded[name]} (installed: {version})" for name, version in recorded_versions().items()
             if recorded[name].partition("+")[0] != version]
    return f"note       the checkpoint was written under {', '.join(other)}" if other else None
