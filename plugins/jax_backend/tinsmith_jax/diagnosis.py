"""The backend's answers to `tinsmith doctor`."""

from pathlib import Path

import jax

from tinsmith import Device
from tinsmith.machine import find_compiler
from tinsmith_jax import runtime
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig
from tinsmith_jax.families import read_config


def find_devices(config: JaxConfig | JaxSamplerConfig, model_path: Path | None) -> list[Device]:
    """Return JAX's devices. Raise ConfigError if the model in the directory is not supported, or JAX sees no GPU."""
    if model_path is not None:
        read_config(model_path)
    if isinstance(config, JaxSamplerConfig) or config.simulated_devices is None:
        runtime.computing_platform()
    return [Device(name=_name_of(device), memory_bytes=_memory_of(device)) for device in jax.devices()]


def _name_of(device: jax.Device) -> str:
    kind = str(device.device_kind)
    if device.platform != "cpu" or find_compiler() is not None:
        return kind
    return f"{kind}, without a C++ compiler, so that sampling takes two to four times as long"


def _memory_of(device: jax.Device) -> int | None:
    """Return the device's memory, or None for a CPU, which shares the machine's memory."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)
