"""Full fine-tuning against transformers in float32, in every layout, and states that go from one layout to another."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from full_reference import FullReference
from megatron_harness import LOSSES, VOCAB, experts_metrics, fork_backend, partly_replayed

from tinsmith import (
    AdamParams,
    BackendContext,
    CapacityError,
    CreateModel,
    LoraConfig,
    ModelState,
    OptimStep,
    OptimStepOutput,
    UserError,
)
from tinsmith.checkpoints.saved import read_checkpoint, write_checkpoint
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import FullAbuseContract, FullDriver, assert_same_state, logprobs_of, ragged_data
from tinsmith_megatron.backend import MegatronBackend

pytestmark = pytest.mark.slow  # starting ranks takes seconds

LENGTHS = (1, 7, 33, 64)
ADAM = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)

TP2 = {"nproc_per_node": 2, "tensor_parallel": 2}
PP2 = {"nproc_per_node": 2, "pipeline_parallel": 2}
DP2 = {"nproc_per_node": 2}
EP2 = {"nproc_per_node": 2, "expert_parallel": 2}
THREE_KINDS = {"nproc_per_node": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}
FAST = {"isolation": "fast"}
RECOMPUTED = {"activation_checkpointing": True}


def thorough(family: str, **settings: object) -> object:
    name = "-".join(str(value) for value in (family, *(f"{k[:2]}{v}" for k, v in settings.items())))
    return pytest.param(family, settings, marks=pytest.mark.thorough, id=name)


def started(models: Mapping[str, Path], family: str, tmp_path: Path, **settings: object) -> MegatronBackend:
    return fork_backend(models[family], tmp_path, max_batch_tokens=128, max_lora_rank=0, **settings)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3_moe", {**EP2, **FAST}, id="experts divided"),
        *(thorough("qwen3", **layout) for layout in ({}, TP2, PP2, DP2)),
        *(thorough("llama", **layout) for layout in (TP2, PP2)),
        *(thorough("qwen3_moe", **layout) for layout in ({}, TP2, EP2)),
        *(thorough("qwen3_moe", **layout, **FAST) for layout in (PP2, DP2)),
        thorough("qwen3_moe", **THREE_KINDS, **FAST, **RECOMPUTED),
    ],
)
def test_numbers_are_those_of_transformers(
    family: str, settings: dict[str, object], megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    backend = started(megatron_models, family, tmp_path, **settings)
    try:
        driver, reference = FullDriver(backend), FullReference(megatron_models[family])
        model_id, data = driver.create(), partly_replayed(driver, ragged_data(0, VOCAB, LENGTHS))
        output = driver.forward_backward(model_id, data)
        for left, right in zip(logprobs_of(output), reference.forward_backward(data), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
        assert experts_metrics(output) == reference.routing.metrics
        gradients, expected = driver.state(model_id).gradients, reference.gradients()
        assert gradients.keys() == expected.keys()
        for name, right in expected.items():
            error = np.linalg.norm(gradients[name] - right)
            assert error <= 1e-5 * max(np.linalg.norm(right), 1e-3), f"gradient {name}: {error:.1e}"
        norm = np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in expected.values()))
        (result,) = backend.optim_step([OptimStep(model_id=model_id, adam=ADAM)])
        assert isinstance(result, OptimStepOutput), result
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)  # a first step hides a wrong one
        stepped = driver.state(model_id).weights
        for name, right in reference.step(ADAM).items():
            np.testing.assert_allclose(stepped[name], right, rtol=0, atol=1e-5, err_msg=name)
        output = driver.forward(model_id, data)  # ranks compute with what others of them have stepped
        for left, right in zip(logprobs_of(output), reference.forward_backward(data), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-4)
    finally:
        backend.close()


@pytest.mark.thorough
def test_a_state_goes_on_in_another_layout(megatron_models: Mapping[str, Path], tmp_path: Path) -> None:
    """Weights, moments and a pending gradient of experts, from two shares of them to two stages."""
    first = started(megatron_models, "qwen3_moe", tmp_path / "1", **EP2)
    try:
        driver = FullDriver(first)
        model_id = driver.create()
        driver.forward_backward(model_id, ragged_data(1, VOCAB, LENGTHS))
        driver.optim_step(model_id, ADAM)
        driver.forward_backward(model_id, ragged_data(2, VOCAB, LENGTHS))
        state = driver.state(model_id)
        second = started(megatron_models, "qwen3_moe", tmp_path / "2", **PP2)
        try:
            other = FullDriver(second)
            resumed = other.create()
            second.restore_state(resumed, state)
            assert_same_state(other.state(resumed), state, "what another layout holds")
            other.optim_step(resumed, ADAM)
            driver.optim_step(model_id, ADAM)
            expected = driver.state(model_id).weights
            for name, weight in other.state(resumed).weights.items():
                np.testing.assert_allclose(weight, expected[name], rtol=0, atol=1e-6, err_msg=name)
        finally:
            second.close()
    finally:
        first.close()


def through_files(state: ModelState, directory: Path) -> ModelState:
    write_checkpoint(
        directory, "m/weights/x", kind="training", state=state, base_model="tiny", user_metadata={},
        created_at=datetime.now(UTC), overwrite=False, model_path=None, shard_bytes=3000,
    )  # fmt: skip
    return read_checkpoint(directory, "m/weights/x").state


@pytest.mark.thorough
def test_a_checkpoint_goes_to_fsdp_and_back(
    two_ranks: MegatronBackend, megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """With moments and a pending gradient: what FSDP makes of it is what Megatron does, and comes back as it is."""
    found = Plugins.load().backends.unambiguous()
    if "fsdp" not in found:
        pytest.skip("tinsmith-fsdp is not installed")
    context = BackendContext(
        model_name="tiny", model_path=megatron_models["qwen3"], cache_dir=tmp_path / "cache", losses=LOSSES
    )
    settings = {"device": "cpu", "nproc_per_node": 2, "max_context_tokens": 128}
    fsdp = found["fsdp"].create(found["fsdp"].config.model_validate(settings), context)
    here, there = FullDriver(two_ranks), FullDriver(fsdp)
    try:
        stayed, moved = here.create(), there.create()
        here.forward_backward(stayed, ragged_data(1, VOCAB, LENGTHS))
        here.optim_step(stayed, ADAM)
        here.forward_backward(stayed, ragged_data(2, VOCAB, LENGTHS))
        fsdp.restore_state(moved, through_files(here.state(stayed), tmp_path / "there"))
        assert_same_state(there.state(moved), here.state(stayed), "what FSDP holds")
        for seed in range(3, 6):
            data = ragged_data(seed, VOCAB, LENGTHS)
            for driver, model_id in ((here, stayed), (there, moved)):
                driver.optim_step(model_id, ADAM)
            losses = [
                driver.forward_backward(model_id, data).metrics["loss:sum"]
                for driver, model_id in ((here, stayed), (there, moved))
            ]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        back = here.create()
        two_ranks.restore_state(back, through_files(there.state(moved), tmp_path / "back"))
        assert_same_state(here.state(back), there.state(moved), "what came back")
    finally:
        here.unload_all()
        fsdp.close()


@pytest.mark.thorough
def test_what_is_not_served_is_refused(megatron_models: Mapping[str, Path], tmp_path: Path) -> None:
    """Without adapters there is no base model either."""
    backend = started(megatron_models, "qwen3", tmp_path)
    try:
        assert [rank.parameter_bytes for rank in backend.loaded] == [0]
        with pytest.raises(UserError, match=r"LoRA rank 4 is not served: .* max_lora_rank is 0"):
            backend.create_model(CreateModel(model_id="a", lora=LoraConfig(rank=4, seed=0)))
        backend.create_model(CreateModel(model_id="b", lora=LoraConfig(rank=0, seed=0)))
        with pytest.raises(CapacityError, match=r"the backend's max_full_models is 1; end the session"):
            backend.create_model(CreateModel(model_id="c", lora=LoraConfig(rank=0, seed=0)))
    finally:
        backend.close()


class TestMegatronFullAbuse(FullAbuseContract):
    every = 12

    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks


@pytest.mark.thorough
class TestMegatronLongFullAbuse(FullAbuseContract):
    long_form, random_cases = True, 100

    @pytest.fixture
    def backend(self, two_ranks: MegatronBackend) -> MegatronBackend:
        return two_ranks
