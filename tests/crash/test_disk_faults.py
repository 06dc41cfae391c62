"""Disks that are full or fail: no half checkpoint, no accepted operation lost, errors that say what to do."""

import contextlib
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from campaign import SETTINGS
from processes import Launcher, Served
from scenario import WAIT_S, state_at

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import read_checkpoint, write_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import NotFoundError, ServerError
from tinsmith.operations import AdamParams, LoraConfig, OptimStep
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import PlaceLimits, StoreContext
from tinsmith.testing.engine_driver import EngineDriver, take_over
from tinsmith.testing.harness import TOY
from tinsmith.testing.sdk_data import logprobs, ragged
from tinsmith.testing.store_records import claim_records

ENGINE = {  # how often each point of a save, a snapshot or a commit fails
    "directory.fill.after": "enospc@p0.4:1",
    "directory.sync.before": "eio@p0.4:2",
    "directory.put.before": "enospc@p0.2:3",
    "directory.sync_parents.before": "eio@p0.1:4",
    "store.commit.before": "enospc@p0.02:5",
}
OFTEN = {**SETTINGS, "recovery": {"point_every_operations": 3}}
SERVER = {"store.commit.before": "enospc@p0.02:6"}


def train(
    served: Served, save: Callable[[tinker.TrainingClient, int], list[str]], steps: int
) -> tuple[list[Any], list[dict[str, bytes | int]], list[str]]:
    """Train with a save after every step; return what the client saw, and what the saves that succeeded hold."""
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-test")
    training = service.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=WAIT_S)
    seen, paths = [], []
    for number in range(steps):
        passed = training.forward_backward(ragged(2, number), "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        seen += [logprobs(passed.result(timeout=WAIT_S)), stepped.result(timeout=WAIT_S).metrics]
        paths += save(training, number)
    states = [state_at(served.data_dir, path) for path in paths]
    service.close("success").result(timeout=WAIT_S)
    return seen, states, paths


def save_at_once(training: tinker.TrainingClient, number: int) -> list[str]:
    return [
        training.save_state(f"s-{number}").result(timeout=WAIT_S).path,
        training.save_weights_for_sampler(f"w-{number}").result(timeout=WAIT_S).path,
    ]


def on_a_healthy_disk(
    launcher: Launcher, directory: Path, steps: int
) -> tuple[list[Any], list[dict[str, bytes | int]], Counter[str]]:
    served = Served(launcher, directory, [TOY], settings=OFTEN)
    try:
        seen, states, paths = train(served, save_at_once, steps)
        kinds = succeeded(served.data_dir, TinkerPath.parse(paths[0]).model_id)
        assert served.stop() == 0
    finally:
        served.close()
    return seen, states, kinds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("steps", "faults", "refusals"), [(12, 40, 4), pytest.param(45, 200, 20, marks=pytest.mark.thorough)]
)
def test_saves_on_a_failing_disk(
    launcher: Launcher, whole: Callable[[int], Any], tmp_path: Path, steps: int, faults: int, refusals: int
) -> None:
    failures: Counter[str] = Counter()
    messages: list[tuple[str, str]] = []  # what is to be said, and what was

    def save_until_it_works(training: tinker.TrainingClient, number: int) -> list[str]:
        done = []
        for call, name, kind in (
            (training.save_state, f"s-{number}", "weights"),
            (training.save_weights_for_sampler, f"w-{number}", "sampler_weights"),
        ):
            while True:
                try:
                    done.append(call(name).result(timeout=WAIT_S).path)
                    break
                except tinker.RequestFailedError as error:
                    messages.append((f"{kind}/{name}' could not be written: ", str(error)))
                    failures[kind] += 1
        return done

    log = tmp_path / "points"

    def fail(served: Served) -> None:
        for role, points in (("engine", ENGINE), ("serve", SERVER)):
            served.arm(role, ";".join([f"log={log}", *(f"{point}={what}" for point, what in points.items())]))

    served = Served(launcher, tmp_path / "failing", [TOY], settings=OFTEN, prepare=fail)
    try:
        seen, states, paths = train(served, save_until_it_works, steps)
        known = {path.removeprefix("tinker://") for path in paths}
        root = served.data_dir / "checkpoints"
        found = {str(file.parent.relative_to(root)).partition("~")[0] for file in root.rglob("tinsmith.json")}
        assert {each for each in found if "/." not in each} == known  # what failed is not to be seen
        kinds = succeeded(served.data_dir, TinkerPath.parse(paths[0]).model_id)
        assert served.stop() == 0
    finally:
        served.close()
    assert (seen, states, kinds) == whole(steps)
    points = Counter(log.read_text().splitlines())
    print(f"{points.total()} faults: {dict(points)}; failed saves: {dict(failures)}")
    assert points.total() >= faults
    assert set(points) == {*ENGINE, *SERVER}
    assert failures["weights"] > refusals
    assert failures["sampler_weights"] > refusals
    for part, message in messages:
        assert part in message
        assert "try again" in message
    assert kinds["forward_backward"] == kinds["optim_step"] == kinds["save_state"] == steps


