"""Checkpoints in one canonical, backend-neutral format: safetensors, JSON, the PEFT adapter layout.

Specified in docs/reference/checkpoints.md. A checkpoint is a directory that is written and replaced atomically; what
is read is verified against the sizes and SHA-256 sums in its `tinsmith.json`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from tinsmith import atomic_directory, peft_layout
from tinsmith.backend import HostSnapshot, ModelState
from tinsmith.errors import ServerError, UnsupportedError, UserError
from tinsmith.operations import Array, LoraConfig
from tinsmith.store import CheckpointKind

FORMAT_VERSION = 1

_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_OPTIMIZER = "optimizer.safetensors"
_GRADIENTS = "gradients.safetensors"
_MANIFEST = "tinsmith.json"
_M_PREFIX, _V_PREFIX = "adam_m.", "adam_v."

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a directory held. A sampler checkpoint's state has weights only, and step 0."""

    kind: CheckpointKind
    state: ModelState
    base_model: str
    user_metadata: Mapping[str, str]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """`tinsmith.json`. Fields that a later minor change adds are ignored; breaking ones raise `format_version`."""

    format_version: int
    kind: CheckpointKind
    base_model: str
    lora: LoraConfig
    step: int
    user_metadata: dict[str, str]
    created_at: datetime
    files: dict[str, _File]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """Read alone first, since another version's manifest may look different everywhere else."""

    format_version: int


def write_checkpoint(
    root: Path,
    directory: str,
    *,
    kind: CheckpointKind,
    state: ModelState,
    base_model: str,
    user_metadata: Mapping[str, str],
    created_at: datetime,
    overwrite: bool,
) -> int:
    """Write what `kind` holds of `state` and return its size in bytes.

    Raise UserError where the directory exists and not `overwrite`; ServerError where the state is malformed or the disk
    refuses. Whatever is raised, what was there before is still there.
    """
    _check_state(state)
    manifest = _Manifest(
        format_version=FORMAT_VERSION,
        kind=kind,
        base_model=base_model,
        lora=state.lora,
        step=state.step,
        user_metadata=dict(user_metadata),
        created_at=created_at,
        files={},
    )
    sizes: list[int] = []

    def fill(fresh: Path) -> None:
        _write_files(fresh, manifest, state)
        sizes.extend(path.stat().st_size for path in fresh.iterdir())

    atomic_directory.write(root, directory, fill, overwrite=overwrite)
    return sum(sizes)


def read_checkpoint(root: Path, directory: str) -> Checkpoint:
    """Read and verify a training or sampler checkpoint.

    Raise NotFoundError where there is none, UnsupportedError where a newer tinsmith wrote it or it is an export, and
    ServerError where a file is missing or damaged.
    """
    return _read_stable(root, directory, _read_all)


def read_snapshot(root: Path, directory: str, snapshot_id: str) -> HostSnapshot:
    """Read and verify the weights alone; errors as in `read_checkpoint`."""
    return _read_stable(root, directory, partial(_read_weights_only, snapshot_id=snapshot_id))


def delete_checkpoint(root: Path, directory: str) -> None:
    """Delete it, at once for every reader; one that is not there is no error."""
    atomic_directory.delete(root, directory)


def checkpoint_files(root: Path, directory: str) -> list[Path]:
    """List the files of a checkpoint of any kind, by name. Raise NotFoundError where there is none."""
    found = atomic_directory.find(root, directory)
    return sorted(path for path in found.iterdir() if path.is_file() and not path.is_symlink())


def _check_state(state: ModelState) -> None:
    """Raise ServerError, naming the tensor, where the state is not one that any backend could take up again."""
    peft_layout.check_weights(state.lora, state.weights)
    shapes = {name: array.shape for name, array in state.weights.items()}
    for what in ("weights", "adam_m", "adam_v", "gradients"):
        arrays: Mapping[str, Array] = getattr(state, what)
        for name, array in arrays.items():
            if array.dtype != np.float32:
                msg = f"{what} of {name!r} is {array.dtype}; adapters are kept in float32"
                raise ServerError(msg)
        if arrays and {name: array.shape for name, array in arrays.items()} != shapes:
            differing = sorted(
                name
                for name in {*shapes, *arrays}
                if name not in arrays or name not in shapes or arrays[name].shape != shapes[name]
            )
            msg = f"{what} must have the names and shapes of the weights; these differ: {', '.join(differing[:5])}"
            raise ServerError(msg)


