"""The line of the log that says what an engine has done, and what waits."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinsmith.figures import OPERATION_SECONDS, TOKENS, Figures
from tinsmith.processes.throughput import Throughput
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import RequestStore, StoreContext
from tinsmith.testing.store_records import BASE, a_model, a_sample, claim, complete, done


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RequestStore]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    await a_model(store)
    yield store
    await store.close()


async def test_a_line_while_there_is_work_and_none_otherwise(
    store: RequestStore, caplog: pytest.LogCaptureFixture
) -> None:
    figures, now_s = Figures(), 0.0
    figures.count(TOKENS, 1e6, "trained")  # before it began
    throughput = Throughput(BASE, store, figures, clock=lambda: now_s)
    with caplog.at_level(logging.INFO):
        await store.submit(a_sample(0))
        await store.submit(a_sample(1))
        await claim(store, 1)
        figures.count(TOKENS, 100, "trained")
        figures.count(TOKENS, 30, "sampled")
        for kind, outcome in (("sample", "success"), ("forward", "user"), ("sample", "success")):
            figures.observe(OPERATION_SECONDS, 0.1, kind, outcome)
        now_s = 10.0
        await throughput.log()
        assert caplog.messages == [f"{BASE}: 10 tokens/s trained, 3 sampled; 3 operations in 10 s, 1 running, 1 queued"]
        now_s = 20.0
        await throughput.log()
        assert caplog.messages[1:] == [
            f"{BASE}: 0 tokens/s trained, 0 sampled; 0 operations in 10 s, 1 running, 1 queued"
        ]
        caplog.clear()
        running = [await store.submit(a_sample(number)) for number in (0, 1)]  # repeats, which find the first ones
        await claim(store)
        await complete(store, [done(each) for each in running])
        now_s = 30.0
        await throughput.log()
    assert caplog.messages == []
