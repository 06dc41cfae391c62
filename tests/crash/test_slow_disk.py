"""A disk that takes its time: everything is only later, and nobody who looks healthy is replaced."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Launcher, Served
from test_disk_faults import OFTEN, save_at_once, succeeded, train

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.testing.harness import TOY

LEASE_S = 1.0
SLOW = {  # longer than the lease, and than what lies between its renewals
    "directory.sync.before": "delay:1.5@p0.1:1",
    "store.complete.before": "delay:0.3@p0.1:2",
    "store.commit.before": "delay:1.2@p0.02:0",
}
STEPS = 12


@pytest.mark.slow
@pytest.mark.thorough
def test_a_slow_disk_costs_time_and_nothing_else(
    launcher: Launcher, whole: Callable[[int], Any], tmp_path: Path
) -> None:
    settings = {**OFTEN, "recovery": {**OFTEN["recovery"], "lease_s": LEASE_S}}
    log = tmp_path / "points"

    def slow(served: Served) -> None:
        for role in ("engine", "serve"):
            served.arm(role, ";".join([f"log={log}", *(f"{point}={what}" for point, what in SLOW.items())]))

    served = Served(launcher, tmp_path / "slow", [TOY], settings=settings, prepare=slow)
    try:
        seen, states, paths = train(served, save_at_once, steps=STEPS)
        kinds = succeeded(served.data_dir, TinkerPath.parse(paths[0]).model_id)
        assert served.stop() == 0
    finally:
        served.close()
    assert kinds["optim_step"] == kinds["save_state"] == kinds["save_for_sampler"] == STEPS
    assert set(log.read_text().splitlines()) == set(SLOW)
    assert (seen, states, kinds) == whole(STEPS)
