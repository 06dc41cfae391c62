"""An operation on its way through the engine: claimed, then finished."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

from tinsmith import operations as ops
from tinsmith.errors import TinsmithError
from tinsmith.hook_values import OperationFinished
from tinsmith.references import told
from tinsmith.scheduler import Pending
from tinsmith.settings.secrets import cleaned
from tinsmith.store import Completion, Effect, Measured, OperationRecord, Usage
from tinsmith.store.metrics import ENGINE_S, QUEUED_S, TOKENS

_log = logging.getLogger(__name__)

_BATCHED = frozenset({"forward", "forward_backward", "optim_step"})


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A claimed operation. `refused` is set if it must not run; `operation` is None only if it cannot be decoded."""

    record: OperationRecord
    operation: ops.Operation | None
    refused: ops.Failed | None = None

    @property
    def runs_in_batch(self) -> bool:
        return self.record.kind in _BATCHED and self.refused is None

    @cached_property
    def pending(self) -> Pending:
        """What the scheduler sees of it. Samples have no order, so each counts as a model of its own."""
        return Pending(
            request_id=self.record.request_id,
            model_id=self.record.subject_id if self.record.ordered else self.record.request_id,
            tenant=self.record.tenant,
            kind=self.record.kind,
            seq_id=self.record.seq_id,
            num_tokens=self.record.num_tokens,
            enqueued_at_s=self.record.created_at.timestamp(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The call of trainer or sampler that an operation was part of."""

    at: datetime
    took_s: float
    first_token_s: float | None = None  # of a sample


class Stopwatch:
    """Measures a call from its making on."""

    def __init__(self) -> None:
        self._at, self._began_s = datetime.now(UTC), time.monotonic()

    def read(self, first_token_s: float | None = None) -> Ran:
        return Ran(at=self._at, took_s=time.monotonic() - self._began_s, first_token_s=first_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A result, and its effects, which are recorded together with it."""

    result: ops.Result
    effects: tuple[Effect, ...] = ()
    consistency: ops.Consistency | None = None  # of a persisted save for sampling, even if it was refused
    comparing: asyncio.Task[ops.Consistency | None] | None = None  # of an ephemeral one: ends with the verdict
    loaded_steps: int = 0  # of the state that the operation has loaded into its model
    applied: bool = False  # the result is a failure, but the operation has changed its model
    seen: Mapping[str, float] = field(default_factory=dict)  # measured for the run's curves, not for the client
    ran: Ran | None = None  # of a sample, which waits for its snapshot in its own step; None: as the whole step


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A claimed operation and its outcome."""

    claimed: Claimed
    outcome: Outcome
    step: int = 0  # of an operation of a model: the optimizer steps before it
    steps: int = 0  # and after it

    def completion(self, usage: Usage, step: Ran) -> Completion:
        """Return what is recorded. `step`: which it was part of."""
        ran = self.outcome.ran or step
        return Completion(
            request_id=self.claimed.record.request_id,
            result=self.outcome.result,
            effects=self.outcome.effects,
            applied=self.outcome.applied,
            usage=usage,
            measured=self._measured(usage),
            steps=self.steps,
            ran_at=ran.at,
            run_s=ran.took_s,
            first_token_s=ran.first_token_s,
        )

    def _measured(self, usage: Usage) -> Measured | None:
        """Return the measurements and the duration of a pass or step."""
        if not isinstance(self.outcome.result, ops.ForwardBackwardOutput | ops.OptimStepOutput):
            return None
        metrics = _metrics_of(self.claimed.operation, self.outcome.result)
        took = {ENGINE_S: usage.engine_s, QUEUED_S: _queued_s(self.claimed.record)}
        if usage.trained_tokens:
            took[TOKENS] = float(usage.trained_tokens)
        return Measured(step=self.step, values={**metrics, **self.outcome.seen, **took})

    def event(self, step: Ran, *, batch_size: int, recorded_at: datetime) -> OperationFinished:
        """Return what observers are told."""
        record, result, ran = self.claimed.record, self.outcome.result, self.outcome.ran or step
        return OperationFinished(
            request_id=record.request_id,
            base_model=record.base_model,
            kind=record.kind,
            tenant=record.tenant,
            model_id=record.subject_id if record.ordered else None,
            num_tokens=record.num_tokens,
            queued_s=_queued_s(record),
            run_s=ran.took_s,
            batch_size=batch_size,
            session_id=record.session_id,
            arrived_at=record.created_at,
            claimed_at=record.started_at,
            ran_at=ran.at,
            first_token_s=ran.first_token_s,
            failed=result if isinstance(result, ops.Failed) else None,
            consistency=self.outcome.consistency,
            seq_id=record.seq_id if record.ordered else None,
            step=self.step if record.ordered else None,
            metrics={**_metrics_of(self.claimed.operation, result), **self.outcome.seen},
            recorded_at=recorded_at,
            traceparent=record.traceparent,
        )


def _metrics_of(operation: ops.Operation | None, result: ops.Result) -> Mapping[str, float]:
    """Return the metrics of a pass or a step. Those of a pass without a gradient get a name of their own."""
    if not isinstance(result, ops.ForwardBackwardOutput | ops.OptimStepOutput):
        return {}
    if isinstance(operation, ops.Forward):
        return {f"forward/{name}": value for name, value in result.metrics.items()}
    return result.metrics


def _queued_s(record: OperationRecord) -> float:
    assert record.started_at is not None
    return (record.started_at - record.created_at).total_seconds()


def failed(error: TinsmithError, *, during: str) -> ops.Failed:
    what = told(error, _log, during=during)
    return ops.Failed(message=what.public, category=error.category, cause=cleaned(what.cause))


def usage_of(finished: Sequence[Finished], run_s: float) -> list[Usage]:
    """Divide the time of a batch by tokens, or evenly if it has none. Failed operations count time, but no tokens."""
    shares = [each.claimed.record.num_tokens for each in finished]
    if not any(shares):
        shares = [1] * len(finished)
    return [
        _usage(each.claimed.operation, each.outcome.result, run_s * share / sum(shares))
        for each, share in zip(finished, shares, strict=True)
    ]


def _usage(operation: ops.Operation | None, result: ops.Result, engine_s: float) -> Usage:
    match operation, result:
        case ops.Forward(), ops.ForwardBackwardOutput():
            return Usage(prefilled_tokens=operation.num_tokens, engine_s=engine_s)
        case ops.ForwardBackward(), ops.ForwardBackwardOutput():
            return Usage(trained_tokens=operation.num_tokens, engine_s=engine_s)
        case ops.Sample(), ops.SampleOutput():
            sampled = sum(len(sequence.tokens) for sequence in result.sequences)
            return Usage(prefilled_tokens=len(operation.prompt_P), sampled_tokens=sampled, engine_s=engine_s)
        case _:
            return Usage(engine_s=engine_s)
