"""Tokens on their way to clients that read them while they are drawn."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from tinsmith.engine.token_streams import TokenTeller
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import DrawnTokens, OperationRecord, OperationState, StoreContext

RECORD = OperationRecord(
    request_id="r",
    base_model="toy",
    kind="sample",
    tenant="t",
    session_id="s",
    subject_id="s:sample:0",
    seq_id=7,
    ordered=False,
    num_tokens=10,
    state=OperationState.RUNNING,
    created_at=datetime.fromtimestamp(0, UTC),
)


async def test_the_first_tokens_are_told_at_once_and_the_next_ones_together(tmp_path: Path) -> None:
    told, second = asyncio.Queue[DrawnTokens](), asyncio.Event()

    async def wait(_seconds: float) -> None:
        """Takes the place of the time between two tellings."""
        await second.wait()

    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    teller = TokenTeller(store, pause=wait)
    telling = asyncio.create_task(teller.run())
    with store.drawn("s:sample:0", 7, told.put_nowait), teller.telling(RECORD) as tell:
        tell(0, 0, [1])
        assert (await told.get()).tokens == [1]
        tell(0, 1, [2])
        tell(0, 2, [3, 4])
        second.set()
        piece = await told.get()
        assert (piece.first, piece.tokens) == (1, [2, 3, 4])
    telling.cancel()
    await store.close()
