"""Measure the service times that `tinsmith simulate` runs on, and write them as JSON.

    python benchmarks/service_times.py --out FILE [--backend toy|jax] [--repeats 5]

Device: calls of the backend alone, with few and many operations and tokens; the times are a least-squares fit of the
shortest of the repeats. Store: transactions of 1 and of 16 operations on SQLite in a directory of its own, likewise.
A save for sampling: its round trip on a served toy model, less that of an optimizer step.
Server and engine: the CPU time of their processes while few and many tenants use a served toy model. What the engine's
process spends beyond the backend is divided over its transactions and their operations. Run it on an idle machine.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
from live_tenants import CONTEXT_TOKENS, LiveTenant, Seen, let_live, served

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, SamplingBackend, TrainingBackend
from tinsmith.engine.claims import Holdings
from tinsmith.plugins.loading import Plugins
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import Completion, Lease, StoreContext
from tinsmith.testing.engine_driver import EngineDriver, take_over
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_workbench.simulation.service_times import (
    Backend,
    Sampling,
    Server,
    ServiceTimes,
    Store,
    Training,
    Transaction,
)
from tinsmith_workbench.simulation.workload import TenantClass, Wanted

RANK = 4
LIVE = (
    TenantClass(name="sft", passes=1, pass_tokens=256, think_s=0.05, spread=0.0),
    TenantClass(name="sampling", samples=1, prompt_tokens=16, sampled_tokens=16, think_s=0.05, spread=0.0),
)
LIVE_TENANTS, LIVE_S = (2, 32), 15.0


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients of a least-squares fit of relative errors. What comes out negative is left out."""
    a, y = np.array(rows, float), np.array(seconds)
    kept = list(range(a.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(a[:, kept] / y[:, None], np.ones(len(y)), rcond=None)
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    result = [0.0] * a.shape[1]
    for index, value in zip(kept, found, strict=True):
        result[index] = float(value)
    return result


def shortest(repeats: int, call: Callable[[], object]) -> float:
    call()  # compiles
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


# The device -----------------------------------------------------------------------------------------------------------


def a_backend(name: str, directory: Path) -> TrainingBackend:
    plugins = Plugins.load()
    if name != "toy":
        write_tiny_model(directory / "model", TinyShape())
    context = BackendContext(
        model_name="tiny", model_path=directory / "model", cache_dir=directory, losses=plugins.losses.all()
    )
    spec = plugins.backends.get(name)
    return spec.create(spec.config.model_validate({"warm_up": False} if name == "jax" else {}), context)


def a_pass(model: int, num_tokens: int, context: int) -> ops.ForwardBackward:
    data = []
    for start in range(0, num_tokens, context):
        tokens = np.arange(min(context, num_tokens - start), dtype=np.int64) % 60
        inputs: dict[str, ops.Array] = {"target_tokens": tokens, "weights": np.ones(len(tokens), np.float32)}
        data.append(ops.Datum(tokens_T=tokens.astype(np.int32), loss_inputs=inputs))
    return ops.ForwardBackward(model_id=f"m{model}", data=tuple(data))


def training_times(backend: TrainingBackend, repeats: int) -> Training:
    most, context = (
        backend.trainer_capabilities.max_batch_tokens,
        min(CONTEXT_TOKENS, backend.trainer_capabilities.max_context_tokens),
    )
    for model in range(8):
        backend.create_model(ops.CreateModel(model_id=f"m{model}", lora=ops.LoraConfig(rank=RANK, seed=1)))
    rows, seconds = [], []
    for number in (1, 4, 8):
        for share in (16, 4, 1):
            tokens = most // 8 // share
            batch = [a_pass(model, tokens, context) for model in range(number)]
            rows.append([1, number, number * tokens])
            seconds.append(shortest(repeats, lambda batch=batch: backend.forward_backward(batch)))  # type: ignore[misc]
    batch_s, operation_s, token_s = fitted(rows, seconds)
    steps, step_rows = [], []
    for number in (1, 2, 4, 8):
        optim = [ops.OptimStep(model_id=f"m{model}", adam=ops.AdamParams(learning_rate=0.0)) for model in range(number)]
        step_rows.append([1, number])
        steps.append(shortest(repeats, lambda optim=optim: backend.optim_step(optim)))  # type: ignore[misc]
    optim_batch_s, optim_operation_s = fitted(step_rows, steps)
    return Training(
        batch_s=batch_s,
        operation_s=operation_s,
        token_s=token_s,
        optim_batch_s=optim_batch_s,
        optim_operation_s=optim_operation_s,
        save_s=asyncio.run(save_times(repeats)),
    )


async def save_times(repeats: int) -> float:
    """Return how much longer a save for sampling takes than an optimizer step, which goes the same way."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-times-") as directory, served(Path(directory), 1, {}) as toy:
        tenant = LiveTenant(toy.url, 0, LIVE[0], seed=0, max_tokens=8192, seen=Seen())
        await tenant.open()
        found: dict[str, list[float]] = {"save_for_sampler": [], "optim_step": []}
        for _ in range(repeats + 1):
            for kind, seconds in found.items():
                began = time.perf_counter()
                await tenant.run(Wanted(kind))
                seconds.append(time.perf_counter() - began)
    return max(0.0, min(found["save_for_sampler"][1:]) - min(found["optim_step"][1:]))


def sampling_times(backend: SamplingBackend, repeats: int) -> Sampling:
    rows, seconds = [], []
    for number in (1, 4, 16):
        for prompt, tokens in ((16, 2), (16, 64), (256, 2), (256, 64)):
            samples = [a_sample(prompt, tokens, seed) for seed in range(number)]
            rows.append([tokens, number * tokens, number, number * prompt])
            seconds.append(shortest(repeats, lambda samples=samples: asyncio.run(drawn(backend, samples))))  # type: ignore[misc]
    step_s, row_s, prompt_s, prompt_token_s = fitted(rows, seconds)
    return Sampling(step_s=step_s, row_s=max(row_s, 1e-9), prompt_s=prompt_s, prompt_token_s=prompt_token_s)


def a_sample(prompt: int, tokens: int, seed: int, session: str = "s") -> ops.Sample:
    params = ops.SamplingParams(max_tokens=tokens, seed=seed, stop_at_eos=False)
    return ops.Sample(sampling_session_id=session, snapshot_id=None, prompt_P=np.ones(prompt, np.int32), params=params)


async def drawn(backend: SamplingBackend, samples: Sequence[ops.Sample]) -> None:
    await asyncio.gather(*(backend.sample(each) for each in samples))


# The store ------------------------------------------------------------------------------------------------------------


async def store_times(repeats: int) -> Store:
    found: dict[str, list[float]] = {"submit": [], "claim": [], "record": []}
    sizes = (1, 16)
    with tempfile.TemporaryDirectory(prefix="tinsmith-times-") as directory:
        store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=Path(directory)))
        await store.open()
        clients = [EngineDriver(store, "toy", tenant=f"t{n}", session_id=f"s{n}") for n in range(max(sizes))]
        lease = await take_over(store, "toy")
        for client in clients:
            await client.open_session()
        for number in sizes:
            rounds = [await store_round(store, lease, clients[:number]) for _ in range(repeats + 1)][1:]
            for name, times in zip(found, zip(*rounds, strict=True), strict=True):
                found[name].append(min(times))
        await store.close()
    fits = {name: fitted([[1, number] for number in sizes], seconds) for name, seconds in found.items()}
    parts = {name: Transaction(fixed_s=fixed, operation_s=each) for name, (fixed, each) in fits.items()}
    return Store(submit=parts["submit"], claim=parts["claim"], record=parts["record"])


async def store_round(store: SqlStore, lease: Lease, clients: Sequence[EngineDriver]) -> tuple[float, float, float]:
    """Submit a sample of each client, claim and record them all."""

    async def seconds(work: Awaitable[object]) -> float:
        began = time.perf_counter()
        await work
        return time.perf_counter() - began

    empty = Holdings()
    submit_s = await seconds(asyncio.gather(*(each.submit(a_sample(64, 8, 1, each.session_id)) for each in clients)))
    began = time.perf_counter()
    claimed = (await store.claim(lease, training=empty.room(ordered=True), samples=empty.room(ordered=False))).records
    claim_s = time.perf_counter() - began
    assert len(claimed) == len(clients)
    drawn = ops.SampledSequence(tokens=np.ones(8, np.int32), logprobs=np.zeros(8, np.float32), stop_reason="length")
    results = [Completion(request_id=each.request_id, result=ops.SampleOutput(sequences=(drawn,))) for each in claimed]
    return submit_s, claim_s, await seconds(store.complete(lease, results))


# Server and engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """CPU time of the processes while so many operations were done, in so many claims and records."""

    operations: int
    transactions: int
    server_s: float
    engine_s: float  # beyond what the backend takes


def host_times(training: Training, sampling: Sampling) -> tuple[Server, Transaction]:
    """Return the times of the server, and those of the engine's process beyond the backend, for a transaction."""
    loads = [asyncio.run(spent_by(number, training, sampling)) for number in LIVE_TENANTS]
    for load in loads:
        print(load)
    server_s = loads[-1].server_s / loads[-1].operations
    rows = [[load.transactions, 2 * load.operations] for load in loads]  # each is claimed and recorded
    fixed_s, operation_s = fitted(rows, [max(1e-6, load.engine_s) for load in loads])
    return Server(submit_s=server_s / 2, answer_s=server_s / 2), Transaction(fixed_s=fixed_s, operation_s=operation_s)


async def spent_by(number: int, training: Training, sampling: Sampling) -> Spent:
    with tempfile.TemporaryDirectory(prefix="tinsmith-times-") as directory, served(Path(directory), number, {}) as toy:
        seen, processes = Seen(), (toy.server, toy.engine)
        tenants = [
            LiveTenant(toy.url, tenant, LIVE[tenant % 2], seed=0, max_tokens=8192, seen=seen)
            for tenant in range(number)
        ]
        for tenant in tenants:
            await tenant.open()
        before, transactions = [cpu_s(each) for each in processes], toy.transactions()
        await let_live(tenants, LIVE_S)
        server_s, engine_s = (cpu_s(each) - spent for each, spent in zip(processes, before, strict=True))
        transactions = toy.transactions() - transactions
    backend_s = sum(device_s(kind, tokens, training, sampling) for kind, tokens, *_ in seen.answers)
    return Spent(len(seen.answers), transactions, server_s, engine_s - backend_s)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def device_s(kind: str, tokens: int, training: Training, sampling: Sampling) -> float:
    """Return what an operation of these tenants takes the backend, alone."""
    if kind == "sample":
        of_prompt = sampling.prompt_s + sampling.prompt_token_s * LIVE[1].prompt_tokens
        return of_prompt + tokens * (sampling.step_s + sampling.row_s)
    if kind == "optim_step":
        return training.optim_batch_s + training.optim_operation_s
    return training.batch_s + training.operation_s + tokens * training.token_s


def measured(name: str, repeats: int) -> ServiceTimes:
    with tempfile.TemporaryDirectory(prefix="tinsmith-times-") as directory:
        backend = a_backend(name, Path(directory))
        training = training_times(backend, repeats)
        assert isinstance(backend, SamplingBackend)
        sampling = sampling_times(backend, repeats)
        capabilities, model_bytes = backend.trainer_capabilities, 2 * backend.capture_state("m0").memory_bytes
        backend.close()
    store = asyncio.run(store_times(4 * repeats))
    server, engine = host_times(training, sampling)
    return ServiceTimes(
        measured=f"benchmarks/service_times.py --backend {name}, {platform.machine()} with {psutil.cpu_count()} cores, "
        f"Python {platform.python_version()}, tinsmith {version('tinsmith')}, {datetime.now(UTC):%Y-%m-%d}",
        backend=Backend(
            max_batch_tokens=capabilities.max_batch_tokens,
            max_context_tokens=capabilities.max_context_tokens,
            max_sequences=backend.sampler_capabilities.max_sequences,
            max_models=capabilities.max_models,
            model_bytes=model_bytes,
            beside=0.5,
        ),
        server=server,
        store=store,
        engine=engine,
        training=training,
        sampling=sampling,
    )


def rounded(value: object) -> object:
    """Round times to three digits, so that a file can be read."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="toy")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    times = measured(options.backend, options.repeats)
    options.out.write_text(json.dumps(rounded(times.model_dump()), indent=2) + "\n")
    print(options.out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
