"""Tiny models, and ranks that live as long as the test run: starting two of them costs more than most tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fsdp_harness import make_backend, write_models

from tinsmith_fsdp.backend import FsdpBackend


@pytest.fixture(scope="session")
def fsdp_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return write_models(tmp_path_factory.mktemp("fsdp-models"))


@pytest.fixture(scope="session")
def two_ranks(fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    """Tiny Qwen3 on two gloo ranks."""
    backend = make_backend(fsdp_models["qwen3"], tmp_path_factory.mktemp("cache"), nproc_per_node=2)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def two_llama_ranks(fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    backend = make_backend(fsdp_models["llama"], tmp_path_factory.mktemp("cache"), nproc_per_node=2)
    yield backend
    backend.close()
