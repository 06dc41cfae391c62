"""A model that is idle gives its place to one that waits, and comes back bit for bit at its next request."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, ModelState
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.settings import DataDir, QuotaSettings, RecoverySettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import RunState, StoreContext
from tinsmith.store.codec import encode_result
from tinsmith.testing.engine_driver import EngineDriver, make_engine, take_over

LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


class Watched(ToyBackend):
    """Tells which models it holds. While the next state is captured, `meanwhile` is called."""

    held: set[str]
    meanwhile: Callable[[], object] | None = None

    def create_model(self, op: ops.CreateModel) -> None:
        super().create_model(op)
        self.held.add(op.model_id)

    def unload_model(self, model_id: str) -> None:
        super().unload_model(model_id)
        self.held.discard(model_id)

    def capture_state(self, model_id: str) -> ModelState:
        state, meanwhile = super().capture_state(model_id), self.meanwhile
        self.meanwhile = None
        if meanwhile is not None:
            meanwhile()
        return state


def a_backend(data_dir: Path, places: int) -> Watched:
    context = BackendContext(model_name="toy", model_path=None, cache_dir=data_dir, losses=LOSSES)
    backend = Watched(ToyConfig(max_models=places), context)
    backend.held = set()
    return backend


@asynccontextmanager
async def engine_on(
    store: SqlStore, data_dir: Path, backend: ToyBackend, idle_s: float | None = 0.0, **quotas: int
) -> AsyncIterator[None]:
    engine = await make_engine(
        store,
        backend,
        data_dir,
        sampler=backend,
        quotas=QuotaSettings(place_idle_s=idle_s, kept_places=0, **quotas),
        recovery=RecoverySettings(point_every_operations=1000, point_every_s=1e6),
    )
    await engine.recover("killed", lambda _what, _share: None)
    running = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        engine.stop()
        await running


async def a_client(store: SqlStore, tenant: str) -> EngineDriver:
    client = EngineDriver(store, "toy", tenant=tenant, session_id=f"of-{tenant}")
    await client.open_session()
    return client


def a_pass(client: EngineDriver, *tokens: int, number: int = 0) -> ops.ForwardBackward:
    targets = np.array(tokens, np.int64)
    inputs: dict[str, ops.Array] = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    datum = ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=client.model_id(number), data=(datum,))


def a_step(client: EngineDriver) -> ops.OptimStep:
    return ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams(learning_rate=0.1, grad_clip_norm=1.0))


def a_sample(client: EngineDriver, name: str) -> ops.Sample:
    return ops.Sample(
        sampling_session_id=name,
        snapshot_id=name,
        prompt_P=np.array([1, 2, 3], np.int32),
        params=ops.SamplingParams(max_tokens=8, seed=5, stop_at_eos=False),
    )


def script(client: EngineDriver) -> list[ops.Operation]:
    """Three windows. The model is parked after each operation: within a window, too."""
    name = f"{client.session_id}:sample:0"
    return [
        a_pass(client, 1, 2, 3),
        a_step(client),
        a_pass(client, 4, 5),
        ops.SaveForSampler(model_id=client.model_id(), sampling_session_id=name),
        a_pass(client, 6, 7),
        a_sample(client, name),
        a_step(client),
        a_pass(client, 8),
    ]


def bits(state: ModelState) -> dict[str, Any]:
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}


async def seen(client: EngineDriver, operations: Sequence[ops.Operation]) -> list[Any]:
    return [encode_result(await client.run(each)) for each in operations]


async def never_parked(store: SqlStore, data_dir: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return what the client "twin" sees, and the state that its model ends with."""
    backend, twin = a_backend(data_dir, 8), await a_client(store, "twin")
    async with engine_on(store, data_dir / "twin", backend):
        await twin.result(await twin.create_model())
        results = await seen(twin, script(twin))
        return results, bits(backend.capture_state(twin.model_id()))


def renamed(results: list[Any], client: EngineDriver) -> list[Any]:
    return [(kind, content.replace(b"of-twin", client.session_id.encode())) for kind, content in results]


async def test_a_model_that_was_parked_between_all_operations_goes_on_bit_for_bit(
    store: SqlStore, tmp_path: Path
) -> None:
    expected, state = await never_parked(store, tmp_path)
    backend, ann, bob = a_backend(tmp_path, 1), await a_client(store, "ann1"), await a_client(store, "bob1")
    async with engine_on(store, tmp_path, backend):
        found = []
        await ann.result(await ann.create_model())
        await bob.result(await bob.create_model())
        for each in script(ann):
            found += await seen(ann, [each])
            assert (await store.get_run(ann.model_id())).state is (
                RunState.PARKED if isinstance(each, ops.Sample) else RunState.READY
            )
            await seen(bob, [a_pass(bob, 9)])
            assert backend.held == {bob.model_id()}
            assert (await store.get_run(ann.model_id())).state is RunState.PARKED
        found_state = await seen(ann, [ops.SaveState(model_id=ann.model_id(), path=ann.path("a"))])
        assert found_state
        assert bits(backend.capture_state(ann.model_id())) == state
        assert renamed(expected, ann) == found


async def test_an_engine_that_starts_leaves_parked_models_where_they_are(store: SqlStore, tmp_path: Path) -> None:
    expected, state = await never_parked(store, tmp_path)
    ann, bob = await a_client(store, "ann1"), await a_client(store, "bob1")
    first, backend = script(ann)[:5], a_backend(tmp_path, 1)
    async with engine_on(store, tmp_path, backend):
        await ann.result(await ann.create_model())
        found = await seen(ann, first)
        await bob.result(await bob.create_model())
    backend = a_backend(tmp_path, 1)
    async with engine_on(store, tmp_path, backend):
        assert backend.held == {bob.model_id()}
        found += await seen(ann, script(ann)[5:])
        assert bits(backend.capture_state(ann.model_id())) == state
    assert renamed(expected, ann) == found


