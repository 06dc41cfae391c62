"""Results to record, and their effects: what a completed operation changes beside its own row, in one transaction."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tinsmith.operations import LoraConfig, Result
from tinsmith.store.records.checkpoints import CheckpointRecord
from tinsmith.store.records.curves import Measured
from tinsmith.store.records.runs import Origin, RecoveryPointRecord, RunState
from tinsmith.store.records.sampling import SamplingSessionRecord
from tinsmith.store.records.usage import Usage


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
class Completion:
    """A result to record. A failure is `applied` if the operation has changed its model nevertheless.

    Either its result could not be stored, and a recovery must run it again, or it is a step that has dropped the
    pending gradient.
    """

    request_id: str
    result: Result
    effects: tuple[Effect, ...] = ()
    applied: bool = False
    usage: Usage = Usage()  # noqa: RUF009 - it is frozen
    measured: Measured | None = None
    steps: int = 0  # optimizer steps of its model behind it; the store keeps the most it was told
    ran_at: datetime | None = None  # when the call of trainer or sampler began
    run_s: float | None = None  # how long it took, shared by everything in the batch
    first_token_s: float | None = None  # of a sample: from then until its first token was drawn


@dataclass(frozen=True, slots=True)
class Completed:
    """An operation that a transaction completes, as packages are told."""

    request_id: str
    tenant: str
    base_model: str
    subject_id: str  # the model or the sampling session
    seq_id: int
    ordered: bool  # of a model
    completion: Completion
