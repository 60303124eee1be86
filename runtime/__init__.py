"""Importing anything from here makes one line of an uncaught error that the user can fix, instead
of a traceback.

It also keeps how Python starts processes on Linux: as forks, which share what this process has
imported."""

import multiprocessing
import os
import sys
from importlib.util import find_spec

from runtime.errors import UserError
from runtime.output import Explainer, exit_with_error, explain_uncaught


def explain(error: BaseException) -> str | None:
    """Print a mistake of the user and exit with code 2, or return what to print.

    A bug keeps its traceback: then this returns None.
    """
    if isinstance(error, UserError):
        exit_with_error(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "runtime").partition(".")[0]
        if not find_spec(package):
            exit_with_error(
                f"{error}: run source .venv/bin/activate, or python -m pip install -r "
                "requirements.txt"
            )
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return None


def check_working_directory() -> None:
    """Exit with code 2 if the working directory is gone.

    PyTorch's import would end with an error of MKL.
    """
    try:
        os.getcwd()
    except OSError as error:
        exit_with_error(
            f"the working directory can't be used ({error.strerror}): it was removed, or made "
            'anew: run cd "$PWD", or go to another folder'
        )


explain_uncaught(Explainer.USER_ERROR, explain)
check_working_directory()

# Python 3.14 would start a server for them, import torch in each anew, and warn of the locks that
# it finds at the exit
if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None:
    multiprocessing.set_start_method("fork")
