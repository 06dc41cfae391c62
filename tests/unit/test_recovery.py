"""Engines on the toy backend die at chosen points; the next engine continues as if nothing had happened."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, ModelState
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.checkpoints.saved import delete_checkpoint, read_checkpoint
from tinsmith.engine import context, recovery_points
from tinsmith.engine.engine import Engine
from tinsmith.engine.failures import EngineFailedError
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.errors import OutOfMemoryError, ServerError, StoreError
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import Array
from tinsmith.server.waiting_reasons import explain
from tinsmith.settings import QuotaSettings, RecoverySettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import (
    EngineRecord,
    EngineState,
    Lease,
    OperationRecord,
    OperationState,
    RunState,
    StoreContext,
    Waiting,
)
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_context, make_engine, take_over

LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}
MODEL = "s1:train:0"
POISON = 13  # a token


class FragileBackend(ToyBackend):
    """The toy backend. It fails if a pass contains POISON, and in the call that `fail_in` names."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(
            ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=cache_dir, losses=LOSSES)
        )
        self.calls: list[str] = []
        self.fail_in: str | None = None
        self.held: threading.Event | None = None
        self.drift = 0.0

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        self.called("forward_backward")
        if self.held is not None:
            assert self.held.wait(WAIT_S)
        if any(POISON in datum.tokens_T for op in ops for datum in op.data):
            raise RuntimeError("poison")
        results = super().forward_backward(ops)
        for result in results:
            assert not isinstance(result, Failed)
            result.loss_fn_outputs[0]["logprobs"][...] += self.drift
        return results

    def optim_step(self, ops: Sequence[ops.OptimStep]) -> Any:
        self.called("optim_step")
        return super().optim_step(ops)

    def capture_state(self, model_id: str) -> ModelState:
        self.called("capture_state")
        return super().capture_state(model_id)

    def publish(self, model_id: str, snapshot_id: str) -> Any:
        self.called("publish")
        return super().publish(model_id, snapshot_id)

    async def sample(self, op: ops.Sample) -> Any:
        self.called("sample")
        return await super().sample(op)

    def called(self, what: str) -> None:
        self.calls.append(what)
        if self.fail_in == what:
            raise RuntimeError(f"failed in {what}")


Failed = ops.Failed


@dataclass
class Setup:
    data_dir: Path
    store: SqlStore
    backend: FragileBackend = field(init=False)
    lease: Lease = field(init=False)
    engines: int = 0
    progress: list[tuple[str, float]] = field(default_factory=list)

    async def make_engine(
        self, *, on_finished: Callable[[OperationFinished], None] = lambda _: None, **recovery: Any
    ) -> Engine:
        """Give each engine a backend of its own, without any models."""
        self.engines += 1
        self.backend = FragileBackend(self.data_dir)
        self.progress.clear()
        self.lease = await take_over(self.store, "toy")
        return await make_engine(
            self.store,
            self.backend,
            self.data_dir,
            sampler=self.backend,
            lease=self.lease,
            on_finished=on_finished,
            recovery=RecoverySettings(**{"point_every_operations": 1000, **recovery}),
        )

    @asynccontextmanager
    async def engine(self, **recovery: Any) -> AsyncIterator[asyncio.Task[None]]:
        """Run an engine until the block ends, then kill it, as far as a task can be killed."""
        engine = await self.make_engine(**recovery)
        await engine.recover("killed", lambda what, share: self.progress.append((what, share)))
        task = asyncio.create_task(engine.run())
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, EngineFailedError):
                await task
            # A killed process writes nothing more, but a cancelled task does: what it has already handed to the store
            # (a claim, the registration of a recovery point) must be committed before the next engine starts.
            for writer in (self.store.connections.relaxed, self.store.connections.durable):
                await writer.write(lambda _: None)

    async def dies(self, **recovery: Any) -> None:
        """Run an engine until it fails."""
        async with self.engine(**recovery) as task:
            await asyncio.wait([task], timeout=WAIT_S)
            assert task.done()

    def points_on_disk(self) -> list[str]:
        directory = self.data_dir / "recovery" / "toy" / MODEL
        if not directory.is_dir():
            return []
        return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))  # half-written ones

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:  # files come and go without an event to wait for
                with suppress(FileNotFoundError):  # a directory may vanish while it is listed
                    if condition():
                        return
                await asyncio.sleep(0.005)

    async def registered(self, client: EngineDriver, number: int = 1) -> None:
        """Score the model, which changes nothing, until so many recovery points have been registered."""
        async with asyncio.timeout(WAIT_S):
            while len(await self.store.list_recovery_points(MODEL)) < number:
                await client.run(ops.Forward(model_id=MODEL, data=a_pass(client).data))


