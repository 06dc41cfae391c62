"""The models that a worker trains, and their state: the worker's side of `tinsmith_workers.WorkersBackend`.

A LoRA model's weights, moments and pending gradients are one vector each: see `tinsmith_workers.AdapterLayout`.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final, Generic, TypeVar, get_args

import torch

from tinsmith.divergence import refuses_step
from tinsmith.operations import FloatArray
from tinsmith_checkpoints.huggingface.state_files import Kind, Targets
from tinsmith_workers.adapter_layout import AdapterLayout
from tinsmith_workers.program import AdapterState, FullState, ModelStep, TrainingProgram
from tinsmith_workers.sequences import Answer, NotFinite, Segment
from tinsmith_workers.state_writer import StateWriter, Written
from tinsmith_workers.torch.adamw import Step, Stepped, adamw_, norms
from tinsmith_workers.torch.full_models import FullModelOfWorker
from tinsmith_workers.torch.transfers import to_host

_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(slots=True)
class Adapter:
    """A LoRA model's state, or this worker's part, as flat float32 vectors. `gradients` None: none are pending."""

    layout: AdapterLayout
    weights: torch.Tensor
    m: torch.Tensor | None = None  # None: no step yet
    v: torch.Tensor | None = None
    gradients: torch.Tensor | None = None
    step: int = 0

    def tensors(self) -> list[torch.Tensor]:
        """Return what there is of the state."""
        return [each for each in (self.weights, self.m, self.v, self.gradients) if each is not None]

    def take_gradient(self) -> torch.Tensor:
        """Take the pending gradient, zeros if there is none."""
        gradient = torch.zeros_like(self.weights) if self.gradients is None else self.gradients
        self.gradients = None
        return gradient

    def begin_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Count a step. Return m and v."""
        if self.m is None or self.v is None:
            self.m, self.v = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.step += 1
        return self.m, self.v


Full = TypeVar("Full", bound=FullModelOfWorker)


