"""Reads the matrices of experts as transformers joins them, from files that have them in other forms.

Files of Qwen's models have each expert's matrices by themselves, those of gpt-oss may have them in MXFP4.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from tinsmith_checkpoints.huggingface import WeightFiles

_EXPERTS: Final = ".mlp.experts."
_BLOCKS: Final = "_blocks"
_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ExpertFiles(AbstractContextManager["ExpertFiles"]):
    """The experts in a model's directory."""

    def __init__(self, directory: Path, files: WeightFiles) -> None:
        self._files = files
        self._converting = WeightFiles(directory, framework="numpy")  # opens no file unless it reads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._converting.__exit__(kind, error, traceback)

    def has(self, name: str) -> bool:
        """Return whether files have that joined tensor in another form."""
        return _EXPERTS in name and name.rpartition(".")[2] in _PARTS and name not in self._files

    def part(self, name: str, shape: tuple[int, ...], own: slice) -> torch.Tensor:
        """Read some experts of a joined tensor of this shape. Raises the errors of `WeightFiles`."""
        if f"{name}{_BLOCKS}" in self._files:
            return torch.from_numpy(self._converting.part(name, shape, (own,)))
        layer, _, joined = name.rpartition(".")
        modules, (_, rows, columns) = _PARTS[joined], shape
        size = (rows // len(modules), columns)
        return torch.stack(
            [
                torch.cat([self._files.whole(f"{layer}.{number}.{module}.weight", size) for module in modules])
                for number in range(own.start, own.stop)
            ]
        )