def _write_files(fresh: Path, manifest: _Manifest, state: ModelState) -> None:
    _write_arrays(fresh / _WEIGHTS, state.weights)
    config = peft_layout.adapter_config(manifest.base_model, state.lora, state.weights)
    (fresh / _ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if manifest.kind == "training":
        moments = {_M_PREFIX + name: array for name, array in state.adam_m.items()}
        moments |= {_V_PREFIX + name: array for name, array in state.adam_v.items()}
        _write_arrays(fresh / _OPTIMIZER, moments)
        _write_arrays(fresh / _GRADIENTS, state.gradients)
    if manifest.kind != "external":
        files = {path.name: _describe(path) for path in sorted(fresh.iterdir())}
        encoded = msgspec.json.encode(replace(manifest, files=files))
        (fresh / _MANIFEST).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def _write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    if arrays:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})  # what PEFT expects to find there


def _describe(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _read_stable(root: Path, directory: str, read: Callable[[Path], T]) -> T:
    """Read a directory; once more where it was replaced meanwhile, since its files then belong to two versions."""
    while True:
        found = atomic_directory.find(root, directory)
        identity = found.stat().st_ino
        try:
            return read(found)
        except (ServerError, UserError) as error:
            if found.is_dir() and found.stat().st_ino == identity:
                msg = f"checkpoint {directory!r}: {error}"
                raise type(error)(msg) from error


def _read_all(found: Path) -> Checkpoint:
    manifest = _read_manifest(found)
    moments = _read_arrays(found, manifest, _OPTIMIZER)
    state = ModelState(
        lora=manifest.lora,
        weights=_read_arrays(found, manifest, _WEIGHTS),
        adam_m={name.removeprefix(_M_PREFIX): moments[name] for name in moments if name.startswith(_M_PREFIX)},
        adam_v={name.removeprefix(_V_PREFIX): moments[name] for name in moments if name.startswith(_V_PREFIX)},
        gradients=_read_arrays(found, manifest, _GRADIENTS),
        step=manifest.step if manifest.kind == "training" else 0,
    )
    _check_state(state)
    return Checkpoint(
        kind=manifest.kind,
        state=state,
        base_model=manifest.base_model,
        user_metadata=manifest.user_metadata,
        created_at=manifest.created_at,
    )


def _read_weights_only(found: Path, snapshot_id: str) -> HostSnapshot:
    manifest = _read_manifest(found)
    weights = _read_arrays(found, manifest, _WEIGHTS)
    peft_layout.check_weights(manifest.lora, weights)
    return HostSnapshot(snapshot_id, manifest.lora, weights)


def _read_manifest(found: Path) -> _Manifest:
    path = found / _MANIFEST
    if not path.exists() and (found / _ADAPTER_CONFIG).exists():
        msg = f"this is an exported adapter without {_MANIFEST}; load a training or sampler checkpoint instead"
        raise UnsupportedError(msg)
    data = _read_bytes(path)
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version > FORMAT_VERSION:
            msg = f"format version {version} is newer than {FORMAT_VERSION}, which this tinsmith reads; upgrade it"
            raise UnsupportedError(msg)
        manifest = msgspec.json.decode(data, type=_Manifest)
    except msgspec.MsgspecError as error:
        msg = f"{_MANIFEST} is damaged: {error}"
        raise ServerError(msg) from error
    if _WEIGHTS not in manifest.files:
        msg = f"{_MANIFEST} is damaged: it does not list {_WEIGHTS}"
        raise ServerError(msg)
    return manifest


def _read_arrays(found: Path, manifest: _Manifest, name: str) -> dict[str, Array]:
    """Read one safetensors file; empty where the manifest lists none."""
    expected = manifest.files.get(name)
    if expected is None:
        return {}
    data = _read_bytes(found / name)
    actual = _File(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    if actual != expected:
        msg = (
            f"{name} is damaged: {actual.size} bytes with SHA-256 {actual.sha256}, expected {expected.size} bytes with "
            f"{expected.sha256}"
        )
        raise ServerError(msg)
    try:
        arrays: dict[str, Array] = safetensors.numpy.load(data)
    except safetensors.SafetensorError as error:
        msg = f"{name} is damaged: {error}"
        raise ServerError(msg) from error
    return arrays


def _read_bytes(path: Path) -> bytes:
    if path.is_symlink():
        msg = f"{path.name} is a symbolic link; a checkpoint holds plain files only"
        raise ServerError(msg)
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        msg = f"{path.name} is missing"
        raise ServerError(msg) from error
    except OSError as error:
        msg = f"{path.name} cannot be read: {error.strerror or error}"
        raise ServerError(msg) from error
