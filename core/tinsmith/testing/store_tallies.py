"""A store's counts for each tenant: queued operations, usage, and stored bytes."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from tinsmith.errors import NotFoundError
from tinsmith.operations import Failed, OptimStepOutput, SampleOutput
from tinsmith.store import (
    CheckpointWritten,
    KeptCheckpoints,
    OperationState,
    PendingCounts,
    RecoveryPointTaken,
    RequestStore,
    SamplingSessionCreated,
    SamplingSessionRecord,
)
from tinsmith.testing.store_records import (
    BASE,
    NOW,
    a_checkpoint,
    a_model,
    a_recovery_point,
    a_sample,
    a_session,
    an_operation,
    claim,
    complete,
    done,
    heard,
    lease_of,
)
from tinsmith.testing.store_suite import StoreSuite


class TalliesContract(StoreSuite):
    async def test_what_a_tenant_has_is_counted(self, store: RequestStore) -> None:
        await a_model(store)
        await store.submit(an_operation(seq_id=2, payload=b"123"))
        await store.submit(a_sample(payload=b"45"))
        await store.submit(a_sample(tenant="bob", subject_id="s2:sample:0"))
        await store.add_checkpoint(a_checkpoint("a"))
        await store.add_checkpoint(a_checkpoint("b"))
        await store.delete_checkpoint(a_checkpoint("b").path)
        assert await store.pending("ann") == PendingCounts(by_kind={"optim_step": 1, "sample": 1}, num_bytes=5)
        assert [await store.count_live_models(tenant) for tenant in ("ann", "bob")] == [1, 0]
        assert [await store.count_live_sessions(tenant) for tenant in ("ann", "bob")] == [1, 0]
        assert await store.kept_checkpoints("ann") == KeptCheckpoints(number=1, num_bytes=2**40)
        assert [await store.is_awaited("s1:train:0", seq_id) for seq_id in (1, 2)] == [True, False]

    async def test_what_waits_is_listed_for_all_tenants(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        await store.submit(an_operation(seq_id=2))
        await claim(store)
        await store.submit(an_operation(seq_id=3))
        await store.submit(a_sample(tenant="bob", subject_id="s2:sample:0"))
        found = await store.list_pending()
        assert [(each.base_model, each.tenant, each.kind, each.state, each.number) for each in found] == [
            (BASE, "ann", "optim_step", OperationState.QUEUED, 1),
            (BASE, "ann", "optim_step", OperationState.RUNNING, 2),
            (BASE, "bob", "sample", OperationState.QUEUED, 1),
        ]
        assert found[1].oldest_at == (await store.get_operation(first)).created_at
        await complete(store, [done(first)])
        assert [each.number for each in await store.list_pending()] == [1, 1, 1]

    async def test_what_comes_next_of_a_model(self, store: RequestStore) -> None:
        """Its own operations in their order, and else the oldest sample of its tenant from its weights."""
        creation = await a_model(store)
        await a_model(store, "s2:train:0")
        for session_id, tenant in (("s1", "ann"), ("s3", "bob")):
            sampler = SamplingSessionRecord(
                sampling_session_id=f"{session_id}:sample:0",
                session_id=session_id,
                tenant=tenant,
                base_model=BASE,
                created_at=NOW,
                model_id="s1:train:0",
            )
            await store.create_sampling_session(sampler)

        async def following() -> str | datetime:
            found = await store.next_requests()
            assert list(found) == ["s1:train:0", "s2:train:0"]
            assert isinstance(found["s2:train:0"], datetime)
            return found["s1:train:0"]

        assert await following() == (await store.get_operation(creation)).finished_at
        await store.submit(a_sample(subject_id="s3:sample:0", tenant="bob"))
        assert await following() == (await store.get_operation(creation)).finished_at
        sample = await store.submit(a_sample())
        await claim(store)
        later = await store.submit(a_sample(1))
        assert await following() == sample
        early = await store.submit(an_operation(seq_id=2))
        assert await following() == early
        step = await store.submit(an_operation(seq_id=1))
        assert await following() == step
        await claim(store)
        assert await following() == step
        await complete(store, [done(step)])
        assert await following() == early
        await complete(store, [done(early)])
        for request_id in (sample, later):
            assert await following() == request_id
            await complete(store, [done(request_id, SampleOutput(sequences=()))])
        times = [each.finished_at for each in await store.list_times("s1", limit=9)]
        assert await following() == max(filter(None, times))
        await store.lose_run(await lease_of(store), "s1:train:0", "lost")
        assert list(await store.next_requests()) == ["s2:train:0"]

    async def test_what_a_tenant_keeps_is_counted_until_it_is_deleted(self, store: RequestStore) -> None:
        """Of the log, of checkpoints, of snapshots and of recovery points; nothing of it is another tenant's."""
        await a_model(store)
        assert await store.kept_bytes("bob") == []
        before = (await store.kept_bytes("ann"))[0]
        assert before.log > 0  # of the creation
        step = await store.submit(an_operation(seq_id=1, payload=b"123"))
        await claim(store)
        saved = CheckpointWritten(record=a_checkpoint("a"))
        sampler = SamplingSessionRecord(
            sampling_session_id="s1:sample:7",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            num_bytes=700,
        )
        taken = RecoveryPointTaken(record=a_recovery_point(1), keep=2)
        effects = saved, SamplingSessionCreated(record=sampler), taken
        await complete(store, [done(step, OptimStepOutput(), *effects)])
        (kept,) = await store.kept_bytes("ann")
        result = len((await store.get_operation(step)).result or b"")
        assert kept.log == before.log + 3 + result
        assert (kept.checkpoints, kept.snapshots, kept.recovery_points) == (2**40, 700, 2**40)
        assert [each.tenant for each in await store.kept_bytes(None)] == ["ann"]
        await store.delete_checkpoint(a_checkpoint("a").path)
        assert (await store.kept_bytes("ann"))[0].checkpoints == 0
        await store.end_session("s1", "success", None)
        await store.lose_run(await lease_of(store), "s1:train:0", "lost")
        await store.prune(datetime.now(UTC) + timedelta(hours=1))
        assert sum(each.total for each in await store.kept_bytes("ann")) == 0

    async def test_open_sampling_sessions_are_counted(self, store: RequestStore) -> None:
        for number, tenant in enumerate(["ann", "ann", "bob"]):
            await store.create_session(a_session(f"s{number}", tenant=tenant), idempotency_key=None)
            for name in ("a", "b"):
                sampler = SamplingSessionRecord(
                    sampling_session_id=f"s{number}:sample:{name}",
                    session_id=f"s{number}",
                    tenant=tenant,
                    base_model=BASE,
                    created_at=NOW,
                )
                await store.create_sampling_session(sampler)
        assert [await store.count_open_sampling_sessions(tenant) for tenant in ("ann", "bob", "eve")] == [4, 2, 0]
        await store.end_session("s0", "success", None)
        assert await store.count_open_sampling_sessions("ann") == 2

    async def test_whatever_has_finished_no_longer_counts_as_pending(self, store: RequestStore) -> None:
        await a_model(store)
        await heard(store)
        await a_model(store, "s2:train:0")
        lease = await lease_of(store)
        sizes: dict[str, Any] = {"payload": b"x" * 10}
        refused = an_operation(seq_id=1, refused=Failed(message="no"), **sizes)
        assert await store.submit(refused) == await store.submit(refused)
        samples = [store.submit(a_sample(number, **sizes)) for number in range(4)]
        bad = store.submit(an_operation("nope:train:0", 1))  # shares a commit with them
        assert isinstance((await asyncio.gather(*samples, bad, return_exceptions=True))[-1], NotFoundError)
        step = await store.submit(an_operation(seq_id=2, **sizes))
        held = PendingCounts(by_kind={"sample": 4, "optim_step": 1}, num_bytes=50)
        assert await store.pending("ann") == held
        claimed = await claim(store)
        assert await store.pending("ann") == held
        await asyncio.gather(complete(store, [done(step)]), complete(store, [done(step)]))
        await store.cancel(claimed[1])
        await store.cancel(claimed[1])
        for _ in range(2):
            await store.requeue(lease, max_attempts=2, reason="it was killed")
            await claim(store)
        await store.submit(an_operation(seq_id=4, **sizes))
        await store.submit(an_operation("s2:train:0", 1, **sizes))
        assert await store.pending("ann") == PendingCounts(by_kind={"optim_step": 2}, num_bytes=20)
        await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1))
        await store.lose_run(lease, "s2:train:0", "why")
        assert await store.pending("ann") == PendingCounts(by_kind={}, num_bytes=0)
        await store.submit(an_operation(seq_id=6, **sizes))
        await store.end_session("s1", "success", None)
        (unload,) = await claim(store)
        assert (await store.pending("ann")).by_kind == {"unload_model": 1}
        await complete(store, [done(unload)])
        assert await store.pending("ann") == PendingCounts(by_kind={}, num_bytes=0)

    async def test_what_can_never_run_is_stored_without_its_payload(self, store: RequestStore) -> None:
        await a_model(store)
        await heard(store)
        await store.submit(an_operation(seq_id=2))
        await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1))
        await store.submit(an_operation(seq_id=1))  # the model has gone on without it
        await store.lose_run(await lease_of(store), "s1:train:0", "for some reason")
        await store.submit(an_operation(seq_id=3))
        logged = await store.list_log("s1:train:0", from_seq_id=1, limit=9)
        assert [(each.state, each.payload_bytes > 0) for each in logged] == [
            (OperationState.FAILED, False),
            (OperationState.FAILED, True),
            (OperationState.FAILED, False),
        ]
