"""The engine's side of a fully trained model: has its ranks write and read its state. No torch."""

from collections.abc import Mapping, Sequence

from tinsmith import Array, HostSnapshot, LoraConfig, ModelState
from tinsmith.huggingface import Kind, StoredTensors
from tinsmith.workers import Capture, StateFiles, WorkerGroup
from tinsmith_fsdp.messages import FullState, FullyLoaded


class FullModelState:
    """Captures and restores the state of one model."""

    def __init__(
        self,
        model_id: str,
        lora: LoraConfig,
        ranks: WorkerGroup,
        ranks_loaded: Sequence[FullyLoaded],
        files: StateFiles,
    ) -> None:
        """`ranks_loaded` are the ranks' answers after creating the model."""
        self._model_id, self.lora, self._ranks, self._files = model_id, lora, ranks, files
        self.ranks_loaded = ranks_loaded
        self._shapes = {place.name: place.shape for place in ranks_loaded[0].places}

    def capture(self) -> ModelState:
        found: FullState = self._ranks.call("full_state", self._model_id)[0]
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
        """Raise UserError, changing nothing, if the tensors are not those of this model."""
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
        self._ranks.call("restore_full", self._model_id, found, places)
