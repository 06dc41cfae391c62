"""Reads the results of finished operations, and tells failures as their readers may read them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from starlette.concurrency import run_in_threadpool

from tinsmith.errors import TinsmithError
from tinsmith.hook_values import Principal
from tinsmith.operations import Failed, Result
from tinsmith.references import Told, log_privately
from tinsmith.server.context import ServerContext
from tinsmith.server.waiting_reasons import with_causes
from tinsmith.store import OperationRecord, OperationState
from tinsmith.store.codec import decode_result

_log = logging.getLogger(__name__)

T = TypeVar("T")

_THREAD_BYTES: Final = 1 << 16


async def finished_result(operation: OperationRecord, make: Callable[[Result], T]) -> T | Failed:
    """Return what `make` makes of the result, or the failure. Large results are decoded in a thread."""
    if len(operation.result or b"") > _THREAD_BYTES:
        return await run_in_threadpool(_read, operation, make)
    return _read(operation, make)


def _read(operation: OperationRecord, make: Callable[[Result], T]) -> T | Failed:
    if operation.result is None or operation.result_kind is None:
        message = "cancelled" if operation.state is OperationState.CANCELLED else "the result is missing"
        return Failed(message=message, category="user" if message == "cancelled" else "server")
    try:
        result = decode_result(operation.result_kind, operation.result)
        return result if isinstance(result, Failed) else make(result)
    except TinsmithError as error:
        what = f"the result of {operation.request_id} cannot be returned"
        text = f"{what} ({log_privately(_log, f'{what}: {error}', error=error)})"
        return Failed(message=text, category="server", cause=str(error))


async def as_told(context: ServerContext, caller: Principal, failed: Failed) -> Failed:
    """Return a failure as the caller may read it."""
    if failed.category == "user" or not context.is_operator(caller):
        return failed
    text = Told(failed.message, failed.cause).to(operator=True)
    records = (await context.engines.records()).values()
    return replace(failed, message=with_causes(text, records, operator=True))
