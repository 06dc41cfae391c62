"""Explains why an operation is still pending, and the state of its engine.

The SDK shows the text of a pause to its user: at once for a sample that it polls separately, after 15 minutes for
everything else. A cause, such as a line of the engine's log, is for the operator alone
(`ServerContext.is_operator`): everybody else reads what kind of failure it was, which start follows, and a reference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from tinsmith.settings import QuotaSettings
from tinsmith.settings.secrets import cleaned
from tinsmith.store import (
    DeviceTurn,
    EngineRecord,
    EngineState,
    OperationRecord,
    OperationState,
    PlaceWait,
    RequestStore,
    Waiting,
)

Kind = Literal["engine", "sampler", "place", "number", "turn", "compile", "run", "queue"]

_ENDED = frozenset({EngineState.RESTARTING, EngineState.FAILED})
_WAITING = (
    "requests wait until it is ready; SDK 0.38 reports nothing more for the first 15 minutes, but GET /readyz of "
    "this server shows the engine's state"
)


def with_causes(text: str, records: Iterable[EngineRecord], *, operator: bool) -> str:
    """Return a text that may quote failures of engines as the operator, or a tenant, may read it."""
    if operator:
        for record in records:
            if record.failure is not None:
                text = record.failure.explained(text)
    return cleaned(text)


def engine_text(engine: EngineRecord) -> str:
    """Describe an engine for tenants: "restarting, attempt 8: the engine of 'toy' ended with exit code 1 ..."."""
    state, failure = engine.state.value, engine.failure
    detail = f": {engine.detail}{percent(engine)}" if engine.detail else ""
    if failure is None or engine.state in {EngineState.READY, EngineState.SILENT}:
        return f"the engine of {engine.base_model!r} is {state}{detail}"
    attempt = f", attempt {failure.attempt}" if failure.attempt else ""
    if engine.state in _ENDED:  # the detail quotes the failure
        return f"{state}{attempt}{detail}"
    return f"the engine of {engine.base_model!r} is {state}{attempt}{detail}; before, {failure.text}"


def percent(engine: EngineRecord) -> str:
    return "" if engine.progress is None else f", {engine.progress:.0%}"


def last_failure(engine: EngineRecord) -> str | None:
    """Return how the engine's last process ended, if the engine is being started again and does not say so itself."""
    if engine.failure is None or engine.state in {*_ENDED, EngineState.READY, EngineState.SILENT}:
        return None
    return f"attempt {engine.failure.attempt}: before, {engine.failure.text}"


def session_messages(
    base_models: Iterable[str], records: Mapping[str, EngineRecord], *, operator: bool
) -> tuple[str | None, str | None]:
    """Return a warning about engines that clients have to wait for, and an error about those that have failed.

    The SDK prints both when a session begins.
    """
    waiting, failed = [], []
    for name in base_models:
        record = records.get(name)
        if record is None:
            waiting.append(f"no engine of {name!r} has started yet")
        elif record.state is EngineState.FAILED:
            failed.append(f"{name!r} cannot be served: {engine_text(record)}")
        elif record.state is not EngineState.READY:
            waiting.append(engine_text(record))
        elif record.sampler_trouble is not None:
            waiting.append(f"nothing is sampled from {name!r} for now: {record.sampler_trouble}")
    warning = f"{'; '.join(waiting)}. {_WAITING[0].upper()}{_WAITING[1:]}." if waiting else None
    error = "; ".join(failed) or None
    warning, error = (
        None if text is None else with_causes(text, records.values(), operator=operator) for text in (warning, error)
    )
    return warning, error


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReason:
    """The SDK stays quiet while "active"."""

    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    kind: Kind  # of what has to happen first
    text: str


async def reason_of(
    operation: OperationRecord, store: RequestStore, engines: Mapping[str, EngineRecord], quotas: QuotaSettings
) -> WaitingReason:
    """Find out what has to happen first. `engines`: the last reports, of which some are silent meanwhile."""
    waiting = await store.waiting(operation.request_id)
    engine = engines.get(operation.base_model)
    if engine is not None and engine.state is EngineState.SILENT:
        waiting = replace(waiting, engine=engine)
    return explain(operation, waiting, quotas)


