"""Checkpoints: each is a tag, a folder in out_dir."""

import importlib

HOMES = {"CheckpointError": "tags", "TagStore": "tags", "load_model": "shards", "Saver": "saver",
         "newest_intact": "resume", "load_into_engine": "resume"}


def __getattr__(name):  # late: only resume.py needs deepspeed, which takes seconds
    if name not in HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"runtime.checkpoint.{HOMES[name]}"), name)
