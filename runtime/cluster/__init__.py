"""The ranks of a run: how they join, exchange values, and stop together."""

import os

# First of all, it sets RANK and the like for ranks of srun and mpirun
from runtime.cluster import launchers  # noqa: F401
from runtime.errors import UserError
from runtime.output import exit_with_error


def exit_on_all_ranks(error: UserError) -> None:
    """Print an error of this rank's command line and exit with code 2.

    The other ranks learn of it when they plan.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        exit_with_error(error)

    # Not before: --help must not wait for PyTorch
    from runtime.cluster.join import join_process_group
    from runtime.cluster.ranks import exit_together, ranks_from_environment

    try:
        ranks_from_environment()
    except UserError:  # of the environment: the other ranks have it too, so nobody waits
        exit_with_error(error)
    join_process_group()
    exit_together([str(error)])
