"""A rank gets kill -9 at a failpoint. Through the SDK, at all of them: tests/e2e/test_kill_workers.py."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from doomed_rank import DoomedRank
from megatron_harness import VOCAB, doomed_backend, partly_replayed

from tinsmith.testing import ModelDriver, ragged_data
from tinsmith.testing.contract import assert_same_state
from tinsmith_megatron.backend import MegatronBackend
from tinsmith_workers import WorkerDiedError
from tinsmith_workers.testing.contract import wait_until_ended

pytestmark = pytest.mark.slow  # starting ranks takes seconds

BEFORE, AFTER = (ragged_data(seed, VOCAB, (3, 9)) for seed in (1, 2))


@pytest.mark.parametrize(
    ("ranks", "family", "layout"),
    [
        pytest.param("two_ranks", "qwen3", {"tensor_parallel": 2}, id="matrices divided"),
        pytest.param("two_expert_ranks", "qwen3_moe", {"expert_parallel": 2}, id="experts replayed"),
    ],
)
def test_a_killed_rank_ends_all_and_the_next_ranks_go_on_bit_for_bit(
    ranks: str,
    family: str,
    layout: Mapping[str, int],
    request: pytest.FixtureRequest,
    megatron_models: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    """Rank 1 dies at the start of a pass, so rank 0 waits for it within a layer."""
    living: MegatronBackend = request.getfixturevalue(ranks)
    before, after = (partly_replayed(ModelDriver(living), data) for data in (BEFORE, AFTER))
    doomed = doomed_backend(megatron_models[family], tmp_path, nproc_per_node=2, **layout)
    try:
        driver = ModelDriver(doomed)
        model_id = driver.create()
        driver.forward_backward(model_id, before)
        driver.optim_step(model_id)
        point = driver.state(model_id)
        pids = doomed.ranks.pids
        doomed.ranks.call(DoomedRank.arm, 1, "worker.compute.before=kill")
        with pytest.raises(WorkerDiedError, match=r"worker 1 of 2 .* died|worker 0 of 2 .* failed"):
            driver.forward_backward(model_id, after)
    finally:
        doomed.close()
    wait_until_ended(pids)

    driver = ModelDriver(living)
    undisturbed, resumed = driver.create(), driver.create()
    driver.forward_backward(undisturbed, before)
    driver.optim_step(undisturbed)
    living.restore_state(resumed, point)
    for model_id in (undisturbed, resumed):
        driver.forward_backward(model_id, after)
        driver.optim_step(model_id)
    assert_same_state(driver.state(resumed), driver.state(undisturbed), "after a death")
    driver.unload_all()
