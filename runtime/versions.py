"""Reject untested versions of DeepSpeed, and record versions in checkpoints.

The fast paths replace methods of DeepSpeed's optimizer, so another release may compute wrong results. With DeepSpeed
0.17.6, a bfloat16 run at stage 1 exited with code 0 and a gradient norm 65,536 times too large.
"""

import importlib.metadata

DEEPSPEED = "0.19.8"  # as in requirements.txt


def installed(name):
    """Return the version of an installed package without its local suffix."""
    return importlib.metadata.version(name).partition("+")[0]


def deepspeed_problem():
    """Return a message if the installed DeepSpeed isn't the tested one, or None."""
    if (version := installed("deepspeed")) != DEEPSPEED:
        return (f"DeepSpeed {version} is installed, but only {DEEPSPEED} is tested: run python -m pip install "
                f"deepspeed=={DEEPSPEED}")


def recorded_versions():
    """Return {package: version} for a checkpoint's manifest."""
    return {name: installed(name) for name in ("torch", "deepspeed")}


def version_note(recorded):
    """Return a note if a checkpoint was written with other versions than the installed ones, or None."""
    other = [f"{name} {recorded[name]} (installed: {version})" for name, version in recorded_versions().items()
             if recorded[name].partition("+")[0] != version]
    return f"note       the checkpoint was written with {', '.join(other)}" if other else None