@dataclass
class FailingStore:
    """Replaces a method of the store: fails a few times, then works."""

    method: Callable[..., Awaitable[Any]]
    times: int

    async def __call__(self, *args: Any, **options: Any) -> Any:
        if self.times > 0:
            self.times -= 1
            raise StoreError("the disk is full")
        return await self.method(*args, **options)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield Setup(tmp_path, store)
    await store.close()


@pytest.fixture
async def client(setup: Setup) -> EngineDriver:
    client = EngineDriver(setup.store, "toy")
    await client.open_session()
    return client


def a_pass(client: EngineDriver, *tokens: int) -> ops.ForwardBackward:
    targets = np.array(tokens or (1, 2, 3, 4), np.int64)
    inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    datum = ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=client.model_id(), data=(datum,))


def a_step(client: EngineDriver) -> ops.OptimStep:
    return ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams(learning_rate=0.01))


def a_sample(client: EngineDriver, snapshot_id: str | None = None) -> ops.Sample:
    return ops.Sample(
        sampling_session_id=f"{client.session_id}:sample:9",
        snapshot_id=snapshot_id,
        prompt_P=np.array([1, 2, 3], np.int32),
        params=ops.SamplingParams(max_tokens=6, seed=1, stop_at_eos=False),
    )


async def train(client: EngineDriver, *numbers: int) -> None:
    for number in numbers:
        await client.submit(a_pass(client, number + 1, 2, 3))
        result = await client.run(a_step(client))
        assert isinstance(result, ops.OptimStepOutput), result


async def publish(client: EngineDriver, name: str) -> None:
    result = await client.run(ops.SaveForSampler(model_id=MODEL, sampling_session_id=name))
    assert isinstance(result, ops.WeightsSaved), result


def bits(state: ModelState) -> dict[str, bytes | int]:
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}


@pytest.fixture
async def undisturbed(tmp_path: Path) -> dict[str, bytes | int]:
    """The state after creation, `train(0 .. 5)` and a pass, without any death."""
    data_dir = tmp_path / "undisturbed"
    data_dir.mkdir()
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=data_dir))
    await store.open()
    setup = Setup(data_dir, store)
    client = EngineDriver(store, "toy")
    await client.open_session()
    async with setup.engine():
        await client.create_model()
        await train(client, *range(6))
        await client.run(a_pass(client))
        state = bits(setup.backend.capture_state(MODEL))
    await store.close()
    return state


@pytest.mark.parametrize("every", [1, 3, 1000])
async def test_a_model_goes_on_bit_for_bit(
    setup: Setup, client: EngineDriver, undisturbed: dict[str, bytes | int], every: int
) -> None:
    async with setup.engine(point_every_operations=every):
        await client.create_model()
        await train(client, 0, 1, 2)
        await client.submit(a_pass(client, 4, 2, 3))
    async with setup.engine(point_every_operations=every):
        await client.run(a_step(client))
        assert len(setup.points_on_disk()) <= 3
    async with setup.engine(point_every_operations=every):
        assert setup.progress[-1][1] == 1.0
        assert setup.progress[-1][0].endswith("model 1 of 1, at operation 9 of 9")
        await train(client, 4, 5)
        await client.run(a_pass(client))
        assert bits(setup.backend.capture_state(MODEL)) == undisturbed
    run = await setup.store.get_run(MODEL)
    assert (run.state, run.state_reason, run.applied_seq_id) == (RunState.READY, None, 13)


