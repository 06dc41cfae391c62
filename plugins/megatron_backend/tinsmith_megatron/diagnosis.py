"""The backend's answers to `tinsmith doctor`."""

from collections.abc import Sequence
from pathlib import Path

from tinsmith import Device
from tinsmith.torch_workers import local_devices
from tinsmith_megatron.architecture import read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import check_model


def find_devices(config: MegatronConfig, model_path: Path | None) -> Sequence[Device]:
    """Return this node's GPUs, or its CPU.

    Raise ConfigError if the model in the directory cannot be trained so, or torch cannot use the GPUs.
    """
    if model_path is not None:
        check_model(config, read_architecture(model_path).shape)
    return local_devices(config.device)
