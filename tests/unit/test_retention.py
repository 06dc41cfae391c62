"""Retention: what is past it is gone from the bytes on disk, and nothing that a recovery needs is."""

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tinsmith import operations as ops
from tinsmith.checkpoints import atomic_directory
from tinsmith.errors import UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store
from tinsmith.processes.housekeeping import Housekeeping
from tinsmith.settings import ModelSettings, PluginSection, RecoverySettings, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import OperationState, RunState, StoreContext
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.engine_thread import engine_thread
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.loop_thread import LoopThread
from tinsmith.testing.saved_files import read_saved

MODEL = "s1:train:0"
WINDOW = 24  # bytes that no two things share by chance


def a_pass(number: int, length: int = 200) -> ops.ForwardBackward:
    tokens = np.random.default_rng(number).integers(0, 60, length + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.random.default_rng(number).random(length, np.float32)}
    datum = ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=MODEL, data=(datum,))


def a_step() -> ops.OptimStep:
    return ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.01))


def fingerprints(content: bytes) -> set[bytes]:
    """Cut pieces out of it, as a disk's owner would look for them."""
    starts = range(0, max(len(content) - WINDOW, 1), 97)
    return {piece for start in starts if len(set(piece := content[start : start + WINDOW])) > 12}


def in_database(data_dir: Path) -> dict[str, set[bytes]]:
    found: dict[str, set[bytes]] = {}
    with sqlite3.connect(data_dir / "tinsmith.db") as database:
        for table, column in (("payloads", "payload"), ("results", "result")):
            query = f"SELECT o.kind, {column} FROM {table} JOIN operations o ON o.id = operation_id"
            for kind, content in database.execute(query):
                if kind in {"forward_backward", "sample"}:
                    found.setdefault(f"{column} of {kind}", set()).update(fingerprints(content))
    database.close()
    return found


def files_in(directory: Path) -> dict[Path, bytes]:
    """Return what every file holds; snapshots may come and go meanwhile."""
    contents = {}
    for parent, _, names in os.walk(directory):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):
                if path.is_file():
                    contents[path] = path.read_bytes()
    return contents


def in_files(data_dir: Path, *directories: str) -> dict[str, set[bytes]]:
    found: dict[str, set[bytes]] = {}
    for directory in directories:
        for path, content in files_in(data_dir / directory).items():
            if path.suffix == ".safetensors":
                found.setdefault(directory, set()).update(fingerprints(content[-400:]))
    return found


