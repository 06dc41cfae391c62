"""Saves of an inflight sampler while it is being sampled from, inside the engine: who goes on with which weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, SamplerCapabilities, Snapshot
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine.engine import Engine
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.settings import ConsistencySettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine
from tinsmith.testing.snapshot_faults import FaultySampler, wrong_alpha

MODEL = "s1:train:0"
LENGTH = 40


class Sampler(FaultySampler):
    """Holds each long sample at a token until it may go on, and notes what it is asked to do."""

    def __init__(self, toy: ToyBackend) -> None:
        super().__init__(toy)
        self._toy = toy
        self.inflight = toy.sampler_capabilities.inflight
        self.loaded: set[str] = set()
        self.moves: list[tuple[str, str]] = []
        self.moved, self.drawing, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.unscored = ""  # the snapshot whose check is held until it may be scored
        self.may_score = asyncio.Event()

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return replace(super().sampler_capabilities, inflight=self.inflight)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await super().load_snapshot(snapshot)
        self.loaded.add(snapshot.snapshot_id)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await super().drop_snapshot(snapshot_id)
        self.loaded.discard(snapshot_id)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        await super().move_samples(snapshot_id, newer_id)
        self.moves.append((snapshot_id, newer_id))
        self.moved.set()

    async def sample(self, op: ops.Sample) -> ops.SampleOutput | ops.Failed:
        """Begin with the weights that are in use now, and draw once the sample may go on."""
        if op.snapshot_id == self.unscored:
            await self.may_score.wait()
        if op.params.max_tokens < LENGTH:
            return await super().sample(op)
        self.drawing.set()
        await self.go_on.wait()
        return await super().sample(op)


class Setup:
    def __init__(self, data_dir: Path, store: SqlStore) -> None:
        losses = {loss.name: loss for loss in BUILTIN_LOSSES}
        self._context = BackendContext(model_name="toy", model_path=None, cache_dir=data_dir, losses=losses)
        self._data_dir = data_dir
        self.store = store
        self.judged: asyncio.Queue[OperationFinished] = asyncio.Queue()  # saves whose check has ended
        self.start_again()

    def start_again(self) -> None:
        """Lose everything in memory, as the end of an engine's process does."""
        self.toy = ToyBackend(ToyConfig(max_models=3), self._context)
        self.sampler = Sampler(self.toy)

    async def engine(self, **options: Any) -> Engine:
        return await make_engine(
            self.store,
            self.toy,
            self._data_dir,
            sampler=self.sampler,
            on_finished=self._note,
            consistency=ConsistencySettings(),
            **options,
        )

    def _note(self, event: OperationFinished) -> None:
        if event.kind == "save_for_sampler":
            self.judged.put_nowait(event)

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[EngineDriver]:
        async with serving(await self.engine(**options)):
            client = EngineDriver(self.store, "toy")
            await client.open_session()
            await client.result(await client.create_model())
            yield client


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[None]:
    task = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        engine.stop()
        await asyncio.wait_for(task, WAIT_S)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield Setup(tmp_path, store)
    await store.close()


async def save_after_step(client: EngineDriver, number: int, *, inflight: bool = True) -> None:
    targets = np.arange(3, 33)
    inputs = {"target_tokens": targets, "weights": np.ones(30, np.float32)}
    data = (ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs),)
    await client.run(ops.ForwardBackward(model_id=MODEL, data=data))
    await client.run(ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.1)))
    saved = await client.run(
        ops.SaveForSampler(model_id=MODEL, sampling_session_id=f"s1:sample:{number}", inflight=inflight)
    )
    assert isinstance(saved, ops.WeightsSaved), saved


def sample(number: int, *, max_tokens: int = LENGTH, inflight: bool = True) -> ops.Sample:
    name = f"s1:sample:{number}"
    return ops.Sample(
        sampling_session_id=name,
        snapshot_id=f"{name}{ops.INFLIGHT}" if inflight else name,
        prompt_P=np.arange(3, 7, dtype=np.int32),
        params=ops.SamplingParams(max_tokens=max_tokens, seed=0, stop_at_eos=False),
    )


def names(output: ops.Result) -> list[tuple[str, int]]:
    assert isinstance(output, ops.SampleOutput), output
    return [(span.snapshot_id, span.length) for span in output.sequences[0].weights]


async def within(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), WAIT_S)


