"""The model that all scripts train, sample, evaluate and export.

To use another file, such as a copy of model.py or nanoGPT's, change this import and nothing else:

    from model_x import GPT, GPTConfig
"""

from runtime.bring import adapted, import_errors

with import_errors():
    from model import GPT, GPTConfig

GPT = adapted(GPT, GPTConfig)

__all__ = ["GPT", "GPTConfig"]
