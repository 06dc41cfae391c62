"""The part of the store contract about the audit log."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tinsmith.errors import NotFoundError
from tinsmith.store import AuditEntry, CheckpointWritten, IssuedKey, RequestStore
from tinsmith.testing.store_records import NOW, a_checkpoint, a_model, a_session, an_operation, claim, complete, done
from tinsmith.testing.store_suite import StoreSuite

_BY = {"actor": "ann"}
_SECOND = timedelta(seconds=1)


async def _read(store: RequestStore, resource: str | None = None) -> list[AuditEntry]:
    now, hour = datetime.now(UTC), timedelta(hours=1)
    return await store.read_audit("ann", since=now - hour, until=now + hour, resource=resource, limit=99)


class AuditContract(StoreSuite):
    async def test_what_is_done_is_in_the_audit_log_once(self, store: RequestStore) -> None:
        await a_model(store, "s3:train:0")
        for session_id in ("s1", "s2"):  # the second is a repeat
            await store.create_session(a_session(session_id), idempotency_key="k", by=_BY)
        await store.add_api_key(IssuedKey(key_id="k1", tenant="ann", name="laptop", created_at=NOW), by=_BY)
        for tenant in ("bob", None, None):
            await store.delete_api_key("k1", tenant=tenant, by={"actor": "root"})
        for _ in range(2):
            await store.end_session("s1", "success", None, by=_BY)
        assert [(each.event, each.details) for each in await _read(store)] == [
            ("session_create", {"session_id": "s3"}),
            ("session_create", {"session_id": "s1", **_BY}),
            ("key_create", {"made_key_id": "k1", "name": "laptop", **_BY}),
            ("key_delete", {"deleted_key_id": "k1", "name": "laptop", "actor": "root"}),
            ("session_end", {"session_id": "s1", "reason": "success", **_BY}),
        ]

    async def test_what_is_done_to_checkpoints_is_in_the_audit_log(self, store: RequestStore) -> None:
        await a_model(store)
        record = a_checkpoint()
        await store.add_checkpoint(record)
        await store.update_checkpoint(record.path, lambda each: each, by=_BY)
        await store.update_checkpoint(record.path, lambda each: replace(each, public=True), by=_BY)
        await store.update_checkpoint(record.path, lambda each: replace(each, public=False, expires_at=NOW), by=_BY)
        await store.delete_version(await store.get_checkpoint(record.path), by=_BY)
        with pytest.raises(NotFoundError):
            await store.delete_version(record, by=_BY)
        about = {"tinker_path": record.path, "model_id": record.model_id}
        assert [(each.event, each.details) for each in await _read(store, "checkpoint")] == [
            ("checkpoint_create", about),
            ("checkpoint_publish", {**about, **_BY}),
            ("checkpoint_unpublish", {**about, **_BY}),
            ("checkpoint_set_ttl", {**about, "expires_at": NOW.isoformat(), **_BY}),
            ("checkpoint_delete", {**about, **_BY}),
        ]

    async def test_a_save_is_in_the_audit_log_with_its_result(self, store: RequestStore) -> None:
        await a_model(store)
        request_id = await store.submit(an_operation(seq_id=1))
        await claim(store)
        assert await _read(store, "checkpoint") == []
        await complete(store, [done(request_id, None, CheckpointWritten(record=a_checkpoint()))])
        assert [each.event for each in await _read(store, "checkpoint")] == ["checkpoint_create"]

    async def test_a_move_to_another_project_is_in_the_audit_log_once(self, store: RequestStore) -> None:
        await store.create_session(a_session("s1", project_id="a"), idempotency_key=None)
        for project_id in ("b", "b", None):
            await store.update_session("s1", project_id=project_id, by=_BY)
        about = {"session_id": "s1", **_BY}
        assert [each.details for each in await _read(store, "project")] == [
            {"from_project_id": "a", "project_id": "b", **about},
            {"from_project_id": "b", "project_id": "", **about},
        ]

    async def test_a_sign_in_that_has_ended_is_known_until_it_would_have_ended_by_itself(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        now, hour = datetime.now(UTC), timedelta(hours=1)
        for _ in range(2):
            await store.end_login("a", tenant="ann", until=now + hour, by=_BY)
        await store.end_login("b", tenant="ann", until=now - hour, by=_BY)
        assert [await other.ended_login(name) for name in ("a", "c")] == [now + hour, None]
        await other.end_login("c", tenant="ann", until=now + hour, by=_BY)
        assert [await store.ended_login(name) for name in ("a", "b", "c")] == [now + hour, None, now + hour]
        for hours in (2, 1):
            await store.end_login("a", tenant="ann", until=now + hours * hour, by=_BY)
        assert await other.ended_login("a") == now + 2 * hour, "what ends everything of an account may do so again"
        assert [(each.event, each.details) for each in await _read(store, "user")] == [("user_logout", _BY)] * 4

    async def test_the_audit_log_is_read_by_tenant_time_and_page(self, store: RequestStore) -> None:
        of = [("ann", "key_create"), ("", "access_refuse"), ("ann", "keys_other"), ("ann", "key_delete")]
        first, second, third, fourth = (
            AuditEntry(at=NOW + number * _SECOND, tenant=tenant, event=event, details={"number": str(number)})
            for number, (tenant, event) in enumerate(of)
        )
        for each in (second, first, third, fourth):
            await store.add_audit_entry(each)
        end = NOW + 4 * _SECOND
        assert await store.read_audit(None, since=NOW, until=end, limit=9) == [first, second, third, fourth]
        assert await store.read_audit("ann", since=NOW, until=end, limit=1, offset=1) == [third]
        assert await store.read_audit("ann", since=NOW, until=end, resource="key", limit=9) == [first, fourth]
        assert await store.read_audit(None, since=second.at, until=third.at, limit=9) == [second]
        assert [await store.prune_audit(third.at) for _ in range(2)] == [2, 0]
        assert await store.read_audit(None, since=NOW, until=end, limit=9) == [third, fourth]
