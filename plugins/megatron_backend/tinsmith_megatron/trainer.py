"""One rank's work: its part of every pass through the pipeline, and of every optimizer step.

All ranks get the same calls. A pending gradient is complete after every call: the ranks that hold the same weights have
added their contributions before it returns.

- strict: each sequence is a stream of its own, and its gradient is added by itself, in the order of the log. No bit
  depends on other sequences or on how calls were merged.
- fast: all sequences of a micro-batch form one stream, and the adapters of all models are side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from tinsmith import FloatArray, LoraConfig
from tinsmith.workers import Scored, Segment
from tinsmith_megatron.adapters import Adapter, Stacks
from tinsmith_megatron.groups import sum_over_expert_copies_, sum_over_stage_
from tinsmith_megatron.head import Scores
from tinsmith_megatron.layout import AdapterLayout
from tinsmith_megatron.loss_table import LossTable
from tinsmith_megatron.messages import AdapterState, Setup, Step
from tinsmith_megatron.optimizer import adamw_, square_norm
from tinsmith_megatron.parallel import Part, Place
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import Stream, make_stream


class Trainer:
    """`is_holder`: whether this rank is the first of those that hold its part, and so speaks for it."""

    def __init__(
        self, stage: Stage, setup: Setup, losses: LossTable, place: Place, part: Part, *, is_holder: bool
    ) -> None:
        self._stage, self._setup, self._losses = stage, setup, losses
        self._place, self._part, self._is_holder = place, part, is_holder
        self._device = next(stage.parameters()).device
        self._adapters: dict[str, Adapter] = {}

    # life of a model

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        layout = AdapterLayout(lora, self._setup.architecture.shape, self._part)
        self._adapters[model_id] = Adapter(layout, self._placed(layout.fresh()))

    def unload_model(self, model_id: str) -> None:
        self._adapters.pop(model_id, None)

    def capture_adapter(self, model_id: str) -> AdapterState | None:
        """Copy the state of this part to the host, if this rank speaks for it."""
        if not self._is_holder:
            return None
        adapter = self._adapters[model_id]
        return AdapterState(
            weights=_to_host(adapter.weights),
            adam_m=None if adapter.m is None else _to_host(adapter.m),
            adam_v=None if adapter.v is None else _to_host(adapter.v),
            gradients=None if adapter.gradients is None else _to_host(adapter.gradients),
            step=adapter.step,
        )

    def adapter_weights(self, model_id: str) -> FloatArray | None:
        return _to_host(self._adapters[model_id].weights) if self._is_holder else None

    def restore_adapter(self, model_id: str, state: AdapterState) -> None:
        adapter = self._adapters[model_id]
        adapter.weights = self._placed(state.weights)
        adapter.m = None if state.adam_m is None else self._placed(state.adam_m)
        adapter.v = None if state.adam_v is None else self._placed(state.adam_v)
        adapter.gradients = None if state.gradients is None else self._placed(state.gradients)
        adapter.step = state.step

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
        scores = self._pass(streams, backward=backward)
        if backward:
            for owners, stacks in every if self._setup.strict else every[:1]:
                for model_id, index in owners.items():
                    self._add_gradient(model_id, stacks.gradient(index))
        if self._place.tp_rank:
            return []  # the others have computed the same
        return [each for stream, found in zip(streams, scores, strict=False) for each in _scored(stream, found)]

    def _stacks(self, models: Sequence[str], *, backward: bool) -> tuple[Mapping[str, int], Stacks]:
        owners = {model_id: index for index, model_id in enumerate(models)}
        return owners, Stacks([self._adapters[model_id] for model_id in models], backward=backward)

    def _pass(self, streams: Sequence[Stream], *, backward: bool) -> list[Scores]:
        """Run Megatron's pipeline schedule. The ranks of the last stage get scores, the others nothing."""

        def step(remaining: Iterator[Stream], stage: Stage) -> tuple[torch.Tensor, Any]:
            output, scores = stage(next(remaining), backward=backward)
            return output, partial(_kept, scores)

        with torch.set_grad_enabled(backward):
            scores: list[Scores] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(streams),
                model=self._stage,
                num_microbatches=len(streams),
                seq_length=streams[0].num_rows,  # of no account: lengths vary, and are sent along
                micro_batch_size=1,
                forward_only=not backward,
            )
        return scores

    def _add_gradient(self, model_id: str, gradient: torch.Tensor) -> None:
        """Complete a gradient with what the other ranks have computed, and add it to the pending one."""
        adapter, shared = self._adapters[model_id], self._adapters[model_id].layout.shared_size
        sum_over_stage_(gradient[:shared])
        sum_over_expert_copies_(gradient[shared:])
        adapter.gradients = gradient if adapter.gradients is None else adapter.gradients.add_(gradient)

    # steps

    def optim_step(self, steps: Sequence[Step]) -> list[float]:
        """Step the models and return the norms of their gradients before clipping."""
        gradients = [self._taken(self._adapters[step.model_id]) for step in steps]
        norms = self._norms(steps, gradients)
        for step, gradient, norm in zip(steps, gradients, norms, strict=True):
            adamw_(self._adapters[step.model_id], gradient, step.adam, norm)
        return norms

    @staticmethod
    def _taken(adapter: Adapter) -> torch.Tensor:
        gradient = torch.zeros_like(adapter.weights) if adapter.gradients is None else adapter.gradients
        adapter.gradients = None
        return gradient

    def _norms(self, steps: Sequence[Step], gradients: Sequence[torch.Tensor]) -> list[float]:
        """Return the norms of whole gradients: every part counts once, what a stage shares only in its first."""
        squares = torch.zeros(len(steps), dtype=torch.float64, device=self._device)
        if self._is_holder:
            for index, (step, gradient) in enumerate(zip(steps, gradients, strict=True)):
                shared = self._adapters[step.model_id].layout.shared_size
                squares[index] = square_norm(gradient[0 if self._part.is_first_of_stage else shared :])
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return [float(square) ** 0.5 for square in squares]


def _kept(scores: Scores, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Scores]:
    """Tell the schedule the loss, a number of tokens that it does not need, and what it shall keep."""
    return loss.clone(), torch.ones((), dtype=torch.int, device=loss.device), scores


def _scored(stream: Stream, scores: Scores) -> Iterator[Scored]:
    for segment, (start, stop) in zip(stream.segments, stream.bounds, strict=False):  # the last may be padding
        rows, width = slice(start, stop), segment.targets_TK.shape[1]
        loss = float(scores.loss_TK[rows, :width].sum(dtype=torch.float64))
        yield Scored(index=segment.index, logp_TK=_to_host(scores.logp_TK[rows, :width]), loss=loss)


def _to_host(tensor: torch.Tensor) -> FloatArray:
    host: FloatArray = tensor.detach().to("cpu", copy=True).numpy()
    return host
