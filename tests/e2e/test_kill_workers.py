"""Workers of each kind are killed or paused: the client sees delay, and the undisturbed run's bits."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from few_programs import FEW_PROGRAMS, SHAPE
from killed_runs import WAIT_S, Killer, Served, check, serving, undisturbed
from processes import Launcher

from tinsmith import failpoints
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.ports import hold_port
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model
from tinsmith_workers.launching import COORDINATOR, INDEX, KEY, NUM_WORKERS
from tinsmith_workers.launching import WAIT_S as WORKER_WAIT_S
from tinsmith_workers.testing.contract import wait_until_ended

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3600)]

SECRET = "a secret of the test, long enough"
BOUNDARIES = ("worker.join", "worker.make", "worker.write_state", "worker.compute", "worker.send_answer")
"""Those of workers, in the order in which they come to them. Nobody here sends parts of answers."""
WRITERS = frozenset({"jax"})
"""The backends whose workers write states."""
EXPERTS = replace(SHAPE, family="qwen3_moe", intermediate_size=24, num_experts=4)


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    num_workers: int
    model: ModelSettings
    outcome: tuple[list[Any], dict[str, bytes]]
    compiled: Path

    @contextmanager
    def served(
        self, launcher: Launcher, data_dir: Path, *, by_scheduler: int | None = None, lease_s: float | None = None
    ) -> Iterator[Served]:
        """Serve the model; its engines find the programs that the undisturbed run compiled.

        by_scheduler: the port at which workers join that the test starts.
        lease_s: of the engine, instead of the default.
        """
        shutil.copytree(self.compiled, data_dir / "cache")
        model = self.model
        environ: dict[str, str] = {}
        if by_scheduler is not None:
            joined = {"launcher": "scheduler", "control_address": f"127.0.0.1:{by_scheduler}"}
            model, environ = with_backend(self.model, **joined), {KEY: SECRET}
        if lease_s is not None:
            environ["TINSMITH_RECOVERY__LEASE_S"] = str(lease_s)
        with serving(launcher, data_dir, model, environ=environ) as served:
            yield served


def mesh(num_workers: int) -> dict[str, Any]:
    layout = {"mesh": {"fsdp": 2, "tensor": num_workers // 2}, "simulated_devices": 1}
    return {"backend": {"plugin": "jax", "warm_up": False, "nproc_per_node": num_workers, **FEW_PROGRAMS, **layout}}


def two_ranks(plugin: str, **options: int) -> dict[str, Any]:
    sampler = {"plugin": "jax", "warm_up": False, "max_context_tokens": 128, "max_lora_rank": 8, "decode_slots": 4}
    backend = {"plugin": plugin, "device": "cpu", "nproc_per_node": 2, "max_context_tokens": 128, **options}
    return {"backend": backend, "sampler": sampler}


MODELS = {
    "mesh of 2": mesh(2),
    "mesh of 4": mesh(4),
    "fsdp": two_ranks("fsdp", max_lora_rank=8),
    "experts on megatron": two_ranks("megatron", tensor_parallel=2, expert_parallel=2),
}


@pytest.fixture(scope="module", params=MODELS)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory, sections = tmp_path_factory.mktemp("group"), MODELS[request.param]
    write_tiny_model(directory / "tiny", EXPERTS if "experts" in request.param else SHAPE)
    model = ModelSettings.model_validate({"name": "tiny", "path": directory / "tiny", **sections})
    outcome = undisturbed(directory / "undisturbed", model)
    return Undisturbed(
        num_workers=sections["backend"]["nproc_per_node"],
        model=model,
        outcome=outcome,
        compiled=directory / "undisturbed" / "cache",
    )


def with_backend(model: ModelSettings, **options: object) -> ModelSettings:
    backend = PluginSection.model_validate({**model.backend.model_dump(), **options})
    return model.model_copy(update={"backend": backend})


@pytest.mark.parametrize("group", ["mesh of 2", "mesh of 4"], indirect=True)
def test_each_worker_keeps_its_programs(group: Undisturbed) -> None:
    """Those of the undisturbed run, for the next start. JAX leaves that to the first process."""
    first, *others = [
        sorted(entry.name.partition("-")[0] for entry in (kept / "compiled").iterdir())
        for kept in sorted((group.compiled / "jax" / "tiny").glob("worker-*"))
    ]
    assert len(others) == group.num_workers - 1
    assert "jit_decode" in first
    assert all(names == first for names in others)


def test_each_worker_and_the_engine_are_killed(group: Undisturbed, launcher: Launcher, tmp_path: Path) -> None:
    random_, turns, seen = random.Random(23), itertools.count(), set[int]()
    with group.served(launcher, tmp_path / "killed") as served:

        def kill_the_next() -> bool:
            workers = served.workers()
            if len(workers) < group.num_workers:
                return False  # between two engines
            seen.update(each.pid for each in workers)
            turn = next(turns)
            if turn == group.num_workers:
                return served.kill_engine()
            with suppress(psutil.NoSuchProcess):
                workers[turn].kill()
            return True

        moments = [(2 + 3 * turn, random_.uniform(0.0, 0.3)) for turn in range(group.num_workers + 1)]
        check(served, Killer(kill_the_next, moments), *group.outcome)
        seen.update(each.pid for each in served.workers())
    assert len(seen) >= group.num_workers * 2
    wait_until_ended(list(seen))


def test_each_worker_and_the_engine_are_paused(group: Undisturbed, launcher: Launcher, tmp_path: Path) -> None:
    """For longer than the engine's lease. Nobody has to be replaced."""
    turns, seen = itertools.count(), set[int]()
    with group.served(launcher, tmp_path / "paused", lease_s=1.0) as served:

        def pause_the_next() -> bool:
            workers = served.workers()
            if len(workers) < group.num_workers:
                return False
            seen.update(each.pid for each in workers)
            turn = next(turns)
            process = workers[turn] if turn < group.num_workers else workers[0].parent()
            assert process is not None
            process.suspend()
            time.sleep(2.5)  # the length is the point
            process.resume()
            return True

        moments = [(2 + 3 * turn, 0.05) for turn in range(group.num_workers + 1)]
        check(served, Killer(pause_the_next, moments), *group.outcome)
        seen.update(each.pid for each in served.workers())
    assert len(seen) == group.num_workers


