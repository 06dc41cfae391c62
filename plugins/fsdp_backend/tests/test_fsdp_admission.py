"""What is admitted follows from bytes, which are counted before anything starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from fsdp_harness import VOCAB, fork_backend, make_backend

from tinsmith import ConfigError, CreateModel, Demand, LoraConfig, OutOfMemoryError, Placement
from tinsmith.testing import ModelDriver, ragged_data
from tinsmith_checkpoints.huggingface import adapter_weights, known_config, weight_counts
from tinsmith_fsdp.admission import budget_of, least_bytes
from tinsmith_fsdp.architecture import architecture_of, read_architecture
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.demand import demand, resolved_ranks
from tinsmith_workers import Launch, Launcher

GIB = 1 << 30
CARD = Placement(devices=("0",), memory_bytes=73 * GIB, device_bytes=80 * GIB)


VALUES: Final = (None, True, -1, 0, 1.5, 1 << 80, "x", "", [], [1], {}, {"a": 1}, [[]])


def asked(name: str, placement: Placement = CARD, **settings: object) -> Demand:
    return demand(FsdpConfig.model_validate(settings), known_config(name), placement)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B", "Qwen3.5-4B"])
def test_a_value_of_any_type_in_config_json_is_no_crash(name: str) -> None:
    """The supervisor would take any other exception for a crash."""
    config, refused = known_config(name), 0
    assert config is not None
    for field in (*config, "quantization_config", "rope_scaling", "text_config"):
        for value in VALUES:
            try:
                architecture_of({**config, field: value}, Path("config.json"))
            except ConfigError:
                refused += 1
    assert refused > len(VALUES)


def test_models_are_counted_with_all_that_training_adds() -> None:
    """64 models of rank 32 were admitted, by their weights alone, and the first steps of some ended all ranks."""
    config = known_config("Qwen3-8B")
    assert config is not None
    shape = architecture_of(config, Path("config.json"))
    found = asked("Qwen3-8B")
    assert found.per_model["weights, gradients, moments"] == 24 * adapter_weights(shape, 32)  # 4 are for copies
    assert found.fixed["base weights"] == 2 * weight_counts(shape).total
    models = found.max_models
    assert models is not None
    taken = sum(found.fixed.values()) + models * sum(found.per_model.values())
    assert 1 < models < 64
    assert taken <= 73 * GIB < taken + sum(found.per_model.values())


def test_the_token_budget_follows_from_the_memory() -> None:
    def tokens(memory: int, **settings: object) -> int:
        given = Placement(devices=("0",), memory_bytes=memory * GIB, device_bytes=80 * GIB)
        return asked("Qwen3-8B", given, **settings).batch_tokens

    assert tokens(73) == 16_384
    assert 1024 <= tokens(22) < tokens(26) < tokens(34) < tokens(50) <= 16_384
    assert tokens(50, max_batch_tokens=3000, max_context_tokens=2000) == 3000
    assert tokens(22, max_context_tokens=4096) == 4096


def test_what_does_not_fit_on_a_card_is_known_before_it_starts() -> None:
    assert asked("Llama-3-70B").least_bytes > 73 * GIB
    four = Placement(devices=("0", "1", "2", "3"), memory_bytes=73 * GIB, device_bytes=80 * GIB)
    assert asked("Llama-3-70B", four).least_bytes < 73 * GIB
    assert asked("Llama-3-70B", four, shard_size=2).least_bytes > 73 * GIB
    assert asked("Qwen3-32B", nnodes=2, launcher="scheduler", control_address="h:1", nproc_per_node=8) == asked(
        "Qwen3-32B", Placement(memory_bytes=73 * GIB), nnodes=4, nproc_per_node=4, launcher="ray", control_address="h:1"
    )


def test_ranks_get_the_devices_that_were_assigned(fsdp_models: dict[str, Path], tmp_path: Path) -> None:
    class Started(Exception):  # noqa: N818
        pass

    started: list[Launch] = []

    def launch(wanted: Launch) -> Launcher:
        started.append(wanted)
        raise Started

    placement = Placement(devices=("5", "7"))
    with pytest.raises(Started):
        make_backend(fsdp_models["qwen3"], tmp_path, launch, placement=placement, device=None)
    assert started[0].environment["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert started[0].num_workers == 2


RANK = 16  # of the harness: the largest


def room_for(directory: Path, models: int, *, ranks: int) -> int:
    """Return the memory of a rank in which so many models of the largest rank fit, and half of one more."""
    config = FsdpConfig.model_validate({"device": "cpu", "max_lora_rank": RANK, "max_context_tokens": 128})
    shape = read_architecture(directory)
    resolved = resolved_ranks(config, ranks, on_cpu=True)
    least = least_bytes(config, shape, resolved)
    one = budget_of(config, shape, resolved, least).adapter
    return least + (models - 1) * one + one // 2


@pytest.fixture(scope="module")
def small(fsdp_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    """Two ranks with memory for three models."""
    memory = room_for(fsdp_models["qwen3"], 3, ranks=2)
    cache, placement = tmp_path_factory.mktemp("cache"), Placement(memory_bytes=memory)
    backend = fork_backend(fsdp_models["qwen3"], cache, nproc_per_node=2, placement=placement)
    yield backend
    backend.close()


@pytest.mark.slow
def test_a_model_that_does_not_fit_beside_the_others_is_refused_with_figures(small: FsdpBackend) -> None:
    driver = ModelDriver(small)
    assert small.trainer_capabilities.max_models == 3  # the others wait for a place
    assert small.trainer_capabilities.max_batch_tokens < 2 * 2048
    models = [driver.create(rank=RANK) for _ in range(3)]
    told = r"no memory left for a model of LoRA rank 16: on the fullest rank it takes 0\.\d+ GiB .*; end a session"
    with pytest.raises(OutOfMemoryError, match=told):
        small.create_model(CreateModel(model_id="one more", lora=LoraConfig(rank=RANK, seed=0)))
    small.create_model(CreateModel(model_id="small", lora=LoraConfig(rank=4, seed=0)))
    for model_id in (*models, "small"):
        driver.forward_backward(model_id, ragged_data(1, VOCAB, (5, 3) * 12))
        driver.optim_step(model_id)
    driver.unload_all()
    small.unload_model("small")
    assert driver.create(rank=RANK)
    driver.unload_all()


@pytest.mark.slow
def test_memory_that_holds_no_model_at_all_is_refused_at_the_start(
    fsdp_models: dict[str, Path], tmp_path: Path
) -> None:
    placement = Placement(memory_bytes=room_for(fsdp_models["qwen3"], 0, ranks=1))
    with pytest.raises(
        ConfigError, match=r"each rank has 0\.\d+ GiB, and the fullest needs 0\.\d+ to train one model of LoRA rank 16"
    ):
        fork_backend(fsdp_models["qwen3"], tmp_path, nproc_per_node=1, placement=placement)
