"""The engine while trainer and sampler take turns: how often they change, and what becomes of a change that fails."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.builtin.toy_sampler import ToySampler
from tinsmith.engine.device_turns import DeviceTurns, sleepers
from tinsmith.engine.engine import Engine
from tinsmith.engine.failures import EngineFailedError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import DeviceTurn, StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine

MODEL = "s1:train:0"
DATUM = ops.Datum(
    tokens_T=np.arange(3, 20, dtype=np.int32),
    loss_inputs={"target_tokens": np.arange(4, 21), "weights": np.ones(17, np.float32)},
)


class Trainer(ToyBackend):
    """It may fail to wake."""

    has_memory = True

    def wake_trainer(self) -> None:
        expect(has_memory=self.has_memory)
        super().wake_trainer()


class Sampler(ToySampler):
    """It may fail to sleep."""

    has_memory = True

    async def sleep_sampler(self) -> None:
        expect(has_memory=self.has_memory)
        await super().sleep_sampler()


def expect(*, has_memory: bool) -> None:
    if not has_memory:
        msg = "no memory for what was asleep"
        raise OSError(msg)


class Setup:
    def __init__(self, data_dir: Path, store: SqlStore) -> None:
        self.data_dir, self.store = data_dir, store
        self.client = EngineDriver(store, "toy")
        self.told: list[DeviceTurn] = []
        self.begin()

    def begin(self) -> None:
        """Lose what the backends hold, as the end of an engine's process does."""
        losses = {loss.name: loss for loss in BUILTIN_LOSSES}
        context = BackendContext(model_name="toy", model_path=None, cache_dir=self.data_dir, losses=losses)
        self.trainer, self.sampler = Trainer(ToyConfig(), context), Sampler(ToyConfig(), context)
        self.trainer.sleep_trainer()

    async def engine(self) -> Engine:
        thread = ThreadPoolExecutor(1)
        turns = DeviceTurns(
            sleepers(self.trainer, self.sampler, thread), least_s=60.0, gap_s=0.0, tell=self.told.append
        )
        return await make_engine(
            self.store, self.trainer, self.data_dir, sampler=self.sampler, thread=thread, turns=turns
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        engine = await self.engine()
        await engine.recover("the test says so", lambda _what, _share: None)
        task = asyncio.create_task(engine.run())
        yield task
        engine.stop()
        await asyncio.wait([task])

    async def train(self) -> ops.Result:
        await self.client.run(ops.ForwardBackward(model_id=MODEL, data=(DATUM,)))
        return await self.client.run(ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.01)))

    async def save_and_sample(self, number: int, *, path: str | None = None) -> None:
        session_id = f"s1:sample:{number}"
        ephemeral = None if path else session_id
        saved = await self.client.run(ops.SaveForSampler(model_id=MODEL, path=path, sampling_session_id=ephemeral))
        assert isinstance(saved, ops.WeightsSaved), saved
        params = ops.SamplingParams(max_tokens=2, seed=0)
        drawn = await self.client.run(
            ops.Sample(
                sampling_session_id=session_id,
                snapshot_id=path or session_id,
                prompt_P=np.arange(3, 7, dtype=np.int32),
                params=params,
            )
        )
        assert isinstance(drawn, ops.SampleOutput), drawn


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    setup = Setup(tmp_path, store)
    await setup.client.open_session()
    yield setup
    await store.close()


@pytest.mark.parametrize("persisted", [False, True])
async def test_a_step_of_reinforcement_learning_changes_turns_twice(setup: Setup, *, persisted: bool) -> None:
    """The trainer publishes and scores in one turn, and the sampler loads, scores and samples in the next."""
    async with setup.running():
        await setup.client.result(await setup.client.create_model())
        await setup.save_and_sample(0)  # the gate scores the base model as well, once
        for number in (1, 2):
            before = setup.told[-1].changes
            await setup.train()
            path = setup.client.path(f"s{number}", "sampler_weights") if persisted else None
            await setup.save_and_sample(number, path=path)
            assert setup.told[-1].changes == before + 2


@pytest.mark.parametrize("which", ["sleep", "wake"])
async def test_a_failed_change_ends_the_engine_and_the_next_one_goes_on(setup: Setup, which: str) -> None:
    async with setup.running():
        await setup.client.result(await setup.client.create_model())
        await setup.save_and_sample(0)
        expected = await setup.train()
    setup.begin()
    async with setup.running() as task:
        await setup.save_and_sample(1)  # from here on the sampler has the device
        (setup.trainer if which == "wake" else setup.sampler).has_memory = False
        request_id = await setup.client.submit(ops.ForwardBackward(model_id=MODEL, data=(DATUM,)))
        with pytest.raises(EngineFailedError, match="could not be given to training: OSError: no memory for what"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)
    setup.begin()
    async with setup.running():
        assert isinstance(await setup.client.result(request_id), ops.ForwardBackwardOutput)
        stepped = await setup.client.run(ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.01)))
        assert isinstance(stepped, ops.OptimStepOutput)
        assert isinstance(expected, ops.OptimStepOutput)
        assert stepped.metrics["grad_norm"] != expected.metrics["grad_norm"]
        await setup.save_and_sample(2)