async def test_only_what_came_after_the_recovery_point_is_replayed(setup: Setup, client: EngineDriver) -> None:
    async with setup.engine(point_every_operations=4):
        await client.create_model()
        await train(client, 0, 1, 2)
        await setup.registered(client)
    point, *_ = await setup.store.list_recovery_points(MODEL)
    assert Path(point.directory).name in setup.points_on_disk()
    async with setup.engine():
        assert setup.backend.calls == (["forward_backward", "optim_step"] * 3)[point.seq_id :]
        assert len(setup.backend.calls) < 4


async def test_an_engine_leaves_alone_what_another_writes(setup: Setup, client: EngineDriver) -> None:
    """A superseded engine may go on writing for a moment, to the same directory."""
    async with setup.engine():
        await client.create_model()
        await train(client, 0)
        run, unused = await setup.store.get_run(MODEL), cast("Any", None)
        old, new = (
            RecoveryPoints(make_context(setup.store, setup.lease, setup.data_dir), unused, unused) for _ in range(2)
        )
        state = setup.backend.capture_state(MODEL)
        first = await old.write(MODEL, 1, state)
        await old.register(first)
        second, same = await new.write(MODEL, run.applied_seq_id, state), await old.write(MODEL, 2, state)
        await old.tidy(MODEL)
        assert second.directory != same.directory
        await new.register(second)
        for record in await setup.store.list_recovery_points(MODEL):
            kept = read_checkpoint(setup.data_dir / "recovery" / "toy", record.directory)
            assert kept.state.weights.keys() == state.weights.keys()
        assert setup.points_on_disk() == sorted(Path(each.directory).name for each in (first, second))


async def test_a_stopped_engine_keeps_its_models(
    setup: Setup, client: EngineDriver, undisturbed: dict[str, bytes | int]
) -> None:
    engine = await setup.make_engine()
    task = asyncio.create_task(engine.run())
    await client.create_model()
    await train(client, 0, 1)
    setup.backend.held = threading.Event()
    requests = []
    for number in (2, 3, 4, 5):
        requests += [await client.submit(a_pass(client, number + 1, 2, 3)), await client.submit(a_step(client))]
    await setup.until(lambda: len(setup.backend.calls) > 4)
    engine.stop()
    setup.backend.held.set()
    await asyncio.wait_for(task, WAIT_S)
    states = {(await setup.store.get_operation(request_id)).state for request_id in requests}
    assert OperationState.RUNNING not in states
    assert OperationState.QUEUED in states
    assert await setup.store.claim_suspect(await take_over(setup.store, "toy")) is None
    async with setup.engine():
        await client.run(a_pass(client))
        assert bits(setup.backend.capture_state(MODEL)) == undisturbed


async def test_a_damaged_recovery_point_falls_back_to_the_one_before(
    setup: Setup, client: EngineDriver, undisturbed: dict[str, bytes | int]
) -> None:
    async with setup.engine(point_every_operations=2):
        await client.create_model()
        await train(client, *range(6))
        await setup.registered(client, 2)
        await client.run(a_pass(client))
    for damaged in (1, 2):
        newest = (await setup.store.list_recovery_points(MODEL))[0]
        weights = setup.data_dir / "recovery" / "toy" / newest.directory / "adapter_model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        async with setup.engine():
            assert bits(setup.backend.capture_state(MODEL)) == undisturbed
        assert len(await setup.store.list_recovery_points(MODEL)) == 2 - damaged


async def test_a_log_that_was_pruned_needs_a_recovery_point(setup: Setup, client: EngineDriver) -> None:
    other = EngineDriver(setup.store, "toy", tenant="bob", session_id="s2")
    await other.open_session()
    async with setup.engine(point_every_operations=2):
        await client.create_model()
        await other.create_model()
        await train(client, *range(4))
        await train(other, 0)
        await setup.registered(client, 2)
    assert await setup.store.prune(datetime.now(UTC) + timedelta(hours=1)) > 0
    async with setup.engine():
        await train(client, 4)
    shutil.rmtree(setup.data_dir / "recovery" / "toy" / MODEL)
    async with setup.engine():
        failed = await client.run(a_step(client))
        assert isinstance(failed, ops.Failed)
        assert "log is incomplete" in failed.message
        await train(other, 1)
    assert (await setup.store.get_run(MODEL)).state == RunState.LOST


