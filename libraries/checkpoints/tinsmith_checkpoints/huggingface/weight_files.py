"""Reads the weights of a base model tensor by tensor with the safetensors package, as arrays of any framework."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from tinsmith_checkpoints.errors import ConfigError, ServerError
from tinsmith_checkpoints.huggingface import fp8, mxfp4
from tinsmith_checkpoints.huggingface.int8 import PACKED, SCALE, SHAPE, Int8, dequantised, packed_columns, unpacked
from tinsmith_checkpoints.huggingface.language_part import decoder_names
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.huggingface.outside_files import pointer_fault
from tinsmith_checkpoints.huggingface.places import Place, weight_places
from tinsmith_checkpoints.huggingface.safetensors_files import (
    StoredTensor,
    fp8_tensor,
    packed_tensor,
    read_header,
    tensor_files,
)

_FLOATS: Final = frozenset({"BF16", "F16", "F32", "F64"})
_INTEGERS: Final = (PACKED, SCALE, SHAPE, mxfp4.BLOCKS, mxfp4.SCALES)
"""How the names end that hold parts of quantised weights."""

# Any below: the arrays of the framework, and safetensors' handles, which are untyped.


class WeightFiles(AbstractContextManager["WeightFiles"]):
    """The safetensors files of a model directory: one, or shards with an index. Each is opened once, on first use.

    Of a model that also sees or hears, these are the tensors of the language part, named as if it stood alone. A weight
    of a module that files hold in a tensor with others, such as one expert's matrix, can be read as well.

    Every error is a ConfigError that names the directory or file, and the tensor.
    """

    def __init__(self, directory: Path, *, framework: Literal["numpy", "pt"], int8: Int8 | None = None) -> None:
        """Matrices in FP8 or INT4, with `numpy` MXFP4, with `int8` 8-bit integers, are read as NumPy's float32."""
        self._directory = directory
        self._framework = framework
        self._int8 = int8
        self._handles: dict[Path, Any] = {}
        self._headers: dict[Path, Mapping[str, StoredTensor]] = {}
        self._open = ExitStack()
        try:
            found = tensor_files(directory, "model")
        except ServerError as error:
            msg = f"{str(directory)!r}: the weight files cannot be read: {error}"
            raise ConfigError(msg) from error
        self._stored = decoder_names(found)
        self._paths = found
        self._files = {name: found[stored] for name, stored in self._stored.items()}
        if not found:
            msg = f"{str(directory)!r} has neither model.safetensors nor model.safetensors.index.json"
            raise ConfigError(msg)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor, as it is stored."""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is there, as it is stored."""
        return tuple(self._slice(self._files[name], self._stored[name]).get_shape())

    def whole(self, name: str, shape: tuple[int, ...]) -> Any:
        """Read a tensor, which must have the given shape."""
        return self.part(name, shape, ())

    def part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> Any:
        """Read the rows, or rows and columns, of a tensor whose whole shape must be the given one."""
        if self._int8 is not None and name not in self._files and f"{name}{PACKED}" in self._files:
            return self._dequantised(name, shape, cut, self._int8)
        if self._framework == "numpy" and name not in self._files and f"{name}{mxfp4.BLOCKS}" in self._files:
            return self._of_mxfp4(name, shape, cut)
        if f"{name}{fp8.SCALE}" in self._files:
            return self._of_parts(name, shape, cut, ("", fp8.SCALE), lambda found: fp8_tensor(*found.values()))
        if self._int8 is None and f"{name}{PACKED}" in self._files:
            return self._of_parts(name, shape, cut, (PACKED, SCALE, SHAPE), lambda found: packed_tensor(name, found))
        return self._read(name, shape, cut)

    def _of_parts(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[slice, ...],
        ends: Sequence[str],
        join: Callable[[Mapping[str, StoredTensor]], StoredTensor],
    ) -> Any:
        """Read some rows of the matrix that tensors with these ends of names make up, and cut the rest."""
        file = self._files[name + ends[0]]
        try:
            parts = [name + end for end in ends if name + end in self._files]
            found = join({each: self._header(self._files[each])[self._stored[each]] for each in parts})
            if found.shape == shape:
                rows = cut[0] if cut else slice(0, shape[0])
                return found.load_rows(rows.start, rows.stop)[(slice(None), *cut[1:])]
        except ServerError as error:
            msg = f"{str(file)!r}: tensor {name!r} cannot be read: {error}"
            raise ConfigError(msg) from error
        raise _other_shape(file, name, found.shape, shape)

    def _header(self, path: Path) -> Mapping[str, StoredTensor]:
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]

    def _dequantised(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], how: Int8) -> Any:
        rows = cut[0] if cut else slice(0, shape[0])
        columns = cut[1] if len(cut) > 1 else slice(0, shape[1])
        scales = self._read(f"{name}{SCALE}", (shape[0], how.num_scales(shape[1])), (rows,))
        return dequantised(self.integers(name, shape, (rows, columns)), scales, columns, shape[1])

    def _of_mxfp4(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> Any:
        """Read whole matrices of some experts, and cut the rest."""
        number, inputs, outputs = shape
        stored = (number, outputs, inputs // mxfp4.BLOCK)
        blocks = self._read(f"{name}{mxfp4.BLOCKS}", (*stored, mxfp4.BLOCK // 2), cut[:1])
        scales = self._read(f"{name}{mxfp4.SCALES}", stored, cut[:1])
        return mxfp4.dequantised(blocks, scales)[(slice(None), *cut[1:])]

    def matrix_types(self) -> set[str]:
        """Return the types of the tensors with several axes, as safetensors names them: {"BF16"} of most models."""
        stored = (self._slice(path, self._stored[name]) for name, path in self._files.items())
        return {each.get_dtype() for each in stored if len(each.get_shape()) > 1}

    def integers(self, name: str, shape: tuple[int, ...], cut: tuple[slice, slice]) -> npt.NDArray[np.int8]:
        """Read rows and columns of a matrix of 8-bit integers, as a NumPy array."""
        rows, columns = cut
        stored = (rows, packed_columns(columns))
        packed = self._read(f"{name}{PACKED}", (shape[0], -(-shape[1] // 4)), stored)
        return unpacked(np.asarray(packed, np.int32), columns)

    def _read(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> Any:
        if name not in self._files:
            return self._within(name, shape, cut)
        path = self._files[name]
        try:
            handle = self._handle(path)
            stored = handle.get_slice(self._stored[name])
            found = tuple(stored.get_shape())
            if found == shape:
                _check_dtype(path, name, stored.get_dtype())
                return stored[cut] if cut else handle.get_tensor(self._stored[name])
        except (OSError, SafetensorError) as error:
            msg = f"{str(path)!r}: tensor {name!r} cannot be read: {error}"
            raise ConfigError(msg) from error
        raise _other_shape(path, name, found, shape)

    def _within(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> Any:
        """Read rows and columns of a weight that is a part of a tensor with others."""
        place = self._places.get(name)
        if place is None:
            msg = f"{str(self._directory)!r}: tensor {name!r} is missing from the weight files"
            raise ConfigError(msg)
        path = self._paths[place.tensor]
        if place.shape != shape:
            raise _other_shape(path, name, place.shape, shape)
        try:
            stored = self._handle(path).get_slice(place.tensor)
            return _of_rows(stored, place, cut) if isinstance(place.index, np.ndarray) else _of_one(stored, place, cut)
        except (OSError, SafetensorError) as error:
            msg = f"{str(path)!r}: tensor {place.tensor!r} cannot be read: {error}"
            raise ConfigError(msg) from error

    @cached_property
    def _places(self) -> Mapping[str, Place]:
        there = (self._directory / "config.json").is_file()
        config = read_model_config(self._directory) if there else {}
        return weight_places(config, {self._stored[name]: self.shape(name) for name in self._files})

    def _slice(self, path: Path, stored: str) -> Any:
        try:
            return self._handle(path).get_slice(stored)
        except SafetensorError as error:
            msg = f"{str(path)!r}: tensor {stored!r} cannot be read: {error}"
            raise ConfigError(msg) from error

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                if (fault := pointer_fault(path)) is not None:
                    msg = f"{str(path)!r} {fault}"
                    raise ConfigError(msg)
                self._handles[path] = self._open.enter_context(safe_open(path, framework=self._framework))
            except (OSError, SafetensorError) as error:
                msg = f"{str(path)!r} cannot be read: {error}"
                raise ConfigError(msg) from error
        return self._handles[path]


def _of_rows(stored: Any, place: Place, cut: tuple[slice, ...]) -> Any:
    """Read some of the rows of a matrix that lie in a larger one."""
    rows = place.index[cut[0]] if cut else place.index
    span = slice(int(rows.min()), int(rows.max()) + 1)
    return stored[span][(rows - span.start, *cut[1:])]


def _of_one(stored: Any, place: Place, cut: tuple[slice, ...]) -> Any:
    """Read a part of one expert's matrix."""
    expert, *own = place.index
    found = stored[expert : expert + 1][(0, *own)]
    return (found.T if place.transposed else found)[cut]


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    """Raise ConfigError for integers where a weight is read: they would be taken for its values."""
    if dtype not in _FLOATS and not name.endswith(_INTEGERS):
        msg = (
            f"{str(path)!r}: tensor {name!r} is {dtype}; a weight is one of {', '.join(sorted(_FLOATS))}, unless "
            "config.json names a quantisation that is known here"
        )
        raise ConfigError(msg)


def _other_shape(path: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"{str(path)!r}: tensor {name!r} has shape {found}, config.json says {wanted}")
