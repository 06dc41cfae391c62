"""Tiny models, and ranks that live as long as the test run: starting two of them costs more than most tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from fsdp_harness import fork_backend, write_models

from tinsmith_fsdp.backend import FsdpBackend


@pytest.fixture(scope="session")
def fsdp_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return write_models(tmp_path_factory.mktemp("fsdp-models"))


class SharedRanks:
    """A backend that is made at its first use, and again if a test has killed its ranks."""

    def __init__(self, make: Callable[[], FsdpBackend]) -> None:
        self._make = make
        self._backend: FsdpBackend | None = None

    def get(self) -> FsdpBackend:
        self._backend = self._backend or self._make()
        return self._backend

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = None


@pytest.fixture(scope="session")
def shared_ranks(fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRanks]:
    """Tiny Qwen3 on two gloo ranks."""
    cache = tmp_path_factory.mktemp("cache")
    ranks = SharedRanks(lambda: fork_backend(fsdp_models["qwen3"], cache, nproc_per_node=2))
    yield ranks
    ranks.close()


@pytest.fixture
def two_ranks(shared_ranks: SharedRanks) -> Iterator[FsdpBackend]:
    """Whoever uses them unloads all models."""
    backend = shared_ranks.get()
    yield backend
    assert not backend.models, "the test has left models behind"


@pytest.fixture
def doomed_ranks(shared_ranks: SharedRanks) -> Iterator[FsdpBackend]:
    """The same as two_ranks, for a test that kills them."""
    yield shared_ranks.get()
    shared_ranks.close()


@pytest.fixture(scope="session")
def two_llama_ranks(fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    backend = fork_backend(fsdp_models["llama"], tmp_path_factory.mktemp("cache"), nproc_per_node=2)
    yield backend
    backend.close()
