"""Gaps: seq_ids that have not arrived, and the operations that wait behind them.

Giving up a gap takes several transactions, because thousands of operations may wait behind it. The first one decides:
it moves the model's `next_seq_id` past everything that fails. From then on the gap can no longer be filled, and nothing
of the model can be claimed. The others fail the operations, some at a time, and the last one lets the model continue.
Any process can go on where another stopped.

The end of a session is such a decision too (`sessions.py`): nothing will fill the gap, so the UnloadModel takes the
missing seq_id, and later operations fail in chunks. Once a model is lost or unloaded, everything behind a gap fails.
"""

from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import Connection

from tinsmith.operations import Failed
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import CHUNK, Query
from tinsmith.sql_store.subjects import log, models, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.transaction import Transaction, the_model
from tinsmith.store import SILENCE, RunState
from tinsmith.store.refusals import behind_a_gap, lost
from tinsmith.store.wakeups import work_topic


class _Heard(NamedTuple):
    heard_since: datetime
    last_seen_at: datetime


_LARGEST: Final = (1 << 63) - 1
_EARLY = "operations.state = 'queued' AND operations.early"
_EARLY_OF_RUN = (
    "SELECT 1 FROM operations WHERE operations.base_model = runs.base_model "
    f"AND operations.subject_id = runs.model_id AND {_EARLY}"
)
# What is asked of the run alone comes first: of a model that goes on, no operation is looked at.
_LEFT_BEHIND = (
    f"(runs.unload_seq_id IS NOT NULL AND EXISTS ({_EARLY_OF_RUN} AND operations.seq_id > runs.unload_seq_id) "
    f"OR runs.state IN ('lost', 'unloaded') AND EXISTS ({_EARLY_OF_RUN}))"
)
# The models that have something waiting behind a gap are found with one look into the index for each.
_SUBJECT = f"SELECT subject_id FROM operations WHERE base_model = :base_model AND {_EARLY}"
_MODELS = Query(
    f"WITH RECURSIVE found(model) AS (SELECT ({_SUBJECT} ORDER BY subject_id LIMIT 1) UNION ALL "
    f"SELECT ({_SUBJECT} AND subject_id > found.model ORDER BY subject_id LIMIT 1) FROM found "
    f"WHERE found.model IS NOT NULL) SELECT found.model AS model_id FROM found WHERE EXISTS ({_SUBJECT} "
    "AND subject_id = found.model AND created_at < :older_than) "
    f"OR EXISTS (SELECT 1 FROM runs WHERE runs.model_id = found.model AND {_LEFT_BEHIND})",
    str,
)
_ENDED_OF = Query(f"SELECT model_id FROM runs WHERE session_id = :session AND {_LEFT_BEHIND}", str)
_BEHIND = f"subject_id = :model AND seq_id > :arrived AND {_EARLY}"
_LAST_LATE = Query(
    f"SELECT seq_id FROM operations WHERE {_BEHIND} AND created_at < :older_than ORDER BY seq_id DESC LIMIT 1", int
)
_BUSY = Query(
    "SELECT id FROM operations WHERE subject_id = :model AND seq_id > :applied AND seq_id <= :arrived "
    "AND state IN ('queued', 'running')",
    int,
)
_SOME_BEHIND = Query(
    f"{log.OPERATION} WHERE {_BEHIND} AND seq_id < :before ORDER BY seq_id LIMIT :at_most", log.Operation
)
_HEARD = Query("SELECT FIELDS FROM sessions WHERE session_id = :session", _Heard)


async def fail_gaps(connections: Connections, base_model: str, *, older_than: datetime) -> int:
    failed = 0
    for model_id in await connections.reader.read(waiting_since, base_model, older_than):
        failed += await fail_in_chunks(connections, model_id, older_than)
    return failed


