"""A store's state for the next engine: running operations, recovery points, and the operations after them."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tinsmith.backend import ReplayedExperts, SamplerCapabilities, TrainerCapabilities
from tinsmith.errors import NotFoundError, ServerError
from tinsmith.operations import (
    Failed,
)
from tinsmith.store import (
    EngineCapabilities,
    EngineRecord,
    EngineState,
    OperationState,
    RecoveryPointTaken,
    RequestStore,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
)
from tinsmith.store.codec import decode_result
from tinsmith.testing.store_records import (
    BASE,
    LONG_S,
    NOW,
    a_creation,
    a_model,
    a_recovery_point,
    a_run,
    a_sample,
    a_session,
    an_operation,
    claim,
    claim_suspect,
    complete,
    done,
    failure_of,
    lease_of,
    state_of,
)
from tinsmith.testing.store_suite import StoreSuite


class RecoveryContract(StoreSuite):
    # recovery

    async def test_what_was_running_is_queued_again(self, store: RequestStore) -> None:
        await a_model(store)
        running = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2)]
        await claim(store)
        await complete(store, [done(running[0])])
        sample = await store.submit(a_sample())
        assert await claim(store) == [sample]
        queued = await store.submit(an_operation(seq_id=3))
        waiter = asyncio.create_task(store.wait_for(running[1], LONG_S))
        assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed") == []
        assert await state_of(store, running[1]) == OperationState.QUEUED
        run = await store.get_run("s1:train:0")
        assert (run.state, run.next_seq_id, run.applied_seq_id) == (RunState.READY, 2, 1)
        # what may have killed the engine runs by itself
        assert await claim_suspect(store) == running[1]
        assert await claim_suspect(store) is None
        assert set(await claim(store)) == {queued, sample}
        await complete(store, [done(running[1])])
        assert (await waiter).state == OperationState.SUCCEEDED

    async def test_deaths_from_outside_are_counted_for_themselves(self, store: RequestStore) -> None:
        await a_model(store)
        innocent = await store.submit(an_operation(seq_id=1))
        await claim(store, 1)
        for _ in range(4):
            assert (
                await store.requeue(await lease_of(store), max_attempts=2, reason="killed", max_interruptions=5) == []
            )
            assert await claim_suspect(store) == innocent
        assert await store.requeue(await lease_of(store), max_attempts=2, reason="crashed") == []
        await claim(store)
        assert await store.requeue(await lease_of(store), max_attempts=2, reason="killed", max_interruptions=5) == [
            innocent
        ]
        assert "6 times" in (await failure_of(store, innocent)).message

    async def test_what_runs_of_a_model_whose_creation_is_given_up_fails_with_it(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        creation = await store.create_run(a_run(), a_creation())
        later = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2)]
        assert await claim(store, 2) == [creation, later[0]]
        assert await store.requeue(await lease_of(store), max_attempts=1, reason="it was killed") == [creation]
        assert (await store.get_run("s1:train:0")).state == RunState.LOST
        for request_id in later:
            assert "could not be created" in (await failure_of(store, request_id)).message
        assert await claim(store) == []

    async def test_rebuilds_are_counted_until_one_is_finished(self, store: RequestStore) -> None:
        await a_model(store)
        model_id = "s1:train:0"
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=True) == 1
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=True) == 1
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=False) == 2
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=True) == 2
        await store.end_rebuild(await lease_of(store), model_id)
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=False) == 1

    async def test_an_operation_that_ends_every_engine_fails_alone(self, store: RequestStore) -> None:
        await a_model(store)
        poison = await store.submit(an_operation(seq_id=1))
        behind = await store.submit(an_operation(seq_id=2))
        await claim(store, 1)
        for _ in range(2):
            assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9") == []
            assert await claim_suspect(store) == poison
        assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9") == [poison]
        failed = await failure_of(store, poison)
        assert failed.category == "server"
        assert "3 times" in failed.message
        assert "killed by signal 9" in failed.message
        run = await store.get_run("s1:train:0")
        assert (run.state, run.applied_seq_id) == (RunState.READY, 1)
        assert await claim(store) == [behind]

    async def test_a_creation_that_ends_every_engine_is_a_lost_model(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        created = await store.create_run(a_run(), a_creation())
        behind = await store.submit(an_operation(seq_id=1))
        for _ in range(3):
            await claim(store, 1)
            await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9")
        for request_id in (created, behind):
            assert "killed by signal 9" in (await failure_of(store, request_id)).message
        assert (await store.get_run("s1:train:0")).state == RunState.LOST

    async def test_an_orderly_stop_is_no_attempt(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        for _ in range(10):
            assert await claim(store) == [request_id]
            assert await store.requeue(await lease_of(store), max_attempts=1, reason=None) == []
        assert await claim_suspect(store) is None
        assert await claim(store) == [request_id]

    async def test_what_is_held_is_not_put_back(self, store: RequestStore) -> None:
        """An engine that missed the answer to its last claim knows what it claimed before."""
        await a_model(store)
        held = [await store.submit(an_operation(seq_id=1)), await store.submit(a_sample())]
        assert sorted(await claim(store)) == sorted(held)
        unheard = [await store.submit(an_operation(seq_id=2)), await store.submit(a_sample(1))]
        assert sorted(await claim(store)) == sorted(unheard)
        assert await store.requeue(await lease_of(store), max_attempts=1, reason=None, held=frozenset(held)) == []
        assert sorted(await claim(store)) == sorted(unheard)
        await complete(store, [done(held[0]), done(unheard[0])])
        assert (await store.get_run("s1:train:0")).applied_seq_id == 2

    async def test_a_sample_that_ends_every_engine_is_given_up(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        assert await claim(store) == [request_id]
        await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9")
        assert await claim_suspect(store) is None  # many may have been running, so they run together once more
        assert await claim(store) == [request_id]
        await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9")
        assert await claim_suspect(store) == request_id
        assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9") == [request_id]
        failed = await failure_of(store, request_id)
        assert failed.category == "server"
        assert "killed by signal 9" in failed.message

    async def test_the_ephemeral_snapshots_of_a_live_model_are_in_order_of_their_saves(
        self, store: RequestStore
    ) -> None:
        """Whatever their names: the last of the inflight ones is the one to sample from."""
        await a_model(store)
        for minutes, (number, snapshot) in enumerate(
            [(2, "s1:sample:2.inflight"), (1, "s1:sample:1"), (0, "s1:sample:0.inflight"), (3, None), (4, "tinker://x")]
        ):
            await store.create_sampling_session(
                SamplingSessionRecord(
                    sampling_session_id=f"s1:sample:{number}",
                    session_id="s1",
                    tenant="ann",
                    base_model=BASE,
                    created_at=NOW + timedelta(minutes=minutes),
                    snapshot_id=snapshot,
                    model_id="s1:train:0",
                )
            )
        (live,) = await store.live_models(BASE)
        assert live.ephemeral == ("s1:sample:2.inflight", "s1:sample:1", "s1:sample:0.inflight")

    async def test_the_log_and_the_recovery_points_of_a_live_model(self, store: RequestStore) -> None:
        created = await a_model(store)
        first, second, third = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2, 3)]
        await claim(store)
        ephemeral = SamplingSessionRecord(
            sampling_session_id="s1:sample:0",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            snapshot_id="s1:sample:0",
            model_id="s1:train:0",
        )
        await complete(
            store, [done(first, None, SamplingSessionCreated(record=ephemeral)), done(second, Failed(message="no"))]
        )
        records = await store.replayable("s1:train:0", after_seq_id=-1, limit=9)
        assert [record.request_id for record in records] == [created, first]
        assert records[1].payload == b"s1:train:0 1"
        assert records[1].result_kind == "optim_step_output"
        assert await store.replayable("s1:train:0", after_seq_id=0, limit=1) == records[1:]
        (live,) = await store.live_models(BASE)
        assert (live.run.applied_seq_id, live.recovery_points, live.ephemeral) == (2, (), ("s1:sample:0",))

        points = [a_recovery_point(seq_id) for seq_id in range(4)]
        with pytest.raises(ServerError, match="ahead"):
            await store.add_recovery_point(await lease_of(store), points[3], keep=2)
        for point in points[:3]:
            await store.add_recovery_point(await lease_of(store), point, keep=2)
        assert await store.list_recovery_points("s1:train:0") == [points[2], points[1]]
        await complete(store, [done(third, None, RecoveryPointTaken(record=points[3], keep=2))])
        (live,) = await store.live_models(BASE)
        assert live.recovery_points == (points[3], points[2])
        await store.drop_recovery_point(await lease_of(store), "s1:train:0", 3)
        assert await store.list_recovery_points("s1:train:0") == [points[2]]

    async def test_a_model_that_ends_has_no_recovery_points(self, store: RequestStore) -> None:
        for number, ending in enumerate([RunState.UNLOADED, RunState.LOST]):
            model_id = f"s{number}:train:0"
            await a_model(store, model_id)
            await store.add_recovery_point(await lease_of(store), a_recovery_point(0, model_id), keep=2)
            last = await store.submit(an_operation(model_id, seq_id=1))
            await claim(store)
            await complete(store, [done(last, None, RunStateChanged(model_id=model_id, state=ending))])
            assert await store.list_recovery_points(model_id) == []
            with pytest.raises(ServerError, match="not live"):
                await store.add_recovery_point(await lease_of(store), a_recovery_point(0, model_id), keep=2)
        assert await store.live_models(BASE) == []

    async def test_a_model_that_cannot_be_rebuilt_is_lost_alone(self, store: RequestStore) -> None:
        await a_model(store)
        await a_model(store, "s2:train:0")
        running = await store.submit(an_operation(seq_id=1))
        await claim(store)
        queued = await store.submit(an_operation(seq_id=2))
        await store.lose_run(await lease_of(store), "s1:train:0", "its log is incomplete")
        await store.note_run(await lease_of(store), "s2:train:0", "look at this")
        await store.note_run(await lease_of(store), "s1:train:0", "no longer")
        run, other = await store.get_run("s1:train:0"), await store.get_run("s2:train:0")
        assert (run.state, run.state_reason) == (RunState.LOST, "its log is incomplete")
        assert (other.state, other.state_reason) == (RunState.READY, "look at this")
        later = await store.submit(an_operation(seq_id=3))
        for request_id in (running, queued, later):
            failed = await failure_of(store, request_id)
            assert failed.category == "server"
            assert "its log is incomplete" in failed.message
            assert "checkpoint" in failed.message
        assert [live.run.model_id for live in await store.live_models(BASE)] == ["s2:train:0"]

    async def test_what_a_recovery_needs_is_not_pruned(self, store: RequestStore) -> None:
        await a_model(store)
        steps = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in range(1, 5)]
        samples = [await store.submit(a_sample(number)) for number in range(3)]
        await claim(store)
        await complete(store, [done(each) for each in steps + samples])
        later = datetime.now(UTC) + timedelta(hours=1)
        assert await store.prune(later) == len(samples)
        await store.add_recovery_point(await lease_of(store), a_recovery_point(2), keep=2)
        await store.add_recovery_point(await lease_of(store), a_recovery_point(4), keep=2)
        assert await store.prune(later) == 3
        kept = await store.replayable("s1:train:0", after_seq_id=-1, limit=9)
        assert [record.seq_id for record in kept] == [3, 4]
        assert (await store.live_models(BASE))[0].pruned_seq_id == 2
        await store.lose_run(await lease_of(store), "s1:train:0", "for some reason")
        assert await store.prune(later) == 2

    async def test_nothing_of_a_model_that_is_gone_is_kept(self, store: RequestStore) -> None:
        """Neither what it never came to, nor what was refused after that."""
        endings = (RunState.LOST, RunState.UNLOADED)
        for number, ending in enumerate(endings):
            model_id = f"s{number}:train:0"
            await a_model(store, model_id)
            refused = await store.submit(an_operation(model_id, 5, refused=Failed(message="too large")))
            assert await state_of(store, refused) == OperationState.FAILED
            last = await store.submit(an_operation(model_id, 1))
            await claim(store)
            await complete(store, [done(last, None, RunStateChanged(model_id=model_id, state=ending))])
        late = await store.submit(an_operation("s0:train:0", 6))
        assert await state_of(store, late) == OperationState.FAILED
        assert await store.prune(datetime.now(UTC) + timedelta(hours=1)) == 3 * len(endings) + 1

    async def test_a_log_is_kept_since_its_creation_while_requests_come(self, store: RequestStore) -> None:
        await a_model(store)
        step = await store.submit(an_operation(seq_id=1))
        await claim(store)
        await complete(store, [done(step)])
        await store.add_recovery_point(await lease_of(store), a_recovery_point(1), keep=2)
        later = datetime.now(UTC) + timedelta(hours=1)
        assert await store.prune(later, idle_since=datetime.now(UTC) - timedelta(hours=1)) == 0
        assert (await store.run_log("s1:train:0")).pruned_seq_id == -1
        assert await store.prune(later, idle_since=later) == 2
        log = await store.run_log("s1:train:0")
        assert (log.pruned_seq_id, log.recovery_points, log.run) == (
            1,
            (a_recovery_point(1),),
            await store.get_run("s1:train:0"),
        )

    async def test_a_log_as_people_look_at_it(self, store: RequestStore) -> None:
        await a_model(store)
        steps = [await store.submit(an_operation(seq_id=seq_id, num_tokens=seq_id)) for seq_id in (1, 2, 3)]
        await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(steps[0]), done(steps[1], Failed(message="no"))])
        first, second, third = await store.list_log("s1:train:0", from_seq_id=1, limit=9)
        assert (first.seq_id, first.request_id, first.state, first.attempts) == (1, steps[0], "succeeded", 1)
        assert first.created_at <= (first.started_at or NOW) <= (first.finished_at or NOW)
        assert (first.payload_bytes, first.result_kind) == (len(b"s1:train:0 1"), "optim_step_output")
        assert first.result is not None
        assert first.result_bytes == len(first.result)
        assert decode_result(second.result_kind or "", second.result or b"") == Failed(message="no")
        assert (third.state, third.finished_at, third.result, third.result_bytes) == ("running", None, None, 0)
        page = await store.list_log("s1:train:0", from_seq_id=None, limit=2)
        assert [each.seq_id for each in page] == [2, 3]
        assert [each.seq_id for each in await store.list_log("s1:train:0", from_seq_id=1, limit=1)] == [1]
        totals = {(each.kind, each.state): each for each in await store.log_totals("s1:train:0")}
        assert [(*key, each.number, each.num_tokens) for key, each in totals.items()] == [
            ("create_model", "succeeded", 1, 0),
            ("optim_step", "failed", 1, 2),
            ("optim_step", "running", 1, 3),
            ("optim_step", "succeeded", 1, 1),
        ]
        done_once = totals["optim_step", OperationState.SUCCEEDED]
        assert (done_once.payload_bytes, done_once.result_bytes) == (first.payload_bytes, first.result_bytes)
        assert done_once.queued_s >= 0 <= done_once.run_s
        assert await store.log_totals("nobody") == []
        assert await store.list_log("nobody", from_seq_id=0, limit=9) == []
        with pytest.raises(NotFoundError):
            await store.run_log("nobody")

    # engines

    async def test_engines_are_reported(self, store: RequestStore, other: RequestStore) -> None:
        trainer = TrainerCapabilities(
            vocab_size=9,
            max_context_tokens=8,
            max_batch_tokens=7,
            losses=frozenset({"ppo", "dro"}),
            lora_targets=frozenset({"mlp"}),
            isolation="close",
            isolation_error=1e-6,
            replayed_experts=ReplayedExperts(num_layers=2, num_experts=4, top_k=2),
        )
        sampler = SamplerCapabilities(vocab_size=9, max_context_tokens=8, prompt_logprobs=True, max_snapshots=3)
        record = EngineRecord(
            base_model=BASE,
            state=EngineState.READY,
            updated_at=NOW,
            detail="d",
            progress=0.5,
            engine_id="e",
            pid=1,
            restarts=2,
            capabilities=EngineCapabilities(trainer=trainer, sampler=sampler),
        )
        await store.report_engine(replace(record, state=EngineState.STARTING, capabilities=None))
        for each in (replace(record, capabilities=EngineCapabilities(trainer=trainer, sampler=None)), record):
            await store.report_engine(each)
            assert await other.list_engines() == [each]

    async def test_an_engine_that_is_given_up_fails_all_but_its_models(self, store: RequestStore) -> None:
        await a_model(store)
        kept = [await store.submit(an_operation(seq_id=1))]
        await claim(store)
        await store.release_lease(BASE, "engine-1")
        being_made = a_creation("s1:train:1")
        pending = [await store.submit(a_sample()), await store.create_run(a_run("s1:train:1"), being_made)]
        given_up = EngineRecord(base_model=BASE, state=EngineState.FAILED, updated_at=NOW, detail="no such directory")
        await store.report_engine(given_up)
        kept.append(await store.submit(an_operation(seq_id=2)))
        pending.append(await store.submit(a_sample(1)))
        for request_id in pending:
            failed = await failure_of(store, request_id)
            assert failed.category == "server"
            assert "no such directory" in failed.message
        assert (await store.get_run("s1:train:1")).state == RunState.LOST
        assert [live.run.model_id for live in await store.live_models(BASE)] == ["s1:train:0"]
        assert (await store.waiting(kept[1])).engine == given_up
        await store.requeue(await lease_of(store), max_attempts=3, reason="given up")
        assert await claim(store) == kept
        await store.report_engine(replace(given_up, state=EngineState.STARTING), lease=await lease_of(store))
        assert await state_of(store, await store.submit(a_sample(2))) == OperationState.QUEUED
