"""Reads the weights of a base model tensor by tensor with the safetensors package, as arrays of any framework."""

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from tinsmith.errors import ConfigError, ServerError
from tinsmith.huggingface.safetensors_files import tensor_files

# Any below: the arrays of the framework, and safetensors' handles, which are untyped.


class WeightFiles(AbstractContextManager["WeightFiles"]):
    """The safetensors files of a model directory: one, or shards with an index. Each is opened once, on first use.

    Every error is a ConfigError that names the directory or file, and the tensor.
    """

    def __init__(self, directory: Path, *, framework: Literal["numpy", "pt"]) -> None:
        self._directory = directory
        self._framework = framework
        self._handles: dict[Path, Any] = {}
        self._open = ExitStack()
        try:
            self._files = tensor_files(directory, "model")
        except ServerError as error:
            msg = f"{str(directory)!r}: the weight files cannot be read: {error}"
            raise ConfigError(msg) from error
        if not self._files:
            msg = f"{str(directory)!r} has neither model.safetensors nor model.safetensors.index.json"
            raise ConfigError(msg)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def whole(self, name: str, shape: tuple[int, ...]) -> Any:
        """Read a tensor, which must have the given shape."""
        return self._read(name, shape, ())

    def part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> Any:
        """Read the rows, or rows and columns, of a tensor whose whole shape must be the given one."""
        return self._read(name, shape, cut)

    def _read(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> Any:
        if name not in self._files:
            msg = f"{str(self._directory)!r}: tensor {name!r} is missing from the weight files"
            raise ConfigError(msg)
        path = self._files[name]
        try:
            handle = self._handle(path)
            stored = handle.get_slice(name)
            found = tuple(stored.get_shape())
            if found == shape:
                return stored[cut] if cut else handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            msg = f"{str(path)!r}: tensor {name!r} cannot be read: {error}"
            raise ConfigError(msg) from error
        msg = f"{str(path)!r}: tensor {name!r} has shape {found}, config.json says {shape}"
        raise ConfigError(msg)

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._open.enter_context(safe_open(path, framework=self._framework))
        return self._handles[path]
