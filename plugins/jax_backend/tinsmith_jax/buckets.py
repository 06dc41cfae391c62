"""The bounded set of shapes that training compiles for. User data determines a shape only through `Buckets.choose`."""

from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith_jax.layers import TILE

ADAPTERS = (1, 8)  # adapters in a micro-batch
# Adapters in an optimizer call. Not 1: XLA removes the indexing of a stack of one, then fuses and rounds differently.
STEPS = (2, 8)
_SMALLEST = 2 * TILE  # XLA computes a batch of one tile in a different order than a batch of several
_MANY_ADAPTERS_FROM = 256  # tokens: several tenants together rarely have fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The shapes of one micro-batch."""

    num_tokens: int  # of each stream
    num_adapters: int
    num_targets: int  # per token
    padded_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The available sizes. The number of targets per token is either one or the maximum."""

    max_tokens: int  # of one stream; a power of two times TILE, at least two tiles
    max_targets: int  # per token
    num_streams: int = 1  # that run side by side on a mesh

    def choose(self, *, num_tokens: int, num_adapters: int, num_targets: int, padded_rank: int) -> Bucket:
        """Return the smallest bucket for a micro-batch of at most `max_tokens` tokens and ADAPTERS[-1] adapters."""
        targets = 1 if num_targets == 1 else self.max_targets
        adapters = next(k for k in _stack_sizes(targets) if k >= num_adapters)
        tokens = next(t for t in self._token_sizes(adapters, targets) if t >= num_tokens)
        return Bucket(num_tokens=tokens, num_adapters=adapters, num_targets=targets, padded_rank=padded_rank)

    def all(self, padded_ranks: tuple[int, ...]) -> Iterator[Bucket]:
        """List every bucket, the most likely ones first: one target, small before large."""
        for targets in (1, self.max_targets):
            for adapters in _stack_sizes(targets):
                for tokens in self._token_sizes(adapters, targets):
                    for rank in padded_ranks:
                        yield Bucket(num_tokens=tokens, num_adapters=adapters, num_targets=targets, padded_rank=rank)

    def holding(self, bucket: Bucket) -> list[Bucket]:
        """List the buckets that can hold the contents of `bucket`: first `bucket` itself, then larger ones by size.

        All have its number of targets, because one target is computed differently than several.
        """
        larger = [
            other
            for other in self.all((bucket.padded_rank,))
            if other.num_targets == bucket.num_targets
            and other.num_tokens >= bucket.num_tokens
            and other.num_adapters >= bucket.num_adapters
        ]
        return sorted(larger, key=lambda other: (other.num_tokens, other.num_adapters))

    def _token_sizes(self, adapters: int, targets: int) -> list[int]:
        sizes = [_SMALLEST << i for i in range((self.max_tokens // _SMALLEST).bit_length())]
        if targets > 1:  # rare: few, widely spaced sizes
            return sorted({min(_MANY_ADAPTERS_FROM, sizes[-1]), sizes[-1]})
        if adapters > ADAPTERS[0]:
            return [size for size in sizes if size >= min(_MANY_ADAPTERS_FROM, sizes[-1])]
        return sizes


def _stack_sizes(targets: int) -> tuple[int, ...]:
    return ADAPTERS if targets == 1 else ADAPTERS[-1:]  # several targets are rare: one size for all
