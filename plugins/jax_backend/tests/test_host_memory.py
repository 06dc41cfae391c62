"""On a CPU, the cache and the adapters of sampling take memory once something lies there, and give it back."""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from few_programs import FEW_PROGRAMS, SHAPE
from jax_harness import add_model, local, make_backend
from sampling_harness import assert_same_sequences, make_sample, prompt, sample

from tinsmith import LoraConfig
from tinsmith_checkpoints.huggingface import StopRules
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.sampler import Sampler
from tinsmith_jax.sampling_device import SamplingDevice

PAGE = os.sysconf("SC_PAGE_SIZE")
pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="asks Linux what lies in memory")


@pytest.fixture
def backend(tmp_path: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    """Of wide heads and a large rank, so that pages of the cache and rows of adapters are larger than the system's."""
    write_tiny_model(tmp_path, replace(SHAPE, num_heads=8, num_kv_heads=8, head_dim=64))
    made = make_backend(tmp_path, jax_cache, **{**FEW_PROGRAMS, "max_lora_rank": 128})
    if not made.limits.native:
        pytest.skip("needs a C++ compiler")
    yield made
    made.close()


def resident(arrays: Sequence[jax.Array]) -> int:
    """Return the bytes of the system's pages that these arrays take of the machine's memory."""
    total = 0
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for array in arrays:
            begin = array.unsafe_buffer_pointer()
            first, last = begin // PAGE, (begin + array.nbytes - 1) // PAGE
            pagemap.seek(8 * first)
            entries = np.frombuffer(pagemap.read(8 * (last + 1 - first)), np.uint64)
            total += int((entries >> np.uint64(63)).sum()) * PAGE
    return total


def process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Watched:
    """Looks at a device's cache and rows of adapters before and after memory is given back."""

    def __init__(self, device: SamplingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self._device = device
        self._give_back = device.give_back
        self._given_back = threading.Event()
        monkeypatch.setattr(device, "give_back", self._watched)
        self.before: tuple[int, int] = (0, 0)

    def now(self) -> tuple[int, int]:
        return resident(self._device.cache.pages), resident(jax.tree.leaves(self._device.resident["layers"]))

    def _watched(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        self.before = self.now()
        self._give_back(pages, rows)
        self._given_back.set()

    async def wait(self) -> None:
        await asyncio.to_thread(self._given_back.wait)
        self._given_back.clear()


async def test_pages_and_adapters_take_memory_with_use_and_give_it_back(
    backend: JaxBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = local(backend).sampling
    assert device is not None
    empty = resident(device.cache.pages), resident(jax.tree.leaves(device.resident["layers"]))
    watched = Watched(device, monkeypatch)
    rules = StopRules.of_model(tmp_path)
    sampler = Sampler(
        device,
        backend.model_config,
        capabilities=backend.sampler_capabilities,
        rules=rules,
        prefill_tokens=64,
        idle_s=0.0,
    )
    add_model(backend, "a", LoraConfig(rank=128, seed=1), random_B=True)
    await sampler.load_snapshot(backend.publish("a", "a"))
    found = []
    for number in (1, 4, 4):
        found.append(await sample(sampler, make_sample(prompt(100), "a", num_samples=number, max_tokens=20)))
        await watched.wait()
        after = watched.now()
        for taken, left, before in zip(watched.before, after, empty, strict=True):
            assert left - before < (taken - before) / 4, "what shares a page of the system with others stays"
        cache = sum(array.nbytes for array in device.cache.pages)
        assert watched.before[0] - empty[0] < (number + 3) / 13 * cache, "of 13 pages, each sequence has one of its own"
    sampler.close()
    assert_same_sequences(found[1], found[2])


def test_what_nobody_uses_takes_no_memory(contract_model: Path, jax_cache: Path) -> None:
    """The cache for a thousand sequences was there from the start: 1.1 GB beside a model of 200 kB."""
    before = process_bytes()
    settings = {**FEW_PROGRAMS, "decode_slots": 1024, "max_context_tokens": 2048}
    backend = make_backend(contract_model, jax_cache, **settings)
    if backend.limits.native:
        device = local(backend).sampling
        assert device is not None
        assert sum(array.nbytes for array in device.cache.pages) > 1e9
        assert process_bytes() - before < 1e8
    backend.close()
