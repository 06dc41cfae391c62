"""Routing replay: the suite of all backends that can, and bits. test_megatron_layouts.py compares with transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_harness import VOCAB, fork_backend, shape
from transformers_reference import Reference

from tinsmith import Array, Datum, LoraConfig, ReplayedExperts
from tinsmith.testing import (
    ModelDriver,
    RoutingReplayContract,
    assert_same_arrays,
    logprobs_of,
    ragged_data,
    write_tiny_model,
)
from tinsmith_megatron.backend import MegatronBackend

pytestmark = pytest.mark.slow  # starting ranks takes seconds

LORA = LoraConfig(rank=4, seed=7)
THREE_KINDS = {"nproc_per_node": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}


class TestMegatronRoutingReplay(RoutingReplayContract):
    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        allowed = ReplayedExperts(num_layers=2, num_experts=4, top_k=2)
        assert two_expert_ranks.trainer_capabilities.replayed_experts == allowed  # or the suite would be skipped
        return two_expert_ranks


def passed(driver: ModelDriver, model_id: str, data: Sequence[Datum]) -> dict[str, Array]:
    """Return the logprobs and the gradients of one pass of a model without gradients."""
    before = driver.state(model_id)
    output = driver.forward_backward(model_id, data)
    gradients = driver.state(model_id).gradients
    driver.backend.restore_state(model_id, before)
    return {**{str(index): logp for index, logp in enumerate(logprobs_of(output))}, **gradients}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"nproc_per_node": 2, "tensor_parallel": 2}, id="tensor", marks=pytest.mark.thorough),
        pytest.param({"nproc_per_node": 2, "pipeline_parallel": 2}, id="pipeline", marks=pytest.mark.thorough),
        pytest.param({"nproc_per_node": 2, "expert_parallel": 2}, id="experts", marks=pytest.mark.thorough),
        pytest.param(
            {**THREE_KINDS, "isolation": "fast", "activation_checkpointing": True},
            id="packed and recomputed",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_routers_own_experts_change_no_bits(layout: Mapping[str, object], tmp_path: Path) -> None:
    """In any order, for whole sequences and for parts. Of four experts, the order would decide how sums are rounded."""
    write_tiny_model(tmp_path / "model", shape("qwen3_moe", num_experts=6, experts_per_token=4))
    backend = fork_backend(tmp_path / "model", tmp_path / "cache", **layout)
    try:
        driver = ModelDriver(backend)
        model_id, data = driver.create_with(LORA), ragged_data(0, VOCAB, (1, 7, 33, 64))
        reference = Reference(tmp_path / "model", LORA, driver.state(model_id).weights)
        chosen = [reference.chosen_TLC(datum)[..., ::-1] for datum in data]
        chosen[2] = chosen[2][:20]
        own = [replace(datum, routed_experts=each) for datum, each in zip(data, chosen, strict=True)]
        assert_same_arrays(passed(driver, model_id, own), passed(driver, model_id, data), "a pass with its own experts")
    finally:
        backend.close()
