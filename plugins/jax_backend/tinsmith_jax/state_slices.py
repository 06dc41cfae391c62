"""A process's part of an adapter on a mesh: which slices of the canonical tensors it writes, and which it reads.

Arrays are divided along the inputs of A or the outputs of B; those that are not lie on several devices. Each of these
writes some of the layers, so that all processes write about as much.

An array is [..., in, r] for A and [..., r, out] for B, where r is the padded rank. A canonical matrix is the transpose,
cut to the adapter's rank.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import jax
import numpy as np

from tinsmith import Array, FloatArray, LoraConfig
from tinsmith_checkpoints.huggingface import Kind, StoredTensor
from tinsmith_jax import adapters
from tinsmith_jax.adapters import Adapter, Location
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.mesh import Index, MeshLayout, bounds, put_parts
from tinsmith_jax.model_config import ModelConfig
from tinsmith_workers import Slice

_PIECE: Final = 1 << 20  # numbers of a slice, about
_ITEM: Final = 4  # bytes of a float32

_Tensors = Sequence[tuple[Location, StoredTensor]]
"""Canonical tensors of one array, and where they lie in it."""


def slices(
    kind: Kind, adapter: Adapter, lora: LoraConfig, config: ModelConfig, targets: Mapping[str, StoredTensor]
) -> Iterator[Slice]:
    """List what this process writes. Arrays are kept until all of them is read."""
    for tensors in _by_array(lora, config, targets).values():
        array = tensors[0][0].leaf_of(adapter)
        for shard in array.addressable_shards:
            replica, replicas = _replica(array, shard)
            own = [(location, target) for location, target in tensors if location.layer % replicas == replica]
            yield from _of_shard(kind, shard, list(_matrices(own, shard.index, array.shape, lora.rank)))


def read(
    stored: Mapping[str, StoredTensor],
    lora: LoraConfig,
    config: ModelConfig,
    padded_rank: int,
    layout: MeshLayout,
    specs: Jax,
) -> Adapter:
    """Read an adapter onto a mesh, the part of each device by itself. `specs` say how it is divided."""
    shapes, by_array = adapters.shapes(config, padded_rank), _by_array(lora, config, stored)

    def array(module: str, side: int) -> Jax:
        location = Location(module, side, 0)
        shape, tensors = location.leaf_of(shapes).shape, by_array.get((module, side), ())
        return put_parts(shape, layout, location.leaf_of(specs), partial(_filled, tensors, shape, lora.rank))

    layers = {module: (array(module, 0), array(module, 1)) for module in shapes["layers"]}
    return {"layers": layers, "head": (array("head", 0), array("head", 1))}


def _by_array(
    lora: LoraConfig, config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> Mapping[tuple[str, int], _Tensors]:
    """Group tensors by the module and side of the array that holds them."""
    found: dict[tuple[str, int], list[tuple[Location, StoredTensor]]] = {}
    for name, location in adapters.locations(lora, config).items():
        found.setdefault((location.module, location.side), []).append((location, stored[name]))
    return found


def _replica(array: Jax, shard: Jax) -> tuple[int, int]:
    """Return which of the devices with the same part this one is, and how many they are."""
    found = array.sharding.devices_indices_map(array.shape).items()
    same = sorted(device.id for device, index in found if index == shard.index)
    return same.index(shard.device.id), len(same)


# Writing --------------------------------------------------------------------------------------------------------------


def _of_shard(kind: Kind, shard: Jax, matrices: Sequence["_Matrix"]) -> Iterator[Slice]:
    pieces = [(matrix, rows) for matrix in matrices for rows in matrix.pieces()]
    on_host = _OnHost(shard.data, len(pieces))
    for matrix, rows in pieces:
        yield Slice(
            kind=kind,
            target=matrix.target,
            start=matrix.start + rows.start,
            columns=matrix.columns,
            num_bytes=(rows.stop - rows.start) * matrix.num_columns * _ITEM,
            read=partial(on_host.read, matrix.indices(rows)),
        )


class _OnHost:
    """A shard, copied to the host at the first of `readings`, and released after the last. Jax thread may read."""

    def __init__(self, shard: Jax, readings: int) -> None:
        self._shard = shard
        self._left = readings
        self._copy: Array | None = None
        self._lock = threading.Lock()

    def read(self, index: tuple[Jax, ...]) -> FloatArray:
        with self._lock:
            if self._copy is None:
                self._copy = _copied(self._shard)
            values: FloatArray = np.ascontiguousarray(self._copy[index].T)
            self._left -= 1
            if self._left == 0:
                self._shard = self._copy = None
            return values


def _copied(shard: Jax) -> Array:
    """Copy to the host by way of another array with the same buffer: JAX keeps an array's copy as long as the array."""
    again = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    return np.asarray(again)


# Reading --------------------------------------------------------------------------------------------------------------


def _filled(tensors: _Tensors, shape: tuple[int, ...], rank: int, index: Index) -> Array:
    """Read the part of an array that `index` selects."""
    part = np.zeros([cut.stop - cut.start for cut in bounds(index, shape)], np.float32)
    for matrix in _matrices(tensors, index, shape, rank):
        columns = slice(None) if matrix.columns is None else slice(*matrix.columns)
        for rows in matrix.pieces():
            found = matrix.target.load_rows(matrix.start + rows.start, matrix.start + rows.stop)
            part[matrix.indices(rows)] = found[:, columns].T
    return part


# Matrices -------------------------------------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """A shard's part of a canonical matrix."""

    target: StoredTensor
    outer: tuple[int, ...]  # where it is in the shard: the layer, and the expert
    inner: slice  # its columns there
    start: int  # its first row
    num_rows: int
    columns: tuple[int, int] | None  # None: all

    @property
    def num_columns(self) -> int:
        return int(self.inner.stop) - int(self.inner.start)

    def pieces(self) -> Iterator[slice]:
        """Divide the rows."""
        height = max(1, _PIECE // self.num_columns)
        for start in range(0, self.num_rows, height):
            yield slice(start, min(start + height, self.num_rows))

    def indices(self, rows: slice) -> tuple[Jax, ...]:
        """Return where these rows lie in the shard, transposed."""
        return (*self.outer, self.inner, rows)


def _matrices(tensors: _Tensors, index: Index, shape: tuple[int, ...], rank: int) -> Iterator[_Matrix]:
    *outer, rows, columns = bounds(index, shape)
    for location, tensor in tensors:
        layer = () if location.module == "head" else (location.layer,)
        for at, target in _of_experts(tensor, outer[1:]):
            if location.side == 0:
                inputs = (rows.start, rows.stop)
                own = None if inputs == (0, shape[-2]) else inputs
                yield _Matrix(target, (*layer, *at), slice(0, rows.stop - rows.start), 0, rank, own)
            else:
                outputs = columns.stop - columns.start
                yield _Matrix(target, (*layer, *at), slice(0, rank), columns.start, outputs, None)


def _of_experts(tensor: StoredTensor, experts: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], StoredTensor]]:
    """Take a tensor [experts, ...] apart: one matrix, or one for each expert if the array has them."""
    if len(tensor.shape) == 2:
        yield (), tensor
        return
    size = tensor.num_bytes // tensor.shape[0]
    for expert in range(experts[0].start, experts[0].stop) if experts else (0,):
        matrix = replace(tensor, shape=tensor.shape[1:], start=tensor.start + expert * size, num_bytes=size)
        yield (expert - experts[0].start,) if experts else (), matrix
