"""What the store contract cannot see of PostgreSQL: starts at once, outages, commits whose answer is lost, wake-ups."""

import asyncio
import re
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError

from tinsmith.errors import ConfigError, ServerError
from tinsmith.sql_store.choose import diagnose, dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases import postgres
from tinsmith.sql_store.databases.notify_wakeups import NotifyWakeUps
from tinsmith.sql_store.databases.postgres import PostgresDatabase
from tinsmith.sql_store.migrate import schema_of_log
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import sessions
from tinsmith.sql_store.tables import Table
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import OperationState, RunState, RunStateChanged, StoreContext
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_records import NOW, a_model, a_sample, a_session, an_operation, claim, complete, done

pytestmark = pytest.mark.slow  # it starts PostgreSQL

WAIT_S = 300.0


def a_store(url: str, **config: object) -> SqlStore:
    config = {"url": url, "safety_poll_s": 600.0, **config}
    return SqlStore(SqlStoreConfig.model_validate(config), StoreContext(data_dir=Path("unused")))


def a_writer(url: str) -> PostgresDatabase:
    dialect = dialect_of(SqlStoreConfig(url=url), StoreContext(data_dir=Path("unused")))
    database = dialect.writer(durable=True)
    assert isinstance(database, PostgresDatabase)
    return database


async def test_processes_that_start_at_once_make_one_schema(postgres_url: str) -> None:
    stores = [a_store(postgres_url) for _ in range(3)]
    await asyncio.gather(*[store.open() for store in stores])
    request_id = await stores[0].submit(a_sample())
    assert (await stores[2].get_operation(request_id)).state == OperationState.QUEUED
    for store in stores:
        await store.close()
    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Table.metadata) == []
    engine.dispose()


async def test_a_crash_of_the_database_only_delays(own_postgres: Postgres) -> None:
    url = own_postgres.new_database()
    server, engine = a_store(url), a_store(url)
    await server.open()
    await engine.open()
    first = await server.submit(a_sample())
    assert await claim(engine) == [first]
    waiter = asyncio.create_task(server.wait_for(first, WAIT_S))
    await asyncio.to_thread(own_postgres.stop, signal.SIGKILL)
    writes = [asyncio.create_task(server.submit(a_sample(seq_id))) for seq_id in range(1, 5)]
    reading = asyncio.create_task(server.get_operation(first))
    completing = asyncio.create_task(complete(engine, [done(first)]))
    await asyncio.to_thread(own_postgres.start)
    assert (await reading).state in (OperationState.RUNNING, OperationState.SUCCEEDED)
    ids = await asyncio.gather(*writes)
    await completing
    assert (await waiter).state == OperationState.SUCCEEDED
    async with asyncio.timeout(WAIT_S):  # both listen again
        while not (claimed := await claim(engine)):
            await engine.wait_for_work("org/base-model", WAIT_S)
    assert sorted(claimed) == sorted(ids)
    waiter = asyncio.create_task(server.wait_for(ids[0], WAIT_S))
    await complete(engine, [done(ids[0])])
    assert (await waiter).state == OperationState.SUCCEEDED
    await server.close()
    await engine.close()


async def test_a_database_that_stays_away_is_named(own_postgres: Postgres) -> None:
    url = own_postgres.new_database()
    store = a_store(url, outage_s=0.1)
    await store.open()
    own_postgres.stop()
    with pytest.raises(ServerError, match=r"postgresql.*has not been reachable.*store\.url"):
        await store.submit(a_sample())
    with pytest.raises(ServerError, match="cannot open the database"):
        await a_store(url).open()
    own_postgres.start()
    await store.submit(a_sample())
    await store.close()


@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_whose_answer_is_lost_happens_once(postgres_url: str, committed: bool) -> None:
    """The connection breaks during the commit: the database itself says what became of it."""
    store = a_store(postgres_url)
    await store.open()
    database = a_writer(postgres_url)
    runs: list[str] = []

    def insert(connection: Connection) -> str:
        runs.append(f"s{len(runs)}")
        sessions.create(Transaction(connection, NOW), a_session(runs[-1]), idempotency_key=None)
        return runs[-1]

    def commit(connection: Connection) -> None:
        if committed or len(runs) > 1:
            connection.commit()
        if len(runs) == 1:
            raise OperationalError("COMMIT", {}, psycopg.OperationalError("the connection is lost"))

    last = await database.run(insert, commit=commit)
    assert runs == (["s0"] if committed else ["s0", "s1"])
    assert [session.session_id for session in await store.list_sessions(None, limit=9, offset=0)] == [last]
    await database.close()
    await store.close()


async def test_deadlocks_are_tried_again(postgres_url: str) -> None:
    store = a_store(postgres_url)
    await store.open()
    for session_id in ("s1", "s2"):
        await store.create_session(a_session(session_id), idempotency_key=None)
    databases = [a_writer(postgres_url) for _ in range(2)]
    both_hold_one = asyncio.Barrier(2)
    loop = asyncio.get_running_loop()

    lock_session = text("SELECT FROM sessions WHERE session_id = :wanted FOR UPDATE")

    def touching(order: list[str]) -> Callable[[Connection], str]:
        tries = 0

        def work(connection: Connection) -> str:
            nonlocal tries
            tries += 1
            for number, session_id in enumerate(order):
                connection.execute(lock_session, {"wanted": session_id}).one()
                if tries == 1 and number == 0:
                    asyncio.run_coroutine_threadsafe(both_hold_one.wait(), loop).result(WAIT_S)
            return "done"

        return work

    orders = (["s1", "s2"], ["s2", "s1"])
    found = [database.run(touching(order)) for database, order in zip(databases, orders, strict=True)]
    assert await asyncio.gather(*found) == ["done", "done"]
    for database in databases:
        await database.close()
    await store.close()


