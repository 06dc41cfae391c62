"""Running out of memory, told apart from everything else that torch, Python and the system raise."""

import errno
import gc
from typing import Final

import torch

_SIGNS: Final = ("Cannot allocate memory", "std::bad_alloc", "CUDA error: out of memory")
"""The system's word, which torch's CPU allocator and safetensors quote; C++'s; that of pinned host memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or one that it was raised from, is about memory."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(sign in str(error) for sign in _SIGNS) or is_out_of_memory(error.__cause__)


def free_what_is_unused() -> None:
    """Free the memory of dropped modules: they refer to themselves, so only the collector frees them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
