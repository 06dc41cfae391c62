"""Four tensor-parallel ranks with a part of the heads, the vocabulary and the tokens each, against one rank."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fsdp_harness import VOCAB, fork_backend, shape
from fsdp_runs import compare_steps

from tinsmith import Array, ConfigError, ForwardBackward, LoraConfig
from tinsmith.testing import (
    ModelDriver,
    assert_close_arrays,
    logprobs_of,
    ragged_data,
    succeeded,
    write_tiny_model,
)
from tinsmith.testing.model_driver import with_random_weights
from tinsmith_fsdp.backend import FsdpBackend

pytestmark = pytest.mark.slow

TENANTS = (
    LoraConfig(rank=3, seed=1),
    LoraConfig(rank=8, seed=2, train_mlp=False),
    LoraConfig(rank=5, seed=3, train_unembed=False),
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of its own, and as many key-value heads as ranks."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory / "m", shape("llama", num_kv_heads=4))
    return directory / "m"


@pytest.fixture(scope="module")
def one(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    backend = fork_backend(model_path, tmp_path_factory.mktemp("cache"), nproc_per_node=1, isolation="fast")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def four(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    settings = {"nproc_per_node": 4, "tensor_parallel": 4, "isolation": "fast"}
    backend = fork_backend(model_path, tmp_path_factory.mktemp("cache"), **settings)
    yield backend
    backend.close()


@pytest.mark.parametrize("rank", [5, 0])
def test_steps_are_the_same(rank: int, one: FsdpBackend, four: FsdpBackend) -> None:
    """Also where the tokens are no multiple of the ranks."""
    compare_steps(one, four, LoraConfig(rank=rank, seed=rank))


def gradients(backend: FsdpBackend) -> tuple[list[Array], list[dict[str, Array]]]:
    """Of one pass of all tenants, with A and B that are not zero."""
    driver = ModelDriver(backend)
    models = [driver.create_with(lora) for lora in TENANTS]
    for number, model_id in enumerate(models):
        backend.restore_state(model_id, with_random_weights(driver.state(model_id), seed=number))
    ops = [ForwardBackward(model_id=m, data=tuple(ragged_data(n, VOCAB, (1, 7, 33)))) for n, m in enumerate(models)]
    outputs = succeeded(backend.forward_backward(ops))
    found = [dict(driver.state(model_id).gradients) for model_id in models]
    driver.unload_all()
    return [logp for output in outputs for logp in logprobs_of(output)], found


def test_tenants_in_one_stream_get_the_same_gradients(one: FsdpBackend, four: FsdpBackend) -> None:
    """The groups of a rank's tokens end elsewhere than those of all tokens."""
    (logps, expected), (more_logps, found) = map(gradients, (one, four))
    for left, right in zip(logps, more_logps, strict=True):
        np.testing.assert_allclose(right, left, rtol=0, atol=1e-5)
    for left, right in zip(expected, found, strict=True):
        assert_close_arrays(right, left, 1e-5, "gradients of a tenant")


def test_each_rank_has_its_part_of_the_vocabulary(one: FsdpBackend, four: FsdpBackend) -> None:
    norms = 5 * 32 * 4
    for loaded in four.loaded:
        assert loaded.parameter_bytes == (one.loaded[0].parameter_bytes - norms) // 4 + norms


def test_a_vocabulary_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", shape("llama", num_kv_heads=4, vocab_size=302))
    message = r"vocab_size of the model \(302\) must be a multiple of tensor_parallel \(4\)"
    with pytest.raises(ConfigError, match=message):
        fork_backend(tmp_path / "m", tmp_path, nproc_per_node=4, tensor_parallel=4)