def still_there(data_dir: Path, pieces: set[bytes]) -> list[str]:
    """Look at every byte of every file."""
    return [path.name for path, content in files_in(data_dir).items() if any(piece in content for piece in pieces)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    model = ModelSettings(name="toy", backend=PluginSection(plugin="toy"), resident_snapshots=1)
    with running_server(tmp_path / "data", models=[model], recovery={"point_every_operations": 4}) as server:
        yield server


def housekeep(server: RunningServer, later: timedelta) -> None:
    root = server.settings.server.data_dir / "checkpoints"
    now = datetime.now(UTC) + later
    server.call(Housekeeping(server.settings.server, server.store, root, clock=SteadyClock(lambda: now)).round())


async def use(client: EngineDriver) -> None:
    """Train, sample and save, so that there is some of everything."""
    await client.open_session()
    await client.result(await client.create_model())
    for number in range(6):
        for operation in (a_pass(number), a_step()):
            assert not isinstance(await client.run(operation), ops.Failed)
        name = f"s1:sample:{number}"
        await client.run(ops.SaveForSampler(model_id=MODEL, sampling_session_id=name))
        params = ops.SamplingParams(max_tokens=100, seed=number, stop_at_eos=False)
        tokens = np.random.default_rng(number).integers(0, 60, 150).astype(np.int32)
        sample = ops.Sample(
            sampling_session_id=name, snapshot_id=name, prompt_P=tokens, params=params, prompt_logprobs=True
        )
        assert not isinstance(await client.run(sample), ops.Failed)
    await client.run(ops.SaveState(model_id=MODEL, path=client.path("short"), ttl_seconds=3600))
    while len(await client.store.list_recovery_points(MODEL)) < 2:  # they are written beside the training
        await client.run(a_step())


def test_what_is_past_its_retention_is_gone_from_every_file(server: RunningServer) -> None:
    data_dir = server.settings.server.data_dir
    client = EngineDriver(server.store, "toy")
    server.call(use(client))
    everything = in_database(data_dir) | in_files(data_dir, "checkpoints", "recovery", "snapshots")
    assert set(everything) == {
        "payload of forward_backward",
        "result of forward_backward",
        "payload of sample",
        "result of sample",
        "checkpoints",
        "recovery",
        "snapshots",
    }
    for what, pieces in everything.items():
        assert pieces, what
        assert still_there(data_dir, pieces), what

    housekeep(server, timedelta(hours=2))  # the model lives on: its recovery needs something still
    left = in_database(data_dir)
    for what in ("payload of sample", "result of sample", "checkpoints"):
        assert not still_there(data_dir, everything[what] - everything["recovery"] - everything["snapshots"]), what
    pruned = everything["payload of forward_backward"] - left.get("payload of forward_backward", set())
    assert pruned
    assert not still_there(data_dir, pruned)
    assert not (data_dir / "checkpoints" / MODEL).exists(), "its directory was empty"

    server.call(server.store.end_session("s1", "success", None))
    server.call(_until_unloaded(server))
    housekeep(server, timedelta(hours=4))
    for what, pieces in everything.items():
        assert not still_there(data_dir, pieces), what


async def _until_unloaded(server: RunningServer) -> None:
    (unload,) = await server.store.list_log(MODEL, from_seq_id=None, limit=1)
    assert unload.kind == "unload_model"
    assert (await server.store.wait_for(unload.request_id, 60)).state == OperationState.SUCCEEDED
    async with asyncio.timeout(60):
        while (server.settings.server.data_dir / "recovery" / "toy" / MODEL).exists():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    assert (await server.store.get_run(MODEL)).state == RunState.UNLOADED


async def test_the_file_shrinks_where_much_of_it_is_free(tmp_path: Path) -> None:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    client = EngineDriver(store, "toy")
    await client.open_session()
    for number in range(40):
        tokens = np.random.default_rng(number).integers(0, 2**31, 100_000).astype(np.int32)
        params = ops.SamplingParams(max_tokens=1, seed=0)
        sample = ops.Sample(sampling_session_id="s1:sample:0", snapshot_id=None, prompt_P=tokens, params=params)
        await store.cancel(await client.submit(sample))
    before = (tmp_path / "tinsmith.db").stat().st_size + (tmp_path / "tinsmith.db-wal").stat().st_size
    assert await store.prune(datetime.now(UTC) + timedelta(hours=1)) == 40
    assert (tmp_path / "tinsmith.db-wal").stat().st_size == 0
    assert (tmp_path / "tinsmith.db").stat().st_size < before / 2
    await store.close()


def test_empty_directories_and_what_crashes_left_are_removed(tmp_path: Path) -> None:
    def fill(fresh: Path) -> None:
        (fresh / "weights").write_bytes(b"x")

    for name in ("run/weights/a", "run/weights/b", "run/sampler_weights/c"):
        atomic_directory.write(tmp_path, name, fill, overwrite=False)
    atomic_directory.delete(tmp_path, "run/weights/a")
    assert (tmp_path / "run" / "weights" / "b").is_dir()
    atomic_directory.delete(tmp_path, "run/weights/b")
    assert not (tmp_path / "run" / "weights").exists()
    for left in (".x.new-1", ".made-2", ".y.deleted-3"):
        (tmp_path / "run" / "sampler_weights" / left).mkdir()
    atomic_directory.sweep(tmp_path)
    assert len(list((tmp_path / "run" / "sampler_weights").iterdir())) == 4, "somebody may be writing them"
    atomic_directory.sweep(tmp_path, older_than_s=0)
    assert [path.name for path in (tmp_path / "run" / "sampler_weights").iterdir()] == ["c"]
    atomic_directory.delete(tmp_path, "run/sampler_weights/c")
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_touches_nothing_beside_it(tmp_path: Path) -> None:
    def fill(fresh: Path) -> None:
        (fresh / "weights").write_bytes(b"x")

    strangers = [".a.old", ".b.new-1", ".c.deleted-2"]
    for name in strangers:
        (tmp_path / name).mkdir()
    atomic_directory.write_new(tmp_path, "mine", fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*strangers, "mine"]
    with pytest.raises(UserError, match="'mine' exists already"):
        atomic_directory.write_new(tmp_path, "mine", fill)

    def fail(fresh: Path) -> None:
        fill(fresh)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        atomic_directory.write_new(tmp_path, "other", fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*strangers, "mine"]


# Pruning never removes what a recovery needs --------------------------------------------------------------------------

SCHEDULES = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 6)),
        st.tuples(st.just("prune"), st.booleans()),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("damage"), st.just(0)),
    ),
    min_size=2,
    max_size=7,
)


