"""A pass for which there is really no memory: the address space of this process is limited while it runs."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from few_programs import SHAPE
from jax_harness import add_model, assert_same_state, make_backend, make_op

from tinsmith import LoraConfig
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.memory import give_back_free_memory

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

ROOM = 96 << 20  # bytes: between what a pass over 1024 tokens needs, and one over 512


@pytest.fixture
def backend(tmp_path: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    """Of many narrow layers: a pass needs memory in large pieces, and little time."""
    write_tiny_model(tmp_path / "deep", replace(SHAPE, num_layers=64))
    settings = {"max_context_tokens": 512, "max_batch_tokens": 1024, "max_lora_rank": 8}
    backend = make_backend(tmp_path / "deep", jax_cache, **settings)
    yield backend
    backend.close()


@contextmanager
def starved() -> Iterator[None]:
    """Leave this process ROOM, as long as this lasts."""
    give_back_free_memory()
    before = resource.getrlimit(resource.RLIMIT_AS)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, ((int(line.split()[1]) << 10) + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("side_by_side", [False, True], ids=["one pass", "two side by side"])
def test_a_pass_without_memory_is_halved_and_its_bits_are_the_same(
    backend: JaxBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, side_by_side: bool
) -> None:
    monkeypatch.setattr(backend, "side_by_side", side_by_side)
    add_model(backend, "a", LoraConfig(rank=4, seed=1), random_B=True)
    add_model(backend, "b", LoraConfig(rank=4, seed=2), random_B=True)
    whole = [make_op("a", 1, [500]), make_op("b", 2, [500])]
    start = {name: backend.capture_state(name) for name in ("a", "b")}
    for op in whole:
        backend.forward_backward([op])  # compiles the smaller program
    expected = {name: backend.capture_state(name) for name in ("a", "b")}
    backend.forward_backward(whole)
    for name, state in start.items():
        backend.restore_state(name, state)
    with starved():
        backend.forward_backward(whole)
    told = "two passes side by side will run one after the other" if side_by_side else "halved a pass over 2 sequences"
    assert told in caplog.text
    assert "RESOURCE_EXHAUSTED: Out of memory allocating" in caplog.text
    for name, state in expected.items():
        assert_same_state(backend.capture_state(name), state)
