"""One tenant cannot take every place for models, and a model without a place waits, with a reason and a bound."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, TrainerCapabilities
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.server.waiting_reasons import explain
from tinsmith.settings import QuotaSettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import (
    EngineCapabilities,
    EngineRecord,
    EngineState,
    OperationRecord,
    OperationState,
    PlaceLimits,
    PlaceWait,
    RunState,
    StoreContext,
    Waiting,
)
from tinsmith.store.shares import Applicant, Idle, Taken, next_ones, to_park
from tinsmith.testing.engine_driver import EngineDriver, make_engine

NOW = datetime(2026, 1, 2, tzinfo=UTC)
PLACES = 8  # of which one is kept for tenants without a model


def applicants(*tenants: str) -> list[Applicant]:
    return [Applicant(f"{tenant}-{n}", tenant, NOW + timedelta(seconds=n)) for n, tenant in enumerate(tenants)]


def admitted(waiting: list[Applicant], taken: dict[str, int], *, max_models: int, kept: int = 0) -> list[str]:
    limits = PlaceLimits(max_models=max_models, kept=kept, give_up_before=NOW, failure="")
    return [each.model_id for each in next_ones(waiting, Taken(Counter(taken)), limits)]


def test_whoever_has_the_fewest_places_is_next() -> None:
    waiting = applicants("ann", "ann", "ann", "bob", "bob")
    assert admitted(waiting, {}, max_models=4) == ["ann-0", "bob-3", "ann-1", "bob-4"]
    assert admitted(waiting, {"ann": 2}, max_models=5) == ["bob-3", "bob-4", "ann-0"]


def test_no_tenant_gets_a_kept_place_as_its_second() -> None:
    waiting = applicants("ann", "ann", "bob", "bob")
    assert admitted(waiting, {"ann": 6}, max_models=8, kept=2) == ["bob-2"]
    assert admitted(waiting, {}, max_models=2, kept=2) == ["ann-0", "bob-2"]


def test_nobody_gets_a_place_that_is_taken() -> None:
    assert admitted(applicants("ann"), {"bob": 4}, max_models=4) == []
    assert admitted(applicants("ann"), {"bob": 5}, max_models=4) == []  # the backend was restarted with fewer


def test_a_model_for_full_fine_tuning_waits_for_one_of_its_places_and_holds_up_no_other() -> None:
    limits = PlaceLimits(max_models=4, max_full_models=1, kept=0, give_up_before=NOW, failure="")
    first, second, adapter = applicants("ann", "bob", "bob")
    waiting = [replace(first, full=True), replace(second, full=True), adapter]
    assert [each.model_id for each in next_ones(waiting, Taken(Counter()), limits)] == ["ann-0", "bob-2"]
    assert [each.model_id for each in next_ones(waiting, Taken(Counter(eve=1), full=1), limits)] == ["bob-2"]
    unlimited = replace(limits, max_full_models=None)
    assert len(list(next_ones(waiting, Taken(Counter(eve=1), full=1), unlimited))) == 3


def parked(
    waiting: list[Applicant], idle: dict[str, str], taken: dict[str, int], **limits: Any
) -> list[tuple[str, str]]:
    """`idle` has the tenant of each idle model, beginning with the one that has been idle longest."""
    limits = {"kept": 0, "give_up_before": NOW, "failure": "", "idle_since": NOW, **limits}
    resting = [
        Idle(name, tenant, NOW + timedelta(seconds=n), seq_id=n, full="full" in name)
        for n, (name, tenant) in enumerate(idle.items())
    ]
    found = to_park(
        waiting, resting, Taken(Counter(taken), full=sum(each.full for each in resting)), PlaceLimits(**limits)
    )
    return [(each.model_id, to.model_id) for each, to in found]


def test_the_model_that_has_been_idle_longest_gives_way() -> None:
    idle = {"a": "bob", "b": "bob", "c": "bob"}
    assert parked(applicants("ann", "eve"), idle, {"bob": 4}, max_models=4) == [("a", "ann-0"), ("b", "eve-1")]


def test_nobody_gives_way_to_a_tenant_that_has_as_many_places() -> None:
    """But for its own models, which it may exchange."""
    assert parked(applicants("ann"), {"a": "bob", "b": "ann"}, {"bob": 2, "ann": 2}, max_models=4) == [("b", "ann-0")]
    assert parked(applicants("ann"), {"a": "bob"}, {"bob": 2, "ann": 2}, max_models=4) == []
    assert parked(applicants("ann", "ann"), {"a": "bob", "b": "bob"}, {"bob": 3, "ann": 1}, max_models=4) == [
        ("a", "ann-0")
    ]


def test_a_place_that_is_kept_is_neither_used_up_nor_in_the_way_of_an_exchange() -> None:
    assert parked(applicants("ann"), {"a": "bob"}, {"bob": 6, "ann": 1}, max_models=8, kept=2) == []
    assert parked(applicants("ann"), {"a": "ann"}, {"bob": 6, "ann": 1}, max_models=8, kept=2) == [("a", "ann-0")]
    limits = PlaceLimits(max_models=8, kept=2, give_up_before=NOW, failure="", freed_for=frozenset({"ann-0"}))
    taken = Taken(Counter(bob=5, ann=1))
    assert [each.model_id for each in next_ones(applicants("ann", "bob"), taken, limits)] == ["ann-0"]


def test_only_a_model_with_all_weights_gives_way_to_another_where_there_are_few() -> None:
    waiting = [replace(each, full=True) for each in applicants("ann")]
    idle = {"a": "bob", "full": "bob"}
    assert parked(waiting, idle, {"bob": 4}, max_models=4, max_full_models=1) == [("full", "ann-0")]
    assert parked(waiting, {"a": "bob"}, {"bob": 4}, max_models=4, max_full_models=1) == [("a", "ann-0")]
    assert parked(applicants("ann"), {"full": "bob"}, {"bob": 4}, max_models=4, max_full_models=1) == [
        ("full", "ann-0")
    ]


def test_places_are_kept_only_where_there_are_many() -> None:
    assert [QuotaSettings().kept(places) for places in (1, 7, 8, 64)] == [0, 0, 1, 8]


class _Limited(ToyBackend):
    """The toy backend with other capabilities."""

    def __init__(self, config: ToyConfig, context: BackendContext, other: Mapping[str, Any]) -> None:
        super().__init__(config, context)
        self._other = other

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        return replace(super().trainer_capabilities, **self._other)


@asynccontextmanager
async def engine_on(
    store: SqlStore, tmp_path: Path, capabilities: Mapping[str, object] | None = None, **quotas: float
) -> AsyncIterator[None]:
    context = BackendContext(
        model_name="toy", model_path=None, cache_dir=tmp_path, losses={loss.name: loss for loss in BUILTIN_LOSSES}
    )
    backend = _Limited(ToyConfig(max_models=PLACES), context, capabilities or {})
    settings = QuotaSettings(place_idle_s=None, **quotas)
    engine = await make_engine(store, backend, tmp_path, sampler=backend, quotas=settings)
    await engine.recover("killed", lambda _what, _share: None)
    running = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        engine.stop()
        await running


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def a_client(store: SqlStore, tenant: str, session_id: str) -> EngineDriver:
    client = EngineDriver(store, "toy", tenant=tenant, session_id=session_id)
    await client.open_session()
    return client


async def is_created(client: EngineDriver, request_id: str) -> bool:
    return isinstance(await client.result(request_id), ops.ModelCreated)


async def test_a_tenant_with_many_models_locks_nobody_out(store: SqlStore, tmp_path: Path) -> None:
    greedy, modest = await a_client(store, "greedy", "s1"), await a_client(store, "modest", "s2")
    async with engine_on(store, tmp_path):
        asked = [await greedy.create_model(number) for number in range(PLACES + 2)]
        for request_id in asked[: PLACES - 1]:
            assert await is_created(greedy, request_id)
        assert await is_created(modest, await modest.create_model())
        for request_id in asked[PLACES - 1 :]:
            assert (await store.waiting(request_id)).place == PlaceWait(taken=8, taken_by_tenant=7, num_waiting=3)
        await greedy.store.end_session("s2", "success", None)
        again = await a_client(store, "modest", "s3")
        assert await is_created(again, await again.create_model())


async def test_a_place_that_becomes_free_goes_to_a_model_that_waits(store: SqlStore, tmp_path: Path) -> None:
    clients = [await a_client(store, f"tenant{number}", f"s{number}") for number in range(PLACES + 1)]
    async with engine_on(store, tmp_path):
        asked = [await client.create_model() for client in clients]
        for client, request_id in zip(clients[:-1], asked[:-1], strict=True):
            assert await is_created(client, request_id)
        await store.end_session("s3", "success", None)
        assert await is_created(clients[-1], asked[-1])


def let_hours_pass(data_dir: Path) -> None:
    with sqlite3.connect(data_dir / "tinsmith.db") as database:
        database.execute("UPDATE runs SET created_at = created_at - 7200000000")
    database.close()


async def test_an_engine_that_dies_leaves_the_places_as_they_are(store: SqlStore, tmp_path: Path) -> None:
    """And whoever waits does so for another `place_wait_s`, since there was no place to get meanwhile."""
    client = await a_client(store, "greedy", "s1")
    async with engine_on(store, tmp_path):
        asked = [await client.create_model(number) for number in range(PLACES + 1)]
        for request_id in asked[: PLACES - 1]:
            assert await is_created(client, request_id)
    let_hours_pass(tmp_path)
    async with engine_on(store, tmp_path):
        other = await a_client(store, "modest", "s2")
        assert await is_created(other, await other.create_model())
        states = [(await store.get_run(client.model_id(number))).state for number in range(PLACES + 1)]
        assert states == [RunState.READY] * (PLACES - 1) + [RunState.CREATING] * 2
        saved = await client.run(ops.SaveState(model_id=client.model_id(0), path=client.path("a")))
        assert isinstance(saved, ops.WeightsSaved)


async def test_a_model_that_finds_no_place_in_time_fails_with_the_setting(store: SqlStore, tmp_path: Path) -> None:
    client = await a_client(store, "greedy", "s1")
    async with engine_on(store, tmp_path, place_wait_s=1e-6):
        asked = [await client.create_model(number) for number in range(PLACES)]
        message = (await client.failure(asked[-1])).message
    assert "no place for a model of 'toy' became free within 0 s (quotas.place_wait_s); it holds 8 models" in message


async def test_full_fine_tuning_that_is_not_offered_waits_for_no_place(store: SqlStore, tmp_path: Path) -> None:
    client = await a_client(store, "ann", "s1")
    creation = await client.create_model(rank=0)
    async with engine_on(store, tmp_path, {"max_full_models": 0, "full_fine_tuning": False}, place_wait_s=1e-6):
        failed = await client.failure(creation)
    assert "full fine-tuning, which this base model's backend does not offer" in failed.message


async def test_models_that_find_no_place_fail_one_by_one(store: SqlStore, tmp_path: Path) -> None:
    """Each may have thousands of operations, and other writes wait for a transaction, whose time its results have."""
    client = await a_client(store, "greedy", "s1")
    asked = [await client.create_model(number) for number in range(PLACES + 1)]
    async with engine_on(store, tmp_path, place_wait_s=1e-6):
        for request_id in asked[PLACES - 1 :]:
            assert "no place" in (await client.failure(request_id)).message
    times = [(await store.get_operation(request_id)).finished_at for request_id in asked[PLACES - 1 :]]
    assert len(set(times)) == len(times) >= 2


def test_the_reason_says_whose_models_are_in_the_way() -> None:
    trainer = TrainerCapabilities(vocab_size=64, max_context_tokens=64, max_batch_tokens=64, max_models=64)
    engine = EngineRecord(
        base_model="toy",
        state=EngineState.READY,
        updated_at=NOW,
        capabilities=EngineCapabilities(trainer=trainer, sampler=None),
    )

    def reason(place: PlaceWait, engine: EngineRecord = engine) -> tuple[str, str]:
        found = explain(operation, Waiting(engine=engine, place=place), QuotaSettings())
        return found.queue_state, found.text

    operation = OperationRecord(
        request_id="r",
        base_model="toy",
        kind="create_model",
        tenant="ann",
        session_id="s",
        subject_id="s:train:0",
        seq_id=0,
        ordered=True,
        num_tokens=0,
        state=OperationState.QUEUED,
        created_at=NOW,
    )
    state, text = reason(PlaceWait(taken=64, taken_by_tenant=3, num_waiting=5))
    assert state == "paused_capacity"
    assert text == (
        "64 of the 64 places for models of 'toy' are taken, 3 of them by you, and 5 models wait for one; a place "
        "becomes free when a session ends or a model has been idle for 10 s (quotas.place_idle_s); after 1800 s the "
        "request fails (quotas.place_wait_s)"
    )
    state, text = reason(PlaceWait(taken=64, taken_by_tenant=3, num_waiting=1, parked=True))
    assert text.endswith(
        "(quotas.place_idle_s); your model was parked while it was idle, and goes on from where it was"
    )
    state, text = reason(PlaceWait(taken=56, taken_by_tenant=56, num_waiting=5))
    assert state == "paused_rate_limit"
    assert "your models take 56 of the 64 places" in text
    assert "the last 8 are for tenants without a model (quotas.kept_places)" in text
    limited = replace(
        engine, capabilities=EngineCapabilities(trainer=replace(trainer, max_full_models=2), sampler=None)
    )
    full = PlaceWait(taken=5, taken_by_tenant=0, num_waiting=1, taken_full=2)
    assert "2 of the 2 places for full fine-tuning (LoRA rank 0) of 'toy' are taken" in reason(full, limited)[1]
    assert "5 of the 64 places" in reason(full)[1]
    state, text = reason(
        PlaceWait(taken=64, taken_by_tenant=3, num_waiting=5), replace(engine, state=EngineState.RECOVERING)
    )
    assert (state, text) == ("paused_capacity", "the engine of 'toy' is recovering")
