"""An operation on its way through a simulation. The engine's parts see a real operation."""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from tinsmith import operations as ops
from tinsmith.engine.claimed import Claimed
from tinsmith.store import OperationRecord, OperationState
from tinsmith_workbench.simulation.workload import Wanted

_BYTES_PER_TOKEN = 16  # token, target and weight
_BYTES = 512  # of any operation
_PROMPT = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    wanted: Wanted
    claimed: Claimed
    tenant: int
    engine: int
    sent_s: float

    @property
    def request_id(self) -> str:
        return self.claimed.record.request_id

    @property
    def num_bytes(self) -> int:
        return self.claimed.record.num_bytes


def a_request(wanted: Wanted, *, tenant: int, engine: int, seq_id: int, sent_s: float) -> Request:
    """Make the request with this number of the tenant: of its model, or of its samples."""
    name = f"tenant{tenant:05}"
    sample = wanted.kind == "sample"
    payload_tokens = wanted.prompt_tokens if sample else wanted.tokens
    record = OperationRecord(
        request_id=f"{name}:{wanted.kind}:{seq_id}",
        base_model=f"engine{engine}",
        kind=wanted.kind,
        tenant=name,
        session_id=name,
        subject_id=f"{name}:sample:0" if sample else f"{name}:train:0",
        seq_id=seq_id,
        ordered=not sample,
        num_tokens=wanted.num_tokens,
        num_bytes=_BYTES + _BYTES_PER_TOKEN * payload_tokens,
        state=OperationState.RUNNING,
        created_at=datetime.fromtimestamp(sent_s, UTC),
    )
    operation = _sample(name, wanted.sequences) if sample else None
    claimed = Claimed(record=record, operation=operation)
    return Request(wanted, claimed, tenant, engine, sent_s)


def _sample(tenant: str, sequences: int) -> ops.Sample:
    """Only the number of sequences counts for the line."""
    params = ops.SamplingParams(max_tokens=1, seed=0)
    return ops.Sample(
        sampling_session_id=tenant, snapshot_id=None, prompt_P=_PROMPT, params=params, num_samples=sequences
    )
