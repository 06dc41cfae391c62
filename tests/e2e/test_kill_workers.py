"""The workers of a mesh are killed with SIGKILL: the client sees delay, and the undisturbed run's bits."""

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from few_programs import FEW_PROGRAMS, SHAPE
from killed_runs import Killer, Served, check, serving, undisturbed
from processes import Launcher

from tinsmith.huggingface.tiny_model import write_tiny_model
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.workers_contract import wait_until_ended

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3600)]


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    num_workers: int
    model: ModelSettings
    outcome: tuple[list[Any], dict[str, bytes]]
    compiled: Path

    @contextmanager
    def served(self, launcher: Launcher, data_dir: Path) -> Iterator[Served]:
        """Serve the model; its engines find the programs that the undisturbed run compiled."""
        shutil.copytree(self.compiled, data_dir / "cache")
        with serving(launcher, data_dir, self.model) as served:
            yield served


@pytest.fixture(scope="module", params=[2, 4])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory, num_workers = tmp_path_factory.mktemp("mesh"), request.param
    write_tiny_model(directory / "tiny", SHAPE)
    model = with_backend(
        ModelSettings(name="tiny", path=directory / "tiny", backend=PluginSection(plugin="jax")),
        **FEW_PROGRAMS,
        warm_up=False,
        mesh={"fsdp": 2, "tensor": num_workers // 2},
        nproc_per_node=num_workers,
        simulated_devices=1,
    )
    outcome = undisturbed(directory / "undisturbed", model)
    return Undisturbed(
        num_workers=num_workers, model=model, outcome=outcome, compiled=directory / "undisturbed" / "cache"
    )


def with_backend(model: ModelSettings, **options: object) -> ModelSettings:
    backend = PluginSection.model_validate({**model.backend.model_dump(), **options})
    return model.model_copy(update={"backend": backend})


def test_each_worker_keeps_its_programs(mesh: Undisturbed) -> None:
    """Those of the undisturbed run, for the next start. JAX leaves that to the first process."""
    first, *others = [
        sorted(entry.name.partition("-")[0] for entry in (mesh.compiled / f"jax/tiny/worker-{rank}/compiled").iterdir())
        for rank in range(mesh.num_workers)
    ]
    assert "jit_decode" in first
    assert all(names == first for names in others)


def test_each_worker_and_the_engine_are_killed(mesh: Undisturbed, launcher: Launcher, tmp_path: Path) -> None:
    random_, turns, seen = random.Random(23), itertools.count(), set[int]()
    with mesh.served(launcher, tmp_path / "killed") as served:

        def kill_the_next() -> bool:
            workers = served.workers()
            if len(workers) < mesh.num_workers:
                return False  # between two engines
            seen.update(each.pid for each in workers)
            turn = next(turns)
            if turn == mesh.num_workers:
                return served.kill_engine()
            with suppress(psutil.NoSuchProcess):
                workers[turn].kill()
            return True

        moments = [(2 + 3 * turn, random_.uniform(0.0, 0.3)) for turn in range(mesh.num_workers + 1)]
        check(served, Killer(kill_the_next, moments), *mesh.outcome)
        seen.update(each.pid for each in served.workers())
    assert len(seen) >= mesh.num_workers * 2
    wait_until_ended(list(seen))
