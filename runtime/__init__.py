"""Importing anything from here makes one line of an uncaught error that the user can fix, instead of a traceback.

It also keeps how Python starts processes on Linux: as forks, which share what this process has imported."""

import multiprocessing
import os
import sys
from importlib.util import find_spec

from runtime.errors import UserError
from runtime.output import exit_with_error, explain_uncaught


def explain(error):
    """Print a mistake of the user and exit with code 2, or return what to print. A bug keeps its traceback."""
    if isinstance(error, UserError):
        exit_with_error(error)
    if isinstance(error, ModuleNotFoundError) and not find_spec((error.name or "runtime").partition(".")[0]):
        exit_with_error(f"{error}: run source .venv/bin/activate, or python -m pip install -r requirements.txt")
    return "interrupted" if isinstance(error, KeyboardInterrupt) else None


def check_working_directory():
    """Exit with code 2 if the working directory is gone: PyTorch's import would end with an error of MKL."""
    try:
        os.getcwd()
    except OSError as error:
        exit_with_error(
            f"the working directory can't be used ({error.strerror}): it was removed, or made anew: run cd "
            '"$PWD", or go to another folder'
        )


explain_uncaught(explain)
check_working_directory()
# Python 3.14 would start a server for them, import torch in each anew, and warn of the locks that it finds at the exit
if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None:
    multiprocessing.set_start_method("fork")
