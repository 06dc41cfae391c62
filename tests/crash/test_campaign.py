"""An SDK client trains while processes are killed: no error, and bit for bit the run that nobody disturbed.

`make test` dies at a fifth of the failpoints, `make test-all` at every one. `make test-crash` kills a thousand times,
and less often on PostgreSQL. CRASH_SEED, CRASH_KILLS, CRASH_KILLS_ON_POSTGRES and CRASH_PARALLEL change them.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinker
from campaign import SETTINGS, Expected, Tally, disturbed, undisturbed
from campaign_stores import SQLITE, CampaignStore, on_postgres
from processes import Launcher, Served
from scenario import WAIT_S, state_at

from tinsmith import failpoints
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import TOY
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.sdk_data import logprobs, ragged, step
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

SEED = int(os.environ.get("CRASH_SEED", "20"))
KILLS = int(os.environ.get("CRASH_KILLS", "1000"))
KILLS_ON_POSTGRES = int(os.environ.get("CRASH_KILLS_ON_POSTGRES", "150"))
PARALLEL = int(os.environ.get("CRASH_PARALLEL", "3"))
MOMENTS_PER_RUN = 14
MOST_RUNS = 20  # a few do; only a point that is never passed takes them all


@pytest.fixture(scope="module")
def expected(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return undisturbed(launcher, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_failpoints_kill_once(launcher: Launcher, expected: Expected, tmp_path: Path, every: int) -> None:
    """The first run meets most of them, and kills at random moments; the next ones are armed with what is left."""
    points = set(failpoints.points()[::every])  # of seven, before and after by turns
    tally = Tally(wanted=len(points), seed=SEED, never_hit=points)
    for number in range(MOST_RUNS):
        disturbed(
            launcher,
            tmp_path / str(number),
            expected,
            tally,
            number=number,
            arm_all=True,
            num_moments=1 if every > 1 else 5,
        )
        if tally.enough:
            break
    print(tally.table())
    assert not tally.never_hit
    assert len(tally.kills) >= tally.wanted


@pytest.mark.crash
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_kills(launcher: Launcher, expected: Expected, tmp_path: Path) -> None:
    tally = Tally(wanted=KILLS, seed=SEED)
    in_parallel(tally, lambda number: fire(launcher, tmp_path, expected, tally, number, SQLITE))
    assert not tally.never_hit
    assert tally.recoveries_s


@pytest.mark.crash
@pytest.mark.timeout(3 * 3600)
def test_kills_on_postgres(launcher: Launcher, expected: Expected, postgres: Postgres, tmp_path: Path) -> None:
    """A database for each run, whose connections end, too. The bits are those of the undisturbed run on SQLite."""
    tally = Tally(wanted=KILLS_ON_POSTGRES, seed=SEED)
    making = threading.Lock()

    def run(number: int) -> None:
        with making:
            store = on_postgres(postgres)
        fire(launcher, tmp_path, expected, tally, number, store)

    in_parallel(tally, run)
    assert not tally.never_hit
    assert tally.broken


@pytest.mark.crash
@pytest.mark.timeout(1800)
def test_killed_while_old_results_are_deleted(launcher: Launcher, tmp_path: Path) -> None:
    """No server of a campaign lives for the minute after which it deletes them. A twin is not disturbed."""
    before, after = (f"{point}=kill@1" for point in failpoints.points(of="old results"))
    served = Served(
        launcher,
        tmp_path / "run",
        [TOY],
        settings={**SETTINGS, "server": {"result_retention_s": 60.0}},
        prepare=lambda served: served.arm("serve", before),
    )
    try:
        service = tinker.ServiceClient(base_url=served.url, api_key="tml-test")
        training, twin = (
            service.create_lora_training_client(base_model=TOY.name, rank=4, seed=1).result(timeout=WAIT_S)
            for _ in "ab"
        )
        seen = [step(training, ragged(3, number)) for number in range(4)]
        served.arm("serve", after)  # for the one that follows; nothing is armed in the third
        with served.changed:
            assert served.changed.wait_for(lambda: len(served.codes) == 2, WAIT_S)
        served.wait_until_it_answers()
        seen += [step(training, ragged(3, number)) for number in range(4, 8)]
        expected = [step(twin, ragged(3, number)) for number in range(8)]
        assert [logprobs(each) for each in seen] == [logprobs(each) for each in expected]
        paths = [each.save_state("end").result(timeout=WAIT_S).path for each in (training, twin)]
        assert state_at(served.data_dir, paths[0]) == state_at(served.data_dir, paths[1])
        [(left,)] = SQLITE.query(served.data_dir, "SELECT count(*) FROM operations")
        assert left < 2 * (1 + 2 * 8 + 1), "nothing was deleted"
        service.close("success").result(timeout=WAIT_S)
        assert served.stop() == 0
        assert served.codes[:2] == [-signal.SIGKILL] * 2
    finally:
        served.close()


def fire(
    launcher: Launcher, directory: Path, expected: Expected, tally: Tally, number: int, store: CampaignStore
) -> None:
    disturbed(
        launcher,
        directory / str(number),
        expected,
        tally,
        number=number,
        num_moments=MOMENTS_PER_RUN,
        share_at_points=0.7,
        store=store,
    )


def in_parallel(tally: Tally, run: Callable[[int], None]) -> None:
    """Number after number, until there were kills enough."""
    started = time.monotonic()

    def show(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", file=sys.stderr, flush=True)

    tally.show = show

    def worker(number: int) -> None:
        while not tally.enough:
            run(number)
            number += PARALLEL

    try:
        with ThreadPoolExecutor(PARALLEL) as pool:
            for each in [pool.submit(worker, first) for first in range(PARALLEL)]:
                each.result()
    finally:
        print(f"\n{tally.table()}\n  {time.monotonic() - started:.0f} s in all", file=sys.stderr)


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_the_jax_backend_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", TinyShape(num_layers=2, hidden_size=64, intermediate_size=96))
    options = {"plugin": "jax", "max_lora_rank": 8, "max_context_tokens": 256, "max_batch_tokens": 256}
    backend = PluginSection.model_validate({**options, "warm_up": False})
    model = ModelSettings(name="tiny", path=tmp_path / "tiny", backend=backend)
    expected = undisturbed(launcher, tmp_path / "undisturbed", model)
    tally = Tally(wanted=30, seed=SEED)
    for number in range(3):
        disturbed(launcher, tmp_path / str(number), expected, tally, number=number, num_moments=10, model=model)
    print(tally.table(), file=sys.stderr)
