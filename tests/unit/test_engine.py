"""The engine on the toy backend and a store on disk, without HTTP."""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, HostSnapshot, SamplerCapabilities, Snapshot
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.checkpoints.saved import delete_checkpoint, read_checkpoint, write_checkpoint
from tinsmith.engine import context
from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.engine import Engine
from tinsmith.engine.failures import EngineFailedError
from tinsmith.errors import StoreError, UnsupportedError, UserError
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.settings import ServerSettings, WatchdogSettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import Claim, Completion, Lease, OperationState, RunState, StoreContext
from tinsmith.testing.contract import assert_same_arrays
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine
from tinsmith.testing.saved_files import read_saved

LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}
ADAM = ops.AdamParams(learning_rate=0.01)


class WatchedBackend(ToyBackend):
    """The toy backend. It records its calls, and can be made to fail or to wait."""

    def __init__(self, tmp_path: Path, **config: Any) -> None:
        context = BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses=LOSSES)
        super().__init__(ToyConfig(**config), context)
        self.batches: list[tuple[str, list[str]]] = []
        self.begun = threading.Semaphore(0)  # one for each batch
        self.loaded: set[str] = set()
        self.fail_next: BaseException | None = None
        self.training_held: threading.Event | None = None
        self.sampling_held: asyncio.Event | None = None
        self.cancelled = asyncio.Event()
        self.asked, self.drawn = asyncio.Semaphore(0), asyncio.Semaphore(0)  # one for each sample

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        return self._noted("forward_backward", ops, super().forward_backward)

    def optim_step(self, ops: Sequence[ops.OptimStep]) -> Any:
        return self._noted("optim_step", ops, super().optim_step)

    def _noted(self, kind: str, operations: Sequence[Any], run: Any) -> Any:
        self.batches.append((kind, [each.model_id for each in operations]))
        self.begun.release()
        if self.training_held is not None:
            assert self.training_held.wait(WAIT_S)
        if self.fail_next is not None:
            raise self.fail_next
        return run(operations)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        self.loaded.add(snapshot.snapshot_id)
        await super().load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self.loaded.discard(snapshot_id)
        await super().drop_snapshot(snapshot_id)

    async def sample(self, op: ops.Sample) -> Any:
        self.asked.release()
        try:
            if self.sampling_held is not None:
                await self.sampling_held.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.fail_next is not None:
            raise self.fail_next
        output = await super().sample(op)
        self.drawn.release()
        return output


@dataclass
class Setup:
    backend: WatchedBackend
    data_dir: Path
    store: SqlStore
    events: list[OperationFinished] = field(default_factory=list)
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, event: OperationFinished) -> None:
        self.events.append(event)
        self.happened.set()

    async def until(self, kind: str) -> None:
        while not any(event.kind == kind for event in self.events):
            self.happened.clear()
            await asyncio.wait_for(self.happened.wait(), WAIT_S)

    def client(self, **who: str) -> EngineDriver:
        return EngineDriver(self.store, "toy", **who)

    async def make_engine(self, **settings: Any) -> Engine:
        options = {"sampler": self.backend, **settings}
        return await make_engine(self.store, self.backend, self.data_dir, on_finished=self.note, **options)

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[Engine]:
        engine = await self.make_engine(**settings)
        await engine.recover("killed", lambda _what, _share: None)
        task = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
            await asyncio.wait_for(task, WAIT_S)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield Setup(WatchedBackend(tmp_path), tmp_path, store)
    await store.close()


@pytest.fixture
async def client(setup: Setup) -> EngineDriver:
    client = setup.client()
    await client.open_session()
    return client


def datum(*tokens: int) -> ops.Datum:
    targets = np.array(tokens, np.int64)
    return ops.Datum(
        tokens_T=targets.astype(np.int32),
        loss_inputs={"target_tokens": targets, "weights": np.ones(len(tokens), np.float32)},
    )


def a_pass(client: EngineDriver, number: int = 0, *tokens: int) -> ops.ForwardBackward:
    return ops.ForwardBackward(model_id=client.model_id(number), data=(datum(*(tokens or (1, 2, 3, 4))),))


def a_step(client: EngineDriver, number: int = 0) -> ops.OptimStep:
    return ops.OptimStep(model_id=client.model_id(number), adam=ADAM)


