"""A project of trackio in `TRACKIO_DIR`, or on the server or the Space that its environment variables name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tinsmith_trackers.tracker import Destination, Run, RunLog, Tracker

if TYPE_CHECKING:
    import trackio

_PLACES: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DIR")


class TrackioTracker(Tracker):
    def __init__(self, destination: Destination) -> None:
        import trackio  # noqa: F401 - said here that it is missing

        super().__init__(destination)

    @property
    def place(self) -> str:
        return " ".join([super().place, *(value for name in _PLACES if (value := os.environ.get(name)))])

    def open(self, run: Run) -> RunLog:
        import trackio

        config = {"run_id": run.run_id, "name": run.name, "tags": list(run.tags), **run.about}
        return _TrackioRun(
            trackio.init(
                self.destination.project, name=f"{run.name} {run.run_id}", config=config, resume="allow", embed=False
            )
        )


class _TrackioRun(RunLog):
    def __init__(self, run: trackio.Run) -> None:
        self._run = run

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "wall_time": time_s}, step=step)

    def flush(self) -> None:
        """Leave it to the thread of trackio, which writes within a second; `close` waits for it."""

    def close(self, *, ended: bool) -> None:  # noqa: ARG002 - a run that goes on is resumed by its name
        self._run.finish()
