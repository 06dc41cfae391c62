"""Every registered loss as one function over the rows of a stream, each of which has its own loss.

Legend: T = rows of the stream, K = maximum number of targets per token in it, C = rows of a chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from tinsmith.losses import LossSpec
from tinsmith.operations import Array
from tinsmith_workers.sequences import Segment
from tinsmith_workers.torch.transfers import to_device


@dataclass(frozen=True, slots=True)
class LossBatch:
    """The inputs of the losses. Loss and gradient are zero where `mask_TK` is false."""

    targets_TK: torch.Tensor  # int64
    mask_TK: torch.Tensor  # bool
    kind_T1: torch.Tensor  # int64, index into the table
    inputs: Mapping[str, torch.Tensor]  # float32 [T, K]
    config: Mapping[tuple[str, str], torch.Tensor]  # by loss and key, float32 [T, 1]
    kinds: tuple[str, ...]  # the losses that occur
    sequences: tuple[tuple[int, int, str], ...] = ()  # rows and loss of each that needs sums over its sequence
    sums: Mapping[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # by loss and name, float32 [T, 1]

    def rows(self, start: int, stop: int) -> "LossBatch":
        return LossBatch(
            self.targets_TK[start:stop],
            self.mask_TK[start:stop],
            self.kind_T1[start:stop],
            {name: value[start:stop] for name, value in self.inputs.items()},
            {key: value[start:stop] for key, value in self.config.items()},
            self.kinds,
            sums={key: value[start:stop] for key, value in self.sums.items()},
        )


class LossTable:
    """The losses by name, in a fixed order."""

    def __init__(self, losses: Mapping[str, LossSpec]) -> None:
        self._specs = {name: losses[name] for name in sorted(losses)}
        self._numbers = {name: number for number, name in enumerate(self._specs)}

    def batch(self, segments: Sequence[Segment], device: torch.device, *, padding: int = 0) -> LossBatch:
        """Concatenate the loss inputs of segments, followed by `padding` rows without a loss.

        Targets are padded to the maximum number per token.
        """
        width = max((segment.targets_TK.shape[1] for segment in segments), default=1)
        kinds = tuple(sorted({segment.loss_fn for segment in segments}))
        names = sorted({name for kind in kinds for name in self._specs[kind].inputs})
        keys = [(kind, key) for kind in kinds for key in self._specs[kind].settings]

        def rows(values: list[Array], width: int, dtype: torch.dtype) -> torch.Tensor:
            parts = [np.pad(value, ((0, 0), (0, width - value.shape[1]))) for value in values]
            if padding:
                parts.append(np.zeros((padding, width), parts[0].dtype if parts else np.float32))
            return to_device(np.concatenate(parts), device).to(dtype)

        def input_of(segment: Segment, name: str) -> Array:
            found = segment.loss_inputs.get(name)
            return np.zeros(segment.targets_TK.shape, np.float32) if found is None else found

        def setting_of(segment: Segment, key: tuple[str, str]) -> Array:
            value = segment.loss_config[key[1]] if segment.loss_fn == key[0] else 0.0
            return np.full(segment.num_tokens, value, np.float32)

        def column(values: list[Array], dtype: torch.dtype) -> torch.Tensor:
            return rows([value[:, None] for value in values], 1, dtype)

        ends = pairwise(accumulate((segment.num_tokens for segment in segments), initial=0))
        return LossBatch(
            targets_TK=rows([s.targets_TK for s in segments], width, torch.int64),
            mask_TK=rows([np.ones(s.targets_TK.shape, np.bool_) for s in segments], width, torch.bool),
            kind_T1=column([np.full(s.num_tokens, self._numbers[s.loss_fn], np.int64) for s in segments], torch.int64),
            inputs={name: rows([input_of(s, name) for s in segments], width, torch.float32) for name in names},
            config={key: column([setting_of(s, key) for s in segments], torch.float32) for key in keys},
            kinds=kinds,
            sequences=tuple(
                (start, stop, segment.loss_fn)
                for segment, (start, stop) in zip(segments, ends, strict=True)
                if self._specs[segment.loss_fn].sums
            ),
        )

    def with_sums(self, logp_TK: torch.Tensor, batch: LossBatch) -> LossBatch:
        """Add the sums over sequences that losses need. Each is computed of its own rows alone."""
        sums = {
            (kind, name): torch.zeros_like(logp_TK[:, :1]) for kind in batch.kinds for name in self._specs[kind].sums
        }
        for start, stop, kind in batch.sequences:
            spec, own = self._specs[kind], batch.rows(start, stop)
            inputs = {name: own.inputs[name][:, :1] for name in spec.inputs}
            config = {key: own.config[kind, key] for key in spec.settings}
            assert spec.summands is not None
            parts = spec.summands(torch, logp_TK[start:stop, :1], inputs, config)
            for name, part in zip(spec.sums, parts, strict=True):
                sums[kind, name][start:stop] = part.sum()
        return replace(batch, sums=sums)

    def per_token(self, logp_CK: torch.Tensor, batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and its derivative by the logprob, both [C, K], using each row's own loss."""
        loss, gradient = torch.zeros_like(logp_CK), torch.zeros_like(logp_CK)
        for kind in batch.kinds:
            spec = self._specs[kind]
            inputs = {name: batch.inputs[name] for name in spec.inputs}
            inputs |= {name: batch.sums[kind, name] for name in spec.sums}
            config = {key: batch.config[kind, key] for key in spec.settings}
            this_loss, this_gradient = spec.per_token(torch, logp_CK, inputs, config)
            chosen = batch.mask_TK & (batch.kind_T1 == self._numbers[kind])
            loss = torch.where(chosen, this_loss, loss)
            gradient = torch.where(chosen, this_gradient, gradient)
        return loss, gradient
