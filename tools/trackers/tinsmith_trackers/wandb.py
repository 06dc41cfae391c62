"""Weights & Biases: a run of the same id, whose axis is `step`. `WANDB_MODE=offline` keeps it in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tinsmith_trackers.tracker import Destination, Run, RunLog, Tracker

if TYPE_CHECKING:
    from wandb import Run as WandbRun

_PLACES: Final = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_DIR", "WANDB_MODE")


class WandbTracker(Tracker):
    def __init__(self, destination: Destination) -> None:
        import wandb  # noqa: F401 - said here that it is missing

        super().__init__(destination)

    @property
    def place(self) -> str:
        return " ".join([super().place, *(value for name in _PLACES if (value := os.environ.get(name)))])

    def open(self, run: Run) -> RunLog:
        import wandb

        directory = self.destination.directory
        opened = wandb.init(
            project=self.destination.project,
            dir=None if directory is None else str(directory),
            id=run.run_id.replace(":", "-"),  # W&B allows no colon there
            name=run.name,
            tags=list(run.tags),
            config={"run_id": run.run_id, **run.about},
            resume="allow",
            reinit="create_new",
        )
        # W&B's own step cannot go back, as it must for what a client logs late.
        opened.define_metric("*", step_metric="step")
        return _WandbRun(opened)


class _WandbRun(RunLog):
    def __init__(self, run: WandbRun) -> None:
        self._run = run

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step, "wall_time": time_s})

    def flush(self) -> None:
        """W&B's own process has each row as soon as it is logged, and writes it to its file when this one dies."""

    def close(self, *, ended: bool) -> None:  # noqa: ARG002 - a run that goes on is resumed by its id
        self._run.finish()
