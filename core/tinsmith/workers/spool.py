"""Tensors of a model too large for any process's memory, kept on disk between writers and readers.

The workers' rows go into one file as they arrive. A reader, such as a checkpoint writer or a sampler, takes one tensor
at a time. The file has no name, so it disappears with its last holder, however that one ends.
"""

import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from tinsmith.errors import ServerError
from tinsmith.operations import Array, FloatArray

Kind = Literal["weights", "adam_m", "adam_v", "gradients"]
"""The tensors of a model's training state, as ModelState names them."""

_ITEM: Final = 4  # bytes of a float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some rows of a worker's part of one tensor."""

    kind: Kind
    name: str
    start: int  # the first row
    columns: tuple[int, int] | None  # None: all
    values: FloatArray


class Spool:
    """Room for the tensors of `shapes`, once per kind. Written by one thread; afterwards any thread may read.

    If the disk refuses, reading raises but writing does not: training never depends on the spool.
    """

    def __init__(self, directory: Path, kinds: tuple[Kind, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._file, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)  # noqa: PTH108  (a str, and nothing to learn from a Path)
        weakref.finalize(self, os.close, self._file)
        self._offsets: dict[tuple[Kind, str], int] = {}
        self._refusal: OSError | None = None
        end = 0
        for kind in kinds:
            for name, shape in shapes.items():
                self._offsets[kind, name] = end
                end += math.prod(shape) * _ITEM

    def put(self, piece: Piece) -> None:
        """Write rows at their place."""
        if self._refusal is not None:
            return
        row = math.prod(self._shapes[piece.name][1:]) * _ITEM
        offset = self._offsets[piece.kind, piece.name] + piece.start * row
        try:
            if piece.columns is None:
                self._write(piece.values, offset)
            else:
                for number, values in enumerate(piece.values):
                    self._write(values, offset + number * row + piece.columns[0] * _ITEM)
        except OSError as error:
            self._refusal = error

    def _write(self, values: FloatArray, offset: int) -> None:
        left = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        while left:
            written = os.pwrite(self._file, left, offset)
            left, offset = left[written:], offset + written

    def read(self, kind: Kind, name: str) -> FloatArray:
        """Raise ServerError if a write has failed."""
        if self._refusal is not None:
            msg = f"the model's state could not be kept on disk: {self._refusal.strerror or self._refusal}"
            raise ServerError(msg) from self._refusal
        values: FloatArray = np.empty(self._shapes[name], np.float32)
        left, offset = values.reshape(-1).view(np.uint8).data, self._offsets[kind, name]
        while left:
            count = os.preadv(self._file, [left], offset)
            assert count, "the file is shorter than the data written"
            left, offset = left[count:], offset + count
        return values

    def tensors(self, kind: Kind) -> Mapping[str, Array]:
        return _Tensors(self, kind, self._shapes)


class _Tensors(Mapping[str, Array]):
    """The tensors of one kind. Each is read on access, and not kept."""

    def __init__(self, spool: Spool, kind: Kind, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._spool, self._kind, self._shapes = spool, kind, shapes

    def __getitem__(self, name: str) -> FloatArray:
        if name not in self._shapes:
            raise KeyError(name)
        return self._spool.read(self._kind, name)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
