"""Snapshots in files for the vLLM process: one directory for each that is loaded.

Those of fully trained models always are, and adapters where they cannot be passed on in memory (`memory.py`).

An adapter that vLLM applies is a PEFT directory, with the experts' adapters in the layout of its
`enable_moe_shared_loras`, which is ours. One that is merged comes with a list of the base weights that it changes. A
fully trained model is shards of all its weights.
"""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from tinsmith import Array, ServerError, Snapshot, UnsupportedError, are_finite
from tinsmith.machine import Scratch
from tinsmith_checkpoints.huggingface import HEAD, Delta, Place, ShardWriter, adapter_config, deltas
from tinsmith_vllm.messages import ADAPTER, CHANGES, CONFIG, Changes

_SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "tinsmith-vllm-"
_HEAD, _EMBEDDING = f"{HEAD}.weight", "model.embed_tokens.weight"
_SHARD_BYTES: Final = 2 << 30


class AdapterFiles:
    """A private directory of this process. At the start, it removes the leftovers of killed processes."""

    def __init__(self, configured: Path | None, fallback: Path, ids: Iterator[int] | None = None) -> None:
        parent = configured or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else fallback)
        self._scratch = Scratch(_PREFIX, parent)
        self._ids = count(1) if ids is None else ids  # never reused: vLLM's caches are keyed by it

    def write(self, snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        """Return a new id and the directory. Copies the weights to the host if they are on the trainer's device."""
        with self._fresh() as (adapter_id, directory):
            weights = _write_adapter(snapshot, directory)
            config = adapter_config(base_model, snapshot.lora, weights)
            (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return adapter_id, directory

    def write_changes(self, snapshot: Snapshot, base: Mapping[str, Place]) -> tuple[int, Path]:
        """Do as `write`, for merging. `base` has the places of the base model's weights.

        Raise UnsupportedError if the adapter does not fit them.
        """
        with self._fresh() as (adapter_id, directory):
            weights = _write_adapter(snapshot, directory)
            content = changes_of(snapshot, weights, base)
            (directory / CHANGES).write_text(json.dumps(content), encoding="utf-8")
        return adapter_id, directory

    def write_all(self, snapshot: Snapshot, base: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[int, Path]:
        """Write all weights of a fully trained model, in vLLM's dtype.

        Raise UnsupportedError if they do not fit, DivergedError if they are not finite.
        """
        with self._fresh() as (adapter_id, directory):
            weights = snapshot.adapter_weights()
            if missing := sorted(base.keys() - weights.keys() - {_HEAD}):
                msg = f"snapshot {snapshot.snapshot_id!r} has no {missing[0]!r} ({len(missing)} such)"
                raise UnsupportedError(msg)
            each = np.dtype(np.float32).itemsize if dtype == "float32" else 2
            _check_room(snapshot.snapshot_id, directory, each * sum(math.prod(shape) for shape in base.values()))
            with ShardWriter(directory, "model", list(weights), shard_bytes=_SHARD_BYTES, dtype=dtype) as writer:
                for name in weights:
                    array = weights[name]
                    _check_shapes(snapshot.snapshot_id, {name: array.shape}, base)
                    _expect_finite({name: array})
                    writer.add(name, array)
        return adapter_id, directory

    @contextmanager
    def _fresh(self) -> Iterator[tuple[int, Path]]:
        """Make a directory for the block to fill, under a new id. Remove it if the block fails."""
        adapter_id = next(self._ids)
        directory = self._scratch.path / str(adapter_id)
        directory.mkdir()
        try:
            yield adapter_id, directory
        except BaseException:
            self.remove(directory)
            raise

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        self._scratch.close()


class DivergedError(Exception):
    """The weights are not finite: vLLM is not told of them."""


def arrays_of(snapshot: Snapshot) -> dict[str, Array]:
    """Return an adapter's weights on the host, as float32. Raise DivergedError if they are not finite."""
    weights = snapshot.adapter_weights()
    arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
    _expect_finite(arrays)
    return arrays


def _expect_finite(arrays: Mapping[str, Array]) -> None:
    if not are_finite(arrays):
        raise DivergedError


def changes_of(snapshot: Snapshot, arrays: Mapping[str, Array], base: Mapping[str, Place]) -> Changes:
    """Return which base weights an adapter changes. Raise UnsupportedError if it does not fit them."""
    changes = deltas({name: array.shape for name, array in arrays.items()})
    shapes = {name: _shape_of(change, arrays) for name, change in changes.items()}
    _check_shapes(snapshot.snapshot_id, shapes, {name: place.shape for name, place in base.items()})
    found = defaultdict[str, list[list[Any]]](list)
    for name, each in changes.items():
        place = base.get(name, Place(name, shapes[name]))  # the head of a tied model has none
        factors = [each.A, each.index_A, each.B, each.index_B]
        found[place.tensor].append([*factors, _part(place.index), place.transposed])
    return Changes(scale=snapshot.lora.scale, changes=dict(found), embedding=base[_EMBEDDING].tensor)


def _part(index: Any) -> list[Any]:
    """Return what a place's index is in `Changes`. Any: JSON."""
    if index is ...:
        return []
    return [_axis(each) for each in (index if isinstance(index, tuple) else (index,))]


def _axis(entry: Any) -> Any:
    if isinstance(entry, slice):
        return [entry.start, entry.stop, entry.step]
    if isinstance(entry, int):
        return entry
    runs = np.split(entry, np.flatnonzero(np.diff(entry) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs]


def _write_adapter(snapshot: Snapshot, directory: Path) -> Mapping[str, Array]:
    arrays = arrays_of(snapshot)
    _check_room(snapshot.snapshot_id, directory, sum(array.nbytes for array in arrays.values()))
    save_file(arrays, directory / ADAPTER)
    return arrays


def _check_room(snapshot_id: str, directory: Path, num_bytes: int) -> None:
    """Raise ServerError if the disk or shared memory has no room. The usual 64 MiB of a container are soon full."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        msg = (
            f"no room for snapshot {snapshot_id!r} where vllm reads it: it takes {num_bytes / 2**20:.1f} MiB, "
            f"{free / 2**20:.1f} MiB are free; give the container more shared memory (docker run --shm-size), or set "
            "the sampler's shared_memory_dir to another directory"
        )
        raise ServerError(msg)


def _shape_of(change: Delta, weights: Mapping[str, Array]) -> tuple[int, ...]:
    A, B = change.factors(weights)
    return B.shape[0], A.shape[1]


def _check_shapes(snapshot_id: str, shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> None:
    head = base.get(_HEAD, base.get(_EMBEDDING))
    for name, shape in shapes.items():
        expected = head if name == _HEAD else base.get(name)
        if shape != expected:
            found = "has no such weight" if expected is None else f"has {list(expected)}"
            msg = f"snapshot {snapshot_id!r} has {name!r} of the shape {list(shape)}; the base model {found}"
            raise UnsupportedError(msg)
