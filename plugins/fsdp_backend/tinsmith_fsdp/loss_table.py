"""Every registered loss as one function over a stream whose tokens belong to different losses.

Legend: T = tokens, K = maximum number of targets per token in the stream, C = rows of a chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinsmith import Array, LossSpec
from tinsmith.workers import Segment


def to_device(array: Array, device: torch.device) -> torch.Tensor:
    """Copy to the device. A GPU goes on with its work meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class LossBatch:
    """The inputs of the losses. Loss and gradient are zero for padding (`mask_TK` is false)."""

    targets_TK: torch.Tensor  # int64
    mask_TK: torch.Tensor  # bool
    kind_T1: torch.Tensor  # int64, index into the table
    inputs: Mapping[str, torch.Tensor]  # float32 [T, K]
    config: Mapping[tuple[str, str], torch.Tensor]  # by loss and key, float32 [T, 1]
    kinds: tuple[str, ...]  # the losses that occur

    def rows(self, start: int, stop: int) -> "LossBatch":
        return LossBatch(
            self.targets_TK[start:stop],
            self.mask_TK[start:stop],
            self.kind_T1[start:stop],
            {name: value[start:stop] for name, value in self.inputs.items()},
            {key: value[start:stop] for key, value in self.config.items()},
            self.kinds,
        )


class LossTable:
    """The losses by name, in a fixed order."""

    def __init__(self, losses: Mapping[str, LossSpec]) -> None:
        self._specs = {name: losses[name] for name in sorted(losses)}
        self._numbers = {name: number for number, name in enumerate(self._specs)}

    def batch(self, segments: Sequence[Segment], device: torch.device) -> LossBatch:
        """Concatenate the loss inputs of segments, padding targets to the maximum number per token."""
        width = max(segment.targets_TK.shape[1] for segment in segments)
        kinds = tuple(sorted({segment.loss_fn for segment in segments}))
        names = sorted({name for kind in kinds for name in self._specs[kind].inputs})
        keys = [(kind, key) for kind in kinds for key in sorted(self._specs[kind].config)]

        def padded(values: list[Array], dtype: torch.dtype) -> torch.Tensor:
            rows = [np.pad(value, ((0, 0), (0, width - value.shape[1]))) for value in values]
            return to_device(np.concatenate(rows), device).to(dtype)

        def input_of(segment: Segment, name: str) -> Array:
            found = segment.loss_inputs.get(name)
            return np.zeros(segment.targets_TK.shape, np.float32) if found is None else found

        def setting_of(segment: Segment, key: tuple[str, str]) -> Array:
            value = segment.loss_config[key[1]] if segment.loss_fn == key[0] else 0.0
            return np.full(segment.num_tokens, value, np.float32)

        def column(values: list[Array]) -> torch.Tensor:
            return to_device(np.concatenate(values)[:, None], device)

        return LossBatch(
            targets_TK=padded([segment.targets_TK for segment in segments], torch.int64),
            mask_TK=padded([np.ones(segment.targets_TK.shape, np.bool_) for segment in segments], torch.bool),
            kind_T1=column([np.full(s.num_tokens, self._numbers[s.loss_fn], np.int64) for s in segments]),
            inputs={name: padded([input_of(s, name) for s in segments], torch.float32) for name in names},
            config={key: column([setting_of(s, key) for s in segments]) for key in keys},
            kinds=kinds,
        )

    def empty(self, device: torch.device) -> LossBatch:
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        return LossBatch(zero, zero.bool(), zero, {}, {}, ())

    def per_token(self, logp_CK: torch.Tensor, batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and its derivative by the logprob, both [C, K], using each row's own loss."""
        loss, gradient = torch.zeros_like(logp_CK), torch.zeros_like(logp_CK)
        for kind in batch.kinds:
            spec = self._specs[kind]
            inputs = {name: batch.inputs[name] for name in spec.inputs}
            config = {key: batch.config[kind, key] for key in spec.config}
            this_loss, this_gradient = spec.per_token(torch, logp_CK, inputs, config)
            chosen = batch.mask_TK & (batch.kind_T1 == self._numbers[kind])
            loss = torch.where(chosen, this_loss, loss)
            gradient = torch.where(chosen, this_gradient, gradient)
        return loss, gradient
