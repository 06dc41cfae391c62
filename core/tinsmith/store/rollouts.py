"""Rollouts: the sequences on which a run was trained by reinforcement learning, kept within a budget.

An engine records those of a pass with its result, as one row. The rewards that a client logs for a step are another
row, by the digests of sequences, so it does not matter which comes first. If a run has more than its budget, the rows
of its oldest steps go.
"""

import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from tinsmith.errors import UserError

MOST_REWARDS: Final = 10_000
"""The rewards that a client may log for one step."""

DIGEST_BYTES: Final = 16

_ROW_BYTES: Final = 64  # of a row, without its content
_FAST: Final = 1  # zlib's level


class Rollout(msgspec.Struct, frozen=True, array_like=True):
    """One sequence."""

    tokens: bytes  # of prompt and answer, as little-endian int32
    sampled: tuple[tuple[int, int], ...]  # stretches of tokens that were sampled: the first, and the one after the last
    advantage: float  # mean over the sampled tokens
    kl: float  # of sampler and trainer, in nats for each sampled token

    @property
    def digest(self) -> bytes:
        return blake2b(self.tokens, digest_size=DIGEST_BYTES).digest()


_encoder = msgspec.msgpack.Encoder()
_rollouts = msgspec.msgpack.Decoder(list[Rollout])
_rewards = msgspec.msgpack.Decoder(dict[bytes, float])


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    return zlib.compress(_encoder.encode(rollouts), _FAST)


def decode_rollouts(content: bytes) -> list[Rollout]:
    return _rollouts.decode(zlib.decompress(content))


def decode_rewards(content: bytes) -> dict[bytes, float]:
    return _rewards.decode(content)


def with_rewards(before: bytes | None, step: int, rewards: Mapping[bytes, float]) -> bytes:
    """Return the content of a step's row of rewards with those that a client adds to it."""
    known = {**(decode_rewards(before) if before else {}), **rewards}
    if len(known) > MOST_REWARDS:
        msg = f"step {step} would have {len(known)} rewards; at most {MOST_REWARDS} can be logged for a step"
        raise UserError(msg)
    return _encoder.encode(known)


def row_bytes(model_id: str, content: bytes) -> int:
    """Return what a row counts for."""
    return _ROW_BYTES + len(model_id) + len(content)
