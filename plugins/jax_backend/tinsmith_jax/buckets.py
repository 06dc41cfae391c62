"""The bounded set of shapes that training compiles for. No shape comes from user data but through `Buckets.choose`."""

from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith_jax.layers import TILE

TARGETS = (1, 64)  # targets per token
ADAPTERS = (1, 8)  # adapters in a micro-batch
# Adapters in an optimizer call. Not 1: XLA drops the indexing of a stack of one, fuses what follows in another way, and
# rounds differently.
STEPS = (2, 8)
_SMALLEST = 2 * TILE  # XLA computes a batch of one tile in another order than a batch of several
_MANY_ADAPTERS_FROM = 256  # tokens: several tenants seldom have less together


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The shapes of one micro-batch."""

    num_tokens: int
    num_adapters: int
    num_targets: int  # per token
    padded_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    max_tokens: int  # a power of two times TILE, at least two tiles

    def choose(self, *, num_tokens: int, num_adapters: int, num_targets: int, padded_rank: int) -> Bucket:
        """Give the smallest bucket that holds a micro-batch which keeps within `max_tokens` and ADAPTERS[-1]."""
        adapters = next(k for k in ADAPTERS if k >= num_adapters)
        targets = next(k for k in TARGETS if k >= num_targets)
        tokens = next(t for t in self._token_sizes(adapters, targets) if t >= num_tokens)
        return Bucket(num_tokens=tokens, num_adapters=adapters, num_targets=targets, padded_rank=padded_rank)

    def all(self, padded_ranks: tuple[int, ...]) -> Iterator[Bucket]:
        """List every bucket, the likely ones first: one target, small before large."""
        for targets in TARGETS:
            for adapters in ADAPTERS:
                for tokens in self._token_sizes(adapters, targets):
                    for rank in padded_ranks:
                        yield Bucket(num_tokens=tokens, num_adapters=adapters, num_targets=targets, padded_rank=rank)

    def _token_sizes(self, adapters: int, targets: int) -> list[int]:
        sizes = [_SMALLEST << i for i in range((self.max_tokens // _SMALLEST).bit_length())]
        if targets > TARGETS[0]:  # rare: a coarse ladder
            return sizes[-1:] if adapters > ADAPTERS[0] else sorted({min(_MANY_ADAPTERS_FROM, sizes[-1]), sizes[-1]})
        if adapters > ADAPTERS[0]:
            return [size for size in sizes if size >= min(_MANY_ADAPTERS_FROM, sizes[-1])]
        return sizes
