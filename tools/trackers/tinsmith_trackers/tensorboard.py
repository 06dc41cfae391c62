"""TensorBoard: a directory of event files for each run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinsmith_trackers.tracker import Destination, Run, RunLog, Tracker, TrackerError

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoardTracker(Tracker):
    """Writes to `DIRECTORY/PROJECT/RUN`."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination)
        if destination.directory is None:
            msg = "TensorBoard needs --dir, the directory that `tensorboard --logdir` reads"
            raise TrackerError(msg)
        self._directory = destination.directory / destination.project

    def open(self, run: Run) -> RunLog:
        from tensorboardX import SummaryWriter

        directory = self._directory / run.run_id.replace(":", "-")
        is_new = not directory.exists()
        writer = SummaryWriter(str(directory))
        if is_new:
            lines = [f"**{name}**: {value}" for name, value in {"name": run.name, **run.about}.items()]
            writer.add_text("run", "  \n".join(lines), 0, run.created_s)
        return _EventFiles(writer)


class _EventFiles(RunLog):
    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, ended: bool) -> None:  # noqa: ARG002 - event files have no end
        self._writer.close()
