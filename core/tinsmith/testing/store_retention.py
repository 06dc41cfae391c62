"""The part of the store contract about sessions that ended long ago. Stores that keep all sessions skip it."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tinsmith.errors import NotFoundError, UserError
from tinsmith.operations import Failed, ModelUnloaded, SampleOutput
from tinsmith.store import RequestStore, RunState, RunStateChanged, SamplingSessionRecord
from tinsmith.testing.store_records import (
    BASE,
    NOW,
    a_checkpoint,
    a_creation,
    a_model,
    a_run,
    a_sample,
    a_session,
    an_operation,
    claim,
    complete,
    done,
    failure_of,
    finished,
)
from tinsmith.testing.store_suite import StoreSuite

_AFTER = NOW + timedelta(days=1)  # the sessions were last heard at NOW
_MODEL, _SAMPLER = "s1:train:0", "s1:sample:0"


async def _a_sampler(store: RequestStore, number: int = 0, session_id: str = "s1") -> SamplingSessionRecord:
    return await store.create_sampling_session(
        SamplingSessionRecord(
            sampling_session_id=f"{session_id}:sample:{number}",
            session_id=session_id,
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
        )
    )


async def _end(store: RequestStore, session_id: str = "s1") -> None:
    """End the session, and unload its model."""
    await store.end_session(session_id, "success", None)
    for request_id in await claim(store):
        unloaded = RunStateChanged(model_id=f"{session_id}:train:0", state=RunState.UNLOADED)
        await complete(store, [done(request_id, ModelUnloaded(model_id=f"{session_id}:train:0"), unloaded)])


async def _prune(store: RequestStore) -> None:
    await store.prune(datetime.now(UTC) + timedelta(hours=9))


class RetentionContract(StoreSuite):
    # sessions that ended long ago

    async def test_nothing_is_left_of_a_session_that_ended_long_ago(self, store: RequestStore) -> None:
        await a_model(store)
        await _a_sampler(store)
        sample = await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(sample, SampleOutput(sequences=()))])
        await _end(store)
        await _prune(store)
        assert await store.forget_sessions(NOW) == 0  # not long enough ago
        assert await store.forget_sessions(_AFTER) == 3
        for gone in (
            store.get_session("s1"),
            store.get_run(_MODEL),
            store.get_sampling_session(_SAMPLER),
        ):
            with pytest.raises(NotFoundError, match="session_retention_s"):
                await gone
        assert await store.list_sessions(None, limit=9, offset=0) == []
        assert await finished(store) == ([], 0)
        assert await store.forget_sessions(_AFTER) == 0

    async def test_a_session_that_lives_keeps_everything(self, store: RequestStore) -> None:
        """A seq_id that was used stays used, however long ago that was."""
        created = await a_model(store)
        first = await _a_sampler(store)
        await _prune(store)
        assert await store.forget_sessions(_AFTER) == 0
        assert await _a_sampler(store) == first
        assert await store.create_run(a_run(), a_creation()) == created

    async def test_what_the_log_still_holds_keeps_its_session(self, store: RequestStore) -> None:
        await a_model(store)
        await _a_sampler(store)
        sample = await store.submit(a_sample())
        await store.end_session("s1", "success", None)
        assert await store.forget_sessions(_AFTER) == 0  # the sample and the unloading wait
        assert (await store.get_operation(sample)).subject_id == _SAMPLER
        for request_id in await claim(store):
            unloaded = RunStateChanged(model_id=_MODEL, state=RunState.UNLOADED)
            await complete(store, [done(request_id, ModelUnloaded(model_id=_MODEL), unloaded)])
        assert await store.forget_sessions(_AFTER) == 0  # their results can be read
        assert (await store.get_run(_MODEL)).state is RunState.UNLOADED
        assert await store.get_sampling_session(_SAMPLER)

    async def test_nothing_waits_behind_a_gap_of_a_lost_model_whose_session_has_ended(
        self, store: RequestStore
    ) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        creation = await store.create_run(a_run(), a_creation())
        assert await claim(store) == [creation]
        behind = await store.submit(an_operation(seq_id=2))
        lost = RunStateChanged(model_id=_MODEL, state=RunState.LOST, reason="no memory")
        await complete(store, [done(creation, Failed(message="no memory"), lost)])
        await store.end_session("s1", "success", None)
        assert "no memory" in (await failure_of(store, behind)).message
        assert (await store.pending("ann")).by_kind == {}
        await _prune(store)
        assert await store.forget_sessions(_AFTER) == 2

    async def test_a_checkpoint_keeps_its_model_and_session(self, store: RequestStore) -> None:
        await a_model(store)
        await _a_sampler(store)
        await store.add_checkpoint(a_checkpoint())
        await _end(store)
        await _prune(store)
        assert await store.forget_sessions(_AFTER) == 1  # the sampling session
        assert (await store.get_run(_MODEL)).state is RunState.UNLOADED
        assert (await store.get_session("s1")).ended == "success"
        await store.delete_checkpoint(a_checkpoint().path)
        assert await store.forget_sessions(_AFTER) == 0  # it can be asked for as a deleted one
        await _prune(store)
        assert await store.forget_sessions(_AFTER) == 2

    async def test_the_numbers_of_a_session_that_has_ended_cannot_be_used_again(self, store: RequestStore) -> None:
        """Its second model has a checkpoint, so the session stays when the first one is deleted."""
        await a_model(store)
        await a_model(store, "s2:train:0")
        await store.add_checkpoint(a_checkpoint(model_id="s1:train:1"))
        await store.create_run(a_run("s1:train:1"), a_creation("s1:train:1"))
        (creation,) = await claim(store)
        lost = RunStateChanged(model_id="s1:train:1", state=RunState.LOST, reason="why")
        await complete(store, [done(creation, None, lost)])
        await _end(store)
        await _prune(store)
        assert await store.forget_sessions(_AFTER) == 1
        with pytest.raises(UserError, match="has ended"):
            await store.create_run(a_run(), a_creation())
        with pytest.raises(NotFoundError, match=_MODEL):
            await store.submit(an_operation(seq_id=1))
        assert (await store.get_run("s2:train:0")).state is RunState.READY

    async def test_many_are_deleted(self, store: RequestStore) -> None:
        for number in range(3):
            await store.create_session(a_session(f"s{number}"), idempotency_key=None)
        await asyncio.gather(*[_a_sampler(store, number, "s0") for number in range(501)])
        for number in range(2):
            await store.end_session(f"s{number}", "success", None)
        assert await store.forget_sessions(_AFTER) == 503
        assert [each.session_id for each in await store.list_sessions(None, limit=9, offset=0)] == ["s2"]
