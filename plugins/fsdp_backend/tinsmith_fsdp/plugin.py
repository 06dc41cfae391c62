"""The hooks of tinsmith-fsdp. Imported in every process: no torch here."""

from collections.abc import Sequence
from pathlib import Path

from tinsmith import BackendContext, BackendSpec, Device, TrainingBackend, hookimpl
from tinsmith_fsdp.config import FsdpConfig


def create(config: FsdpConfig, context: BackendContext) -> TrainingBackend:
    """Start the ranks and load the model. Takes as long as reading the model's files."""
    from tinsmith_fsdp.backend import FsdpBackend

    return FsdpBackend(config, context)


def diagnose(config: FsdpConfig, model_path: Path | None) -> Sequence[Device]:
    """Return this node's GPUs, or its CPU. Raise ConfigError if the model is not supported."""
    from tinsmith_fsdp.diagnosis import find_devices

    del config
    return find_devices(model_path)


@hookimpl
def tinsmith_register_backends() -> BackendSpec[FsdpConfig]:
    return BackendSpec(
        name="fsdp",
        config=FsdpConfig,
        create=create,
        description="trains transformers models with PyTorch FSDP2, one process per GPU (or CPU rank), on many nodes",
        samples=False,
        diagnose=diagnose,
    )
