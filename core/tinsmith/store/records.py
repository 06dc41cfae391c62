"""The request store's values: a frozen record for each kind of row, and the effects that change rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import ClassVar, Final, Literal, Self

import msgspec

from tinsmith.backend import SamplerCapabilities, TrainerCapabilities
from tinsmith.operations import Failed, LoraConfig, Result
from tinsmith_checkpoints.values import CheckpointKind as CheckpointKind
from tinsmith_checkpoints.values import Json

Metadata = dict[str, Json]

WAITS_FOR_PLACE: Final = -1
"""The `next_seq_id` of a model that waits for a place on the backend: none of its operations can be claimed."""

PASS: Final = "forward_backward"
CLEARING: Final = ("optim_step", "load_state")
"""The kinds of operations that clear the pending gradient, if they succeed."""

SILENCE: Final = timedelta(seconds=30)
"""A client sends a heartbeat every 10 s. If none arrives for longer than this, the server may be at fault."""

OF_CLIENT: Final = -1
"""The `seq_id` of metrics that a client logged."""

MOST_TOKENS: Final = 512
"""Of one `DrawnTokens`."""


class OperationState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        return self not in {OperationState.QUEUED, OperationState.RUNNING}


class RunState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    PARKED = "parked"  # idle: another model has its place, and its state is on disk until its next request
    LOST = "lost"  # its state could not be created or rebuilt; `state_reason` says why
    UNLOADED = "unloaded"  # the session ended


class EngineState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    RECOVERING = "recovering"  # rebuilding the models of the engine before it
    READY = "ready"
    SILENT = "silent"  # it was ready, and has done nothing for long; `detail` says since when
    RESTARTING = "restarting"
    FAILED = "failed"  # given up; `detail` says why
    STOPPED = "stopped"


Position = tuple[datetime, str]
"""Of a session or a checkpoint in a list that is newest first: its creation, and its id or path."""

SessionEnd = Literal["success", "errored", "interrupted", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    session_id: str
    tenant: str
    created_at: datetime
    last_seen_at: datetime
    tags: tuple[str, ...] = ()
    user_metadata: Metadata | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    ended: SessionEnd | None = None
    end_detail: str | None = None
    heard_by: str | None = None  # the server that heard the last heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A model, which the REST API calls a training run."""

    model_id: str  # {session_id}:train:{model_seq_id}
    session_id: str
    tenant: str
    base_model: str
    lora: LoraConfig
    created_at: datetime
    last_request_at: datetime
    user_metadata: Metadata | None = None
    state: RunState = RunState.CREATING
    state_reason: str | None = None
    next_seq_id: int = 0  # the lowest one not yet claimed, or WAITS_FOR_PLACE
    applied_seq_id: int = -1  # the highest one whose result is recorded
    steps: int = 0  # optimizer steps behind its recorded results, including a loaded state's
    metric_bytes: int = 0  # of metrics ever written
    rollout_bytes: int = 0  # of rollouts that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSessionRecord:
    """A sampling session. `snapshot_id` None is the base model; a tinker:// path is a persisted snapshot.

    The last two fields say which checkpoint it was opened on, and by which right: see `revocation.py`.
    """

    sampling_session_id: str
    session_id: str
    tenant: str
    base_model: str
    created_at: datetime
    snapshot_id: str | None = None
    model_path: str | None = None
    model_id: str | None = None  # the model that the weights come from, if known
    checkpoint_created_at: datetime | None = None  # `created_at` of that checkpoint; None: not known
    only_while_public: bool = False  # opened on another tenant's published checkpoint
    num_bytes: int = 0  # of the snapshot, if it belongs to this sampling session alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint that a tenant has, of whatever kind; its files are in `directory`."""

    path: str  # tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>
    model_id: str
    tenant: str
    kind: CheckpointKind
    base_model: str
    lora: LoraConfig
    created_at: datetime
    size_bytes: int
    directory: str  # relative to the checkpoint root
    step: int = 0
    public: bool = False  # belongs to the path: a save that overwrites a published checkpoint leaves it published
    expires_at: datetime | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)

    def is_version(self, read: Self) -> bool:
        """Return whether this is the version that was read, with the same expiry time."""
        return all(getattr(self, name) == getattr(read, name) for name in ("created_at", "directory", "expires_at"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPointRecord:
    """A model's whole training state on disk, right after the operation `seq_id`. Recovery starts from it."""

    model_id: str
    seq_id: int
    directory: str  # relative to the engine's recovery root
    size_bytes: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """A model that an engine has to rebuild when it starts."""

    run: RunRecord
    pruned_seq_id: int  # operations up to here may be gone from the log
    recovery_points: tuple[RecoveryPointRecord, ...]  # newest first
    ephemeral: tuple[str, ...]  # ids of the sampling snapshots that live as long as the model, in order of their saves
    rebuilds: int = 0  # begun since the last one that finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyCounts:
    """Outcomes of the saves for sampling since the engine started, and the differences found, in nats."""

    consistent: int = 0
    inconsistent: int = 0  # refused, unless configured otherwise
    not_compared: int = 0
    last_max_difference: float | None = None  # of the last save compared
    last_mean_difference: float | None = None
    largest_difference: float | None = None  # of all saves


Side = Literal["training", "sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTurn:
    """Who has the devices that trainer and sampler take turns on."""

    side: Side
    since: datetime
    waiting: bool  # whether something of the other side waits for them
    changes: int = 0  # since the engine started
    changing_s: float = 0.0  # that these took together


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """How far back a model's log reaches, and where a replay can start."""

    run: RunRecord
    pruned_seq_id: int  # the highest seq_id removed by retention; -1: the log is complete
    recovery_points: tuple[RecoveryPointRecord, ...]  # newest first

    @property
    def oldest_reachable(self) -> int | None:
        """The lowest seq_id that can be rebuilt; None if there is nothing to start from."""
        if self.pruned_seq_id < 0:
            return 0
        return min((each.seq_id for each in self.recovery_points if each.seq_id >= self.pruned_seq_id), default=None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """How an engine's last process ended, and which start follows."""

    attempt: int  # 1: the first restart since the engine was last ready
    text: str  # "the engine of 'toy' ended with exit code 1 (reference 1f2e3d4c in the operator's log)"
    reference: str  # in the text, and in every text that quotes it
    cause: str  # what the process said last, for the operator alone

    def explained(self, text: str) -> str:
        """Return a text that may quote this failure with the cause beside its reference, for the operator."""
        return text.replace(self.reference, f"{self.cause}; {self.reference}") if self.cause else text


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The joint abilities of one base model's trainer and sampler."""

    trainer: TrainerCapabilities
    sampler: SamplerCapabilities | None  # None: nobody samples

    @classmethod
    def of(cls, trainer: TrainerCapabilities, sampler: SamplerCapabilities | None) -> Self:
        """Both take the sequences that fit into either: what is sampled can be trained on."""
        if sampler is None:
            return cls(trainer=trainer, sampler=None)
        context = min(trainer.max_context_tokens, sampler.max_context_tokens)
        return cls(
            trainer=replace(trainer, max_context_tokens=context), sampler=replace(sampler, max_context_tokens=context)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """The latest report of one base model's engine about itself."""

    base_model: str
    state: EngineState
    updated_at: datetime
    detail: str = ""  # "loading weights", "compiling 3 of 22", the reason for a failure
    progress: float | None = None  # 0 to 1
    engine_id: str | None = None
    pid: int | None = None
    restarts: int = 0
    capabilities: EngineCapabilities | None = None  # None: not known yet
    consistency: ConsistencyCounts | None = None  # None: nothing has been saved for sampling
    turn: DeviceTurn | None = None  # None: trainer and sampler take no turns
    sampler_trouble: str | None = None  # why nothing can be sampled for now; training goes on
    failure: EngineFailure | None = None  # None: no process of it has ended by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFigures:
    """The figures that a base model's engine reported."""

    base_model: str
    reported_at: datetime  # by the store's clock
    report: bytes  # `tinsmith.figures.Report`, encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to serve one base model. A takeover raises the epoch; writes with a lower epoch are refused."""

    base_model: str
    engine_id: str
    epoch: int
    duration_s: float  # from each renewal, by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeld:
    """Another engine holds the lease."""

    base_model: str
    engine_id: str
    remaining_s: float  # unless it is renewed
    until: datetime  # by the store's clock; each renewal moves it


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


# Effects: what a completed operation changes beside its own row, in the same transaction -----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStateChanged:
    model_id: str
    state: RunState
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraResolved:
    """The LoRA config of a model created from a checkpoint, known only once the checkpoint is read."""

    model_id: str
    lora: LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    record: CheckpointRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSessionCreated:
    record: SamplingSessionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPointTaken:
    """The state right after this operation. The newest `keep` recovery points stay registered."""

    record: RecoveryPointRecord
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSampled:
    """The experts of sequences that were sampled from a model. Of each tenant, the newest `max_bytes` are kept."""

    tenant: str  # who sampled, and may own another model than this one
    model_id: str
    sequences: Mapping[bytes, bytes]  # encoded experts, by the digest of the tokens (`routed_experts.digest_of`)
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsTrained:
    """The rollouts of one pass. Of each run, the newest `max_bytes` are kept."""

    model_id: str
    step: int
    seq_id: int
    number: int  # of sequences in the pass; fewer may be kept
    content: bytes  # `rollouts.encode_rollouts`
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A run took its weights from a checkpoint: at its creation, by a load, or to hold a copy of it.

    As an effect of an operation, it is kept as long as the run, also when the checkpoint is gone.
    """

    model_id: str
    seq_id: int  # of the creation or the load; 0 for a copy
    path: str  # of the checkpoint
    source_id: str  # the model_id in the path
    step: int  # optimizer steps behind the weights; as the run counts on, so 0 without the optimizer's state
    created_at: datetime


Effect = (
    RunStateChanged
    | LoraResolved
    | CheckpointWritten
    | SamplingSessionCreated
    | RecoveryPointTaken
    | ExpertsSampled
    | RolloutsTrained
    | Origin
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of one operation. `engine_s` is its share of the time that its batch took."""

    trained_tokens: int = 0
    prefilled_tokens: int = 0  # of prompts, and of forward passes without a gradient
    sampled_tokens: int = 0
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an operation of a model measured. A value may be NaN or infinite."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A result to record. A failure is `applied` if the operation has changed its model nevertheless.

    Either its result could not be stored, and a recovery must run it again, or it is a step that has dropped the
    pending gradient.
    """

    request_id: str
    result: Result
    effects: tuple[Effect, ...] = ()
    applied: bool = False
    usage: Usage = Usage()
    measured: Measured | None = None
    steps: int = 0  # optimizer steps of its model behind it; the store keeps the most it was told
    ran_at: datetime | None = None  # when the call of trainer or sampler began
    run_s: float | None = None  # how long it took, shared by everything in the batch
    first_token_s: float | None = None  # of a sample: from then until its first token was drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPass:
    """A forward_backward that failed, or an operation that failed behind a missing one, which may have been a pass."""

    seq_id: int
    request_id: str
    failure: Failed


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
class KeptCheckpoints:
    """A tenant's checkpoints."""

    number: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """A tenant's bytes on the server's disk and in its database."""

    tenant: str
    log: int = 0  # payloads and results of operations
    checkpoints: int = 0
    snapshots: int = 0  # of open sampling sessions that own one
    recovery_points: int = 0
    routed_experts: int = 0
    metrics: int = 0  # and rollouts

    @property
    def total(self) -> int:
        return self.log + self.checkpoints + self.snapshots + self.recovery_points + self.routed_experts + self.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLimits:
    """How many models a backend holds, and for whom."""

    max_models: int
    kept: int  # places that only tenants without a model may take
    give_up_before: datetime  # models that have waited since before then fail
    failure: str  # what they fail with
    max_full_models: int | None = None  # how many models with LoRA rank 0; None: as many as `max_models`
    idle_since: datetime | None = None  # a model that has been idle since before then may be parked; None: none may
    staying: frozenset[str] = frozenset()  # models that are not parked now
    freed_for: frozenset[str] = frozenset()  # models for which others were parked: no kept place is kept from them


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """A model that is to be parked, and the one that needs its place."""

    model_id: str
    tenant: str
    seq_id: int  # its last operation, whose result is recorded
    for_model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceMoves:
    """What an engine has to do before waiting models can go on."""

    park: tuple[Parking, ...] = ()
    come_back: tuple[str, ...] = ()  # parked models that have a place again
    waiting: bool = False  # whether any model waits, these included


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCounts:
    """Models with a place on a backend, and models that wait for one."""

    taken: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWait:
    """Why a model still waits for a place on the backend."""

    taken: int  # places
    taken_by_tenant: int  # by models of the same tenant
    num_waiting: int  # models, this one included
    taken_full: int | None = None  # places of models with LoRA rank 0; None if this model is not one of them
    parked: bool = False  # it had a place before, and waits for one again


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why an operation is still pending."""

    MANY_AHEAD: ClassVar[int] = 1001  # a store need not count further

    missing_seq_id: int | None = None  # a lower seq_id that has not arrived
    num_ahead: int = 0  # operations of its tenant that run before it; MANY_AHEAD stands for any larger number
    place: PlaceWait | None = None  # its model waits for a place on the backend
    engine: EngineRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """A notice that an unordered operation has finished, without its result.

    Each clone of a sampling client numbers its samples in a range of its own: clone = seq_id // SEQ_IDS_PER_CLONE.
    """

    SEQ_IDS_PER_CLONE: ClassVar[int] = 10**9

    request_id: str
    succeeded: bool
    size_bytes: int  # of the recorded result


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSamples:
    """`cursor` is the place of the last entry, or the cursor of the request if there are no entries."""

    samples: tuple[FinishedSample, ...]
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord(Usage):
    """A tenant's usage of a base model, in one hour or in total."""

    tenant: str
    base_model: str
    hour: datetime | None = None  # its start, in UTC; None: in all
    checkpoints: int = 0  # written
    stored_bytes: int = 0  # written in checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoints:
    """The checkpoints that a tenant keeps, of one project or of none."""

    tenant: str
    project_id: str | None
    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """The metrics of one operation, or those that the client logged for one step."""

    step: int
    seq_id: int  # OF_CLIENT: the client's
    time: datetime
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLink:
    """Whoever has the link reads the curves of one run. Its secret is kept nowhere."""

    share_id: str
    digest: str  # SHA-256 of the secret, in hexadecimal digits
    model_id: str
    created_at: datetime
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    """An API key that was made over HTTP. The key itself is kept nowhere."""

    key_id: str  # a keyed hash of the key
    tenant: str
    name: str
    note: str = ""
    made_with: str = ""  # id of the configured key behind it; empty: its maker signed in otherwise
    created_at: datetime
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that was done to what a tenant has. The store writes it in the transaction of the deed."""

    at: datetime
    tenant: str  # whose it is; empty: a request without a valid key
    event: str  # `<resource>_<action>`
    details: Mapping[str, str]  # who did it, and to what


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsRow:
    """The rollouts of one pass, or the rewards that the client logged for one step."""

    step: int
    seq_id: int  # OF_CLIENT: the client's rewards
    number: int  # of sequences in the pass
    content: bytes  # `rollouts.decode_rollouts`, or `decode_rewards`


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """Tokens of one sequence of a sample, in the order in which they were drawn."""

    sampling_session_id: str
    seq_id: int
    sequence: int
    first: int  # how many tokens of the sequence come before
    tokens: Sequence[int]  # at most MOST_TOKENS

    def encoded(self) -> str:
        """Return what is not the sample's name as a text without tabs and line breaks, of at most 7 KB."""
        return msgspec.json.encode((self.sequence, self.first, self.tokens)).decode()

    @classmethod
    def decoded(cls, sampling_session_id: str, seq_id: int, text: str) -> Self:
        sequence, first, tokens = msgspec.json.decode(text, type=tuple[int, int, list[int]])
        return cls(
            sampling_session_id=sampling_session_id, seq_id=seq_id, sequence=sequence, first=first, tokens=tokens
        )
