"""The SDK leaves HTTP connections open until they are collected; that is its own business. A run on a healthy disk."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import scenario
from campaign import Expected, undisturbed
from processes import Launcher

_A_WHILE = 13  # steps
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))  # old calls, which scripts still use


@pytest.fixture(scope="session")
def undisturbed_for_a_while(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """See `for_a_while`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "STEPS", _A_WHILE)
        return undisturbed(launcher, tmp_path_factory.mktemp("for-a-while") / "run")


@pytest.fixture
def for_a_while(undisturbed_for_a_while: Expected, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """Shorten the scenario, and return what comes of it."""
    monkeypatch.setattr(scenario, "STEPS", _A_WHILE)
    return undisturbed_for_a_while


Whole = Callable[[int], tuple[list[Any], list[dict[str, bytes | int]], Counter[str]]]


@pytest.fixture(scope="session")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Train for a number of steps with a save after each, on a disk that works; once for all that compare with it."""
    from test_disk_faults import on_a_healthy_disk

    return cache(lambda steps: on_a_healthy_disk(launcher, tmp_path_factory.mktemp("whole") / "run", steps))
