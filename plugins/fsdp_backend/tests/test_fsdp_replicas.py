"""Hybrid sharding: groups of ranks that divide the weights, and replicas of these, compute what one group computes."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from fsdp_harness import VOCAB, fork_backend
from fsdp_runs import compare_steps, in_memory, train_fully, train_three_ranks
from pydantic import ValidationError
from telling_rank import TellingRank

from tinsmith import AdamParams, ConfigError, LoraConfig, Placement
from tinsmith.testing import FullDriver, assert_close_arrays, assert_same_arrays, assert_same_state, ragged_data
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.demand import demand
from tinsmith_fsdp.program import Program
from tinsmith_workbench.rehearsal.rows import Row, Work, row_of

pytestmark = pytest.mark.slow

LAYOUTS = {"2 of 2": {"nproc_per_node": 4, "shard_size": 2}, "2 whole": {"nproc_per_node": 2, "shard_size": 1}}
ADAM = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)


@pytest.fixture(scope="module", params=["2 of 2", pytest.param("2 whole", marks=pytest.mark.thorough)])
def replicas(
    request: pytest.FixtureRequest, fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FsdpBackend]:
    backend = fork_backend(fsdp_models["qwen3"], tmp_path_factory.mktemp("cache"), **LAYOUTS[request.param])
    yield backend
    backend.close()


def test_each_replica_has_the_model_and_reads_it(replicas: FsdpBackend) -> None:
    total = replicas.loaded[0].total_bytes
    assert sum(loaded.parameter_bytes for loaded in replicas.loaded) == 2 * total
    assert sum(loaded.read_bytes for loaded in replicas.loaded) == 2 * total
    assert max(loaded.parameter_bytes for loaded in replicas.loaded) <= 1.02 * total * 2 / len(replicas.loaded)


def test_replicas_compute_the_same_bits(two_ranks: FsdpBackend, replicas: FsdpBackend) -> None:
    (logps, losses, states), (more_logps, more_losses, more_states) = map(train_three_ranks, (two_ranks, replicas))
    for left, right in zip(logps, more_logps, strict=True):
        np.testing.assert_array_equal(left, right)
    assert losses == more_losses
    for one, two in zip(states, more_states, strict=True):
        assert_same_state(two, one, "replicas against one group")


def test_full_fine_tuning_is_the_same_with_replicas(two_ranks: FsdpBackend, replicas: FsdpBackend) -> None:
    (logps, numbers, state), (more_logps, more_numbers, more_state) = map(train_fully, (two_ranks, replicas))
    for left, right in zip(logps, more_logps, strict=True):
        np.testing.assert_allclose(right, left, rtol=0, atol=1e-5)
    np.testing.assert_allclose(more_numbers, numbers, rtol=1e-6)
    for kind in ("weights", "adam_m", "adam_v", "gradients"):
        assert_close_arrays(getattr(more_state, kind), getattr(state, kind), 1e-5, kind)


def test_one_replica_writes_a_state_and_any_layout_reads_it(two_ranks: FsdpBackend, replicas: FsdpBackend) -> None:
    """Gradients are the same bits; what follows from their norm is not, whose parts are added in another order."""
    drivers = [FullDriver(backend) for backend in (replicas, two_ranks)]
    models = [driver.create() for driver in drivers]
    held = [pieces for _, pieces in replicas.ranks.call(TellingRank.held, models[0])]
    assert sum(piece.count for piece in chain(*held)) == 2 * sum(piece.shape[0] for piece in held[0])
    for driver, model_id in zip(drivers, models, strict=True):
        driver.forward_backward(model_id, ragged_data(5, VOCAB, (5, 9, 30)))
    states = [in_memory(driver.state(model_id)) for driver, model_id in zip(drivers, models, strict=True)]
    assert_same_arrays(states[0].gradients, states[1].gradients, "gradients")
    written = [peak > 0 for peak, _ in replicas.ranks.call(Program.capture_bytes)]
    half = len(written) // 2
    assert written == [True] * half + [False] * half, "one replica writes"
    drivers[0].optim_step(models[0], ADAM)
    moved = in_memory(drivers[0].state(models[0]))
    two_ranks.restore_state(models[1], moved)
    for driver, model_id in zip(drivers, models, strict=True):
        driver.forward_backward(model_id, ragged_data(6, VOCAB, (7, 3)))
    left, right = (in_memory(driver.state(model_id)) for driver, model_id in zip(drivers, models, strict=True))
    assert_same_state(right, left, "after a state of replicas was read by one group")
    replicas.restore_state(models[0], moved)
    assert_same_state(in_memory(drivers[0].state(models[0])), moved, "read back")
    for driver in drivers:
        driver.unload_all()


@pytest.mark.thorough
def test_replicas_of_tensor_parallel_ranks(
    two_ranks: FsdpBackend, fsdp_models: Mapping[str, Path], tmp_path: Path
) -> None:
    backend = fork_backend(fsdp_models["qwen3"], tmp_path, nproc_per_node=4, tensor_parallel=2, shard_size=1)
    try:
        for lora in (LoraConfig(rank=5, seed=5), LoraConfig(rank=0, seed=0)):
            compare_steps(two_ranks, backend, lora)
    finally:
        backend.close()


def test_a_size_that_does_not_divide_the_ranks_is_refused_before_anything_starts() -> None:
    message = r"shard_size \(3\) must divide the 8 data-parallel ranks: possible are 1, 2, 4, 8"
    with pytest.raises(ValidationError, match=message):
        FsdpConfig(nproc_per_node=8, shard_size=3)
    with pytest.raises(ConfigError, match=r"divide the 6 data-parallel ranks after .* \(2\): possible are 1, 2, 3, 6"):
        plan(12, tensor_parallel=2, shard_size=4)


def plan(cards: int, **settings: object) -> str | None:
    placement = Placement(devices=tuple(map(str, range(cards))), memory_bytes=73 << 30, device_bytes=80 << 30)
    return demand(FsdpConfig.model_validate(settings), known_config("Qwen3-8B"), placement).layout


def test_a_plan_names_the_layout() -> None:
    assert plan(8) == "8 ranks"
    assert plan(16, shard_size=8) == "16 ranks, 2 replicas of 8 shards"
    assert plan(8, tensor_parallel=2, shard_size=1) == "8 ranks, tensor parallel 2, 4 replicas of 1 shard"


def rehearsed(*, rank: int, shard_size: int | None) -> Row:
    work = Work(
        model="Qwen3-8B", cards=8, tenants=1, rank=rank, sequences=2, length=128, layers=1, shard_size=shard_size
    )
    return row_of(work)


def test_smaller_groups_gather_less_and_hold_more() -> None:
    rows = [rehearsed(rank=8, shard_size=size) for size in (8, 2, 1)]
    layers = [row.received[0] for row in rows]
    assert layers[0] > layers[1] > layers[2] == 0
    assert rows[0].resident < rows[1].resident < rows[2].resident
    assert {row.received[1:] for row in rows} == {(0, rows[0].received[2])}, "adapters' gradients are summed as ever"


def test_replicas_of_a_fully_trained_model_sum_what_their_shards_have_summed() -> None:
    one, two = (rehearsed(rank=0, shard_size=size) for size in (8, 4))
    assert two.reduced == one.reduced
    assert two.summed - one.summed == one.reduced // 4
    assert one.received[1] < two.received[1], "a ring for the shards, and one for the replicas"
