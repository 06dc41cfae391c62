"""How long an engine takes to have a model back, for N operations since its snapshot, and whether that keeps the bound.

    python benchmarks/recovery.py [--backend toy|jax] [--operations 0,10,50]

Each figure is of an engine that starts on the data that another one left: the snapshot is read, the operations after it
run once more, one at a time as a recovery does. The bound is what docs/explanation/what-happens-on-a-crash.md promises:

    load + (operations to replay) x (longest single operation)
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tinsmith import operations as ops
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store
from tinsmith.settings import ModelSettings, PluginSection, RecoverySettings, Settings
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.engine_thread import engine_thread
from tinsmith.testing.loop_thread import LoopThread
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

MODEL = "s1:train:0"
LENGTH, BATCH = 64, 4
REPEATS = 3
TOY, JAX = PluginSection(plugin="toy"), {"plugin": "jax", "max_batch_tokens": 512, "max_context_tokens": 128}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="jax", choices=["toy", "jax"])
    parser.add_argument("--operations", default="0,10,50", help="since the snapshot")
    options = parser.parse_args()
    kept = True
    print("operations   recovery s   of which load s   per operation ms   bound s   kept")
    for number in map(int, options.operations.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            kept &= measure(Path(directory), options.backend, number)
    return 0 if kept else 1


def measure(directory: Path, backend: str, number: int) -> bool:
    """Print one line; return whether the bound was kept."""
    plugins = Plugins.load()
    model = a_model(directory, backend)
    with LoopThread.running("client") as loop:
        settings = settings_of(directory, model, every=1)  # the state is written after every operation, then no more
        store = make_store(settings, plugins)
        loop.call(store.open())
        client = EngineDriver(store, model.name)
        loop.call(client.open_session())
        with engine_thread(settings, model, plugins, make_store(settings, plugins)):
            loop.call(client.result(loop.call(client.create_model())))
            loop.call(until_snapshot(client))
        settings = settings_of(directory, model, every=100_000)
        with engine_thread(settings, model, plugins, make_store(settings, plugins)):
            last = loop.call(store.list_recovery_points(MODEL))[0].seq_id
            behind = loop.call(store.get_run(MODEL)).applied_seq_id - last
            times_s = [loop.call(timed(client, index)) for index in range(max(number - behind, 0))]
        load_s, total_s = [], []
        for _ in range(REPEATS):
            load_s.append(starts(settings_of(directory / "empty", model, every=1), model, plugins))
            total_s.append(starts(settings, model, plugins))
        loop.call(store.close())
    load, total = statistics.median(load_s), statistics.median(total_s)
    longest = max(times_s, default=0.0)
    bound = max(load_s) + number * longest + READING_S
    each = 1000 * (total - load) / max(number, 1)
    print(f"{number:10d} {total:12.2f} {load:17.2f} {each:18.1f} {bound:9.2f}   {'yes' if total <= bound else 'NO'}")
    return total <= bound


READING_S = 1.0  # for the snapshot of a small adapter


def a_model(directory: Path, backend: str) -> ModelSettings:
    if backend == "toy":
        return ModelSettings(name="toy", backend=TOY)
    write_tiny_model(directory / "model", TinyShape())
    section = PluginSection.model_validate({**JAX, "warm_up": False})
    return ModelSettings(name="tiny", path=directory / "model", backend=section)


def settings_of(directory: Path, model: ModelSettings, *, every: int) -> Settings:
    recovery = RecoverySettings(point_every_operations=every, point_every_s=1e9 if every > 1 else 60.0)
    server = Settings().server.model_copy(update={"data_dir": directory / "data"})
    return Settings(server=server, recovery=recovery, models=(model,))


async def until_snapshot(client: EngineDriver) -> None:
    while not await client.store.list_recovery_points(MODEL):
        await client.run(a_step())
    await asyncio.sleep(0)


async def timed(client: EngineDriver, index: int) -> float:
    """Passes and steps in turn, as supervised training has them."""
    started = time.perf_counter()
    result = await client.run(a_pass() if index % 2 == 0 else a_step())
    assert not isinstance(result, ops.Failed), result
    return time.perf_counter() - started


def starts(settings: Settings, model: ModelSettings, plugins: Plugins) -> float:
    """Return the seconds until an engine is ready."""
    started = time.perf_counter()
    with engine_thread(settings, model, plugins, make_store(settings, plugins)):
        return time.perf_counter() - started


def a_pass() -> ops.ForwardBackward:
    tokens = np.random.default_rng(0).integers(3, 60, LENGTH + 1)
    inputs: dict[str, ops.Array] = {"target_tokens": tokens[1:], "weights": np.ones(LENGTH, np.float32)}
    datum = ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=MODEL, data=(datum,) * BATCH)


def a_step() -> ops.OptimStep:
    return ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=1e-3))


if __name__ == "__main__":
    sys.exit(main())
