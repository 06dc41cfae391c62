"""Work that a request to stop cuts short ends before whoever waits for it goes on, however the waiting ends."""

import asyncio
from contextlib import suppress

import pytest

from tinsmith.stopping import unless_stopped


class Work:
    """Never returns by itself. Ending takes it several turns of the event loop."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            self.ended = True


async def test_work_that_nothing_stops_returns_its_result() -> None:
    assert await unless_stopped(asyncio.Event(), asyncio.sleep(0, "done")) == "done"


async def test_an_error_of_the_work_is_the_callers() -> None:
    async def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await unless_stopped(asyncio.Event(), fail())


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_work_has_ended_when_the_caller_is_stopped_or_cancelled(*, cancelled: bool) -> None:
    """An engine that lost its lease while it recovered its models must not go on with a backend that is closed."""
    work, stopping = Work(), asyncio.Event()
    waiting = asyncio.create_task(unless_stopped(stopping, work.run()))
    await work.begun.wait()
    if cancelled:
        waiting.cancel()
    else:
        stopping.set()
    with suppress(asyncio.CancelledError):
        assert await waiting is None
    assert waiting.cancelled() is cancelled
    assert work.ended
