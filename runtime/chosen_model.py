"""The model that all scripts train, sample, evaluate and export.

To use another file, such as a copy of model.py, change this import and nothing else:

    from model_x import GPT, GPTConfig
"""

from model import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
