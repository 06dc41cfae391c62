"""Rollouts: the sequences on which a run was trained by reinforcement learning, kept within a budget.

An engine records those of a pass with its result, as one row. The rewards that a client logs for a step are another
row, by the digests of sequences, so it does not matter which comes first. If a run has more than its budget, the rows
of its oldest steps go.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from tinsmith.errors import UserError

MOST_REWARDS: Final = 10_000
"""The rewards that a client may log for one step."""

DIGEST_BYTES: Final = 16

_TOKEN_BYTES: Final = 4
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
        return digest_of(self.tokens)

    def ends(self) -> set[bytes]:
        """Return the digests of what a sample of it may have been: all of it, or up to the end of a sampled stretch."""
        return {self.digest, *(digest_of(self.tokens[: _TOKEN_BYTES * after]) for _, after in self.sampled)}


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """The rollouts of a pass: those that are kept, and the `ends` of the others."""

    rollouts: tuple[Rollout, ...]
    others: tuple[bytes, ...] = ()


def digest_of(tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=DIGEST_BYTES).digest()


_encoder = msgspec.msgpack.Encoder()
_passes = msgspec.msgpack.Decoder(Pass)
_rewards = msgspec.msgpack.Decoder(dict[bytes, float])


def encode_rollouts(kept: Sequence[Rollout], others: Iterable[Rollout] = ()) -> bytes:
    """Encode the rollouts of a pass. Of the others, only `ends` are kept."""
    ends = {end for each in others for end in each.ends()}
    return zlib.compress(_encoder.encode(Pass(tuple(kept), tuple(sorted(ends)))), _FAST)


def decode_rollouts(content: bytes) -> Pass:
    return _passes.decode(zlib.decompress(content))


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
