"""Light tenants beside a hog: how long their operations take, against running alone, and what a claim costs.

    python benchmarks/fairness.py [--waiting 10000] [--light 15] [--requests 20] [--claims 0 1000 100000] [--postgres]

The hog has so many operations waiting in the store before the engine starts. Each light tenant sends one operation
after the other: passes of 64 tokens in training, samples of 8 tokens in sampling. The hog's are eight times as large.
The engine, with the toy backend, is a process of its own, and so is PostgreSQL. Claims are measured in CPU time of this
process, with one operation of a light tenant to claim and so many of the hog waiting. Most of the time goes into
submitting what waits: with the defaults, about 250,000 operations. Every step prints how long it took.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.processes.engine import SWITCH_S
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import ClaimRoom, Holding, NewOperation, StoreContext
from tinsmith.store.codec import decoded_bytes, encode_operation, kind_of
from tinsmith.testing.engine_driver import EngineDriver, make_engine, take_over
from tinsmith.testing.postgres import Postgres

HOG = "hog"
TIMES_LARGER = 8
PASS_TOKENS, SAMPLE_TOKENS = 64, 8
AT_ONCE = 2048  # submits
CLAIMS = 50
ROOM = ClaimRoom(operations=512, num_bytes=256 << 20)
FULL = replace(ROOM, held={HOG: Holding(operations=512)})

Make = Callable[[EngineDriver], ops.ForwardBackward | ops.Sample]


def a_pass(client: EngineDriver) -> ops.ForwardBackward:
    tokens = np.ones(PASS_TOKENS * _times(client), np.int32)
    inputs: dict[str, ops.Array] = {"target_tokens": tokens.astype(np.int64), "weights": tokens.astype(np.float32)}
    return ops.ForwardBackward(model_id=client.model_id(), data=(ops.Datum(tokens_T=tokens, loss_inputs=inputs),))


def a_sample(client: EngineDriver) -> ops.Sample:
    params = ops.SamplingParams(max_tokens=SAMPLE_TOKENS * _times(client), seed=1, stop_at_eos=False)
    return ops.Sample(
        sampling_session_id=f"{client.session_id}:sample:0",
        snapshot_id=None,
        prompt_P=np.ones(4, np.int32),
        params=params,
    )


def _times(client: EngineDriver) -> int:
    return TIMES_LARGER if client.tenant == HOG else 1


@dataclass(frozen=True)
class Bench:
    """A store, and where an engine finds it."""

    store: SqlStore
    data_dir: Path
    url: str | None

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[None]:
        """Run an engine, in a process of its own as always."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=engine_main, args=(self.data_dir, self.url, theirs), daemon=True)
        process.start()
        theirs.close()  # so that an engine that dies ends the benchmark with an EOFError
        await asyncio.to_thread(ours.recv)
        yield
        ours.send("stop")
        await asyncio.to_thread(process.join)


def a_store(data_dir: Path, url: str | None) -> SqlStore:
    return SqlStore(SqlStoreConfig(url=url), StoreContext(data_dir=data_dir))


@asynccontextmanager
async def opened(postgres: Postgres | None) -> AsyncIterator[Bench]:
    url = None if postgres is None else postgres.new_database()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        store = a_store(Path(directory), url)
        await store.open()
        try:
            yield Bench(store, Path(directory), url)
        finally:
            await store.close()


def engine_main(data_dir: Path, url: str | None, pipe: Connection) -> None:
    sys.setswitchinterval(SWITCH_S)  # as `tinsmith engine` does
    uvloop.run(run_engine(data_dir, url, pipe))


async def run_engine(data_dir: Path, url: str | None, pipe: Connection) -> None:
    store = a_store(data_dir, url)
    await store.open()
    losses = {loss.name: loss for loss in BUILTIN_LOSSES}
    context = BackendContext(model_name="toy", model_path=None, cache_dir=data_dir, losses=losses)
    backend = ToyBackend(ToyConfig(max_models=32, max_batch_tokens=512, max_context_tokens=1024), context)
    engine = await make_engine(store, backend, data_dir, sampler=backend)
    await engine.recover("stopped", lambda _what, _share: None)
    running = asyncio.create_task(engine.run())
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    engine.stop()
    await running
    await store.close()


async def clients(bench: Bench, tenants: Iterable[str]) -> list[EngineDriver]:
    """Open sessions and create models."""
    found = [EngineDriver(bench.store, "toy", tenant=tenant, session_id=tenant) for tenant in tenants]
    async with bench.engine():
        for client in found:
            await client.open_session()
            await client.result(await client.create_model())
    return found


