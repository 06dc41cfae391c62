"""Ranks write and read the state of a fully trained model themselves, beside training and from bounded memory."""

import gc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
from fsdp_harness import VOCAB, fork_backend, shape

from tinsmith import AdamParams, CreateModel, LoraConfig, ModelState, UnsupportedError
from tinsmith.checkpoints.saved import read_checkpoint, write_checkpoint
from tinsmith.testing import FullDriver, assert_same_arrays, assert_same_state, ragged_data, write_tiny_model
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.program import Program

pytestmark = pytest.mark.slow  # starting ranks takes seconds

BUFFER = 1 << 26  # the least that a rank may have
SLICE = 1 << 24
NOISE = 48 << 20  # bytes: what allocators keep, and a step's temporaries


def save(state: ModelState, root: Path, name: str) -> Path:
    write_checkpoint(
        root,
        name,
        kind="training",
        state=state,
        base_model="tiny",
        user_metadata={},
        created_at=datetime.now(UTC),
        overwrite=False,
    )
    return root / name


def trained(driver: FullDriver) -> str:
    model_id = driver.create()
    step(driver, model_id, 1)
    driver.forward_backward(model_id, ragged_data(2, VOCAB, (5, 9)))
    return model_id


def step(driver: FullDriver, model_id: str, seed: int) -> None:
    driver.forward_backward(model_id, ragged_data(seed, VOCAB, (5, 9)))
    driver.optim_step(model_id, AdamParams(learning_rate=1e-2))


def test_a_checkpoint_takes_the_files_that_the_ranks_have_written(two_ranks: FsdpBackend, tmp_path: Path) -> None:
    """Each number is written once: the checkpoint, and whatever is saved from it, are more names of the same files."""
    driver = FullDriver(two_ranks)
    model_id = trained(driver)
    state, before = driver.state(model_id), driver.state(model_id)
    step(driver, model_id, 3)
    saved = save(state, tmp_path, "m/weights/saved")
    read = read_checkpoint(tmp_path, "m/weights/saved").state
    again = save(read, tmp_path, "m/weights/again")
    shards = sorted(file.name for file in saved.glob("*.safetensors"))
    assert [name.split("-")[0] for name in shards] == ["gradients", "model", "optimizer"]
    for name in shards:
        assert (saved / name).samefile(again / name)
        assert (saved / name).stat().st_nlink == 3, "the ranks', and two checkpoints'"
    assert_same_state(read, before, "the state before a step")
    resumed = driver.create()
    two_ranks.restore_state(resumed, read)
    step(driver, resumed, 3)
    assert_same_state(driver.state(resumed), driver.state(model_id), "after a step from the files")
    del state, before, read
    gc.collect()
    assert (saved / shards[0]).stat().st_nlink == 2, "nothing keeps the ranks' own directory"
    driver.unload_all()


def test_a_snapshot_outlives_steps_and_its_model(two_ranks: FsdpBackend) -> None:
    driver = FullDriver(two_ranks)
    model_id = trained(driver)
    expected = dict(driver.state(model_id).weights)
    snapshot = two_ranks.publish(model_id, "s")
    step(driver, model_id, 4)
    driver.unload(model_id)
    assert_same_arrays(snapshot.adapter_weights(), expected, "a snapshot")


def test_a_rank_that_does_not_see_the_directory_is_named(two_ranks: FsdpBackend) -> None:
    directory = two_ranks.state_files.directory
    hidden, seen = directory.with_name("hidden"), two_ranks.ranks.call(Program.sees, directory)
    assert seen == [True, True]
    call = two_ranks.ranks.call
    directory.rename(hidden)
    try:
        with pytest.MonkeyPatch.context() as patch:  # the engine's machine has one that is not the ranks'
            patch.setattr(two_ranks.state_files, "directory", hidden)
            patch.setattr(two_ranks.ranks, "call", lambda method, file: call(method, directory / file.name))
            message = r"worker 0 of 2, on \S+, does not see '.*hidden'.* put server.data_dir on a file system that all"
            with pytest.raises(UnsupportedError, match=message):
                two_ranks.create_model(CreateModel(model_id="refused", lora=LoraConfig(rank=0, seed=0)))
    finally:
        hidden.rename(directory)
    driver = FullDriver(two_ranks)
    driver.create()
    driver.unload_all()


@pytest.fixture(scope="module")
def wide_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    """50 million weights: 300 MB of weights and moments on each of two ranks."""
    directory = tmp_path_factory.mktemp("wide")
    write_tiny_model(directory / "model", shape("qwen3", hidden_size=256, intermediate_size=1 << 16, num_layers=1))
    backend = fork_backend(
        directory / "model", directory / "cache", nproc_per_node=2, max_full_models=1, capture_buffer_bytes=BUFFER
    )
    yield backend
    backend.close()
    rmtree(directory)


def peak_after(backend: FsdpBackend) -> list[int]:
    """Return the most memory that each rank has had since `forget_peaks`, in bytes."""
    lines = (Path(f"/proc/{pid}/status").read_text().splitlines() for pid in backend.ranks.pids)
    return [int(next(line for line in each if line.startswith("VmHWM:")).split()[1]) << 10 for each in lines]


def growth(backend: FsdpBackend, before: list[int]) -> int:
    return max(after - start for after, start in zip(peak_after(backend), before, strict=True))


def forget_peaks(backend: FsdpBackend) -> list[int]:
    for pid in backend.ranks.pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_after(backend)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_host_memory_is_bounded_whatever_the_size_of_the_state(wide_ranks: FsdpBackend, tmp_path: Path) -> None:
    """A step right after a capture, and a restore, of a state that is more than four times as large as the buffer."""
    driver = FullDriver(wide_ranks)
    model_id = driver.create()
    step(driver, model_id, 1)
    share = 12 * sum(rank.parameter_bytes // 4 for rank in wide_ranks.loaded) // 2
    assert share > 4 * BUFFER
    step(driver, model_id, 2)
    before = forget_peaks(wide_ranks)
    step(driver, model_id, 3)
    alone = growth(wide_ranks, before)  # the step's own gradients and temporaries
    before = forget_peaks(wide_ranks)
    state = driver.state(model_id)
    step(driver, model_id, 4)
    save(state, tmp_path, "m/weights/x")
    for rank, (peak, settled) in enumerate(wide_ranks.ranks.call(Program.capture_bytes)):
        assert SLICE <= peak <= BUFFER, f"rank {rank}"
        assert settled <= share
    grown = growth(wide_ranks, before)
    assert grown < alone + BUFFER + NOISE, (alone, grown)
    before = forget_peaks(wide_ranks)
    wide_ranks.restore_state(model_id, read_checkpoint(tmp_path, "m/weights/x").state)
    assert growth(wide_ranks, before) < 2 * SLICE + NOISE
    name, *_ = state.weights
    np.testing.assert_array_equal(driver.state(model_id).weights[name], state.weights[name])
    driver.unload_all()
