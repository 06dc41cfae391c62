"""Leases: at most one engine of a base model records anything."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tinsmith.errors import LeaseLostError
from tinsmith.operations import (
    Failed,
)
from tinsmith.store import (
    CheckpointWritten,
    EngineRecord,
    EngineState,
    Lease,
    LeaseHeld,
    OperationState,
    RequestStore,
)
from tinsmith.testing.store_records import (
    BASE,
    LONG_S,
    NOW,
    a_checkpoint,
    a_model,
    a_recovery_point,
    a_sample,
    an_operation,
    claim,
    claim_records,
    done,
    lease_of,
    state_of,
)
from tinsmith.testing.store_suite import StoreSuite


class LeaseContract(StoreSuite):
    # leases

    async def test_one_engine_holds_the_lease(self, store: RequestStore, other: RequestStore) -> None:
        first = await lease_of(store, "engine-1")
        held = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0)
        assert isinstance(held, LeaseHeld)
        assert held.engine_id == "engine-1"
        assert 3000.0 < held.remaining_s <= 3600.0
        assert await lease_of(store, "engine-1") == first
        another = await other.acquire_lease("another", engine_id="engine-2", duration_s=3600.0)
        assert isinstance(another, Lease)

    async def test_one_of_many_gets_the_lease(self, store: RequestStore, other: RequestStore) -> None:
        asked = [
            each.acquire_lease(BASE, engine_id=f"engine-{number}", duration_s=3600.0)
            for number, each in enumerate([store, other] * 4)
        ]
        found = await asyncio.gather(*asked)
        (lease,) = [each for each in found if isinstance(each, Lease)]
        assert {each.engine_id for each in found} == {lease.engine_id}

    async def test_a_released_lease_is_free_and_wakes_who_waits(self, store: RequestStore, other: RequestStore) -> None:
        first = await lease_of(store, "engine-1")
        waiting = asyncio.create_task(other.wait_for_lease(BASE, LONG_S))
        await asyncio.sleep(0)  # it has subscribed
        await store.release_lease(BASE, "engine-9")  # holds nothing
        await store.renew_lease(first)
        await store.release_lease(BASE, "engine-1")
        await waiting
        second = await lease_of(other, "engine-2")
        assert second.epoch > first.epoch
        with pytest.raises(LeaseLostError, match=f"'engine-1'.*'engine-2' with epoch {second.epoch}"):
            await store.renew_lease(first)
        await other.release_lease(BASE, "engine-2")
        with pytest.raises(LeaseLostError, match="nobody"):
            await other.renew_lease(second)

    async def test_the_lease_of_a_dead_engine_is_free(self, store: RequestStore, other: RequestStore) -> None:
        first = await lease_of(store, "engine-1")
        wrong = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-9")
        assert isinstance(wrong, LeaseHeld)
        second = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-1")
        assert isinstance(second, Lease)
        assert second.epoch == first.epoch + 1

    async def test_a_lease_that_ran_out_may_be_taken_or_go_on(self, store: RequestStore, other: RequestStore) -> None:
        for number in range(3):  # nobody takes it: the engine keeps its epoch, whichever call it makes first
            short = await lease_of(store, "engine-1", 0.001)
            await self._until_it_ran_out(other)
            long = replace(short, duration_s=3600.0)
            if number == 0:
                await store.renew_lease(long)
            elif number == 1:
                await store.requeue(long, max_attempts=1, reason=None)
            else:
                await store.report_engine(self._record("engine-1"), lease=long)
            assert isinstance(await other.acquire_lease(BASE, engine_id="engine-2", duration_s=1.0), LeaseHeld)
        short = await lease_of(store, "engine-1", 0.001)
        await self._until_it_ran_out(other)
        second = await lease_of(other, "engine-2")
        assert second.epoch == short.epoch + 1
        with pytest.raises(LeaseLostError):
            await store.renew_lease(short)

    async def _until_it_ran_out(self, store: RequestStore) -> None:
        """Wait without taking the lease: a supervisor's report is ignored until it expires."""
        probe = replace(self._record(None), detail=f"probe {id(asyncio.current_task())} {datetime.now(UTC)}")
        async with asyncio.timeout(LONG_S):
            while probe not in await store.list_engines():
                await store.report_engine(probe)

    @staticmethod
    def _record(engine_id: str | None) -> EngineRecord:
        return EngineRecord(base_model=BASE, state=EngineState.READY, updated_at=NOW, engine_id=engine_id)

    async def test_a_superseded_engine_changes_nothing(self, store: RequestStore, other: RequestStore) -> None:
        await a_model(store)
        running = await store.submit(an_operation(seq_id=1))
        sample = await store.submit(a_sample())
        await claim(store)
        old = await lease_of(store)
        await store.cancel(sample)
        new = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-1")
        assert isinstance(new, Lease)
        await other.report_engine(self._record("engine-2"), lease=new)
        for report in (b"first", b"second"):
            await other.report_figures(new, report)
        assert await other.requeue(new, max_attempts=3, reason="it was silent") == []
        queued = await store.submit(a_sample(1))

        late = done(running, None, CheckpointWritten(record=a_checkpoint()))
        for attempt in (
            claim_records(store, old),
            store.complete(old, [late]),
            store.cancelled(old),
            store.requeue(old, max_attempts=3, reason=None),
            store.add_recovery_point(old, a_recovery_point(0), keep=2),
            store.drop_recovery_point(old, "s1:train:0", 0),
            store.lose_run(old, "s1:train:0", "why not"),
            store.note_run(old, "s1:train:0", "look"),
            store.report_engine(replace(self._record("engine-1"), state=EngineState.FAILED), lease=old),
            store.report_figures(old, b"late"),
            store.begin_rebuild(old, "s1:train:0", interrupted=False),
            store.end_rebuild(old, "s1:train:0"),
            store.renew_lease(old),
        ):
            with pytest.raises(LeaseLostError, match="'engine-1'"):
                await attempt
        assert await state_of(other, running) == OperationState.QUEUED
        assert await state_of(other, queued) == OperationState.QUEUED
        assert (await other.list_checkpoints(None))[1] == 0
        assert await other.list_recovery_points("s1:train:0") == []
        assert (await other.get_run("s1:train:0")).state_reason is None
        assert await other.list_engines() == [self._record("engine-2")]
        assert [(each.base_model, each.report) for each in await store.list_figures()] == [(BASE, b"second")]
        assert await other.cancelled(new) == [sample]

        claimed = await claim_records(other, new)
        assert {each.request_id for each in claimed} == {running, queued}
        with pytest.raises(LeaseLostError):
            await store.complete(old, [late])
        await other.complete(new, [done(running)])
        assert await state_of(store, running) == OperationState.SUCCEEDED

    async def test_only_what_an_engine_claimed_is_its_to_complete(self, store: RequestStore) -> None:
        first = await store.submit(a_sample())
        await claim(store)
        await store.release_lease(BASE, "engine-1")
        second = await lease_of(store, "engine-2")
        await store.complete(second, [done(first)])
        assert await state_of(store, first) == OperationState.RUNNING

    async def test_takeovers_and_completions_at_once(self, store: RequestStore, other: RequestStore) -> None:
        """Whichever is first: a completed operation is not requeued, and a requeued one is not completed."""
        for number in range(8):
            engine_id = f"engine-{number}"
            lease = await lease_of(store, engine_id)
            ids = [await store.submit(a_sample(10 * number + each)) for each in range(3)]
            assert len(await claim_records(store, lease)) == 3

            async def take_over(dead: str) -> list[str]:
                new = await other.acquire_lease(BASE, engine_id="engine-x", duration_s=3600.0, dead=dead)
                assert isinstance(new, Lease)
                await other.requeue(new, max_attempts=99, reason="silent")
                claimed = await claim_records(other, new)
                await other.complete(new, [done(each.request_id) for each in claimed])
                await other.release_lease(BASE, "engine-x")
                return [each.request_id for each in claimed]

            completing = store.complete(lease, [done(each, Failed(message="the first")) for each in ids])
            again, completed = await asyncio.gather(take_over(engine_id), completing, return_exceptions=True)
            assert isinstance(again, list)
            assert sorted(again) == ([] if completed is None else sorted(ids))
            for each in ids:
                expected = OperationState.FAILED if completed is None else OperationState.SUCCEEDED
                assert await state_of(store, each) == expected

    async def test_a_supervisor_does_not_speak_for_an_engine_that_holds_the_lease(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        pending = await store.submit(a_sample())
        lease = await lease_of(store)
        await store.report_engine(self._record("engine-1"), lease=lease)
        given_up = replace(self._record(None), state=EngineState.FAILED, detail="no GPU here")
        await other.report_engine(given_up)
        assert await other.list_engines() == [self._record("engine-1")]
        assert await state_of(other, pending) == OperationState.QUEUED
        await store.release_lease(BASE, "engine-1")
        await other.report_engine(given_up)
        assert await state_of(other, pending) == OperationState.FAILED
