"""What a claim, a submit and the question why it waits look at: neither what else waits nor what is missing.

Counts steps and rows, not time.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text

from tinsmith.operations import OptimStepOutput
from tinsmith.sql_store.statements import Change, insert_into
from tinsmith.sql_store.subjects import claiming, completing, gaps, log, models, requests, submitting
from tinsmith.sql_store.tables import Table
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import ClaimRoom, Completion, Lease, Measured, PendingCounts, Waiting
from tinsmith.testing.store_records import LORA, a_sample, an_operation

BASE = "org/base-model"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LEASE = Lease(base_model=BASE, engine_id="engine-1", epoch=1, duration_s=3600.0)
OTHER_LEASE = Lease(base_model="org/other", engine_id="engine-2", epoch=1, duration_s=3600.0)
ROOM = ClaimRoom(operations=32, num_bytes=1 << 30)
ROOMS = {"training": ROOM, "samples": ROOM}


def fill(connection: Connection, *, waiting: int, missing: int) -> None:
    """Let a hog and a mouse have models and samples, the hog with so many waiting, and so many behind a missing one."""
    until = NOW + timedelta(days=36500)
    for lease in (LEASE, OTHER_LEASE):
        values = {"base_model": lease.base_model, "epoch": lease.epoch, "engine_id": lease.engine_id}
        insert(connection, "leases", [{**values, "expires_at": until}])
    rows: list[dict[str, Any]] = []
    for tenant, number in (("hog", waiting), ("mouse", 5)):
        insert(connection, "sessions", [_session(tenant)])
        insert(connection, "runs", [_run(tenant, "ready", arrived=number), _run(tenant, "stuck", arrived=0)])
        for seq_id in range(1, number + 1):
            rows.append(_operation(tenant, "ready", seq_id))
            rows.append(_operation(tenant, "sampling", seq_id, ordered=False))
    rows += [_operation("hog", "stuck", seq_id, early=True) for seq_id in range(2, missing + 2)]
    rows = [{**row, "id": number, "arrival": number, "request_id": f"r{number}"} for number, row in enumerate(rows, 1)]
    insert(connection, "operations", rows)
    insert(connection, "payloads", [{"operation_id": row["id"], "payload": b"x"} for row in rows])


def insert(connection: Connection, table: str, rows: list[dict[str, Any]]) -> None:
    Change(insert_into(table, *rows[0])).run_each(connection, rows)


def _session(tenant: str) -> dict[str, Any]:
    return {
        "session_id": tenant,
        "tenant": tenant,
        "created_at": NOW,
        "last_seen_at": NOW,
        "heard_since": NOW - timedelta(hours=1),
        "tags": (),
        "described_bytes": 0,
    }


def _run(tenant: str, name: str, *, arrived: int) -> dict[str, Any]:
    return {
        "model_id": f"{tenant}:{name}",
        "session_id": tenant,
        "tenant": tenant,
        "base_model": BASE,
        "lora": LORA,
        "created_at": NOW,
        "last_request_at": NOW,
        "described_bytes": 0,
        "state": "ready",
        "next_seq_id": 1,
        "applied_seq_id": 0,
        "arrived_seq_id": arrived,
        "pruned_seq_id": -1,
        "rebuilds": 0,
        "steps": 0,
        "metric_bytes": 0,
        "rollout_bytes": 0,
    }


def _operation(tenant: str, name: str, seq_id: int, *, ordered: bool = True, early: bool = False) -> dict[str, Any]:
    return {
        "base_model": BASE,
        "kind": "optim_step" if ordered else "sample",
        "tenant": tenant,
        "session_id": tenant,
        "subject_id": f"{tenant}:{name}",
        "seq_id": seq_id,
        "ordered": ordered,
        "early": early,
        "num_tokens": 1,
        "num_bytes": 0,
        "payload_bytes": 0,
        "digest": b"",
        "state": "queued",
        "created_at": NOW,
        "attempts": 0,
        "interruptions": 0,
        "alone": False,
        "cancel_told": True,
    }


def claim(connection: Connection) -> None:
    """Do what a store does for `claim`."""
    everyone = {(ordered, tenant) for ordered in (True, False) for tenant in ("hog", "mouse")}
    assert set(claiming.queues(connection, BASE)) == everyone
    claimed = claiming.claim(Transaction(connection, NOW), LEASE, **ROOMS)
    assert len(claimed.records) == 2 * ROOM.operations  # the mouse has 5 of each sort, the hog uses what is left


def look_for_suspects(connection: Connection) -> None:
    assert not claiming.any_suspect(connection, BASE)
    assert claiming.take_suspect(Transaction(connection, NOW), LEASE) is None


def look_for_gaps(connection: Connection) -> None:
    assert gaps.waiting_since(connection, BASE, NOW - timedelta(hours=1)) == []


def fail_some_of_a_gap(connection: Connection) -> None:
    late = NOW + timedelta(hours=1)
    assert gaps.waiting_since(connection, BASE, late) == ["hog:stuck"]
    assert gaps.fail_some(Transaction(connection, NOW), "hog:stuck", late) == (500, True)


def fail_a_gap_of_exactly_one_chunk(connection: Connection) -> None:
    """Nothing early is left, so nobody would find the model again."""
    late = NOW + timedelta(hours=1)
    assert gaps.fail_some(Transaction(connection, NOW), "hog:stuck", late) == (500, False)
    assert gaps.waiting_since(connection, BASE, late) == []
    run = models.find(connection, "hog:stuck")
    assert run is not None
    assert (run.arrived_seq_id, run.next_seq_id) == (501, 502)


def submit(connection: Connection) -> None:
    for tenant, seq_id in (("hog", 100_001), ("mouse", 6)):
        submitting.submit(Transaction(connection, NOW), a_sample(seq_id, f"{tenant}:sampling", tenant=tenant))
    submitting.submit(Transaction(connection, NOW), an_operation("mouse:ready", 6, tenant="mouse"))


def count_pending(connection: Connection) -> None:
    """Before each submit, a server may ask how much its tenant has waiting."""
    arrived = tx(connection)
    arrived.count(log.PENDING, ("hog", "sample", False), 1, 7, 7)
    arrived.finish()
    assert requests.pending(connection, "hog") == PendingCounts(by_kind={"sample": 1}, num_bytes=7)


def ask_why_it_waits(connection: Connection) -> None:
    last = text("SELECT max(request_id) FROM operations WHERE subject_id = 'mouse:sampling' AND seq_id = 5")
    assert requests.waiting(connection, connection.execute(last).scalar_one()).num_ahead == 4


def ask_why_a_hog_waits(connection: Connection) -> None:
    last = text("SELECT request_id FROM operations WHERE subject_id = 'hog:sampling' ORDER BY seq_id DESC LIMIT 1")
    assert requests.waiting(connection, connection.execute(last).scalar_one()).num_ahead == Waiting.MANY_AHEAD


def tx(connection: Connection) -> Transaction:
    return Transaction(connection, NOW)


WORK = [claim, look_for_suspects, look_for_gaps, submit, count_pending, ask_why_it_waits]


@dataclass
class Seen:
    """The statements that a connection executed, and the steps that SQLite took for them."""

    statements: list[tuple[str, Any]] = field(default_factory=list)
    steps: int = 0


@contextmanager
def seen(connection: Connection) -> Iterator[Seen]:
    found = Seen()

    def note(_: object, __: object, statement: str, parameters: object, *___: object) -> None:
        found.statements.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    yield found
    event.remove(connection, "before_cursor_execute", note)


def create_tables(engine: Engine, *, last_index_first: bool) -> None:
    """Create the indexes in a fixed order: SQLite decides by it which of two equally good ones it takes."""
    Table.metadata.create_all(engine)
    with engine.begin() as connection:
        indexes = text("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL ORDER BY name")
        for name, sql in sorted(connection.execute(indexes).all(), reverse=last_index_first):
            connection.exec_driver_sql(f"DROP INDEX {name}")
            connection.exec_driver_sql(sql)


def in_sqlite(
    work: Callable[[Connection], object], *, waiting: int, missing: int, last_index_first: bool = False
) -> Seen:
    engine = create_engine("sqlite://")
    create_tables(engine, last_index_first=last_index_first)
    with engine.connect() as connection:
        fill(connection, waiting=waiting, missing=missing)
        driver: Any = connection.connection.driver_connection
        with seen(connection) as found:
            driver.set_progress_handler(lambda: setattr(found, "steps", found.steps + 1), 1)
            work(connection)
            driver.set_progress_handler(None, 1)
        for statement, parameters in found.statements:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            scans = [row.detail for row in plan if row.detail.startswith(("SCAN operations", "SCAN runs", "USE TEMP"))]
            assert scans == [], statement
    engine.dispose()
    return found


STATEMENTS: list[tuple[Callable[[Connection], object], int]] = [
    (lambda connection: submitting.submit(tx(connection), an_operation("mouse:ready", 6, tenant="mouse")), 6),
    (lambda connection: submitting.submit(tx(connection), a_sample(6, "mouse:sampling", tenant="mouse")), 4),
    (lambda connection: claiming.claim(tx(connection), LEASE, **ROOMS), 6),
    (lambda connection: claiming.claim(tx(connection), OTHER_LEASE, **ROOMS), 2),
]


@pytest.mark.parametrize(("work", "number"), STATEMENTS, ids=["optim_step", "sample", "claim", "claim of nothing"])
def test_hot_transactions_take_few_statements(work: Callable[[Connection], object], number: int) -> None:
    """Python takes longer for a statement than SQLite does."""
    assert len(in_sqlite(work, waiting=5, missing=0).statements) == number


@pytest.mark.parametrize("number", [1, 5])
def test_metrics_take_one_statement_of_a_transaction(number: int) -> None:
    def statements(measured: Measured | None) -> int:
        engine = create_engine("sqlite://")
        create_tables(engine, last_index_first=False)
        with engine.connect() as connection:
            fill(connection, waiting=5, missing=0)
            claimed = [each for each in claiming.claim(tx(connection), LEASE, **ROOMS).records if each.ordered][:number]
            ended = [
                Completion(request_id=each.request_id, result=OptimStepOutput(), measured=measured) for each in claimed
            ]
            with seen(connection) as found:
                completing.complete(tx(connection), LEASE, ended)
            written = connection.exec_driver_sql("SELECT count(*) FROM metrics").scalar_one()
        engine.dispose()
        assert written == (0 if measured is None else number)
        return len(found.statements)

    assert statements(Measured(step=0, values={"loss:sum": 1.0})) == statements(None) + 1


@pytest.mark.parametrize("last_index_first", [False, True])
@pytest.mark.parametrize("work", WORK)
def test_sqlite_takes_as_many_steps_whatever_waits_and_is_missing(
    work: Callable[[Connection], None], *, last_index_first: bool
) -> None:
    few = in_sqlite(work, waiting=40, missing=1, last_index_first=last_index_first)
    many = in_sqlite(work, waiting=1500, missing=1, last_index_first=last_index_first)
    gap = in_sqlite(work, waiting=40, missing=1500, last_index_first=last_index_first)
    assert few.steps == many.steps == gap.steps


@pytest.mark.thorough
@pytest.mark.parametrize("work", WORK)
def test_sqlite_takes_as_many_steps_with_a_hundred_thousand_waiting(work: Callable[[Connection], None]) -> None:
    steps = [in_sqlite(work, waiting=waiting, missing=missing).steps for waiting, missing in ((40, 1), (1000, 1000))]
    assert steps == [in_sqlite(work, waiting=50_000, missing=50_000).steps] * 2


def test_sqlite_counts_what_is_ahead_only_so_far() -> None:
    some, more = [in_sqlite(ask_why_a_hog_waits, waiting=waiting, missing=1).steps for waiting in (1100, 1500)]
    assert some == more


def test_sqlite_fails_a_gap_in_bounded_chunks() -> None:
    few = in_sqlite(fail_some_of_a_gap, waiting=40, missing=1000)
    more = in_sqlite(fail_some_of_a_gap, waiting=1500, missing=1500)
    assert more.steps - few.steps < 20 * 1500  # the last one that fails is looked for; its part fails
    assert len(more.statements) == len(few.statements)


def test_a_model_continues_with_the_last_chunk_of_a_gap_on_sqlite() -> None:
    in_sqlite(fail_a_gap_of_exactly_one_chunk, waiting=1, missing=500)


@pytest.fixture
def postgres_engine(postgres_url: str) -> Iterator[Engine]:
    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    Table.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_model_continues_with_the_last_chunk_of_a_gap_on_postgres(postgres_engine: Engine) -> None:
    with postgres_engine.begin() as connection:
        fill(connection, waiting=1, missing=500)
        fail_a_gap_of_exactly_one_chunk(connection)


def rows_visited(plan: dict[str, Any], table: str) -> int:
    """Count the rows of a table that a plan touched, including those that it threw away."""
    below = sum(rows_visited(each, table) for each in plan.get("Plans", []))
    if plan.get("Relation Name") != table:
        return below
    rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
    return below + round(rows * plan["Actual Loops"])


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_postgres_visits_as_many_rows_whatever_waits_and_is_missing(
    postgres_engine: Engine, work: Callable[[Connection], None]
) -> None:
    with postgres_engine.begin() as connection:
        fill(connection, waiting=1500, missing=1500)
        connection.execute(text("SELECT setval('operations_id_seq', (SELECT max(id) FROM operations))"))
        connection.execute(text("ANALYZE"))
    with postgres_engine.connect() as connection:
        with seen(connection) as found:
            work(connection)
        connection.rollback()
        visited = 0
        for statement, parameters in found.statements:
            if statement.split()[0] not in ("SELECT", "WITH"):
                continue
            explained = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            plan = (json.loads(explained) if isinstance(explained, str) else explained)[0]["Plan"]
            visited += rows_visited(plan, "operations")
        assert visited < 250