class ModelsOfWorker(TrainingProgram, Generic[Full]):
    """A worker's models. A subclass makes them, runs their passes and steps adapters.

    All workers get the same calls. `adapters` are the LoRA models by `model_id`, on `device`.
    """

    def __init__(
        self, device: torch.device, capture_buffer_bytes: int, *, speaks: bool, optimizer: Step = adamw_
    ) -> None:
        """`speaks`: whether this worker answers for its part of the adapters, which others may hold as well."""
        self.device, self._optimizer, self._speaks = device, optimizer, speaks
        self.adapters: dict[str, Adapter] = {}
        self.full: dict[str, Full] = {}
        self._state_writer = StateWriter(capture_buffer_bytes)

    def _norms(self, adapters: Sequence[Adapter], gradients: Sequence[torch.Tensor]) -> list[float]:
        """Return the norms of whole gradients, of which these are this worker's part: here, each is whole."""
        del adapters
        return norms(gradients)

    def unload_model(self, model_id: str) -> None:
        self.adapters.pop(model_id, None)
        if model_id in self.full:
            self._settle(model_id)
            del self.full[model_id]
            free_what_is_unused()

    # state of a LoRA model

    def _add_adapter(self, model_id: str, layout: AdapterLayout) -> None:
        self.adapters[model_id] = Adapter(layout, self._placed(layout.fresh()))

    def capture_adapter(self, model_id: str) -> AdapterState | None:
        """Copy the state to the host, if this worker speaks for it."""
        if not self._speaks:
            return None
        adapter = self.adapters[model_id]
        return AdapterState(
            weights=to_host(adapter.weights),
            adam_m=None if adapter.m is None else to_host(adapter.m),
            adam_v=None if adapter.v is None else to_host(adapter.v),
            gradients=None if adapter.gradients is None else to_host(adapter.gradients),
            step=adapter.step,
        )

    def adapter_weights(self, model_id: str) -> FloatArray | None:
        return to_host(self.adapters[model_id].weights) if self._speaks else None

    def restore_adapter(self, model_id: str, state: AdapterState) -> None:
        adapter = self.adapters[model_id]
        adapter.weights = self._placed(state.weights)
        adapter.m = None if state.adam_m is None else self._placed(state.adam_m)
        adapter.v = None if state.adam_v is None else self._placed(state.adam_v)
        adapter.gradients = None if state.gradients is None else self._placed(state.gradients)
        adapter.step = state.step

    def _placed(self, flat: FloatArray) -> torch.Tensor:
        return torch.tensor(flat, device=self.device)

    # state of a fully trained model: this worker's part

    def full_state(self, model_id: str) -> FullState:
        return self.full[model_id].state()

    def sees(self, file: Path) -> bool:
        return file.exists()

    def capture(self, capture_id: str, owner: str, targets: Targets, ended: Sequence[str]) -> None:
        self._state_writer.forget(ended)
        model = self.full[owner]
        model.begin_copying()
        self._state_writer.begin(capture_id, owner, model.slices(targets))

    def captured(self, capture_id: str) -> Written:
        return self._state_writer.written(capture_id)

    def capture_bytes(self) -> tuple[int, int]:
        return self._state_writer.peak_bytes, self._state_writer.settled_bytes

    def restore_full(self, model_id: str, state: FullState, stored: Targets) -> None:
        self._settle(model_id)
        self.full[model_id].restore(state, stored)

    def _settle(self, model_id: str, kinds: Sequence[Kind] = _KINDS) -> None:
        """Let these tensors of a fully trained model change."""
        self._state_writer.settle(model_id, kinds)

    # passes of a fully trained model

    def run_full(
        self,
        model_id: str,
        micros: Sequence[Sequence[Segment]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> Sequence[Answer]:
        if backward:
            self._settle(model_id, ("gradients",))
        scored = self.full[model_id].score(micros, backward=backward)
        return [*scored, *self._not_finite([model_id] if backward else [])]

    # gradients and steps

    def _not_finite(self, models: Iterable[str]) -> list[NotFinite]:
        """Say of which models this worker's part of the pending gradient is not finite. Waits for the device."""
        found = _without_finite_norms({model_id: self._gradients(model_id) for model_id in models}, 2.0)
        return [NotFinite(model_id) for model_id in _without_finite_norms(found, torch.inf)]

    def _gradients(self, model_id: str) -> Iterable[torch.Tensor]:
        if model_id in self.full:
            return self.full[model_id].gradients()
        gradient = self.adapters[model_id].gradients
        return () if gradient is None else (gradient,)

    def optim_step(self, steps: Sequence[ModelStep]) -> list[float]:
        own = [step for step in steps if step.model_id not in self.full]
        norms = dict(zip((step.model_id for step in own), self._step_adapters(own), strict=True))
        for step in steps:
            if step.model_id in self.full:
                self._settle(step.model_id)
                norms[step.model_id] = self.full[step.model_id].optim_step(step.adam)
        return [norms[step.model_id] for step in steps]

    def _step_adapters(self, steps: Sequence[ModelStep]) -> list[float]:
        adapters = [self.adapters[step.model_id] for step in steps]
        gradients = [adapter.take_gradient() for adapter in adapters]
        norms, tensors = self._norms(adapters, gradients), list[Stepped]()
        for step, adapter, gradient, norm in zip(steps, adapters, gradients, norms, strict=True):
            if not refuses_step(norm, step.adam):
                m, v = adapter.begin_step()
                tensors.append(Stepped(adapter.weights, gradient, m, v, step.adam, norm, adapter.step))
        self._optimizer(tensors)
        return norms

    def drop_gradient(self, model_id: str) -> None:
        if model_id in self.full:
            self._settle(model_id, ("gradients",))
            self.full[model_id].drop_gradient()
        else:
            self.adapters[model_id].gradients = None


def _without_finite_norms(
    models: Mapping[str, Iterable[torch.Tensor]], order: float
) -> dict[str, Iterable[torch.Tensor]]:
    """Return the models with a tensor whose norm is not finite: for order 2, finite numbers may overflow it.

    The device is waited for once, for all of them.
    """
    found = {model_id: [tensor for tensor in tensors if tensor.numel()] for model_id, tensors in models.items()}
    every = list(chain(*found.values()))
    if not every:
        return {}
    finite = iter(torch.isfinite(torch.stack(torch._foreach_norm(every, order))).tolist())  # noqa: SLF001
    return {model_id: own for model_id, own in found.items() if False in list(islice(finite, len(own)))}


def free_what_is_unused() -> None:
    """Free the memory of dropped modules, whose reference cycles only the garbage collector frees."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
