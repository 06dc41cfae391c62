"""A rank that knows the most memory that it has had: what malloc has handed out, looked up after every operation.

Torch's own statistics cover GPUs alone, its profiler misses what gloo's threads free, and the size of the process
counts libraries and pages that malloc keeps.
"""

import ctypes
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tinsmith_megatron.rank import Rank
from tinsmith_workers import Worker

_NAMES = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Info(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


def _function() -> Any:
    found = ctypes.CDLL("libc.so.6").mallinfo2
    found.restype = _Info
    return found


_mallinfo2 = _function()


def allocated() -> int:
    """Return the bytes that malloc has handed out and not got back."""
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


class _Watch(TorchDispatchMode):
    """Looks after each operation of torch, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, allocated())
        return result


class MeasuredRank(Rank):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._before = allocated()  # interpreter and libraries
        self._watch = _Watch()

    def watch(self) -> None:
        self._watch.__enter__()
        self._watch.peak = 0

    def peak(self) -> int:
        """Return the most since `watch`, of what this rank has allocated since its start."""
        self._watch.__exit__(None, None, None)
        return self._watch.peak - self._before

    def allocated(self) -> int:
        return allocated() - self._before
