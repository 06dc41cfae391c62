"""Refusing to save a model that has diverged."""

from pathlib import Path
from typing import Final

import numpy as np

from tinsmith_checkpoints.errors import UserError
from tinsmith_checkpoints.huggingface.safetensors_files import read_header

_PIECE: Final = 1 << 20  # numbers looked at together: they stay in the processor's cache


def check_finite(path: Path) -> None:
    """Raise UserError, naming the tensor, if a safetensors file of float32 holds a number that is not finite."""
    content = np.memmap(path, np.uint8, "r")
    for name, tensor in read_header(path).items():
        values = content[tensor.start : tensor.start + tensor.num_bytes].view("<f4")
        for start in range(0, len(values), _PIECE):
            if not np.isfinite(values[start : start + _PIECE]).all():
                msg = (
                    f"the model has diverged, so it is not saved: {name!r} of {path.name} holds numbers that are not "
                    "finite; load an earlier checkpoint into the model, or create a new one"
                )
                raise UserError(msg)
