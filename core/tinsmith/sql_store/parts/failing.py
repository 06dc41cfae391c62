"""Failing what waits behind a gap, some operations at a time, so that other writes get their turn in between."""

from datetime import datetime

from tinsmith.sql_store.transactions import gaps
from tinsmith.sql_store.transactions.writer import Writer


async def fail_in_parts(writer: Writer, model_id: str, older_than: datetime | None) -> int:
    """Return how many failed. Without `older_than`, only what waits for ever fails."""
    failed, more = 0, True
    while more:
        number, more = await writer.write_locking([model_id], gaps.fail_some, model_id, older_than)
        failed += number
    return failed