def succeeded(data_dir: Path, model_id: str) -> Counter[str]:
    """Return how many operations of each kind succeeded; only saves may have failed, and none may be missing."""
    with contextlib.closing(sqlite3.connect(data_dir / "tinsmith.db")) as database:
        query = (
            "SELECT seq_id, kind, state FROM operations WHERE subject_id = ? AND kind <> 'unload_model' ORDER BY seq_id"
        )
        rows = database.execute(query, (model_id,)).fetchall()
        [(reason,)] = database.execute("SELECT state_reason FROM runs").fetchall()
    assert reason is None
    assert [row[0] for row in rows] == list(range(len(rows)))
    assert {row[1] for row in rows if row[2] != "succeeded"} <= {"save_state", "save_for_sampler"}
    return Counter(row[1] for row in rows if row[2] == "succeeded")


# A disk that is really full -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One MiB, where this user may mount a file system."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def a_state(seed: int) -> ModelState:
    rng = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{module}.lora_A.weight": (4, 16), f"{module}.lora_B.weight": (24, 4)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return ModelState(lora=LoraConfig(rank=4, seed=seed), weights=weights)


def write(root: Path, state: ModelState, name: str = "x") -> None:
    write_checkpoint(
        root,
        f"m/{name}",
        kind="training",
        state=state,
        base_model="tiny",
        user_metadata={},
        created_at=datetime.now(UTC),
        overwrite=True,
    )


def same(one: ModelState, other: ModelState) -> bool:
    return all(np.array_equal(one.weights[name], other.weights[name]) for name in other.weights)


def fill_up(directory: Path) -> Path:
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return ballast


def test_a_checkpoint_on_a_full_disk(small_disk: Path) -> None:
    first, second = a_state(1), a_state(2)
    write(small_disk, first)
    ballast = fill_up(small_disk)
    for name in ("x", "y"):
        with pytest.raises(ServerError, match=r"No space left on device; .* free space in the server's data directory"):
            write(small_disk, second, name)
    assert same(read_checkpoint(small_disk, "m/x").state, first)
    with pytest.raises(NotFoundError):
        read_checkpoint(small_disk, "m/y")
    ballast.unlink()
    write(small_disk, second)
    assert same(read_checkpoint(small_disk, "m/x").state, second)
    assert [path.name for path in (small_disk / "m").iterdir()] == ["x"]


async def test_a_store_on_a_full_disk(small_disk: Path) -> None:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=small_disk))
    await store.open()
    try:
        client = EngineDriver(store, "toy")
        await client.open_session()
        accepted = [await client.create_model()]
        ballast = fill_up(small_disk)
        step = OptimStep(model_id=client.model_id(), adam=AdamParams())
        with pytest.raises(ServerError, match="disk of the request store is full"):  # noqa: PT012 - one of them
            for _ in range(1000):
                accepted.append(await client.submit(step))  # noqa: PERF401 - those before it count
        ballast.unlink()
        accepted.append(await client.submit(step, seq_id=len(accepted)))
        lease = await take_over(store, "toy")
        await store.admit_models(lease, PlaceLimits(max_models=1, kept=0, give_up_before=datetime.now(UTC), failure=""))
        claimed = await claim_records(store, lease, 2000)
        assert [record.request_id for record in claimed] == accepted
    finally:
        await store.close()
