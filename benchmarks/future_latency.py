"""How long an operation takes from submit to result through the store alone, between two processes.

    python benchmarks/future_latency.py [--synchronous full|normal|off] [--seconds 5] [--store URL]

The second process claims samples and completes them at once: what remains is the store, its commits and its wake-ups.
Prints JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import uvloop

from tinsmith.operations import OptimStepOutput
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import Completion, NewOperation, StoreContext
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.store_records import claim_records

BASE = "base"
PAYLOAD = bytes(20_000)


def engine_main(data_dir: str, config: SqlStoreConfig, ready: Event) -> None:
    async def serve() -> None:
        store = SqlStore(config, StoreContext(data_dir=Path(data_dir)))
        await store.open()
        lease = await take_over(store, BASE)
        ready.set()
        result = OptimStepOutput(metrics={"grad_norm": 1.0})
        while True:
            records = await claim_records(store, lease, 256)
            if not records:
                await store.wait_for_work(BASE, 60.0)
                continue
            await store.complete(lease, [Completion(request_id=record.request_id, result=result) for record in records])

    uvloop.run(serve())


async def measure(store: SqlStore, concurrency: int, seconds: float) -> dict[str, float]:
    latencies: list[float] = []
    submits: list[float] = []
    until = time.perf_counter() + seconds
    stamp = time.time_ns()  # a database that is used again has the streams of before

    async def client(number: int) -> None:
        seq_id = 0
        while time.perf_counter() < until:
            operation = NewOperation(
                base_model=BASE,
                kind="sample",
                tenant=f"t{number % 8}",
                session_id="s",
                subject_id=f"{stamp}:c{concurrency}:{number}",
                seq_id=seq_id,
                ordered=False,
                payload=PAYLOAD,
                digest=b"",
            )
            started = time.perf_counter()
            request_id = await store.submit(operation)
            submits.append(time.perf_counter() - started)
            await store.wait_for(request_id, 60.0)
            latencies.append(time.perf_counter() - started)
            seq_id += 1

    started = time.perf_counter()
    await asyncio.gather(*[client(number) for number in range(concurrency)])
    elapsed = time.perf_counter() - started
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "clients": concurrency,
        "per_second": round(len(latencies) / elapsed, 1),
        "submit_p50_ms": round(1000 * statistics.median(submits), 3),
        "p50_ms": round(1000 * cuts[49], 3),
        "p95_ms": round(1000 * cuts[94], 3),
        "p99_ms": round(1000 * cuts[98], 3),
    }


async def run(data_dir: str, config: SqlStoreConfig, seconds: float) -> list[dict[str, float]]:
    store = SqlStore(config, StoreContext(data_dir=Path(data_dir)))
    await store.open()
    try:
        return [await measure(store, concurrency, seconds) for concurrency in (1, 8, 64, 512)]
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--synchronous", default="full", choices=["full", "normal", "off"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--store", metavar="URL", help="default: SQLite in a temporary directory")
    arguments = parser.parse_args()
    config = SqlStoreConfig(url=arguments.store, synchronous=arguments.synchronous)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as data_dir:
        ready = context.Event()
        engine = context.Process(target=engine_main, args=(data_dir, config, ready), daemon=True)
        engine.start()
        ready.wait(60)
        try:
            results = uvloop.run(run(data_dir, config, arguments.seconds))
        finally:
            engine.terminate()
            engine.join()
    print(json.dumps({"synchronous": arguments.synchronous, "results": results}, indent=2))


if __name__ == "__main__":
    main()
