"""What is said of an engine: to whoever waits for it, and to a client that has just begun a session.

A cause, such as a line of the engine's log, is for the operator alone (`ServerContext.is_operator`). Everybody else
reads what kind of failure it was, which start follows, and a reference to the operator's log.
"""

from collections.abc import Iterable, Mapping

from tinsmith.settings.secrets import cleaned
from tinsmith.store import EngineRecord, EngineState

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
