"""What is admitted follows from bytes, which are counted before anything is loaded."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_harness import VOCAB, fork_backend

from tinsmith import ConfigError, CreateModel, Demand, LoraConfig, OutOfMemoryError, Placement
from tinsmith.testing import ModelDriver, ragged_data
from tinsmith_checkpoints.huggingface import DecoderShape, known_config, weight_counts
from tinsmith_megatron.admission import Budget, budget_of
from tinsmith_megatron.architecture import architecture_of, read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.demand import demand
from tinsmith_megatron.memory import adapter_sizes, weights_of
from tinsmith_megatron.parallel import Layout
from tinsmith_workers import AdapterLayout

GIB = 1 << 30
EIGHT = Placement(devices=tuple("01234567"), memory_bytes=73 * GIB, device_bytes=80 * GIB)


def asked(name: str, placement: Placement = EIGHT, **settings: object) -> Demand:
    return demand(MegatronConfig.model_validate(settings), known_config(name), placement)


def read_shape(name: str) -> DecoderShape:
    return architecture_of(known_config(name) or {}, Path("config.json")).shape


def budget(name: str, world: int, **settings: object) -> Budget:
    return budget_of(MegatronConfig.model_validate(settings), read_shape(name), world, 73 * GIB, on_cpu=False)


def test_models_are_counted_with_all_that_training_adds() -> None:
    found = asked("Qwen3-8B")
    assert found.fixed["base weights"] == 2 * weight_counts(read_shape("Qwen3-8B")).total
    assert found.max_models is not None
    taken = sum(found.fixed.values()) + found.max_models * sum(found.per_model.values())
    assert 1 < found.max_models < 64
    assert taken <= 73 * GIB < taken + sum(found.per_model.values())


def test_the_token_budget_follows_from_the_memory() -> None:
    def tokens(memory: int, **settings: object) -> int:
        return asked("Qwen3-8B", replace(EIGHT, memory_bytes=memory * GIB), **settings).batch_tokens

    assert tokens(73) == 16_384
    assert 1024 <= tokens(22) < tokens(30) < tokens(73)
    assert tokens(22, max_batch_tokens=3000, max_context_tokens=2000) == 3000
    assert tokens(22, max_context_tokens=4096) == 4096


def test_what_does_not_fit_is_known_before_it_starts() -> None:
    assert asked("Qwen3-32B").least_bytes > 60 * GIB > asked("Qwen3-32B", tensor_parallel=8).least_bytes
    assert asked("Qwen3-30B-A3B", expert_parallel=8).least_bytes < asked("Qwen3-30B-A3B").least_bytes
    with pytest.raises(ConfigError, match=r"num_key_value_heads of the model \(4\) .* possible are 1, 2, 4$"):
        asked("Qwen3-30B-A3B", tensor_parallel=8)
    with pytest.raises(ConfigError, match=r"the number of ranks \(8\) must be a multiple of"):
        asked("Qwen3-30B-A3B", tensor_parallel=4, pipeline_parallel=4)


def test_all_weights_are_trained_where_they_fit() -> None:
    """16 bytes for each weight: 8 GPUs that share a model's optimizer hold Qwen3-8B, and one does not."""
    lora = LoraConfig(rank=0, seed=0)
    budget("Qwen3-8B", 8, tensor_parallel=4, max_lora_rank=0).check(lora.rank, [])
    with pytest.raises(OutOfMemoryError, match=r"a model of LoRA rank 0: on the fullest rank it takes 1\d\d\.\d+ GiB"):
        budget("Qwen3-8B", 1).check(lora.rank, [])
    with pytest.raises(ConfigError, match=r"each rank has 73\.000 GiB, and the fullest needs 1\d\d\..* lower"):
        budget("Qwen3-8B", 1, max_lora_rank=0).require_enough()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_that_does_not_fit_beside_the_others_is_refused_with_figures(
    megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """Strict isolation counts eight sequences of a call: longer calls run in several parts."""
    config = MegatronConfig.model_validate({"device": "cpu", "max_lora_rank": 16, "max_context_tokens": 128})
    shape = read_architecture(megatron_models["qwen3"]).shape
    counted = budget_of(config, shape, 1, None, on_cpu=True)
    memory = counted.needed([16] * 3) + counted.per_model // 2
    placement = Placement(memory_bytes=memory)
    backend = fork_backend(megatron_models["qwen3"], tmp_path, placement=placement, max_batch_tokens=2048)
    try:
        driver = ModelDriver(backend)
        assert backend.trainer_capabilities.max_models == 3
        models = [driver.create(rank=16) for _ in range(3)]
        with pytest.raises(OutOfMemoryError, match=r"no memory left for a model of LoRA rank 16: .*; end a session"):
            driver.create(rank=16)
        with pytest.raises(OutOfMemoryError, match="no memory left for a model of LoRA rank 0"):
            backend.create_model(CreateModel(model_id="full", lora=LoraConfig(rank=0, seed=0)))
        data = ragged_data(1, VOCAB, (5, 3) * 12)
        together = driver.forward_backward(models[0], data)
        apart = [driver.forward_backward(models[1], [datum]) for datum in data]
        assert together.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in apart))
        driver.unload_all()
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-30B-A3B", 30.5), ("Qwen3-235B-A22B", 235.1), ("Llama-3-70B", 70.6)]
)
def test_a_model_has_the_weights_of_its_name(name: str, billions: float) -> None:
    shape, alone = read_shape(name), Layout(tp=1, pp=1, ep=1, dp=1, recompute=False)
    assert sum(weights_of(shape, alone, alone.part(shape, 0))) == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_adapters_have_the_sizes_of_their_layout(name: str) -> None:
    shape = replace(read_shape(name), num_layers=4)
    layout = Layout(tp=2, pp=2, ep=2 if shape.experts else 1, dp=1, recompute=False)
    for stage in range(2):
        part = layout.part(shape, stage)
        actual = AdapterLayout(LoraConfig(rank=5, seed=0), shape, part)
        assert adapter_sizes(shape, part, 5) == (actual.shared_size, actual.size - actual.shared_size)
