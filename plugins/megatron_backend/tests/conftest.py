"""Tiny models, and ranks that live as long as the test run: starting two of them costs more than most tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from megatron_harness import fork_backend, write_models

from tinsmith_megatron.backend import MegatronBackend


@pytest.fixture(scope="session")
def megatron_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return write_models(tmp_path_factory.mktemp("megatron-models"))


@pytest.fixture(scope="session")
def two_ranks(
    megatron_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MegatronBackend]:
    """Tiny Qwen3, its matrices divided over two gloo ranks. Whoever uses them unloads all models."""
    settings = {"nproc_per_node": 2, "tensor_parallel": 2, "max_full_models": 8}
    backend = fork_backend(megatron_models["qwen3"], tmp_path_factory.mktemp("cache"), **settings)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def two_expert_ranks(
    megatron_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MegatronBackend]:
    """Tiny Qwen3-MoE, its experts divided over two gloo ranks."""
    settings = {"nproc_per_node": 2, "expert_parallel": 2, "max_full_models": 8}
    backend = fork_backend(megatron_models["qwen3_moe"], tmp_path_factory.mktemp("cache"), **settings)
    yield backend
    backend.close()
