"""The engine's side of a LoRA model: its state, put together from the parts that its workers hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.backend import HostSnapshot, ModelState
from tinsmith.huggingface.decoder import DecoderShape
from tinsmith.operations import Array, FloatArray, LoraConfig
from tinsmith.workers.adapter_layout import ModelPart, WholeLayout, holders
from tinsmith.workers.group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """One part of a model's training state as flat vectors. None: never set, so zero."""

    weights: FloatArray
    adam_m: FloatArray | None
    adam_v: FloatArray | None
    gradients: FloatArray | None
    step: int


class AdapterModelState:
    """Captures and restores the state of one model.

    The workers' program has `capture_adapter(model_id)`, which returns an `AdapterState`, `adapter_weights(model_id)`,
    which returns its weights alone, and `restore_adapter(model_id, state)`. Of the first two, the answer of the first
    worker of each part counts; the others may return None.
    """

    def __init__(
        self, model_id: str, lora: LoraConfig, workers: WorkerGroup, shape: DecoderShape, parts: Sequence[ModelPart]
    ) -> None:
        """`parts` are those of the workers, by rank."""
        self._model_id, self.lora, self._workers, self._parts = model_id, lora, workers, parts
        self._holders = holders(parts)
        self._layout = WholeLayout(lora, shape, list(self._holders))

    def capture(self) -> ModelState:
        states: list[AdapterState] = self._answers("capture_adapter")

        def named(flats: Sequence[FloatArray | None]) -> dict[str, Array]:
            present = [flat for flat in flats if flat is not None]
            return self._layout.to_canonical(present) if present else {}

        return ModelState(
            lora=self.lora,
            weights=named([state.weights for state in states]),
            adam_m=named([state.adam_m for state in states]),
            adam_v=named([state.adam_v for state in states]),
            gradients=named([state.gradients for state in states]),
            step=states[0].step,
        )

    def publish(self, snapshot_id: str) -> HostSnapshot:
        weights = self._layout.to_canonical(self._answers("adapter_weights"))
        return HostSnapshot(snapshot_id, self.lora, weights)

    def _answers(self, method: str) -> list[Any]:  # Any: as the method of the program
        answers = self._workers.call(method, self._model_id)
        return [answers[rank] for rank in self._holders.values()]

    def restore(self, state: ModelState) -> None:
        """Raise UserError, changing nothing, if the tensors are not those of this model."""
        weights = self._layout.from_canonical(state.weights)
        others = [self._flats(each) for each in (state.adam_m, state.adam_v, state.gradients)]
        by_part = {
            part: AdapterState(weights=own, adam_m=m, adam_v=v, gradients=gradients, step=state.step)
            for part, own, m, v, gradients in zip(self._holders, weights, *others, strict=True)
        }
        if len(by_part) == 1:  # then it is encoded once
            self._workers.call("restore_adapter", self._model_id, *by_part.values())
        else:
            self._workers.call_each("restore_adapter", [(self._model_id, by_part[part]) for part in self._parts])

    def _flats(self, named: Mapping[str, Array]) -> Sequence[FloatArray | None]:
        return self._layout.from_canonical(named) if named else [None] * len(self._holders)
