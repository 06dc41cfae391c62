"""The engine's side of a fully trained model: moves its state between ranks and host, a tensor at a time. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tinsmith import Array, HostSnapshot, LoraConfig, ModelState, UserError
from tinsmith.workers import Kind, Spool, WorkerGroup
from tinsmith_fsdp.messages import FullState, FullyLoaded


class FullModelState:
    """Captures and restores the state of one model."""

    def __init__(
        self,
        model_id: str,
        lora: LoraConfig,
        ranks: WorkerGroup,
        ranks_loaded: Sequence[FullyLoaded],
        spool_directory: Path,
    ) -> None:
        """`made` are the ranks' answers after creating the model."""
        self._model_id, self._lora, self._ranks, self._directory = model_id, lora, ranks, spool_directory
        self.ranks_loaded = ranks_loaded
        self._shapes = {place.name: place.shape for place in ranks_loaded[0].places}

    def capture(self) -> ModelState:
        found: FullState = self._ranks.call("full_state", self._model_id)[0]
        kinds: tuple[Kind, ...] = ("weights",)
        kinds += ("adam_m", "adam_v") if found.moments else ()
        kinds += ("gradients",) if found.pending else ()
        spool = self._spooled(kinds)

        def tensors(kind: Kind) -> Mapping[str, Array]:
            return spool.tensors(kind) if kind in kinds else {}

        return ModelState(
            lora=self._lora,
            weights=tensors("weights"),
            adam_m=tensors("adam_m"),
            adam_v=tensors("adam_v"),
            gradients=tensors("gradients"),
            step=found.step,
        )

    def publish(self, snapshot_id: str) -> HostSnapshot:
        return HostSnapshot(snapshot_id, self._lora, self._spooled(("weights",)).tensors("weights"))

    def _spooled(self, kinds: tuple[Kind, ...]) -> Spool:
        spool = Spool(self._directory, kinds, self._shapes)
        for _, piece in self._ranks.stream("full_pieces", self._model_id, kinds):
            spool.put(piece)
        return spool

    def restore(self, state: ModelState) -> None:
        """Raise UserError, changing nothing, if the tensors are not those of this model."""
        kinds: dict[Kind, Mapping[str, Array]] = {"weights": state.weights}
        if state.adam_m or state.adam_v:
            kinds |= {"adam_m": state.adam_m, "adam_v": state.adam_v}
        if state.gradients:
            kinds["gradients"] = state.gradients
        for kind, tensors in kinds.items():
            self._check_names(kind, tensors)
        try:
            for kind, tensors in kinds.items():
                for number, name in enumerate(self._shapes):
                    self._send(kind, number, name, tensors[name])
        except Exception:
            self._ranks.call("drop_taken", self._model_id)
            raise
        found = FullState(step=state.step, moments="adam_m" in kinds, pending="gradients" in kinds)
        self._ranks.call("restore_full", self._model_id, found)

    def _check_names(self, kind: Kind, tensors: Mapping[str, Array]) -> None:
        names = set(tensors)
        for problem, differing in (
            ("are missing", self._shapes.keys() - names),
            ("do not belong to this model", names - self._shapes.keys()),
        ):
            if differing:
                msg = f"{kind}: {min(differing)!r} and {len(differing) - 1} more {problem}"
                raise UserError(msg)

    def _send(self, kind: Kind, number: int, name: str, tensor: Array) -> None:
        """Send each rank its part."""
        whole = np.asarray(tensor, np.float32)
        if whole.shape != self._shapes[name]:
            msg = f"{kind}: {name!r} has shape {whole.shape}; this model needs {self._shapes[name]}"
            raise UserError(msg)
        parts = []
        for loaded in self.ranks_loaded:
            place = loaded.places[number]
            rows = whole[slice(*place.rows)]
            part = rows if place.columns is None else rows[:, slice(*place.columns)]
            parts.append((self._model_id, kind, name, np.ascontiguousarray(part)))
        self._ranks.call_each("take_full", parts)