def a_sample(client: EngineDriver, snapshot_id: str | None = None, seed: int = 1) -> ops.Sample:
    return ops.Sample(
        sampling_session_id=f"{client.session_id}:sample:0",
        snapshot_id=snapshot_id,
        prompt_P=np.array([1, 2, 3], np.int32),
        params=ops.SamplingParams(max_tokens=6, seed=seed, stop_at_eos=False),
    )


async def tokens_of(client: EngineDriver, operation: ops.Sample) -> list[int]:
    result = await client.run(operation)
    assert isinstance(result, ops.SampleOutput), result
    return [int(token) for token in result.sequences[0].tokens]


async def loss_of(client: EngineDriver, number: int = 0) -> float:
    passed = a_pass(client, number)
    forward = ops.Forward(model_id=passed.model_id, data=passed.data)
    result = await client.run(forward)
    assert isinstance(result, ops.ForwardBackwardOutput), result
    return result.metrics["loss:sum"]


async def train(client: EngineDriver, number: int = 0, steps: int = 1) -> None:
    for _ in range(steps):
        await client.submit(a_pass(client, number))
        await client.run(a_step(client, number))


async def test_a_model_is_created_and_trained(setup: Setup, client: EngineDriver) -> None:
    async with setup.running():
        created = await client.create_model()
        assert await client.result(created) == ops.ModelCreated(model_id="s1:train:0")
        assert (await setup.store.get_run("s1:train:0")).state == RunState.READY
        before = await loss_of(client)
        await train(client, steps=3)
        assert await loss_of(client) < before
    run = await setup.store.get_run("s1:train:0")
    assert (run.next_seq_id, run.applied_seq_id) == (9, 8)
    assert [event.kind for event in setup.events[:4]] == ["create_model", "forward", "forward_backward", "optim_step"]
    assert {(event.tenant, event.model_id, event.failed) for event in setup.events} == {("ann", "s1:train:0", None)}


