"""The ranks of a run: how they join, exchange values, and stop together."""

import os

from runtime.cluster import launchers  # noqa: F401  # first of all, it sets RANK and the like
from runtime.errors import UserError
from runtime.output import exit_with_error


def exit_on_all_ranks(error):
    """Print an error of this rank's command line and exit with code 2. The other ranks learn of it when they plan."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        exit_with_error(error)
    from runtime.cluster.join import join_process_group  # not before: --help must not wait for PyTorch
    from runtime.cluster.ranks import exit_together, ranks_from_environment

    try:
        ranks_from_environment()
    except UserError:  # of the environment: the other ranks have it too, so nobody waits
        exit_with_error(error)
    join_process_group()
    exit_together([str(error)])
