"""A model that one rank cannot make is on none: its request fails, typed, and nobody else notices.

The memory that is not there is real: the address space of one rank's process is limited from outside.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fsdp_harness import VOCAB, fork_backend, shape

from tinsmith import CreateModel, LoraConfig, OutOfMemoryError, ServerError
from tinsmith.testing import FullDriver, ModelDriver, assert_same_state, ragged_data, write_tiny_model
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.shortage import is_out_of_memory

pytestmark = pytest.mark.slow  # starting ranks takes seconds

ROOM = 32 << 20  # bytes: about a quarter of what a rank needs for its part of a fully trained model
FULL = LoraConfig(rank=0, seed=0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 million weights: large beside what an allocator keeps for itself."""
    directory = tmp_path_factory.mktemp("wide") / "model"
    write_tiny_model(directory, shape("qwen3", hidden_size=128, intermediate_size=1 << 15, num_layers=1))
    return directory


@pytest.fixture(scope="module")
def backend(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    backend = fork_backend(model_path, tmp_path_factory.mktemp("cache"), nproc_per_node=2, max_full_models=1)
    yield backend
    backend.close()


def address_space(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmSize:"))
    return int(line.split()[1]) << 10


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """Leave the process ROOM, as long as this lasts."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (address_space(pid) + ROOM, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


def refuse_one(backend: FsdpBackend, rank: int) -> None:
    told = (
        rf"rank {rank} of 2 has no memory left for a model of LoRA rank 0 \(full fine-tuning\): \d+ weights take "
        r"0\.\d+ GiB over all 2 ranks, 16 bytes each; end a session that has a model, use more ranks, or train a LoRA "
        r"adapter \(reference [0-9a-f]{8} in the operator's log\)"
    )
    with starved(backend.ranks.pids[rank]), pytest.raises(OutOfMemoryError, match=told):
        backend.create_model(CreateModel(model_id="refused", lora=FULL))


def step(driver: ModelDriver, model_id: str, seed: int) -> None:
    driver.forward_backward(model_id, ragged_data(seed, VOCAB, (5, 3)))
    driver.optim_step(model_id)


def test_a_model_without_room_on_one_rank_is_refused_and_its_neighbour_goes_on(backend: FsdpBackend) -> None:
    adapters, driver = ModelDriver(backend), FullDriver(backend)
    beside, alone = (adapters.create(rank=3, seed=1) for _ in "ab")
    for model_id in (beside, alone):
        step(adapters, model_id, 1)
    for rank in (1, 0):
        refuse_one(backend, rank)
    for model_id in (beside, alone):
        step(adapters, model_id, 2)
    assert_same_state(adapters.state(beside), adapters.state(alone), "a neighbour of what was refused")
    full = driver.create()  # there is room again, for one, which none of those that were refused takes
    step(driver, full, 3)
    adapters.unload_all()
    driver.unload_all()


def test_what_was_refused_leaves_nothing_behind(backend: FsdpBackend) -> None:
    """On the rank that had no room for all of it, and on the other one, which had.

    What is left behind grows each time. A thread that starts meanwhile takes 72 MiB of address space, once.
    """
    refuse_one(backend, 1)  # allocators keep some for themselves, once
    grown: list[int] = []
    for _ in range(3):
        before = [address_space(pid) for pid in backend.ranks.pids]
        for _ in range(4):
            refuse_one(backend, 1)
        grown = [address_space(pid) - size for pid, size in zip(backend.ranks.pids, before, strict=True)]
        if max(grown) < ROOM:
            return
    pytest.fail(f"the ranks' address spaces grow each time, at last by {grown} bytes")


def test_files_that_are_gone_are_the_servers_fault_and_harm_nothing(backend: FsdpBackend, model_path: Path) -> None:
    adapters = ModelDriver(backend)
    model_id = adapters.create()
    weights, hidden = model_path / "model.safetensors", model_path / "hidden"
    weights.rename(hidden)
    try:
        with pytest.raises(ServerError, match=r"rank 0 of 2 can no longer read the base model's files \(reference"):
            backend.create_model(CreateModel(model_id="refused", lora=FULL))
    finally:
        hidden.rename(weights)
    step(adapters, model_id, 4)
    adapters.unload_all()


def test_what_counts_as_out_of_memory() -> None:
    def torch_asks() -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    def python_asks() -> None:
        bytearray(1 << 60)

    for ask in (torch_asks, python_asks):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            ask()
        assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
