"""Checkpoints in one canonical, backend-neutral format: safetensors, JSON, the PEFT adapter layout.

Specified in docs/reference/checkpoints.md. A checkpoint is a directory. Its files are verified on reading against the
sizes and SHA-256 sums in its `tinsmith.json`.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from tinsmith_checkpoints.errors import ServerError, UnsupportedError
from tinsmith_checkpoints.finite import check_finite
from tinsmith_checkpoints.huggingface import model_files as hf_files
from tinsmith_checkpoints.huggingface import peft_experts, peft_layout
from tinsmith_checkpoints.huggingface.decoder import HEAD
from tinsmith_checkpoints.huggingface.outside_files import MAX_JSON, check_depth, open_regular
from tinsmith_checkpoints.huggingface.safetensors_files import (
    DTYPES,
    FileVersion,
    ShardWriter,
    StoredTensor,
    StoredTensors,
    file_version,
    read_header,
    shard_files,
)
from tinsmith_checkpoints.huggingface.state_files import (
    ADAPTER_FILES,
    FILES,
    GRADIENTS,
    M_PREFIX,
    MODEL,
    OPTIMIZER,
    V_PREFIX,
    Kind,
)
from tinsmith_checkpoints.linked_files import link, whole_file, whole_set
from tinsmith_checkpoints.values import Array, CheckpointKind, Json, LoraConfig, ModelState

FORMAT_VERSION = 2  # of full fine-tuning; adapters are written as version 1, which has not changed
SHARD_BYTES = 2 << 30

_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_OPTIMIZER = "optimizer.safetensors"
_GRADIENTS = "gradients.safetensors"
_ANY_TENSORS = "*.safetensors"
MANIFEST = "tinsmith.json"
_HASHERS = 8  # threads; one hashes about as fast as one disk reads

_DTYPES = {name: dtype for dtype, (name, _) in DTYPES.items()}
_OS_ERROR = re.compile(r"os error (\d+)")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read. The state of a sampler checkpoint has only weights, and step 0."""

    kind: CheckpointKind
    state: ModelState
    base_model: str
    user_metadata: Mapping[str, str]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`tinsmith.json`. Unknown fields are ignored; a breaking change increases `format_version`."""

    format_version: int
    kind: CheckpointKind
    base_model: str
    lora: LoraConfig
    step: int
    user_metadata: dict[str, str]
    created_at: datetime
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """Decoded first, because all other fields may differ in another version's manifest."""

    format_version: int


def checked(state: ModelState) -> ModelState:
    """Return the state, an adapter's lazy tensors read into memory. Raise ServerError if it is malformed."""
    if state.lora.rank:
        state = _in_memory(state)
    _check_state(state)
    return state


def write(  # noqa: PLR0913 - what a checkpoint says
    directory: Path,
    state: ModelState,
    *,
    kind: CheckpointKind,
    base_model: str,
    user_metadata: Mapping[str, str],
    created_at: datetime,
    model_path: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    finite: bool = False,
) -> None:
    """Write the parts of a `checked` state that `kind` needs into an empty directory.

    The mappings may be lazy; tensors of a fully fine-tuned model are read one at a time. `model_path` is the base
    model's directory, from which configuration and tokenizer are copied.

    With `finite`, raise UserError if weights or moments are not finite. Pending gradients may be. Raise ServerError if
    a tensor of a fully fine-tuned model is malformed.
    """
    manifest = Manifest(
        format_version=1 if state.lora.rank else FORMAT_VERSION,
        kind=kind,
        base_model=base_model,
        lora=state.lora,
        step=state.step,
        user_metadata=dict(user_metadata),
        created_at=created_at,
        files={},
    )
    if state.lora.rank:
        _write_files(directory, manifest, state)
    else:
        _write_full(directory, kind, state, model_path, shard_bytes)
    _write_manifest(directory, manifest, finite=finite)


