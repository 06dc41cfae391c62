"""Safetensors files read and written one tensor at a time, in shards, in the dtypes that language models come in.

The `safetensors` package writes a file from a dict that holds all of it, and its NumPy API has no bfloat16. Neither
suits models that barely fit in memory. Format: https://huggingface.co/docs/safetensors, metadata parsing.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tinsmith_checkpoints.errors import ServerError
from tinsmith_checkpoints.huggingface import fp8, int4, int8
from tinsmith_checkpoints.huggingface.fields import announce
from tinsmith_checkpoints.huggingface.outside_files import open_regular, parse_json, pointer_fault, read_json
from tinsmith_checkpoints.huggingface.weight_fields import INDEX_FIELDS, METADATA_FIELDS
from tinsmith_checkpoints.values import Array, FloatArray, Json

DTYPES: Final[Mapping[str, tuple[str, str]]] = {
    "float32": ("F32", "<f4"),
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
}
"""By dtype: its name in the format, and the array dtype that holds its bytes."""

_STORED: Final = dict(DTYPES.values())
_MAX_HEADER: Final = 100_000_000  # bytes, the limit of the safetensors package
_MOST_ELEMENTS: Final = 1 << 36
"""Of a tensor, where a size of zero counts as one: without elements, it could still have any other size."""
_HEADER_PER_TENSOR: Final = 200  # bytes in addition to the name: dtype, shape, two offsets
_CHUNK: Final = 1 << 24  # elements converted at a time


class FileVersion(NamedTuple):
    """Tells a file from one that takes its place. Inodes would, too, but some file systems number them per machine."""

    size: int
    modified_ns: int


def file_version(opened: BinaryIO) -> FileVersion:
    found = os.fstat(opened.fileno())
    return FileVersion(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The location of a tensor. `dtype` is the format's name, such as BF16."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int
    version: "FileVersion | None" = None  # of the file that was verified: another one is not read

    def load(self) -> FloatArray:
        """Read the tensor as float32.

        Raise ServerError if its dtype is unknown, or if the file is truncated or has been replaced.
        """
        return self._read(0, math.prod(self.shape)).reshape(self.shape)

    def load_rows(self, start: int, stop: int) -> FloatArray:
        """Read some rows, like `load`. The tensor must have at least one dimension."""
        row = math.prod(self.shape[1:])
        return self._read(start * row, (stop - start) * row).reshape(stop - start, *self.shape[1:])

    def _read(self, first: int, count: int) -> FloatArray:
        if self.dtype not in _STORED:
            msg = f"{self.file.name}: tensor {self.name!r} is {self.dtype}; known are {', '.join(sorted(_STORED))}"
            raise ServerError(msg)
        return _from_stored(self._raw(first, count, np.dtype(_STORED[self.dtype])), self.dtype)

    def load_packed(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Read some rows of an int32 tensor as they are. Raise ServerError as `load` does."""
        row = math.prod(self.shape[1:])
        return self._raw(start * row, (stop - start) * row, np.dtype("<i4")).reshape(stop - start, *self.shape[1:])

    def load_bytes(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Read some rows of numbers of one byte as they are. Raise ServerError as `load` does."""
        row = math.prod(self.shape[1:])
        return self._raw(start * row, (stop - start) * row, np.dtype("u1")).reshape(stop - start, *self.shape[1:])

    def load_integers(self) -> list[int]:
        """Read a small tensor of int64 or int32."""
        stored = np.dtype("<i4" if self.dtype == "I32" else "<i8")
        return [int(number) for number in self._raw(0, math.prod(self.shape), stored)]

    def _raw(self, first: int, count: int, stored: np.dtype[Any]) -> npt.NDArray[Any]:
        whole = math.prod(self.shape) * stored.itemsize == self.num_bytes
        try:
            with open_regular(self.file) as opened:
                if not whole or os.fstat(opened.fileno()).st_size < self.start + self.num_bytes:
                    msg = f"{self.file.name} is damaged: tensor {self.name!r} is cut short"
                    raise ServerError(msg)
                replaced = self.version is not None and file_version(opened) != self.version
                raw = np.fromfile(opened, stored, count, offset=self.start + first * stored.itemsize)
        except OSError as error:
            msg = f"{self.file.name} cannot be read: {error.strerror or error}"
            raise ServerError(msg) from error
        except MemoryError as error:
            msg = f"{self.file.name}: tensor {self.name!r} of {self.num_bytes} bytes does not fit into memory"
            raise ServerError(msg) from error
        if replaced:
            msg = f"{self.file.name} has been replaced since it was verified; try again"
            raise ServerError(msg)
        if raw.size != count:
            msg = f"{self.file.name} is damaged: tensor {self.name!r} is cut short"
            raise ServerError(msg)
        return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Tensor(StoredTensor):
    """A matrix of 8-bit integers: what its tensors stand for, as if it were stored in the dtype of its scales."""

    packed: StoredTensor
    scale: StoredTensor

    def load(self) -> FloatArray:
        return self.load_rows(0, self.shape[0])

    def load_rows(self, start: int, stop: int) -> FloatArray:
        columns = slice(0, self.shape[1])
        integers = int8.unpacked(self.packed.load_packed(start, stop), columns)
        return int8.dequantised(integers, self.scale.load_rows(start, stop), columns, self.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Tensor(Int8Tensor):
    """A matrix of 4-bit integers, likewise."""

    def load_rows(self, start: int, stop: int) -> FloatArray:
        integers = int4.unpacked(self.packed.load_packed(start, stop), self.shape[1])
        return int8.dequantised(integers, self.scale.load_rows(start, stop), slice(0, self.shape[1]), self.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tensor(StoredTensor):
    """A matrix of 8-bit floating-point numbers: the matrix that it represents, as if it were stored in bfloat16."""

    numbers: StoredTensor
    scale: StoredTensor

    def load(self) -> FloatArray:
        return self.load_rows(0, self.shape[0])

    def load_rows(self, start: int, stop: int) -> FloatArray:
        return fp8.dequantised(self.numbers.load_bytes(start, stop), self.scale.load(), start)


def read_header(file: Path, *, exact: bool = False) -> dict[str, StoredTensor]:
    """List the tensors of a file. Raise ServerError if it is not a complete safetensors file.

    `exact`: nothing may follow the last tensor, which the safetensors package refuses.
    """
    try:
        if (pointer := pointer_fault(file)) is not None:
            msg = f"{file.name} {pointer}"
            raise ServerError(msg)
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            (length,) = struct.unpack("<Q", opened.read(8))
            header: Any = parse_json(opened.read(length)) if length <= min(_MAX_HEADER, size) else None
    except FileNotFoundError as error:
        msg = f"{file.name} is missing"
        raise ServerError(msg) from error
    except (OSError, ValueError, struct.error) as error:
        msg = f"{file.name} is not a safetensors file, or is damaged: {error}"
        raise ServerError(msg) from error
    if not isinstance(header, dict):
        msg = f"{file.name} is not a safetensors file, or is damaged: its header is not readable"
        raise ServerError(msg)
    metadata = header.pop("__metadata__", None)
    for refusal in METADATA_FIELDS.refusals(metadata if isinstance(metadata, dict) else {}):
        msg = f"{file.name}: {refusal}"
        raise ServerError(msg)
    found = {name: _stored_tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((each.start + each.num_bytes for each in found.values()), default=8 + length)
    if size < end or (exact and size > end):
        how = "it is cut short" if size < end else "something follows its last tensor"
        msg = f"{file.name} is damaged: {how}: it has {size} bytes, and its header says {end}"
        raise ServerError(msg)
    return found


def _stored_tensor(file: Path, name: str, entry: Json, data_start: int) -> StoredTensor:
    try:
        start, end = map(int, entry["data_offsets"])
        if not 0 <= start <= end or any(int(size) < 0 for size in entry["shape"]):
            msg = "its place or its shape is negative"
            raise ValueError(msg)  # noqa: TRY301 - reported below
        if math.prod(int(size) or 1 for size in entry["shape"]) > _MOST_ELEMENTS:
            msg = "no tensor has such a shape"
            raise ValueError(msg)  # noqa: TRY301 - reported below
        return StoredTensor(
            name=name,
            file=file,
            dtype=str(entry["dtype"]),
            shape=tuple(int(size) for size in entry["shape"]),
            start=data_start + start,
            num_bytes=end - start,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        msg = f"{file.name} is damaged: the header entry of {name!r} is not readable"
        raise ServerError(msg) from error


def _complete() -> None:
    pass


class StoredTensors(Mapping[str, Array]):
    """The tensors of one or more files. Each is read as float32 on access, and not kept."""

    def __init__(self, stored: Mapping[str, StoredTensor], *, wait: Callable[[], None] = _complete) -> None:
        """`wait` returns when the files are complete, or raises ServerError; it is called before each reading."""
        self.stored = dict(stored)
        self.wait = wait

    @classmethod
    def of(cls, directory: Path, stem: str) -> Self:
        """Open `<stem>.safetensors` or the shards listed in `<stem>.safetensors.index.json`; else empty.

        A matrix of 8-bit or 4-bit numbers is listed as the matrix that it represents.
        """
        found = {name: tensor for file in shard_files(directory, stem) for name, tensor in read_header(file).items()}
        return cls(_with_fp8(_with_integers(found)))

    def __getitem__(self, name: str) -> Array:
        tensor = self.stored[name]
        self.wait()
        return tensor.load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def files(self) -> set[Path]:
        return {tensor.file for tensor in self.stored.values()}

    def pinned(self, versions: Mapping[str, FileVersion]) -> "StoredTensors":
        """Return the tensors, to be read from these versions of their files alone, which are given by name."""
        found = {name: replace(each, version=versions[each.file.name]) for name, each in self.stored.items()}
        return StoredTensors(found, wait=self.wait)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def renamed(self, prefix: str) -> "StoredTensors":
        """Return the tensors whose names start with `prefix`, with the prefix removed."""
        found = {name.removeprefix(prefix): each for name, each in self.stored.items() if name.startswith(prefix)}
        return StoredTensors(found, wait=self.wait)


def _with_integers(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Put one entry in the place of each matrix's three."""
    whole = {name: packed_tensor(name, found) for name in int8.quantised_matrices(found)}
    parts = {f"{name}{end}" for name in whole for end in (int8.PACKED, int8.SCALE, int8.SHAPE)}
    return {name: tensor for name, tensor in found.items() if name not in parts} | whole


def _with_fp8(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    whole = {name: fp8_tensor(found[name], found[f"{name}{fp8.SCALE}"]) for name in fp8.quantised_matrices(found)}
    scales = {f"{name}{fp8.SCALE}" for name in whole}
    return {name: tensor for name, tensor in found.items() if name not in scales} | whole


def fp8_tensor(numbers: StoredTensor, scale: StoredTensor) -> Fp8Tensor:
    """Join the two. Raise ServerError if they do not fit."""
    if numbers.dtype != fp8.DTYPE or len(numbers.shape) != 2 or scale.shape != fp8.num_scales(numbers.shape):
        msg = (
            f"{numbers.file.name}: {numbers.name} is stored as {numbers.dtype} {list(numbers.shape)} with scales "
            f"{list(scale.shape)}; it must be {fp8.DTYPE} with a scale for each {fp8.BLOCK} x {fp8.BLOCK} block"
        )
        raise ServerError(msg)
    return Fp8Tensor(
        name=numbers.name,
        file=numbers.file,
        dtype="BF16",
        shape=numbers.shape,
        start=numbers.start,
        num_bytes=2 * numbers.num_bytes,
        numbers=numbers,
        scale=scale,
    )


def packed_tensor(name: str, found: Mapping[str, StoredTensor]) -> Int8Tensor:
    """Join the three of `found`. Raise ServerError if they do not fit."""
    packed, scale = found[f"{name}{int8.PACKED}"], found[f"{name}{int8.SCALE}"]
    try:
        rows, columns = found[f"{name}{int8.SHAPE}"].load_integers()
    except KeyError as error:
        msg = f"{packed.file.name} is damaged: {name}{int8.SHAPE} is missing"
        raise ServerError(msg) from error
    kinds: dict[tuple[int, ...], type[Int8Tensor]]
    kinds = {(rows, -(-columns // int4.EACH)): Int4Tensor, (rows, -(-columns // 4)): Int8Tensor}
    made = kinds.get(packed.shape)
    if packed.dtype != "I32" or made is None or scale.shape[:1] != (rows,):
        msg = (
            f"{packed.file.name}: {name} is stored as {packed.dtype} {list(packed.shape)} with scales "
            f"{list(scale.shape)}; 8-bit integers of its shape {[rows, columns]} are I32 {[rows, -(-columns // 4)]} "
            f"with scales for each of the {rows} rows, and 4-bit integers half as wide"
        )
        raise ServerError(msg)
    return made(
        name=name,
        file=packed.file,
        dtype=scale.dtype,
        shape=(rows, columns),
        start=packed.start,
        num_bytes=columns * scale.num_bytes // scale.shape[1],
        packed=packed,
        scale=scale,
    )


def tensor_files(directory: Path, stem: str) -> dict[str, Path]:
    """Map each tensor of a set to its file; empty if the directory has no such files."""
    single, index = _single_and_index(directory, stem)
    if single.exists():
        return dict.fromkeys(read_header(single), single)
    return {name: directory / file for name, file in _weight_map(index).items()} if index.exists() else {}


def shard_files(directory: Path, stem: str) -> list[Path]:
    """List the files of a set of tensors, in order; empty if the directory has none."""
    single, index = _single_and_index(directory, stem)
    if single.exists():
        return [single]
    return [directory / file for file in sorted(set(_weight_map(index).values()))] if index.exists() else []


def _single_and_index(directory: Path, stem: str) -> tuple[Path, Path]:
    return directory / f"{stem}.safetensors", index_file(directory, stem)


def index_file(directory: Path, stem: str) -> Path:
    """Return the path of the index of a set of shards."""
    return directory / f"{stem}.safetensors.index.json"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = read_json(index)
        found = {name: str(file) for name, file in content["weight_map"].items()}
        announce(index, INDEX_FIELDS.unknown(content))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{index.name} is damaged: {error}"
        raise ServerError(msg) from error
    if any("/" in file or file.startswith(".") for file in found.values()):
        msg = f"{index.name} is damaged: it names files outside its directory"
        raise ServerError(msg)
    return found


def shard_name(stem: str, number: int, of: int) -> str:
    """Return the name of a shard, counted from 0."""
    return f"{stem}-{number + 1:05}-of-{of:05}.safetensors"


def write_index(directory: Path, stem: str, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of shards: the file of each tensor."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(weight_map)}
    path = index_file(directory, stem)
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def encode_header(entries: Mapping[str, Json], room: int = 0) -> bytes:
    """Return the start of a file: the length of its header, and the header, padded to `room` bytes."""
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    room = room or len(header) + -len(header) % 8
    assert len(header) <= room
    return struct.pack("<Q", room) + header.ljust(room)


class ShardWriter:
    """Writes tensors as they arrive to `<stem>-00001-of-0000N.safetensors` and an index, like transformers.

    Holds at most one tensor in memory. Files get their final names at the end, when the number of shards is known.
    """

    def __init__(
        self, directory: Path, stem: str, names: Collection[str], *, shard_bytes: int, dtype: str = "float32"
    ) -> None:
        """`names` lists all tensors that may be added; each header reserves room for all of them."""
        self._directory = directory
        self._stem = stem
        self._shard_bytes = shard_bytes
        self._dtype = dtype
        self._room = sum(len(json.dumps(name)) + _HEADER_PER_TENSOR for name in names) + 100
        self._room += -self._room % 8
        self._shards: list[list[str]] = []
        self._file: BinaryIO | None = None
        self._header: dict[str, Json] = {}
        self._end = 0
        self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            self._file.close()

    def add(self, name: str, array: Array) -> None:
        """Append one tensor, in the writer's dtype."""
        kind, stored = DTYPES[self._dtype]
        size = array.size * np.dtype(stored).itemsize
        if self._file is not None and self._end and self._end + size > self._shard_bytes:
            self._close_shard()
        if self._file is None:
            self._file = self._part(len(self._shards)).open("wb")
            self._file.write(bytes(8 + self._room))
        self._header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [self._end, self._end + size]}
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            _to_stored(flat[start : start + _CHUNK], self._dtype).tofile(self._file)
        self._end += size
        self._total += size

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.write(encode_header(self._header, self._room))
        self._file.close()
        self._shards.append(list(self._header))
        self._file, self._header, self._end = None, {}, 0

    def _finish(self) -> None:
        if self._file is not None:
            self._close_shard()
        if not self._shards:
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = shard_name(self._stem, number, len(self._shards))
            self._part(number).rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        write_index(self._directory, self._stem, weight_map, self._total)

    def _part(self, number: int) -> Path:
        return self._directory / f"{self._stem}-part-{number:05}"


def _from_stored(raw: npt.NDArray[Any], dtype: str) -> FloatArray:
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def _to_stored(flat: Array, dtype: str) -> npt.NDArray[Any]:
    values = flat.astype("<f4", copy=False)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # may be infinite in float16; `verify` reports that
            return values.astype(DTYPES[dtype][1], copy=False)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype("<u2")
