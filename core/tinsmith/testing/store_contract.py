"""The contract suite of request stores: subclass `RequestStoreContract` and override `make_store`.

    class TestMyStore(RequestStoreContract):
        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda: MyStore(...)  # each call: as another process opens the same, initially empty database

Needs the `testing` extra (pytest, pytest-asyncio in auto mode).
"""

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tinsmith.errors import ConflictError, NotFoundError, ResultExpiredError, UserError
from tinsmith.operations import Failed, ForwardBackwardOutput
from tinsmith.store import (
    CheckpointRecord,
    CheckpointWritten,
    Completion,
    KeptCheckpoints,
    OperationState,
    RequestStore,
    RunState,
    SamplingSessionCreated,
    SamplingSessionRecord,
    SessionRecord,
)
from tinsmith.store.codec import encode_result
from tinsmith.testing.store_api_keys import ApiKeysContract
from tinsmith.testing.store_audit import AuditContract
from tinsmith.testing.store_experts import RoutedExpertsContract
from tinsmith.testing.store_leases import LeaseContract
from tinsmith.testing.store_log import LogContract
from tinsmith.testing.store_metrics import MetricsContract
from tinsmith.testing.store_origins import OriginsContract
from tinsmith.testing.store_places import PlacesContract
from tinsmith.testing.store_records import (
    BASE,
    NOW,
    MakeStore,
    a_checkpoint,
    a_creation,
    a_model,
    a_recovery_point,
    a_run,
    a_sample,
    a_session,
    an_operation,
    claim,
    claim_records,
    complete,
    done,
    failure_of,
    lease_of,
    state_of,
)
from tinsmith.testing.store_recovery import RecoveryContract
from tinsmith.testing.store_retention import RetentionContract
from tinsmith.testing.store_rollouts import RolloutsContract
from tinsmith.testing.store_streams import StreamsContract
from tinsmith.testing.store_tallies import TalliesContract


