"""The part of the store contract about places for models. Stores that hold no model back skip it."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tinsmith.errors import LeaseLostError
from tinsmith.operations import LoraConfig
from tinsmith.store import (
    WAITS_FOR_PLACE,
    OperationState,
    PlaceLimits,
    PlaceWait,
    RequestStore,
    RunState,
    RunStateChanged,
)
from tinsmith.testing.store_records import (
    BASE,
    LONG_S,
    LORA,
    NOW,
    a_creation,
    a_run,
    a_session,
    an_operation,
    claim,
    complete,
    done,
    failure_of,
    lease_of,
    state_of,
)
from tinsmith.testing.store_suite import StoreSuite


async def _applies(store: RequestStore, tenant: str, number: int = 0, *, lora: LoraConfig = LORA) -> str:
    """Create a session and a model that waits for a place. The number orders them. Return the creation's request_id."""
    session_id = f"{tenant}{number}"
    await store.create_session(a_session(session_id, tenant=tenant), idempotency_key=None)
    model_id = f"{session_id}:train:0"
    run = a_run(
        model_id, tenant=tenant, next_seq_id=WAITS_FOR_PLACE, created_at=NOW + timedelta(seconds=number), lora=lora
    )
    return await store.create_run(run, a_creation(model_id, tenant=tenant))


async def _admit(
    store: RequestStore,
    max_models: int,
    *,
    kept: int = 0,
    give_up_before: datetime = NOW,
    max_full_models: int | None = None,
) -> None:
    limits = PlaceLimits(
        max_models=max_models,
        max_full_models=max_full_models,
        kept=kept,
        give_up_before=give_up_before,
        failure="no place came free",
    )
    await store.admit_models(await lease_of(store), limits)


async def _created(store: RequestStore, request_id: str) -> None:
    """Claim everything, and complete this creation."""
    await claim(store)
    model_id = (await store.get_operation(request_id)).subject_id
    await complete(store, [done(request_id, None, RunStateChanged(model_id=model_id, state=RunState.READY))])


class PlacesContract(StoreSuite):
    # places for models

    async def test_nothing_of_a_model_runs_before_it_is_admitted(self, store: RequestStore) -> None:
        creation = await _applies(store, "ann")
        later = await store.submit(an_operation("ann0:train:0", 1))
        assert await claim(store) == []
        await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1))
        for request_id in (creation, later):
            waiting = await store.waiting(request_id)
            assert waiting.place == PlaceWait(taken=0, taken_by_tenant=0, num_waiting=1)
            assert waiting.missing_seq_id is None
        await _admit(store, 1)
        assert (await store.waiting(creation)).place is None
        assert await claim(store) == [creation, later]

    async def test_a_place_is_taken_until_its_model_is_gone(self, store: RequestStore) -> None:
        first, second, third = [await _applies(store, "ann", number) for number in range(3)]
        await _admit(store, 1)
        await _created(store, first)
        await _admit(store, 1)
        assert await claim(store) == []
        assert (await store.waiting(second)).place == PlaceWait(taken=1, taken_by_tenant=1, num_waiting=2)
        await store.end_session("ann0", "success", None)
        await _admit(store, 1)
        (unload,) = await claim(store)
        unloaded = RunStateChanged(model_id="ann0:train:0", state=RunState.UNLOADED)
        await complete(store, [done(unload, None, unloaded)])
        await _admit(store, 1)
        assert await claim(store) == [second]
        lost = RunStateChanged(model_id="ann1:train:0", state=RunState.LOST, reason="why")
        await complete(store, [done(second, None, lost)])
        await _admit(store, 1)
        assert await claim(store) == [third]

    async def test_tenants_get_places_in_turn_and_their_oldest_first(self, store: RequestStore) -> None:
        of_ann = [await _applies(store, "ann", number) for number in range(3)]
        of_bob = [await _applies(store, "bob", number) for number in range(3, 6)]
        await _admit(store, 3)
        assert set(await claim(store)) == {*of_ann[:2], of_bob[0]}
        await _admit(store, 4)
        assert await claim(store) == [of_bob[1]]

    async def test_the_last_places_are_for_tenants_without_a_model(self, store: RequestStore) -> None:
        of_ann = [await _applies(store, "ann", number) for number in range(5)]
        await _admit(store, 4, kept=2)
        assert await claim(store) == of_ann[:2]
        of_bob = [await _applies(store, "bob", number) for number in range(5, 7)]
        await _admit(store, 4, kept=2)
        assert await claim(store) == of_bob[:1]

    async def test_models_for_full_fine_tuning_have_fewer_places(self, store: RequestStore) -> None:
        full = LoraConfig(rank=0, seed=7)
        first, second = [await _applies(store, "ann", number, lora=full) for number in range(2)]
        adapter = await _applies(store, "ann", 2)
        await _admit(store, 4, max_full_models=1)
        assert set(await claim(store)) == {first, adapter}
        waiting = (await store.waiting(second)).place
        assert waiting == PlaceWait(taken=2, taken_by_tenant=2, num_waiting=1, taken_full=1)
        lost = RunStateChanged(model_id="ann0:train:0", state=RunState.LOST, reason="why")
        await complete(store, [done(first, None, lost)])
        await _admit(store, 4, max_full_models=1)
        assert await claim(store) == [second]

    async def test_a_model_that_has_waited_too_long_fails(self, store: RequestStore) -> None:
        first, second, third = [await _applies(store, "ann", number) for number in range(3)]
        behind = await store.submit(an_operation("ann1:train:0", 1))
        await _admit(store, 1, give_up_before=NOW + timedelta(seconds=2))
        assert await claim(store) == [first]
        for request_id in (second, behind):
            assert (await failure_of(store, request_id)).message == "no place came free"
        run = await store.get_run("ann1:train:0")
        assert (run.state, run.state_reason) == (RunState.LOST, "no place came free")
        assert await state_of(store, third) is OperationState.QUEUED

    async def test_a_model_whose_session_ends_while_it_waits_gets_its_turn_and_is_unloaded(
        self, store: RequestStore
    ) -> None:
        creation = await _applies(store, "ann")
        await store.end_session("ann0", "success", None)
        assert await claim(store) == []
        await _admit(store, 1)
        first, unload = await claim(store)
        assert first == creation
        assert (await store.get_operation(unload)).kind == "unload_model"

    async def test_only_the_engine_with_the_lease_admits_models(self, store: RequestStore, other: RequestStore) -> None:
        creation = await _applies(store, "ann")
        old = await lease_of(store)
        await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-1")
        limits = PlaceLimits(max_models=1, kept=0, give_up_before=NOW, failure="")
        with pytest.raises(LeaseLostError):
            await store.admit_models(old, limits)
        assert (await store.waiting(creation)).place is not None

    async def test_an_engine_learns_that_a_model_waits_and_that_a_place_is_free(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await other.wait_for_places(BASE, 0)
        waiting = asyncio.create_task(other.wait_for_places(BASE, LONG_S))
        creation = await _applies(store, "ann")
        await waiting
        await _admit(store, 1)
        await claim(store)
        waiting = asyncio.create_task(other.wait_for_places(BASE, LONG_S))
        lost = RunStateChanged(model_id="ann0:train:0", state=RunState.LOST, reason="why")
        await complete(store, [done(creation, None, lost)])
        await waiting
