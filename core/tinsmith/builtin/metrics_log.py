"""One log line per finished operation: what it was, whose, how long it waited and ran."""

import logging

from tinsmith.hook_values import OperationFinished
from tinsmith.hookspecs import hookimpl

_log = logging.getLogger("tinsmith.operations")


@hookimpl
def tinsmith_operation_finished(event: OperationFinished) -> None:
    """A failure is logged as a warning if the server is at fault, and as information if the request is."""
    level = logging.DEBUG
    if event.failed is not None:
        level = logging.INFO if event.failed.category == "user" else logging.WARNING
    if _log.isEnabledFor(level):
        _log.log(level, "%s", _line(event))


def _line(event: OperationFinished) -> str:
    words = [
        event.kind,
        f"request={event.request_id}",
        f"tenant={event.tenant}",
        *([f"model={event.model_id}"] if event.model_id is not None else []),
        f"tokens={event.num_tokens}",
        f"queued={event.queued_s * 1000:.1f}ms",
        f"run={event.run_s * 1000:.1f}ms",
        f"batch={event.batch_size}",
    ]
    if event.consistency is not None:
        words.append(f"consistency={event.consistency.verdict}")
    if event.failed is not None:
        words.append(f"failed={event.failed.category}: {event.failed.message}")
    return " ".join(words)