async def test_one_look_for_each_request(setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished operation makes room, but nothing was left for want of it; and no sample can have been cancelled."""
    looks: list[str] = []

    def counted(name: str) -> None:
        method = getattr(setup.store, name)

        async def look(*args: Any, **options: Any) -> Any:
            looks.append(name)
            return await method(*args, **options)

        monkeypatch.setattr(setup.store, name, look)

    async with setup.running():
        await client.result(await client.create_model())
        counted("claim")
        counted("cancelled")
        await train(client, steps=5)
    assert looks.count("cancelled") == 0
    assert looks.count("claim") <= 2 * 5 + 1  # a pass and a step each; the first look may be the creation's


async def test_what_was_queued_runs_in_order_and_merged(setup: Setup, client: EngineDriver) -> None:
    other = setup.client(tenant="bob", session_id="s2")
    await other.open_session()
    async with setup.running() as engine:
        for each in (client, other):
            await each.create_model()
            await each.run(a_step(each))
        setup.backend.batches.clear()
        setup.backend.training_held = threading.Event()
        held = await client.submit(a_step(client))
        while not setup.backend.batches:  # noqa: ASYNC110 - it runs in a thread, without an event to wait for
            await asyncio.sleep(0)
        for each in (client, other):
            for operation in (a_pass(each), a_pass(each), a_step(each)):
                last = await each.submit(operation)
        while len(engine.training.queue.waiting) < 6:  # noqa: ASYNC110 - the engine has no event to wait for
            await asyncio.sleep(0)  # until the engine has claimed them all
        setup.backend.training_held.set()
        await client.result(held)
        await other.result(last)
    assert [(kind, sorted(models)) for kind, models in setup.backend.batches] == [
        ("optim_step", ["s1:train:0"]),
        ("forward_backward", ["s1:train:0", "s1:train:0", "s2:train:0", "s2:train:0"]),
        ("optim_step", ["s1:train:0", "s2:train:0"]),
    ]


async def test_a_bad_operation_fails_alone_and_in_its_turn(setup: Setup, client: EngineDriver) -> None:
    other = setup.client(tenant="bob", session_id="s2")
    await other.open_session()
    await client.create_model()
    await other.create_model()
    good = await client.submit(a_pass(client))
    bad = await client.submit(a_pass(client, 0, 1, 9999))
    neighbour = await other.submit(a_pass(other))
    after = await client.submit(a_pass(client))
    last = await client.submit(a_step(client))
    async with setup.running():
        failed = await client.failure(bad)
        assert failed.category == "user"
        assert "9999" in failed.message
        for request_id in (good, neighbour, after):
            assert not isinstance(await client.result(request_id), ops.Failed)
        assert bad in (await client.failure(last)).message  # a step of its window
    recorded = [event.request_id for event in setup.events if event.model_id == client.model_id()]
    assert recorded[1:] == [good, bad, after, last]


async def test_a_refused_creation_fails_what_follows(setup: Setup, client: EngineDriver) -> None:
    created = await client.create_model(rank=10_000)
    passed = await client.submit(a_pass(client))
    async with setup.running():
        assert "10000" in (await client.failure(created)).message
        assert "could not be created" in (await client.failure(passed)).message
        run = await setup.store.get_run("s1:train:0")
        assert run.state == RunState.LOST
        later = await client.submit(a_step(client))
        assert "could not be created" in (await client.failure(later)).message


class Passing:
    """Time that passes for a watch while calls run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.watch = CallWatch(WatchdogSettings(), clock=lambda: self.now_s)

    def is_hung_after(self, seconds: float) -> bool:
        for _ in range(round(seconds)):
            self.now_s += 1.0
            seen = self.watch.check()
            assert seen is not None
        return seen.is_hung


async def test_a_retry_has_as_much_time_as_a_first_call(setup: Setup, client: EngineDriver) -> None:
    """It is tried in a new process, which compiles again."""
    engine = await setup.make_engine()
    running = asyncio.create_task(engine.run())
    await client.result(await client.create_model())
    setup.backend.fail_next = RuntimeError("a crash")
    step = await client.submit(a_step(client))
    with pytest.raises(EngineFailedError):
        await asyncio.wait_for(running, WAIT_S)
    setup.backend = WatchedBackend(setup.data_dir)
    setup.backend.training_held = threading.Event()
    passing = Passing()
    async with setup.running(watch=passing.watch):
        assert await asyncio.to_thread(setup.backend.begun.acquire, timeout=WAIT_S)
        is_hung = passing.is_hung_after(WatchdogSettings().first_s - 100)
        setup.backend.training_held.set()
        assert not is_hung
        assert isinstance(await client.result(step), ops.OptimStepOutput)


async def test_a_save_is_hung_only_if_its_files_are_whatever_it_waited_for(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing, settings = Passing(), WatchdogSettings()
    writing, released = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> int:
        writing.set()
        assert released.wait(WAIT_S)
        return write_checkpoint(*args, **kwargs)

    monkeypatch.setattr(context, "write_checkpoint", slow)
    async with setup.running(watch=passing.watch):
        for number in range(2):
            await client.result(await client.create_model(number))
        setup.backend.training_held = threading.Event()
        step = await client.submit(a_step(client, 1))
        assert await asyncio.to_thread(setup.backend.begun.acquire, timeout=WAIT_S)
        save = await client.submit(ops.SaveState(model_id=client.model_id(), path=client.path("here")))
        while (await setup.store.get_operation(save)).state != OperationState.RUNNING:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)
        behind_a_slow_step = passing.is_hung_after(settings.first_s - 100)
        setup.backend.training_held.set()
        await client.result(step)
        assert await asyncio.to_thread(writing.wait, WAIT_S)
        slowly, for_ever = passing.is_hung_after(settings.most_s - 100), passing.is_hung_after(101)
        released.set()
        assert isinstance(await client.result(save), ops.WeightsSaved)
    assert (behind_a_slow_step, slowly, for_ever) == (False, False, True)


async def test_save_and_load_bit_for_bit(setup: Setup, client: EngineDriver) -> None:
    async with setup.running():
        await client.create_model()
        await train(client, steps=2)
        await client.submit(a_pass(client))  # a pending gradient is part of the state
        path = client.path("here")
        save = ops.SaveState(
            model_id="s1:train:0", path=path, ttl_seconds=3600, user_metadata={"note": "x"}, overwrite=False
        )
        saved = await client.run(save)
        assert isinstance(saved, ops.WeightsSaved)
        record = await setup.store.get_checkpoint(path)
        assert (record.step, record.size_bytes, record.user_metadata) == (2, saved.size_bytes, {"note": "x"})
        assert record.expires_at is not None
        again = await client.run(save)
        assert isinstance(again, ops.Failed)
        assert "exists" in again.message

        await client.run(a_step(client))
        straight = await loss_of(client)
        await client.result(await client.create_model(1, rank=9, checkpoint=path, load_optimizer=True))
        assert (await setup.store.get_run("s1:train:1")).lora == record.lora
        await client.run(a_step(client, 1))
        assert await loss_of(client, 1) == straight
        again = await client.run(ops.LoadState(model_id="s1:train:1", path=path, load_optimizer=True))
        assert again == ops.WeightsLoaded(model_id="s1:train:1", path=path)

        loaded = await client.run(ops.LoadState(model_id="s1:train:0", path=path, load_optimizer=False))
        assert loaded == ops.WeightsLoaded(model_id="s1:train:0", path=path)
        state = setup.backend.capture_state("s1:train:0")
        assert (state.step, dict(state.adam_m), dict(state.gradients)) == (0, {}, {})
        saved_state = read_checkpoint(setup.data_dir / "checkpoints", record.directory).state
        for name, weights in saved_state.weights.items():
            np.testing.assert_array_equal(state.weights[name], weights)


async def test_loading_what_does_not_fit(setup: Setup, client: EngineDriver) -> None:
    async with setup.running():
        await client.create_model(0, rank=4)
        await client.create_model(1, rank=8)
        await client.run(ops.SaveState(model_id="s1:train:1", path=client.path("x", number=1)))
        for path, expected in (
            (client.path("x", number=1), "rank 8"),
            (client.path("missing"), "no checkpoint"),
            (client.path("x", "sampler_weights", number=1), "no checkpoint"),
        ):
            failed = await client.run(ops.LoadState(model_id="s1:train:0", path=path, load_optimizer=True))
            assert isinstance(failed, ops.Failed)
            assert failed.category == "user"
            assert expected in failed.message
        await train(client)  # the model is unchanged
        created = await client.create_model(2, checkpoint=client.path("missing"))
        assert "no checkpoint" in (await client.failure(created)).message


async def test_a_snapshot_does_not_change(setup: Setup, client: EngineDriver) -> None:
    async with setup.running():
        await client.create_model()
        await train(client, steps=3)
        save = ops.SaveForSampler(model_id="s1:train:0", sampling_session_id="s1:sample:0")
        saved = await client.run(save)
        assert isinstance(saved, ops.WeightsSaved)
        assert (saved.sampling_session_id, saved.path) == ("s1:sample:0", None)
        sampler = await setup.store.get_sampling_session("s1:sample:0")
        assert (sampler.snapshot_id, sampler.model_id, sampler.tenant) == ("s1:sample:0", "s1:train:0", "ann")
        early = await client.run(a_sample(client, "s1:sample:0"))
        base = await client.run(a_sample(client))
        await train(client, steps=5)
        late = await client.run(a_sample(client, "s1:sample:0"))
        assert isinstance(early, ops.SampleOutput)
        assert isinstance(late, ops.SampleOutput)
        assert isinstance(base, ops.SampleOutput)
        np.testing.assert_array_equal(early.sequences[0].logprobs, late.sequences[0].logprobs)
        assert not np.array_equal(early.sequences[0].logprobs, base.sequences[0].logprobs)


async def test_a_persisted_snapshot_outlives_the_engine(setup: Setup, client: EngineDriver, tmp_path: Path) -> None:
    path = client.path("x", "sampler_weights")
    async with setup.running():
        await client.create_model()
        await train(client, steps=3)
        saved = await client.run(ops.SaveForSampler(model_id="s1:train:0", path=path))
        assert isinstance(saved, ops.WeightsSaved)
        assert (await setup.store.get_checkpoint(path)).kind == "sampler"
        before = await tokens_of(client, a_sample(client, path))
    setup.backend = WatchedBackend(tmp_path)
    async with setup.running():
        assert await tokens_of(client, a_sample(client, path)) == before


class AdapterSampler(WatchedBackend):
    """Samples only from adapters, like a sampler that holds a single base model."""

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return replace(super().sampler_capabilities, full_fine_tuning=False)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.lora.rank == 0:
            raise UnsupportedError("adapters only")
        await super().load_snapshot(snapshot)


async def test_a_fully_trained_model_is_saved_where_it_cannot_be_sampled(
    setup: Setup, client: EngineDriver, tmp_path: Path
) -> None:
    """Its engine got another sampler since it was created: beside that, none is created any more.

    A save with a name writes a whole checkpoint for another server. Samples, and saves without a name, fail.
    """
    path, model_id = client.path("x", "sampler_weights"), "s1:train:0"
    sampler = AdapterSampler(tmp_path)
    async with setup.running():
        await client.create_model(rank=0)
        await train(client)
    async with setup.running(sampler=sampler):
        saved = await client.run(ops.SaveForSampler(model_id=model_id, path=path))
        assert isinstance(saved, ops.WeightsSaved), saved
        state = read_saved(setup.data_dir, path).state
        assert_same_arrays(state.weights, setup.backend.capture_state(model_id).weights, "the checkpoint")
        refused = await client.run(ops.SaveForSampler(model_id=model_id, sampling_session_id="s1:sample:0"))
        assert isinstance(refused, ops.Failed)
        assert "rank 0 trains all weights" in refused.message
        assert "or save with a name" in refused.message
        sampled = await client.run(a_sample(client, path))
        assert isinstance(sampled, ops.Failed)
        assert "adapters only" in sampled.message


async def test_a_name_that_was_deleted_and_used_again(setup: Setup, client: EngineDriver) -> None:
    path = client.path("x", "sampler_weights")

    async def save_and_sample() -> list[float]:
        saved = await client.run(ops.SaveForSampler(model_id="s1:train:0", path=path))
        assert isinstance(saved, ops.WeightsSaved), saved
        result = await client.run(a_sample(client, path))
        assert isinstance(result, ops.SampleOutput)
        return [float(logprob) for logprob in result.sequences[0].logprobs]

    async with setup.running():
        await client.create_model()
        await train(client, steps=2)
        first = await save_and_sample()
        record = await setup.store.delete_checkpoint(path)
        delete_checkpoint(setup.data_dir / "checkpoints", record.directory)
        await train(client, steps=2)
        assert await save_and_sample() != first


def adapter_bytes(backend: ToyBackend) -> int:
    """Return what a snapshot of the driver's models takes."""
    backend.create_model(ops.CreateModel(model_id="measured", lora=ops.LoraConfig(rank=4, seed=0)))
    size = backend.publish("measured", "measured").num_bytes
    backend.unload_model("measured")
    assert size > 0
    return size


def resident(number: int, num_bytes: int) -> dict[str, int]:
    return {"resident_snapshots": number, "resident_snapshot_bytes": num_bytes}


@pytest.mark.parametrize("limit", ["number", "bytes", "sampler"])
async def test_snapshots_beyond_the_limit_go_to_disk_and_come_back(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Whoever kept an old sampling client samples from the same weights as ever."""
    size = adapter_bytes(setup.backend)
    keeping = {
        "number": resident(2, 100 * size),
        "bytes": resident(100, 3 * size - 1),
        "sampler": resident(100, 100 * size),
    }[limit]
    if limit == "sampler":
        two = replace(setup.backend.sampler_capabilities, max_snapshots=2)
        monkeypatch.setattr(type(setup.backend), "sampler_capabilities", two)
    async with setup.running(**keeping):
        await client.create_model()
        wanted = []
        for number in range(5):
            await train(client)
            snapshot_id = f"s1:sample:{number}"
            await client.run(ops.SaveForSampler(model_id="s1:train:0", sampling_session_id=snapshot_id))
            wanted.append(await tokens_of(client, a_sample(client, snapshot_id)))
        assert setup.backend.loaded == {"s1:sample:3", "s1:sample:4"}
        assert len(list((setup.data_dir / "snapshots" / "toy").iterdir())) == 3
        for number, tokens in enumerate(wanted):
            assert await tokens_of(client, a_sample(client, f"s1:sample:{number}")) == tokens
        assert len(setup.backend.loaded) == 2

        await setup.store.end_session("s1", "success", None)
        await setup.until("unload_model")
        assert (await setup.store.get_run("s1:train:0")).state == RunState.UNLOADED
        assert setup.backend.loaded == set()
        assert list((setup.data_dir / "snapshots" / "toy").iterdir()) == []
        gone = await client.run(a_sample(client, "s1:sample:4"))
        assert isinstance(gone, ops.Failed)
        assert "is gone" in gone.message


async def test_a_sample_does_not_measure_the_snapshots_in_memory(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is measured when it is saved: a client may have made hundreds of them."""
    measured: list[str] = []

    def num_bytes(snapshot: HostSnapshot) -> int:
        measured.append(snapshot.snapshot_id)
        return 1

    monkeypatch.setattr(HostSnapshot, "num_bytes", property(num_bytes))
    async with setup.running(**resident(100, 100)):
        await client.create_model()
        ids = [f"s1:sample:{number}" for number in range(3)]
        for snapshot_id in ids:
            await client.run(ops.SaveForSampler(model_id="s1:train:0", sampling_session_id=snapshot_id))
        saved = list(measured)
        for snapshot_id in ids:
            await tokens_of(client, a_sample(client, snapshot_id))
    assert measured == saved


async def test_an_ephemeral_snapshot_is_dropped_before_its_session_ends_only_where_configured(
    setup: Setup, client: EngineDriver
) -> None:
    async def sampled(number: int) -> list[int]:
        return await tokens_of(client, a_sample(client, f"s1:sample:{number}"))

    def kept() -> set[str]:
        on_disk = (setup.data_dir / "snapshots" / "toy").iterdir()
        return {path.name.partition("~")[0] for path in on_disk} | setup.backend.loaded

    async with setup.running() as engine:
        await client.create_model()
        wanted = []
        for number in range(9):
            await train(client)
            publish = ops.SaveForSampler(model_id="s1:train:0", sampling_session_id=f"s1:sample:{number}")
            await client.run(publish)
            wanted.append(await sampled(number))
        await engine.sampling.snapshots.drop_unused()  # what the engine does every half minute
        assert len(kept()) == 9
    async with setup.running(**resident(2, 1 << 30), ephemeral_idle_s=0.0) as engine:
        assert await sampled(0) == wanted[0], "an old client samples again, after many newer ones and a new engine"
        setup.backend.sampling_held = asyncio.Event()
        request_id = await client.submit(a_sample(client, "s1:sample:3"))
        await asyncio.wait_for(setup.backend.asked.acquire(), WAIT_S)
        other = client.model_id(1)
        await client.create_model(1)
        await client.run(ops.SaveForSampler(model_id=other, sampling_session_id="s1:sample:9"))
        await engine.sampling.snapshots.drop_unused()
        assert kept() == {"s1:sample:3", "s1:sample:9"}, "in use, and the last used of the other model"
        setup.backend.sampling_held.set()
        result = await client.result(request_id)
        assert isinstance(result, ops.SampleOutput)
        assert result.sequences[0].tokens.tolist() == wanted[3]
        gone = await client.run(a_sample(client, "s1:sample:0"))
        assert isinstance(gone, ops.Failed)
        assert "nobody sampled from it for 0 s (ephemeral_idle_s)" in gone.message
    async with setup.running():
        assert await sampled(3) == wanted[3]


async def test_what_is_written_of_a_snapshot_while_its_model_is_unloaded_does_not_stay(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        write(*args, **kwargs)

    write = context.write_checkpoint
    async with setup.running(**resident(1, 1 << 30)) as engine:
        await client.create_model()
        first, second = (
            ops.SaveForSampler(model_id="s1:train:0", sampling_session_id=f"s1:sample:{number}") for number in range(2)
        )
        await client.run(first)
        monkeypatch.setattr(context, "write_checkpoint", slow)
        saving = asyncio.create_task(client.run(second))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        dropping = asyncio.create_task(engine.sampling.snapshots.drop_model("s1:train:0"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(saving, dropping)
        assert list((setup.data_dir / "snapshots" / "toy").iterdir()) == []
        assert "s1:sample:0" not in setup.backend.loaded


async def test_without_a_sampler_models_are_trained_and_saved_by_name(setup: Setup, client: EngineDriver) -> None:
    async with setup.running(sampler=None):
        await client.create_model()
        await train(client)
        refused = await client.run(ops.SaveForSampler(model_id="s1:train:0", sampling_session_id="s1:sample:0"))
        assert isinstance(refused, ops.Failed)
        assert "it has no sampler; save with a name instead" in refused.message
        path = client.path("x", "sampler_weights")
        saved = await client.run(ops.SaveForSampler(model_id="s1:train:0", path=path))
        assert isinstance(saved, ops.WeightsSaved)
        assert (saved.path, saved.consistency) == (path, None)
        for snapshot_id in (None, "s1:sample:0", path):
            sampled = await client.run(a_sample(client, snapshot_id))
            assert isinstance(sampled, ops.Failed)
            assert "has no sampler" in sampled.message
        await client.run(ops.UnloadModel(model_id="s1:train:0"))
    assert setup.backend.loaded == set()


async def test_an_export_is_written(setup: Setup, client: EngineDriver) -> None:
    async with setup.running():
        await client.create_model()
        path = client.path("x", "external_weights")
        saved = await client.run(ops.ExportAdapter(model_id="s1:train:0", path=path))
        assert isinstance(saved, ops.WeightsSaved)
        record = await setup.store.get_checkpoint(path)
        assert record.kind == "external"
        assert (setup.data_dir / "checkpoints" / record.directory / "adapter_config.json").is_file()


async def test_a_held_sample_holds_up_nothing_and_can_be_cancelled(setup: Setup, client: EngineDriver) -> None:
    setup.backend.sampling_held = asyncio.Event()
    async with setup.running():
        await client.create_model()
        held = [await client.submit(a_sample(client, seed=seed)) for seed in range(3)]
        await train(client)
        assert (await setup.store.get_operation(held[0])).state == OperationState.RUNNING
        await setup.store.cancel(held[1])
        await asyncio.wait_for(setup.backend.cancelled.wait(), WAIT_S)
        setup.backend.sampling_held.set()
        assert isinstance(await client.result(held[0]), ops.SampleOutput)
        assert isinstance(await client.result(held[2]), ops.SampleOutput)
        assert (await setup.store.get_operation(held[1])).state == OperationState.CANCELLED


async def test_a_bad_sample_fails_alone(setup: Setup, client: EngineDriver) -> None:
    async with setup.running():
        unknown = await client.submit(a_sample(client, "s9:sample:9"))
        missing = await client.submit(a_sample(client, client.path("nope", "sampler_weights")))
        outside = await client.submit(
            ops.Sample(
                sampling_session_id="s1:sample:0",
                snapshot_id=None,
                prompt_P=np.array([5000], np.int32),
                params=ops.SamplingParams(max_tokens=1, seed=0),
            )
        )
        good = await client.submit(a_sample(client))
        assert "is gone" in (await client.failure(unknown)).message
        assert "was deleted" in (await client.failure(missing)).message
        assert "5000" in (await client.failure(outside)).message
        assert isinstance(await client.result(good), ops.SampleOutput)


async def test_a_batch_may_not_raise_user_errors(setup: Setup, client: EngineDriver) -> None:
    task = asyncio.create_task((await setup.make_engine()).run())
    await client.result(await client.create_model())
    setup.backend.fail_next = UserError("of whom")
    running = await client.submit(a_pass(client))
    with pytest.raises(EngineFailedError, match="of whom"):
        await asyncio.wait_for(task, WAIT_S)
    assert (await setup.store.get_operation(running)).state == OperationState.RUNNING


@pytest.mark.parametrize("operation", ["forward_backward", "sample"])
@pytest.mark.parametrize(
    "error", [StopIteration, StopAsyncIteration, asyncio.CancelledError, SystemExit, KeyboardInterrupt, RuntimeError]
)
async def test_whatever_a_backend_raises_ends_the_engine(
    setup: Setup, client: EngineDriver, error: type[BaseException], operation: str
) -> None:
    """A StopIteration, which a future cannot hold, and a CancelledError of nobody once left the request running."""
    task = asyncio.create_task((await setup.make_engine()).run())
    await client.result(await client.create_model())
    setup.backend.fail_next = error()
    running = await client.submit(a_pass(client) if operation == "forward_backward" else a_sample(client))
    with pytest.raises(EngineFailedError, match=error.__name__):
        await asyncio.wait_for(task, WAIT_S)
    assert (await setup.store.get_operation(running)).state == OperationState.RUNNING


async def test_a_store_that_fails_for_a_moment_costs_nothing(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.engine.failures.RETRY_AFTER_S", (0.0, 0.0, 0.0))
    complete, failures = setup.store.complete, itertools.count()

    async def sometimes(lease: Lease, completions: Any) -> None:
        if next(failures) % 3:
            raise StoreError("disk full")
        await complete(lease, completions)

    monkeypatch.setattr(setup.store, "complete", sometimes)
    async with setup.running():
        await client.create_model()
        await train(client, steps=3)
    assert setup.backend.capture_state(client.model_id()).step == 3


class SlowDisk:
    """Holds up the recording of results until it is `free`. Notes how many each transaction records."""

    def __init__(self, store: SqlStore) -> None:
        self._complete = store.complete
        self.sizes: list[int] = []
        self.free = asyncio.Event()

    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        self.sizes.append(len(completions))
        await self.free.wait()
        await self._complete(lease, completions)


async def test_what_runs_during_a_transaction_shares_the_next(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(setup.store)
    async with setup.running():
        await client.result(await client.create_model())
        monkeypatch.setattr(setup.store, "complete", disk.complete)
        kinds = (a_pass(client), a_step(client)) * 3
        submitted = [await client.submit(each) for each in kinds]
        for _ in kinds:
            assert await asyncio.to_thread(setup.backend.begun.acquire, timeout=WAIT_S)
        disk.free.set()
        for request_id in submitted:
            await client.result(request_id)
    assert sum(disk.sizes) == len(kinds)
    assert len(disk.sizes) <= 3  # the first, those that ran meanwhile, and the last if it still ran
    assert [event.batch_size for event in setup.events] == [1] * (1 + len(kinds))


async def test_samples_drawn_during_a_transaction_share_the_next(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(setup.store)
    monkeypatch.setattr(setup.store, "complete", disk.complete)
    async with setup.running():
        submitted = [await client.submit(a_sample(client, seed=seed)) for seed in range(12)]
        for _ in submitted:
            await asyncio.wait_for(setup.backend.drawn.acquire(), WAIT_S)
        disk.free.set()
        for request_id in submitted:
            await client.result(request_id)
    assert sum(disk.sizes) == len(submitted)
    assert len(disk.sizes) <= 3


async def test_a_claim_whose_answer_is_lost_is_made_again(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database committed the claim, but the connection broke before the engine heard of it."""
    monkeypatch.setattr("tinsmith.engine.failures.RETRY_AFTER_S", (0.0, 0.0))
    claim, lost = setup.store.claim, 0

    async def unheard(lease: Lease, **limits: Any) -> Claim:
        nonlocal lost
        claimed = await claim(lease, **limits)
        if claimed.records and lost % 2 == 0:
            lost += 1
            raise StoreError("the connection broke")
        lost += bool(claimed.records)
        return claimed

    monkeypatch.setattr(setup.store, "claim", unheard)
    async with setup.running() as engine:
        await client.create_model()
        await train(client, steps=3)
        assert await tokens_of(client, a_sample(client)) == await tokens_of(client, a_sample(client))
        setup.backend.batches.clear()
        setup.backend.training_held = threading.Event()
        held = await client.submit(a_step(client))
        while not setup.backend.batches:  # noqa: ASYNC110 - it runs in a thread, without an event to wait for
            await asyncio.sleep(0)
        lost += lost % 2  # lose the next answer
        behind = await client.submit(a_pass(client))
        while behind not in engine.training.queue.waiting:  # noqa: ASYNC110 - the engine has no event to wait for
            await asyncio.sleep(0)
        setup.backend.training_held.set()
        await client.result(held)
        await client.result(behind)
    assert lost > 4
    assert setup.backend.capture_state(client.model_id()).step == 4
    ran = Counter(kind for kind, models in setup.backend.batches for _ in models)
    assert ran == {"forward_backward": 1, "optim_step": 1}


async def test_a_gap_fails_what_waits_behind_it(setup: Setup, client: EngineDriver) -> None:
    async with setup.running(server=ServerSettings(gap_timeout_s=0.01)):
        await client.result(await client.create_model())
        behind = await client.submit(a_step(client), seq_id=2)
        assert "seq_id 1 " in (await client.failure(behind)).message
        assert behind in (await client.failure(await client.submit(a_step(client), seq_id=3))).message
        after = await client.submit(a_step(client), seq_id=4)
        assert isinstance(await client.result(after), ops.OptimStepOutput)


async def test_a_stopping_engine_records_what_was_running(setup: Setup, client: EngineDriver) -> None:
    engine = await setup.make_engine()
    task = asyncio.create_task(engine.run())
    await client.result(await client.create_model())
    requests = [await client.submit(a_step(client)) for _ in range(20)]
    await client.result(requests[0])
    engine.stop()
    await asyncio.wait_for(task, WAIT_S)
    states = [(await setup.store.get_operation(request_id)).state for request_id in requests]
    steps = setup.backend.capture_state("s1:train:0").step
    assert states[:steps] == [OperationState.SUCCEEDED] * steps
    assert OperationState.SUCCEEDED not in states[steps:]
