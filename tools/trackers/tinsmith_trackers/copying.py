"""Copying: each round looks for steps that are over, and logs what has not been logged of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tinsmith_trackers.positions import Positions
from tinsmith_trackers.server import STEPS_AT_ONCE, Listed, Server, Step
from tinsmith_trackers.tracker import RunLog, Tracker, TrackerError

SETTLED_S: Final = 30.0
"""The newest step of a run is over when nothing has been added to it for so long."""

MOST_OPEN: Final = 16
"""Runs that are open in the tracker at once."""


@dataclass(slots=True)
class _Newest:
    """The newest step of a run, as it was seen last."""

    step: Step
    since: float  # when it became so, on the monotonic clock


class Copying:
    """Copies the runs of a server. A step is copied when a later one has begun, its run has ended, or it is quiet.

    Until then its values may still change: they are means and sums over its passes.
    """

    def __init__(
        self,
        server: Server,
        tracker: Tracker,
        positions: Positions,
        *,
        only: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`only`: beginnings of the ids of runs; all runs if it is empty."""
        self._server = server
        self._tracker = tracker
        self._positions = positions
        self._only = tuple(only)
        self._now = now
        self._open: dict[str, RunLog] = {}
        self._newest: dict[str, _Newest] = {}
        self._done: dict[str, Listed] = {}  # ended runs that are copied, as they were listed then

    def look_for(self) -> None:
        """Raise TrackerError if one of `only` is no beginning of a run's id."""
        ids = [listed.run.run_id for listed in self._server.runs()]
        for beginning in self._only:
            if not any(run_id.startswith(beginning) for run_id in ids):
                msg = (
                    f"no run that this key may read has an id that begins with {beginning!r}; there are {len(ids)} runs"
                )
                raise TrackerError(msg)

    def round(self, *, last: bool = False) -> int:
        """Copy what is new, and return how many values these were. `last`: the newest steps, too."""
        wanted = [listed for listed in self._server.runs() if self._is_wanted(listed)]
        copied = sum(self._copy(listed, last=last) for listed in reversed(wanted))
        if copied:
            for log in self._open.values():
                log.flush()
            self._positions.save()
        for listed in wanted:
            if listed.ended and listed.run.run_id in self._open:
                self._open.pop(listed.run.run_id).close(ended=True)
        return copied

    def close(self) -> None:
        for log in self._open.values():
            log.close(ended=False)
        self._positions.save()

    def _is_wanted(self, listed: Listed) -> bool:
        run_id = listed.run.run_id
        return (not self._only or run_id.startswith(self._only)) and self._done.get(run_id) != listed

    def _copy(self, listed: Listed, *, last: bool) -> int:
        run_id, copied = listed.run.run_id, 0
        steps = self._server.steps(run_id, self._positions.first_step(run_id))
        while len(steps) == STEPS_AT_ONCE:  # the last of them may be the newest
            copied += self._log_all(listed, steps[:-1])
            steps = self._server.steps(run_id, steps[-1].number)
        if steps and not (last or listed.ended or self._is_quiet(run_id, steps[-1])):
            steps.pop()
        copied += self._log_all(listed, steps)
        if listed.ended:
            self._done[run_id] = listed
        return copied

    def _is_quiet(self, run_id: str, step: Step) -> bool:
        newest = self._newest.get(run_id)
        if newest is None or newest.step != step:
            self._newest[run_id] = _Newest(step, self._now())
            return False
        return self._now() - newest.since >= SETTLED_S

    def _log_all(self, listed: Listed, steps: Sequence[Step]) -> int:
        """Log the values that have not been, and return how many."""
        run_id, copied = listed.run.run_id, 0
        for step in steps:
            before = self._positions.copied(run_id, step.number)
            values = {name: value for name, value in step.values.items() if name not in before}
            if values:
                self._opened(listed).log(step.number, step.time_s, values)
                self._positions.add(run_id, step.number, set(values))
                copied += len(values)
        return copied

    def _opened(self, listed: Listed) -> RunLog:
        """Return the run's log, opened if it is not. The one that was used longest ago makes room for it."""
        run_id = listed.run.run_id
        log = self._open.pop(run_id, None)
        if log is None:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close(ended=False)
            log = self._tracker.open(listed.run)
        self._open[run_id] = log  # the last of the dictionary is the one that was used last
        return log
