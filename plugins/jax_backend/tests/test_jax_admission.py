"""What is admitted follows from bytes, which are counted before anything starts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from few_programs import FEW_PROGRAMS
from jax_harness import add_model, make_backend, make_op, train

from tinsmith import AdamParams, ConfigError, CreateModel, Demand, LoraConfig, OutOfMemoryError, Placement
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_jax import native, runtime
from tinsmith_jax.admission import Budget, budget_of, computing_of, least_bytes, require_enough
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig
from tinsmith_jax.families import config_of, read_config
from tinsmith_jax.placing import sampler_demand, trainer_demand

GIB = 1 << 30


def card(memory: int, *, samples: bool = True) -> Placement:
    return Placement(devices=("0",), memory_bytes=memory * GIB, device_bytes=80 * GIB, samples=samples)


def asked(name: str, placement: Placement | None = None, **settings: object) -> Demand:
    return trainer_demand(JaxConfig.model_validate(settings), known_config(name), placement or card(73))


def taken(demand: Demand) -> int:
    assert demand.max_models is not None
    return sum(demand.fixed.values()) + demand.max_models * sum(demand.per_model.values())


def budget(memory: int | None, *, on_cpu: bool, samples: bool = True, **settings: object) -> Budget:
    config, model = JaxConfig.model_validate(settings), known_config("Qwen3-8B")
    assert model is not None
    shape = config_of(model, Path("config.json"))
    return budget_of(config, shape, computing_of(config, on_cpu=on_cpu), memory, samples=samples)


@pytest.mark.parametrize(("on_cpu", "context", "tokens"), [(True, 2048, 2048), (False, 8192, 16_384)])
def test_nothing_changes_where_the_memory_is_not_known(on_cpu: bool, context: int, tokens: int) -> None:
    found = budget(None, on_cpu=on_cpu)
    assert (found.context_tokens, found.micro_tokens, found.slots, found.max_models) == (context, tokens, 16, 64)
    assert not found.gathers_once
    found.check(LoraConfig(rank=32, seed=0), [LoraConfig(rank=32, seed=0)] * 200)
    assert budget(None, on_cpu=on_cpu, max_batch_tokens=20_000, max_context_tokens=300).micro_tokens == 32_768
    assert budget(None, on_cpu=on_cpu, max_batch_tokens=64, max_context_tokens=64).micro_tokens == 128


def test_models_are_admitted_with_all_that_training_adds() -> None:
    found = asked("Qwen3-8B")
    assert found.max_models is not None
    assert 1 < found.max_models < 64
    assert taken(found) <= 73 * GIB < taken(found) + sum(found.per_model.values())
    assert found.batch_tokens == 16_384
    beside = asked("Qwen3-8B", card(73, samples=False)).max_models
    assert beside is not None
    assert beside > found.max_models, "pages are a sampler's"
    assert asked("Qwen3-8B", max_models=3).max_models == 3


@pytest.mark.parametrize("more", [0, 1, 2, 7, 13, 27, 50])
def test_sizes_follow_from_the_memory(more: int) -> None:
    """Whatever is chosen fits, with one model at least."""
    known = budget(None, on_cpu=False)
    memory = least_bytes(known.config, known.costs.shape, known.costs.computing) + more * GIB
    require_enough(found := budget(memory, on_cpu=False))
    assert found.max_models >= 1
    assert found.needed(found.max_models) <= memory
    assert 1024 <= found.context_tokens <= found.micro_tokens <= 16_384
    assert 1 <= found.slots <= 16
    larger = budget(memory + 10 * GIB, on_cpu=False)
    assert (found.micro_tokens, found.context_tokens) <= (larger.micro_tokens, larger.context_tokens)
    with pytest.raises(ConfigError, match=r"each device has \d+\.\d+ GiB, and needs \d+\.\d+ to train one model"):
        require_enough(budget(memory - more * GIB - 1, on_cpu=False))


def test_what_is_set_is_not_changed() -> None:
    found = budget(40 * GIB, on_cpu=False, max_batch_tokens=4096, max_context_tokens=2000, decode_slots=3)
    assert (found.context_tokens, found.micro_tokens, found.slots) == (2000, 4096, 3)
    assert budget(30 * GIB, on_cpu=False, max_context_tokens=4096).micro_tokens == 4096
    assert budget(60 * GIB, on_cpu=False, decode_slots=40).slots == 40


def test_one_model_alone_needs_room_for_one_adapter_in_a_pass() -> None:
    """For eight, an accelerator's program takes as much again as the base model."""
    found = budget(73 * GIB, on_cpu=False)
    assert found.working(2) - found.working(1) > 5 * GIB
    assert found.working(9) == found.working(8)
    assert budget(73 * GIB, on_cpu=True).working(1) == budget(73 * GIB, on_cpu=True).working(2)


@pytest.mark.parametrize(("name", "tokens"), [("Qwen3-0.6B", 256), ("Qwen3-8B", 1024)])
def test_a_pass_on_a_cpu_keeps_at_most_half_as_much_as_the_weights_take(name: str, tokens: int) -> None:
    """A pass over 1,024 tokens kept twice the weights."""
    model = known_config(name)
    assert model is not None
    shape, config = config_of(model, Path("config.json")), JaxConfig()
    found = budget_of(config, shape, replace(computing_of(config, on_cpu=True), stored="bfloat16"), None)
    assert found.together_tokens == tokens
    assert found.micro_tokens == 2048, "of one long sequence"
    assert found.costs.kept(2 * tokens) > found.costs.base // 2
    on_card = budget_of(config, shape, computing_of(config, on_cpu=False), None)
    assert on_card.together_tokens == on_card.micro_tokens


