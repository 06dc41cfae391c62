"""Rows of a store in memory, where they are more than a record of the interface, and the order of lists."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from tinsmith.store import (
    WAITS_FOR_PLACE,
    FinishedSample,
    MetricsRow,
    OperationRecord,
    OperationState,
    Origin,
    Position,
    RecoveryPointRecord,
    RolloutsRow,
    RunRecord,
    RunState,
    SessionRecord,
    ShareLink,
)

T = TypeVar("T")


@dataclass(slots=True)
class Operation:
    """An operation. `record` has its payload, and its result once it is finished."""

    record: OperationRecord
    id: int  # the order of arrival
    arrival: int  # orders what a tenant has waiting, never against the order of a model
    digest: bytes
    engine_id: str | None = None
    attempts: int = 0
    interruptions: int = 0
    alone: bool = False  # an engine died while it ran, so the next attempt runs by itself
    behind_a_gap: bool = False  # it failed there
    ran_at: datetime | None = None
    run_s: float | None = None
    first_token_s: float | None = None

    @property
    def is_queued(self) -> bool:
        return self.record.state is OperationState.QUEUED

    @property
    def is_running(self) -> bool:
        return self.record.state is OperationState.RUNNING

    @property
    def size(self) -> int:
        """Bytes of its payload and its result."""
        return len(self.record.payload or b"") + len(self.record.result or b"")


@dataclass(slots=True)
class Run:
    """A model, and what is kept for as long as it is."""

    record: RunRecord
    arrived: int  # up to here no seq_id is missing, and queued operations can run
    pruned: int = -1  # the highest seq_id that retention has removed
    unload: int | None = None  # the seq_id of the UnloadModel, once it is queued
    rebuilds: int = 0  # begun and not finished
    recovery_points: dict[int, RecoveryPointRecord] = field(default_factory=dict)  # by seq_id
    metrics: dict[tuple[int, int], MetricsRow] = field(default_factory=dict)  # by step and seq_id
    rollouts: dict[tuple[int, int], RolloutsRow] = field(default_factory=dict)  # by step and seq_id
    origins: dict[int, Origin] = field(default_factory=dict)  # by seq_id
    share_links: dict[str, ShareLink] = field(default_factory=dict)  # by id

    @property
    def is_live(self) -> bool:
        return self.record.state in (RunState.CREATING, RunState.READY, RunState.PARKED)

    @property
    def waits_for_place(self) -> bool:
        return self.record.next_seq_id == WAITS_FOR_PLACE and self.record.state is RunState.CREATING

    @property
    def is_parked(self) -> bool:
        return self.record.state is RunState.PARKED

    @property
    def has_no_place(self) -> bool:
        return self.waits_for_place or self.is_parked

    @property
    def newest_points(self) -> tuple[RecoveryPointRecord, ...]:
        return tuple(self.recovery_points[seq_id] for seq_id in sorted(self.recovery_points, reverse=True))

    def keep_newest(self, record: RecoveryPointRecord, keep: int) -> None:
        """Add a recovery point, and drop all but the newest `keep`."""
        self.recovery_points[record.seq_id] = record
        for seq_id in sorted(self.recovery_points)[:-keep]:
            del self.recovery_points[seq_id]

    def change(self, **changes: Any) -> None:  # Any: fields of the record
        self.record = replace(self.record, **changes)


@dataclass(slots=True)
class Session:
    record: SessionRecord
    idempotency_key: str | None
    heard_since: datetime  # heartbeats have arrived all the time since then


@dataclass(slots=True)
class LeaseRow:
    epoch: int
    engine_id: str | None  # None: released
    expires_at: datetime


@dataclass(slots=True)
class Samples:
    """The finished samples of one client, in order, with their numbers, from 1, and their times."""

    last: int = 0
    entries: list[tuple[int, FinishedSample, datetime]] = field(default_factory=list)


def newest_first(records: Iterable[T], position: Callable[[T], Position], before: Position | None = None) -> list[T]:
    """Sort records by their positions, the newest first. With `before`, return those behind that position only."""
    behind = [each for each in records if before is None or position(each) < before]
    return sorted(behind, key=position, reverse=True)