async def test_a_running_sample_goes_on_with_each_later_save(setup: Setup) -> None:
    """It keeps the snapshot with which it began and the present one in the sampler, and no other."""
    async with setup.running(resident_snapshots=1) as client:
        await save_after_step(client, 0)
        running = await client.submit(sample(0))
        await within(setup.sampler.drawing)
        for number in (1, 2, 3):
            setup.sampler.moved.clear()
            await save_after_step(client, number)
            await within(setup.sampler.moved)
        first, present = (f"s1:sample:{number}{ops.INFLIGHT}" for number in (0, 3))
        assert setup.sampler.moves == [(first, f"s1:sample:{number}{ops.INFLIGHT}") for number in (1, 2, 3)]
        await client.run(sample(3, max_tokens=2))  # makes room
        assert setup.sampler.loaded == {first, present}
        await save_after_step(client, 4, inflight=False)
        await client.run(sample(4, max_tokens=2, inflight=False))  # makes room, too
        assert setup.sampler.loaded == {first, present, "s1:sample:4"}
        setup.sampler.go_on.set()
        assert names(await client.result(running)) == [(present, LENGTH)]
        await client.run(sample(3, max_tokens=2))
        assert setup.sampler.loaded == {present}


async def test_weights_that_fail_their_check_reach_no_running_sample(setup: Setup) -> None:
    async with setup.running() as client:
        await save_after_step(client, 0)
        running = await client.submit(sample(0))
        await within(setup.sampler.drawing)
        setup.sampler.fault = wrong_alpha
        await save_after_step(client, 1)
        refused = await client.failure(await client.submit(sample(1, max_tokens=2)))
        assert "does not serve what was trained" in refused.message
        assert setup.sampler.moves == []
        setup.sampler.go_on.set()
        assert names(await client.result(running)) == [(f"s1:sample:0{ops.INFLIGHT}", LENGTH)]
        setup.sampler.fault = None
        await save_after_step(client, 2)
        assert names(await client.run(sample(0, max_tokens=2))) == [(f"s1:sample:2{ops.INFLIGHT}", 2)]


async def test_a_check_that_ends_late_takes_no_sample_back_to_older_weights(setup: Setup) -> None:
    old, late, new = (f"s1:sample:{number}{ops.INFLIGHT}" for number in range(3))
    async with setup.running() as client:
        await save_after_step(client, 0)
        running = await client.submit(sample(0))
        await within(setup.sampler.drawing)
        await setup.judged.get()
        setup.sampler.unscored = late
        await save_after_step(client, 1)
        await save_after_step(client, 2)
        await within(setup.sampler.moved)
        setup.sampler.may_score.set()
        for _ in range(2):
            await asyncio.wait_for(setup.judged.get(), WAIT_S)
        assert setup.sampler.moves == [(old, new)]
        setup.sampler.go_on.set()
        assert names(await client.result(running)) == [(new, LENGTH)]


@pytest.mark.parametrize("what", ["a snapshot", "another model's", "a sampler that cannot"])
async def test_nobody_else_is_moved(setup: Setup, what: str) -> None:
    if what == "a sampler that cannot":
        setup.sampler.inflight = "between_requests"
    async with setup.running() as client:
        await save_after_step(client, 0, inflight=what != "a snapshot")
        running = await client.submit(sample(0, inflight=what != "a snapshot"))
        await within(setup.sampler.drawing)
        if what == "another model's":
            await client.result(await client.create_model(1))
            other = ops.SaveForSampler(model_id=client.model_id(1), sampling_session_id="s1:sample:1", inflight=True)
            await client.run(other)
        else:
            await save_after_step(client, 1)
        await client.run(sample(1, max_tokens=2))  # its answer waits for the check
        setup.sampler.go_on.set()
        expected = [] if what == "a snapshot" else [(f"s1:sample:0{ops.INFLIGHT}", LENGTH)]
        assert names(await client.result(running)) == expected
        assert setup.sampler.moves == []


async def test_a_moved_sample_is_cancelled_and_gives_its_snapshots_up(setup: Setup) -> None:
    async with setup.running(resident_snapshots=1) as client:
        await save_after_step(client, 0)
        running = await client.submit(sample(0))
        await within(setup.sampler.drawing)
        await save_after_step(client, 1)
        await within(setup.sampler.moved)
        await setup.store.cancel(running)
        await client.run(ops.UnloadModel(model_id=MODEL))
        assert setup.sampler.loaded == set()


async def test_after_a_crash_a_moved_sample_is_drawn_with_the_newest_weights(setup: Setup) -> None:
    async with setup.running() as client:
        await save_after_step(client, 0)
        running = await client.submit(sample(0))
        await within(setup.sampler.drawing)
        await save_after_step(client, 1)
        await within(setup.sampler.moved)
    setup.start_again()
    setup.sampler.go_on.set()
    engine = await setup.engine()
    await engine.recover("killed", lambda _stage, _share: None)
    async with serving(engine):
        assert names(await client.result(running)) == [(f"s1:sample:1{ops.INFLIGHT}", LENGTH)]
        expected = await client.run(sample(1))
    assert isinstance(expected, ops.SampleOutput)
