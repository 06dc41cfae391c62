"""Checkpoints: what is written comes back, whole or not at all, and damage is named."""

import json
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import safetensors

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import (
    checkpoint_files,
    delete_checkpoint,
    read_checkpoint,
    read_snapshot,
    write_checkpoint,
)
from tinsmith.errors import NotFoundError, ServerError, UnsupportedError, UserError
from tinsmith.operations import Array, LoraConfig
from tinsmith.store import CheckpointKind

LORA = LoraConfig(rank=4, seed=7, train_unembed=False)
CREATED = datetime(2026, 1, 31, 12, tzinfo=UTC)
NAME = "s:train:0/weights/a"


def make_arrays(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn"
    return {
        f"{module}.q_proj.lora_A.weight": rng.normal(size=(4, 16)).astype(np.float32),
        f"{module}.q_proj.lora_B.weight": rng.normal(size=(24, 4)).astype(np.float32),
        f"{module}.v_proj.lora_A.weight": rng.normal(size=(4, 16)).astype(np.float32),
        f"{module}.v_proj.lora_B.weight": rng.normal(size=(8, 4)).astype(np.float32),
    }


def make_state(seed: int = 0) -> ModelState:
    return ModelState(
        lora=LORA,
        weights=make_arrays(seed),
        adam_m=make_arrays(seed + 1),
        adam_v=make_arrays(seed + 2),
        gradients=make_arrays(seed + 3),
        step=3,
    )


def write(
    root: Path,
    state: ModelState,
    directory: str = NAME,
    *,
    kind: CheckpointKind = "training",
    overwrite: bool = False,
) -> int:
    return write_checkpoint(
        root,
        directory,
        kind=kind,
        state=state,
        base_model="tiny",
        user_metadata={"renderer": "qwen3"},
        created_at=CREATED,
        overwrite=overwrite,
    )


def assert_same(actual: ModelState, expected: ModelState) -> None:
    assert actual.lora == expected.lora
    assert actual.step == expected.step
    for what in ("weights", "adam_m", "adam_v", "gradients"):
        left, right = getattr(actual, what), getattr(expected, what)
        assert left.keys() == right.keys(), what
        for name in right:
            assert left[name].dtype == np.float32
            np.testing.assert_array_equal(left[name], right[name], err_msg=f"{what} {name}")


def test_training_checkpoint_comes_back(tmp_path: Path) -> None:
    size = write(tmp_path, make_state())
    checkpoint = read_checkpoint(tmp_path, NAME)
    assert_same(checkpoint.state, make_state())
    assert checkpoint.kind == "training"
    assert checkpoint.base_model == "tiny"
    assert checkpoint.user_metadata == {"renderer": "qwen3"}
    assert checkpoint.created_at == CREATED
    files = checkpoint_files(tmp_path, NAME)
    assert [path.name for path in files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "gradients.safetensors",
        "optimizer.safetensors",
        "tinsmith.json",
    ]
    assert size == sum(path.stat().st_size for path in files)


def test_state_without_moments_or_gradients_has_no_files_for_them(tmp_path: Path) -> None:
    write(tmp_path, ModelState(lora=LORA, weights=make_arrays(0)))
    assert [path.name for path in checkpoint_files(tmp_path, NAME)] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tinsmith.json",
    ]
    state = read_checkpoint(tmp_path, NAME).state
    assert_same(state, ModelState(lora=LORA, weights=make_arrays(0)))


def test_reading_verifies_in_bounded_memory(tmp_path: Path) -> None:
    shapes = {name: tuple(4 if size == 4 else 1 << 19 for size in each.shape) for name, each in make_arrays(0).items()}
    big = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}  # 8 MiB each
    write(tmp_path, ModelState(lora=LORA, weights=big, adam_m=big, adam_v=big, step=1))
    tracemalloc.start()
    state = read_checkpoint(tmp_path, NAME).state
    found = {name: array.shape for name, array in state.adam_v.items()}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == shapes
    assert peak < 30 << 20, "of 96 MiB, about one tensor at a time"


def test_what_was_verified_is_read_and_nothing_else(tmp_path: Path) -> None:
    """A checkpoint that is replaced after it was opened is not mixed with the new one; nor is a deleted one."""
    write(tmp_path, make_state())
    opened = read_checkpoint(tmp_path, NAME).state
    write(tmp_path, make_state(9), overwrite=True)
    for tensors, file in ((opened.weights, "adapter_model"), (opened.adam_v, "optimizer")):
        with pytest.raises(ServerError, match=f"{file}.safetensors has been replaced since it was verified; try again"):
            dict(tensors)
    reopened = read_checkpoint(tmp_path, NAME).state
    assert_same(reopened, make_state(9))
    delete_checkpoint(tmp_path, NAME)
    with pytest.raises(ServerError, match=r"gradients\.safetensors cannot be read: No such file"):
        dict(reopened.gradients)


