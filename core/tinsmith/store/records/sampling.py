"""Sampling sessions, notices of finished samples, and tokens that are being drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final, Self

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSessionRecord:
    """A sampling session. `snapshot_id` None is the base model; a tinker:// path is a persisted snapshot.

    The last two fields say which checkpoint it was opened on, and by which right: see `revocation.py`.
    """

    sampling_session_id: str
    session_id: str
    tenant: str
    base_model: str
    created_at: datetime
    snapshot_id: str | None = None
    model_path: str | None = None
    model_id: str | None = None  # the model that the weights come from, if known
    checkpoint_created_at: datetime | None = None  # `created_at` of that checkpoint; None: not known
    only_while_public: bool = False  # opened on another tenant's published checkpoint
    num_bytes: int = 0  # of the snapshot, if it belongs to this sampling session alone


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """A notice that an unordered operation has finished, without its result.

    Each clone of a sampling client numbers its samples in a range of its own: clone = seq_id // SEQ_IDS_PER_CLONE.
    """

    SEQ_IDS_PER_CLONE: ClassVar[int] = 10**9

    request_id: str
    succeeded: bool
    size_bytes: int  # of the recorded result


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSamples:
    """`cursor` is the place of the last entry, or the cursor of the request if there are no entries."""

    samples: tuple[FinishedSample, ...]
    cursor: int


MOST_TOKENS: Final = 512
"""Of one `DrawnTokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """Tokens of one sequence of a sample, in the order in which they were drawn."""

    sampling_session_id: str
    seq_id: int
    sequence: int
    first: int  # how many tokens of the sequence come before
    tokens: Sequence[int]  # at most MOST_TOKENS

    def encoded(self) -> str:
        """Return what is not the sample's name as a text without tabs and line breaks, of at most 7 KB."""
        return msgspec.json.encode((self.sequence, self.first, self.tokens)).decode()

    @classmethod
    def decoded(cls, sampling_session_id: str, seq_id: int, text: str) -> Self:
        sequence, first, tokens = msgspec.json.decode(text, type=tuple[int, int, list[int]])
        return cls(
            sampling_session_id=sampling_session_id, seq_id=seq_id, sequence=sequence, first=first, tokens=tokens
        )
