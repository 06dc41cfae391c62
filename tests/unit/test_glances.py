"""Operations with small results are looked up without a reader, and everything else is as if there were no glances."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from tinsmith import operations as ops
from tinsmith.errors import StoreError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.group_commit import Reader
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import log
from tinsmith.store import Completion, OperationState, StoreContext
from tinsmith.store.codec import decode_result
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.store_records import BASE, a_sample, claim_records


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that readers were asked for."""
    seen: list[str] = []
    read = Reader.read

    async def noting(reader: Reader, function: object, *args: object, **options: object) -> object:
        seen.append(getattr(function, "__name__", ""))
        return await read(reader, function, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Reader, "read", noting)
    return seen


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def test_small_results_need_no_reader_and_large_ones_do(store: SqlStore, asked: list[str]) -> None:
    lease = await take_over(store, BASE)
    for message, readers in (("", []), (secrets.token_hex(2 * log.SMALL_BYTES), ["get"])):
        request_id = await store.submit(a_sample(len(message)))
        assert (await store.get_operation(request_id)).state is OperationState.QUEUED
        [claimed] = await claim_records(store, lease, 1)
        await store.complete(lease, [Completion(request_id=request_id, result=ops.Failed(message=message))])
        asked.clear()
        found = await store.get_operation(request_id)
        assert asked == readers
        assert (found.request_id, found.state) == (claimed.request_id, OperationState.FAILED)
        assert found.result is not None
        assert found.result_kind is not None
        assert decode_result(found.result_kind, found.result) == ops.Failed(message=message)


async def test_what_a_glance_cannot_tell_a_reader_does(
    store: SqlStore, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = await store.submit(a_sample(0))

    def failing(_connection: object, _request_id: str) -> None:
        raise OperationalError("SELECT", None, Exception("locked"))

    monkeypatch.setattr(log, "glance", failing)
    assert (await store.get_operation(request_id)).state is OperationState.QUEUED
    assert asked == ["get"]
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.get_operation(request_id)
