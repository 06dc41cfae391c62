"""A model, limits and a cache for which the jax backend compiles little.

All tests of a process that use both share the compiled programs. The module does not import jax, because tests of
servers use it, too.
"""

import os
from pathlib import Path

import pytest

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape

SHAPE = TinyShape(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
FEW_PROGRAMS = {"max_context_tokens": 128, "max_batch_tokens": 128, "max_lora_rank": 8, "decode_slots": 4}


def make_jax_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a compile cache. Of the kernels in C++, which take longest, all processes of the test run have one."""
    run = tmp_path_factory.getbasetemp()
    run = run.parent if "PYTEST_XDIST_WORKER" in os.environ else run  # which has a directory for each process
    kernels = run / "kernels"
    kernels.mkdir(mode=0o700, exist_ok=True)
    cache = tmp_path_factory.mktemp("jax_cache")
    (cache / "native").symlink_to(kernels)
    return cache
