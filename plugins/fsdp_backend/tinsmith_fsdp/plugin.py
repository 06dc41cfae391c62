"""The hooks of tinsmith-fsdp. Imported in every process: no torch here."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith import (
    BackendContext,
    BackendSpec,
    Demand,
    Device,
    Placement,
    TrainingBackend,
    hookimpl,
)
from tinsmith.machine import count_gpus, find_compiler
from tinsmith_fsdp.config import FsdpConfig


def create(config: FsdpConfig, context: BackendContext) -> TrainingBackend:
    """Start the ranks and load the model. Takes as long as reading the model's files."""
    from tinsmith_fsdp.backend import FsdpBackend

    return FsdpBackend(config, context)


def diagnose(config: FsdpConfig, model_path: Path | None) -> Sequence[Device]:
    """Return this node's GPUs, or its CPU. Raise ConfigError if torch or the model does not suit."""
    from tinsmith_fsdp.architecture import read_architecture
    from tinsmith_workers.torch import local_devices

    if model_path is not None:
        read_architecture(model_path)
    return local_devices(config.device)


def demand(config: FsdpConfig, model: Mapping[str, Any] | None, placement: Placement) -> Demand:
    """Return what a rank takes of its device."""
    from tinsmith_fsdp.demand import demand as counted

    return counted(config, model, placement)


def check(config: FsdpConfig, model_path: Path | None) -> Iterable[str]:
    """Say whether a compiler is missing on this machine that its ranks need."""
    del model_path
    if config.launcher != "local" or find_compiler() is not None:
        return
    on_gpus = config.device != "cpu" and count_gpus(os.environ) > 0
    if config.compile or (config.compile is None and on_gpus and config.isolation != "strict"):
        yield "it compiles the layers, and there is no C++ compiler: install one (g++), or set compile: false"


@hookimpl
def tinsmith_register_backends() -> BackendSpec[FsdpConfig]:
    return BackendSpec(
        name="fsdp",
        config=FsdpConfig,
        create=create,
        description="trains transformers models with PyTorch FSDP2, one process per GPU (or CPU rank), on many nodes",
        samples=False,
        diagnose=diagnose,
        check=check,
        demand=demand,
    )