async def fail_in_chunks(connections: Connections, model_id: str, older_than: datetime | None) -> int:
    """Fail what waits behind a gap, some operations at a time, so that other writes come in between.

    Return how many failed. Without `older_than`, only what waits for ever fails.
    """
    failed, more = 0, True
    while more:
        number, more = await connections.durable.write(fail_some, model_id, older_than)
        failed += number
    return failed


def waiting_since(connection: Connection, base_model: str, older_than: datetime) -> list[str]:
    """Return the models with operations behind a gap that have waited since before then, or wait for ever."""
    return _MODELS.all(connection, base_model=base_model, older_than=older_than)


def left_by(connection: Connection, session_id: str) -> list[str]:
    """Return the models of an ended session that have something waiting behind a gap."""
    return _ENDED_OF.all(connection, session=session_id)


@locks(the_model)
def fail_some(tx: Transaction, model_id: str, older_than: datetime | None) -> tuple[int, bool]:
    """Fail some operations behind a gap that wait for ever, or have waited since before `older_than`.

    Return how many failed, and whether there are more.
    """
    run = models.locked(tx.connection, model_id)
    if run is None:
        return 0, False
    if submitting.fails_a_gap(run):
        return _fail_gap(tx, run)
    if run.unload_seq_id is not None:
        return _fail(tx, run, run.unload_seq_id)
    if not run.is_live:
        return _fail(tx, run, run.arrived_seq_id + 1)
    if older_than is None or run.has_no_place or not _give_up(tx, run, older_than):
        return 0, False
    return _fail_gap(tx, run)


def _fail_gap(tx: Transaction, run: Run) -> tuple[int, bool]:
    failed, more = _fail(tx, run, run.arrived_seq_id + 1, before=run.next_seq_id)
    if more:
        return failed, True
    # now: once nothing early is left, `waiting_since` no longer finds the model
    run.arrived_seq_id = run.next_seq_id - 1
    submitting.let_follow(tx.connection, run)
    models.write(tx.connection, run)
    tx.wake.append(work_topic(run.base_model))
    return failed, run.unload_seq_id is not None or not run.is_live


def _give_up(tx: Transaction, run: Run, older_than: datetime) -> bool:
    """Move the model past the gap and past the last operation that has waited for too long, if there is one.

    Not while an operation before the gap is queued or runs: if it were requeued, the model would reach the gap again.
    """
    late = {"model": run.model_id, "arrived": run.arrived_seq_id, "older_than": older_than}
    last = _LAST_LATE.first(tx.connection, **late)
    if last is None or _is_busy(tx.connection, run) or not _was_heard(tx, run, since=older_than):
        return False
    run.next_seq_id, run.applied_seq_id = last + 1, last
    models.write(tx.connection, run)
    return True


def _is_busy(connection: Connection, run: Run) -> bool:
    before = {"model": run.model_id, "applied": run.applied_seq_id, "arrived": run.arrived_seq_id}
    return _BUSY.first(connection, **before) is not None


def _was_heard(tx: Transaction, run: Run, since: datetime) -> bool:
    """Return whether heartbeats of the client have arrived all the time, so that it could have sent what is missing."""
    session = _HEARD.first(tx.connection, session=run.session_id)
    return session is None or (session.heard_since < since and session.last_seen_at >= tx.now - SILENCE)


def _fail(tx: Transaction, run: Run, missing: int, *, before: int = _LARGEST) -> tuple[int, bool]:
    """Fail some operations behind the missing seq_id. Return how many failed, and whether there are more."""
    behind = {"model": run.model_id, "arrived": missing, "before": before}
    rows = _SOME_BEHIND.all(tx.connection, **behind, at_most=CHUNK)
    log.fail(tx, rows, _failure(run, missing))
    more = len(rows) == CHUNK and _SOME_BEHIND.first(tx.connection, **behind, at_most=1) is not None
    return len(rows), more


def _failure(run: Run, missing: int) -> Failed:
    if run.state == RunState.LOST:
        return lost(run.model_id, run.state_reason)
    return behind_a_gap(run.model_id, missing, run.state, unloads=run.unload_seq_id == missing)