def test_sampler_checkpoint_holds_weights_only(tmp_path: Path) -> None:
    write(tmp_path, make_state(), kind="sampler")
    checkpoint = read_checkpoint(tmp_path, NAME)
    assert checkpoint.kind == "sampler"
    assert_same(checkpoint.state, ModelState(lora=LORA, weights=make_arrays(0)))


def test_external_checkpoint_is_a_plain_peft_directory(tmp_path: Path) -> None:
    write(tmp_path, make_state(), kind="external")
    config, weights = checkpoint_files(tmp_path, NAME)
    described = json.loads(config.read_text())
    assert described["target_modules"] == ["q_proj", "v_proj"]
    assert (described["r"], described["lora_alpha"], described["peft_type"]) == (4, 32, "LORA")
    assert described["base_model_name_or_path"] == "tiny"
    with safetensors.safe_open(weights, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(make_arrays(0))
    with pytest.raises(UnsupportedError, match=r"export without tinsmith\.json"):
        read_checkpoint(tmp_path, NAME)


def test_snapshot_reads_the_weights(tmp_path: Path) -> None:
    write(tmp_path, make_state(), kind="sampler")
    snapshot = read_snapshot(tmp_path, NAME, "snap-1")
    assert (snapshot.snapshot_id, snapshot.lora) == ("snap-1", LORA)
    for name, array in make_arrays(0).items():
        np.testing.assert_array_equal(snapshot.adapter_weights()[name], array)


def test_existing_name_is_refused_and_kept(tmp_path: Path) -> None:
    write(tmp_path, make_state())
    with pytest.raises(UserError, match=r"checkpoint 'tinker://.*' exists already.*overwrite=True"):
        write(tmp_path, make_state(9))
    assert_same(read_checkpoint(tmp_path, NAME).state, make_state())


def test_overwrite_replaces_everything(tmp_path: Path) -> None:
    write(tmp_path, make_state())
    write(tmp_path, ModelState(lora=LORA, weights=make_arrays(9)), overwrite=True)
    assert_same(read_checkpoint(tmp_path, NAME).state, ModelState(lora=LORA, weights=make_arrays(9)))
    assert [path.name for path in (tmp_path / NAME).parent.iterdir()] == ["a"]


def test_delete(tmp_path: Path) -> None:
    write(tmp_path, make_state())
    write(tmp_path, make_state(9), "s:train:0/weights/b")
    delete_checkpoint(tmp_path, NAME)
    delete_checkpoint(tmp_path, NAME)
    with pytest.raises(NotFoundError, match="no checkpoint 's:train:0/weights/a'"):
        read_checkpoint(tmp_path, NAME)
    with pytest.raises(NotFoundError):
        checkpoint_files(tmp_path, NAME)
    assert [path.name for path in (tmp_path / NAME).parent.iterdir()] == ["b"]
    assert_same(read_checkpoint(tmp_path, "s:train:0/weights/b").state, make_state(9))


@pytest.mark.parametrize(
    "file", ["adapter_model.safetensors", "optimizer.safetensors", "gradients.safetensors", "tinsmith.json"]
)
def test_missing_file_is_named(tmp_path: Path, file: str) -> None:
    write(tmp_path, make_state())
    (tmp_path / NAME / "adapter_config.json").unlink()
    (tmp_path / NAME / file).unlink()
    with pytest.raises(ServerError, match=rf"'s:train:0/weights/a': {file} is missing"):
        read_checkpoint(tmp_path, NAME)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "gradients.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_file_is_named(tmp_path: Path, file: str, damage: str) -> None:
    write(tmp_path, make_state())
    path = tmp_path / NAME / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    else:
        del data[-1]
    path.write_bytes(data)
    with pytest.raises(ServerError, match=f"{file} is damaged"):
        read_checkpoint(tmp_path, NAME)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("format_version", 3, UnsupportedError, "format version 3 is newer than 2"),
        ("format_version", "x", ServerError, "tinsmith.json is damaged"),
        ("kind", "other", ServerError, "tinsmith.json is damaged"),
        ("files", {}, ServerError, "does not list adapter_model"),
        ("lora", {"rank": 8, "seed": 0}, ServerError, "rank 8 needs it"),
    ],
)
def test_wrong_manifest(tmp_path: Path, key: str, value: object, error: type[Exception], message: str) -> None:
    write(tmp_path, make_state())
    path = tmp_path / NAME / "tinsmith.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(error, match=message):
        read_checkpoint(tmp_path, NAME)


