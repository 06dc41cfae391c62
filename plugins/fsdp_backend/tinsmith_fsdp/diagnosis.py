"""The backend's answers to `tinsmith doctor`."""

from pathlib import Path

import torch

from tinsmith import Device
from tinsmith_fsdp.architecture import read_architecture


def find_devices(model_path: Path | None) -> list[Device]:
    """Return this node's GPUs, or its CPU. Raise ConfigError if the model in the directory is not supported."""
    if model_path is not None:
        read_architecture(model_path)
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [Device(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in gpus] or [Device(name="cpu")]
