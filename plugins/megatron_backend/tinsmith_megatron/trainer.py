"""One rank's work: its part of every pass through the pipeline, and of every optimizer step.

All ranks get the same calls. A pending gradient is complete after every call: the ranks that hold the same weights have
added their contributions before it returns.

- strict: each sequence is a stream of its own, and its gradient is added by itself, in the order of the log. No bit
  depends on other sequences or on how calls were merged.
- fast: all sequences of a micro-batch form one stream, and the adapters of all models are side by side.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tinsmith import LoraConfig
from tinsmith_megatron.adapters import Stacks
from tinsmith_megatron.full_model import FullModel, adamw_
from tinsmith_megatron.groups import sum_over_expert_copies_, sum_over_stage_
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.passes import answers, run_pipeline
from tinsmith_megatron.program import Setup, Training
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import make_stream
from tinsmith_workers import AdapterLayout, Answer, ModelPart, Segment
from tinsmith_workers.torch import Adapter, LossTable, ModelsOfWorker, square_norm


class Trainer(ModelsOfWorker[FullModel], Training):
    """`stage`: None if no adapters are served.

    `is_holder`: whether this rank is the first of those that hold its part, and so speaks for it.
    """

    def __init__(
        self,
        stage: Stage | None,
        setup: Setup,
        losses: LossTable,
        coordinates: Coordinates,
        part: ModelPart,
        device: torch.device,
        *,
        is_holder: bool,
    ) -> None:
        super().__init__(device, setup.config.capture_buffer_bytes, speaks=is_holder, optimizer=adamw_)
        self._stage, self._setup, self._losses = stage, setup, losses
        self._coordinates, self._part = coordinates, part

    # life of a model

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        self._add_adapter(model_id, AdapterLayout(lora, self._setup.architecture.shape, self._part))

    def create_full_model(self, model_id: str) -> Mapping[str, tuple[int, ...]]:
        model = FullModel(model_id, self._setup, self._losses, self._coordinates, self._part, self.device)
        self.full[model_id] = model
        return model.shapes()

    # passes

    def run(
        self,
        micros: Sequence[Sequence[Segment]],
        models: Sequence[Sequence[str]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> list[Answer]:
        if self._setup.strict:
            every = [self._stacks(list(dict.fromkeys(owned)), backward=backward) for owned in models]
        else:
            every = [self._stacks(sorted({m for owned in models for m in owned}), backward=backward)] * len(models)
        streams = [
            make_stream(
                segments, owners, stacks, self._losses, multiple=self._setup.config.tensor_parallel, device=self.device
            )
            for segments, (owners, stacks) in zip(micros, every, strict=True)
        ]
        assert self._stage is not None
        scores = run_pipeline(self._stage, streams, backward=backward)
        if backward:
            for owners, stacks in every if self._setup.strict else every[:1]:
                for model_id, index in owners.items():
                    self._add_gradient(model_id, stacks.gradient(index))
        diverged = self._not_finite(sorted({each for owned in models for each in owned}) if backward else ())
        return [*answers(streams, scores, self._coordinates, self._part), *diverged]

    def _stacks(self, models: Sequence[str], *, backward: bool) -> tuple[Mapping[str, int], Stacks]:
        owners = {model_id: index for index, model_id in enumerate(models)}
        return owners, Stacks([self.adapters[model_id] for model_id in models], backward=backward)

    def _add_gradient(self, model_id: str, gradient: torch.Tensor) -> None:
        """Complete a gradient with the other ranks' contributions, and add it to the pending one."""
        adapter, shared = self.adapters[model_id], self.adapters[model_id].layout.shared_size
        sum_over_stage_(gradient[:shared])
        sum_over_expert_copies_(gradient[shared:])
        adapter.gradients = gradient if adapter.gradients is None else adapter.gradients.add_(gradient)

    def _norms(self, adapters: Sequence[Adapter], gradients: Sequence[torch.Tensor]) -> list[float]:
        """Count every part once, and parts shared within a stage only on its first rank."""
        squares = torch.zeros(len(adapters), dtype=torch.float64, device=self.device)
        if self._speaks:
            for index, (adapter, gradient) in enumerate(zip(adapters, gradients, strict=True)):
                start = 0 if self._part.is_first_of_stage else adapter.layout.shared_size
                squares[index] = square_norm(gradient[start:])
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return [float(square) ** 0.5 for square in squares]
