"""Long polls held by one server: what they cost while nothing happens, and how soon they hear of a result.

    python benchmarks/long_polls.py [--polls 2000] [--hold-s 10] [--store postgresql://...]

The server is a process of its own with default settings; this one is its clients, and the engine that completes what
they wait for. First results come one by one, then all others at once. A poll that the server ends is sent again, as the
SDK does.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import uvloop
from sqlalchemy import make_url

from tinsmith.operations import OptimStepOutput
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import Completion, NewOperation, SessionRecord, StoreContext
from tinsmith.store.wakeups import request_of
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.harness import running_server
from tinsmith.testing.store_records import claim_records

BASE = "base"
KEY = "tml-benchmark"
ONE_BY_ONE = 200
AT_ONCE = 256  # completions in one write
RESULT = OptimStepOutput(metrics={"grad_norm": 1.0})


def server_main(data_dir: str, url: str | None, pipe: Connection) -> None:
    """Serve, and answer each message with the number of long polls that wait."""
    allow_many_files()
    keys = {"api_keys": [{"key": KEY, "tenant": "ann"}]}
    with running_server(
        Path(data_dir), engines=False, server=keys, store_options={"url": url} if url else {}
    ) as server:
        assert isinstance(server.store, SqlStore)
        pipe.send(server.url)
        while pipe.recv():
            topics = server.store.connections.wakeups.topics()
            pipe.send(sum(request_of(topic) is not None for topic in topics))


def allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Clients:
    """One connection and one long poll for each operation."""

    def __init__(self, url: str) -> None:
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.heard_at: dict[str, float] = {}
        self.repeated = 0

    async def poll(self, request_id: str) -> None:
        body = json.dumps({"request_id": request_id}).encode()
        lines = (
            "POST /api/v1/retrieve_future HTTP/1.1",
            "host: benchmark",
            f"x-api-key: {KEY}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        )
        request = "".join(f"{line}\r\n" for line in (*lines, "")).encode() + body
        reader, writer = await asyncio.open_connection(self.host, self.port)
        while True:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            heard_at = time.perf_counter()
            length = next(line for line in answer.lower().splitlines() if line.startswith(b"content-length:"))
            content = await reader.readexactly(int(length.split(b":")[1]))
            status = answer.split(b" ", 2)[1]
            if status == b"200":
                break
            if status != b"408":
                raise RuntimeError(content.decode())
            self.repeated += 1
        self.heard_at[request_id] = heard_at
        writer.close()


async def submit(store: SqlStore, count: int) -> list[str]:
    now = datetime.now(UTC)
    session = f"s{time.time_ns()}"
    record = SessionRecord(session_id=session, tenant="ann", created_at=now, last_seen_at=now)
    await store.create_session(record, idempotency_key=None)
    operations = [
        NewOperation(
            base_model=BASE,
            kind="sample",
            tenant="ann",
            session_id=session,
            subject_id=f"{session}:sample:{number}",
            seq_id=0,
            ordered=False,
            payload=bytes(1000),
            digest=b"",
        )
        for number in range(count)
    ]
    return list(await asyncio.gather(*[store.submit(operation) for operation in operations]))


async def measure(
    store: SqlStore,
    server: psutil.Process,
    url: str,
    pipe: Connection,
    store_url: str | None,
    count: int,
    hold_s: float,
) -> dict[str, float]:
    lease = await take_over(store, BASE)
    waiting = await submit(store, count)
    claimed: list[str] = []
    while len(claimed) < count:
        claimed += [record.request_id for record in await claim_records(store, lease, AT_ONCE)]
    clients = Clients(url)
    begun = time.perf_counter()
    polls = [asyncio.create_task(clients.poll(request_id)) for request_id in waiting]
    while num_held(pipe) < count:  # noqa: ASYNC110 - another process knows
        await asyncio.sleep(0.05)
    all_held_s = time.perf_counter() - begun
    before_s = sum(server.cpu_times()[:2])
    await asyncio.sleep(hold_s)
    busy_s = sum(server.cpu_times()[:2]) - before_s
    connections = database_connections(server, store_url)
    memory = server.memory_info().rss
    random.Random(0).shuffle(claimed)
    alone, together = claimed[:ONE_BY_ONE], claimed[ONE_BY_ONE:]
    delays_ms = []
    for request_id in alone:
        told_at = time.perf_counter()
        await store.complete(lease, [Completion(request_id=request_id, result=RESULT)])
        await polls[waiting.index(request_id)]
        delays_ms.append(1000 * (clients.heard_at[request_id] - told_at))
    told_at = time.perf_counter()
    for first in range(0, len(together), AT_ONCE):
        part = together[first : first + AT_ONCE]
        await store.complete(lease, [Completion(request_id=request_id, result=RESULT) for request_id in part])
    await asyncio.gather(*polls)
    cuts = statistics.quantiles(delays_ms, n=100)
    return {
        "long polls held at once": count,
        "until all were held, s": all_held_s,
        "server's connections to the database": connections,
        "server's memory, MiB": memory / 2**20,
        "server's CPU while nothing happens, %": 100 * busy_s / hold_s,
        "write to answer, one by one, p50, ms": cuts[49],
        "write to answer, one by one, p95, ms": cuts[94],
        f"all other {len(together)} at once, s": time.perf_counter() - told_at,
        "polls that ended and were sent again": clients.repeated,
    }


def num_held(pipe: Connection) -> int:
    pipe.send(True)
    held: int = pipe.recv()
    return held


def database_connections(server: psutil.Process, store_url: str | None) -> int:
    """Count those of the server alone: ours go by another name."""
    if store_url is None:
        return sum(file.path.endswith("tinsmith.db") for file in server.open_files())
    with psycopg.connect(store_url) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tinsmith'"
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


async def run(
    config: SqlStoreConfig, data_dir: str, server: psutil.Process, url: str, pipe: Connection, polls: int, hold_s: float
) -> dict[str, float]:
    ours, store_url = config, config.url.get_secret_value() if config.url else None
    if store_url is not None:
        named = make_url(store_url).update_query_dict({"application_name": "benchmark"})
        ours = SqlStoreConfig.model_validate({"url": named.render_as_string(hide_password=False)})
    store = SqlStore(ours, StoreContext(data_dir=Path(data_dir)))
    await store.open()
    try:
        return await measure(store, server, url, pipe, store_url, polls, hold_s)
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--polls", type=int, default=2000)
    parser.add_argument("--hold-s", type=float, default=10.0)
    parser.add_argument("--store", metavar="URL", help="default: SQLite in a temporary directory")
    arguments = parser.parse_args()
    allow_many_files()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as data_dir:
        server = context.Process(target=server_main, args=(data_dir, arguments.store, theirs), daemon=True)
        server.start()
        try:
            url = ours.recv()
            config = SqlStoreConfig(url=arguments.store)
            process = psutil.Process(server.pid)
            figures = uvloop.run(run(config, data_dir, process, url, ours, arguments.polls, arguments.hold_s))
        finally:
            ours.send(False)
            server.join(60)
    for what, figure in figures.items():
        print(f"{what:<45} {figure:10,.1f}" if isinstance(figure, float) else f"{what:<45} {figure:10,}")


if __name__ == "__main__":
    main()
