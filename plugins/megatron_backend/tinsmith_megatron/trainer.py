"""One rank's work: its part of every pass through the pipeline, and of every optimizer step.

All ranks get the same calls. A pending gradient is complete after every call: the ranks that hold the same weights have
added their contributions before it returns.

- strict: each sequence is a stream of its own, and its gradient is added by itself, in the order of the log. No bit
  depends on other sequences or on how calls were merged.
- fast: all sequences of a micro-batch form one stream, and the adapters of all models are side by side.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import torch
import torch.distributed as dist

from tinsmith import FloatArray, LoraConfig
from tinsmith.huggingface import Kind, Targets
from tinsmith.workers import (
    AdapterLayout,
    AdapterState,
    FullState,
    ModelPart,
    ModelStep,
    Scored,
    Segment,
    StateWriter,
    Written,
)
from tinsmith_megatron.adapters import Adapter, Stacks
from tinsmith_megatron.full_model import FullModel
from tinsmith_megatron.groups import sum_over_expert_copies_, sum_over_stage_
from tinsmith_megatron.loss_table import LossTable
from tinsmith_megatron.messages import Setup
from tinsmith_megatron.optimizer import adamw_, square_norm
from tinsmith_megatron.parallel import Place
from tinsmith_megatron.passes import run_pipeline, scored, to_host
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import make_stream

_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class Trainer:
    """`stage`: None if no adapters are served.

    `is_holder`: whether this rank is the first of those that hold its part, and so speaks for it.
    """

    def __init__(
        self,
        stage: Stage | None,
        setup: Setup,
        losses: LossTable,
        place: Place,
        part: ModelPart,
        device: torch.device,
        *,
        is_holder: bool,
    ) -> None:
        self._stage, self._setup, self._losses = stage, setup, losses
        self._place, self._part, self._is_holder = place, part, is_holder
        self._device = device
        self._adapters: dict[str, Adapter] = {}
        self._full: dict[str, FullModel] = {}
        self._state_writer = StateWriter(setup.config.capture_buffer_bytes)

    # life of a model

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        layout = AdapterLayout(lora, self._setup.architecture.shape, self._part)
        self._adapters[model_id] = Adapter(layout, self._placed(layout.fresh()))

    def create_full_model(self, model_id: str) -> dict[str, tuple[int, ...]]:
        """Read the weights into a stage of their own. Return the shapes of what this rank writes."""
        model = FullModel(model_id, self._setup, self._losses, self._place, self._part, self._device)
        self._full[model_id] = model
        return model.shapes()

    def unload_model(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)
        if model_id in self._full:
            self._settle(model_id)
            del self._full[model_id]
            gc.collect()  # modules are full of cycles

    def capture_adapter(self, model_id: str) -> AdapterState | None:
        """Copy the state of this part to the host, if this rank speaks for it."""
        if not self._is_holder:
            return None
        adapter = self._adapters[model_id]
        return AdapterState(
            weights=to_host(adapter.weights),
            adam_m=None if adapter.m is None else to_host(adapter.m),
            adam_v=None if adapter.v is None else to_host(adapter.v),
            gradients=None if adapter.gradients is None else to_host(adapter.gradients),
            step=adapter.step,
        )

    def adapter_weights(self, model_id: str) -> FloatArray | None:
        return to_host(self._adapters[model_id].weights) if self._is_holder else None

    def restore_adapter(self, model_id: str, state: AdapterState) -> None:
        adapter = self._adapters[model_id]
        adapter.weights = self._placed(state.weights)
        adapter.m = None if state.adam_m is None else self._placed(state.adam_m)
        adapter.v = None if state.adam_v is None else self._placed(state.adam_v)
        adapter.gradients = None if state.gradients is None else self._placed(state.gradients)
        adapter.step = state.step

    # state of a fully trained model: this rank's part

    def full_state(self, model_id: str) -> FullState:
        return self._full[model_id].state()

    def capture(self, capture_id: str, model_id: str, targets: Targets, ended: Sequence[str]) -> None:
        """Begin to write this rank's part to the files."""
        self._state_writer.forget(ended)
        model = self._full[model_id]
        model.begin_copying()
        self._state_writer.begin(capture_id, model_id, model.slices(targets))

    def captured(self, capture_id: str) -> Written:
        return self._state_writer.written(capture_id)

    def restore_full(self, model_id: str, state: FullState, stored: Targets) -> None:
        self._settle(model_id)
        self._full[model_id].restore(state, stored)

    def _settle(self, model_id: str, kinds: Sequence[Kind] = _KINDS) -> None:
        """Let these tensors of a fully trained model change."""
        self._state_writer.settle(model_id, kinds)

    def _placed(self, flat: FloatArray) -> torch.Tensor:
        return torch.tensor(flat, device=self._device)

    # passes

    def run(
        self,
        micros: Sequence[Sequence[Segment]],
        models: Sequence[Sequence[str]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> list[Scored]:
        """Score this rank's segments by micro-batch, and add to the pending gradients.

        models: of each micro-batch, those of all ranks' segments, by data-parallel rank.
        """
        if self._setup.strict:
            every = [self._stacks(list(dict.fromkeys(owned)), backward=backward) for owned in models]
        else:
            every = [self._stacks(sorted({m for owned in models for m in owned}), backward=backward)] * len(models)
        streams = [
            make_stream(
                segments, owners, stacks, self._losses, multiple=self._setup.config.tensor_parallel, device=self._device
            )
            for segments, (owners, stacks) in zip(micros, every, strict=True)
        ]
        assert self._stage is not None
        scores = run_pipeline(self._stage, streams, backward=backward)
        if backward:
            for owners, stacks in every if self._setup.strict else every[:1]:
                for model_id, index in owners.items():
                    self._add_gradient(model_id, stacks.gradient(index))
        if self._place.tp_rank:
            return []  # the others have computed the same
        return [each for stream, found in zip(streams, scores, strict=False) for each in scored(stream, found)]

    def run_full(
        self,
        model_id: str,
        micros: Sequence[Sequence[Segment]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> list[Scored]:
        """Score this rank's segments of one operation of a fully trained model."""
        if backward:
            self._settle(model_id, ("gradients",))
        return self._full[model_id].run(micros, backward=backward)

    def _stacks(self, models: Sequence[str], *, backward: bool) -> tuple[Mapping[str, int], Stacks]:
        owners = {model_id: index for index, model_id in enumerate(models)}
        return owners, Stacks([self._adapters[model_id] for model_id in models], backward=backward)

    def _add_gradient(self, model_id: str, gradient: torch.Tensor) -> None:
        """Complete a gradient with what the other ranks have computed, and add it to the pending one."""
        adapter, shared = self._adapters[model_id], self._adapters[model_id].layout.shared_size
        sum_over_stage_(gradient[:shared])
        sum_over_expert_copies_(gradient[shared:])
        adapter.gradients = gradient if adapter.gradients is None else adapter.gradients.add_(gradient)

    # steps

    def optim_step(self, steps: Sequence[ModelStep]) -> list[float]:
        """Step the models and return the norms of their gradients before clipping."""
        own = [step for step in steps if step.model_id not in self._full]
        norms = dict(zip((step.model_id for step in own), self._step_adapters(own), strict=True))
        for step in steps:
            if step.model_id in self._full:
                self._settle(step.model_id)
                norms[step.model_id] = self._full[step.model_id].optim_step(step.adam)
        return [norms[step.model_id] for step in steps]

    def _step_adapters(self, steps: Sequence[ModelStep]) -> list[float]:
        gradients = [self._taken(self._adapters[step.model_id]) for step in steps]
        norms = self._norms(steps, gradients)
        for step, gradient, norm in zip(steps, gradients, norms, strict=True):
            adapter = self._adapters[step.model_id]
            if adapter.m is None or adapter.v is None:
                adapter.m, adapter.v = torch.zeros_like(adapter.weights), torch.zeros_like(adapter.weights)
            adapter.step += 1
            adamw_(adapter.weights, adapter.m, adapter.v, gradient, step.adam, norm, adapter.step)
        return norms

    @staticmethod
    def _taken(adapter: Adapter) -> torch.Tensor:
        gradient = torch.zeros_like(adapter.weights) if adapter.gradients is None else adapter.gradients
        adapter.gradients = None
        return gradient

    def _norms(self, steps: Sequence[ModelStep], gradients: Sequence[torch.Tensor]) -> list[float]:
        """Return the norms of whole gradients: every part counts once, what a stage shares only in its first."""
        squares = torch.zeros(len(steps), dtype=torch.float64, device=self._device)
        if self._is_holder:
            for index, (step, gradient) in enumerate(zip(steps, gradients, strict=True)):
                shared = self._adapters[step.model_id].layout.shared_size
                squares[index] = square_norm(gradient[0 if self._part.is_first_of_stage else shared :])
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return [float(square) ** 0.5 for square in squares]
