"""A model, limits and a cache for which the jax backend compiles little.

All tests of a process that use both share the compiled programs. The module does not import jax, because tests of
servers use it, too.
"""

import hashlib
import os
import platform
from pathlib import Path

import pytest

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape

SHAPE = TinyShape(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
FEW_PROGRAMS = {"max_context_tokens": 128, "max_batch_tokens": 128, "max_lora_rank": 8, "decode_slots": 4}
_MOST_BYTES = 1 << 30


def make_jax_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a compile cache whose programs later runs find again, and whose kernels in C++ all processes share.

    A program's key tells all that it was compiled from, but for the processor. JAX writes programs in place, so each
    process of a run has its own: the groups of conftest.py always begin in the same ones. `make clean` removes them.
    """
    cache, kept = tmp_path_factory.mktemp("jax_cache"), _kept_for_this_processor()
    compiled = kept / f"compiled-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    for name, directory in (("compiled", compiled), ("native", kept / "native")):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (cache / name).symlink_to(directory)
    if sum(each.stat().st_size for each in compiled.iterdir()) > _MOST_BYTES:
        for each in compiled.iterdir():
            each.unlink()
    return cache


def _kept_for_this_processor() -> Path:
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in told if line.startswith(("flags", "Features"))), "")
    processor = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
    return Path(__file__).parents[3] / ".pytest_cache" / "programs" / processor
