"""What a tracker is: a class that the entry point group `tinsmith.trackers` names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class TrackerError(Exception):
    """The tracker or the server cannot do what was asked. The message is for the user, and names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where runs are copied to. What it leaves open, each tracker reads from its own environment variables."""

    project: str
    directory: Path | None = None  # for trackers that write files


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    run_id: str
    name: str  # for people
    created_s: float  # since the epoch
    tags: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)  # base model, tenant, LoRA rank, metadata of the client


class RunLog(ABC):
    """One run in the tracker."""

    @abstractmethod
    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add finite values of a step, measured at `time_s` since the epoch.

        Steps come in order, except for names that a client logs after the step had been copied.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return once what was logged outlives this process. It is never logged again then."""

    @abstractmethod
    def close(self, *, ended: bool) -> None:
        """Flush and let the run go. `ended`: its session is over; otherwise it goes on and may be opened again."""


class Tracker(ABC):
    """Opens runs. `open` is called again for a run after `close`, by a later process, too: it continues the run."""

    def __init__(self, destination: Destination) -> None:
        """Raise TrackerError if its package is missing, or the destination is none."""
        self.destination = destination

    @property
    def place(self) -> str:
        """What tells this destination from others of the tracker: what was copied to one is not in another."""
        directory = self.destination.directory
        return self.destination.project + (f" {directory.absolute()}" if directory else "")

    @abstractmethod
    def open(self, run: Run) -> RunLog: ...
