"""Checkpoints of full fine-tuning: Hugging Face shards, read and written one tensor at a time."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tinsmith.backend import BackendContext, ModelState
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.checkpoints.saved import delete_checkpoint, read_checkpoint, read_snapshot, write_checkpoint
from tinsmith.errors import ServerError, UnsupportedError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import AdamParams, Array, CreateModel, LoraConfig, OptimStep
from tinsmith.testing.contract import assert_same_arrays
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, ragged_data
from tinsmith_checkpoints.format import FORMAT_VERSION
from tinsmith_checkpoints.huggingface.safetensors_files import DTYPES, ShardWriter, StoredTensors
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

LORA = LoraConfig(rank=0, seed=1)
SHARD = 3000  # bytes


class Lazy(Mapping[str, Array]):
    """Makes each array when it is asked for, and counts how often."""

    def __init__(self, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.seed, self.shapes = seed, shapes
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Array:
        self.asked.append(name)
        return np.random.default_rng([self.seed, len(name)]).normal(size=self.shapes[name]).astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.norm.weight": (16,),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
}


def state() -> ModelState:
    return ModelState(
        lora=LORA,
        weights=Lazy(0, SHAPES),
        adam_m=Lazy(1, SHAPES),
        adam_v=Lazy(2, SHAPES),
        gradients=Lazy(3, SHAPES),
        step=7,
    )


def write(root: Path, what: ModelState, kind: str = "training", model_path: Path | None = None) -> Path:
    write_checkpoint(
        root,
        "m/weights/x",
        kind=kind,  # type: ignore[arg-type]  # one of the literals
        state=what,
        base_model="tiny",
        user_metadata={},
        created_at=datetime(2026, 1, 31, tzinfo=UTC),
        overwrite=True,
        model_path=model_path,
        shard_bytes=SHARD,
    )
    return root / "m/weights/x"


def test_what_is_written_comes_back_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = state()
    directory = write(tmp_path, written)
    for what in ("weights", "adam_m", "adam_v", "gradients"):
        assert sorted(getattr(written, what).asked) == sorted(SHAPES), "each is asked for once"
    read = read_checkpoint(tmp_path, "m/weights/x").state
    assert (read.lora, read.step) == (LORA, 7)
    for what in ("weights", "adam_m", "adam_v", "gradients"):
        assert_same_arrays(getattr(read, what), getattr(state(), what), what)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert shards == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    for shard in shards:  # the format's own reader agrees
        for name, array in safetensors.numpy.load_file(directory / shard).items():
            np.testing.assert_array_equal(array, state().weights[name])
    assert json.loads((directory / "tinsmith.json").read_text())["format_version"] == FORMAT_VERSION


def save_again(root: Path, shard_bytes: int) -> Path:
    """Save what was loaded, as a model does that was just created from a checkpoint."""
    write_checkpoint(
        root,
        "m/weights/again",
        kind="training",
        state=read_checkpoint(root, "m/weights/x").state,
        base_model="tiny",
        user_metadata={},
        created_at=datetime(2026, 1, 31, tzinfo=UTC),
        overwrite=True,
        shard_bytes=shard_bytes,
    )
    return root / "m/weights/again"


def test_what_was_loaded_is_saved_under_a_second_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path, state())
    again = save_again(tmp_path, SHARD)
    shards = [file.name for file in first.glob("*.safetensors")]
    assert len(shards) == 8
    assert all((first / name).samefile(again / name) for name in shards)
    delete_checkpoint(tmp_path, "m/weights/x")
    read = read_checkpoint(tmp_path, "m/weights/again").state
    for what in ("weights", "adam_m", "adam_v", "gradients"):
        assert_same_arrays(getattr(read, what), getattr(state(), what), what)


def test_what_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    first = write(tmp_path, state())
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    again = save_again(tmp_path, SHARD)
    for file in first.glob("*.safetensors*"):
        assert (again / file.name).read_bytes() == file.read_bytes()
        assert not file.samefile(again / file.name)


def test_files_that_hold_more_or_are_too_large_are_not_taken_over(tmp_path: Path) -> None:
    first = write(tmp_path, state())
    again = save_again(tmp_path, 100)
    assert len(list(again.glob("model-*"))) == 3, "the limit of a file's size holds"
    loaded = read_checkpoint(tmp_path, "m/weights/x").state
    half = ModelState(lora=LORA, weights=dict(list(loaded.weights.items())[:1]), adam_m=loaded.adam_m)
    with pytest.raises(ServerError, match="adam_m must have the names of the weights"):
        write(tmp_path, half)
    name = min(SHAPES)
    fewer = StoredTensors({name: StoredTensors.of(first, "model").stored[name]})
    write(tmp_path, ModelState(lora=LORA, weights=fewer), "sampler")
    assert set(read_snapshot(tmp_path, "m/weights/x", "s").adapter_weights()) == {name}


def test_damage_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path, state())
    file = directory / "optimizer-00001-of-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ServerError, match=r"optimizer-00001-of-00004.safetensors is damaged"):
        read_checkpoint(tmp_path, "m/weights/x")
    file.unlink()
    with pytest.raises(ServerError, match=r"optimizer-00001-of-00004.safetensors is missing"):
        read_checkpoint(tmp_path, "m/weights/x")


def test_a_malformed_state_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    other = {**SHAPES, "model.norm.weight": (17,)}
    with pytest.raises(ServerError, match=r"adam_m.model.norm.weight is float32\[17\]"):
        write(tmp_path, ModelState(lora=LORA, weights=Lazy(0, SHAPES), adam_m=Lazy(1, other), adam_v=Lazy(2, SHAPES)))
    with pytest.raises(ServerError, match="gradients must have the names of the weights"):
        write(tmp_path, ModelState(lora=LORA, weights=Lazy(0, SHAPES), gradients=Lazy(1, {"a": (1,)})))
    assert not (tmp_path / "m/weights/x").exists()


def test_sampler_and_external_checkpoints_hold_the_weights_alone(tmp_path: Path) -> None:
    directory = write(tmp_path, state(), "sampler")
    assert not list(directory.glob("optimizer*"))
    snapshot = read_snapshot(tmp_path, "m/weights/x", "s")
    assert_same_arrays(snapshot.adapter_weights(), state().weights, "a snapshot")
    directory = write(tmp_path, state(), "external")
    assert not (directory / "tinsmith.json").exists()


def test_a_newer_reader_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, state())
    monkeypatch.setattr("tinsmith_checkpoints.format.FORMAT_VERSION", 1)
    with pytest.raises(UnsupportedError, match="format version 2 is newer than 1"):
        read_checkpoint(tmp_path, "m/weights/x")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it_as_it_is(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    shape = TinyShape(vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=1, head_dim=16, tied=tied)
    write_tiny_model(tmp_path / "base", shape)
    weights = StoredTensors.of(tmp_path / "base", "model")
    moved = {name: array + np.float32(0.25) for name, array in weights.items()}
    directory = write(tmp_path, ModelState(lora=LORA, weights=moved), "external", tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for name, array in moved.items():
        np.testing.assert_array_equal(model.get_parameter(name).numpy(force=True), array)
    assert transformers.AutoTokenizer.from_pretrained(directory).encode("hello")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_round_as_torch_does(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    array = (rng.normal(size=4099) * 10.0 ** rng.integers(-6, 5, 4099)).astype(np.float32)
    array[:4] = [np.nan, np.inf, -np.inf, 0.0]
    with ShardWriter(tmp_path, "model", ["x"], shard_bytes=1 << 20, dtype=dtype) as writer:
        writer.add("x", array)
    expected = torch.tensor(array).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(StoredTensors.of(tmp_path, "model")["x"], expected)


def test_the_toy_goes_on_from_a_full_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    context = BackendContext(
        model_name="toy", model_path=None, cache_dir=tmp_path, losses={spec.name: spec for spec in BUILTIN_LOSSES}
    )
    toy = ToyBackend(ToyConfig(), context)
    driver = ModelDriver(toy)
    for model_id in ("a", "b"):
        toy.create_model(CreateModel(model_id=model_id, lora=LORA))
    before = logprobs_of(driver.forward("a", ragged_data(1, 64)))
    for step in range(3):
        driver.forward_backward("a", ragged_data(step, 64))
        driver.optim_step("a", AdamParams(learning_rate=1e-2))
    driver.forward_backward("a", ragged_data(8, 64))
    write(tmp_path, toy.capture_state("a"))
    toy.restore_state("b", read_checkpoint(tmp_path, "m/weights/x").state)
    for model_id in ("a", "b"):
        assert all(toy.optim_step([OptimStep(model_id=model_id, adam=AdamParams())]))
    after = [logprobs_of(driver.forward(model_id, ragged_data(1, 64))) for model_id in ("a", "b")]
    for left, right, old in zip(*after, before, strict=True):
        np.testing.assert_array_equal(left, right)
        assert np.abs(left - old).max() > 1e-3


def test_the_toys_full_gradient_is_that_of_its_loss(tmp_path: Path) -> None:
    """By finite differences, of a random direction in every weight."""
    context = BackendContext(
        model_name="toy", model_path=None, cache_dir=tmp_path, losses={spec.name: spec for spec in BUILTIN_LOSSES}
    )
    toy = ToyBackend(ToyConfig(), context)
    driver = ModelDriver(toy)
    toy.create_model(CreateModel(model_id="a", lora=LORA))
    data = ragged_data(4, 64, (5, 9))
    gradient = driver.gradient("a", data)
    start = driver.state("a")
    rng = np.random.default_rng(0)
    for name, weight in start.weights.items():
        direction = rng.normal(size=weight.shape)
        losses = []
        for sign in (1, -1):
            moved = {**start.weights, name: (weight + sign * 1e-3 * direction).astype(np.float32)}
            toy.restore_state("a", ModelState(lora=LORA, weights=moved))
            losses.append(driver.forward("a", data).metrics["loss:sum"])
        toy.restore_state("a", start)
        measured, expected = (losses[0] - losses[1]) / 2e-3, np.sum(gradient[name] * direction)
        assert measured == pytest.approx(expected, rel=2e-3, abs=1e-2), name
