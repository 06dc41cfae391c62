"""The part of the store contract about curves: what operations measured and what clients logged."""

import asyncio
import math
from collections.abc import Mapping

import pytest

from tinsmith.errors import NotFoundError, UserError
from tinsmith.operations import Failed, ModelUnloaded
from tinsmith.store import Completion, Measured, RequestStore, RunState, RunStateChanged
from tinsmith.store.metrics import MOST_NAMES
from tinsmith.testing.store_records import LONG_S, NOW, a_model, an_operation, claim, complete, done
from tinsmith.testing.store_suite import StoreSuite

_MODEL = "s1:train:0"


def _measured(step: int, **values: float) -> Measured:
    return Measured(step=step, values=values)


async def _run(store: RequestStore, seq_id: int, step: int, steps: int, **values: float) -> Completion:
    """Submit and claim an operation of the model, and return what completes it."""
    request_id = await store.submit(an_operation(seq_id=seq_id))
    assert request_id in await claim(store)
    return Completion(
        request_id=request_id, result=done(request_id).result, measured=_measured(step, **values), steps=steps
    )


async def _rows(store: RequestStore, model_id: str = _MODEL) -> list[tuple[int, int, Mapping[str, float]]]:
    found = await store.read_metrics(model_id, limit=100)
    return [(each.step, each.seq_id, each.values) for each in found]


class MetricsContract(StoreSuite):
    async def test_what_an_operation_measures_is_there_once_with_its_result(self, measured: RequestStore) -> None:
        first = await _run(measured, 1, 0, 0, loss=2.5)
        await complete(measured, [first])
        await complete(measured, [first])  # its answer was lost
        second = await _run(measured, 2, 0, 1, norm=math.inf)
        third = await _run(measured, 3, 1, 1, loss=1.5)
        await complete(measured, [second, third])
        assert await _rows(measured) == [(0, 1, {"loss": 2.5}), (0, 2, {"norm": math.inf}), (1, 3, {"loss": 1.5})]
        assert (await measured.get_run(_MODEL)).steps == 1

    async def test_an_operation_that_is_not_completed_leaves_no_metrics(self, measured: RequestStore) -> None:
        """An engine that has died in between runs it again, and its own results count."""
        lost = await _run(measured, 1, 0, 1, loss=2.5)
        await measured.cancel(lost.request_id)  # does nothing to an operation of a model
        assert await _rows(measured) == []
        await complete(measured, [lost])
        assert await _rows(measured) == [(0, 1, {"loss": 2.5})]

    async def test_steps_never_go_back(self, measured: RequestStore) -> None:
        await complete(measured, [await _run(measured, 1, 0, 7)])
        await complete(measured, [await _run(measured, 2, 3, 3)])
        assert (await measured.get_run(_MODEL)).steps == 7

    async def test_what_a_client_logs_joins_its_step_and_repeats_change_nothing(self, measured: RequestStore) -> None:
        await complete(measured, [await _run(measured, 1, 0, 0, loss=2.5)])
        await measured.log_metrics(_MODEL, [_measured(0, reward=1.0), _measured(4, reward=3.0, kl=math.nan)])
        written = await measured.log_metrics(_MODEL, [_measured(0, reward=1.5), _measured(0, length=8.0)])
        assert (await measured.get_run(_MODEL)).metric_bytes == written
        assert await measured.log_metrics(_MODEL, [_measured(0, reward=1.5)]) == written
        client, engine, later = await _rows(measured)
        assert client == (0, -1, {"reward": 1.5, "length": 8.0})
        assert engine == (0, 1, {"loss": 2.5})
        assert later[:2] == (4, -1)
        assert math.isnan(later[2]["kl"])

    async def test_metrics_are_read_in_pages(self, measured: RequestStore) -> None:
        await measured.log_metrics(_MODEL, [_measured(step, x=1.0) for step in range(3)])
        await complete(measured, [await _run(measured, 1, 1, 1, loss=2.5)])
        page = await measured.read_metrics(_MODEL, from_step=1, limit=1)
        assert [(each.step, each.seq_id) for each in page] == [(1, -1)]
        rest = await measured.read_metrics(_MODEL, from_step=1, after=-1, limit=9)
        assert [(each.step, each.seq_id) for each in rest] == [(1, 1), (2, -1)]

    async def test_a_step_has_a_limited_number_of_metrics(self, measured: RequestStore) -> None:
        many = {f"m{number}": 0.0 for number in range(MOST_NAMES)}
        await measured.log_metrics(_MODEL, [_measured(0, **many)])
        with pytest.raises(UserError, match=f"step 0 would have {MOST_NAMES + 1} metrics"):
            await measured.log_metrics(_MODEL, [_measured(1, x=1.0), _measured(0, x=1.0)])
        assert [row[0] for row in await _rows(measured)] == [0]  # nothing of a refused call is kept
        with pytest.raises(NotFoundError, match="nobody"):
            await measured.log_metrics("nobody", [_measured(0, x=1.0)])

    async def test_new_metrics_wake_who_waits_for_them(self, measured: RequestStore, other: RequestStore) -> None:
        assert await other.wait_for_metrics(_MODEL, known=0, timeout_s=0) == 0
        waiting = asyncio.create_task(other.wait_for_metrics(_MODEL, known=0, timeout_s=LONG_S))
        await complete(measured, [await _run(measured, 1, 0, 0, loss=2.5)])
        known = await waiting
        assert known > 0
        waiting = asyncio.create_task(other.wait_for_metrics(_MODEL, known=known, timeout_s=LONG_S))
        assert await measured.log_metrics(_MODEL, [_measured(0, reward=1.0)]) == await waiting

    async def test_metrics_count_towards_what_a_tenant_keeps_and_go_with_their_run(
        self, measured: RequestStore
    ) -> None:
        await a_model(measured, "s2:train:0", tenant="bob")
        await measured.log_metrics("s2:train:0", [_measured(0, x=1.0)])
        written = await measured.log_metrics(_MODEL, [_measured(0, x=1.0)])
        (kept,) = await measured.kept_bytes("ann")
        assert kept.metrics == written > 0
        await measured.end_session("s1", "success", None)
        for request_id in await claim(measured):
            unloaded = RunStateChanged(model_id=_MODEL, state=RunState.UNLOADED)
            await complete(measured, [done(request_id, ModelUnloaded(model_id=_MODEL), unloaded)])
        await measured.prune(NOW.replace(year=NOW.year + 9))
        assert await _rows(measured)  # the log is gone, the curve is not
        await measured.forget_sessions(NOW.replace(year=NOW.year + 9))
        assert await _rows(measured) == []
        assert await _rows(measured, "s2:train:0")

    async def test_a_failure_leaves_the_count_of_its_model(self, measured: RequestStore) -> None:
        await complete(measured, [await _run(measured, 1, 0, 1)])
        failed = await _run(measured, 2, 1, 1)
        await complete(measured, [Completion(request_id=failed.request_id, result=Failed(message="no"), steps=1)])
        assert (await measured.get_run(_MODEL)).steps == 1
        assert [row[:2] for row in await _rows(measured)] == [(0, 1)]

    @pytest.fixture
    async def measured(self, store: RequestStore) -> RequestStore:
        await a_model(store)
        return store