async def fill(store: SqlStore, client: EngineDriver, make: Make, count: int, *, first: int = 1) -> None:
    """Submit operations until so many wait, starting with seq_id `first`."""
    operation = make(client)
    is_sample = isinstance(operation, ops.Sample)
    template = NewOperation(
        base_model="toy",
        kind=kind_of(operation),
        tenant=client.tenant,
        session_id=client.session_id,
        subject_id=operation.sampling_session_id if isinstance(operation, ops.Sample) else operation.model_id,
        seq_id=0,
        ordered=not is_sample,
        payload=encode_operation(operation),
        digest=b"",
        num_tokens=(SAMPLE_TOKENS if is_sample else PASS_TOKENS) * TIMES_LARGER,
        num_bytes=decoded_bytes(operation),
    )
    for start in range(first, count + 1, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count + 1))
        await asyncio.gather(*[store.submit(replace(template, seq_id=number)) for number in numbers])


async def times_of(client: EngineDriver, make: Make, requests: int) -> list[float]:
    """Return the milliseconds from submit to result of each request, one after the other."""
    times_ms = []
    for _ in range(requests):
        started = time.perf_counter()
        result = await client.run(make(client))
        assert not isinstance(result, ops.Failed), result
        times_ms.append(1000 * (time.perf_counter() - started))
    return times_ms


async def latencies(
    postgres: Postgres | None, make: Make, *, waiting: int, light: int, requests: int
) -> list[list[float]]:
    """Return the times of each light tenant beside a hog, or of a single tenant alone if `waiting` is 0."""
    async with opened(postgres) as bench:
        names = [f"light{number}" for number in range(light)]
        hog, *others = await clients(bench, [HOG, *names])
        await fill(bench.store, hog, make, waiting)
        async with bench.engine():
            return list(await asyncio.gather(*[times_of(each, make, requests) for each in others]))


async def claims(postgres: Postgres | None, make: Make, waiting: Sequence[int]) -> AsyncIterator[tuple[int, float]]:
    """Yield the CPU time in ms of a claim that finds one operation, while an engine holds all it may of the hog."""
    async with opened(postgres) as bench:
        hog, light = await clients(bench, [HOG, "light"])
        lease = await take_over(bench.store, "toy")
        filled = 0
        for number in sorted(waiting):
            await fill(bench.store, hog, make, number, first=filled + 1)
            filled = number
            spent_s = 0.0
            for _ in range(CLAIMS):
                await light.submit(make(light))
                started = time.process_time()
                claimed = await bench.store.claim(lease, training=FULL, samples=FULL)
                spent_s += time.process_time() - started
                assert [each.tenant for each in claimed.records] == ["light"]
            yield number, 1000 * spent_s / CLAIMS


def jain(shares: list[float]) -> float:
    """Return 1 if all shares are equal, 1/n if one tenant has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


async def report(postgres: Postgres | None, options: argparse.Namespace) -> None:
    show = Report()
    light, requests = options.light, options.requests
    database = "PostgreSQL" if postgres else "SQLite"
    show(f"{database}: {light} light tenants beside one with {options.waiting:,} operations waiting")
    for name, make in (("training", a_pass), ("sampling", a_sample)):
        (alone,) = await latencies(postgres, make, waiting=0, light=1, requests=requests)
        show.times(f"{name}, alone", alone)
        together = await latencies(postgres, make, waiting=0, light=light, requests=requests)
        show.times(f"{name}, {light} light tenants", [each for times in together for each in times])
        beside = await latencies(postgres, make, waiting=options.waiting, light=light, requests=requests)
        show.times(f"{name}, beside the hog", [each for times in beside for each in times])
        show(f"{name + ', Jain index of requests per s':<42} {jain([1 / sum(times) for times in beside]):9.3f}")
        async for number, figure in claims(postgres, make, options.claims):
            show(f"{f'{name}, a claim with {number:,} waiting':<42} {figure:9.2f} ms of CPU time")


class Report:
    """Prints each figure as soon as it is known, with the time that has passed."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {text}", flush=True)

    def times(self, name: str, times_ms: list[float]) -> None:
        cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
        self(f"{name:<42} p50 {cuts[49]:9.1f} ms   p99 {cuts[98]:9.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--light", type=int, default=15)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--claims", type=int, nargs="*", default=[0, 1000, 100_000], help="how many wait at claims")
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL of its own instead of SQLite")
    options = parser.parse_args()
    with Postgres(fsync="on") if options.postgres else nullcontext() as postgres:
        uvloop.run(report(postgres, options))


if __name__ == "__main__":
    main()
