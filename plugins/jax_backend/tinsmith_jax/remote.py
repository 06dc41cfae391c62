"""The engine's side of a mesh: passes what the devices are to do on to the workers that have them. Starts no device."""

import itertools
import math
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from tinsmith import (
    AdamParams,
    Array,
    ConfigError,
    Figures,
    IntArray,
    LoraConfig,
    ModelState,
    Progress,
)
from tinsmith.machine import FairLock
from tinsmith_checkpoints.huggingface import Kind, StoredTensors
from tinsmith_jax import adapters
from tinsmith_jax.adapters import Adapter, DeviceSnapshot
from tinsmith_jax.buckets import Bucket, Pass
from tinsmith_jax.devices import Devices, Facts, Setup
from tinsmith_jax.families import read_config
from tinsmith_jax.mesh import check_shape
from tinsmith_jax.mesh_worker import SIMULATED, HeldAdapters, MeshWorker, Refused, owner_of
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.packing import Scored, TrainingPass
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import (
    Drawn,
    ExpertsOfPages,
    PageCopy,
    PromptDraws,
    PromptFound,
    PromptTile,
    SamplingShape,
    SlotInput,
)
from tinsmith_jax.training_device import TrainingDevice
from tinsmith_workers import MakeLauncher, StateFiles, WorkerGroup

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class RemoteDevices:
    """The devices of workers. After a WorkerDiedError they can only be closed."""

    def __init__(
        self, setup: Setup, progress: Progress, launch_with: MakeLauncher | None = None, figures: Figures | None = None
    ) -> None:
        """Start the workers and let them load the model. Raise ConfigError if files or settings are at fault."""
        _refuse_losses(setup)
        model = read_config(setup.model_directory)
        assert setup.config.mesh is not None, "only a mesh has workers"
        check_shape(setup.config.mesh, model)
        simulated = setup.config.simulated_devices
        self.group: WorkerGroup[MeshWorker] = WorkerGroup(
            "tinsmith_jax.mesh_worker:MeshWorker",
            setup.config,
            progress,
            environment={} if simulated is None else {SIMULATED: str(simulated)},
            gpus=False if simulated is not None else None,
            launch_with=launch_with,
            figures=figures,
        )
        try:
            started = self.group.call(MeshWorker.load, setup)[0]
            files = StateFiles(self.group, setup.cache_dir / "state")
            shared = all(files.seen())
        except BaseException:
            self.group.close()
            raise
        self._workers = Workers(self.group)
        self.facts: Facts = started.facts
        self.training = RemoteTraining(self._workers, model, files if shared else None)
        self.sampling = None if started.sampling is None else RemoteSampling(self._workers, started.sampling)

    def start_warm_up(self) -> None:
        self._workers.run("devices", Devices.start_warm_up)

    def close(self) -> None:
        self.group.close()


