"""Fields of log lines beside the message: who asked for what. `log_format: json` prints them by name.

A line gets them from its call (`extra=about(...)`), or from the request in whose course it is logged.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

FIELDS: Final = ("base_model", "tenant", "run", "request_id", "x_request_id")
"""The names, in the order in which they are printed. `x_request_id` is the id that an HTTP request came with."""

_of_request: ContextVar[dict[str, str] | None] = ContextVar("tinsmith.log_fields", default=None)


def about(
    *,
    base_model: str | None = None,
    tenant: str | None = None,
    run: str | None = None,
    request_id: str | None = None,
) -> dict[str, str]:
    """Return the fields that are known, for `extra` of one log line."""
    fields = {"base_model": base_model, "tenant": tenant, "run": run, "request_id": request_id}
    return {name: value for name, value in fields.items() if value is not None}


def begin_request(x_request_id: str | None) -> None:
    """Give all later lines of this task fields of their own."""
    _of_request.set({} if x_request_id is None else {"x_request_id": x_request_id})


def note(**fields: str) -> None:
    """Add fields to all later lines of this request, if it is one."""
    known = _of_request.get()
    if known is not None:
        known |= fields


def of_request() -> Mapping[str, str]:
    return _of_request.get() or {}
