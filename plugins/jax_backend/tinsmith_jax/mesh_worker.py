"""The program of the workers that have the devices of a mesh. All run the same calls in the same order."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax

from tinsmith import LoraConfig, ModelState, OutOfMemoryError, TinsmithError
from tinsmith.machine import count_gpus
from tinsmith_checkpoints.huggingface import Targets
from tinsmith_jax import runtime, state_slices
from tinsmith_jax.adapters import Adapter
from tinsmith_jax.devices import Devices, Facts, Setup
from tinsmith_jax.mesh import fetch
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import SamplingShape
from tinsmith_jax.training_device import LoadedState, StateOnDevices, TrainingDevice
from tinsmith_workers import StateProgram, StateWriter, Worker, Written

SIMULATED: Final = "TINSMITH_JAX_SIMULATED_DEVICES"
"""Environment variable: how many devices each worker has on the CPU."""

_HEARTBEATS_S: Final = 86_400
"""After this many seconds of silence of one process, JAX ends all. The engine notices a dead one at once, and a
machine that was paused for some minutes goes on."""

# Any below: arguments and results of the devices' methods.


@dataclass(frozen=True, slots=True)
class Refused:
    """A call's answer if it raised an error that is the request's fault."""

    error: TinsmithError


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that has loaded the model."""

    facts: Facts
    sampling: SamplingShape | None


class MeshWorker(StateProgram):
    """Joins the other processes, and calls the devices. The engine reads what the first worker answers."""

    _state: "WorkerState"  # once the model is loaded

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parts: dict[str, Any] = {}
        _join(worker)

    def load(self, setup: Setup) -> Started:
        """The path of the cache is the engine's; each worker has its own, as JAX writes entries in place."""
        own = replace(setup, cache_dir=setup.cache_dir / f"worker-{self._worker.rank}")
        devices = Devices(own, self._progress)
        held = HeldAdapters(devices.training, devices.sampling)
        self._state = WorkerState(devices.training, held, setup.config.capture_buffer_bytes)
        self._parts = {"devices": devices, "training": devices.training, "sampling": devices.sampling, "adapters": held}
        return Started(devices.facts, None if devices.sampling is None else devices.sampling.shape)

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

    # files of states: each worker does its part by itself, and answers for itself

    def sees(self, file: Path) -> bool:
        return file.exists()

    def capture(self, capture_id: str, owner: str, targets: Targets, ended: Sequence[str]) -> None:
        self._state.capture(capture_id, owner, targets, ended)

    def captured(self, capture_id: str) -> Written:
        return self._state.writer.written(capture_id)

    def load_state(self, model_id: str, state: ModelState) -> TinsmithError | None:
        return self._state.load(model_id, state)

    def take_state(self, model_id: str) -> None:
        self._state.take(model_id)

    def close(self) -> None:
        if "devices" in self._parts:
            self._parts["devices"].close()
        if self._worker.num_workers > 1:
            jax.distributed.shutdown()  # waits for the others: one that leaves early would look dead

    def _progress(self, stage: str, fraction: float | None) -> None:
        if self._worker.rank == 0:
            self._worker.report(stage, fraction)


class WorkerState:
    """Writes this worker's part of models' states to canonical files beside training, and reads it from them."""

    def __init__(self, training: TrainingDevice, held: "HeldAdapters", buffer_bytes: int) -> None:
        self.writer = StateWriter(buffer_bytes)
        self._training = training
        self._held = held
        self._loaded: LoadedState | None = None
        training.before_replacing = self.writer.settle  # else the devices keep what waits for the disk

    def capture(self, capture_id: str, owner: str, targets: Targets, ended: Sequence[str]) -> None:
        """Write these kinds of arrays of a model, or of a published adapter."""
        held = self._held.published(owner) or self._training.held(owner)
        self.writer.forget(ended)
        slices = (
            each
            for kind in sorted(targets, key=lambda kind: kind != "gradients")  # what changes first comes first
            for each in state_slices.slices(kind, held.adapters[kind], held.lora, self._training.config, targets[kind])
        )
        self.writer.begin(capture_id, owner, slices)

    def load(self, model_id: str, state: ModelState) -> TinsmithError | None:
        """Put a state onto the devices. Return what is wrong with it, as other workers may have found nothing."""
        try:
            self._loaded = self._training.load(model_id, state)
        except TinsmithError as error:
            return error
        return None

    def take(self, model_id: str) -> None:
        """Give a model what was loaded last."""
        assert self._loaded is not None, "a state was loaded"
        self._training.take(model_id, self._loaded)
        self._loaded = None


class HeldAdapters:
    """Adapters on the devices, by the engine's number: published weights, and weights that it sent."""

    def __init__(self, training: TrainingDevice, sampling: SamplingDevice | None) -> None:
        self._training = training
        self._sampling = sampling
        self._held: dict[int, Adapter] = {}
        self._loras: dict[int, LoraConfig] = {}  # of published ones

    def publish(self, number: int, model_id: str) -> None:
        published = self._training.publish(model_id, "")
        self._held[number], self._loras[number] = published.arrays, published.lora

    def published(self, owner: str) -> StateOnDevices | None:
        """Return the weights that `owner_of` names."""
        number = next((each for each in self._loras if owner_of(each) == owner), None)
        if number is None:
            return None
        return StateOnDevices(lora=self._loras[number], step=0, adapters={"weights": self._held[number]})

    def put(self, number: int, adapter: Adapter) -> None:
        assert self._sampling is not None, "only sampling takes adapters from the engine"
        self._held[number] = self._sampling.put_adapter(adapter)

    def write(self, number: int, row: int, scale: float) -> None:
        assert self._sampling is not None, "rows of adapters are of sampling"
        self._sampling.write_adapter(row, self._held[number], scale)

    def fetch(self, number: int) -> Adapter:
        return fetch(self._held[number])

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._held[number]
            self._loras.pop(number, None)


def owner_of(number: int) -> str:
    """Name an adapter's owner in captures. No model has such a name."""
    return f"adapter {number}"


def _join(worker: Worker) -> None:
    if (simulated := os.environ.get(SIMULATED)) is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(simulated))
    if worker.num_workers == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    runtime.keep_own_programs()
    if worker.local_size == worker.num_workers:
        runtime.exchange_on_loopback()
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
