"""Tenants are served fairly from the store to the device, however much one of them has waiting. Counts tokens, no time.

The store, claims and queues are the real ones. The backend computes nothing: the test lets each batch and each sample
end, once the engine has had the chance to claim.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine.engine import Engine
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import NewOperation, RequestStore, StoreContext
from tinsmith.store.codec import decoded_bytes, encode_operation, kind_of
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine

LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}
BATCH_TOKENS = 1024
AT_ONCE = 500  # submits

SIZES = {"hog": (64,), "ann": (64, 200), "bob": (500,), "eve": (100, 64, 64)}
"""The sizes in tokens of each tenant's operations, in turn. None is below what an operation costs at least."""


class GatedBackend(ToyBackend):
    """The toy backend, without the work. Passes and samples wait until they are let through."""

    def __init__(self, cache_dir: Path) -> None:
        context = BackendContext(model_name="toy", model_path=None, cache_dir=cache_dir, losses=LOSSES)
        super().__init__(ToyConfig(max_batch_tokens=BATCH_TOKENS, max_context_tokens=1024, max_models=16), context)
        self.batches: list[list[str]] = []  # model_ids
        self.passes = threading.Semaphore(0)
        self.started: list[ops.Sample] = []
        self.drawn: dict[int, asyncio.Event] = {}  # by place in `started`

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        self.batches.append([op.model_id for op in ops])
        assert self.passes.acquire(timeout=WAIT_S)
        return [nothing(op) for op in ops]

    async def sample(self, op: ops.Sample) -> ops.SampleOutput:
        number = len(self.started)
        self.started.append(op)
        self.drawn[number] = asyncio.Event()
        await self.drawn[number].wait()
        del self.drawn[number]
        token = ops.SampledSequence(tokens=np.ones(1, np.int32), logprobs=np.zeros(1, np.float32), stop_reason="stop")
        return ops.SampleOutput(sequences=(token,) * op.num_samples)


def nothing(op: ops.ForwardBackward) -> ops.ForwardBackwardOutput:
    zeros = [np.zeros(datum.loss_inputs["target_tokens"].shape, np.float32) for datum in op.data]
    outputs = tuple({"logprobs": each} for each in zeros)
    return ops.ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={"loss:sum": 0.0})


@dataclass
class World:
    store: RequestStore
    backend: GatedBackend
    data_dir: Path

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        engine = await make_engine(self.store, self.backend, self.data_dir, sampler=self.backend)
        await engine.recover("stopped", lambda _what, _share: None)
        task = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
            self.backend.passes.release(1000)
            await asyncio.wait_for(task, WAIT_S)