class Workers:
    """Calls them for one thread after the other: training and sampling take turns."""

    def __init__(self, group: WorkerGroup[MeshWorker]) -> None:
        self._group = group
        self._device_lock = FairLock()
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()

    def run(self, part: str, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of a part on all workers. Return what the first answers."""
        with self._device_lock:
            if self._dropped:
                numbers = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self._group.call(MeshWorker.run, "adapters", HeldAdapters.drop.__name__, (numbers,), {})
            answer: R | Refused = self._group.call(MeshWorker.run, part, method.__name__, args, kwargs)[0]
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    def load_state(self, model_id: str, state: ModelState) -> None:
        """Make each worker read its shard of a model's state. If one cannot, the model stays unchanged on all."""
        with self._device_lock:
            for error in self._group.call(MeshWorker.load_state, model_id, state):
                if error is not None:
                    raise error
            self._group.call(MeshWorker.take_state, model_id)

    def hold(self, method: Callable[[HeldAdapters, int, A], None], argument: A) -> "RemoteAdapter":
        """Make the workers keep an adapter until nobody here refers to it."""
        held = RemoteAdapter(next(self._numbers))
        self.run("adapters", method, held.number, argument)
        weakref.finalize(held, self._dropped.append, held.number)
        return held


@dataclass(frozen=True)
class RemoteAdapter:
    """An adapter on the workers' devices."""

    number: int


class RemoteSnapshot(DeviceSnapshot):
    """A snapshot on the workers' devices."""

    def __init__(self, snapshot_id: str, lora: LoraConfig, held: RemoteAdapter, training: "RemoteTraining") -> None:
        super().__init__(snapshot_id, lora, held)
        self._training = training

    @property
    def num_bytes(self) -> int:
        return self._training.weights_bytes(self.lora)

    def adapter_weights(self) -> Mapping[str, Array]:
        return self._training.published_weights(self.arrays, self.lora)


class RemoteTraining:
    """As TrainingDevice, whose methods it passes on.

    If all workers see a directory of the engine, they write and read states there. Else these pass through the engine.
    """

    def __init__(self, workers: Workers, config: ModelConfig, files: StateFiles | None) -> None:
        self._workers = workers
        self._config = config
        self._files = files
        self._loras: dict[str, LoraConfig] = {}

    def create(self, model_id: str, lora: LoraConfig) -> None:
        self._run(TrainingDevice.create, model_id, lora)
        self._loras[model_id] = lora

    def unload(self, model_id: str) -> None:
        self._run(TrainingDevice.unload, model_id)
        del self._loras[model_id]

    def publish(self, model_id: str, snapshot_id: str) -> RemoteSnapshot:
        held = self._workers.hold(HeldAdapters.publish, model_id)
        return RemoteSnapshot(snapshot_id, self._loras[model_id], held, self)

    def weights_bytes(self, lora: LoraConfig) -> int:
        shapes = adapters.canonical_shapes(lora, self._config).values()
        return sum(math.prod(shape) for shape in shapes) * np.dtype(np.float32).itemsize

    def published_weights(self, held: RemoteAdapter, lora: LoraConfig) -> Mapping[str, Array]:
        if self._files is None:
            arrays = self._workers.run("adapters", HeldAdapters.fetch, held.number)
            return adapters.CanonicalAdapter(arrays, lora, self._config)
        shapes = adapters.canonical_shapes(lora, self._config)
        return self._files.capture_adapter(owner_of(held.number), shapes, ("weights",)).tensors("weights")

    def capture(self, model_id: str) -> ModelState:
        if self._files is None:
            return self.captured_whole(model_id)
        step, kinds = self._run(TrainingDevice.kinds, model_id)
        lora = self._loras[model_id]
        capture = self._files.capture_adapter(model_id, adapters.canonical_shapes(lora, self._config), kinds)
        return ModelState(lora=lora, step=step, **{kind: capture.tensors(kind) for kind in kinds})

    def captured_whole(self, model_id: str) -> ModelState:
        """Bring the state to this process."""
        return self._run(TrainingDevice.capture, model_id)

    def restore(self, model_id: str, state: ModelState) -> None:
        tensors: dict[Kind, Mapping[str, Array]] = {
            "weights": state.weights, "adam_m": state.adam_m, "adam_v": state.adam_v, "gradients": state.gradients,
        }  # fmt: skip
        if self._files is None:
            arrays = {kind: dict(each) for kind, each in tensors.items()}  # workers may not see the files
            self._run(TrainingDevice.restore, model_id, ModelState(lora=state.lora, step=state.step, **arrays))
            return
        shapes = adapters.canonical_shapes(self._loras[model_id], self._config)
        files = {kind: self._files.stored(kind, each, shapes) for kind, each in tensors.items() if each}
        stored = {kind: StoredTensors(each.stored) for kind, each in files.items()}  # workers need not wait
        self._workers.load_state(model_id, ModelState(lora=state.lora, step=state.step, **stored))

    def prepare(self, kind: Pass, buckets: Sequence[Bucket], *, replays: bool = False) -> Bucket:
        return self._run(TrainingDevice.prepare, kind, buckets, replays=replays)

    def score(self, one: TrainingPass) -> Scored:
        return self._run(TrainingDevice.score, one)

    def gradients(self, passes: Sequence[TrainingPass]) -> tuple[list[Scored], list[str]]:
        return self._run(TrainingDevice.gradients, passes)

    def begin(self, models: Sequence[str]) -> None:
        self._run(TrainingDevice.begin, models)

    def roll_back(self) -> None:
        self._run(TrainingDevice.roll_back)

    def step(self, steps: Sequence[tuple[str, AdamParams]]) -> list[float]:
        return self._run(TrainingDevice.step, steps)

    def drop_gradient(self, model_id: str) -> None:
        self._run(TrainingDevice.drop_gradient, model_id)

    def _run(self, method: Callable[Concatenate[TrainingDevice, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._workers.run("training", method, *args, **kwargs)


class RemoteSampling:
    """As SamplingDevice, whose methods it passes on."""

    def __init__(self, workers: Workers, shape: SamplingShape) -> None:
        self.shape = shape
        self._workers = workers

    def reset(self) -> None:
        self._run(SamplingDevice.reset)

    def is_intact(self) -> bool:
        return self._run(SamplingDevice.is_intact)

    def put_adapter(self, adapter: Adapter) -> RemoteAdapter:
        return self._workers.hold(HeldAdapters.put, adapter)

    def write_adapter(self, row: int, adapter: RemoteAdapter, scale: float) -> None:
        self._workers.run("adapters", HeldAdapters.write, adapter.number, row, scale)

    def prefill(self, tiles: Sequence[PromptTile]) -> ExpertsOfPages | None:
        return self._run(SamplingDevice.prefill, tiles)

    def score(
        self, tile: PromptTile, targets_TK: IntArray, *, want_top: bool, draws: PromptDraws | None
    ) -> PromptFound:
        return self._run(SamplingDevice.score, tile, targets_TK, want_top=want_top, draws=draws)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._run(SamplingDevice.copy_pages, copies)

    def decode(self, slots: SlotInput, num_steps: int) -> Drawn:
        return self._run(SamplingDevice.decode, slots, num_steps)

    def give_back(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        self._run(SamplingDevice.give_back, pages, rows)

    def _run(self, method: Callable[Concatenate[SamplingDevice, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._workers.run("sampling", method, *args, **kwargs)


def _refuse_losses(setup: Setup) -> None:
    try:
        pickle.dumps(setup.losses)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        msg = f"a registered loss cannot be sent to the workers: {error}; define per_token at the top of its module"
        raise ConfigError(msg) from error
