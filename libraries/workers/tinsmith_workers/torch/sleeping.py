"""Tensors whose memory goes to the host and comes back, while everything that refers to them stays valid."""

from collections.abc import Iterable
from typing import Final

import torch

_SMALLEST: Final = 1 << 20  # bytes of a piece of pinned memory, but for the last of a storage


class SleepingTensors:
    """Knows what of a device's memory is on the host.

    A storage is emptied and filled in place, so that all views of it, those of FSDP and DTensor among them, have their
    numbers again after `wake`. Until then they must not be read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asleep: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
        self._frozen: dict[
            int, list[torch.Tensor]
        ] = {}  # by the identity of a storage: copies that stay, awake or asleep

    def sleep(self, changing: Iterable[torch.Tensor], *, frozen: Iterable[torch.Tensor] = ()) -> None:
        """Empty the storages of these tensors. `frozen` ones never change, so they are copied to the host only once."""
        kept = {id_of(tensor): tensor for tensor in frozen}
        for key, tensor in kept.items():
            if key not in self._frozen:
                self._frozen[key] = self._copy(tensor.untyped_storage())
        moved = {key: tensor for tensor in changing if (key := id_of(tensor)) not in kept}
        self._asleep = [
            *((tensor.untyped_storage(), self._frozen[key]) for key, tensor in kept.items()),
            *((tensor.untyped_storage(), self._copy(tensor.untyped_storage())) for tensor in moved.values()),
        ]
        self._synchronize()
        for storage, _ in self._asleep:
            storage.resize_(0)

    def wake(self) -> None:
        """Fill the storages again."""
        for storage, pieces in self._asleep:
            sizes = [piece.numel() for piece in pieces]
            storage.resize_(sum(sizes))
            for own, piece in zip(self._bytes_of(storage).split(sizes), pieces, strict=True):
                own.copy_(piece, non_blocking=True)
        self._synchronize()
        self._asleep = []

    def _copy(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        on_gpu = self._device.type == "cuda"
        sizes = _pinned_sizes(storage.nbytes()) if on_gpu else [storage.nbytes()]
        pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for size in sizes]
        for own, piece in zip(self._bytes_of(storage).split(sizes), pieces, strict=True):
            piece.copy_(own, non_blocking=True)
        return pieces

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _pinned_sizes(num_bytes: int) -> list[int]:
    """Divide a copy into powers of two, and a small rest: torch rounds each piece of pinned memory up to one."""
    sizes = []
    while num_bytes >= _SMALLEST:
        sizes.append(1 << (num_bytes.bit_length() - 1))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes or not sizes else sizes


def id_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which several tensors may share."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  (the address is 0 while a storage is empty)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return what the storages of these tensors take, each counted once."""
    return sum({id_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