async def test_a_model_that_is_not_idle_for_long_keeps_its_place(store: SqlStore, tmp_path: Path) -> None:
    ann, bob = await a_client(store, "ann"), await a_client(store, "bob")
    for idle_s in (3600.0, None):
        async with engine_on(store, tmp_path, a_backend(tmp_path, 1), idle_s):
            if idle_s is not None:
                await ann.result(await ann.create_model())
                creation = await bob.create_model()
            for number in range(3):
                await ann.run(a_pass(ann, number + 1))
            waiting = await store.waiting(creation)
            assert waiting.place is not None
            assert (waiting.place.taken, waiting.place.parked) == (1, False)


async def test_what_a_session_that_ends_has_accepted_still_runs(store: SqlStore, tmp_path: Path) -> None:
    """A parked model comes back for it; one without anything to do is unloaded where it is."""
    ann, bob = await a_client(store, "ann"), await a_client(store, "bob")
    backend = a_backend(tmp_path, 1)
    async with engine_on(store, tmp_path, backend):
        await ann.result(await ann.create_model())
        await bob.result(await bob.create_model())
        unload = await store.unload_run(ann.model_id())
        assert isinstance(await ann.result(unload), ops.ModelUnloaded)
        assert backend.held == {bob.model_id()}
        other = await a_client(store, "eve")
        await other.result(await other.create_model())
        passed = await bob.submit(a_pass(bob, 1))
        unload = await store.unload_run(bob.model_id())
        assert isinstance(await bob.result(passed), ops.ForwardBackwardOutput)
        assert isinstance(await bob.result(unload), ops.ModelUnloaded)
        assert backend.held == set()
    assert not (DataDir(tmp_path).recovery_points("toy") / ann.model_id()).exists()


async def test_a_request_that_arrives_while_its_model_is_written_keeps_the_place(
    store: SqlStore, tmp_path: Path
) -> None:
    ann, bob = await a_client(store, "ann"), await a_client(store, "bob")
    backend = a_backend(tmp_path, 1)
    loop, late = asyncio.get_running_loop(), list[str]()

    def meanwhile() -> None:
        late.append(asyncio.run_coroutine_threadsafe(ann.submit(a_pass(ann, 1)), loop).result())

    async with engine_on(store, tmp_path, backend):
        await ann.result(await ann.create_model())
        backend.meanwhile = meanwhile
        creation = await bob.create_model()
        await bob.result(creation)  # in the end, when ann's model is idle again
        assert isinstance(await ann.result(late[0]), ops.ForwardBackwardOutput)


async def test_a_state_that_the_disk_has_no_room_for_stays(store: SqlStore, tmp_path: Path) -> None:
    ann, bob = await a_client(store, "ann"), await a_client(store, "bob")
    backend, loop, tried = a_backend(tmp_path, 1), asyncio.get_running_loop(), asyncio.Event()
    async with engine_on(store, tmp_path, backend, disk_reserve_bytes=1 << 60):
        await ann.result(await ann.create_model())
        backend.meanwhile = lambda: loop.call_soon_threadsafe(tried.set)
        creation = await bob.create_model()
        await tried.wait()
        assert isinstance(await ann.run(a_pass(ann, 1)), ops.ForwardBackwardOutput)
        assert (await store.waiting(creation)).place is not None


async def test_a_model_whose_return_was_cut_short_comes_back_before_anything_else_runs(
    store: SqlStore, tmp_path: Path
) -> None:
    """What ran beside it may have ended those engines; alone, it is not lost for that."""
    ann, bob = await a_client(store, "ann"), await a_client(store, "bob")
    async with engine_on(store, tmp_path, a_backend(tmp_path, 1)):
        await ann.result(await ann.create_model())
        await bob.result(await bob.create_model())
        await bob.result(await store.unload_run(bob.model_id()))
    passed = await ann.submit(a_pass(ann, 1))
    for _ in range(5):
        lease = await take_over(store, "toy")
        await store.begin_rebuild(lease, ann.model_id(), interrupted=False)
        backend = a_backend(tmp_path, 1)
        engine = await make_engine(store, backend, tmp_path, sampler=backend)
        await engine.recover("it crashed", lambda _what, _share: None)
        assert backend.held == {ann.model_id()}
        assert (await store.get_run(ann.model_id())).state is RunState.READY
    async with engine_on(store, tmp_path, a_backend(tmp_path, 1)):
        assert isinstance(await ann.result(passed), ops.ForwardBackwardOutput)


async def test_a_parked_model_whose_state_is_damaged_is_replayed(store: SqlStore, tmp_path: Path) -> None:
    expected, state = await never_parked(store, tmp_path)
    ann, bob = await a_client(store, "ann1"), await a_client(store, "bob1")
    backend = a_backend(tmp_path, 1)
    async with engine_on(store, tmp_path, backend):
        await ann.result(await ann.create_model())
        found = await seen(ann, script(ann)[:6])
        await bob.result(await bob.create_model())
        (point,) = await store.list_recovery_points(ann.model_id())
        shutil.rmtree(DataDir(tmp_path).recovery_points("toy") / point.directory)
        found += await seen(ann, script(ann)[6:])
        assert bits(backend.capture_state(ann.model_id())) == state
    assert renamed(expected, ann) == found
