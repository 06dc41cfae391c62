"""Work beside other work goes on after an exception, which the log has."""

import asyncio

import pytest

from tinsmith import lasting as module
from tinsmith.lasting import alongside, lasting, start_lasting
from tinsmith.sql_store.group_commit import Call, Grouping
from tinsmith.testing.engine_driver import WAIT_S


class Failing:
    """Raises as often as told, then waits until it is cancelled."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.works = asyncio.Event()

    async def work(self) -> None:
        if self.left:
            self.left -= 1
            msg = f"trouble {self.left}"
            raise RuntimeError(msg)
        self.works.set()
        await asyncio.Event().wait()


async def test_it_starts_again_and_the_log_has_every_exception(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(3)
    async with alongside(failing.work, name="the watch", pause_s=0.001):
        await asyncio.wait_for(failing.works.wait(), WAIT_S)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"the watch failed, and starts again in {pause_s:g} s" for pause_s in (0.001, 0.002, 0.004)]
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == [
        "trouble 2",
        "trouble 1",
        "trouble 0",
    ]


async def test_it_ends_when_it_returns() -> None:
    async def work() -> None:
        pass

    await asyncio.wait_for(lasting(work, name="the work"), WAIT_S)


async def test_a_request_to_stop_ends_the_pause_and_the_work_is_done_once_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PAUSE_S", 3600.0)
    stopping, failed = asyncio.Event(), asyncio.Event()
    done: list[bool] = []

    async def work() -> None:
        done.append(stopping.is_set())
        failed.set()
        raise RuntimeError

    task = start_lasting(work, name="the work", pause_s=3600.0, stopping=stopping)
    await asyncio.wait_for(failed.wait(), WAIT_S)
    stopping.set()
    await asyncio.wait_for(task, WAIT_S)
    assert done == [False, True]
    assert "the work failed while it was stopping" in caplog.text


class Short(Grouping[None]):
    """Returns no results for a group, which is a fault of its own."""

    faults = 1

    async def _run(self, connection: None, calls: list[Call]) -> list[object]:
        self.faults -= 1
        return [] if self.faults >= 0 else [None] * len(calls)


async def test_a_fault_in_the_store_fails_those_that_wait_and_later_calls_are_run() -> None:
    """Before, every later call of the server waited for ever."""
    short = Short([None], max_group=1)
    short.open()
    with pytest.raises(ValueError, match="shorter"):
        await asyncio.wait_for(short.ask(Call(print, (), {})), WAIT_S)
    assert await asyncio.wait_for(short.ask(Call(print, (), {})), WAIT_S) is None
    await short.close()