class Run:
    """A model over restarts of its engine."""

    def __init__(self, data_dir: Path, every: int, keep: int) -> None:
        self.data_dir = data_dir
        self.model = ModelSettings(name="toy", backend=PluginSection(plugin="toy"))
        self.settings = Settings(
            server=ServerSettings(data_dir=data_dir),
            store=PluginSection.model_validate({"plugin": "sql", "synchronous": "off", "safety_poll_s": 600}),
            recovery=RecoverySettings(point_every_operations=every, keep_points=keep),
            models=(self.model,),
        )
        self.plugins = Plugins.load()
        self.steps = 0

    def play(self, schedule: list[tuple[str, Any]]) -> dict[str, bytes]:
        """Return the state after it all, and one more restart."""
        with LoopThread.running("client") as loop:
            store = make_store(self.settings, self.plugins)
            loop.call(store.open())
            client = EngineDriver(store, "toy")
            loop.call(client.open_session())
            parts = " ".join(what for what, _ in schedule)
            first = [("create", 0)]
            phases: list[list[tuple[str, Any]]] = [first]
            for what, value in [*schedule, ("restart", 0), ("save", 0)]:
                if what in {"restart", "damage"}:  # files are damaged while nothing runs
                    phases.append([])
                phases[-1].append((what, value))
            for phase in phases:
                if phase and phase[0][0] == "damage":
                    self._damage(loop.call(store.list_recovery_points(MODEL)))
                with engine_thread(self.settings, self.model, self.plugins, make_store(self.settings, self.plugins)):
                    for what, value in phase:
                        loop.call(self._do(client, what, value))
            run = loop.call(store.get_run(MODEL))
            assert run.state == RunState.READY, (run.state_reason, parts)
            assert run.state_reason is None
            loop.call(store.close())
        state = read_saved(self.data_dir, f"tinker://{MODEL}/weights/end").state
        named = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
        return {f"{part} {name}": array.tobytes() for part, arrays in named.items() for name, array in arrays.items()}

    async def _do(self, client: EngineDriver, what: str, value: Any) -> None:
        match what:
            case "create":
                await client.result(await client.create_model())
            case "train":
                for _ in range(value):
                    await client.submit(a_pass(self.steps, length=5))
                    assert isinstance(await client.run(a_step()), ops.OptimStepOutput)
                    self.steps += 1
            case "prune":
                later = datetime.now(UTC) + timedelta(hours=1)
                await client.store.prune(later, idle_since=datetime.now(UTC) - timedelta(hours=1) if value else None)
            case "save":
                await client.run(ops.SaveState(model_id=MODEL, path=client.path("end")))

    def _damage(self, snapshots: list[Any]) -> None:
        """Damage the newest if there is another one: recovery promises to survive that once."""
        if len(snapshots) > 1:
            path = self.data_dir / "recovery" / "toy" / snapshots[0].directory / "adapter_model.safetensors"
            path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
@settings(deadline=None, max_examples=3, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(schedule=SCHEDULES, every=st.integers(1, 7), keep=st.integers(1, 3))
def test_pruning_never_removes_what_a_recovery_needs(
    schedule: list[tuple[str, Any]], every: int, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compare_with_a_calm_run(schedule, every, keep, tmp_path_factory)


@pytest.mark.thorough
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(schedule=SCHEDULES, every=st.integers(1, 7), keep=st.integers(1, 3))
def test_pruning_never_removes_what_a_recovery_needs_at_length(
    schedule: list[tuple[str, Any]], every: int, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compare_with_a_calm_run(schedule, every, keep, tmp_path_factory)


def compare_with_a_calm_run(
    schedule: list[tuple[str, Any]], every: int, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disturbed = Run(tmp_path_factory.mktemp("disturbed"), every, keep)
    state = disturbed.play(schedule)
    calm = Run(tmp_path_factory.mktemp("calm"), 1000, 2)
    assert calm.play([("train", disturbed.steps)] if disturbed.steps else []) == state
