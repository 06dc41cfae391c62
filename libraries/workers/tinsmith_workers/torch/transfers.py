"""Transfers between host and device."""

from contextlib import nullcontext

import torch

from tinsmith.operations import Array, FloatArray


def to_device(array: Array, device: torch.device) -> torch.Tensor:
    """Copy to the device. A GPU goes on with its work meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(tensor: torch.Tensor) -> FloatArray:
    """Copy to the host, and wait for it."""
    host: FloatArray = tensor.detach().to("cpu", copy=True).numpy()
    return host


def begin_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy to the host. The copy may be read after `wait_for(tensor.device)`."""
    return tensor.detach().to("cpu", non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it has been asked for so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class HostCopies:
    """Copies to the host beside passes: on a GPU, in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Make the copies wait for everything computed so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, tensor: torch.Tensor) -> FloatArray:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return to_host(tensor)
