"""The backend's answers to `tinsmith doctor`."""

from collections.abc import Sequence
from pathlib import Path

from tinsmith import Device
from tinsmith.torch_workers import local_devices
from tinsmith_fsdp.architecture import read_architecture
from tinsmith_fsdp.config import FsdpConfig


def find_devices(config: FsdpConfig, model_path: Path | None) -> Sequence[Device]:
    """Return this node's GPUs, or its CPU.

    Raise ConfigError if the model in the directory is not supported, or torch cannot use the GPUs.
    """
    if model_path is not None:
        read_architecture(model_path)
    return local_devices(config.device)
