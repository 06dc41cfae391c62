"""The backend's answers to `tinsmith doctor`."""

from pathlib import Path

import torch

from tinsmith import Device
from tinsmith_megatron.architecture import read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import check_model


def find_devices(config: MegatronConfig, model_path: Path | None) -> list[Device]:
    """Return this node's GPUs, or its CPU. Raise ConfigError if the model in the directory cannot be trained so."""
    if model_path is not None:
        check_model(config, read_architecture(model_path).shape)
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [Device(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in gpus] or [Device(name="cpu")]
