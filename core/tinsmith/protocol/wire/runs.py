"""Training runs: their lists, curves, logs and lineage, where their time went, and links to them."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from tinsmith.protocol import bounds
from tinsmith.protocol.wire.fields import Cursor, ExactBody
from tinsmith.protocol.wire.weights import Checkpoint


class TrainingRun(BaseModel):
    """`state` and `state_reason` are ours: the SDK's own type has `corrupted` alone, and leaves them out."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    state: str
    state_reason: str | None = None
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunList(BaseModel):
    training_runs: list[TrainingRun]
    cursor: Cursor


class WaitsFor(BaseModel):
    """What comes next of a run, and what that waits for now.

    `kind`: engine (it is not ready), sampler (it is down), place (on the backend), number (a seq_id that has not
    arrived), turn (of the devices), queue, compile, run (it waits for nothing), or client (nothing is pending).
    """

    kind: str
    text: str  # as its tenant may read it
    since_s: float  # since it runs, or else arrived; of the client, since the last request or result


class RunSummary(BaseModel):
    run_id: str
    base_model: str
    tenant: str
    state: str
    state_reason: str | None = None
    lora_rank: int
    steps: int
    created_at: datetime
    last_request_at: datetime
    name: str | None = None
    project_id: str | None = None
    tags: list[str]
    user_metadata: dict[str, str] | None = None
    ended: str | None = None
    waits_for: WaitsFor | None = None  # of a run that has not ended


class RunSummaries(BaseModel):
    runs: list[RunSummary]
    cursor: Cursor


MetricName = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(bounds.plain)]
MetricValue = Annotated[float, Field(allow_inf_nan=False)]


class LoggedPoint(ExactBody):
    """Values of one step. Null stands for one that is not finite."""

    step: Annotated[int, Field(ge=0, lt=2**53)]
    values: Annotated[dict[MetricName, MetricValue | None], Field(max_length=512)]


class LogMetricsRequest(ExactBody):
    points: Annotated[list[LoggedPoint], Field(min_length=1, max_length=1000)]


class Series(BaseModel):
    """One metric of a run. A null value is not finite."""

    name: str
    num_points: int  # measured; more than there are here if the series was thinned out
    steps: list[int]
    times: list[float]
    values: list[float | None]


class RunCurves(BaseModel):
    run_id: str
    steps: int
    series: list[Series]


class LineageOrigin(BaseModel):
    """A run took its weights from a checkpoint."""

    path: str
    source: str | None = None  # the run in the path, if it is in the lineage
    seq_id: int  # of the creation or the load
    step: int  # optimizer steps behind the weights, as the run counts on
    created_at: datetime


class LineageRun(BaseModel):
    run_id: str
    name: str | None = None
    base_model: str
    state: str
    state_reason: str | None = None
    steps: int
    created_at: datetime
    origins: list[LineageOrigin]  # oldest first


class SavedCheckpoint(BaseModel):
    path: str
    kind: str
    size_bytes: int
    created_at: datetime
    step: int
    public: bool
    expires_at: datetime | None = None


class Lineage(BaseModel):
    """Which of the caller's runs came from which. `checkpoints` are the run's own, newest first."""

    run_id: str
    runs: list[LineageRun]  # the run, and all that are connected with it, oldest first
    complete: bool  # or there are more than `runs`
    checkpoints: list[SavedCheckpoint]
    num_checkpoints: int


class OperationReport(BaseModel):
    """An operation in the log. `metrics` and `notes` depend on its kind."""

    seq_id: int
    request_id: str
    kind: str
    state: str
    num_tokens: int
    created_at: datetime
    queued_s: float | None = None  # from arrival to claim
    run_s: float | None = None  # from claim to record
    attempts: int
    interruptions: int
    payload_bytes: int
    result_bytes: int
    metrics: dict[str, float | None]
    notes: list[str]
    error: str | None = None


class RecoveryPoint(BaseModel):
    seq_id: int
    size_bytes: int
    created_at: datetime


class LogTotals(BaseModel):
    """Of the operations of one kind and state."""

    kind: str
    state: str
    number: int
    num_tokens: int
    payload_bytes: int
    result_bytes: int
    queued_s: float
    run_s: float
    retried: int


class RunReport(BaseModel):
    run: RunSummary
    session_id: str
    seed: int
    applied_seq_id: int
    oldest_replayable: int | None = None  # the lowest seq_id that `tinsmith replay` can rebuild
    recovery_points: list[RecoveryPoint]
    checkpoints: list[SavedCheckpoint]
    lineage: list[LineageRun]  # the run, and those connected with it, oldest first
    num_logged: int
    first_seq_id: int | None = None
    last_seq_id: int | None = None
    operations: list[OperationReport]
    totals: list[LogTotals]


class IterationTime(BaseModel):
    """Where the time of an iteration went, from the end of one optimizer step to that of the next."""

    seq_id: int  # of the optimizer step
    step: int | None = None  # how many came before it
    began_at: datetime
    wall_s: float
    attributed: float  # the part in a known phase, 0 to 1
    phases: dict[str, float]  # seconds


class TimeSpent(BaseModel):
    """Where the time of a run's last iterations went. `phases` and `wall_s` are sums over them."""

    run_id: str
    wall_s: float
    attributed: float
    phases: dict[str, float]
    meanings: dict[str, str]  # what happens in each of these phases
    iterations: list[IterationTime]


class TraceExport(BaseModel):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None  # works without a key for an hour
    error: str | None = None


class Trace(BaseModel):
    """Chrome's trace format, which Perfetto reads."""

    displayTimeUnit: str = "ms"
    traceEvents: list[dict[str, Any]]
