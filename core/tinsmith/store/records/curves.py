"""What is kept of each step of a run: metrics and rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

OF_CLIENT: Final = -1
"""The `seq_id` of metrics and rewards that a client logged."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsRow:
    """The rollouts of one pass, or the rewards that the client logged for one step."""

    step: int
    seq_id: int  # OF_CLIENT: the client's rewards
    number: int  # of sequences in the pass
    content: bytes  # `rollouts.decode_rollouts`, or `decode_rewards`
