"""The engine's side of the models that its workers train: their state, which the workers hold in parts."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tinsmith.backend import HostSnapshot, ModelState
from tinsmith.operations import Array, FloatArray, LoraConfig
from tinsmith_checkpoints.huggingface.decoder import DecoderShape
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.huggingface.state_files import Kind
from tinsmith_workers.adapter_layout import ModelPart, WholeLayout, holders
from tinsmith_workers.group import WorkerGroup
from tinsmith_workers.program import AdapterState, FullState, TrainingProgram
from tinsmith_workers.state_files import Capture, StateFiles

T = TypeVar("T")


class AdapterModelState:
    """Captures and restores the state of a LoRA model, put together from its parts."""

    def __init__(
        self,
        model_id: str,
        lora: LoraConfig,
        workers: WorkerGroup[TrainingProgram],
        shape: DecoderShape,
        parts: Sequence[ModelPart],
    ) -> None:
        """`parts`: each worker's, by rank."""
        self._model_id, self.lora, self._workers, self._parts = model_id, lora, workers, parts
        self._holders = holders(parts)
        self._layout = WholeLayout(lora, shape, list(self._holders))

    def capture(self) -> ModelState:
        states = self._of_holders(self._workers.call(TrainingProgram.capture_adapter, self._model_id))

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
        flats = self._of_holders(self._workers.call(TrainingProgram.adapter_weights, self._model_id))
        return HostSnapshot(snapshot_id, self.lora, self._layout.to_canonical(flats))

    def _of_holders(self, answers: Sequence[T | None]) -> list[T]:
        """Return the answer of the first worker of each part."""
        found = [answers[rank] for rank in self._holders.values()]
        return [each for each in found if each is not None]

    def restore(self, state: ModelState) -> None:
        """Raise UserError, changing nothing, if the tensors do not fit this model."""
        weights = self._layout.from_canonical(state.weights)
        others = [self._flats(each) for each in (state.adam_m, state.adam_v, state.gradients)]
        by_part = {
            part: AdapterState(weights=own, adam_m=m, adam_v=v, gradients=gradients, step=state.step)
            for part, own, m, v, gradients in zip(self._holders, weights, *others, strict=True)
        }
        if len(by_part) == 1:  # then it is encoded once
            self._workers.call(TrainingProgram.restore_adapter, self._model_id, *by_part.values())
        else:
            own = [(self._model_id, by_part[part]) for part in self._parts]
            self._workers.call_each(TrainingProgram.restore_adapter, own)

    def _flats(self, named: Mapping[str, Array]) -> Sequence[FloatArray | None]:
        return self._layout.from_canonical(named) if named else [None] * len(self._holders)


class FullModelState:
    """Captures and restores the state of a fully trained model, which its workers write and read."""

    def __init__(
        self,
        model_id: str,
        lora: LoraConfig,
        workers: WorkerGroup[TrainingProgram],
        shapes: Mapping[str, tuple[int, ...]],
        files: StateFiles,
    ) -> None:
        """`shapes`: of all tensors, by canonical name."""
        self._model_id, self.lora, self._workers, self._files = model_id, lora, workers, files
        self._shapes = dict(shapes)

    def capture(self) -> ModelState:
        found = self._workers.call(TrainingProgram.full_state, self._model_id)[0]
        kinds: tuple[Kind, ...] = ("weights",)
        kinds += ("adam_m", "adam_v") if found.moments else ()
        kinds += ("gradients",) if found.pending else ()
        capture = self._captured(kinds)

        def tensors(kind: Kind) -> Mapping[str, Array]:
            return capture.tensors(kind) if kind in kinds else {}

        return ModelState(
            lora=self.lora,
            weights=tensors("weights"),
            adam_m=tensors("adam_m"),
            adam_v=tensors("adam_v"),
            gradients=tensors("gradients"),
            step=found.step,
        )

    def publish(self, snapshot_id: str) -> HostSnapshot:
        return HostSnapshot(snapshot_id, self.lora, self._captured(("weights",)).tensors("weights"))

    def _captured(self, kinds: tuple[Kind, ...]) -> Capture:
        return self._files.capture(self._model_id, self._shapes, kinds)

    def restore(self, state: ModelState) -> None:
        """Raise UserError, changing nothing, if the tensors do not fit this model."""
        tensors: dict[Kind, Mapping[str, Array]] = {"weights": state.weights}
        if state.adam_m or state.adam_v:
            tensors |= {"adam_m": state.adam_m, "adam_v": state.adam_v}
        if state.gradients:
            tensors["gradients"] = state.gradients
        stored: dict[Kind, StoredTensors] = {
            kind: self._files.stored(kind, each, self._shapes) for kind, each in tensors.items()
        }
        found = FullState(step=state.step, moments="adam_m" in stored, pending="gradients" in stored)
        places = {kind: each.stored for kind, each in stored.items()}
        self._workers.call(TrainingProgram.restore_full, self._model_id, found, places)
