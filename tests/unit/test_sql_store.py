"""What the store contract cannot see: wake-ups, durability settings, refused URLs."""

import asyncio
import itertools
import os
import shutil
import socket
import sqlite3
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from tinsmith.errors import ConfigError, ServerError, StoreError, UserError
from tinsmith.sql_store import group_commit
from tinsmith.sql_store.choose import dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases import socket_wakeups
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.databases.socket_wakeups import SocketWakeUps
from tinsmith.sql_store.databases.sqlite import SqliteDialect
from tinsmith.sql_store.group_commit import Call, Grouping
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import sessions
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import StoreContext
from tinsmith.store.request_ids import created_at, new_request_id
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.store_records import BASE, NOW, a_sample, a_session, claim_records

WAIT_S = 300.0


def a_store(data_dir: Path, **config: object) -> SqlStore:
    return SqlStore(SqlStoreConfig.model_validate({"synchronous": "off", **config}), StoreContext(data_dir=data_dir))


async def test_what_a_failed_commit_leaves_open_is_undone(tmp_path: Path) -> None:
    """SQLite refuses the commit of a deferred violation, and keeps the transaction open."""
    writer = SqliteDialect(URL.create("sqlite", database=str(tmp_path / "x.db")), SqlStoreConfig()).writer(durable=True)

    def run(*statements: str, connection: Connection) -> object:
        return [connection.exec_driver_sql(each) for each in statements][-1]

    def count(connection: Connection) -> int:
        return int(connection.exec_driver_sql("SELECT count(*) FROM child").scalar_one())

    tables = ("CREATE TABLE parent (id INTEGER PRIMARY KEY)", "CREATE TABLE child (of INTEGER REFERENCES parent)")
    await writer.run(lambda connection: run(*tables, connection=connection))
    orphan = ("PRAGMA defer_foreign_keys = ON", "INSERT INTO child VALUES (1)")
    with pytest.raises(IntegrityError):
        await writer.run(lambda connection: run(*orphan, connection=connection))
    assert await writer.run(count) == 0
    await writer.close()


async def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        store = a_store(tmp_path)
        await store.open()
        await store.submit(a_sample())
        await store.close()


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tinsmith.db").write_bytes(b"something else" * 1000)
    with pytest.raises(ServerError, match="not a database"):
        await a_store(tmp_path).open()