ON_BOTH = pytest.mark.parametrize(
    "world", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
AT_LENGTH_ON_BOTH = pytest.mark.parametrize(  # the contract of stores has claims by tenant on both, too
    "world", ["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)], indirect=True
)


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    config = SqlStoreConfig(url=url, synchronous="off", safety_poll_s=600.0)
    store = SqlStore(config, StoreContext(data_dir=tmp_path))
    await store.open()
    yield World(store, GatedBackend(tmp_path), tmp_path)
    await store.close()


def a_pass(tenant: str, number: int) -> ops.ForwardBackward:
    tokens = np.ones(SIZES[tenant][number % len(SIZES[tenant])], np.int32)
    inputs = {"target_tokens": tokens.astype(np.int64), "weights": tokens.astype(np.float32)}
    model_id = f"{tenant}:train:0"
    return ops.ForwardBackward(model_id=model_id, data=(ops.Datum(tokens_T=tokens, loss_inputs=inputs),))


def a_sample(tenant: str, number: int) -> ops.Sample:
    size = SIZES[tenant][number % len(SIZES[tenant])]
    params = ops.SamplingParams(max_tokens=size - 1, seed=number)
    return ops.Sample(
        sampling_session_id=f"{tenant}:sample:0", snapshot_id=None, prompt_P=np.ones(1, np.int32), params=params
    )


async def submit(store: RequestStore, make: Callable[[str, int], Any], tenant: str, count: int) -> None:
    """Submit so many, in order; seq_ids start at 1."""
    templates = [_new(make(tenant, number), tenant) for number in range(len(SIZES[tenant]))]
    for start in range(0, count, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count))
        some = [replace(templates[number % len(templates)], seq_id=number + 1) for number in numbers]
        await asyncio.gather(*[store.submit(each) for each in some])


def _new(operation: Any, tenant: str) -> NewOperation:
    is_sample = isinstance(operation, ops.Sample)
    subject_id = operation.sampling_session_id if is_sample else operation.model_id
    return NewOperation(
        base_model="toy",
        kind=kind_of(operation),
        tenant=tenant,
        session_id=tenant,
        subject_id=subject_id,
        seq_id=0,
        ordered=not is_sample,
        payload=encode_operation(operation),
        digest=b"",
        num_tokens=1 + operation.params.max_tokens if is_sample else operation.num_tokens,
        num_bytes=decoded_bytes(operation),
    )


def check(served: Counter[str]) -> None:
    """The bound in `fair_scheduler.py`, end to end."""
    for one, sizes in SIZES.items():
        for other, other_sizes in SIZES.items():
            if max(other_sizes) <= min(sizes):
                assert served[one] - served[other] <= max(sizes), dict(served)


def size_of(tenant: str, number: int) -> int:
    return SIZES[tenant][number % len(SIZES[tenant])]


@AT_LENGTH_ON_BOTH
@pytest.mark.parametrize(
    ("hog_has", "others_have", "batches"),
    [(600, 150, 30), pytest.param(100_000, 300, 60, marks=pytest.mark.thorough)],  # an engine holds 512
)
async def test_no_tenant_gets_ahead_in_training_by_more_than_one_operation(
    world: World, hog_has: int, others_have: int, batches: int
) -> None:
    async with world.engine():
        for tenant in SIZES:
            client = EngineDriver(world.store, "toy", tenant=tenant, session_id=tenant)
            await client.open_session()
            await client.result(await client.create_model())
    world.backend = GatedBackend(world.data_dir)
    for tenant in SIZES:
        await submit(world.store, a_pass, tenant, hog_has if tenant == "hog" else others_have)
    served: Counter[str] = Counter()
    done: Counter[str] = Counter()
    async with world.engine() as engine:
        for number in range(batches):
            async with asyncio.timeout(WAIT_S):
                while len(world.backend.batches) <= number or not holds_some_of_each(  # noqa: ASYNC110
                    engine, {tenant: others_have - done[tenant] for tenant in SIZES}
                ):
                    await asyncio.sleep(0.001)  # until the batch runs, and the engine has claimed more for the next one
            for model_id in world.backend.batches[number]:
                tenant = model_id.split(":")[0]
                served[tenant] += size_of(tenant, done[tenant])
                done[tenant] += 1
            check(served)
            world.backend.passes.release()
    assert all(done[tenant] < others_have for tenant in SIZES)
    assert sum(served.values()) > (batches - 5) * BATCH_TOKENS


def holds_some_of_each(engine: Engine, left: Mapping[str, int]) -> bool:
    """Whether a batch of any tenant's operations could be made of what the engine holds."""
    held = Counter[str]()
    for claimed in engine.training.queue.waiting.values():
        held[claimed.record.tenant] += claimed.record.num_tokens
    return all(held[tenant] >= BATCH_TOKENS or left[tenant] < BATCH_TOKENS // 64 for tenant in SIZES)


@AT_LENGTH_ON_BOTH
@pytest.mark.parametrize(
    ("hog_has", "others_have", "samples"),
    [(1100, 100, 100), pytest.param(100_000, 300, 300, marks=pytest.mark.thorough)],  # an engine holds 1024
)
async def test_no_tenant_gets_ahead_in_sampling_by_more_than_one_operation(
    world: World, hog_has: int, others_have: int, samples: int
) -> None:
    for tenant in SIZES:
        await submit(world.store, a_sample, tenant, hog_has if tenant == "hog" else others_have)
    backend = world.backend
    places = backend.sampler_capabilities.max_sequences
    common = places - places // 8
    async with world.engine():
        for number in range(samples):
            async with asyncio.timeout(WAIT_S):
                while len(backend.started) < number + common:  # noqa: ASYNC110 - the engine has no event to wait for
                    await asyncio.sleep(0.001)
            assert len(backend.drawn) == common  # nobody else is let in
            backend.drawn[number].set()
    served: Counter[str] = Counter()
    for operation in backend.started:
        served[operation.sampling_session_id.split(":")[0]] += 1 + operation.params.max_tokens
        check(served)
    assert sum(served.values()) > samples * 64


@ON_BOTH
async def test_a_newcomer_does_not_wait_for_the_queue_of_another(world: World) -> None:
    """One sample and one pass of a newcomer, while the engine holds all it can of a hog and everything is in use."""
    await submit(world.store, a_sample, "hog", 1100)
    hog = EngineDriver(world.store, "toy", tenant="hog", session_id="hog")
    await hog.open_session()
    await hog.create_model()
    await submit(world.store, a_pass, "hog", 600)
    backend = world.backend
    async with world.engine() as engine, asyncio.timeout(WAIT_S):
        while len(engine.training.queue.waiting) < 400 or not backend.batches:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.001)
        before = len(backend.started)
        ann = EngineDriver(world.store, "toy", tenant="ann", session_id="ann")
        await ann.open_session()
        created = await ann.create_model()
        await submit(world.store, a_sample, "ann", 1)
        while len(backend.started) == before:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        assert backend.started[before].sampling_session_id == "ann:sample:0"
        while "ann:train:0" not in {each.record.subject_id for each in engine.training.queue.waiting.values()}:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        held = len(backend.batches)
        backend.passes.release(3)  # the one that runs, one because ann starts level, one in line for the device already
        await ann.result(created)
        assert len(backend.batches) <= held + 3
