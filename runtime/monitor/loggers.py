"""wandb and TensorBoard: loggers that a run can report to, besides its console and
history.jsonl."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from runtime.cluster.ranks import print0
from runtime.errors import UserError
from runtime.monitor.wandb_settings import check_wandb_settings

INSTALL = "python -m pip install -r requirements.txt"
FIXES = {
    "wandb": f"{INSTALL}, wandb login or WANDB_MODE=offline",
    "tensorboard": INSTALL,
}


class Logger(NamedTuple):
    """One logger that has been started."""

    log: Callable[[dict[str, float], int], object]  # log(values, step)
    close: Callable[[], object]


class Loggers:
    """The loggers of a run. One that fails is reported and dropped, and the run goes on.

    settings: the run's, and record: what wandb shows of them. iter_num: of the checkpoint that the
    run resumes from, else 0. wandb_id: of the run that this checkpoint names, or None; start()
    changes it.
    """

    def __init__(
        self, settings: Any, record: dict, iter_num: int, resumes: bool, wandb_id: str | None
    ):
        self.settings = settings
        self.settings_record = record
        self.iter_num = iter_num
        self.resumes = resumes
        self.wandb_id = wandb_id
        self.running: dict[str, Logger] = {}

    def start(self) -> list[str]:
        """Start those that are in the settings. Return the problems, if the run shouldn't begin.

        A run that resumes goes on without a logger that fails.
        """
        wanted = {
            "wandb": (self.settings.wandb_log, self.start_wandb),
            "tensorboard": (self.settings.tensorboard_log, self.start_tensorboard),
        }
        for name, (is_wanted, start) in wanted.items():
            if not is_wanted:
                continue
            try:
                self.running[name] = start()
            except Exception as error:  # not installed, not logged in, no network: each has its own
                why = " ".join(str(error).split()) or type(error).__name__
                problem = (
                    f"{name} failed to start ({why}): {FIXES[name]}, or set --{name}_log=False"
                )
                if not self.resumes:
                    return [problem]
                print0(f"{problem}; continuing without it")
        return []

    def start_wandb(self) -> Logger:
        """Start a wandb run, or resume the checkpoint's. Nothing else imports wandb."""
        check_wandb_settings()
        import wandb

        name = self.settings.wandb_run_name
        if not name:
            name = os.path.basename(os.path.abspath(self.settings.out_dir))

        # What wandb has after the checkpoint can't be removed. If the user has discarded it, the
        # run that follows is another one
        goes_back = self.resumes and self.settings.overwrite
        if goes_back and self.wandb_id:
            print0(
                f"wandb: a new run, because overwrite=True discards what {self.wandb_id} has after "
                f"step {self.iter_num}"
            )
            self.wandb_id = None

        # A new run, or the checkpoint's
        run = wandb.init(
            project=self.settings.wandb_project,
            name=name,
            config=self.settings_record,
            id=self.wandb_id,
            resume="allow",
        )
        # Not wandb's own steps, which only grow: it would drop what a resume repeats
        run.define_metric("train/iter")
        run.define_metric("*", step_metric="train/iter")
        if self.wandb_id:  # the checkpoint's, and it may be somebody else's
            project = self.settings.wandb_project
            print0(f"wandb: continuing the run {run.id} of project {project}")
        self.wandb_id = run.id
        return Logger(lambda values, step: run.log(values), run.finish)

    def start_tensorboard(self) -> Logger:
        """Write TensorBoard's files to out_dir/tensorboard.

        A run that resumes hides earlier values after the checkpoint.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(self.settings.out_dir, "tensorboard")
        if os.path.islink(folder):  # in a folder where others write, it may lead anywhere
            raise UserError(f"{folder} is a link: remove it")
        purge_step = self.iter_num + 1 if self.iter_num else 0
        writer = SummaryWriter(folder, purge_step=purge_step)

        def log(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return Logger(log, writer.close)

    def log(self, values: dict[str, float], step: int) -> None:
        """Give each logger the values of a step."""
        self.call("log", values, step)

    def close(self) -> None:
        """Close each logger."""
        self.call("close")

    def call(self, method: str, *args: object) -> None:
        for name, logger in list(self.running.items()):
            try:
                getattr(logger, method)(*args)
            except Exception as error:  # of any kind
                description = f"{type(error).__name__}: {error}"
                print0(f"{name} failed; continuing without it: {description}")
                del self.running[name]
