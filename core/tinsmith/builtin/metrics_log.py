"""One log line per finished operation: what it was, whose, how long it waited and ran.

No line has a text or a token of a tenant: a request's failure may quote them, so the log has its category alone.
"""

import logging
from typing import Final

from tinsmith.hook_values import OperationFinished
from tinsmith.hookspecs import hookimpl
from tinsmith.log_fields import about

_TOLD: Final = frozenset({"create_model", "save_state", "save_for_sampler", "export_adapter"})

_log = logging.getLogger("tinsmith.operations")


@hookimpl
def tinsmith_operation_finished(event: OperationFinished) -> None:
    """Log runs, saves and refusals as information, failures of the server as warnings, all else for debugging."""
    level = logging.INFO if event.kind in _TOLD else logging.DEBUG
    if event.failed is not None:
        level = logging.INFO if event.failed.category == "user" else logging.WARNING
    if _log.isEnabledFor(level):
        fields = about(
            base_model=event.base_model, tenant=event.tenant, run=event.model_id, request_id=event.request_id
        )
        _log.log(level, "%s", _line(event), extra=fields)


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
        quoted = event.failed.category == "user"
        words.append(f"failed={event.failed.category}" + ("" if quoted else f": {event.failed.message}"))
    return " ".join(words)
