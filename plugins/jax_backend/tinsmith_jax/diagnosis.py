"""The backend's answers to `tinsmith doctor`."""

from pathlib import Path

import jax

from tinsmith import Device
from tinsmith_jax.model_config import read_config


def find_devices(model_path: Path | None) -> list[Device]:
    """Return JAX's devices. Raise ConfigError if the model in the directory is not supported."""
    if model_path is not None:
        read_config(model_path)
    return [Device(name=device.device_kind, memory_bytes=_memory_of(device)) for device in jax.devices()]


def _memory_of(device: jax.Device) -> int | None:
    """Return the device's memory, or None for a CPU, which shares the machine's memory."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)
