"""The devices' side of training: the arrays of every model, and the programs that work on them.

Takes and returns NumPy arrays, and names models. One thread calls it, and every program holds the lock of the device.

All arrays are immutable, and a step replaces a model's references. A snapshot is therefore just a reference to the
current weights; later training makes new arrays.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from tinsmith import AdamParams, Array, Failed, LoraConfig, ModelState, step_result
from tinsmith.machine import FairLock
from tinsmith_checkpoints.huggingface import Kind, StoredTensors
from tinsmith_jax import adapters, memory, optimizer, state_slices
from tinsmith_jax.adapters import Adapter, JaxSnapshot
from tinsmith_jax.buckets import Bucket, Pass
from tinsmith_jax.compilation import Compiled, Program, Programs
from tinsmith_jax.memory import out_of_memory_named
from tinsmith_jax.mesh import Spec, fetch, put
from tinsmith_jax.packing import Scored, Stream, TrainingPass
from tinsmith_jax.rank_classes import class_of, rank_classes
from tinsmith_jax.train_step import TrainPrograms, stream_specs
from tinsmith_jax.weights import Base

_ALL: Final[frozenset[Kind]] = frozenset({"weights", "adam_m", "adam_v", "gradients"})
_GRADIENTS: Final[frozenset[Kind]] = frozenset({"gradients"})


def _on_host(logp_TK: Any, loss_TK: Any, load_LnE: Any) -> Scored:
    return Scored(np.asarray(logp_TK), np.asarray(loss_TK), None if load_LnE is None else np.asarray(load_LnE))


def _is_finite(array: Any) -> bool:
    return bool(np.isfinite(np.asarray(array)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOnDevices:
    """A model's state on the devices: immutable arrays, by kind. Moments are absent before the first step."""

    lora: LoraConfig
    step: int
    adapters: Mapping[Kind, Adapter]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state on the devices that no model has yet."""

    state: optimizer.State
    gradients: Adapter | None
    step: int


def _nothing(model_id: str, kinds: Collection[Kind]) -> None:
    pass


@dataclass(slots=True)
class _Model:
    """Everything one model owns. `gradients` is None while nothing is pending."""

    lora: LoraConfig
    padded_rank: int
    state: optimizer.State
    gradients: Adapter | None = None
    step: int = 0


class TrainingDevice:
    """Its caller checks operations: all named models exist, and one call's models have one rank class."""

    def __init__(self, base: Base, train_programs: TrainPrograms, *, programs: Programs, device_lock: FairLock) -> None:
        self.base = base
        self._device_lock = device_lock
        self._programs = programs
        self._train = train_programs
        self.config = train_programs.config
        self._models: dict[str, _Model] = {}
        self.before_replacing: Callable[[str, Collection[Kind]], None] = _nothing
        """Called with a model and kinds of arrays, before others take the place of these."""
        self._before: dict[str, Adapter | None] = {}
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jax-pass")
        ranks = rank_classes(train_programs.limits.max_lora_rank)
        self._zeros = {rank: self._zero_state(rank) for rank in ranks}  # moments: fresh ones, and absent gradients

    def close(self) -> None:
        self._beside.shutdown()

    # Life of a model --------------------------------------------------------------------------------------------------

    def create(self, model_id: str, lora: LoraConfig) -> None:
        """Raise OutOfMemoryError if there is no room, and UserError if the rank is not served."""
        rank = class_of(lora.rank, self._train.limits.max_lora_rank)
        with out_of_memory_named(f"a model of rank {lora.rank}", "end a session, or take a smaller rank"):
            weights = jax.block_until_ready(self._placed(adapters.fresh(lora, self.config, rank)))
        self._models[model_id] = _Model(lora, rank, self._zeros[rank]._replace(weights=weights))

    def unload(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def publish(self, model_id: str, snapshot_id: str) -> JaxSnapshot:
        model = self._models[model_id]
        return JaxSnapshot(snapshot_id, model.lora, model.state.weights, self.config)

    def held(self, model_id: str) -> StateOnDevices:
        model = self._models[model_id]
        found: dict[Kind, Adapter] = {"weights": model.state.weights}
        if model.step:
            found |= {"adam_m": model.state.m, "adam_v": model.state.v}
        if model.gradients is not None:
            found["gradients"] = model.gradients
        return StateOnDevices(lora=model.lora, step=model.step, adapters=found)

    def kinds(self, model_id: str) -> tuple[int, Sequence[Kind]]:
        """Return the number of steps, and the kinds of arrays that there are."""
        held = self.held(model_id)
        return held.step, list(held.adapters)

    def capture(self, model_id: str) -> ModelState:
        held = self.held(model_id)
        named = {
            kind: adapters.CanonicalAdapter(fetch(each), held.lora, self.config) for kind, each in held.adapters.items()
        }
        return ModelState(lora=held.lora, step=held.step, **named)

    def restore(self, model_id: str, state: ModelState) -> None:
        """Raise UserError if names or shapes are not the model's, and OutOfMemoryError. The model is then unchanged."""
        self.take(model_id, self.load(model_id, state))

    def load(self, model_id: str, state: ModelState) -> LoadedState:
        """Put a state onto the devices. Raises as `restore`. On a mesh, each device's part of files is read by itself.

        Names and shapes of tensors in files have been checked.
        """
        model = self._models[model_id]
        specs, zeros = self._train.state_specs(model.padded_rank), self._zeros[model.padded_rank].m

        def put_with(specs: Any, named: Mapping[str, Array]) -> Adapter:
            if self._train.layout is not None and isinstance(named, StoredTensors):
                where = (model.padded_rank, self._train.layout, specs)
                return state_slices.read(named.stored, model.lora, self.config, *where)
            whole = adapters.from_canonical(named, model.lora, self.config, model.padded_rank)
            return put(adapters.transposed(whole), self._train.layout, specs)

        with out_of_memory_named("the state of a model", "end a session"):
            m, v = (put_with(specs, named) if named else zeros for named in (state.adam_m, state.adam_v))
            gradients = put_with(specs, state.gradients) if state.gradients else None
            weights = put_with(self._train.adapter_specs, state.weights)
            return LoadedState(jax.block_until_ready(optimizer.State(weights, m, v)), gradients, state.step)

    def take(self, model_id: str, loaded: LoadedState) -> None:
        """Give a model the state."""
        self.before_replacing(model_id, _ALL)
        model = self._models[model_id]
        model.state, model.gradients, model.step = loaded.state, loaded.gradients, loaded.step

    # Training ---------------------------------------------------------------------------------------------------------

    def prepare(self, kind: Pass, buckets: Sequence[Bucket], *, replays: bool = False) -> Bucket:
        """Compile the program if necessary. Return its bucket: the first one, or during the warm-up one that is ready.

        All must hold the micro-batch, and give it the same bits.
        """
        programs = [self._program(kind, bucket, replays=replays) for bucket in buckets]
        index = self._programs.pick(programs)
        with self._pass_named(buckets[index]):  # the compilers of accelerators refuse what does not fit
            self._programs.get(programs[index])
        return buckets[index]

    def score(self, one: TrainingPass) -> Scored:
        run = self._programs.get(self._program("score", one.bucket, replays=one.stream.replays))
        weights, _ = self._rows(one)
        with self._pass_named(one.bucket), self._device_lock:
            return _on_host(*run(self.base, weights, *self.arguments_of(one.stream)))

    def gradients(self, passes: Sequence[TrainingPass]) -> tuple[list[Scored], list[str]]:
        """Score passes side by side, and add the gradients of the summed losses to the models'.

        Return the models whose gradients are not finite, too.

        There are one or two. A model of the first is `apart` in the second. Raise OutOfMemoryError, and change nothing,
        if there is no memory for all.
        """
        with self._device_lock:
            others = [self._beside.submit(self._run_gradients, each) for each in passes[1:]]
            try:
                ran = [self._run_gradients(passes[0])]
            finally:
                wait(others)
        ran += [other.result() for other in others]
        for one, (_, sums) in zip(passes, ran, strict=True):
            self._take_sums(one, sums)
        models = dict.fromkeys(model_id for one in passes for model_id in one.models)
        return [scored for scored, _ in ran], self._not_finite(list(models))

    def _not_finite(self, models: Sequence[str]) -> list[str]:
        """Return the models whose gradients are not finite."""
        pending = [self._models[model_id] for model_id in models]
        if not self._train.finds_not_finite:  # the arrays are in this process: no copies
            found = [not all(map(_is_finite, jax.tree.leaves(model.gradients))) for model in pending]
        else:
            programs = [self._programs.get(self._train.not_finite(model.padded_rank)) for model in pending]
            with self._device_lock:
                flags = [run(model.gradients) for run, model in zip(programs, pending, strict=True)]
                found = [bool(flag) for flag in flags]
        return [model_id for model_id, diverged in zip(models, found, strict=True) if diverged]

    def _run_gradients(self, one: TrainingPass) -> tuple[Scored, Sequence[Adapter]]:
        """Return the results, and the new sums of each row."""
        run = self._programs.get(self._program("gradients", one.bucket, replays=one.stream.replays))
        weights, sums = self._rows(one)
        with self._pass_named(one.bucket):
            *scored, new_sums = run(self.base, weights, sums, *self.arguments_of(one.stream))
            return _on_host(*scored), new_sums

    def _take_sums(self, one: TrainingPass, sums: Sequence[Adapter]) -> None:
        for model_id in one.models:
            self.before_replacing(model_id, _GRADIENTS)
        for model_id in dict.fromkeys(one.models):
            model = self._models[model_id]
            own = [new for row, new in zip(one.models, sums, strict=False) if row == model_id]
            model.gradients = self._added(model, own) if model_id in one.apart else own[0]

    def _added(self, model: _Model, tiles: Sequence[Adapter]) -> Adapter:
        """Add the gradients of tiles to a model's, one after the other, as a pass does."""

        def add(total: jax.Array, *parts: jax.Array) -> Array:
            added = np.array(total)
            for part in parts:
                added += np.asarray(part)
            return added

        before = self._zeros[model.padded_rank].m if model.gradients is None else model.gradients
        return jax.device_put(jax.tree.map(add, before, *tiles))

    def begin(self, models: Sequence[str]) -> None:
        """Remember the gradients of these models until the next call of this method."""
        self._before = {model_id: self._models[model_id].gradients for model_id in models}

    def roll_back(self) -> None:
        """Return to the gradients as they were in `begin`."""
        for model_id, gradients in self._before.items():
            self._models[model_id].gradients = gradients

    def step(self, steps: Sequence[tuple[str, AdamParams]]) -> list[float]:
        """Step models, but for refused ones, or none. Return the norms of their gradients before clipping."""
        models = [self._models[model_id] for model_id, _ in steps]
        programs = [self._programs.get(self._train.step(model.padded_rank)) for model in models]
        with out_of_memory_named(f"the optimizer steps of {len(models)} models", "end a session"), self._device_lock:
            stepped = [
                self._stepped(run, model, adam) for run, model, (_, adam) in zip(programs, models, steps, strict=True)
            ]
            norms = [float(norm) for _, norm in stepped]  # wait for all of them
        refused = [isinstance(step_result(norm, adam), Failed) for norm, (_, adam) in zip(norms, steps, strict=True)]
        for (model_id, _), dropped in zip(steps, refused, strict=True):
            self.before_replacing(model_id, _GRADIENTS if dropped else _ALL)
        for model, (state, _), dropped in zip(models, stepped, refused, strict=True):
            model.gradients = None
            if not dropped:
                model.state = state
                model.step += 1
        return norms

    def drop_gradient(self, model_id: str) -> None:
        self.before_replacing(model_id, _GRADIENTS)
        self._models[model_id].gradients = None

    def _stepped(self, run: Compiled, model: _Model, adam: AdamParams) -> tuple[optimizer.State, Any]:
        """Return the new state and the norm. They may still be being computed."""
        absent = self._zeros[model.padded_rank].m
        hyper = self._small(optimizer.hyper(adam, model.lora, model.step + 1))
        stepped: tuple[optimizer.State, Any] = run(
            model.state, absent if model.gradients is None else model.gradients, hyper
        )
        return stepped

    def _pass_named(self, bucket: Bucket) -> AbstractContextManager[None]:
        num_tokens = bucket.num_tokens * self._train.axes.num_streams
        return out_of_memory_named(f"a pass over {num_tokens} tokens", "send shorter sequences")

    def _program(self, kind: Pass, bucket: Bucket, *, replays: bool) -> Program:
        make = self._train.score if kind == "score" else self._train.gradients
        return make(bucket, replays=replays)

    def _rows(self, one: TrainingPass) -> tuple[tuple[Adapter, ...], tuple[Adapter, ...]]:
        """Return the weights and the sums of each row."""
        models = [self._models[model_id] for model_id in one.models]
        zeros = self._zeros[models[0].padded_rank]
        unused = one.bucket.num_adapters - len(models)
        sums = [
            zeros.m if model.gradients is None or model_id in one.apart else model.gradients
            for model_id, model in zip(one.models, models, strict=True)
        ]
        return (*(model.state.weights for model in models), *[zeros.weights] * unused), (*sums, *[zeros.m] * unused)

    # Onto the devices -------------------------------------------------------------------------------------------------

    def _placed(self, adapter: Adapter) -> Adapter:
        """Put an adapter's weights onto the device, or divided onto the mesh."""
        return put(adapter, self._train.layout, self._train.adapter_specs)

    def _divided(self, adapter: Adapter, padded_rank: int) -> Adapter:
        """Put an adapter's gradients or moments onto the device, or divided onto the mesh."""
        return put(adapter, self._train.layout, self._train.state_specs(padded_rank))

    def _zero_state(self, padded_rank: int) -> optimizer.State:
        """Make the state of an unused row."""
        shapes = adapters.shapes(self.config, padded_rank)
        zeros = jax.tree.map(lambda leaf: memory.zeros(leaf.shape, leaf.dtype), shapes)
        weights = self._placed(zeros)
        parts = weights if self._train.axes.fsdp == 1 else self._divided(zeros, padded_rank)
        return optimizer.State(weights, parts, parts)

    def arguments_of(self, stream: Stream) -> tuple[Any, ...]:
        """Return what a program takes of a stream, on a mesh divided over its devices."""
        experts = () if stream.experts_LTC is None else (stream.experts_LTC,)
        arguments = (stream.tokens_T, stream.positions_T, stream.tiles, stream.batch, *experts)
        if self._train.layout is None:
            return arguments
        return tuple(put(arguments, self._train.layout, stream_specs(replays=stream.replays)))

    def _small(self, tree: Any) -> Any:
        if self._train.layout is None:
            return tree
        return put(tree, self._train.layout, jax.tree.map(lambda _: Spec(), tree))
