"""Operations in the log, and what clients, engines and people ask of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar, Final

from tinsmith.operations import Failed
from tinsmith.store.records.engines import EngineRecord
from tinsmith.store.records.places import PlaceWait

PASS: Final = "forward_backward"
CLEARING: Final = ("optim_step", "load_state")
"""The kinds of operations that clear the pending gradient, if they succeed."""


class OperationState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        return self not in {OperationState.QUEUED, OperationState.RUNNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """An operation to submit. `subject_id` is the id of the model or sampling session that it addresses."""

    base_model: str  # the queue: one engine serves each
    kind: str
    tenant: str
    session_id: str
    subject_id: str  # model_id or sampling_session_id; seq_ids are unique within it
    seq_id: int
    ordered: bool  # the subject is a model: operations run in seq_id order
    payload: bytes
    digest: bytes  # of the content, which a repeat must match
    num_tokens: int = 0
    num_bytes: int = 0  # of memory, once decoded (`codec.decoded_bytes`)
    refused: Failed | None = None  # recorded as failed at once; its seq_id is used up all the same
    traceparent: str | None = None  # of W3C Trace Context, as its request came with it


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """An operation in the log. `subject_id` is the id of the model or sampling session that it addresses."""

    request_id: str
    base_model: str
    kind: str
    tenant: str
    session_id: str
    subject_id: str
    seq_id: int
    ordered: bool
    num_tokens: int
    state: OperationState
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    payload: bytes | None = None  # only in what `claim` and `replayable` return
    result_kind: str | None = None
    result: bytes | None = None  # only in what `wait_for`, `get_operation` and `replayable` return
    num_bytes: int = 0  # of memory, once decoded
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an engine has taken from the log."""

    records: list[OperationRecord]
    left_some: bool
    """Whether something that could run may have been left for want of room. If not, only new work needs a claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPass:
    """A forward_backward that failed, or an operation that failed behind a missing one, which may have been a pass."""

    seq_id: int
    request_id: str
    failure: Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why an operation is still pending."""

    MANY_AHEAD: ClassVar[int] = 1001  # a store need not count further

    missing_seq_id: int | None = None  # a lower seq_id that has not arrived
    num_ahead: int = 0  # operations of its tenant that run before it; MANY_AHEAD stands for any larger number
    place: PlaceWait | None = None  # its model waits for a place on the backend
    engine: EngineRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCounts:
    """A tenant's operations that are queued or running."""

    by_kind: Mapping[str, int]  # their number
    num_bytes: int = 0  # of their payloads


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWork:
    """Operations of one base model, tenant and kind that are all queued or all running."""

    base_model: str
    tenant: str
    kind: str
    state: OperationState
    number: int
    oldest_at: datetime  # when the oldest of them arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedOperation:
    """An operation of the log, for people: what it was, what it cost, and its result."""

    seq_id: int
    request_id: str
    kind: str
    state: OperationState
    num_tokens: int
    created_at: datetime
    started_at: datetime | None  # when an engine claimed it
    finished_at: datetime | None  # when its result was recorded
    attempts: int  # more than one: an engine crashed while it ran
    interruptions: int  # how often its engine was killed from outside
    payload_bytes: int  # as stored
    result_bytes: int
    result_kind: str | None
    result: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperation:
    """The times of an operation."""

    request_id: str
    subject_id: str
    seq_id: int
    ordered: bool
    kind: str
    state: OperationState
    early: bool  # it waits for a place on the backend, or for a lower seq_id
    num_tokens: int
    created_at: datetime
    started_at: datetime | None  # when an engine claimed it
    ran_at: datetime | None  # as in its completion; None: it does not run, or did not
    run_s: float | None
    first_token_s: float | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTotals:
    """Totals over the operations of one kind and state in a model's log."""

    kind: str
    state: OperationState
    number: int
    num_tokens: int
    payload_bytes: int
    result_bytes: int
    queued_s: float  # from arrival to claim, summed over those claimed
    run_s: float  # from claim to result, summed over those finished
    retried: int  # those that were running when an engine died
