"""The hooks of tinsmith-megatron. Imported in every process: no torch here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith import BackendContext, BackendSpec, Demand, Device, Placement, TrainingBackend, hookimpl
from tinsmith_megatron.config import MegatronConfig


def create(config: MegatronConfig, context: BackendContext) -> TrainingBackend:
    """Start the ranks and load the model. Takes as long as reading the model's files."""
    from tinsmith_megatron.backend import MegatronBackend

    return MegatronBackend(config, context)


def diagnose(config: MegatronConfig, model_path: Path | None) -> Sequence[Device]:
    """Return this node's GPUs, or its CPU. Raise ConfigError if the model or its layout is not supported."""
    from tinsmith_megatron.architecture import read_architecture
    from tinsmith_megatron.parallel import check_model
    from tinsmith_workers.torch import local_devices

    if model_path is not None:
        check_model(config, read_architecture(model_path).shape)
    return local_devices(config.device)


def demand(config: MegatronConfig, model: Mapping[str, Any] | None, placement: Placement) -> Demand:
    """Count what the ranks take. Raise ConfigError if the model cannot be divided as configured."""
    from tinsmith_megatron import demand as counting

    return counting.demand(config, model, placement)


@hookimpl
def tinsmith_register_backends() -> BackendSpec[MegatronConfig]:
    return BackendSpec(
        name="megatron",
        config=MegatronConfig,
        create=create,
        description="trains dense models and mixtures of experts with Megatron-core, over tensor, sequence, pipeline, "
        "expert and data parallel ranks of many nodes",
        samples=False,
        diagnose=diagnose,
        demand=demand,
    )