def test_manifest_with_unknown_fields_is_read(tmp_path: Path) -> None:
    write(tmp_path, make_state())
    path = tmp_path / NAME / "tinsmith.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"later": 1}))
    assert_same(read_checkpoint(tmp_path, NAME).state, make_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adam_m": {}, "gradients": {"x": np.zeros(1, np.float32)}}, "gradients must have the names and shapes"),
        ({"weights": {"w": np.zeros((4, 4), np.float32)}}, "is not named"),
        ({"weights": {"base_model.model.a.lora_A.weight": np.zeros((4, 4), np.float32)}}, "no lora_B beside it"),
        ({"weights": {"base_model.model.a.lora_A.weight": np.zeros((5, 4), np.float32)}}, "rank 4 needs it"),
        ({"weights": {k: v.astype(np.float64) for k, v in make_arrays(0).items()}}, "kept in float32"),
    ],
)
def test_malformed_state_is_not_written(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        write(tmp_path, replace(make_state(), **change))  # type: ignore[arg-type]  # deliberately wrong
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "directory", ["", ".", "..", "../x", "a/../../x", "/etc/x", "a/.hidden", "a\\..\\b", "a/\0", ".a.new-1"]
)
def test_names_stay_inside_the_root(tmp_path: Path, directory: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for attempt in (
        lambda: write(root, make_state(), directory),
        lambda: read_checkpoint(root, directory),
        lambda: delete_checkpoint(root, directory),
        lambda: checkpoint_files(root, directory),
    ):
        with pytest.raises(UserError, match="is not allowed"):
            attempt()
    assert list(tmp_path.iterdir()) == [root]


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(outside, make_state(), "x")
    (root / "m/weights").mkdir(parents=True)
    (root / "m/weights/a").symlink_to(outside / "x")
    (root / "n").symlink_to(outside)
    for directory in ("m/weights/a", "n/x"):
        with pytest.raises(UserError, match="symbolic link leads out"):
            read_checkpoint(root, directory)
        with pytest.raises(UserError, match="symbolic link leads out"):
            delete_checkpoint(root, directory)
    write(root, make_state(), "m/weights/b")
    weights = root / "m/weights/b/adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(outside / "x/adapter_model.safetensors")
    with pytest.raises(ServerError, match="symbolic link"):
        read_checkpoint(root, "m/weights/b")
    assert weights not in checkpoint_files(root, "m/weights/b")


def test_disk_error_is_reported_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, make_state())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ServerError, match="could not be written: No space left on device"):
        write(tmp_path, make_state(9), overwrite=True)
    assert_same(read_checkpoint(tmp_path, NAME).state, make_state())
    assert [path.name for path in (tmp_path / NAME).parent.iterdir()] == ["a"]


_KILLED_WRITERS = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoints as t

calls, overwrite = 0, sys.argv[3] == "True"

def dying(function, survived):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls > survived:
            os._exit(9)  # as SIGKILL: no handler runs
        return function(*args, **kwargs)
    return call

for survived in range(100):
    root = Path(sys.argv[2], str(survived))
    if overwrite:
        t.write(root, t.make_state())
    if (pid := os.fork()) == 0:
        for name in ("fsync", "rename", "open", "mkdir", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name), survived))
        t.write(root, t.make_state(9), overwrite=overwrite)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_writer_leaves_old_or_new(tmp_path: Path, overwrite: bool) -> None:
    """Kill a writer before each of its system calls in turn, then read, then write again."""
    arguments = [str(Path(__file__).parent), str(tmp_path), str(overwrite)]
    subprocess.run([sys.executable, "-c", _KILLED_WRITERS, *arguments], check=True, timeout=600)
    outcomes = []
    for root in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        outcomes.append(_outcome(root))
        write(root, make_state(20), overwrite=True)
        assert_same(read_checkpoint(root, NAME).state, make_state(20))
        assert [path.name for path in (root / NAME).parent.iterdir()] == ["a"]
    before = "old" if overwrite else "none"
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes, key=[before, "new"].index)
    assert set(outcomes) == {before, "new"}


def _outcome(root: Path) -> str:
    try:
        state = read_checkpoint(root, NAME).state
    except NotFoundError:
        return "none"
    outcome = "new" if _equal(state, make_state(9)) else "old"
    assert_same(state, make_state(9 if outcome == "new" else 0))
    return outcome


def _equal(left: ModelState, right: ModelState) -> bool:
    return all(np.array_equal(left.weights[name], right.weights[name]) for name in right.weights)
