"""The engine's side of a fully trained model: has its workers write and read its state."""

from collections.abc import Mapping

from tinsmith.backend import HostSnapshot, ModelState
from tinsmith.operations import Array, LoraConfig
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.huggingface.state_files import Kind
from tinsmith_workers.group import WorkerGroup
from tinsmith_workers.program import FullState, TrainingProgram
from tinsmith_workers.state_files import Capture, StateFiles


class FullModelState:
    """Captures and restores the state of one model."""

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
