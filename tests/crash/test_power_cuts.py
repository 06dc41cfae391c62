"""The power is cut: what was not synchronised is gone, or some of it. What a client was told of is there."""

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import tinker
from disk_shim import Disk
from processes import Launcher, Served, launching
from test_disk_faults import OFTEN, a_state, same, save_at_once, succeeded, train, write

from tinsmith.checkpoints.saved import read_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.harness import TOY

STEPS = 12
SAVES = 4  # of acknowledged.py


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="tinsmith-disk-") as work:
        yield Disk(Path(work))


@pytest.fixture(scope="module")
def on_disk(disk: Disk) -> Iterator[Launcher]:
    """Fork processes that have this disk."""
    with launching(disk.environ) as launcher:
        yield launcher


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, *(pytest.param(seed, marks=pytest.mark.crash) for seed in range(2, 40))])
def test_what_was_acknowledged_is_there_after_a_power_cut(
    on_disk: Launcher, disk: Disk, tmp_path: Path, seed: int | None
) -> None:
    """Without a seed, everything is lost that may be, otherwise some of it."""
    data_dir = tmp_path / "parent" / "data"
    data_dir.mkdir(parents=True)
    disk.holds(tmp_path / "parent")
    disk.remember()
    program = Path(__file__).with_name("acknowledged.py")
    environ = {**on_disk.environ, "PYTHONPATH": str(program.parent)}
    done = forked.run(on_disk, "-c", program.read_text(), str(data_dir), environ=environ)
    assert done.returncode == 0, done.stderr
    requests = json.loads(done.stdout)
    disk.cut_power(data_dir, None if seed is None else random.Random(seed))
    for name, number in [("replaced", SAVES - 1), *((f"new-{number}", number) for number in range(SAVES))]:
        assert same(read_checkpoint(data_dir / "checkpoints", f"m/{name}").state, a_state(number)), name
    asyncio.run(expect(data_dir, requests))
    write(data_dir / "checkpoints", a_state(9), "replaced")


async def expect(data_dir: Path, requests: list[str]) -> None:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=data_dir))
    await store.open()
    for request_id in requests:
        await store.get_operation(request_id)
    await store.close()


def cases() -> Iterator[object]:
    yield pytest.param(None, {3, 8}, id="everything")
    for seed in range(3):
        yield pytest.param(seed, {1, 2, 4, 7, 10}, id=f"some-{seed}")


@pytest.mark.crash
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "cuts"), list(cases()))
def test_a_run_goes_on_bit_for_bit_after_power_cuts(
    on_disk: Launcher, disk: Disk, whole: Callable[[int], Any], tmp_path: Path, seed: int | None, cuts: set[int]
) -> None:
    """A cut comes right after a save was answered, while the next step is on its way."""
    expected = whole(STEPS)
    kept = None if seed is None else random.Random(seed)

    def save_and_cut(training: tinker.TrainingClient, number: int) -> list[str]:
        paths = save_at_once(training, number)
        if number in cuts:
            served.cut_power(lambda: disk.cut_power(served.data_dir, kept))
        return paths

    (tmp_path / "cut").mkdir()
    disk.holds(tmp_path / "cut" / "run" / "data")
    disk.remember()
    served = Served(on_disk, tmp_path / "cut" / "run", [TOY], settings=OFTEN)
    try:
        seen, states, paths = train(served, save_and_cut, STEPS)
        kinds = succeeded(served.data_dir, TinkerPath.parse(paths[0]).model_id)
        assert served.stop() == 0
    finally:
        served.close()
    assert (seen, states, kinds) == expected
