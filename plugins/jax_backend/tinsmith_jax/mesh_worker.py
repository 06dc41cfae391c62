"""The program of the workers that have the devices of a mesh. All run the same calls in the same order."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from tinsmith import OutOfMemoryError, TinsmithError
from tinsmith.workers import Worker, count_gpus
from tinsmith_jax import runtime
from tinsmith_jax.adapters import Adapter
from tinsmith_jax.devices import Devices, Facts, Setup
from tinsmith_jax.mesh import fetch
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import SamplingShape
from tinsmith_jax.training_device import TrainingDevice

SIMULATED: Final = "TINSMITH_JAX_SIMULATED_DEVICES"
"""Environment variable: how many devices each worker has on the CPU."""

_HEARTBEATS_S: Final = 86_400
"""JAX ends all processes if one is silent for so long. The engine notices a dead one at once, and a machine that was
paused for some minutes goes on."""

# Any below: arguments and results of the devices' methods.


@dataclass(frozen=True, slots=True)
class Refused:
    """A call's answer if it raised an error that is the request's fault."""

    error: TinsmithError


@dataclass(frozen=True, slots=True)
class Loaded:
    facts: Facts
    sampling: SamplingShape | None


class MeshWorker:
    """Joins the other processes, and calls the devices. The engine reads what the first worker answers."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parts: dict[str, Any] = {}
        _join(worker)

    def load(self, setup: Setup) -> Loaded:
        """The path of the cache is the engine's; each worker has its own, as JAX writes entries in place."""
        own = replace(setup, cache_dir=setup.cache_dir / f"worker-{self._worker.rank}")
        devices = Devices(own, self._progress)
        held = HeldAdapters(devices.training, devices.sampling)
        self._parts = {"devices": devices, "training": devices.training, "sampling": devices.sampling, "adapters": held}
        return Loaded(devices.facts, None if devices.sampling is None else devices.sampling.shape)

    def run(self, part: str, method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call a method of a part.

        An error is answered if every worker finds it by itself. Memory may run out on one alone, and then the others
        wait for it: the error ends the group.
        """
        try:
            answer = getattr(self._parts[part], method)(*arguments, **options)
        except OutOfMemoryError as error:
            if self._worker.num_workers > 1:
                raise
            answer = Refused(error)
        except TinsmithError as error:
            answer = Refused(error)
        return answer if self._worker.rank == 0 else None

    def close(self) -> None:
        if "devices" in self._parts:
            self._parts["devices"].close()
        if self._worker.num_workers > 1:
            jax.distributed.shutdown()  # waits for the others: one that leaves early would look dead

    def _progress(self, stage: str, fraction: float | None) -> None:
        if self._worker.rank == 0:
            self._worker.report(stage, fraction)


class HeldAdapters:
    """Adapters on the devices, which the engine refers to by numbers: published weights, and what it has sent."""

    def __init__(self, training: TrainingDevice, sampling: SamplingDevice | None) -> None:
        self._training = training
        self._sampling = sampling
        self._held: dict[int, Adapter] = {}

    def publish(self, number: int, model_id: str) -> None:
        self._held[number] = self._training.publish(model_id, "").arrays

    def put(self, number: int, adapter: Adapter) -> None:
        assert self._sampling is not None, "only sampling takes adapters from the engine"
        self._held[number] = self._sampling.put_adapter(adapter)

    def write(self, number: int, slot: int, scale: float) -> None:
        assert self._sampling is not None, "slots are of sampling"
        self._sampling.write_adapter(slot, self._held[number], scale)

    def fetch(self, number: int) -> Adapter:
        return fetch(self._held[number])

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._held[number]


def _join(worker: Worker) -> None:
    if (simulated := os.environ.get(SIMULATED)) is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(simulated))
    if worker.num_workers == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    runtime.keep_own_programs()
    host, port = worker.meeting
    jax.distributed.initialize(
        coordinator_address=f"{host}:{port}",
        num_processes=worker.num_workers,
        process_id=worker.rank,
        local_device_ids=_own_gpus(worker),
        coordinator_bind_address=f"{host}:{port}",
        heartbeat_timeout_seconds=_HEARTBEATS_S,
    )


def _own_gpus(worker: Worker) -> list[int] | None:
    """Return this worker's share of the machine's GPUs. None: all that it sees."""
    seen = count_gpus()
    if seen < worker.local_size or worker.local_size == 1:
        return None
    each = seen // worker.local_size
    return list(range(worker.local_rank * each, (worker.local_rank + 1) * each))
