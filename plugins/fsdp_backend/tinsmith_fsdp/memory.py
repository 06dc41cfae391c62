"""Distinguish running out of memory from all other errors that torch, Python and the system raise."""

import errno
from typing import Final

import torch

_SIGNS: Final = ("Cannot allocate memory", "std::bad_alloc", "CUDA error: out of memory")
"""The messages of the system (quoted by torch's CPU allocator and safetensors), of C++, and of pinned host memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or an error in its chain of causes, is about memory."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(sign in str(error) for sign in _SIGNS) or is_out_of_memory(error.__cause__)
