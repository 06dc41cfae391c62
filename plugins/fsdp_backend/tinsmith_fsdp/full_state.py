"""The engine's side of a fully trained model. No torch."""

from collections.abc import Sequence

from tinsmith import LoraConfig
from tinsmith.workers import FullModelState as WorkersState
from tinsmith.workers import StateFiles, TrainingProgram, WorkerGroup
from tinsmith_fsdp.messages import FullyLoaded


class FullModelState(WorkersState):
    """Knows what each rank holds."""

    def __init__(
        self,
        model_id: str,
        lora: LoraConfig,
        ranks: WorkerGroup[TrainingProgram],
        ranks_loaded: Sequence[FullyLoaded],
        files: StateFiles,
    ) -> None:
        """`ranks_loaded` are the ranks' answers after creating the model."""
        super().__init__(model_id, lora, ranks, {place.name: place.shape for place in ranks_loaded[0].places}, files)
        self.ranks_loaded = ranks_loaded
