"""Training data and prompts. All tokens are below 56, so that every model knows them.

A `Sequence` is the SDK's Datum. Its inputs are already shifted: position i predicts `targets[i]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

TOKENS: Final = (12, 7, 31, 5, 9, 22, 3, 17)
OTHER_TOKENS: Final = (40, 2, 8, 33, 21, 6, 11, 29)
_HIGHEST: Final = 56
_DTYPES: Final = {"target_tokens": ("<i8", 2)}
_FLOATS: Final = ("<f4", 1)


@dataclass(frozen=True, slots=True)
class Sequence:
    tokens: ListLike[int]
    inputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    chunks: int = 1  # text chunks that the tokens come in

    def proto(self) -> Any:
        datum = pb.Datum()
        for part in np.array_split(np.asarray(self.tokens, "<i4"), self.chunks):
            datum.model_input.add().encoded_text.tokens = part.tobytes()
        for name, values in self.inputs.items():
            dtype, number = _DTYPES.get(name, _FLOATS)
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = np.ascontiguousarray(values, dtype).tobytes()
            tensor.dtype = number
            tensor.shape.extend(np.shape(values))
        return datum


def learned(tokens: ListLike[int] = TOKENS, weights: ListLike[float] | float = 1.0, *, chunks: int = 1) -> Sequence:
    """A sequence to learn with cross entropy."""
    targets = np.asarray(tokens[1:], np.int64)
    return Sequence(
        tokens[:-1],
        {"target_tokens": targets, "weights": np.broadcast_to(np.asarray(weights, np.float64), targets.shape)},
        chunks,
    )


def rewarded(
    logprobs: npt.ArrayLike,
    advantages: npt.ArrayLike = 1.0,
    tokens: ListLike[int] = TOKENS,
    mask: npt.ArrayLike | None = None,
) -> Sequence:
    """A sequence for the losses of reinforcement learning. `mask` is gspo's."""
    targets = np.asarray(tokens[1:], np.int64)
    inputs = {
        "target_tokens": targets,
        "logprobs": np.asarray(logprobs, np.float64),
        "advantages": np.broadcast_to(np.asarray(advantages, np.float64), targets.shape),
    }
    if mask is not None:
        inputs["sequence_ratio_mask"] = np.asarray(mask, np.float64)
    return Sequence(tokens[:-1], inputs)


def ragged(count: int, seed: int = 0) -> list[Sequence]:
    """Sequences of 3 to 12 tokens."""
    random = np.random.default_rng(seed)
    return [learned(random.integers(1, _HIGHEST, random.integers(3, 13)).tolist()) for _ in range(count)]
