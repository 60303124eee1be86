"""The model that all scripts train, sample, evaluate and export.

To use another file, such as a copy of model.py or nanoGPT's, change this import and nothing else:

    from model_x import GPT, GPTConfig
"""

from runtime.bring import adapted, import_errors
from runtime.cluster import exit_on_all_ranks
from runtime.errors import UserError

try:
    with import_errors():
        from model import GPT, GPTConfig

    GPT = adapted(GPT, GPTConfig)
except UserError as error:  # the same on all ranks, so one of them prints it
    exit_on_all_ranks(error)

__all__ = ["GPT", "GPTConfig"]
