"""Tiny models, and one vLLM process for all tests that do not harm it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # here and in the children: more threads only wait for each other

from collections.abc import Iterator
from pathlib import Path

import pytest
from few_programs import make_jax_cache
from vllm_harness import SHAPES, make_sampler

from tinsmith.testing import write_tiny_model
from tinsmith_vllm.sampler import VllmSampler


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        write_tiny_model(root / name, shape)
    return {name: root / name for name in SHAPES}


@pytest.fixture(scope="session")
def jax_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compile cache for all backends of the process: JAX keeps the first directory that it has used."""
    return make_jax_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """Two adapters fit on the device and two in host memory: a third evicts one."""
    cache = tmp_path_factory.mktemp("vllm-qwen3")
    sampler = make_sampler(tiny_models["qwen3"], cache, engine_args={"block_size": 32})  # so that prefixes are shared
    yield sampler
    sampler.close()
