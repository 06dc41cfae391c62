"""How a training backend starts its workers, and which device they have."""

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.backend import BackendContext
from tinsmith.errors import ConfigError
from tinsmith.machine import count_gpus
from tinsmith_workers.config import TrainingWorkersConfig
from tinsmith_workers.group import WorkerGroup
from tinsmith_workers.launching import DEVICE, MakeLauncher
from tinsmith_workers.program import WorkerDevice


def start_ranks(
    program: str,
    config: TrainingWorkersConfig,
    context: BackendContext,
    launch_with: MakeLauncher | None,
    *,
    least: int = 1,
    environment: Mapping[str, str] | None = None,
) -> WorkerGroup[Any]:
    """Start workers on the GPUs that the server has placed them on, or on all. Any: the program.

    least: how many a machine without GPUs has, if `nproc_per_node` is not set.
    """
    devices = context.placement.devices
    gpus = 0 if config.device == "cpu" else len(devices) or count_gpus()
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
    chosen = {} if config.device is None else {DEVICE: config.device}
    return WorkerGroup(
        program,
        config,
        context.progress,
        environment={**visible, **chosen, **(environment or {})},
        gpus=None if config.device is None else config.device == "cuda",
        default_per_node=gpus or least,
        launch_with=launch_with,
    )


def agreed_device(found: Sequence[WorkerDevice], wanted: str | None) -> WorkerDevice:
    """Return the device of the first worker, which has one as every other's.

    Args:
        found: the device of each worker, by rank.
        wanted: the type that the configuration asks for, if it does.

    Raises ConfigError if a worker computes on another.
    """
    for rank, device in enumerate(found):
        if device.type != (wanted or found[0].type):
            asked = f"`device` is {wanted!r}" if wanted else f"rank 0 computes on {found[0].name}"
            msg = (
                f"rank {rank} computes on {device.name} ({device.type}), but {asked}: give each worker such a one, and "
                f"start them with {DEVICE}={wanted or found[0].type}"
            )
            raise ConfigError(msg)
    return found[0]