@pytest.mark.parametrize(
    ("url", "expected"),
    [("sqlite://", "plain file"), ("oracle://x/y", "'oracle'"), ("what", "not a database URL")],
)
def test_unusable_urls_are_refused(tmp_path: Path, url: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        a_store(tmp_path, url=url)


async def test_the_database_is_private(tmp_path: Path) -> None:
    store = a_store(tmp_path / "new", url=f"sqlite:///{tmp_path}/new/x.db")
    await store.open()
    await store.submit(a_sample())
    for path in (tmp_path / "new").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    await store.close()


@pytest.mark.parametrize(("mode", "durable", "relaxed"), [("full", 2, 1), ("normal", 1, 1), ("off", 0, 0)])
async def test_commits_are_as_durable_as_configured(tmp_path: Path, mode: str, durable: int, relaxed: int) -> None:
    config = SqlStoreConfig.model_validate({"synchronous": mode})
    dialect = dialect_of(config, StoreContext(data_dir=tmp_path))
    assert isinstance(dialect, SqliteDialect)
    for wanted, level in ((True, durable), (False, relaxed)):
        database = dialect.writer(durable=wanted)
        await database.migrate(lambda _: None)
        pragmas = await database.run(lambda db: [_pragma(db, "synchronous"), _pragma(db, "journal_mode")])
        assert pragmas == [level, "wal"]
        await database.close()


def _pragma(connection: Connection, name: str) -> object:
    return connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()


async def test_writes_that_wait_share_a_commit(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    await store.open()
    assert _count(tmp_path) == 0
    await asyncio.gather(*[store.submit(a_sample(seq_id)) for seq_id in range(100)])
    await store.close()
    with sqlite3.connect(tmp_path / "tinsmith.db") as connection:
        distinct = connection.execute("SELECT count(DISTINCT created_at), count(*) FROM operations").fetchone()
    connection.close()
    assert distinct[1] == 100
    assert distinct[0] <= 3  # a commit gives all its writes one time


def _count(data_dir: Path) -> int:
    with sqlite3.connect(data_dir / "tinsmith.db") as connection:
        (count,) = connection.execute("SELECT count(*) FROM operations").fetchone()
    connection.close()
    return int(count)


async def test_a_write_that_fails_is_undone_alone_and_the_others_happen_once(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    await store.open()

    def insert(tx: Transaction) -> None:
        sessions.create(tx, a_session(f"s{next(numbers)}"), idempotency_key=None)

    def insert_and_fail(tx: Transaction) -> None:
        insert(tx)
        raise UserError("after the insert")

    numbers = itertools.count()
    writes = [store.connections.durable.write(each) for each in (insert, insert_and_fail, insert)]
    first, failed, last = await asyncio.gather(*writes, return_exceptions=True)
    assert (first, last) == (None, None)
    assert isinstance(failed, UserError)
    assert len(await store.list_sessions(None, limit=9, offset=0)) == 2
    await store.close()


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    await store.open()
    await store.close()
    await store.close()
    with pytest.raises(ServerError, match="closed"):
        await store.submit(a_sample())
    with pytest.raises(ServerError, match="closed"):
        await store.list_engines()


async def test_the_safety_poll_finds_what_no_wake_up_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = a_store(tmp_path, safety_poll_s=0.05), a_store(tmp_path)
    await store.open()
    await other.open()
    monkeypatch.setattr(SocketWakeUps, "send", lambda *_: None)
    request_id = await store.submit(a_sample())
    waiter = asyncio.create_task(store.wait_for(request_id, WAIT_S))
    await other.cancel(request_id)
    assert (await waiter).finished_at is not None
    await claim_records(store, await take_over(store, BASE), 1)
    await store.wait_for_work(BASE, WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await store.wait_for_work(BASE, 10 * WAIT_S)
    await store.close()
    await other.close()


# request ids ----------------------------------------------------------------------------------------------------------


def test_request_ids_carry_their_time() -> None:
    first, second = new_request_id(NOW), new_request_id(NOW)
    assert first != second
    assert created_at(first) == NOW
    for foreign in ("", "req-", first[:-1], first.upper(), f"x{first}", "req-zzzzzzzzzzzzzz-" + "0" * 24):
        assert created_at(foreign) is None


# wake-ups -------------------------------------------------------------------------------------------------------------


async def test_wake_ups_cross_processes_and_clean_up_after_the_dead(tmp_path: Path) -> None:
    one, two = SocketWakeUps(tmp_path / "wake"), SocketWakeUps(tmp_path / "wake")
    await one.open()
    await two.open()
    dead = one.directory / "1-dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(dead))
    with two.subscribe("here") as here, two.subscribe("there") as there, one.subscribe("here") as own:
        one.send(["here"])
        await asyncio.wait_for(here.wait(), WAIT_S)
        assert not there.is_set()
        assert not own.is_set()
        one.wake(["here"])
        assert own.is_set()
    assert not dead.exists()
    assert two.topics() == []
    await one.close()
    assert len(list(two.directory.iterdir())) == 1, "its own socket"
    await two.close()
    assert not two.directory.exists()


async def test_many_topics_take_several_messages(tmp_path: Path) -> None:
    one, two = SocketWakeUps(tmp_path / "wake"), SocketWakeUps(tmp_path / "wake")
    await one.open()
    await two.open()
    topics = [f"done {number} {'x' * 200}" for number in range(500)]
    with two.subscribe(topics[0]) as first, two.subscribe(topics[-1]) as last:
        one.send(topics)
        await asyncio.wait_for(first.wait(), WAIT_S)
        await asyncio.wait_for(last.wait(), WAIT_S)
    await one.close()
    await two.close()


async def test_others_are_woken_after_the_commit_without_this_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[threading.Thread, int]] = []

    def send(_wakeups: SocketWakeUps, topics: Sequence[str]) -> None:
        if topics:
            with closing(sqlite3.connect(tmp_path / "tinsmith.db")) as another:
                (visible,) = another.execute("SELECT count(*) FROM operations").fetchone()
            sent.append((threading.current_thread(), visible))

    monkeypatch.setattr(SocketWakeUps, "send", send)
    store = a_store(tmp_path)
    await store.open()
    await store.submit(a_sample())
    await store.close()
    ((thread, visible),) = sent
    assert thread is not threading.current_thread()
    assert visible == 1


async def test_nobody_is_woken_by_what_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Sequence[str]] = []

    def refuse(_connection: Connection) -> None:
        raise OperationalError("COMMIT", {}, sqlite3.OperationalError("disk I/O error"))

    def send(_wakeups: SocketWakeUps, topics: Sequence[str]) -> None:
        if topics:  # other stores of this process commit as well, and wake nobody
            sent.append(topics)

    monkeypatch.setattr(SocketWakeUps, "send", send)
    store = a_store(tmp_path)
    await store.open()
    with monkeypatch.context() as failing:
        failing.setattr(group_commit, "commit_durably", refuse)
        with pytest.raises(StoreError, match="disk I/O error"):
            await store.submit(a_sample())
    assert sent == []
    await store.submit(a_sample())
    assert len(sent) == 1
    await store.close()


@pytest.mark.slow
async def test_a_full_socket_does_not_stop_the_sender(tmp_path: Path) -> None:
    one, two = SocketWakeUps(tmp_path / "wake"), SocketWakeUps(tmp_path / "wake")
    await one.open()
    own = set(one.directory.iterdir())
    await two.open()
    with two.subscribe("here") as here:
        for _ in range(5_000):
            one.send(["here"])
        (theirs,) = set(two.directory.iterdir()) - own
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as another:
            another.setblocking(False)
            with pytest.raises(BlockingIOError):
                another.sendto(b"here", str(theirs))
        await asyncio.wait_for(here.wait(), WAIT_S)
    await one.close()
    await two.close()


@pytest.mark.parametrize("name", ["d" * 180, f"{'d' * 90} d"])
async def test_processes_wake_each_other_in_a_directory_with_a_long_path(tmp_path: Path, name: str) -> None:
    long = tmp_path / name / "wake"
    long.parent.mkdir()
    one, two = SocketWakeUps(long), SocketWakeUps(long)
    await one.open()
    await two.open()
    assert len(list(long.iterdir())) == 2, "there, and not where each process's environment says"
    with two.subscribe("here") as here:
        one.send(["here"])
        await asyncio.wait_for(here.wait(), WAIT_S)
    assert stat.S_IMODE(long.stat().st_mode) == 0o700
    await one.close()
    await two.close()
    assert not long.exists()


async def test_the_last_to_leave_may_remove_the_directory_while_another_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []

    def make_and_lose(directory: Path) -> None:
        make_private(directory)
        if len(removed) < times:
            directory.rmdir()
            removed.append(directory)

    make_private = socket_wakeups.make_private
    monkeypatch.setattr(socket_wakeups, "make_private", make_and_lose)
    times = 2
    one, two = SocketWakeUps(tmp_path / "wake"), SocketWakeUps(tmp_path / "wake")
    await one.open()
    assert len(removed) == times
    await two.open()
    with two.subscribe("here") as here:
        one.send(["here"])
        await asyncio.wait_for(here.wait(), WAIT_S)
    await one.close()
    await two.close()
    times = 1_000
    with pytest.raises(ServerError, match="cannot keep a socket"):
        await SocketWakeUps(tmp_path / "wake").open()


async def test_a_socket_that_comes_within_a_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    one, two = SocketWakeUps(tmp_path / "wake"), SocketWakeUps(tmp_path / "wake")
    await one.open()
    tick = time.time_ns() + 60_000_000_000  # so that this machine may be slow
    os.utime(one.directory, ns=(tick, tick))
    one.send(["nobody is there"])
    await two.open()
    os.utime(one.directory, ns=(tick, tick))
    with two.subscribe("here") as here:
        one.send(["here"])
        await asyncio.wait_for(here.wait(), WAIT_S)
    await one.close()
    await two.close()


async def test_what_is_committed_stays_so_if_nobody_can_be_woken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = a_store(tmp_path)
    await store.open()
    assert isinstance(store.connections.wakeups, SocketWakeUps)
    directory = store.connections.wakeups.directory
    cannot_be_removed = directory / "1-dead.sock"
    cannot_be_removed.mkdir()
    await store.submit(a_sample(0))
    shutil.rmtree(directory)
    for seq_id in (1, 2):
        await store.submit(a_sample(seq_id))
    await store.close()
    assert _count(tmp_path) == 3
    (told,) = [record.message for record in caplog.records if "may not be woken" in record.message]
    assert "safety_poll_s" in told


async def test_a_directory_that_others_can_open_is_refused(tmp_path: Path) -> None:
    wakeups = SocketWakeUps(tmp_path / "wake")
    wakeups.directory.mkdir()
    wakeups.directory.chmod(0o755)
    with pytest.raises(ServerError, match="nobody else"):
        await wakeups.open()
    wakeups.directory.rmdir()


class NeverAnswers(Grouping[Database]):
    def __init__(self, database: Database) -> None:
        super().__init__([database], max_group=1)
        self.asked = asyncio.Event()

    async def ask_something(self) -> object:
        return await self.ask(Call(lambda _: None, (), {}))

    async def _run(self, database: Database, calls: list[Call]) -> list[object]:
        del database, calls
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_who_asks_while_the_event_loop_ends_is_refused(tmp_path: Path) -> None:
    group = NeverAnswers(dialect_of(SqlStoreConfig(), StoreContext(data_dir=tmp_path)).reader())
    others = asyncio.all_tasks()
    group.open()
    answering = asyncio.all_tasks() - others
    asked = [asyncio.create_task(group.ask_something()) for _ in range(3)]
    await group.asked.wait()  # one is being answered, the others wait
    assert answering
    for task in answering:
        task.cancel()
    async with asyncio.timeout(WAIT_S):
        for each in asked:
            with pytest.raises(ServerError, match="is closed"):
                await each
        with pytest.raises(ServerError, match="is closed"):
            await group.ask_something()
