"""The GPU that all tests need, and what the processes that they start must find."""

import os
from collections.abc import Iterator
from pathlib import Path

import attention_on_cpu
import pytest
import torch
from gpu_harness import MODE, ON_CPU, VOCAB

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model


def pytest_sessionstart() -> None:
    if MODE not in ("cuda", "cpu"):
        raise pytest.UsageError(f"TINSMITH_GPU_TESTS is {MODE!r}; it may be cuda (the default) or cpu")
    if ON_CPU:
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        msg = f"torch sees no GPU here ({str(error).splitlines()[0]}); TINSMITH_GPU_TESTS=cpu runs stand-ins"
        raise pytest.UsageError(msg) from error


@pytest.fixture(autouse=True, scope="session")
def _processes() -> Iterator[None]:
    """Ranks find their program here, and nobody takes the whole card."""
    with pytest.MonkeyPatch.context() as patch:
        for place in (Path(__file__).parent, Path(attention_on_cpu.__file__).parent):
            patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if ON_CPU:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu") if ON_CPU else torch.device("cuda", 0)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    families: tuple[str, ...] = ("qwen3", "qwen3_moe")
    for family in families:
        write_tiny_model(root / family, TinyShape(family=family, vocab_size=VOCAB, num_layers=3))
    return {family: root / family for family in families}