class RequestStoreContract(
    LogContract,
    PlacesContract,
    RecoveryContract,
    LeaseContract,
    RetentionContract,
    RoutedExpertsContract,
    MetricsContract,
    ApiKeysContract,
    AuditContract,
    OriginsContract,
    RolloutsContract,
    StreamsContract,
    TalliesContract,
):
    """Tests every promise of `tinsmith.store.RequestStore`. Override `make_store` only."""

    # sessions

    async def test_a_session_comes_back_as_it_was(self, store: RequestStore) -> None:
        session = a_session(
            tags=("a", "b"), user_metadata={"x": [1, None]}, sdk_version="0.38.0", project_id="p", display_name="n"
        )
        assert await store.create_session(session, idempotency_key=None) == session
        assert await store.get_session("s1") == session
        with pytest.raises(NotFoundError, match="'s9'"):
            await store.get_session("s9")

    async def test_sessions_are_found_together(self, store: RequestStore) -> None:
        sessions = {name: a_session(name, display_name=name) for name in ("s1", "s2", "s3")}
        for each in sessions.values():
            await store.create_session(each, idempotency_key=None)
        assert await store.find_sessions({"s1", "s3", "s9"}) == {name: sessions[name] for name in ("s1", "s3")}
        assert await store.find_sessions([]) == {}

    async def test_a_session_is_created_once_per_key_and_tenant(self, store: RequestStore) -> None:
        first = await store.create_session(a_session("s1"), idempotency_key="k")
        assert await store.create_session(a_session("s2"), idempotency_key="k") == first
        other = await store.create_session(a_session("s3", tenant="bob"), idempotency_key="k")
        assert other.session_id == "s3"

    async def test_sessions_are_listed_newest_first_by_tenant(self, store: RequestStore) -> None:
        for number, tenant in enumerate(["ann", "bob", "ann", "ann"]):
            session = a_session(f"s{number}", tenant=tenant, created_at=NOW + timedelta(microseconds=number))
            await store.create_session(session, idempotency_key=None)
        assert [s.session_id for s in await store.list_sessions("ann", limit=2, offset=1)] == ["s2", "s0"]
        assert [s.session_id for s in await store.list_sessions(None, limit=9, offset=0)] == ["s3", "s2", "s1", "s0"]

    async def test_sessions_are_walked_newest_first(self, store: RequestStore) -> None:
        """Two of one time are in the order of their ids, and none comes twice or is left out."""
        for number, (name, tenant) in enumerate((("s0", "ann"), ("s1", "ann"), ("s2", "bob"), ("s3", "ann"))):
            at = NOW + timedelta(microseconds=number // 2)
            await store.create_session(a_session(name, tenant=tenant, created_at=at), idempotency_key=None)
        for whose, expected in (("ann", ["s3", "s1", "s0"]), (None, ["s3", "s2", "s1", "s0"])):
            walked: list[SessionRecord] = []
            while page := await store.walk_sessions(
                whose, before=(walked[-1].created_at, walked[-1].session_id) if walked else None, limit=1
            ):
                walked += page
            assert [each.session_id for each in walked] == expected
        assert [each.session_id for each in await store.walk_sessions(None, limit=3)] == ["s3", "s2", "s1"]

    async def test_a_model_that_only_holds_checkpoints(self, store: RequestStore) -> None:
        await store.create_session(a_session("s1"), idempotency_key=None)
        run = a_run("s1:train:0", state=RunState.UNLOADED, state_reason="a copy")
        assert await store.add_unloaded_run(run) == run
        assert await store.add_unloaded_run(replace(run, state_reason="another")) == run
        assert await store.get_run("s1:train:0") == run
        assert await store.count_live_models("ann") == 0
        for seq_id in (0, 1):
            with pytest.raises(UserError):
                await store.submit(an_operation("s1:train:0", seq_id))
        with pytest.raises(UserError):
            await store.create_run(a_run("s1:train:0"), a_creation("s1:train:0"))
        assert await store.checkpoints_of_sessions(["s1"]) == {}
        await store.add_checkpoint(a_checkpoint("one"))
        await store.add_checkpoint(a_checkpoint("two"))
        kept = {"s1": KeptCheckpoints(number=2, num_bytes=2**41)}
        assert await store.checkpoints_of_sessions(["s1", "s2"]) == kept
        await store.delete_checkpoint("tinker://s1:train:0/weights/one")
        assert (await store.checkpoints_of_sessions(["s1"]))["s1"].number == 1
        last = a_checkpoint("three", tenant="bob", created_at=NOW + timedelta(microseconds=1))
        await store.add_checkpoint(last)
        two = "tinker://s1:train:0/weights/two"
        assert await store.walk_checkpoints(None, limit=1) == [last]
        behind = await store.walk_checkpoints(None, before=(last.created_at, last.path), limit=9)
        assert [each.path for each in behind] == [two]
        assert [each.path for each in await store.walk_checkpoints("ann", limit=9)] == [two]

    async def test_a_session_is_touched_and_updated(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        later = NOW + timedelta(seconds=10)
        assert (await store.hear_session("s1", later)).last_seen_at == later
        assert (await store.hear_session("s1", NOW)).last_seen_at == later
        assert (await store.update_session("s1", project_id="p")).project_id == "p"
        assert await store.get_session("s1") == a_session(last_seen_at=later, project_id="p")

    async def test_the_first_end_of_a_session_counts(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        await store.end_session("s1", "errored", "why")
        ended = await store.end_session("s1", "success", None)
        assert (ended.ended, ended.end_detail) == ("errored", "why")
        assert await store.hear_session("s1", NOW + timedelta(seconds=10)) == ended
        assert await store.get_session("s1") == ended

    async def test_silent_sessions_expire(self, store: RequestStore) -> None:
        for number in range(3):
            session = a_session(f"s{number}", last_seen_at=NOW + timedelta(seconds=number))
            await store.create_session(session, idempotency_key=None)
        await store.end_session("s0", "success", None)
        assert await store.expire_sessions(NOW + timedelta(seconds=2)) == ["s1"]
        assert (await store.get_session("s1")).ended == "expired"
        assert (await store.get_session("s2")).ended is None

    async def test_silent_sessions_of_a_server_expire(self, store: RequestStore) -> None:
        for number in range(2):
            await store.create_session(a_session(f"s{number}"), idempotency_key=None)
            later = NOW + timedelta(seconds=10 + number)
            assert (await store.hear_session(f"s{number}", later, server_id="one")).last_seen_at == later
        assert await store.expire_sessions(NOW + timedelta(seconds=11), heard_by="one") == ["s0"]
        assert (await store.get_session("s1")).ended is None

    # models, sampling sessions, checkpoints

    async def test_a_model_is_created_once(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        run = a_run(user_metadata={"renderer": "x"})
        first = await store.create_run(run, a_creation())
        assert await store.create_run(run, a_creation()) == first
        found = await store.get_run(run.model_id)
        assert replace(found, last_request_at=NOW) == run
        with pytest.raises(ConflictError):
            await store.create_run(run, a_creation(digest=b"other"))
        with pytest.raises(NotFoundError, match="'nope'"):
            await store.get_run("nope")

    async def test_models_are_listed_newest_first_with_their_number(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        for number in range(3):
            run = a_run(f"s1:train:{number}", created_at=NOW + timedelta(seconds=number))
            await store.create_run(run, a_creation(run.model_id))
        runs, total = await store.list_runs("ann", limit=2, offset=1)
        assert ([run.model_id for run in runs], total) == (["s1:train:1", "s1:train:0"], 3)
        assert await store.list_runs("bob", limit=2, offset=0) == ([], 0)
        assert (await store.list_runs(None, session_id="s1", limit=9, offset=0))[1] == 3
        assert (await store.list_runs(None, session_id="s2", limit=9, offset=0))[1] == 0

    async def test_sampling_sessions(self, store: RequestStore) -> None:
        first = SamplingSessionRecord(
            sampling_session_id="s1:sample:0",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            snapshot_id="tinker://s1:train:0/sampler_weights/x",
            model_path="tinker://s1:train:0/sampler_weights/x",
            model_id="s1:train:0",
        )
        assert await store.create_sampling_session(first) == first
        assert await store.create_sampling_session(replace(first, snapshot_id=None)) == first
        assert await store.get_sampling_session("s1:sample:0") == first
        assert await store.list_sampling_session_ids("s1") == [first.sampling_session_id]
        assert await store.list_sampling_session_ids("s2") == []
        with pytest.raises(NotFoundError):
            await store.get_sampling_session("nope")

    async def test_a_save_does_not_replace_a_sampling_session(self, store: RequestStore) -> None:
        """Of several that create one under the same id, the first does; the others fail, and have no effect."""
        for model_id in ("s1:train:0", "s1:train:1"):
            await a_model(store, model_id)
        first = SamplingSessionRecord(
            sampling_session_id="s1:sample:0",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            snapshot_id="s1:sample:0",
            model_id="s1:train:0",
        )
        second = replace(first, model_id="s1:train:1")
        sent = [await store.submit(an_operation(f"s1:train:{number}", 1)) for number in (0, 1)]
        await claim(store)
        saved = [
            done(sent[0], None, SamplingSessionCreated(record=first)),
            done(sent[1], None, SamplingSessionCreated(record=second), CheckpointWritten(record=a_checkpoint())),
        ]
        await complete(store, saved)
        assert [await state_of(store, each) for each in sent] == [OperationState.SUCCEEDED, OperationState.FAILED]
        assert "'s1:sample:0' exists already" in (await failure_of(store, sent[1])).message
        assert await store.get_sampling_session("s1:sample:0") == first
        assert await store.list_checkpoints("ann") == ([], 0)
        assert (await store.get_run("s1:train:1")).applied_seq_id == 1

    async def test_checkpoints_are_kept_listed_changed_and_deleted(self, store: RequestStore) -> None:
        request_id = await a_model(store)
        first, second = a_checkpoint("first"), a_checkpoint("second", created_at=NOW + timedelta(seconds=1))
        save = await store.submit(an_operation(seq_id=1, kind="save_state"))
        await claim(store)
        written = [CheckpointWritten(record=first), CheckpointWritten(record=second)]
        await complete(store, [done(save, None, *written)])
        assert await store.get_checkpoint(first.path) == first
        assert await store.list_checkpoints("ann") == ([second, first], 2)
        assert await store.list_checkpoints("ann", limit=1, offset=1) == ([first], 2)
        assert await store.list_checkpoints(None, model_id="other") == ([], 0)
        never = "tinker://s1:train:0/weights/never"
        assert await store.recorded_directories([first.path, second.path, never]) == {first.directory, second.directory}
        expires_at = NOW + timedelta(days=1)
        changed = await store.update_checkpoint(first.path, lambda it: replace(it, public=True, expires_at=expires_at))
        assert changed == replace(first, public=True, expires_at=expires_at)
        assert await store.expired_checkpoints(expires_at - timedelta(seconds=1)) == []
        assert await store.expired_checkpoints(expires_at) == [changed]
        assert await store.delete_checkpoint(first.path) == changed
        for missing in (store.get_checkpoint, store.delete_checkpoint):
            with pytest.raises(NotFoundError, match="first"):
                await missing(first.path)
        assert await state_of(store, request_id) == OperationState.SUCCEEDED
        assert await store.list_checkpoints("ann") == ([second], 1)
        assert await store.recorded_directories([first.path, second.path]) == {second.directory}
        assert await store.expired_checkpoints(expires_at) == []
        # a client that did not receive the answer asks again
        assert await store.deleted_checkpoint(first.path) == changed
        for there in (second.path, never):
            with pytest.raises(NotFoundError, match=there):
                await store.deleted_checkpoint(there)
        for newer in (replace(second, created_at=NOW), replace(second, expires_at=expires_at)):
            with pytest.raises(NotFoundError, match="second"):
                await store.delete_version(newer)
        await store.update_checkpoint(second.path, lambda it: replace(it, public=True))
        assert await store.delete_version(second) == replace(second, public=True), "the same version, now public"
        with pytest.raises(NotFoundError, match="second"):
            await store.delete_version(second)
        again = await store.submit(an_operation(seq_id=2, kind="save_state"))
        await claim(store)
        await complete(store, [done(again, None, CheckpointWritten(record=first))])
        assert await store.get_checkpoint(first.path) == first
        await store.delete_checkpoint(first.path)
        await store.prune(datetime.now(UTC) + timedelta(hours=1))
        with pytest.raises(NotFoundError):
            await store.deleted_checkpoint(first.path)

    async def test_the_newest_checkpoints_of_models_are_found(self, store: RequestStore) -> None:
        for model_id in ("s1:train:0", "s2:train:0", "s3:train:0"):
            await a_model(store, model_id)
        records = [
            a_checkpoint(f"{name}{seconds}", model_id=model_id, kind=kind, created_at=NOW + timedelta(seconds=seconds))
            for model_id, name in (("s1:train:0", "a"), ("s2:train:0", "b"))
            for seconds, kind in enumerate(["training", "sampler", "training", "sampler", "training"])
        ]
        for record in records:
            await store.add_checkpoint(record)
        found = await store.newest_checkpoints(["s1:train:0", "s3:train:0"])
        assert sorted(found, key=lambda each: each.created_at) == [records[3], records[4]]
        await store.delete_checkpoint(records[4].path)
        found = await store.newest_checkpoints(["s1:train:0", "s2:train:0"])
        assert {each.path for each in found} == {records[n].path for n in (2, 3, 8, 9)}
        assert await store.newest_checkpoints([]) == []

    async def test_an_overwritten_checkpoint_stays_published(self, store: RequestStore) -> None:
        """Publishing belongs to the path; everything else, including the expiry time, to the checkpoint saved there."""
        await a_model(store)
        first = a_checkpoint()
        newer = replace(first, step=9, user_metadata={}, created_at=NOW + timedelta(hours=1))

        async def save(seq_id: int, record: CheckpointRecord) -> None:
            request_id = await store.submit(an_operation(seq_id=seq_id, kind="save_state"))
            await claim(store)
            await complete(store, [done(request_id, None, CheckpointWritten(record=record))])

        await save(1, first)
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        await store.update_checkpoint(first.path, lambda it: replace(it, public=True, expires_at=tomorrow))
        await save(2, newer)
        assert await store.get_checkpoint(first.path) == replace(newer, public=True)
        await store.update_checkpoint(first.path, lambda it: replace(it, expires_at=NOW))
        await save(3, newer)  # the one before has expired, and nobody can read it any more
        assert await store.get_checkpoint(first.path) == newer

    async def test_a_checkpoint_that_no_operation_wrote(self, store: RequestStore) -> None:
        await store.add_checkpoint(a_checkpoint())
        assert await store.get_checkpoint(a_checkpoint().path) == a_checkpoint()
        with pytest.raises(UserError, match=r"weights/first.*exists already"):
            await store.add_checkpoint(replace(a_checkpoint(), step=9))
        assert (await store.get_checkpoint(a_checkpoint().path)).step == a_checkpoint().step

    async def test_a_refused_change_changes_nothing(self, store: RequestStore) -> None:
        await a_model(store)
        save = await store.submit(an_operation(seq_id=1))
        await claim(store)
        await complete(store, [done(save, None, CheckpointWritten(record=a_checkpoint()))])

        def refuse(record: CheckpointRecord) -> CheckpointRecord:
            raise UserError(record.path)

        with pytest.raises(UserError, match="first"):
            await store.update_checkpoint(a_checkpoint().path, refuse)
        assert await store.get_checkpoint(a_checkpoint().path) == a_checkpoint()

    # sizes

    async def test_values_are_held_up_to_a_limit_that_the_store_states(self, store: RequestStore) -> None:
        """Nothing compresses them. The limit itself may be too much for a test."""
        assert store.max_value_bytes >= 1 << 20
        size = min(store.max_value_bytes, 4 << 20) - 4096  # for what surrounds an array
        payload = random.Random(1).randbytes(size)
        request_id = await store.submit(a_sample(payload=payload))
        (claimed,) = await claim_records(store, await lease_of(store), 1)
        assert claimed.payload == payload
        output = ForwardBackwardOutput(loss_fn_outputs=({"x": np.frombuffer(payload, np.uint8)},), metrics={})
        await complete(store, [done(request_id, output)])
        found = await store.get_operation(request_id)
        assert found.result == encode_result(output)[1]

    async def test_an_operation_may_count_as_a_success_whose_result_is_lost(self, store: RequestStore) -> None:
        """A recovery runs it again, because it has changed its model."""
        await a_model(store)
        request_id = await store.submit(an_operation(seq_id=1))
        await claim(store)
        lost = Failed(message="too large")
        await complete(store, [Completion(request_id=request_id, result=lost, applied=True)])
        assert await state_of(store, request_id) == OperationState.SUCCEEDED
        assert await failure_of(store, request_id) == lost
        assert [each.seq_id for each in await store.replayable("s1:train:0", after_seq_id=0, limit=9)] == [1]

    # secrets

    async def test_a_secret_is_made_once_for_everybody(
        self, store: RequestStore, other: RequestStore, make_store: MakeStore
    ) -> None:
        made = await asyncio.gather(*[each.secret("tokens") for each in (store, other) * 5])
        assert len(set(made)) == 1
        assert len(made[0]) == 32
        assert await store.secret("links") != made[0]
        again = make_store()
        await again.open()
        try:
            assert await again.secret("tokens") == made[0]
        finally:
            await again.close()

    # housekeeping

    async def test_pruned_results_are_known_to_have_existed(self, store: RequestStore) -> None:
        created = await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        pending = await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(first)])
        await store.add_recovery_point(await lease_of(store), a_recovery_point(1), keep=2)
        assert await store.prune(NOW) == 0
        assert await store.prune(datetime.now(UTC) + timedelta(hours=1)) == 2
        for request_id in (created, first):
            with pytest.raises(ResultExpiredError, match=request_id):
                await store.get_operation(request_id)
        with pytest.raises(ResultExpiredError, match="seq_id 1"):
            await store.submit(an_operation(seq_id=1))
        with pytest.raises(NotFoundError):
            await store.get_operation(first.upper())
        assert await state_of(store, pending) == OperationState.RUNNING
        assert await claim(store) == []
        second = await store.submit(an_operation(seq_id=2))
        assert await claim(store) == [second]

    async def test_a_failed_pass_stays_until_its_window_ends(self, store: RequestStore) -> None:
        """Recovery points do not say that the step after it is to be discarded."""
        await a_model(store)
        for seq_id, kind in ((1, "forward_backward"), (2, "forward_backward")):
            await store.submit(
                an_operation(seq_id=seq_id, kind=kind, refused=Failed(message="no") if seq_id == 1 else None)
            )
        await complete(store, [done(request_id) for request_id in await claim(store)])
        await store.add_recovery_point(await lease_of(store), a_recovery_point(2), keep=2)
        later = datetime.now(UTC) + timedelta(hours=1)
        assert await store.prune(later) == 2
        failed = await store.failed_pass("s1:train:0", after_seq_id=None, before_seq_id=3)
        assert failed is not None
        assert failed.seq_id == 1
        step = await store.submit(an_operation(seq_id=3))
        await claim(store)
        await complete(store, [Completion(request_id=step, result=Failed(message="discarded"), applied=True)])
        await store.add_recovery_point(await lease_of(store), a_recovery_point(3), keep=1)
        assert await store.prune(later) == 2
        assert await store.failed_pass("s1:train:0", after_seq_id=None, before_seq_id=4) is None

    async def test_everything_outlives_a_restart(self, store: RequestStore, make_store: MakeStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        await store.close()
        again = make_store()
        await again.open()
        try:
            assert await claim(again) == [first]
            assert await again.submit(an_operation(seq_id=1)) == first
            assert (await again.get_run("s1:train:0")).next_seq_id == 2
        finally:
            await again.close()
