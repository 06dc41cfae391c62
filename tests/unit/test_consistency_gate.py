"""The consistency gate inside the engine: what a refused save leaves behind, what is recorded, what clients see."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, SamplerCapabilities
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine import consistency_gate
from tinsmith.engine.consistency_gate import MOST_WAITING
from tinsmith.engine.engine import Engine
from tinsmith.engine.probes import PROBE_ID
from tinsmith.errors import NotFoundError
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.settings import ConsistencySettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine
from tinsmith.testing.snapshot_faults import FaultySampler, wrong_alpha

LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}
MODEL = "s1:train:0"


class Sampler(FaultySampler):
    """Tracks what is loaded. Can be made unable to score prompts, or to fail."""

    def __init__(self, toy: ToyBackend) -> None:
        super().__init__(toy)
        self.loaded: set[str] = set()
        self.scores_prompts = True
        self.broken = False
        self.drew = asyncio.Event()  # a sample that is no probe
        self.may_score = asyncio.Event()
        self.may_score.set()

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return replace(super().sampler_capabilities, prompt_logprobs=self.scores_prompts)

    async def load_snapshot(self, snapshot: Any) -> None:
        await super().load_snapshot(snapshot)
        self.loaded.add(snapshot.snapshot_id)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await super().drop_snapshot(snapshot_id)
        self.loaded.discard(snapshot_id)

    async def sample(self, op: ops.Sample) -> ops.SampleOutput | ops.Failed:
        if self.broken and op.snapshot_id is not None:
            return ops.Failed(message="out of slots", category="server")
        if op.prompt_logprobs:
            await self.may_score.wait()
        result = await super().sample(op)
        if not op.prompt_logprobs:
            self.drew.set()
        return result


class Setup:
    def __init__(self, data_dir: Path, store: SqlStore) -> None:
        self.context = BackendContext(model_name="toy", model_path=None, cache_dir=data_dir, losses=LOSSES)
        self.data_dir = data_dir
        self.store = store
        self.events: list[OperationFinished] = []
        self._told = asyncio.Event()
        self.go_on = threading.Event()
        self.start_again()

    def start_again(self) -> None:
        """Lose the models, as the end of an engine's process does."""
        self.toy = ToyBackend(ToyConfig(max_models=3), self.context)
        self.sampler = Sampler(self.toy)

    def tell_of_unloading(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        unloaded, unload = threading.Event(), self.toy.unload_model

        def told(model_id: str) -> None:
            unload(model_id)
            if model_id == MODEL:
                unloaded.set()

        monkeypatch.setattr(self.toy, "unload_model", told)
        return unloaded

    def hold_forward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hold the training thread in every forward pass until `go_on` is set."""
        forward = self.toy.forward

        def held(operations: Sequence[ops.Forward]) -> Any:
            assert self.go_on.wait(WAIT_S)
            return forward(operations)

        monkeypatch.setattr(self.toy, "forward", held)

    async def engine(self, **consistency: Any) -> Engine:
        return await make_engine(
            self.store,
            self.toy,
            self.data_dir,
            sampler=self.sampler,
            on_finished=self._tell,
            consistency=ConsistencySettings(**consistency),
        )

    @asynccontextmanager
    async def running(self, **consistency: Any) -> AsyncIterator[EngineDriver]:
        async with serving(await self.engine(**consistency)):
            client = EngineDriver(self.store, "toy")
            await client.open_session()
            await client.result(await client.create_model())
            try:
                yield client
            finally:
                self.go_on.set()

    def _tell(self, event: OperationFinished) -> None:
        self.events.append(event)
        self._told.set()

    async def told_of(self, number: int) -> None:
        """Wait for the verdicts on so many saves."""
        async with asyncio.timeout(WAIT_S):
            while len(self.verdicts()) < number:
                self._told.clear()
                await self._told.wait()

    def verdicts(self) -> list[ops.Consistency | None]:
        """Return what the gate found of the saves, in the order in which it ended."""
        return [event.consistency for event in self.events if event.kind == "save_for_sampler"]

    def files(self) -> list[str]:
        root = self.data_dir / "checkpoints"
        return sorted(path.name for path in root.rglob("*") if path.is_file()) if root.exists() else []


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


async def train(client: EngineDriver, steps: int = 2, model_id: str = MODEL, rate: float = 1e-3) -> None:
    targets = np.arange(3, 33)
    inputs = {"target_tokens": targets, "weights": np.ones(30, np.float32)}
    data = (ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs),)
    for _ in range(steps):
        await client.run(ops.ForwardBackward(model_id=model_id, data=data))
        await client.run(ops.OptimStep(model_id=model_id, adam=ops.AdamParams(learning_rate=rate)))


def persisted(client: EngineDriver, name: str) -> ops.SaveForSampler:
    return ops.SaveForSampler(model_id=MODEL, path=client.path(name, "sampler_weights"))


def ephemeral(number: int) -> ops.SaveForSampler:
    return ops.SaveForSampler(model_id=MODEL, sampling_session_id=f"s1:sample:{number}")


def sample(number: int) -> ops.Sample:
    name = f"s1:sample:{number}"
    params = ops.SamplingParams(max_tokens=1, seed=0)
    return ops.Sample(
        sampling_session_id=name, snapshot_id=name, prompt_P=np.arange(3, 7, dtype=np.int32), params=params
    )


async def test_a_refused_save_leaves_nothing_and_says_why(setup: Setup) -> None:
    async with setup.running() as client:
        await train(client)
        setup.sampler.fault = wrong_alpha
        assert_refused(await client.failure(await client.submit(persisted(client, "x"))))
        assert setup.files() == []
        assert setup.sampler.loaded == set()
        with pytest.raises(NotFoundError):
            await setup.store.get_checkpoint(client.path("x", "sampler_weights"))
        setup.sampler.fault = None
        saved = await client.run(persisted(client, "x"))  # the name is still free, and the model still works
        assert isinstance(saved, ops.WeightsSaved)
        assert saved.consistency is not None
        assert saved.consistency.verdict == "consistent"
        await train(client)
        assert isinstance(await client.run(ephemeral(1)), ops.WeightsSaved)
    (refused,) = [e.consistency for e in setup.events if e.failed is not None]
    assert refused is not None
    assert refused.verdict == "inconsistent"


def assert_refused(failure: ops.Failed) -> None:
    assert failure.category == "server"
    for said in ("does not serve what was trained", "probe tokens differ by at most", "models[].consistency"):
        assert said in failure.message


async def test_an_ephemeral_save_is_answered_before_its_verdict_and_nothing_is_sampled_until_then(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.hold_forward(monkeypatch)
    async with setup.running() as client:
        saved = await client.run(ephemeral(0))
        assert saved == ops.WeightsSaved(sampling_session_id="s1:sample:0")
        asked = await client.submit(sample(0))
        await asyncio.wait_for(setup.sampler.drew.wait(), WAIT_S)  # beside the probes
        record = await setup.store.wait_for(asked, 0.05)
        assert record.result is None
        assert setup.verdicts() == []
        setup.go_on.set()
        assert isinstance(await client.result(asked), ops.SampleOutput)
        (found,) = setup.verdicts()
    assert found is not None
    assert found.verdict == "consistent"


async def test_a_model_that_trains_behind_its_save_is_compared_as_it_was(setup: Setup) -> None:
    async with setup.running() as client:
        await train(client)
        await asyncio.gather(client.run(ephemeral(0)), train(client, rate=0.1))
        assert isinstance(await client.run(sample(0)), ops.SampleOutput)
    (found,) = setup.verdicts()
    assert found is not None
    assert (found.verdict, found.max_difference) == ("consistent", 0.0)


async def test_samples_of_a_refused_snapshot_fail_and_say_why(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.hold_forward(monkeypatch)
    async with setup.running() as client:
        await train(client)
        setup.sampler.fault = wrong_alpha
        await client.run(ephemeral(0))
        before = await client.submit(sample(0))
        setup.go_on.set()
        assert_refused(await client.failure(before))
        assert_refused(await client.failure(await client.submit(sample(0))))
        assert setup.sampler.loaded == set()
        assert "does not serve what was trained" in str((await setup.store.get_run(MODEL)).state_reason)
        setup.sampler.fault = None
        await client.run(ephemeral(1))
        assert isinstance(await client.run(sample(1)), ops.SampleOutput)
        await client.run(ops.UnloadModel(model_id=MODEL))
        assert "is gone" in (await client.failure(await client.submit(sample(0)))).message
    assert [found is not None and found.verdict for found in setup.verdicts()] == ["inconsistent", "consistent"]


async def test_a_model_is_gone_after_the_verdict(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    unloaded = setup.tell_of_unloading(monkeypatch)
    async with setup.running() as client:
        setup.sampler.may_score.clear()
        await client.run(ephemeral(0))
        unloading = await client.submit(ops.UnloadModel(model_id=MODEL))
        await asyncio.to_thread(unloaded.wait, WAIT_S)
        record = await setup.store.wait_for(unloading, 0.05)
        assert record.result is None
        setup.sampler.may_score.set()
        assert isinstance(await client.result(unloading), ops.ModelUnloaded)
        assert setup.sampler.loaded == set()
    (found,) = setup.verdicts()
    assert found is not None
    assert found.verdict == "consistent"


async def test_a_snapshot_is_compared_again_after_a_crash(setup: Setup) -> None:
    """The verdict is recorded nowhere, so a crash may have come before it."""
    async with setup.running() as client:
        await train(client)
        await client.run(ephemeral(0))
    setup.start_again()
    setup.sampler.fault = wrong_alpha
    engine = await setup.engine()
    await engine.recover("killed", lambda _stage, _share: None)
    async with serving(engine):
        assert_refused(await client.failure(await client.submit(sample(0))))


async def test_with_warn_the_save_goes_through_and_the_figures_are_kept(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    async with setup.running(action="warn") as client:
        await train(client)
        setup.sampler.fault = wrong_alpha
        request_id = await client.submit(persisted(client, "x"))
        saved = await client.result(request_id)
    assert isinstance(saved, ops.WeightsSaved)
    assert saved.consistency is not None
    assert saved.consistency.verdict == "inconsistent"
    assert saved.consistency.max_difference is not None
    assert "adapter_model.safetensors" in setup.files()
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "does not match the trained model" in record.getMessage()


async def test_off_compares_nothing(setup: Setup) -> None:
    async with setup.running(action="off") as client:
        await train(client)
        setup.sampler.fault = wrong_alpha
        saved = await client.run(ephemeral(0))
    assert isinstance(saved, ops.WeightsSaved)
    assert saved.consistency is None


async def test_a_sampler_that_scores_no_prompts_is_said_not_to_be_compared(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.sampler.scores_prompts = False
    async with setup.running() as client:
        await client.run(ephemeral(0))
    (found,) = setup.verdicts()
    assert found is not None
    assert found.verdict == "not compared"
    assert "cannot score prompts" in str(found.reason)
    assert "was not compared with its trainer" in caplog.text


async def test_a_sampler_that_fails_on_the_snapshot_is_refused(setup: Setup) -> None:
    setup.sampler.broken = True
    async with setup.running() as client:
        failure = await client.failure(await client.submit(persisted(client, "x")))
    assert "the sampler could not score the probes: out of slots" in failure.message


async def test_a_model_that_has_diverged_is_its_owners_business(setup: Setup) -> None:
    async with setup.running() as client:
        await train(client)
        for weights in setup.toy.device.models[MODEL].weights.values():
            weights.fill(np.nan)
        await client.run(ephemeral(0))
    (found,) = setup.verdicts()
    assert found is not None
    assert "it has diverged" in str(found.reason)


async def test_a_configured_bound_holds(setup: Setup) -> None:
    async with setup.running(max_difference=1e-12) as client:
        await train(client)
        setup.sampler.fault = lambda snapshot, _: shaken(snapshot)
        failure = await client.failure(await client.submit(persisted(client, "x")))
    assert "at most 1e-12 is allowed" in failure.message


def shaken(snapshot: Any) -> Any:
    return type(snapshot)(
        snapshot.snapshot_id, snapshot.lora, {k: v * np.float32(1.00001) for k, v in snapshot.adapter_weights().items()}
    )


async def test_the_base_model_is_scored_once_there_is_room_for_a_fresh_adapter(setup: Setup) -> None:
    async with setup.running() as client:
        for number in (1, 2):  # the backend has no room left
            await client.result(await client.create_model(number))
        await train(client)
        first = await client.run(persisted(client, "x"))
        await client.run(ops.UnloadModel(model_id=client.model_id(2)))
        second = await client.run(persisted(client, "y"))
        last_one_fits = await client.result(await client.create_model(3))
    found = [saved.consistency for saved in (first, second) if isinstance(saved, ops.WeightsSaved)]
    assert [each is not None and each.verdict for each in found] == ["consistent", "consistent"]
    assert [each is not None and each.base_difference for each in found] == [None, 0.0]
    assert isinstance(last_one_fits, ops.ModelCreated), "the probes' own adapter must not stay"


async def test_saving_changes_no_bit_of_any_tenants_training(tmp_path: Path) -> None:
    """With and without the gate: the same losses, weights and moments, also of another model."""
    states = []
    for action in ("refuse", "off"):
        directory = tmp_path / action
        store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=directory))
        await store.open()
        setup = Setup(directory, store)
        async with setup.running(action=action) as client:
            await client.result(await client.create_model(1))
            for number in range(3):
                await asyncio.gather(train(client, 1), train(client, 1, client.model_id(1)))
                await client.run(ephemeral(number))
            states.append([setup.toy.capture_state(client.model_id(each)) for each in (0, 1)])
        await store.close()
    for gated, alone in zip(*states, strict=True):
        assert_same(gated, alone)


def assert_same(left: Any, right: Any) -> None:
    for what in ("weights", "adam_m", "adam_v", "gradients"):
        ours, theirs = getattr(left, what), getattr(right, what)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


class Calls:
    """The calls of a trainer that score or change a model."""

    def __init__(self, toy: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        for verb in ("forward", "optim_step"):
            monkeypatch.setattr(toy, verb, self._noting(verb, getattr(toy, verb)))

    def _noting(self, verb: str, call: Any) -> Any:
        def noted(operations: Sequence[Any]) -> Any:
            self.made.extend((verb, each.model_id) for each in operations)
            return call(operations)

        return noted


@pytest.fixture
def nobody_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons begin when they must, and never because time has passed."""
    monkeypatch.setattr(consistency_gate, "LATEST_S", WAIT_S)


@pytest.mark.usefixtures("nobody_hurries")
async def test_saves_between_two_steps_share_the_trainers_scores(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(setup.toy, monkeypatch)
    async with setup.running() as client:
        await client.run(ephemeral(0))
        await client.run(ephemeral(1))
        for number in (0, 1):
            await client.run(sample(number))
        assert calls.made == [("forward", MODEL), ("forward", PROBE_ID)]
        await train(client, steps=1)
        await client.run(ephemeral(2))
        await client.run(sample(2))
    assert calls.made[2:] == [("optim_step", MODEL), ("forward", MODEL)]
    assert [found is not None and found.verdict for found in setup.verdicts()] == ["consistent"] * 3


@pytest.mark.usefixtures("nobody_hurries")
async def test_a_comparison_waits_for_a_sample(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(setup.toy, monkeypatch)
    async with setup.running() as client:
        await client.run(ephemeral(0))
        await client.run(ephemeral(1))
        assert calls.made == []
        await client.run(sample(1))
        assert ("forward", MODEL) in calls.made
        assert len(setup.verdicts()) == 1
        await client.run(sample(0))
        assert len(setup.verdicts()) == 2


@pytest.mark.usefixtures("nobody_hurries")
async def test_a_model_is_scored_before_it_changes(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(setup.toy, monkeypatch)
    async with setup.running() as client:
        await client.run(ephemeral(0))
        await train(client, steps=2, rate=0.1)
        assert calls.made == [("forward", MODEL), ("optim_step", MODEL), ("optim_step", MODEL)]
        await client.run(sample(0))
    (found,) = setup.verdicts()
    assert found is not None
    assert (found.verdict, found.max_difference) == ("consistent", 0.0)


@pytest.mark.usefixtures("nobody_hurries")
async def test_a_few_comparisons_wait_and_an_unload_waits_for_them(setup: Setup) -> None:
    async with setup.running() as client:
        for number in range(MOST_WAITING + 1):
            await client.run(ephemeral(number))
        await setup.told_of(1)
        await client.run(ops.UnloadModel(model_id=MODEL))
        assert len(setup.verdicts()) == MOST_WAITING + 1


async def test_a_snapshot_that_nobody_samples_from_is_compared_soon(setup: Setup) -> None:
    async with setup.running() as client:
        await client.run(ephemeral(0))
        await setup.told_of(1)