def explain(operation: OperationRecord, waiting: Waiting, quotas: QuotaSettings) -> WaitingReason:
    """Name what has to happen first.

    An engine has to start, a place for the model to become free, a missing request to arrive, or earlier requests to
    finish.
    """
    engine = waiting.engine
    if engine is None:
        return _paused("engine", f"no engine of {operation.base_model!r} has started yet")
    if engine.state is not EngineState.READY:
        running = operation.state is OperationState.RUNNING and engine.state is EngineState.SILENT
        own = f"; your {operation.kind} is running{_since(operation)}" if running else ""
        return _paused("engine", f"{engine_text(engine)}{own}")
    if not operation.ordered and engine.sampler_trouble is not None:
        text = f"nothing is sampled from {operation.base_model!r} for now: {engine.sampler_trouble}"
        return _paused("sampler", text)
    if waiting.place is not None:
        return _place_reason(engine, waiting.place, quotas)
    if waiting.missing_seq_id is not None:
        missing = f"seq_id {waiting.missing_seq_id} of {operation.subject_id!r} has not arrived"
        return _paused("number", f"{missing}, and {operation.seq_id} comes after it")
    if operation.state is OperationState.RUNNING and (turn := engine.turn) is not None and _waits(operation, turn):
        held_s = max(0.0, (datetime.now(UTC) - turn.since).total_seconds())  # the engine's clock may be ahead
        return _paused("turn", f"waits for its turn on the device: {turn.side} has it for {held_s:.0f} s")
    if operation.state is OperationState.RUNNING:
        detail = f" ({engine.detail}{percent(engine)})" if engine.detail else ""
        text = f"{operation.kind} is running{_since(operation)}{detail}"
        return WaitingReason(queue_state="active", kind="compile" if compiles(engine) else "run", text=text)
    many = Waiting.MANY_AHEAD
    ahead = f"more than {many - 1:,}" if waiting.num_ahead >= many else str(waiting.num_ahead)
    text = f"{ahead} of your requests are ahead in the queue"
    return WaitingReason(queue_state="active", kind="queue", text=text)


def compiles(engine: EngineRecord) -> bool:
    """Return whether an engine that is ready reports the progress of something: backends compile then."""
    return bool(engine.detail) and (engine.progress is None or engine.progress < 1)


def _since(operation: OperationRecord) -> str:
    if operation.started_at is None:
        return ""
    age_s = max(0.0, (datetime.now(UTC) - operation.started_at).total_seconds())  # the engine's clock may be ahead
    return f" for {age_s:.0f} s"


def _waits(operation: OperationRecord, turn: DeviceTurn) -> bool:
    """Return whether an operation that an engine has taken waits for the devices that trainer and sampler share."""
    own = "training" if operation.ordered else "sampling"
    return turn.waiting and turn.side != own


def _place_reason(engine: EngineRecord, place: PlaceWait, quotas: QuotaSettings) -> WaitingReason:
    """Name no other tenant, and none of its models."""
    trainer = None if engine.capabilities is None else engine.capabilities.trainer
    max_models = place.taken if trainer is None else trainer.max_models
    kept = quotas.kept(max_models)
    free = max_models - place.taken
    idle = quotas.place_idle_s
    when = "" if idle is None else f" or a model has been idle for {idle:g} s (quotas.place_idle_s)"
    remedy = f"a place becomes free when a session ends{when}"
    if place.parked:
        remedy += "; your model was parked while it was idle, and goes on from where it was"
    else:
        remedy += f"; after {quotas.place_wait_s:.0f} s the request fails (quotas.place_wait_s)"
    max_full = None if trainer is None else trainer.max_full_models
    if max_full and place.taken_full is not None and place.taken_full >= max_full:
        return _paused(
            "place",
            f"{place.taken_full} of the {max_full} places for full fine-tuning (LoRA rank 0) of {engine.base_model!r} "
            f"are taken (the backend's max_full_models); {remedy}, and a LoRA adapter may find a place sooner",
        )
    if place.taken_by_tenant and 0 < free <= kept:
        text = (
            f"your models take {place.taken_by_tenant} of the {max_models} places for models of {engine.base_model!r}, "
            f"and the last {kept} are for tenants without a model (quotas.kept_places); {remedy}"
        )
        return WaitingReason(queue_state="paused_rate_limit", kind="place", text=text)
    return _paused(
        "place",
        f"{place.taken} of the {max_models} places for models of {engine.base_model!r} are taken, "
        f"{place.taken_by_tenant} of them by you, and {place.num_waiting} models wait for one; {remedy}",
    )


def _paused(kind: Kind, text: str) -> WaitingReason:
    return WaitingReason(queue_state="paused_capacity", kind=kind, text=text)
