"""The part of the store contract about places for models. Stores that hold no model back skip it."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinsmith.errors import LeaseLostError
from tinsmith.operations import LoraConfig
from tinsmith.store import (
    WAITS_FOR_PLACE,
    OperationState,
    PlaceCounts,
    PlaceLimits,
    PlaceMoves,
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
    a_recovery_point,
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
    **more: Any,
) -> PlaceMoves:
    limits = PlaceLimits(
        max_models=max_models,
        max_full_models=max_full_models,
        kept=kept,
        give_up_before=give_up_before,
        failure="no place came free",
        **more,
    )
    return await store.admit_models(await lease_of(store), limits)


async def _created(store: RequestStore, request_id: str) -> None:
    """Claim everything, and complete this creation."""
    await claim(store)
    model_id = (await store.get_operation(request_id)).subject_id
    await complete(store, [done(request_id, None, RunStateChanged(model_id=model_id, state=RunState.READY))])


async def _park(store: RequestStore, model_id: str = "ann0:train:0", seq_id: int = 0) -> bool:
    return await store.park_model(await lease_of(store), a_recovery_point(seq_id, model_id), keep=2)


async def _return(store: RequestStore, model_id: str = "ann0:train:0") -> bool:
    return await store.return_model(await lease_of(store), model_id)


async def _parked(store: RequestStore) -> None:
    """Create model ann0:train:0, and park it."""
    creation = await _applies(store, "ann")
    await _admit(store, 1)
    await _created(store, creation)
    assert await _park(store)


def _whom(moves: PlaceMoves) -> list[tuple[str, int, str]]:
    return [(each.model_id, each.seq_id, each.for_model_id) for each in moves.park]


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
        assert await store.count_places(BASE) == PlaceCounts(taken=1, waiting=2)
        assert await store.count_places("another") == PlaceCounts(taken=0, waiting=0)
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

    # parked models

    async def test_a_model_with_nothing_to_do_may_be_parked_for_one_that_waits(self, store: RequestStore) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        creation = await _applies(store, "ann")
        await _admit(store, 1)
        await _created(store, creation)
        assert await _admit(store, 1, idle_since=later) == PlaceMoves(), "nobody waits"
        other = await _applies(store, "bob", 1)
        assert _whom(await _admit(store, 1)) == []
        early = datetime.now(UTC) - timedelta(hours=1)
        assert await _admit(store, 1, idle_since=early) == PlaceMoves(waiting=True), "it has just been created"
        moves = await _admit(store, 1, idle_since=later)
        assert (_whom(moves), moves.waiting) == ([("ann0:train:0", 0, "bob1:train:0")], True)
        assert _whom(await _admit(store, 1, idle_since=later, staying=frozenset({"ann0:train:0"}))) == []
        assert await claim(store) == [], "its place is not free yet"
        assert await _park(store)
        assert (await store.get_run("ann0:train:0")).state is RunState.PARKED
        assert [each.seq_id for each in await store.list_recovery_points("ann0:train:0")] == [0]
        assert await _admit(store, 1) == PlaceMoves()
        assert await claim(store) == [other]

    async def test_a_client_that_is_there_gives_way_only_to_a_tenant_with_fewer_places(
        self, store: RequestStore
    ) -> None:
        creations = [await _applies(store, "ann"), await _applies(store, "bob", 1)]
        await _admit(store, 2)
        await claim(store)
        for request_id in creations:
            model_id = (await store.get_operation(request_id)).subject_id
            await complete(store, [done(request_id, None, RunStateChanged(model_id=model_id, state=RunState.READY))])
        await store.submit(an_operation("bob1:train:0", 1, tenant="bob"))
        await _applies(store, "bob", 2)
        later = datetime.now(UTC) + timedelta(hours=1)
        assert _whom(await _admit(store, 2, idle_since=later)) == [("ann0:train:0", 0, "bob2:train:0")]
        await store.hear_session("ann0", datetime.now(UTC))
        assert _whom(await _admit(store, 2, idle_since=later)) == []
        await _applies(store, "eve", 3)
        assert _whom(await _admit(store, 2, idle_since=later)) == [("ann0:train:0", 0, "eve3:train:0")]

    async def test_a_model_with_anything_pending_keeps_its_place(self, store: RequestStore) -> None:
        creation = await _applies(store, "ann")
        await _admit(store, 1)
        later = datetime.now(UTC) + timedelta(hours=1)
        await _applies(store, "bob", 1)
        assert _whom(await _admit(store, 1, idle_since=later)) == [], "it is being created"
        await _created(store, creation)
        queued = await store.submit(an_operation("ann0:train:0", 1))
        assert _whom(await _admit(store, 1, idle_since=later)) == []
        assert not await _park(store)
        assert await claim(store) == [queued]
        assert not await _park(store)
        await complete(store, [done(queued, None)])
        assert not await _park(store), "it has gone on since"
        assert await _park(store, seq_id=1)
        assert await _park(store, seq_id=1), "a repeat"

    async def test_a_model_that_waits_behind_a_gap_keeps_its_place(self, store: RequestStore) -> None:
        creation = await _applies(store, "ann")
        await _admit(store, 1)
        await _created(store, creation)
        await store.submit(an_operation("ann0:train:0", 2))
        assert not await _park(store)

    async def test_a_parked_model_waits_for_a_place_at_its_next_request(self, store: RequestStore) -> None:
        await _parked(store)
        other = await _applies(store, "bob", 1)
        await _admit(store, 1)
        await _created(store, other)
        (live, _) = await store.live_models(BASE)
        assert (live.run.state, live.rebuilds) == (RunState.PARKED, 0)
        assert await _admit(store, 1) == PlaceMoves(), "it asks for nothing"
        asked = [await store.submit(an_operation("ann0:train:0", seq_id)) for seq_id in (1, 2)]
        assert await claim(store) == []
        place = PlaceWait(taken=1, taken_by_tenant=0, num_waiting=1, parked=True)
        for request_id in asked:
            waiting = await store.waiting(request_id)
            assert (waiting.place, waiting.missing_seq_id) == (place, None)
        assert await _admit(store, 1, give_up_before=datetime.now(UTC) + timedelta(hours=1)) == PlaceMoves(waiting=True)
        later = datetime.now(UTC) + timedelta(hours=1)
        assert _whom(await _admit(store, 1, idle_since=later)) == [("bob1:train:0", 0, "ann0:train:0")]
        assert await _park(store, "bob1:train:0")
        moves = await _admit(store, 1)
        assert (moves.come_back, moves.waiting) == (("ann0:train:0",), True)
        assert await claim(store) == [], "it is not on the backend yet"
        await store.begin_rebuild(await lease_of(store), "ann0:train:0", interrupted=False)
        assert (await store.live_models(BASE))[0].rebuilds == 1
        await store.end_rebuild(await lease_of(store), "ann0:train:0")
        assert await _return(store)
        assert await _return(store), "a repeat"
        assert (await store.get_run("ann0:train:0")).state is RunState.READY
        assert await claim(store) == asked
        assert await _admit(store, 1) == PlaceMoves()

    async def test_a_gap_of_a_parked_model_is_not_given_up_before_it_is_back(self, store: RequestStore) -> None:
        await _parked(store)
        behind = await store.submit(an_operation("ann0:train:0", 2))
        later = datetime.now(UTC) + timedelta(hours=1)
        await store.hear_session("ann0", datetime.now(UTC))
        assert await store.fail_gaps(BASE, older_than=later) == 0
        assert (await _admit(store, 1)).come_back == ("ann0:train:0",)
        assert await _return(store)
        assert (await store.waiting(behind)).missing_seq_id == 1
        missing = await store.submit(an_operation("ann0:train:0", 1))
        assert await claim(store) == [missing, behind]

    async def test_a_parked_model_is_unloaded_without_coming_back(self, store: RequestStore) -> None:
        await _parked(store)
        await store.end_session("ann0", "success", None)
        assert await _admit(store, 1) == PlaceMoves()
        (unload,) = await claim(store)
        assert (await store.get_operation(unload)).kind == "unload_model"
        await complete(store, [done(unload, None, RunStateChanged(model_id="ann0:train:0", state=RunState.UNLOADED))])
        assert await store.live_models(BASE) == []
        assert not await _return(store)
        assert (await store.get_run("ann0:train:0")).state is RunState.UNLOADED

    async def test_what_a_parked_model_has_accepted_runs_before_it_is_unloaded(self, store: RequestStore) -> None:
        await _parked(store)
        accepted = await store.submit(an_operation("ann0:train:0", 1))
        behind = await store.submit(an_operation("ann0:train:0", 3))
        await store.end_session("ann0", "success", None)
        assert await state_of(store, behind) is OperationState.FAILED
        assert await claim(store) == []
        assert (await _admit(store, 1)).come_back == ("ann0:train:0",)
        assert await _return(store)
        first, unload = await claim(store)
        assert (first, (await store.get_operation(unload)).kind) == (accepted, "unload_model")

    async def test_a_parked_model_that_is_lost_asks_for_no_place(self, store: RequestStore) -> None:
        await _parked(store)
        asked = await store.submit(an_operation("ann0:train:0", 1))
        await store.lose_run(await lease_of(store), "ann0:train:0", "why")
        assert "why" in (await failure_of(store, asked)).message
        assert await _admit(store, 1) == PlaceMoves()
        assert not await _return(store)

    async def test_an_engine_learns_that_a_parked_model_has_a_request(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await _parked(store)
        await other.wait_for_places(BASE, 0)
        waiting = asyncio.create_task(other.wait_for_places(BASE, LONG_S))
        await store.submit(an_operation("ann0:train:0", 1))
        await waiting

    async def test_only_the_engine_with_the_lease_moves_models(self, store: RequestStore, other: RequestStore) -> None:
        await _parked(store)
        old = await lease_of(store)
        await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-1")
        with pytest.raises(LeaseLostError):
            await store.return_model(old, "ann0:train:0")
        with pytest.raises(LeaseLostError):
            await store.park_model(old, a_recovery_point(0, "ann0:train:0"), keep=2)