def test_every_model_in_training_may_have_a_snapshot() -> None:
    assert budget(None, on_cpu=False).max_snapshots is None
    for memory in (26, 36, 73):
        found = budget(memory * GIB, on_cpu=False)
        assert found.max_snapshots is not None
        assert found.max_snapshots >= found.max_models - 1
        weights = found.costs.weights(32)
        models = found.needed(found.max_models) - found.max_models * weights
        assert models + (found.max_snapshots + 1) * weights <= memory * GIB


def test_what_does_not_fit_on_a_card_fits_a_mesh() -> None:
    assert asked("Qwen3-32B").least_bytes > 73 * GIB
    divided = asked("Qwen3-32B", mesh={"fsdp": 8})
    assert divided.least_bytes < 30 * GIB
    assert divided.num_devices == 8
    assert divided.layout == "a mesh of 8 devices"


def test_a_sampler_divides_its_memory_between_pages_and_snapshots() -> None:
    def sampled(memory: int, **settings: object) -> Demand:
        config = JaxSamplerConfig.model_validate(settings)
        return sampler_demand(config, known_config("Qwen3-8B"), card(memory))

    large, small = sampled(73), sampled(26)
    assert large.batch_tokens == 16 * 8192
    assert 0 < small.batch_tokens < large.batch_tokens
    for found, memory in ((large, 73), (small, 26)):
        one_more = sum(found.per_model.values())  # which is being loaded
        assert taken(found) + one_more <= memory * GIB < taken(found) + 2 * one_more
    assert sampled(73, decode_slots=4).batch_tokens == 4 * 8192
    assert sampled(26).least_bytes < asked("Qwen3-8B").least_bytes


# A backend ------------------------------------------------------------------------------------------------------------

RANK = FEW_PROGRAMS["max_lora_rank"]


def room_for(directory: Path, cache_dir: Path, models: int, **settings: object) -> int:
    """Return the memory of a device in which so many models of the largest rank fit, and half of one more."""
    native.load(cache_dir)
    config, shape = JaxConfig.model_validate({**FEW_PROGRAMS, **settings}), read_config(directory)
    computing = runtime.divided(config, shape, None, trains=True, samples=True).costs.computing
    least = least_bytes(config, shape, computing)
    return least + (2 * models - 1) * budget_of(config, shape, computing, least).model // 2 - least % 2


@pytest.fixture(scope="module")
def small(contract_model: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    placement = Placement(memory_bytes=room_for(contract_model, jax_cache, 2))
    backend = make_backend(contract_model, jax_cache, placement=placement, **FEW_PROGRAMS)
    yield backend
    backend.close()


def test_a_model_that_does_not_fit_beside_the_others_is_refused_with_figures(small: JaxBackend) -> None:
    assert small.trainer_capabilities.max_models == 2  # the others wait for a place
    for name in ("a", "b"):
        add_model(small, name, LoraConfig(rank=RANK, seed=1))
    told = r"no memory left for a model of LoRA rank 8: on each device it takes 0\.\d+ GiB .*; end a session that has a"
    with pytest.raises(OutOfMemoryError, match=told):
        small.create_model(CreateModel(model_id="c", lora=LoraConfig(rank=RANK, seed=1)))
    for name in ("a", "b"):
        train(small, make_op(name, 1, [50]), AdamParams())
    small.unload_model("b")
    add_model(small, "c", LoraConfig(rank=RANK, seed=1))
    train(small, make_op("c", 1, [50]), AdamParams())
    for name in ("a", "c"):
        small.unload_model(name)


def test_memory_that_holds_no_model_at_all_is_refused_at_the_start(contract_model: Path, jax_cache: Path) -> None:
    placement = Placement(memory_bytes=room_for(contract_model, jax_cache, 0))
    told = r"each device has 0\.\d+ GiB, and needs 0\.\d+ to train one model of LoRA rank 8; use a mesh of more devices"
    with pytest.raises(ConfigError, match=told):
        make_backend(contract_model, jax_cache, placement=placement, **FEW_PROGRAMS)


@pytest.mark.slow
def test_the_workers_of_a_mesh_divide_their_memory(contract_model: Path, jax_cache: Path) -> None:
    mesh = {"mesh": {"fsdp": 2}, "simulated_devices": 2}
    placement = Placement(memory_bytes=room_for(contract_model, jax_cache, 3, **mesh))
    backend = make_backend(contract_model, jax_cache, placement=placement, **FEW_PROGRAMS, **mesh)
    try:
        assert backend.trainer_capabilities.max_models == 3
    finally:
        backend.close()
    placement = Placement(memory_bytes=room_for(contract_model, jax_cache, 0, **mesh))
    with pytest.raises(ConfigError, match=r"each device has 0\.\d+ GiB, and needs 0\.\d+ to train one model"):
        make_backend(contract_model, jax_cache, placement=placement, **FEW_PROGRAMS, **mesh)
