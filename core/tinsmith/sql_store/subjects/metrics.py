"""What operations measured and clients logged: a row for each operation, written with its result."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.transaction import Transaction, the_model
from tinsmith.store import OF_CLIENT, Measured, MetricsRow
from tinsmith.store.metrics import decode_values, encode_values, merged, row_bytes
from tinsmith.store.refusals import missing
from tinsmith.store.wakeups import metrics_topic

_FIRST: Final = -2  # below every seq_id


class _Row(NamedTuple):
    step: int
    seq_id: int
    time: datetime
    numbers: bytes


INSERT = Change(insert_into("metrics", "model_id", *_Row._fields))
_PUT = Change(INSERT.text + " ON CONFLICT (model_id, step, seq_id) DO UPDATE SET time = :time, numbers = :numbers")
_ROWS = "SELECT FIELDS FROM metrics WHERE model_id = :model AND"
_READ = Query(f"{_ROWS} (step, seq_id) > (:step, :after) ORDER BY step, seq_id LIMIT :at_most", _Row)
_OF_CLIENT = Query(f"{_ROWS} step = :step AND seq_id = {OF_CLIENT}", _Row)
_WRITTEN = Query("SELECT metric_bytes FROM runs WHERE model_id = :model", int)
_WRITE_MORE = Change("UPDATE runs SET metric_bytes = metric_bytes + :more WHERE model_id = :model")
DELETE_OF_DELETED = Change(
    "DELETE FROM metrics WHERE model_id IN :keys "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.model_id = metrics.model_id)"
)


Row = dict[str, Any]  # Any: values of the columns


def row_of(tx: Transaction, model_id: str, seq_id: int, measured: Measured) -> Row:
    """Return the row of what an operation measured, for `INSERT`."""
    tx.wake.append(metrics_topic(model_id))
    numbers = encode_values(measured.values)
    return {"model_id": model_id, "step": measured.step, "seq_id": seq_id, "time": tx.now, "numbers": numbers}


@locks(the_model)
def log(tx: Transaction, model_id: str, points: Sequence[Measured]) -> int:
    """Write the steps whose values change."""
    connection, more = tx.connection, 0
    written(connection, model_id)
    for point in points:
        found = _OF_CLIENT.first(connection, model=model_id, step=point.step)
        before = found.numbers if found is not None else b""
        numbers = encode_values(merged(decode_values(before) if before else {}, point))
        if numbers != before:
            _PUT.run(connection, model_id=model_id, step=point.step, seq_id=OF_CLIENT, time=tx.now, numbers=numbers)
            more += row_bytes(model_id, numbers)
    if more:
        _WRITE_MORE.run(connection, model=model_id, more=more)
        tx.wake.append(metrics_topic(model_id))
    return written(connection, model_id)


def read(
    connection: Connection, model_id: str, *, from_step: int = 0, after: int | None = None, limit: int
) -> list[MetricsRow]:
    rows = _READ.all(
        connection, model=model_id, step=from_step, after=_FIRST if after is None else after, at_most=limit
    )
    return [
        MetricsRow(step=each.step, seq_id=each.seq_id, time=each.time, values=decode_values(each.numbers))
        for each in rows
    ]


def written(connection: Connection, model_id: str) -> int:
    """Return how many bytes of metrics were ever written for a run."""
    found = _WRITTEN.first(connection, model=model_id)
    if found is None:
        raise missing("model", model_id)
    return found


async def wait_for_metrics(connections: Connections, model_id: str, *, known: int, timeout_s: float) -> int:
    return await connections.wakeups.read_until(
        lambda found: found > known,
        partial(connections.reader.read, written, model_id),
        topic=metrics_topic(model_id),
        timeout_s=timeout_s,
    )