@dataclass(frozen=True)
class Death:
    rank: int
    point: str
    passes: int

    def __str__(self) -> str:
        return f"{self.point}=kill@{self.passes}"


class Hosts(threading.Thread):
    """Starts each worker again whenever it ends, as a scheduler does, and has them die one death after the other.

    The deaths of a rank come one after the other, and the last of them is in a call, which ends the others as well. So
    whoever is to die next is started after the death before.
    """

    def __init__(self, coordinator: str, num_workers: int, deaths: Sequence[Death]) -> None:
        super().__init__(daemon=True)
        self.deaths = list(deaths)
        self._variables = {COORDINATOR: coordinator, KEY: SECRET, NUM_WORKERS: str(num_workers)}
        self._variables |= {WORKER_WAIT_S: str(WAIT_S), "OMP_NUM_THREADS": "1"}
        self._stopped = threading.Event()
        self._armed: list[Death | None] = [None] * num_workers
        self._processes = [self._start(rank) for rank in range(num_workers)]

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            ended = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
            if ended:
                self._strike_out()  # whose death may have ended the others
            for rank in ended:
                self._processes[rank] = self._start(rank)

    def _strike_out(self) -> None:
        if self.deaths:
            death = self.deaths[0]
            if self._armed[death.rank] is death and self._processes[death.rank].poll() == -signal.SIGKILL:
                del self.deaths[0]

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        death = self._armed[rank] = next((each for each in self.deaths[:1] if each.rank == rank), None)
        own = {INDEX: str(rank), failpoints.VARIABLE: str(death or "")}
        return subprocess.Popen(
            [sys.executable, "-m", "tinsmith_workers"], env={**os.environ, **self._variables, **own}
        )

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("group", ["mesh of 2", "mesh of 4", "experts on megatron"], indirect=True)
def test_each_worker_dies_at_each_boundary(group: Undisturbed, launcher: Launcher, tmp_path: Path) -> None:
    random_ = random.Random(24)
    deaths = [
        Death(rank, f"{boundary}.{side}", random_.randint(1, 12) if boundary in BOUNDARIES[3:] else 1)
        for rank in range(group.num_workers)
        for boundary in BOUNDARIES
        if boundary != "worker.write_state" or group.model.backend.plugin in WRITERS
        for side in ("before", "after")
    ]
    with hold_port() as held:
        port = held.getsockname()[1]
        with group.served(launcher, tmp_path / "killed", by_scheduler=port) as served:
            hosts = Hosts(f"127.0.0.1:{port}", group.num_workers, deaths)
            hosts.start()
            try:
                check(served, Killer(lambda: True, []), *group.outcome)
            finally:
                hosts.stop()
    assert not hosts.deaths
