"""What ranks send each other, and when: the order of gathers, and gradients that are summed in bfloat16."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from fsdp_harness import VOCAB, fork_backend
from fsdp_runs import in_memory
from recording_rank import RecordingRank

from tinsmith import LoraConfig, ModelState
from tinsmith.testing import ModelDriver, ragged_data
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.demand import resolved_ranks
from tinsmith_workbench.rehearsal.step import Rehearsal, rehearse

pytestmark = pytest.mark.slow

DATA = ragged_data(1, VOCAB, (40, 30, 20, 10))
IN_TURN = ["gather", "gather", "forward 0", "gather", "forward 1"]  # the first: embedding and head
AHEAD = ["gather", "gather", "gather", "forward 0", "forward 1"]
BACK = ["gather", "gather", "backward 1", "backward 0"]


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_next_layer_is_gathered_before_this_one_computes(
    prefetch: bool, fsdp_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """FSDP2 by itself does so in the backward pass. In the forward pass the gather is issued after the layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_fsdp.backend.PROGRAM", "recording_rank:RecordingRank")
        backend = fork_backend(fsdp_models["qwen3"], tmp_path, nproc_per_node=2, isolation="fast", prefetch=prefetch)
    try:
        driver = ModelDriver(backend)
        model_id = driver.create(rank=4)
        forward = AHEAD if prefetch else IN_TURN
        driver.forward_backward(model_id, DATA)
        assert backend.ranks.call(RecordingRank.events) == [[*forward, *BACK]] * 2
    finally:
        backend.close()


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
def fast_ranks(
    request: pytest.FixtureRequest, fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FsdpBackend]:
    settings = {"nproc_per_node": 2, "isolation": "fast", "reduce_dtype": request.param}
    backend = fork_backend(fsdp_models["qwen3"], tmp_path_factory.mktemp("cache"), **settings)
    yield backend
    backend.close()


def gradient(backend: FsdpBackend, lora: LoraConfig) -> ModelState:
    driver = ModelDriver(backend)
    model_id = driver.create_with(lora)
    driver.forward_backward(model_id, DATA)
    state = in_memory(driver.state(model_id))
    driver.unload_all()
    return state


@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_summed_in_bfloat16_differ_by_its_rounding(
    rank: int, two_ranks: FsdpBackend, fast_ranks: FsdpBackend
) -> None:
    """Two parts and their sum are rounded to 8 bits; in float32 the order of sums is all that differs."""
    exact, found = (gradient(backend, LoraConfig(rank=rank, seed=4)).gradients for backend in (two_ranks, fast_ranks))
    errors = [np.linalg.norm(found[name] - exact[name]) / (np.linalg.norm(exact[name]) + 1e-30) for name in exact]
    if fast_ranks.config.reduce_dtype == "float32":
        assert max(errors) < 1e-5
    else:
        assert 1e-4 < max(errors) < 2**-7


def rehearsed(rank: int, *, layers: int = 1, **settings: object) -> Rehearsal:
    model = {**(known_config("Qwen3-8B") or {}), "num_hidden_layers": layers}
    fast = {"dtype": "bfloat16", "isolation": "fast", "activation_checkpointing": True}
    config = FsdpConfig.model_validate({**fast, **settings})
    return rehearse(config, model, resolved_ranks(config, 4, on_cpu=True), [LoraConfig(rank=rank, seed=0)], [64])


def test_bfloat16_halves_what_is_sent_of_gradients() -> None:
    (adapter, narrow), (full, narrow_full) = (
        [rehearsed(rank, reduce_dtype=dtype) for dtype in ("float32", "bfloat16")] for rank in (8, 0)
    )
    assert adapter.summed == 2 * narrow.summed > 0
    assert full.reduced == 2 * narrow_full.reduced > 0
    assert (narrow.gathered, narrow_full.gathered) == (adapter.gathered, full.gathered)


def test_prefetching_gathers_no_more_and_takes_no_more() -> None:
    """The peak is in the backward pass, where FSDP2 prefetches by itself."""
    assert rehearsed(8, layers=2, prefetch=True) == rehearsed(8, layers=2, prefetch=False)
