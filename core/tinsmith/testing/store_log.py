"""The log: operations are submitted, claimed, completed, waited for and cancelled."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinsmith.errors import ConflictError, NotFoundError, ResultExpiredError, UserError
from tinsmith.operations import (
    Failed,
    LoraConfig,
    ModelCreated,
    ModelUnloaded,
    OptimStepOutput,
    SampleOutput,
    UnloadModel,
)
from tinsmith.store import (
    CheckpointWritten,
    ClaimRoom,
    Completion,
    EngineRecord,
    EngineState,
    FinishedSample,
    Holding,
    LoraResolved,
    OperationState,
    RequestStore,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
)
from tinsmith.store.codec import decode_operation, decode_result
from tinsmith.testing.store_records import (
    BASE,
    LONG_S,
    NOW,
    MakeStore,
    a_checkpoint,
    a_creation,
    a_model,
    a_run,
    a_sample,
    a_session,
    an_operation,
    claim,
    claim_records,
    claim_within,
    complete,
    done,
    failure_of,
    finished,
    heard,
    lease_of,
    state_of,
)
from tinsmith.testing.store_suite import StoreSuite


class LogContract(StoreSuite):
    # submit

    async def test_a_repeat_finds_the_first_and_other_content_conflicts(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await a_model(store)
        for operation in (an_operation(seq_id=1), a_sample(1)):
            first = await store.submit(operation)
            assert await other.submit(operation) == first
            with pytest.raises(ConflictError, match="seq_id 1"):
                await store.submit(replace(operation, digest=b"other"))
        await claim(store)
        assert await store.submit(an_operation(seq_id=1)) != await store.submit(a_sample(1))

    async def test_concurrent_repeats_find_one(self, store: RequestStore, other: RequestStore) -> None:
        await a_model(store)
        repeats = [each.submit(an_operation(seq_id=1)) for each in (store, other) for _ in range(8)]
        assert len(set(await asyncio.gather(*repeats))) == 1
        assert len(await claim(store)) == 1

    async def test_one_bad_write_does_not_harm_its_neighbours(self, store: RequestStore) -> None:
        await a_model(store)
        await store.submit(an_operation(seq_id=1))
        writes = [
            store.submit(an_operation(seq_id=2)),
            store.submit(an_operation(seq_id=1, digest=b"other")),
            store.submit(an_operation(subject_id="nope:train:0", seq_id=1)),
            store.submit(an_operation(seq_id=3)),
        ]
        first, conflict, missing, last = await asyncio.gather(*writes, return_exceptions=True)
        assert isinstance(conflict, ConflictError)
        assert isinstance(missing, NotFoundError)
        assert (await claim(store))[1:] == [first, last]

    async def test_an_operation_is_there_for_others_when_submit_returns(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await a_model(store)
        operation = an_operation(seq_id=1, num_tokens=11, payload=bytes(range(256)) * 100)
        request_id = await store.submit(operation)
        record = await other.get_operation(request_id)
        assert (record.state, record.seq_id, record.subject_id) == (OperationState.QUEUED, 1, "s1:train:0")
        (claimed,) = await claim_records(other, await lease_of(other))
        assert (claimed.payload, claimed.num_tokens, claimed.tenant) == (operation.payload, 11, "ann")
        assert claimed.started_at is not None

    async def test_seq_ids_of_64_bits(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample(2**62))
        assert (await store.get_operation(request_id)).seq_id == 2**62

    async def test_a_refused_operation_consumes_its_number(self, store: RequestStore) -> None:
        await a_model(store)
        refused = await store.submit(an_operation(seq_id=1, refused=Failed(message="no such loss")))
        assert await state_of(store, refused) == OperationState.FAILED
        assert (await failure_of(store, refused)).message == "no such loss"
        second = await store.submit(an_operation(seq_id=2))
        assert (await store.waiting(second)).missing_seq_id is None
        assert await claim(store) == [second]

    async def test_a_refused_operation_ahead_of_its_turn(self, store: RequestStore) -> None:
        await a_model(store)
        await store.submit(an_operation(seq_id=2, refused=Failed(message="no")))
        third = await store.submit(an_operation(seq_id=3))
        assert await claim(store) == []
        first = await store.submit(an_operation(seq_id=1))
        assert await claim(store) == [first, third]
        assert (await store.get_run("s1:train:0")).next_seq_id == 4

    async def test_a_failed_pass_is_found_in_its_window(self, store: RequestStore) -> None:
        """Regardless of who failed it. A step that succeeded, or has dropped the gradient, ends a window."""
        no, kinds = Failed(message="no"), ("forward_backward", "optim_step", *["forward_backward"] * 2, "forward")
        await a_model(store)
        for seq_id, kind in enumerate((*kinds, "forward_backward", "optim_step", "optim_step"), start=1):
            refused = no if seq_id in (4, 5) else None
            await store.submit(an_operation(seq_id=seq_id, kind=kind, refused=refused))
        ids = [record.request_id for record in await claim_records(store, await lease_of(store))]
        await complete(store, [done(ids[0]), done(ids[1]), done(ids[2]), done(ids[3], Failed(message="large"))])
        await complete(store, [done(ids[4], no), Completion(request_id=ids[5], result=no, applied=True)])

        async def found(after: int | None, before: int) -> tuple[int, str] | None:
            failed = await store.failed_pass("s1:train:0", after_seq_id=after, before_seq_id=before)
            if failed is None:
                return None
            assert failed.request_id is not None
            assert await failure_of(store, failed.request_id) == failed.failure
            return failed.seq_id, failed.failure.message

        assert [await found(None, before) for before in range(1, 9)] == [None] * 4 + [(4, "no")] * 4
        assert [await found(after, 7) for after in range(1, 7)] == [(4, "no")] * 3 + [(6, "large")] * 2 + [None]
        assert await found(None, 9) is None

    async def test_what_failed_behind_a_gap_is_found_in_its_window(self, store: RequestStore) -> None:
        """Of whichever kind: what never arrived may have been a pass. A step that was refused early does not count."""
        await a_model(store)
        for seq_id, kind in ((1, "optim_step"), (2, "forward_backward"), (4, "save_state")):
            await store.submit(an_operation(seq_id=seq_id, kind=kind))
        refused = await store.submit(an_operation(seq_id=6, refused=Failed(message="no")))
        await complete(store, [done(request_id) for request_id in await claim(store)])
        await heard(store)
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == 1
        for after in (None, 2):
            failed = await store.failed_pass("s1:train:0", after_seq_id=after, before_seq_id=5)
            assert failed is not None
            assert failed.seq_id == 4
            assert "seq_id 3" in failed.failure.message
        assert await store.failed_pass("s1:train:0", after_seq_id=None, before_seq_id=4) is None
        assert await store.failed_pass("s1:train:0", after_seq_id=5, before_seq_id=7) is None
        assert await state_of(store, refused) == OperationState.FAILED

    async def test_what_belongs_to_nothing_is_refused(self, store: RequestStore) -> None:
        with pytest.raises(NotFoundError, match="s1:train:0"):
            await store.submit(an_operation(seq_id=1))
        with pytest.raises(NotFoundError):
            await store.get_operation("req-nope")

    async def test_an_ended_session_takes_no_more_training(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        await store.end_session("s1", "success", None)
        assert await store.submit(an_operation(seq_id=1)) == first
        with pytest.raises(UserError, match="has ended"):
            await store.submit(an_operation(seq_id=9))
        with pytest.raises(UserError, match="has ended"):
            await store.create_run(a_run("s1:train:1"), a_creation("s1:train:1"))

    # claim

    async def test_claims_are_in_order_and_made_once(self, store: RequestStore, other: RequestStore) -> None:
        await a_model(store)
        ids = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in range(1, 6)]
        assert await claim(store, 2) == ids[:2]
        assert await claim(other) == ids[2:]
        assert await claim(store) == []
        assert await state_of(store, ids[0]) == OperationState.RUNNING

    async def test_nothing_passes_a_gap(self, store: RequestStore) -> None:
        await a_model(store)
        late = {seq_id: await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2)}
        assert await claim(store) == []
        assert (await store.waiting(late[3])).missing_seq_id == 1
        first = await store.submit(an_operation(seq_id=1))
        assert await claim(store, 1) == [first]
        assert await claim(store) == [late[2], late[3]]

    async def test_a_small_claim_takes_the_lowest_numbers(self, store: RequestStore) -> None:
        await a_model(store)
        ids = {seq_id: await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2, 4, 1)}
        taken = [(await claim(store, 1))[0] for _ in ids]
        assert taken == [ids[1], ids[2], ids[3], ids[4]]

    async def test_a_gap_of_one_model_does_not_delay_another(self, store: RequestStore) -> None:
        await a_model(store, "s1:train:0")
        await a_model(store, "s2:train:0")
        await store.submit(an_operation("s1:train:0", 2))
        free = await store.submit(an_operation("s2:train:0", 1))
        assert await claim(store) == [free]

    async def test_samples_need_no_order(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in (7, 3, 10**18)]
        assert await claim(store) == ids

    async def test_tenants_take_turns(self, store: RequestStore) -> None:
        hog = [await store.submit(a_sample(seq_id)) for seq_id in range(6)]
        mouse = await store.submit(a_sample(0, "s2:sample:0", tenant="bob"))
        assert set(await claim(store, 2)) == {hog[0], mouse}

    async def test_every_tenant_has_a_share_of_what_an_engine_holds(self, store: RequestStore) -> None:
        """However many operations others have waiting, and whatever the engine holds of them."""
        await a_model(store)
        await a_model(store, "s2:train:0", tenant="bob")
        passes = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in range(1, 7)]
        samples = [await store.submit(a_sample(seq_id)) for seq_id in range(6)]
        room = ClaimRoom(operations=4, num_bytes=1000)
        assert await claim_within(store, room) == [*passes[:4], *samples[:4]]
        late = [await store.submit(an_operation("s2:train:0", seq_id, tenant="bob")) for seq_id in range(1, 7)]
        late_sample = await store.submit(a_sample(0, "s2:sample:0", tenant="bob"))
        full = ClaimRoom(operations=4, num_bytes=1000, held={"ann": Holding(operations=4)})
        assert await claim_within(store, full) == [*late[:2], late_sample]
        assert await claim_within(store, full) == late[2:4]  # the store does not remember what it gave

    async def test_claims_are_bounded_by_decoded_bytes(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id, num_bytes=size)) for seq_id, size in enumerate((40, 40, 40, 500))]
        room = ClaimRoom(operations=9, num_bytes=100)
        assert await claim_within(store, room) == ids[:2]
        claimed = await store.claim(await lease_of(store), training=room, samples=room)
        assert [(record.request_id, record.num_bytes) for record in claimed.records] == [(ids[2], 40)]
        assert claimed.left_some
        assert await claim_within(store, room) == ids[3:]  # larger than everything, so it is held alone

    async def test_a_gap_that_closes_keeps_the_order_of_its_model(self, store: RequestStore) -> None:
        await a_model(store)
        await a_model(store, "s2:train:0")
        ids = {seq_id: await store.submit(an_operation(seq_id=seq_id)) for seq_id in (5, 3, 2)}
        between = await store.submit(an_operation("s2:train:0", 1))
        ids[1] = await store.submit(an_operation(seq_id=1))
        ids[6] = await store.submit(an_operation(seq_id=6))
        after = await store.submit(an_operation("s2:train:0", 2))
        assert await claim(store, 3) == [between, ids[1], ids[2]]
        ids[4] = await store.submit(an_operation(seq_id=4))
        await store.requeue(await lease_of(store), max_attempts=3, reason=None)
        assert await claim(store) == [between, *(ids[seq_id] for seq_id in (1, 2, 3)), after, ids[4], ids[5], ids[6]]

    async def test_queues_are_separate(self, store: RequestStore) -> None:
        await store.submit(a_sample(base_model="another"))
        assert await claim(store) == []

    # complete

    async def test_a_completion_records_result_effects_and_position(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        request_id = await store.create_run(a_run(), a_creation())
        await claim(store)
        sampler = SamplingSessionRecord(
            sampling_session_id="s1:sample:1", session_id="s1", tenant="ann", base_model=BASE, created_at=NOW
        )
        lora = LoraConfig(rank=4, seed=9, train_mlp=False)
        effects = (
            RunStateChanged(model_id="s1:train:0", state=RunState.READY),
            LoraResolved(model_id="s1:train:0", lora=lora),
            CheckpointWritten(record=a_checkpoint()),
            SamplingSessionCreated(record=sampler),
        )
        await complete(store, [done(request_id, ModelCreated(model_id="s1:train:0"), *effects)])
        run = await other.get_run("s1:train:0")
        assert (run.state, run.lora, run.next_seq_id, run.applied_seq_id) == (RunState.READY, lora, 1, 0)
        assert await other.get_checkpoint(a_checkpoint().path) == a_checkpoint()
        assert await other.get_sampling_session("s1:sample:1") == sampler
        record = await other.get_operation(request_id)
        assert record.finished_at is not None
        assert record.result is not None
        assert decode_result("model_created", record.result) == ModelCreated(model_id="s1:train:0")

    async def test_a_second_completion_changes_nothing(self, store: RequestStore) -> None:
        await a_model(store)
        request_id = await store.submit(an_operation(seq_id=1))
        await claim(store)
        await complete(store, [done(request_id, OptimStepOutput(metrics={"a": 1.0}))])
        await complete(store, [done(request_id, Failed(message="late"), CheckpointWritten(record=a_checkpoint()))])
        assert await state_of(store, request_id) == OperationState.SUCCEEDED
        assert (await store.list_checkpoints(None))[1] == 0

    async def test_the_trace_of_its_request_is_kept_with_an_operation(self, store: RequestStore) -> None:
        await a_model(store)
        traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
        traced = await store.submit(an_operation(seq_id=1, traceparent=traceparent))
        other = await store.submit(a_sample())
        claimed = {each.request_id: each.traceparent for each in await claim_records(store, await lease_of(store))}
        assert (claimed[traced], claimed[other]) == (traceparent, None)
        await complete(store, [done(traced)])
        assert (await store.get_operation(traced)).traceparent == traceparent

    async def test_results_can_be_read_again(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(request_id, SampleOutput(sequences=()))])
        first = await store.wait_for(request_id, LONG_S)
        assert await store.wait_for(request_id, LONG_S) == first
        assert first.state == OperationState.SUCCEEDED

    async def test_the_times_of_a_session(self, store: RequestStore) -> None:
        """Those of its models and sampling sessions; of one model also the samples from it and from base models."""
        for model_id in ("s1:train:0", "s1:train:1", "s2:train:0"):
            await a_model(store, model_id)
        for name, weights in (("s1:sample:0", "s1:train:0"), ("s1:sample:1", "s1:train:1"), ("s1:sample:2", None)):
            sampler = SamplingSessionRecord(
                sampling_session_id=name,
                session_id="s1",
                tenant="ann",
                base_model=BASE,
                created_at=NOW,
                model_id=weights,
            )
            await store.create_sampling_session(sampler)
        step = await store.submit(an_operation(seq_id=1))
        samples = [await store.submit(a_sample(0, f"s1:sample:{number}")) for number in range(3)]
        await claim(store)
        ran: dict[str, Any] = {"ran_at": NOW, "run_s": 1.5}
        await complete(store, [replace(done(step), **ran)])
        await complete(store, [replace(done(samples[0], SampleOutput(sequences=())), **ran, first_token_s=0.25)])
        early = await store.submit(an_operation(seq_id=3))

        found = {each.request_id: each for each in await store.list_times("s1", limit=100)}
        assert [each for each in found if each in {step, *samples, early}] == [step, *samples, early]
        assert len(found) == 7, "the creations of two models as well"
        told = [(each.ran_at, each.run_s, each.first_token_s) for each in found.values()]
        assert told[2:] == [(NOW, 1.5, None), (NOW, 1.5, 0.25), *[(None, None, None)] * 3]
        assert [each.early for each in found.values()][2:] == [False, False, False, False, True]
        assert all(found[each].finished_at is not None for each in (step, samples[0]))
        assert found[samples[1]].started_at is not None
        assert [each.request_id for each in await store.list_times("s1", limit=2)] == [samples[2], early]
        of_one = [each.request_id for each in await store.list_times("s1", model_id="s1:train:1", limit=100)]
        assert of_one[1:] == samples[1:]
        later = datetime.now(UTC) + timedelta(hours=1)
        left = await store.list_times("s1", after=later, limit=100)
        assert [each.request_id for each in left] == [*samples[1:], early]

    # waiting

    async def test_a_waiter_is_woken_by_another_process(self, store: RequestStore, other: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        waiter = asyncio.create_task(store.wait_for(request_id, LONG_S))
        await claim(other)
        await complete(other, [done(request_id)])
        assert (await waiter).state == OperationState.SUCCEEDED

    async def test_a_wait_ends_with_the_record_as_it_stands(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        assert (await store.wait_for(request_id, 0.0)).state == OperationState.QUEUED
        with pytest.raises(NotFoundError):
            await store.wait_for("req-nope", LONG_S)

    async def test_many_waiters(self, store: RequestStore, other: RequestStore) -> None:
        ids = await asyncio.gather(*[store.submit(a_sample(seq_id)) for seq_id in range(80)])
        waiters = [asyncio.create_task(store.wait_for(request_id, LONG_S)) for request_id in ids]
        claimed = await claim(other, 1000)
        await complete(other, [done(request_id) for request_id in claimed])
        assert {record.state for record in await asyncio.gather(*waiters)} == {OperationState.SUCCEEDED}

    async def test_an_engine_is_woken_by_a_submit(self, store: RequestStore, other: RequestStore) -> None:
        async def next_claim() -> list[str]:
            while not (claimed := await claim(other)):
                await other.wait_for_work(BASE, LONG_S)
            return claimed

        engine = asyncio.create_task(next_claim())
        request_id = await store.submit(a_sample())
        assert await engine == [request_id]

    async def test_a_cancelled_wait_ends_although_it_is_woken(self, store: RequestStore, other: RequestStore) -> None:
        async def watch() -> None:
            while True:
                await store.wait_for_work(BASE, LONG_S)

        for seq_id in range(40):
            task = asyncio.create_task(watch())
            submit = asyncio.create_task(store.submit(a_sample(seq_id)))
            await (submit if seq_id % 2 else other.submit(a_sample(seq_id, "s2:sample:0")))
            for _ in range(seq_id // 2 % 5):
                await asyncio.sleep(0)
            task.cancel()
            await submit
            done, _ = await asyncio.wait([task], timeout=LONG_S / 2)
            assert done

    async def test_no_wake_up_is_lost_between_a_claim_and_the_wait(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        for seq_id in range(5):
            assert await claim(other) == []
            request_id = await store.submit(a_sample(seq_id))
            async with asyncio.timeout(LONG_S):
                while not (claimed := await claim(other)):
                    await other.wait_for_work(BASE, LONG_S)
            assert claimed == [request_id]

    async def test_what_is_ahead_is_counted(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(3)]
        await claim(store, 1)
        engine = EngineRecord(base_model=BASE, state=EngineState.LOADING, updated_at=NOW, detail="loading weights")
        await store.report_engine(engine, lease=await lease_of(store))
        waiting = await store.waiting(ids[2])
        assert (waiting.num_ahead, waiting.engine, waiting.missing_seq_id) == (2, engine, None)

    # cancel

    async def test_a_queued_sample_is_cancelled(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        assert (await store.cancel(request_id)).state == OperationState.CANCELLED
        assert await claim(store) == []
        assert await store.cancelled(await lease_of(store)) == []

    async def test_a_running_sample_is_cancelled_and_its_engine_told_once(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        request_id = await store.submit(a_sample())
        await claim(other)
        waiter = asyncio.create_task(store.wait_for(request_id, LONG_S))
        await store.cancel(request_id)
        assert (await waiter).state == OperationState.CANCELLED
        await other.wait_for_work(BASE, LONG_S)
        assert await other.cancelled(await lease_of(other)) == [request_id]
        assert await other.cancelled(await lease_of(other)) == []
        await complete(other, [done(request_id, SampleOutput(sequences=()))])
        assert await state_of(store, request_id) == OperationState.CANCELLED

    async def test_training_cannot_be_cancelled(self, store: RequestStore) -> None:
        await a_model(store)
        request_id = await store.submit(an_operation(seq_id=1))
        assert (await store.cancel(request_id)).state == OperationState.QUEUED
        assert await claim(store) == [request_id]

    # finished samples

    async def test_samples_are_announced_in_the_order_in_which_they_finish(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        """However they ended, each client sees its own samples; what is not announced does not move the cursor."""
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(5)]
        clone = await store.submit(a_sample(3 * FinishedSample.SEQ_IDS_PER_CLONE + 1))
        neighbour = await store.submit(a_sample(0, "s2:sample:0"))
        assert await finished(store) == ([], 0)
        await claim(other)
        bad = done(ids[0], Failed(message="no"))
        sampled = [done(request_id, SampleOutput(sequences=())) for request_id in (neighbour, ids[2], clone)]
        await complete(other, [bad, *sampled])
        await store.cancel(ids[4])
        await store.cancel(ids[4])
        await complete(other, [done(ids[4], SampleOutput(sequences=()))])  # too late
        assert await finished(store) == ([(ids[0], False), (ids[2], True), (ids[4], False)], 3)
        assert await finished(other, clone=3) == ([(clone, True)], 1)
        assert await finished(other, "s2:sample:0") == ([(neighbour, True)], 1)
        assert await finished(store, clone=1) == ([], 0)
        assert await finished(store, after=3) == ([], 3)
        given_up = EngineRecord(base_model=BASE, state=EngineState.FAILED, updated_at=NOW, detail="broken")
        await other.release_lease(BASE, "engine-1")
        await other.report_engine(given_up)
        hopeless = await store.submit(a_sample(5))
        assert await finished(store, after=3) == ([(ids[1], False), (ids[3], False), (hopeless, False)], 6)

    async def test_finished_samples_come_in_pages_with_their_sizes(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(5)]
        await claim(store)
        for request_id in reversed(ids):
            await complete(store, [done(request_id, SampleOutput(sequences=()))])
        seen: list[str] = []
        cursor = 0
        for size in (2, 2, 1):
            page = await store.finished_samples("s1:sample:0", 0, after=cursor, limit=2, timeout_s=0)
            assert len(page.samples) == size
            for sample in page.samples:
                result = (await store.get_operation(sample.request_id)).result
                assert result is not None
                assert sample.size_bytes == len(result)
                seen.append(sample.request_id)
            cursor = page.cursor
        assert seen == ids[::-1]

    async def test_who_waits_for_samples_is_woken_by_another_process(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        first, second = [await store.submit(a_sample(seq_id)) for seq_id in range(2)]
        await claim(other)
        waiter = asyncio.create_task(finished(store, timeout_s=LONG_S))
        elsewhere = asyncio.create_task(finished(store, clone=1, timeout_s=LONG_S))
        await asyncio.sleep(0)
        await complete(other, [done(first, SampleOutput(sequences=()))])
        assert await waiter == ([(first, True)], 1)
        waiter = asyncio.create_task(finished(store, after=1, timeout_s=LONG_S))
        await other.cancel(second)
        assert await waiter == ([(second, False)], 2)
        assert not elsewhere.done()
        elsewhere.cancel()
        assert await finished(store, after=2, timeout_s=0.05) == ([], 2)

    async def test_nothing_appears_behind_a_cursor(self, store: RequestStore, other: RequestStore) -> None:
        """Two processes finish samples of several clients at once, and a third process follows each client."""
        subject_ids = [f"s1:sample:{number}" for number in range(3)]
        ids = {
            subject_id: [await store.submit(a_sample(seq_id, subject_id)) for seq_id in range(20)]
            for subject_id in subject_ids
        }
        await claim(store, 1000)

        async def finish(process: RequestStore, numbers: range) -> None:
            for number in numbers:
                order = subject_ids if number % 2 else subject_ids[::-1]
                mixed = [done(ids[subject_id][number], SampleOutput(sequences=())) for subject_id in order]
                await asyncio.gather(complete(process, mixed[:2]), complete(process, mixed[2:]))

        async def follow(subject_id: str) -> list[str]:
            seen: list[str] = []
            cursor = 0
            while len(seen) < len(ids[subject_id]):
                page = await other.finished_samples(subject_id, 0, after=cursor, limit=7, timeout_s=LONG_S)
                assert page.samples, f"{subject_id}: nothing came after {cursor}, and only {len(seen)} before"
                seen += [sample.request_id for sample in page.samples]
                assert page.cursor == len(seen)
                cursor = page.cursor
            return seen

        followed, *_ = await asyncio.gather(
            asyncio.gather(*[follow(subject_id) for subject_id in subject_ids]),
            finish(store, range(0, 20, 2)),
            finish(other, range(1, 20, 2)),
        )
        for subject_id, seen in zip(subject_ids, followed, strict=True):
            assert sorted(seen) == sorted(ids[subject_id])

    async def test_a_cursor_outlives_restarts_and_results(self, store: RequestStore, make_store: MakeStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(2)]
        await claim(store)
        await complete(store, [done(ids[0], SampleOutput(sequences=()))])
        await store.close()
        again = make_store()
        await again.open()
        try:
            await complete(again, [done(ids[1], SampleOutput(sequences=()))])
            assert await finished(again, after=1) == ([(ids[1], True)], 2)
            assert await again.prune(datetime.now(UTC) + timedelta(seconds=1)) == 2
            with pytest.raises(ResultExpiredError):
                await again.get_operation(ids[1])
            assert await finished(again, after=1) == ([(ids[1], True)], 2)  # otherwise its client would wait for ever
            for clone, cursor in ((0, 3), (1, 1)):
                with pytest.raises(UserError, match=f"cursor {cursor} of 's1:sample:0' is ahead"):
                    await finished(again, clone=clone, after=cursor)
        finally:
            await again.close()

    # gaps, ended sessions, engines

    async def test_a_gap_that_stays_open_fails_what_waits(self, store: RequestStore) -> None:
        await a_model(store)
        await heard(store)
        late = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2)]
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) - timedelta(hours=1)) == 0
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == 2
        for request_id in late:
            failed = await failure_of(store, request_id)
            assert "seq_id 1 " in failed.message
            assert failed.category == "user"
        fourth = await store.submit(an_operation(seq_id=4))
        assert await claim(store) == [fourth]
        too_late = await store.submit(an_operation(seq_id=1))
        assert "gone on without" in (await failure_of(store, too_late)).message

    async def test_nothing_is_left_behind_a_failed_gap(self, store: RequestStore) -> None:
        """Requests sent in parallel arrive in any order. A late lower seq_id must not stay pending for ever."""
        await a_model(store)
        await heard(store)
        old, young = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2)]
        between = (await store.get_operation(young)).created_at
        assert (await store.get_operation(old)).created_at < between
        assert await store.fail_gaps(BASE, older_than=between) == 2
        assert await state_of(store, young) == OperationState.FAILED

    async def test_a_gap_stays_open_while_its_client_is_not_heard(self, store: RequestStore) -> None:
        """The server may have been unable to accept anything, so the client gets the whole time once it is heard."""
        await a_model(store)
        waiting = await store.submit(an_operation(seq_id=2))
        now = datetime.now(UTC)
        assert await store.fail_gaps(BASE, older_than=now + timedelta(hours=1)) == 0  # no heartbeat yet
        await heard(store)
        assert await store.fail_gaps(BASE, older_than=now) == 0  # not heard for as long as the operation has waited
        assert await state_of(store, waiting) == OperationState.QUEUED
        await heard(store)
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC)) == 1

    async def test_many_operations_fail_behind_one_gap(self, store: RequestStore) -> None:
        await a_model(store)
        await heard(store)
        late = await asyncio.gather(*[store.submit(an_operation(seq_id=seq_id)) for seq_id in range(2, 523)])
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == len(late)
        assert "seq_id 1 " in (await failure_of(store, late[-1])).message
        following = await store.submit(an_operation(seq_id=523))
        assert await claim(store) == [following]

    async def test_what_can_run_is_no_gap(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == 0
        assert await claim(store) == [first]

    async def test_a_gap_stays_open_while_an_operation_before_it_runs(self, store: RequestStore) -> None:
        """Once a model has moved past a gap, it never returns to it, even if its engine dies."""
        await a_model(store)
        await heard(store)
        first = await store.submit(an_operation(seq_id=1))
        assert await claim(store) == [first]
        behind = await store.submit(an_operation(seq_id=3))
        late = datetime.now(UTC) + timedelta(hours=1)
        assert await store.fail_gaps(BASE, older_than=late) == 0
        assert (await store.get_run("s1:train:0")).applied_seq_id == 0
        await store.requeue(await lease_of(store), max_attempts=3, reason="it was killed")
        assert await claim(store) == [first]
        await complete(store, [done(first)])
        assert await store.fail_gaps(BASE, older_than=late) == 1
        assert await state_of(store, behind) == OperationState.FAILED
        fourth = await store.submit(an_operation(seq_id=4))
        await store.requeue(await lease_of(store), max_attempts=3, reason="it was killed")
        assert await claim(store) == [fourth]

    async def test_an_ended_session_unloads_its_models_last(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        behind_a_gap = await store.submit(an_operation(seq_id=3))
        await store.end_session("s1", "success", None)
        assert "seq_id 2 " in (await failure_of(store, behind_a_gap)).message
        records = await claim_records(store, await lease_of(store))
        assert [record.request_id for record in records][:1] == [first]
        unload = records[-1]
        assert unload.payload is not None
        assert decode_operation(unload.kind, unload.payload) == UnloadModel(model_id="s1:train:0")
        unloaded = RunStateChanged(model_id="s1:train:0", state=RunState.UNLOADED)
        await complete(store, [done(unload.request_id, ModelUnloaded(model_id="s1:train:0"), unloaded)])
        assert (await store.get_run("s1:train:0")).state == RunState.UNLOADED
        assert await claim(store) == []

    async def test_a_model_is_unloaded_once_behind_what_it_has_accepted(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        behind_a_gap = await store.submit(an_operation(seq_id=3))
        unload = await store.unload_run("s1:train:0")
        assert await store.unload_run("s1:train:0") == unload
        assert "unload_model was called" in (await failure_of(store, behind_a_gap)).message
        for seq_id in (2, 4):
            with pytest.raises(UserError, match="has been unloaded"):
                await store.submit(an_operation(seq_id=seq_id))
        assert await store.submit(an_operation(seq_id=1)) == first, "a repeat finds its first one"
        assert await claim(store) == [first, unload]
        await store.end_session("s1", "success", None)
        assert await claim(store) == [], "the end of the session unloads it no more"
        unloaded = RunStateChanged(model_id="s1:train:0", state=RunState.UNLOADED)
        await complete(store, [done(first), done(unload, ModelUnloaded(model_id="s1:train:0"), unloaded)])
        assert await store.unload_run("s1:train:0") == unload

    async def test_many_operations_wait_behind_a_gap_when_their_session_ends(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        late = await asyncio.gather(*[store.submit(an_operation(seq_id=seq_id)) for seq_id in range(3, 40)])
        await store.end_session("s1", "success", None)
        for request_id in late:
            failed = await failure_of(store, request_id)
            assert "seq_id 2 " in failed.message
            assert "session has ended" in failed.message
        claimed = await claim(store)
        assert claimed[0] == first
        assert [(await store.get_operation(each)).kind for each in claimed[1:]] == ["unload_model"]
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == 0
