"""A rank gets kill -9 at a failpoint. Through the SDK, at all of them: tests/e2e/test_kill_workers.py."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from megatron_harness import VOCAB, doomed_backend

from tinsmith.testing import ModelDriver, ragged_data
from tinsmith.testing.contract import assert_same_state
from tinsmith.testing.workers_contract import wait_until_ended
from tinsmith.workers import WorkerDiedError
from tinsmith_megatron.backend import MegatronBackend

pytestmark = pytest.mark.slow  # starting ranks takes seconds

BEFORE, AFTER = (ragged_data(seed, VOCAB, (3, 9)) for seed in (1, 2))


def test_a_killed_rank_ends_all_and_the_next_ranks_go_on_bit_for_bit(
    two_ranks: MegatronBackend, megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """Rank 1 dies at the start of a pass, so rank 0 waits for it within a layer."""
    doomed = doomed_backend(megatron_models["qwen3"], tmp_path, nproc_per_node=2, tensor_parallel=2)
    try:
        driver = ModelDriver(doomed)
        model_id = driver.create()
        driver.forward_backward(model_id, BEFORE)
        driver.optim_step(model_id)
        point = driver.state(model_id)
        pids = doomed.ranks.pids
        doomed.ranks.call("arm", 1, "worker.compute.before=kill")
        with pytest.raises(WorkerDiedError, match=r"worker 1 of 2 .* died|worker 0 of 2 .* failed"):
            driver.forward_backward(model_id, AFTER)
    finally:
        doomed.close()
    wait_until_ended(pids)

    driver = ModelDriver(two_ranks)
    undisturbed, resumed = driver.create(), driver.create()
    driver.forward_backward(undisturbed, BEFORE)
    driver.optim_step(undisturbed)
    two_ranks.restore_state(resumed, point)
    for model_id in (undisturbed, resumed):
        driver.forward_backward(model_id, AFTER)
        driver.optim_step(model_id)
    assert_same_state(driver.state(resumed), driver.state(undisturbed), "after a death")
    driver.unload_all()
