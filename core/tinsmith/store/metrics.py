"""The store, for curves: what passes, steps and clients measured, kept as long as its run.

An engine records its numbers with the result of an operation (`Completion.measured`), so they are there once. Each row
belongs to a step: the number of optimizer steps that the run has made before. A load of a state with more steps moves
the number forward, and nothing ever moves it back, so a curve has no two lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from tinsmith.errors import UserError

MOST_NAMES: Final = 512
"""The metrics that a client may log for one step."""

OF_CLIENT: Final = -1
"""The `seq_id` of metrics that a client logged."""

ENGINE_S: Final = "engine_s:sum"
"""The part of its batch's time that an operation took."""

QUEUED_S: Final = "queued_s:max"
"""How long it waited until an engine claimed it."""

TOKENS: Final = "trained_tokens:sum"

_ROW_BYTES: Final = 64  # of a row, without its numbers

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an operation of a model measured. A value may be NaN or infinite."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """The metrics of one operation, or those that the client logged for one step."""

    step: int
    seq_id: int  # OF_CLIENT: the client's
    time: datetime
    values: Mapping[str, float]


class Metrics(ABC):
    @abstractmethod
    async def log_metrics(self, model_id: str, points: Sequence[Measured]) -> int:
        """Keep what a client logs. A value replaces the one with its step and name. Return `metric_bytes` of the run.

        Repeating a call changes nothing. Raise UserError if a step would have more than `MOST_NAMES` metrics.
        """

    @abstractmethod
    async def read_metrics(
        self, model_id: str, *, from_step: int = 0, after: int | None = None, limit: int
    ) -> list[MetricsRow]:
        """Return rows by step and seq_id, from a step on. `after`: only those of `from_step` with a larger seq_id."""

    @abstractmethod
    async def wait_for_metrics(self, model_id: str, *, known: int, timeout_s: float) -> int:
        """Return `metric_bytes` of the run once they are more than `known`, or after `timeout_s`."""


def encode_values(values: Mapping[str, float]) -> bytes:
    return _encoder.encode(values)


def decode_values(stored: bytes) -> dict[str, float]:
    return _decoder.decode(stored)


def row_bytes(model_id: str, encoded: bytes) -> int:
    """Return what a row counts for."""
    return _ROW_BYTES + len(model_id) + len(encoded)


def merged(before: Mapping[str, float], point: Measured) -> dict[str, float]:
    """Return the values of a step with those that a client adds to it."""
    values = {**before, **point.values}
    if len(values) > MOST_NAMES:
        msg = f"step {point.step} would have {len(values)} metrics; at most {MOST_NAMES} can be logged for a step"
        raise UserError(msg)
    return values
