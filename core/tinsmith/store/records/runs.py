"""Models, which the REST API calls training runs: their state, their recovery points and their origins."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from tinsmith.operations import LoraConfig
from tinsmith.store.records.sessions import Metadata

WAITS_FOR_PLACE: Final = -1
"""The `next_seq_id` of a model that waits for a place on the backend: none of its operations can be claimed."""


class RunState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    PARKED = "parked"  # idle: another model has its place, and its state is on disk until its next request
    LOST = "lost"  # its state could not be created or rebuilt; `state_reason` says why
    UNLOADED = "unloaded"  # the session ended


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