async def curve(setup: Setup, number: int = 0) -> list[tuple[int, str]]:
    """Return the steps of a run's curve, with what each of its points has measured."""
    rows = await setup.store.read_metrics(f"s1:train:{number}", limit=100)
    return [(row.step, "loss" if "loss:sum" in row.values else "step") for row in rows]


async def test_a_curve_neither_doubles_nor_tears(setup: Setup, client: EngineDriver) -> None:
    """Deaths between a pass and its step, and in a step; a load of an older state; a run that starts from a state."""
    events: list[OperationFinished] = []
    async with setup.engine():
        await client.create_model()
        await train(client, 0, 1)
        await client.run(ops.SaveState(model_id=MODEL, path=client.path("x")))
        await train(client, 2)
        await client.run(ops.LoadState(model_id=MODEL, path=client.path("x"), load_optimizer=True))
        await client.run(a_pass(client))
    engine = await setup.make_engine()
    await engine.recover("killed", lambda *_: None)
    setup.backend.fail_in = "optim_step"
    running = asyncio.create_task(engine.run())
    step = await client.submit(a_step(client))
    await asyncio.wait([running], timeout=WAIT_S)
    assert isinstance(running.exception(), EngineFailedError)
    async with setup.engine(on_finished=events.append):
        assert isinstance(await client.result(step), ops.OptimStepOutput)
        await train(client, 4)
        await client.result(await client.create_model(1, checkpoint=client.path("x"), load_optimizer=True))
        await client.run(replace(a_pass(client), model_id=client.model_id(1)))
    wanted = [(number, what) for number in range(5) for what in ("loss", "step")]
    assert await curve(setup) == wanted
    assert (await setup.store.get_run(MODEL)).steps == 5
    assert await curve(setup, 1) == [(2, "loss")]
    seen = [(each.kind, each.seq_id, each.step) for each in events]
    assert seen[:3] == [("optim_step", 10, 3), ("forward_backward", 11, 4), ("optim_step", 12, 4)]
    assert "loss:sum" in events[1].metrics


async def test_what_a_model_was_loaded_from_may_go(setup: Setup, client: EngineDriver) -> None:
    async with setup.engine():
        await client.create_model()
        await train(client, 0, 1)
        await client.run(ops.SaveState(model_id=MODEL, path=client.path("x")))
        await client.result(await client.create_model(1, checkpoint=client.path("x"), load_optimizer=True))
        await train(client, 2)
        await client.run(ops.LoadState(model_id=MODEL, path=client.path("x"), load_optimizer=False))
        await train(client, 3)
        wanted = [bits(setup.backend.capture_state(client.model_id(number))) for number in (0, 1)]
        saved = await setup.store.get_checkpoint(client.path("x"))
        delete_checkpoint(setup.data_dir / "checkpoints", saved.directory)
    async with setup.engine():
        assert [bits(setup.backend.capture_state(client.model_id(number))) for number in (0, 1)] == wanted


@pytest.mark.parametrize("every", [1, 1000])
async def test_ephemeral_snapshots_survive(setup: Setup, client: EngineDriver, every: int) -> None:
    async def sampled() -> list[float]:
        found = []
        for name in ("s1:sample:0", "s1:sample:1", None):
            result = await client.run(a_sample(client, name))
            assert isinstance(result, ops.SampleOutput), result
            found += result.sequences[0].logprobs.tolist()
        return found

    async with setup.engine(point_every_operations=every):
        await client.create_model()
        await train(client, 0)
        await publish(client, "s1:sample:0")
        await train(client, 1)
        await publish(client, "s1:sample:1")
        await train(client, 2)
        wanted = await sampled()
    for _ in range(2):
        async with setup.engine():
            assert await sampled() == wanted
    async with setup.engine():
        await setup.store.end_session("s1", "success", None)
        await setup.until(lambda: not setup.points_on_disk() and not list((setup.data_dir / "snapshots").glob("*/*")))
    assert await setup.store.list_recovery_points(MODEL) == []


