"""The launcher torchrun. Its workers import no torch here: what is tested is the launcher."""

import pytest

from tinsmith.testing import WorkersContract
from tinsmith.testing.workers_contract import PROGRAM, all_end, no_progress
from tinsmith.workers import WorkerGroup, WorkersConfig

pytestmark = pytest.mark.slow  # the agent imports torch

CONFIG = WorkersConfig(launcher="torchrun", nproc_per_node=2, start_timeout_s=300)


def test_torchrun_starts_and_ends_workers() -> None:
    group = WorkerGroup(PROGRAM, CONFIG, no_progress)
    assert [place["rank"] for place in group.call("place")] == [0, 1]
    all_end(group)


@pytest.mark.thorough
class TestTorchrun(WorkersContract):
    @pytest.fixture(scope="class")
    @classmethod
    def workers_config(cls) -> WorkersConfig:
        return CONFIG