def _in_memory(state: ModelState) -> ModelState:
    """Materialise lazy tensors of an adapter, which are read several times below. Tensors in files stay there."""

    def read(tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        return tensors if isinstance(tensors, StoredTensors) else dict(tensors)

    return replace(
        state,
        weights=read(state.weights),
        adam_m=read(state.adam_m),
        adam_v=read(state.adam_v),
        gradients=read(state.gradients),
    )


def _check_state(state: ModelState) -> None:
    """Raise ServerError, naming the tensor, if a backend could not resume from the state."""
    if state.lora.rank == 0:
        _check_names(state)
        return
    shapes = _shapes("weights", state.weights)
    peft_layout.check_shapes(state.lora, shapes)
    for what in ("adam_m", "adam_v", "gradients"):
        found = _shapes(what, getattr(state, what))
        if found and found != shapes:
            differing = sorted(name for name in {*shapes, *found} if found.get(name) != shapes.get(name))
            msg = f"{what} must have the names and shapes of the weights; these differ: {', '.join(differing[:5])}"
            raise ServerError(msg)


def _shapes(what: str, tensors: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, without reading files. Raise ServerError if a dtype is another one."""
    if isinstance(tensors, StoredTensors):
        found = {
            name: (tensor.shape, _DTYPES.get(tensor.dtype, tensor.dtype)) for name, tensor in tensors.stored.items()
        }
    else:
        found = {name: (array.shape, str(array.dtype)) for name, array in tensors.items()}
    for name, (_, dtype) in found.items():
        if dtype != "float32":
            msg = f"{what} of {name!r} is {dtype}; adapters are kept in float32"
            raise ServerError(msg)
    return {name: shape for name, (shape, _) in found.items()}


def _check_names(state: ModelState) -> None:
    """Check the names. Shapes are checked when the tensors are read, one at a time."""
    for what in ("adam_m", "adam_v", "gradients"):
        names, expected = set(getattr(state, what)), set(state.weights)  # sets: `in` may load from a lazy mapping
        if names and names != expected:
            differing = sorted(names ^ expected)
            msg = f"{what} must have the names of the weights; these differ: {', '.join(differing[:5])}"
            raise ServerError(msg)


def _write_files(fresh: Path, manifest: Manifest, state: ModelState) -> None:
    """Write Tinker's layout, with optimizer and gradients beside it."""
    _write_config(fresh, peft_layout.adapter_config(manifest.base_model, state.lora, state.weights))
    tensors = _tensors(manifest.kind, state)
    for stem, prefixes in ADAPTER_FILES.items():
        parts = {prefix: tensors[each] for each, prefix in prefixes.items() if each in tensors}
        file = fresh / f"{stem}.safetensors"
        if not _link_file(file, parts):
            _write_arrays(file, {prefix + name: each[name] for prefix, each in parts.items() for name in each})


def _link_file(target: Path, parts: Mapping[str, Mapping[str, Array]]) -> bool:
    """Take over the file that holds exactly these tensors. Return False, having done nothing, if there is none."""
    stored = _stored(parts)
    file = whole_file(stored) if stored else None
    if file is None:
        return False
    link(file, target)
    return True


def write_adapter(directory: Path, state: ModelState, *, base_model: str, head: str = HEAD) -> None:
    """Write an adapter's two files in Tinker's layout, which PEFT loads unless there are experts.

    `head` is the output head's name in the weights file.
    """
    weights = {peft_layout.rename_module(name, HEAD, head): each for name, each in state.weights.items()}
    _write_adapter(directory, weights, peft_layout.adapter_config(base_model, state.lora, state.weights))


def write_peft_adapter(directory: Path, state: ModelState, *, base_model: str) -> None:
    """Write the two files that PEFT loads."""
    _write_adapter(directory, *peft_experts.to_peft(base_model, state.lora, state.weights))


def _write_adapter(directory: Path, weights: Mapping[str, Array], config: Mapping[str, Json]) -> None:
    _write_arrays(directory / _WEIGHTS, weights)
    _write_config(directory, config)


def _write_config(directory: Path, config: Mapping[str, Json]) -> None:
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(kind: CheckpointKind, state: ModelState) -> dict[Kind, Mapping[str, Array]]:
    """Return what a checkpoint of this kind holds."""
    if kind != "training":
        return {"weights": state.weights}
    return {
        "weights": state.weights, "adam_m": state.adam_m, "adam_v": state.adam_v, "gradients": state.gradients,
    }  # fmt: skip


def _write_full(
    fresh: Path, kind: CheckpointKind, state: ModelState, model_path: Path | None, shard_bytes: int
) -> None:
    """Write the Hugging Face layout, with optimizer and gradients in shards beside it."""
    tensors = _tensors(kind, state)
    shapes: dict[str, tuple[int, ...]] = {}
    for stem, prefixes in FILES.items():
        parts = {prefix: tensors[each] for each, prefix in prefixes.items() if each in tensors}
        if not _link_tensors(fresh, stem, parts, shapes, shard_bytes):
            _write_tensors(fresh, stem, parts, shapes, shard_bytes)
    if model_path is not None:
        hf_files.copy_model_files(model_path, fresh, dtype="float32")


def _write_tensors(
    fresh: Path,
    stem: str,
    parts: Mapping[str, Mapping[str, Array]],
    shapes: dict[str, tuple[int, ...]],
    shard_bytes: int,
) -> None:
    """Write tensors under their names with prefixes. `shapes`: the shapes of the weights, once known."""
    names = [prefix + name for prefix, arrays in parts.items() for name in arrays]
    with ShardWriter(fresh, stem, names, shard_bytes=shard_bytes) as writer:
        for prefix, arrays in parts.items():
            for name in sorted(arrays):
                array = arrays[name]
                _check_tensor(prefix + name, str(array.dtype), array.shape, shapes.setdefault(name, array.shape))
                writer.add(prefix + name, array)


def _link_tensors(
    fresh: Path,
    stem: str,
    parts: Mapping[str, Mapping[str, Array]],
    shapes: dict[str, tuple[int, ...]],
    shard_bytes: int,
) -> bool:
    """Take over the files that hold exactly these tensors. Return False, having done nothing, if there are none."""
    stored = _stored(parts)
    files = [] if stored is None else whole_set(stem, stored, shard_bytes)
    if not files:
        return False
    for prefix, tensors in parts.items():
        for name, shape in cast("StoredTensors", tensors).shapes().items():
            _check_tensor(prefix + name, "float32", shape, shapes.setdefault(name, shape))
    for file in files:
        link(file, fresh / file.name)
    return True


def _stored(parts: Mapping[str, Mapping[str, Array]]) -> dict[str, StoredTensor] | None:
    """Return where the tensors lie, once their files are complete; None if some are not in files."""
    stored: dict[str, StoredTensor] = {}
    for prefix, tensors in parts.items():
        if not isinstance(tensors, StoredTensors):
            return None
        tensors.wait()
        stored |= {prefix + name: tensor for name, tensor in tensors.stored.items()}
    return stored


def _check_tensor(name: str, dtype: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if dtype != "float32" or shape != expected:
        msg = f"{name} is {dtype}{list(shape)}; it must be float32 and of its weight's shape {list(expected)}"
        raise ServerError(msg)


def _write_manifest(fresh: Path, manifest: Manifest, *, finite: bool) -> None:
    """An export has none."""
    if manifest.kind != "external":
        files = _each_described(_describe_finite if finite else describe, sorted(fresh.iterdir()))
        encoded = msgspec.json.encode(replace(manifest, files=files))
        (fresh / MANIFEST).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    elif finite:
        _each_described(check_finite, sorted(fresh.glob(_ANY_TENSORS)))


def _write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    if arrays:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        try:
            safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt"})  # PEFT expects this
        except safetensors.SafetensorError as error:  # also raised if the disk refuses
            number = _OS_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def describe(path: Path) -> StoredFile:
    """Return a file's size and checksum, reading all of it, a small part at a time."""
    return _described(path)[0]


def _describe_finite(path: Path) -> StoredFile:
    """Do as `describe`, and raise UserError if weights or moments in it are not finite."""
    if path.match(_ANY_TENSORS) and not path.name.startswith(GRADIENTS):
        check_finite(path)  # which brings the file into memory
    return describe(path)


def _described(path: Path) -> tuple[StoredFile, FileVersion]:
    with open_regular(path) as file:
        version = file_version(file)
        return StoredFile(size=version.size, sha256=hashlib.file_digest(file, "sha256").hexdigest()), version


def _each_described(describe_one: Callable[[Path], T], paths: Sequence[Path]) -> dict[str, T]:
    """Describe files by name, several at a time."""
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as threads:
        return {path.name: found for path, found in zip(paths, threads.map(describe_one, paths), strict=True)}


def read(found: Path) -> Checkpoint:
    """Verify a training or sampler checkpoint, whose tensors are read from its files on access, and not kept.

    If a file is replaced after that, reading from it raises ServerError.

    Raise UnsupportedError if it is an export or was written by a newer tinsmith, and ServerError if a file is missing
    or damaged.
    """
    manifest = read_manifest(found)
    state = _adapter_state(found, manifest) if manifest.lora.rank else _full_state(found, manifest)
    _check_state(state)
    return Checkpoint(
        kind=manifest.kind,
        state=state,
        base_model=manifest.base_model,
        user_metadata=manifest.user_metadata,
        created_at=manifest.created_at,
    )


def _adapter_state(found: Path, manifest: Manifest) -> ModelState:
    """Verify the files of tensors, then return tensors that are read on access."""
    versions = _verified(found, manifest, [name for name in manifest.files if name.endswith(".safetensors")])

    def tensors(file: str) -> StoredTensors:
        return StoredTensors(read_header(found / file) if file in versions else {}).pinned(versions)

    moments = tensors(_OPTIMIZER)
    return ModelState(
        lora=manifest.lora,
        weights=tensors(_WEIGHTS),
        adam_m=moments.renamed(M_PREFIX),
        adam_v=moments.renamed(V_PREFIX),
        gradients=tensors(_GRADIENTS),
        step=manifest.step if manifest.kind == "training" else 0,
    )


def _verified(found: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, FileVersion]:
    """Compare files with the manifest. Return their versions. Raise ServerError if one is not what was written."""
    for name in names:
        if Path(name).name != name:
            msg = f"{MANIFEST} is damaged: it names {name!r}, which is no file in its directory"
            raise ServerError(msg)
        path = found / name
        if path.is_file() and path.stat().st_size != manifest.files[name].size:  # before a hole of terabytes is read
            msg = f"{name} is damaged: {path.stat().st_size} bytes, expected {manifest.files[name].size} bytes"
            raise ServerError(msg)
    actual = _each_described(_describe_whole, [found / name for name in names])
    for name, (stored, _) in actual.items():
        _compare(name, stored, manifest.files[name])
    return {name: version for name, (_, version) in actual.items()}


def _full_state(found: Path, manifest: Manifest) -> ModelState:
    """Verify every file, then return tensors that are read on access."""
    versions = _verified(found, manifest, list(manifest.files))
    for stem in FILES:
        for file in shard_files(found, stem):
            if file.name not in manifest.files:
                msg = f"{file.name} is not listed in {MANIFEST}"
                raise ServerError(msg)
    weights, moments, gradients = (
        StoredTensors.of(found, stem).pinned(versions) for stem in (MODEL, OPTIMIZER, GRADIENTS)
    )
    return ModelState(
        lora=manifest.lora,
        weights=weights,
        adam_m=moments.renamed(M_PREFIX),
        adam_v=moments.renamed(V_PREFIX),
        gradients=gradients,
        step=manifest.step if manifest.kind == "training" else 0,
    )


def read_weights(found: Path) -> tuple[LoraConfig, Mapping[str, Array]]:
    """Read and verify only the weights. Raises the errors of `read`."""
    manifest = read_manifest(found)
    if manifest.lora.rank == 0:
        return manifest.lora, _full_state(found, manifest).weights
    weights = _read_arrays(found, manifest, _WEIGHTS)
    peft_layout.check_weights(manifest.lora, weights)
    return manifest.lora, weights


def read_manifest(found: Path) -> Manifest:
    """Read the manifest. Raise UnsupportedError if a newer tinsmith wrote it, ServerError if it is damaged."""
    path = found / MANIFEST
    if not path.exists() and ((found / ADAPTER_CONFIG).exists() or (found / "config.json").exists()):
        msg = f"this is an export without {MANIFEST}; load a training or sampler checkpoint instead"
        raise UnsupportedError(msg)
    data = _read_bytes(path, MAX_JSON)
    try:
        check_depth(data)
    except ValueError as error:
        msg = f"{MANIFEST} is damaged: {error}"
        raise ServerError(msg) from error
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version > FORMAT_VERSION:
            msg = f"format version {version} is newer than {FORMAT_VERSION}, which this tinsmith reads; upgrade it"
            raise UnsupportedError(msg)
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        msg = f"{MANIFEST} is damaged: {error}"
        raise ServerError(msg) from error
    weights = _WEIGHTS if manifest.lora.rank else f"{MODEL}.safetensors.index.json"
    if weights not in manifest.files:
        msg = f"{MANIFEST} is damaged: it does not list {weights}"
        raise ServerError(msg)
    return manifest


def _read_arrays(found: Path, manifest: Manifest, name: str) -> dict[str, Array]:
    """Read one safetensors file. Return an empty dict if the manifest does not list it."""
    expected = manifest.files.get(name)
    if expected is None:
        return {}
    data = _read_bytes(found / name, expected.size)
    actual = StoredFile(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    _compare(name, actual, expected)
    try:
        arrays: dict[str, Array] = safetensors.numpy.load(data)
    except safetensors.SafetensorError as error:
        msg = f"{name} is damaged: {error}"
        raise ServerError(msg) from error
    return arrays


def _compare(name: str, actual: StoredFile, expected: StoredFile) -> None:
    if actual != expected:
        msg = (
            f"{name} is damaged: {actual.size} bytes with SHA-256 {actual.sha256}, expected {expected.size} bytes with "
            f"{expected.sha256}"
        )
        raise ServerError(msg)


def _describe_whole(path: Path) -> tuple[StoredFile, FileVersion]:
    """Like `describe`, with the file's version, but report a damaged file as a ServerError."""
    if path.is_symlink():
        msg = f"{path.name} is a symbolic link; a checkpoint holds plain files only"
        raise ServerError(msg)
    try:
        return _described(path)
    except FileNotFoundError as error:
        msg = f"{path.name} is missing"
        raise ServerError(msg) from error
    except OSError as error:
        msg = f"{path.name} cannot be read: {error.strerror or error}"
        raise ServerError(msg) from error


def _read_bytes(path: Path, limit: int) -> bytes:
    """Read a file. Raise ServerError if it has more than `limit` bytes, or they do not fit into memory."""
    if path.is_symlink():
        msg = f"{path.name} is a symbolic link; a checkpoint holds plain files only"
        raise ServerError(msg)
    try:
        with open_regular(path) as opened:
            size = file_version(opened).size
            if size > limit:
                msg = f"{path.name} is damaged: {size} bytes, expected at most {limit}"
                raise ServerError(msg)
            return opened.read()
    except MemoryError as error:
        msg = f"{path.name} cannot be read: its {size} bytes do not fit into memory"
        raise ServerError(msg) from error
    except FileNotFoundError as error:
        msg = f"{path.name} is missing"
        raise ServerError(msg) from error
    except OSError as error:
        msg = f"{path.name} cannot be read: {error.strerror or error}"
        raise ServerError(msg) from error
