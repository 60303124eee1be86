"""Checkpoints: saved in the background, read with any number of GPUs at any ZeRO stage."""

from runtime.checkpoint.resume import newest_intact
from runtime.checkpoint.saver import Saver
from runtime.checkpoint.shards import load_model, open_tag
from runtime.checkpoint.tags import CheckpointError, TagStore

__all__ = ["CheckpointError", "Saver", "TagStore", "load_model", "newest_intact", "open_tag"]
