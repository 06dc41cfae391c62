"""Measure what it costs an engine to keep the rollouts of a pass.

    python benchmarks/kept_rollouts.py [--sequences 64] [--tokens 1024] [--repeats 50]

`finding` is the CPU time of a thread beside the device; `recording` that of the store's transaction, with the rollouts
and without them, on SQLite. `bytes` is what a pass adds to the database, until the run's budget is full.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tinsmith.engine.claimed import Claimed, Finished, Outcome
from tinsmith.engine.rollouts import with_rollouts
from tinsmith.operations import Array, Datum, ForwardBackward, ForwardBackwardOutput
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import Effect, RolloutsTrained, StoreContext
from tinsmith.testing.store_records import a_model, an_operation, claim, complete, done

MODEL = "s1:train:0"
MAX_BYTES = 8 << 20


def a_pass(sequences: int, tokens: int, seq_id: int) -> Finished:
    """A third of each sequence is its prompt."""
    rng = np.random.default_rng(seq_id)
    data, outputs = [], []
    for _ in range(sequences):
        sampled = np.arange(tokens) >= tokens // 3
        logprobs = np.where(sampled, -rng.exponential(1.0, tokens), 0.0).astype(np.float32)
        inputs: dict[str, Array] = {
            "target_tokens": rng.integers(0, 150_000, tokens),
            "logprobs": logprobs,
            "advantages": np.where(sampled, rng.normal(), 0.0).astype(np.float32),
        }
        data.append(Datum(tokens_T=inputs["target_tokens"].astype(np.int32), loss_inputs=inputs))
        outputs.append({"logprobs": logprobs + np.float32(0.01)})
    operation = ForwardBackward(model_id=MODEL, data=tuple(data), loss_fn="importance_sampling")
    result = ForwardBackwardOutput(loss_fn_outputs=tuple(outputs), metrics={"loss:sum": 1.0})
    record: Any = SimpleNamespace(seq_id=seq_id)  # of which nothing else is read
    return Finished(claimed=Claimed(record=record, operation=operation), outcome=Outcome(result=result))


async def recording(store: SqlStore, seq_id: int, *effects: Effect) -> float:
    request_id = await store.submit(an_operation(seq_id=seq_id))
    await claim(store)
    before = time.process_time()
    await complete(store, [done(request_id, ForwardBackwardOutput(loss_fn_outputs=(), metrics={}), *effects)])
    return time.process_time() - before


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=50)
    asked = parser.parse_args()
    finding, without, with_them, sizes = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=Path(directory)))
        await store.open()
        await a_model(store)
        for number in range(asked.repeats):
            finished = a_pass(asked.sequences, asked.tokens, 2 * number + 2)
            before = time.process_time()
            effects = with_rollouts(finished, MAX_BYTES).outcome.effects
            finding.append(time.process_time() - before)
            sizes += [len(each.content) for each in effects if isinstance(each, RolloutsTrained)]
            without.append(await recording(store, 2 * number + 1))
            with_them.append(await recording(store, 2 * number + 2, *effects))
        await store.close()
    for name, found in (("finding", finding), ("recording without", without), ("recording with", with_them)):
        print(f"{name}: {1000 * statistics.median(found):.2f} ms")
    print(f"bytes: {statistics.median(sizes):,.0f}")


if __name__ == "__main__":
    asyncio.run(main())