@pytest.mark.parametrize("what", ["end", "prune"])
async def test_a_commit_that_waits_for_a_model_holds_none_that_comes_after_it(
    postgres: Postgres, postgres_url: str, what: str
) -> None:
    """So no two commits wait for each other, although calls come in any order."""
    store = a_store(postgres_url)
    await store.open()
    models = ["s1:train:0", "s2:train:0"]
    for model_id in reversed(models):  # the order in which they are pruned
        await a_model(store, model_id)
        request_id = await store.submit(an_operation(model_id, 1))
        await claim(store)
        lost = RunStateChanged(model_id=model_id, state=RunState.LOST, reason="why")
        await complete(store, [done(request_id, None, *([lost] if what == "prune" else []))])
    with psycopg.connect(postgres_url) as other:
        lock = "SELECT FROM runs WHERE model_id = %s FOR UPDATE SKIP LOCKED"
        other.execute(lock, models[:1])
        if what == "end":
            waiting = asyncio.gather(*[store.end_session(each, "success", None) for each in ("s2", "s1")])
        else:
            waiting = asyncio.gather(store.prune(datetime.now(UTC) + timedelta(hours=1)))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
        while not waiting.done() and postgres.execute(postgres_url, waits) == [(0,)]:  # noqa: ASYNC110 - of the database
            await asyncio.sleep(0.01)
        free = other.execute(lock, models[1:]).rowcount
    await waiting
    await store.close()
    assert free == 1


async def test_a_process_that_stops_within_a_transaction_does_not_hold_up_the_others(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that gets SIGSTOP: the network keeps its connection, and the connection its locks."""
    store = a_store(postgres_url)
    await store.open()
    await store.create_session(a_session("s1"), idempotency_key=None)
    monkeypatch.setattr(postgres, "IDLE_MS", 300)
    one, two = a_writer(postgres_url), a_writer(postgres_url)
    holds_the_lock, goes_on = threading.Event(), threading.Event()
    tries: list[str | None] = []
    locked = text("SELECT display_name FROM sessions FOR UPDATE")

    def stop(connection: Connection) -> None:
        tries.append(connection.execute(locked).scalar_one())
        holds_the_lock.set()
        goes_on.wait(WAIT_S)
        connection.execute(text("UPDATE sessions SET display_name = 'one'"))

    def name(connection: Connection) -> None:
        connection.execute(locked).one()
        connection.execute(text("UPDATE sessions SET display_name = 'two'"))

    stopped = one.run(stop)
    await asyncio.to_thread(holds_the_lock.wait, WAIT_S)
    await two.run(name)
    goes_on.set()
    await stopped
    assert tries[:2] == [None, "two"]
    for database in (one, two):
        await database.close()
    await store.close()


async def test_wake_ups_come_with_the_commit_and_in_parts(postgres_url: str) -> None:
    topics = [f"done {number} {'x' * 200}" for number in range(500)]
    one, two = NotifyWakeUps(postgres_url), NotifyWakeUps(postgres_url)
    await one.open()
    await two.open()
    database = a_writer(postgres_url)
    with two.subscribe(topics[0]) as first, two.subscribe(topics[-1]) as last, one.subscribe(topics[0]) as own:
        await database.run(lambda connection: one.enlist(connection, topics))
        async with asyncio.timeout(WAIT_S):
            await first.wait()
            await last.wait()
        assert not own.is_set()  # `tell` wakes its own process
    await database.close()
    await one.close()
    await two.close()


async def test_a_listener_that_was_cut_off_looks_again_at_everything(postgres: Postgres) -> None:
    url = postgres.new_database()
    wakeups = NotifyWakeUps(url)
    await wakeups.open()
    with wakeups.subscribe("anything") as event:
        cut = (  # those of other tests may be on their way out
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
        assert await asyncio.to_thread(postgres.execute, url, cut) == [(True,)]
        async with asyncio.timeout(WAIT_S):
            await event.wait()
    await wakeups.close()


def test_other_drivers_are_refused() -> None:
    with pytest.raises(ConfigError, match="postgresql://"):
        a_store("postgresql+asyncpg://user:secret@host/database")


def test_sqlite_is_for_one_server() -> None:
    with pytest.raises(ConfigError, match=r"server\.share_data_dir.*store\.url"):
        SqlStore(SqlStoreConfig(), StoreContext(data_dir=Path("unused"), shared=True))


async def test_a_look_tells_of_the_database_and_changes_nothing(postgres: Postgres) -> None:
    """By the scheme that many hosts write, too."""
    url = postgres.new_database()
    config, context = (
        SqlStoreConfig.model_validate({"url": url.replace("postgresql", "postgres")}),
        StoreContext(data_dir=Path("unused")),
    )
    assert re.fullmatch(r"PostgreSQL 1\d[\d.]*, empty, answers in [\d.]+ ms", diagnose(config, context))
    assert postgres.execute(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    store = a_store(url)
    await store.open()
    await store.close()
    assert f", schema {schema_of_log().revisions[-1]}, answers in " in diagnose(config, context)