@pytest.mark.parametrize("point", ["capture_state", "written", "registered"])
async def test_dying_around_a_recovery_point(
    setup: Setup,
    client: EngineDriver,
    undisturbed: dict[str, bytes | int],
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    reached = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        if point == "written":
            patch.setattr(setup.store, "add_recovery_point", hang)
        if point == "registered":
            patch.setattr(recovery_points.RecoveryPoints, "tidy", hang)
        async with setup.engine(point_every_operations=6) as task:
            if point == "capture_state":
                setup.backend.fail_in = point
            await client.create_model()
            for number in range(4):
                await client.submit(a_pass(client, number + 1, 2, 3))
                last = await client.submit(a_step(client))
            await asyncio.wait([task, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    async with setup.engine():
        assert isinstance(await client.result(last), ops.OptimStepOutput)
        await train(client, 4, 5)
        await client.run(a_pass(client))
        assert bits(setup.backend.capture_state(MODEL)) == undisturbed


async def test_dying_after_the_rename_and_before_the_record(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = [
        ops.SaveState(model_id=MODEL, path=client.path("x")),
        ops.SaveForSampler(model_id=MODEL, path=client.path("x", "sampler_weights")),
        ops.ExportAdapter(model_id=MODEL, path=client.path("x", "external_weights")),
    ]
    async with setup.engine():
        await client.create_model()
        await train(client, 0)
    for save in saves:
        reached = asyncio.Event()

        async def hang(*_: Any, reached: asyncio.Event = reached) -> None:
            reached.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(setup.store, "complete", hang)
            async with setup.engine():
                running = await client.submit(save)
                await asyncio.wait_for(reached.wait(), WAIT_S)
        async with setup.engine():
            assert isinstance(await client.result(running), ops.WeightsSaved)
            again = await client.run(save)
            assert isinstance(again, ops.Failed)
            assert "exists" in again.message


async def test_poison_fails_alone(setup: Setup, client: EngineDriver, undisturbed: dict[str, bytes | int]) -> None:
    other = EngineDriver(setup.store, "toy", tenant="bob", session_id="s2")
    await other.open_session()
    async with setup.engine():
        await client.create_model()
        await other.create_model()
        await train(client, *range(5))
        await train(other, 0)
    beside = await other.submit(a_pass(other))
    before = await client.submit(a_pass(client, 6, 2, 3))
    poison = await client.submit(a_pass(client, POISON))
    after = await client.submit(a_step(client))
    for _ in range(3):
        await setup.dies()
    async with setup.engine():
        failed = await client.failure(poison)
        assert "3 times" in failed.message
        for each, request_id in ((client, before), (other, beside)):
            assert not isinstance(await each.result(request_id), ops.Failed)
        assert poison in (await client.failure(after)).message  # it would have applied a part of its window
        await train(client, 5)
        await client.run(a_pass(client))
        assert bits(setup.backend.capture_state(MODEL)) == undisturbed


async def test_what_is_retried_alone_is_recorded_before_the_next_is_claimed(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with setup.engine():
        await client.result(await client.create_model())
        setup.backend.fail_in = "forward_backward"
        suspects = [await client.submit(a_pass(client)) for _ in range(2)]
        await setup.until(lambda: setup.backend.calls)
    claim_suspect, complete = setup.store.claim_suspect, setup.store.complete
    recorded: list[Any] = []
    at_claims: list[tuple[int, int]] = []

    async def recording(lease: Lease, completions: Sequence[Any]) -> None:
        await complete(lease, completions)
        recorded.extend(completions)

    async def claiming(lease: Lease) -> OperationRecord | None:
        at_claims.append((len(setup.backend.calls), len(recorded)))
        return await claim_suspect(lease)

    monkeypatch.setattr(setup.store, "complete", recording)
    monkeypatch.setattr(setup.store, "claim_suspect", claiming)
    async with setup.engine():
        for request_id in suspects:
            assert isinstance(await client.result(request_id), ops.ForwardBackwardOutput)
        await setup.until(lambda: len(at_claims) > 1)
    assert len(at_claims) > 1, "nothing was retried alone"
    assert all(ran == done for ran, done in at_claims), at_claims


async def test_a_request_that_does_not_fit_fails_alone_and_at_once(
    setup: Setup, client: EngineDriver, undisturbed: dict[str, bytes | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = EngineDriver(setup.store, "toy", tenant="bob", session_id="s2")
    await other.open_session()
    passes = ToyBackend.forward_backward
    sizes: list[int] = []

    def starved(self: ToyBackend, ops: Sequence[ops.ForwardBackward]) -> Any:
        sizes.append(len(ops))
        if any(POISON in datum.tokens_T for op in ops for datum in op.data):
            raise OutOfMemoryError("no room for 13")
        return passes(self, ops)

    async with setup.engine():
        await client.create_model()
        await other.create_model()
        await train(client, *range(6))
        await train(other, 0)
        setup.backend.held = threading.Event()
        plug = await other.submit(a_pass(other))
        await setup.until(lambda: setup.backend.calls[-1] == "forward_backward")
        monkeypatch.setattr(FragileBackend, "forward_backward", starved)
        beside = [await other.submit(a_pass(other)) for _ in range(2)]
        greedy = await client.submit(a_pass(client, POISON))
        after = await client.submit(a_pass(client))
        setup.backend.held.set()
        failed = await client.failure(greedy)
        assert (failed.category, failed.message) == ("user", "no room for 13")
        for each, request_id in ((other, plug), (other, beside[0]), (other, beside[1]), (client, after)):
            assert isinstance(await each.result(request_id), ops.ForwardBackwardOutput)
        assert bits(setup.backend.capture_state(MODEL)) == undisturbed
        assert max(sizes) > 1


async def test_a_poisonous_sample_fails_alone(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = FragileBackend.sample

    async def fragile(self: FragileBackend, op: ops.Sample) -> Any:
        if POISON in op.prompt_P:
            raise RuntimeError("no more memory")
        return await sample(self, op)

    monkeypatch.setattr(FragileBackend, "sample", fragile)
    async with setup.engine():
        await client.create_model()
        await train(client, 0)
    good = await client.submit(a_sample(client))
    bad = a_sample(client)
    poison = await client.submit(
        ops.Sample(
            sampling_session_id=bad.sampling_session_id,
            snapshot_id=None,
            prompt_P=np.array([POISON], np.int32),
            params=bad.params,
        )
    )
    for _ in range(3):
        await setup.dies()
    async with setup.engine():
        assert "3 times" in (await client.failure(poison)).message
        assert isinstance(await client.result(good), ops.SampleOutput)
        await train(client, 1)


async def test_a_model_that_ends_its_engine_while_it_is_rebuilt_is_lost_alone(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = EngineDriver(setup.store, "toy", tenant="bob", session_id="s2")
    await other.open_session()
    async with setup.engine():
        await client.create_model()
        await other.create_model()
        await client.run(a_step(client))
        await other.run(a_pass(other))
    begun: list[str] = []

    def die(self: FragileBackend, op: ops.CreateModel) -> None:
        begun.append(op.model_id)
        if op.model_id == MODEL:
            raise asyncio.CancelledError  # as sudden as a death: nothing is recorded

    with monkeypatch.context() as patch:
        patch.setattr(FragileBackend, "create_model", die)
        for interrupted in (True, True, True, True, False, False):
            with pytest.raises(EngineFailedError):
                await (await setup.make_engine()).recover("killed", lambda _what, _share: None, interrupted=interrupted)
    assert begun == [MODEL] * 6
    async with setup.engine():
        assert isinstance(await other.run(a_step(other)), ops.OptimStepOutput)
    lost = await setup.store.get_run(MODEL)
    assert lost.state == RunState.LOST
    assert "its engine ended 3 times while it was rebuilt" in (lost.state_reason or "")


async def test_a_backend_that_fails_during_a_recovery_costs_no_model(setup: Setup, client: EngineDriver) -> None:
    """One of its workers may have been killed."""
    async with setup.engine():
        await client.create_model()
        await client.run(a_step(client))
    for _ in range(2):
        engine = await setup.make_engine()
        setup.backend.fail_in = "optim_step"
        with pytest.raises(EngineFailedError, match=r"while it rebuilt a model: .*failed in optim_step"):
            await engine.recover("killed", lambda _what, _share: None)
    async with setup.engine():
        await train(client, 1)


async def test_a_model_whose_loss_is_gone_is_lost_alone_and_its_backend_never_sees_it(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is claimed is checked, but the log may be of a time when a plugin offered more losses."""
    other = EngineDriver(setup.store, "toy", tenant="bob", session_id="s2")
    await other.open_session()
    async with setup.engine():
        await client.create_model()
        passed = a_pass(client)
        zeros = {name: np.zeros(4, np.float32) for name in ("logprobs", "advantages")}
        inputs = {"target_tokens": passed.data[0].loss_inputs["target_tokens"], **zeros}
        datum = replace(passed.data[0], loss_inputs=inputs)
        await client.run(replace(passed, data=(datum,), loss_fn="importance_sampling"))
        await other.create_model()
        await other.run(a_pass(other))
    monkeypatch.delitem(LOSSES, "importance_sampling")
    async with setup.engine():
        told = (await client.failure(await client.submit(a_step(client)))).message
        assert "loss_fn 'importance_sampling' is no longer offered by this base model's backend" in told
        await train(other, 1)
    assert setup.backend.calls.count("forward_backward") == 2  # the other model's, replayed and new


async def test_a_model_that_breaks_each_recovery_is_lost_alone(setup: Setup, client: EngineDriver) -> None:
    other = EngineDriver(setup.store, "toy", tenant="bob", session_id="s2")
    await other.open_session()
    async with setup.engine():
        await client.create_model()
        await client.run(a_step(client))
        await other.create_model()
        await other.run(a_pass(other))
    for _ in range(3):
        engine = await setup.make_engine()
        setup.backend.fail_in = "optim_step"
        with pytest.raises(EngineFailedError, match="failed in optim_step"):
            await engine.recover("killed", lambda _what, _share: None)
    async with setup.engine():
        told = (await client.failure(await client.submit(a_step(client)))).message
        assert "its engine ended 3 times while it was rebuilt" in told
        await train(other, 1)


@pytest.mark.slow
async def test_a_store_that_fails_during_recovery_costs_no_model(
    setup: Setup, client: EngineDriver, undisturbed: dict[str, bytes | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.engine.failures.RETRY_AFTER_S", (0.0, 0.0))
    async with setup.engine(point_every_operations=4):
        await client.create_model()
        await train(client, *range(6))
        await setup.registered(client)
    engine = await setup.make_engine()
    with monkeypatch.context() as patch:
        for method in ("live_models", "begin_rebuild", "replayable", "end_rebuild"):
            failing = FailingStore(getattr(setup.store, method), times=4)
            patch.setattr(setup.store, method, failing)
            with pytest.raises(StoreError, match="the disk is full"):
                await engine.recover("killed", lambda _what, _share: None)
            assert failing.times == 1  # it was retried
            engine = await setup.make_engine()
            await engine.recover("killed", lambda _what, _share: None)  # a single failure goes unnoticed
            assert failing.times == 0
            engine = await setup.make_engine()
    assert (await setup.store.get_run(MODEL)).state == RunState.READY
    assert len(await setup.store.list_recovery_points(MODEL)) > 0
    async with setup.engine():
        await client.run(a_pass(client))
        assert bits(setup.backend.capture_state(MODEL)) == undisturbed


async def test_other_results_than_before_are_reported(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with setup.engine():
        await client.create_model()
        await train(client, 0, 1)
    called = FragileBackend.called

    def drifting(self: FragileBackend, what: str) -> None:
        self.drift = 0.25
        called(self, what)

    with monkeypatch.context() as patch:
        patch.setattr(FragileBackend, "called", drifting)
        async with setup.engine():
            pass
    run = await setup.store.get_run(MODEL)
    assert run.state == RunState.READY
    assert run.state_reason is not None
    assert "2 operations" in run.state_reason
    assert "forward_backward with seq_id 1, by 0.25 in logprobs of datum 0" in run.state_reason
    assert "differs from the recorded result" in caplog.text


async def test_a_full_disk_costs_a_recovery_point_and_nothing_else(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise ServerError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(context, "write_checkpoint", full)
        async with setup.engine(point_every_operations=1):
            await client.create_model()
            await train(client, 0, 1)
            await setup.until(lambda: "no space left" in caplog.text)  # recovery points are written during training
    async with setup.engine(point_every_operations=1):
        await train(client, 2)
        await setup.until(setup.points_on_disk)


class Unreadable(Mapping[str, Array]):
    """A lazy mapping whose backend fails while it is read."""

    def __getitem__(self, name: str) -> Array:
        raise RuntimeError("the workers are gone")

    def __iter__(self) -> Iterator[str]:
        yield "w"

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("save", [False, True])
async def test_a_state_that_its_backend_fails_to_hand_over_ends_the_engine_and_no_operation(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch, save: bool
) -> None:
    """A save is no failure of its client's: the next engine runs it again. A recovery point ends the engine as well."""
    broken = ModelState(lora=ops.LoraConfig(rank=4, seed=0), weights=Unreadable())
    with monkeypatch.context() as patch:
        patch.setattr(FragileBackend, "capture_state", lambda *_: broken)
        async with setup.engine(point_every_operations=1000 if save else 1) as task:
            await client.create_model()
            last = await client.submit(
                ops.SaveState(model_id=MODEL, path=client.path("x")) if save else a_pass(client, 1, 2)
            )
            await asyncio.wait([task], timeout=WAIT_S)
            assert isinstance(task.exception(), EngineFailedError)
            assert "the workers are gone" in str(task.exception())
    async with setup.engine():
        assert isinstance(await client.result(last), ops.WeightsSaved if save else ops.ForwardBackwardOutput)


async def test_a_recovery_point_without_room_waits_and_training_does_not(
    setup: Setup, client: EngineDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes nothing for a while: one state waits in memory, the second model's is not even captured."""
    opened, begun, write = threading.Event(), threading.Event(), context.write_checkpoint

    def when_opened(*args: Any, **kwargs: Any) -> int:
        begun.set()
        assert opened.wait(WAIT_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(context, "write_checkpoint", when_opened)
    async with setup.engine(point_every_operations=2, waiting_bytes=1):
        await client.create_model()
        await train(client, 0)
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        await client.create_model(1)
        other = client.model_id(1)
        for number in range(3):
            await train(client, number)
            await client.run(replace(a_pass(client, number + 1), model_id=other))
        assert setup.backend.calls.count("capture_state") == 1
        opened.set()
        async with asyncio.timeout(WAIT_S):
            while not await setup.store.list_recovery_points(other):
                await client.run(replace(a_pass(client), model_id=other))


async def test_scoring_alone_does_not_keep_the_log_for_ever(setup: Setup, client: EngineDriver) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    async with setup.engine(point_every_operations=2):
        await client.create_model()
        await setup.registered(client, 2)
        newest, oldest = await setup.store.list_recovery_points(MODEL)
        assert await setup.store.prune(later) >= oldest.seq_id + 1
        assert newest.seq_id > oldest.seq_id
    async with setup.engine():
        await train(client, 0)


def test_waiting_clients_are_told_how_far_the_recovery_is() -> None:
    now = datetime.now(UTC)
    waiting = OperationRecord(
        request_id="r",
        base_model="toy",
        kind="optim_step",
        tenant="ann",
        session_id="s1",
        subject_id=MODEL,
        seq_id=3,
        ordered=True,
        num_tokens=0,
        state=OperationState.RUNNING,
        created_at=now,
    )
    engine = EngineRecord(
        base_model="toy",
        state=EngineState.RECOVERING,
        updated_at=now,
        detail="rebuilding model 1 of 2, at operation 5 of 10",
        progress=0.25,
    )
    reason = explain(waiting, Waiting(engine=engine), QuotaSettings())
    assert reason.queue_state == "paused_capacity"
    assert reason.text == "the engine of 'toy' is recovering: rebuilding model 1 of 2, at operation 5 of 10, 25%"
