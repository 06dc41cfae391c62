"""Curves: what passes, steps and clients measured, kept as long as its run.

An engine records its numbers with the result of an operation (`Completion.measured`), so they are there once. Each row
belongs to a step: the number of optimizer steps that the run has made before. A load of a state with more steps moves
the number forward, and nothing ever moves it back, so a curve has no two lines.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from tinsmith.errors import UserError
from tinsmith.store.records.curves import Measured

MOST_NAMES: Final = 512
"""The metrics that a client may log for one step."""

ENGINE_S: Final = "engine_s:sum"
"""The part of its batch's time that an operation took."""

QUEUED_S: Final = "queued_s:max"
"""How long it waited until an engine claimed it."""

TOKENS: Final = "trained_tokens:sum"

_ROW_BYTES: Final = 64  # of a row, without its numbers

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, float])


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
