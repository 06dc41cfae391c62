"""The memory that operators take for their results: its peak, and a limit, without a device that would have one.

Needs no support from an allocator, so it counts on CPU, and counts fake tensors. A kernel's workspace is
not seen.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_A_NUMBER = 8  # bytes of a scalar, which lies on the host
_resize = torch.UntypedStorage.resize_


class Allocations(TorchDispatchMode):
    """Counts what is made while this is entered, for as long as it lives. May be entered again and again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}  # with bytes, by the id of the storage
        self.taken = self.peak = 0  # bytes
        self.number = 0  # of allocations
        self.sent: dict[str, int] = {}  # bytes of the largest tensor of each collective, added up by its name
        self.room: int | None = None  # bytes: an allocation beyond gets an error
        self.fails_at: int | None = None  # the number of an allocation for which there is no memory

    def __enter__(self) -> "Allocations":
        self._patches = ExitStack()
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resizer()))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.sent[name] = self.sent.get(name, 0) + max(t.untyped_storage().nbytes() for t in _tensors(args))
        given = [tensor.untyped_storage() for tensor in _tensors((args, kwargs))]  # a view of it is not made
        known = set(map(id, given))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            new = id(storage) not in self._held and id(storage) not in known
            if new and storage.nbytes() > _A_NUMBER and tensor.device.type != "meta":
                self._hold(storage)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._held[id(storage)] = ref(storage, partial(self._freed, id(storage))), size
        self._take(size)

    def _freed(self, key: int, _: object) -> None:
        self.taken -= self._held.pop(key)[1]

    def _resizer(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """FSDP frees gathered layers by resizing their storages, which is no operator."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = _resize(storage, size)
            if id(storage) in self._held:
                alive, before = self._held[id(storage)]
                self._held[id(storage)] = alive, size
                self._take(size - before)
            return result

        return resize

    def _take(self, size: int) -> None:
        self.taken += size
        self.peak = max(self.peak, self.taken)
        if size <= 0:
            return
        self.number += 1
        if self.number == self.fails_at or (self.room is not None and self.taken > self.room):
            msg = f"{self.taken} bytes are taken, of {self.room}"
            raise torch.OutOfMemoryError(msg)


def _tensors(values: object) -> list[torch.Tensor]:
    """List the tensors that have memory: of a distributed one, its part."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in found]  # noqa: SLF001 - without a graph
