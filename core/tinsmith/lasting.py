"""Work beside other work. If it raises, that is logged, and the work starts again: nobody waits for its result."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

Work = Callable[[], Coroutine[Any, Any, object]]

MAX_PAUSE_S: Final = 60.0

_log = logging.getLogger(__name__)


async def lasting(work: Work, *, name: str, pause_s: float = 1.0, stopping: asyncio.Event | None = None) -> None:
    """Do the work until it returns or is cancelled. After an exception, pause and do it again.

    The pause doubles up to MAX_PAUSE_S. It is `pause_s` again once the work has lasted longer than that.
    `stopping` ends a pause. If the work raises once that is set, it is not done again.
    """
    next_pause_s = pause_s
    while True:
        began_s = time.monotonic()
        try:
            await work()
        except Exception:  # noqa: BLE001 - logged below
            if time.monotonic() - began_s > MAX_PAUSE_S:
                next_pause_s = pause_s
            if stopping is not None and stopping.is_set():
                _log.exception("%s failed while it was stopping", name)
                return
            _log.exception("%s failed, and starts again in %g s", name, next_pause_s)
        else:
            return
        await _pause(next_pause_s, stopping)
        next_pause_s = min(2 * next_pause_s, MAX_PAUSE_S)


async def _pause(pause_s: float, stopping: asyncio.Event | None) -> None:
    if stopping is None:
        await asyncio.sleep(pause_s)
        return
    with suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), pause_s)


def start_lasting(
    work: Work, *, name: str, pause_s: float = 1.0, stopping: asyncio.Event | None = None
) -> asyncio.Task[None]:
    """Start a task that does lasting work. The caller keeps the task, and cancels it."""
    return asyncio.create_task(lasting(work, name=name, pause_s=pause_s, stopping=stopping), name=name)


@asynccontextmanager
async def alongside(work: Work, *, name: str, pause_s: float = 1.0) -> AsyncIterator[None]:
    """Do lasting work while the block runs, then cancel it and wait for its end."""
    task = start_lasting(work, name=name, pause_s=pause_s)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
