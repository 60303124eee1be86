"""Checkpoints: each is a folder, a tag, in out_dir."""

from runtime.checkpoint.tags import load_model  # noqa: F401
