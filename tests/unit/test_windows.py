"""Steps that are refused for a failed pass of their window, or for their gradient. Engines may die anywhere."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from tinsmith.checkpoints.saved import read_checkpoint
from tinsmith.engine.failures import EngineFailedError
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.errors import NotFoundError, OutOfMemoryError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import Array
from tinsmith.settings import RecoverySettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.contract import assert_same_state
from tinsmith.testing.engine_driver import EngineDriver, make_context, make_engine, take_over

MODEL = "s1:train:0"
TOO_LARGE = 13  # a token that no device holds
LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}
STEP = ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.01))


class SmallBackend(ToyBackend):
    """The toy backend, on a device without memory for passes with the token TOO_LARGE."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(
            ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=cache_dir, losses=LOSSES)
        )

    def forward(self, ops: Sequence[ops.Forward]) -> Any:
        _refuse_large(ops)
        return super().forward(ops)

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        _refuse_large(ops)
        return super().forward_backward(ops)


def _refuse_large(operations: Sequence[ops.ForwardBackward]) -> None:
    if any(TOO_LARGE in datum.tokens_T for op in operations for datum in op.data):
        raise OutOfMemoryError("no memory for a sequence of 3 tokens")


@dataclass
class Setup:
    """A model that engines serve, one after the other."""

    data_dir: Path
    store: SqlStore
    client: EngineDriver
    backend: SmallBackend = field(init=False)

    @asynccontextmanager
    async def engine(self, every: int = 1000) -> AsyncIterator[None]:
        """Run an engine until the block ends, then kill it, as far as a task can be killed."""
        self.backend = SmallBackend(self.data_dir)
        recovery = RecoverySettings(point_every_operations=every)
        engine = await make_engine(self.store, self.backend, self.data_dir, sampler=self.backend, recovery=recovery)
        await engine.recover("killed", lambda _what, _share: None)
        task = asyncio.create_task(engine.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, EngineFailedError):
                await task
            connections = self.store.connections
            for writer in (connections.relaxed, connections.durable):  # what it has handed over is committed
                await writer.write(lambda _: None)

    @property
    def state(self) -> ModelState:
        return self.backend.capture_state(MODEL)


@asynccontextmanager
async def setup_in(data_dir: Path) -> AsyncIterator[Setup]:
    data_dir.mkdir()  # noqa: ASYNC240
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=data_dir))
    await store.open()
    client = EngineDriver(store, "toy")
    await client.open_session()
    yield Setup(data_dir, store, client)
    await store.close()


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with setup_in(tmp_path / "data") as setup:
        yield setup


def a_pass(*tokens: int, weight: float = 1.0, of: type[ops.ForwardBackward] = ops.ForwardBackward) -> Any:
    targets = np.array(tokens, np.int64)
    inputs = {"target_tokens": targets, "weights": np.full(len(targets), weight, np.float32)}
    return of(model_id=MODEL, data=(ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs),))


GOOD, OTHER, LARGE = a_pass(1, 2, 3), a_pass(4, 5, 6), a_pass(1, TOO_LARGE, 3)
INFINITE = replace(  # the ratio of probabilities is not finite in float32
    a_pass(1, 2, 3),
    loss_fn="importance_sampling",
    data=(
        ops.Datum(
            tokens_T=np.array([1, 2, 3], np.int32),
            loss_inputs={
                "target_tokens": np.array([2, 3, 4]),
                "logprobs": np.full(3, -1e4, np.float32),
                "advantages": np.ones(3, np.float32),
            },
        ),
    ),
)


async def fail_in_the_engine(client: EngineDriver) -> str:
    return await client.submit(LARGE)


async def fail_at_submit(client: EngineDriver) -> str:
    return await client.submit(GOOD, refused=ops.Failed(message="no loss named 'x'"))


FAILURES: dict[str, Callable[[EngineDriver], Any]] = {"in the engine": fail_in_the_engine, "at submit": fail_at_submit}


async def created(setup: Setup) -> None:
    """Create a model, and step it once, so that it has moments."""
    await setup.client.result(await setup.client.create_model())
    await setup.client.submit(GOOD)
    assert isinstance(await setup.client.run(STEP), ops.OptimStepOutput)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("first", ["the good pass first", "the failed pass first"])
