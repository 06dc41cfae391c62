"""Every call on a file fails somewhere: with EIO or ENOSPC, in server and engine, by a library below them.

`test_disk_faults.py` lets named places of the code fail. Here nothing of the code is named, so what nobody thought of
fails as well: each open, write, fsync, rename, link, unlink, mkdir and truncate below the data directory.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import tinker
from disk_shim import ERRORS, Disk
from processes import Launcher, Served, launching
from scenario import WAIT_S
from test_disk_faults import OFTEN, succeeded, train

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.testing.harness import TOY

STEPS = 12
EACH_CALL = Path(__file__).with_name("each_call.py")


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
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("what", "stride"),
    [
        ("checkpoint", 1),
        ("store", 11),
        pytest.param("store", 1, marks=pytest.mark.crash),
        pytest.param("fresh store", 1, marks=pytest.mark.crash),
    ],
)
def test_each_call_fails_once(
    on_disk: Launcher, disk: Disk, tmp_path: Path, what: str, stride: int, error: str
) -> None:
    """One after the other, until there are no more: what was there before stays, and what was acknowledged is there."""
    disk.holds(tmp_path)
    arguments = ["-c", EACH_CALL.read_text(), what, str(ERRORS[error]), str(stride), str(tmp_path)]
    environ = {**on_disk.environ, "PYTHONPATH": str(EACH_CALL.parent)}
    done = forked.run(on_disk, *arguments, environ=environ, cwd=tmp_path)
    disk.heal()
    assert done.returncode == 0, done.stderr
    failed = Counter(json.loads(done.stdout))
    print(f"{what}, {error}: {failed.total()} calls failed, one at a time: {dict(failed)}")
    assert failed["write"] > 2
    assert failed.total() > 10


@pytest.mark.crash
@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("chance", [10_000, 30_000])
def test_a_run_on_a_disk_whose_calls_fail(
    on_disk: Launcher, disk: Disk, whole: Callable[[int], Any], tmp_path: Path, error: str, chance: int
) -> None:
    failures: Counter[str] = Counter()
    messages: list[str] = []

    def save_until_it_works(training: tinker.TrainingClient, number: int) -> list[str]:
        done = []
        for call, name in ((training.save_state, f"s-{number}"), (training.save_weights_for_sampler, f"w-{number}")):
            while True:
                try:
                    done.append(call(name).result(timeout=WAIT_S).path)
                    break
                except tinker.RequestFailedError as failure:
                    failures[name[0]] += 1
                    messages.append(str(failure))
        return done

    expected = whole(STEPS)
    disk.holds(tmp_path / "failing" / "data")
    served = Served(on_disk, tmp_path / "failing", [TOY], settings=OFTEN)
    try:
        served.wait_until_it_answers()
        disk.fail(ERRORS[error], per_million=chance)
        seen, states, paths = train(served, save_until_it_works, STEPS)
        failed = disk.heal()
        kinds = succeeded(served.data_dir, TinkerPath.parse(paths[0]).model_id)
        assert served.stop() == 0
    finally:
        disk.heal()
        served.close()
    print(f"{error}: {sum(failed.values())} calls failed: {failed}; failed saves: {dict(failures)}")
    assert (seen, states, kinds) == expected
    assert [each for each in messages if "could not be" not in each and "operator's log" not in each] == []
    assert sum(failed.values()) > 10
