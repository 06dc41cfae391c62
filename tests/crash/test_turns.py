"""An engine is killed while trainer and sampler change turns on their device: exactly once, and the same bits."""

from pathlib import Path

import pytest
import scenario
from campaign import Expected, Tally, disturbed, undisturbed
from processes import Launcher

from tinsmith import failpoints
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import TOY

TURNS = ModelSettings.model_validate({**TOY.model_dump(), "sampler": {"plugin": "toy"}, "turns": {"enabled": True}})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_in_every_part_of_a_change(launcher: Launcher, for_a_while: Expected, tmp_path: Path) -> None:
    """Nobody disturbed the expected run, in which one object trains and samples, and nothing sleeps."""
    killed(launcher, for_a_while, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_killed_in_every_part_of_a_change_of_a_longer_run(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "STEPS", 50)
    killed(launcher, undisturbed(launcher, tmp_path / "undisturbed"), tmp_path)


def killed(launcher: Launcher, expected: Expected, tmp_path: Path) -> None:
    points = set(failpoints.points(of="turns"))
    tally = Tally(wanted=len(points), seed=20, never_hit=points)
    disturbed(launcher, tmp_path / "turns", expected, tally, number=0, arm_all=True, model=TURNS)
    print(tally.table())
    assert not tally.never_hit