async def test_a_step_after_a_failed_pass_is_discarded(setup: Setup, failure: str, first: str) -> None:
    """All sent without waiting. The step names the request; the next window is clean, and saves go on."""
    client = setup.client
    async with setup.engine():
        await created(setup)
        before = setup.state
        if first == "the good pass first":
            await client.submit(GOOD)
        failed = await FAILURES[failure](client)
        if first == "the failed pass first":
            await client.submit(GOOD)
        step, saved = (
            await client.submit(STEP),
            await client.submit(ops.SaveState(model_id=MODEL, path=client.path("x"))),
        )
        discarded = await client.failure(step)
        assert failed in discarded.message
        assert (await client.failure(failed)).message in discarded.message
        assert discarded.category == "user"
        assert isinstance(await client.result(saved), ops.WeightsSaved)
        assert_same_state(setup.state, before, "a model whose step was discarded")
        await client.submit(OTHER)
        assert isinstance(await client.run(STEP), ops.OptimStepOutput)
        after = setup.state
        setup.backend.restore_state(MODEL, before)
        await client.submit(OTHER)
        await client.run(STEP)
        assert_same_state(setup.state, after, "the next window")


@pytest.mark.parametrize("every", [1, 1000], ids=["recovery points everywhere", "none"])
@pytest.mark.parametrize("failure", [*FAILURES, "not finite"])
async def test_engines_that_die_anywhere_decide_alike(tmp_path: Path, failure: str, every: int) -> None:
    """An engine for all, and an engine for each operation. The second one knows of the window only from the log."""

    async def run(setup: Setup, engine: Callable[[], Any]) -> tuple[list[type], ModelState]:
        kinds: list[type] = []
        async with setup.engine(every):
            await created(setup)
        async with engine():
            for send in (GOOD, None, OTHER, STEP, OTHER, STEP):
                async with setup.engine(every) if engine is _none else _none():
                    if send is None and failure in FAILURES:
                        request_id = await FAILURES[failure](setup.client)
                    else:
                        request_id = await setup.client.submit(INFINITE if send is None else send)
                    kinds.append(type(await setup.client.result(request_id)))
        async with setup.engine():
            return kinds, setup.state

    async with setup_in(tmp_path / "one") as setup:
        expected = await run(setup, setup.engine)
    async with setup_in(tmp_path / "many") as setup:
        found = await run(setup, _none)
    assert found[0] == expected[0]
    assert expected[0][3:] == [ops.Failed, ops.ForwardBackwardOutput, ops.OptimStepOutput]
    assert_same_state(found[1], expected[1], "a model of many engines")
    assert expected[1].step == 2
    assert all(np.isfinite(array).all() for array in expected[1].weights.values())


@asynccontextmanager
async def _none() -> AsyncIterator[None]:
    yield


async def test_a_failed_forward_spoils_nothing(setup: Setup) -> None:
    client, scoring = setup.client, a_pass(1, TOO_LARGE, of=ops.Forward)
    async with setup.engine():
        await created(setup)
        await client.submit(GOOD)
        failed = [
            await client.submit(scoring),
            await client.submit(scoring, refused=ops.Failed(message="too long")),
        ]
        assert isinstance(await client.run(STEP), ops.OptimStepOutput)
        for each in failed:
            await client.failure(each)


async def test_a_refused_step_leaves_the_window_open(setup: Setup) -> None:
    """Its gradient was not applied, and a step with other parameters may follow."""
    client = setup.client
    async with setup.engine():
        await created(setup)
        await client.submit(GOOD)
        await client.submit(STEP, refused=ops.Failed(message="learning_rate is nan"))
        result = await client.run(STEP)
        assert isinstance(result, ops.OptimStepOutput)
        assert result.metrics["grad_norm"] > 0


async def test_a_step_without_a_pass_has_a_zero_gradient(setup: Setup) -> None:
    async with setup.engine():
        await created(setup)
        result = await setup.client.run(STEP)
        assert isinstance(result, ops.OptimStepOutput)
        assert result.metrics["grad_norm"] == 0
        assert setup.state.step == 2


async def test_a_number_that_never_arrived_may_have_been_a_pass(setup: Setup) -> None:
    """What waited behind it has failed. The first step that runs after it does not apply what came before."""
    client = setup.client
    async with setup.engine():
        await created(setup)
        before = setup.state
        await client.run(GOOD)
        behind = await client.submit(STEP, seq_id=5)
        assert await client.close_gaps_at_once() == 1
        await client.failure(behind)
        await client.submit(OTHER, seq_id=6)
        discarded = await client.failure(await client.submit(STEP, seq_id=7))
        assert behind in discarded.message
        assert "seq_id 4" in discarded.message
        assert_same_state(setup.state, before, "a model with a missing request")
        assert isinstance(await client.result(await client.submit(STEP, seq_id=8)), ops.OptimStepOutput)


