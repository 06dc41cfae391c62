"""Operations with small results are looked up without a reader, and everything else is as if there were no glances."""

import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from tinsmith import operations as ops
from tinsmith.errors import StoreError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import log
from tinsmith.store import Completion, OperationState, StoreContext
from tinsmith.store.codec import decode_result
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.store_records import BASE, a_sample, claim_records


@pytest.fixture
def told() -> Iterator[list[Callable[[bool], None]]]:
    """Who is told of each statement before it is executed, and whether a reader executes it, in a thread of its own."""
    ours, listeners = threading.get_ident(), list[Callable[[bool], None]]()

    def note(*_: object) -> None:
        for each in listeners:
            each(threading.get_ident() != ours)

    event.listen(Engine, "before_cursor_execute", note)
    yield listeners
    event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def test_small_results_need_no_reader_and_large_ones_do(
    store: SqlStore, told: list[Callable[[bool], None]]
) -> None:
    lease = await take_over(store, BASE)
    for message, by_reader in (("", {False}), (secrets.token_hex(2 * log.SMALL_BYTES), {False, True})):
        request_id = await store.submit(a_sample(len(message)))
        assert (await store.get_operation(request_id)).state is OperationState.QUEUED
        [claimed] = await claim_records(store, lease, 1)
        await store.complete(lease, [Completion(request_id=request_id, result=ops.Failed(message=message))])
        seen: list[bool] = []
        told[:] = [seen.append]
        found = await store.get_operation(request_id)
        told.clear()
        assert set(seen) == by_reader
        assert (found.request_id, found.state) == (claimed.request_id, OperationState.FAILED)
        assert found.result is not None
        assert found.result_kind is not None
        assert decode_result(found.result_kind, found.result) == ops.Failed(message=message)


async def test_what_a_glance_cannot_tell_a_reader_does(store: SqlStore, told: list[Callable[[bool], None]]) -> None:
    request_id = await store.submit(a_sample(0))

    def fail(by_reader: bool) -> None:
        if not by_reader:
            raise OperationalError("SELECT", None, Exception("locked"))

    told.append(fail)
    assert (await store.get_operation(request_id)).state is OperationState.QUEUED
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.get_operation(request_id)
