"""The bounded set of shapes that training compiles for. User data determines a shape only through `Buckets.choose`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from tinsmith_jax.tiles import MAX_ADAPTERS, TILE

Pass = Literal["score", "gradients"]
"""Logprobs and losses alone, or their gradients as well."""

SMALLEST = 2 * TILE  # XLA computes a batch of one tile in a different order than a batch of several
_WIDE_FROM = 256  # tokens: several tenants together rarely have fewer, nor do several targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The shapes of one micro-batch."""

    num_tokens: int  # of each stream
    num_adapters: int
    num_targets: int  # per token
    padded_rank: int
    summed: bool = False  # its losses need sums over their sequences

    def __str__(self) -> str:
        sums = ", with sums" if self.summed else ""
        sizes = f"{self.num_tokens} tokens, {self.num_adapters} adapters, {self.num_targets} targets per token"
        return f"of {sizes}, rank {self.padded_rank}{sums}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The available sizes. The number of targets per token is either one or the maximum.

    On a CPU, where every program costs seconds and tens of MiB, there are fewer. A program with room for eight
    adapters takes as long for one there, and scoring of many targets as long as of one. An accelerator multiplies with
    all eight, and picks targets slowly. Buckets for losses that need sums are not listed: they are compiled on demand.
    """

    max_tokens: int  # of one stream; a power of two times TILE, at least two tiles
    max_targets: int  # per token
    num_streams: int = 1  # that run side by side on a mesh
    on_cpu: bool = True
    kind: Pass = "gradients"

    def of(self, kind: Pass) -> Self:
        """Return the sizes of that kind of pass."""
        return replace(self, kind=kind)

    def choose(
        self, *, num_tokens: int, num_adapters: int, num_targets: int, padded_rank: int, summed: bool = False
    ) -> Bucket:
        """Return the smallest bucket for a micro-batch of at most `max_tokens` tokens and MAX_ADAPTERS adapters."""
        targets = next(k for k in self._target_sizes() if k >= num_targets)
        adapters = next(k for k in self._stack_sizes(targets) if k >= num_adapters)
        tokens = next(t for t in self._token_sizes(adapters, targets) if t >= num_tokens)
        return Bucket(
            num_tokens=tokens, num_adapters=adapters, num_targets=targets, padded_rank=padded_rank, summed=summed
        )

    def all(self, padded_ranks: tuple[int, ...]) -> Iterator[Bucket]:
        """List every bucket, the most likely ones first: one target, small before large."""
        for targets in self._target_sizes():
            for adapters in self._stack_sizes(targets):
                for tokens in self._token_sizes(adapters, targets):
                    for rank in padded_ranks:
                        yield Bucket(num_tokens=tokens, num_adapters=adapters, num_targets=targets, padded_rank=rank)

    def soonest(self, padded_ranks: tuple[int, ...]) -> list[Bucket]:
        """List every bucket of every rank: ones with room for most requests, the smallest ones, the others."""
        every, n = list(self.all(padded_ranks)), len(padded_ranks)
        likely = [bucket for bucket in every if bucket.num_targets == every[0].num_targets]
        return list(dict.fromkeys([*likely[-n:], *every[:n], *every]))

    def holding(self, bucket: Bucket) -> list[Bucket]:
        """List the buckets that can hold the contents of `bucket`: first `bucket` itself, then larger ones by size.

        All have its number of targets, because one target is computed differently than several.
        """
        larger = [
            replace(other, summed=bucket.summed)
            for other in self.all((bucket.padded_rank,))
            if other.num_targets == bucket.num_targets
            and other.num_tokens >= bucket.num_tokens
            and other.num_adapters >= bucket.num_adapters
        ]
        return sorted(larger, key=lambda other: (other.num_tokens, other.num_adapters))

    def _target_sizes(self) -> tuple[int, ...]:
        return (self.max_targets,) if self.kind == "score" and self.on_cpu else (1, self.max_targets)

    def _stack_sizes(self, targets: int) -> tuple[int, ...]:
        # several targets are rare: one size for all
        return (MAX_ADAPTERS,) if self.on_cpu or targets > 1 else (1, MAX_ADAPTERS)

    def _token_sizes(self, adapters: int, targets: int) -> list[int]:
        sizes = [SMALLEST << i for i in range((self.max_tokens // SMALLEST).bit_length())]
        wide = min(_WIDE_FROM, sizes[-1])
        if self.kind == "score":  # takes a third of the time: fewer sizes
            # on a CPU the smallest, because each save for sampling scores a few tokens, and the largest
            return sorted({sizes[0], *sizes[-2:]}) if self.on_cpu else sizes[::-2][::-1]
        if targets > 1:
            return sorted({wide, sizes[-1]})
        if adapters > 1 and not self.on_cpu:
            return [size for size in sizes if size >= wide]
        return sizes