async def test_a_save_leaves_out_what_no_step_will_apply(setup: Setup) -> None:
    client, path = setup.client, setup.client.path("half")
    async with setup.engine():
        await created(setup)
        await client.submit(GOOD)
        await fail_at_submit(client)
        before = setup.state
        assert isinstance(await client.run(ops.SaveState(model_id=MODEL, path=path)), ops.WeightsSaved)
        await client.result(await client.create_model(1, checkpoint=path, load_optimizer=True))
        copy = setup.backend.capture_state("s1:train:1")
        assert_same_state(replace(copy, lora=before.lora), replace(before, gradients={}), "the copy")


async def test_a_load_begins_a_new_window(setup: Setup) -> None:
    client, path = setup.client, setup.client.path("good")
    async with setup.engine():
        await created(setup)
        await client.run(ops.SaveState(model_id=MODEL, path=path))
        await fail_at_submit(client)
        await client.submit(ops.LoadState(model_id=MODEL, path=path, load_optimizer=True))
        await client.submit(GOOD)
        assert isinstance(await client.run(STEP), ops.OptimStepOutput)


@pytest.mark.parametrize("failure", FAILURES)
async def test_retention_keeps_what_a_step_depends_on(setup: Setup, failure: str) -> None:
    client, later = setup.client, timedelta(hours=1)
    async with setup.engine(every=1):
        await created(setup)
        await client.run(GOOD)
        failed = await FAILURES[failure](client)
        await client.run(OTHER)
        while not (points := await setup.store.list_recovery_points(MODEL)) or points[-1].seq_id < 5:
            await client.run(a_pass(1, of=ops.Forward))
    assert await setup.store.prune(datetime.now(UTC) + later) > 0
    async with setup.engine(every=1):
        discarded = await client.failure(await client.submit(STEP))
        assert failed in discarded.message
        await client.run(GOOD)
        assert isinstance(await client.run(STEP), ops.OptimStepOutput)


_ORDINARY = "ordinary"


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "all weights"])
@pytest.mark.parametrize("part", ["weights", "adam_m", "adam_v", "gradients", _ORDINARY])
async def test_a_diverged_model_is_not_saved_by_name(setup: Setup, part: str, rank: int) -> None:
    """Whatever has made it diverge. Its state survives the engine as it is; a pending gradient is not the model."""
    client = setup.client
    saves = {
        "weights": ops.SaveState(model_id=MODEL, path=client.path("x")),
        "sampler_weights": ops.SaveForSampler(model_id=MODEL, path=client.path("x", "sampler_weights")),
        "external_weights": ops.ExportAdapter(model_id=MODEL, path=client.path("x", "external_weights")),
    }
    async with setup.engine():
        await client.result(await client.create_model(rank=rank))
        await client.submit(GOOD)
        await client.run(STEP)
        await client.run(GOOD)
        healthy = setup.state
        ruined = healthy if part == _ORDINARY else replace(healthy, **{part: _ruined(getattr(healthy, part))})
        setup.backend.restore_state(MODEL, ruined)
        for kind, save in saves.items():
            result = await client.run(save)
            if part == "weights" or (part in ("adam_m", "adam_v") and kind == "weights"):
                assert isinstance(result, ops.Failed)
                assert result.category == "user"
                assert "has diverged" in result.message
                with pytest.raises(NotFoundError):
                    await setup.store.get_checkpoint(client.path("x", kind))
            else:
                assert isinstance(result, ops.WeightsSaved), result
        files = list((setup.data_dir / "checkpoints" / MODEL).rglob("*.safetensors"))
        assert bool(files) == (part != "weights"), "a refused save leaves nothing behind"
        context = make_context(setup.store, await take_over(setup.store, "toy"), setup.data_dir)
        unused = cast("Any", None)
        written = await RecoveryPoints(context, unused, unused).write(MODEL, 3, setup.state)
        kept = read_checkpoint(context.data_dir.recovery_points("toy"), written.directory)
        assert_same_state(kept.state, ruined, "a recovery point")


def _ruined(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Make the last number of the last tensor NaN."""
    name = max(arrays)
    ruined = arrays[name].copy()
    ruined[-1, -1] = np.nan
    return {**arrays, name: ruined}
