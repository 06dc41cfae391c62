"""What the journal costs: its share of a step's time, and its bytes for a trained token.

    python benchmarks/journal.py [--backend toy|jax] [--steps 20] [--rounds 3]

Two servers do the same steps in turn, step by step: one as configured by default, whose commits are synced to the disk,
one whose database lies in memory (/dev/shm, never synced). The difference of the medians is what durability costs; the
time that encoding and storing take in both is measured apart, and added to the share. Bytes are those by which the
database grows, over all tables and indices, and what each part of a pass holds.
"""

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith import operations as ops
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.store import OperationState
from tinsmith.store.codec import encode_operation, encode_result
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

MODEL = "s1:train:0"
LENGTH, BATCH = 256, 8
MAX_SHARE, MAX_BYTES = 0.05, 12.0
WARM_UP = 3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="jax", choices=["toy", "jax"])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        with ExitStack() as stack:
            model = a_model(Path(disk), options.backend)
            durable = stack.enter_context(training(Path(disk) / "data", model, {}))
            relaxed = stack.enter_context(training(Path(memory) / "data", model, {"synchronous": "off"}))
            database = Path(disk) / "data" / "tinsmith.db"
            empty = size_of(database)
            share = step_times(durable, relaxed, options.steps)
        per_token = bytes_per_token(database, empty, WARM_UP + options.steps)
    return 0 if share < MAX_SHARE and per_token < MAX_BYTES else 1


def a_model(directory: Path, backend: str) -> ModelSettings:
    if backend == "toy":
        section = PluginSection.model_validate({"plugin": "toy", "vocab_size": 4096})
        return ModelSettings(name="toy", backend=section)
    write_tiny_model(directory / "model", TinyShape(vocab_size=4096))
    section = PluginSection.model_validate({"plugin": "jax", "warm_up": False, "max_batch_tokens": BATCH * LENGTH})
    return ModelSettings(name="tiny", path=directory / "model", backend=section)


Client = tuple[RunningServer, EngineDriver]


@contextmanager
def training(data_dir: Path, model: ModelSettings, store: dict[str, Any]) -> Iterator[Client]:
    with running_server(data_dir, models=[model], store_options=store) as server:
        client = EngineDriver(server.store, model.name)
        server.call(client.open_session())
        server.call(client.result(server.call(client.create_model())))
        yield server, client


def step_times(durable: Client, relaxed: Client, steps: int) -> float:
    """Print the medians, and return the journal's share of a durable step."""
    times_s: dict[str, list[float]] = {"durable": [], "in memory": []}
    for number in range(WARM_UP + steps):
        pair = [("durable", durable), ("in memory", relaxed)]
        for name, client in pair if number % 2 == 0 else reversed(pair):
            elapsed_s = step(client, number)
            if number >= WARM_UP:
                times_s[name].append(elapsed_s)
    differences = [a - b for a, b in zip(times_s["durable"], times_s["in memory"], strict=True)]
    step_s, encoding_s = statistics.median(times_s["durable"]), encoding()
    syncing_s = max(statistics.median(differences), 0.0)
    share = (syncing_s + encoding_s) / step_s
    print(f"a step of {BATCH} x {LENGTH} tokens   median {1000 * step_s:8.2f} ms")
    print(f"the same, in memory        median {1000 * statistics.median(times_s['in memory']):8.2f} ms")
    print(f"paired difference          median {1000 * statistics.median(differences):8.2f} ms")
    print(f"encoding and compressing   median {1000 * encoding_s:8.2f} ms")
    print(f"the journal's share               {100 * share:8.2f} %    (below {100 * MAX_SHARE:.0f} %)")
    return share


def step(client: Client, number: int) -> float:
    server, driver = client
    optimizer = ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=1e-4))
    started = time.perf_counter()
    request_ids = [server.call(driver.submit(operation)) for operation in (a_pass(number), optimizer)]
    for request_id in request_ids:
        while (record := server.call(driver.store.wait_for(request_id, 20))).finished_at is None:
            pass  # the first ones compile
        assert record.state == OperationState.SUCCEEDED, record
    return time.perf_counter() - started


def encoding() -> float:
    """Time what is encoded for the log in one step."""
    operation = a_pass(0)
    logprobs = np.random.default_rng(0).normal(-8, 2, (BATCH, LENGTH)).astype(np.float32)
    result = ops.ForwardBackwardOutput(loss_fn_outputs=tuple({"logprobs": row} for row in logprobs), metrics={})
    times_s = []
    for _ in range(50):
        started = time.perf_counter()
        encode_operation(operation)
        encode_result(result)
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s)


def a_pass(number: int) -> ops.ForwardBackward:
    """Random tokens and random weights: nothing that a compressor could guess, but that targets are the next tokens."""
    rng = np.random.default_rng(number)

    def datum() -> ops.Datum:
        tokens = rng.integers(3, 4096, LENGTH + 1)
        inputs: dict[str, ops.Array] = {"target_tokens": tokens[1:], "weights": rng.random(LENGTH, np.float32)}
        return ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)

    return ops.ForwardBackward(model_id=MODEL, data=tuple(datum() for _ in range(BATCH)))


def size_of(database: Path) -> int:
    """Return how many bytes its pages are, with those that are in the write-ahead log alone."""
    with closing(sqlite3.connect(database)) as connection:
        pages, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    return pages * size


def bytes_per_token(database: Path, empty: int, steps: int) -> float:
    """Print what a trained token costs on disk, by component, and return the whole. `empty` is the size before."""
    tokens = steps * BATCH * LENGTH
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        payloads = "SELECT sum(length(payload)) FROM payloads JOIN operations ON id = operation_id WHERE kind = ?"
        results = "SELECT sum(length(result)) FROM results JOIN operations ON id = operation_id WHERE kind = ?"
        of_passes = [connection.execute(query, ("forward_backward",)).fetchone()[0] for query in (payloads, results)]
        of_steps = sum(connection.execute(query, ("optim_step",)).fetchone()[0] for query in (payloads, results))
    connection.close()
    whole = (size_of(database) - empty) / tokens
    request, result = (each / tokens for each in of_passes)
    print(f"bytes a trained token: {whole:.2f} (below {MAX_BYTES:.0f}), of which")
    print(f"  request, tokens + targets + random float32 weights {request:6.2f}")
    print(f"  result, float32 logprobs                           {result:6.2f}")
    print(f"  optimizer steps                                    {of_steps / tokens:6.2f}")
    print(f"  rows, indices, free pages                          {whole - request - result - of_steps / tokens:6.2f}")
    constant = [
        ops.Datum(tokens_T=d.tokens_T, loss_inputs={**d.loss_inputs, "weights": np.ones(LENGTH, np.float32)})
        for d in a_pass(0).data
    ]
    usual = len(encode_operation(ops.ForwardBackward(model_id=MODEL, data=tuple(constant))))
    print(f"  the request where all weights are 1                {usual / (BATCH * LENGTH):6.2f}")
    return whole


if __name__ == "__main__":
    sys.exit(main())
