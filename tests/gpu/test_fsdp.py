"""The fsdp backend with one rank on the GPU, in bfloat16, beside float32 on the CPU."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from gpu_harness import (
    TENANTS,
    add_models,
    farthest,
    gradient,
    made_backend,
    observed,
    passes,
    relative,
    scored,
    step,
)
from observed_rank import ObservedRank

from tinsmith.backend import TrainingBackend

REFERENCE = {"device": "cpu", "nproc_per_node": 1, "dtype": "float32", "max_batch_tokens": 2048}


@pytest.fixture(scope="module")
def reference(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingBackend]:
    with made_backend("fsdp", models["qwen3"], tmp_path_factory.mktemp("reference"), REFERENCE) as backend:
        yield backend


@pytest.fixture(scope="module")
def eager(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingBackend]:
    with observed(models["qwen3"], tmp_path_factory.mktemp("eager"), compile=False) as backend:
        yield backend


@pytest.fixture(scope="module")
def compiled(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingBackend]:
    with observed(models["qwen3"], tmp_path_factory.mktemp("compiled"), compile=True) as backend:
        yield backend


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> TrainingBackend:
    backend: TrainingBackend = request.getfixturevalue(request.param)
    return backend


def unload(models: list[str], *backends: TrainingBackend) -> None:
    for backend in backends:
        for model_id in models:
            backend.unload_model(model_id)


@pytest.mark.parametrize("trainer", ["eager", "compiled"], indirect=True)
def test_passes_and_steps_beside_the_reference(trainer: TrainingBackend, reference: TrainingBackend) -> None:
    for tenants in TENANTS:
        models = [f"{tenants}-{number}" for number in range(tenants)]
        for backend in (trainer, reference):
            add_models(backend, models)
        work = passes(models, seed=tenants)
        assert farthest(scored(trainer, work), scored(reference, work)) < 0.1, tenants
        distances = [relative(gradient(trainer, each), gradient(reference, each)) for each in models]
        assert max(distances) < 0.1, (tenants, distances)
        for backend in (trainer, reference):
            step(backend, models)
        assert farthest(scored(trainer, work), scored(reference, work)) < 0.1, f"after a step of {tenants}"
        unload(models, trainer, reference)


def test_new_packings_compile_nothing(compiled: TrainingBackend) -> None:
    models = [f"packed-{number}" for number in range(16)]
    add_models(compiled, models)
    scored(compiled, passes(models, seed=50))
    before = compiled.ranks.call(ObservedRank.graphs)
    for number in range(10):
        scored(compiled, passes(models, seed=51 + number, tokens=1200 + 61 * number))
    assert compiled.ranks.call(ObservedRank.graphs) == before
    assert [breaks for _, breaks in before] == [0]
    unload(models, compiled)


def test_a_sleeper_holds_nothing_and_goes_on_with_the_same_bits(eager: TrainingBackend) -> None:
    add_models(eager, ["restless"])
    work = passes(["restless"], seed=7)
    expected = scored(eager, work)
    (awake,) = eager.ranks.call(ObservedRank.reserved)
    eager.sleep_trainer()
    (asleep,) = eager.ranks.call(ObservedRank.reserved)
    eager.wake_trainer()
    assert asleep < awake
    assert farthest(scored(eager, work), expected) == 0
    unload(["restless"], eager)
