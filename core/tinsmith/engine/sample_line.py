"""Whose sample is drawn next.

A sampler draws so many sequences at a time, and knows no tenants. So further samples wait here, and the scheduler
chooses among the oldest of each tenant.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tinsmith import operations as ops
from tinsmith.backend import Capabilities
from tinsmith.engine.claimed import Claimed
from tinsmith.scheduler import Limits, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a sample that is being drawn takes up."""

    tenant: str
    sequences: int
    reserved: bool


class SampleLine:
    """Samples that wait, and the places of those that are drawn.

    While there is a single tenant, the sampler gets a quarter more than it draws, so that it never waits for the next
    one. As soon as there is a second tenant, an eighth of the places is reserved for tenants of which nothing is being
    drawn, so that one with long samples does not keep out the others. All other places are given in the scheduler's
    order: a sample of many sequences waits until they fit, and nobody else takes their places meanwhile.

    The reserved places have an order of their own, over those tenants alone, and count nothing in the common one. They
    add to what a tenant gets there: one sample at a time, while nothing else of it is drawn.
    """

    def __init__(self, scheduler: Scheduler, sampling: Capabilities) -> None:
        self._scheduler = scheduler
        self._places = sampling.max_sequences
        self._limits = Limits(max_batch_tokens=sampling.max_sequences * sampling.max_context_tokens)
        self._memory: dict[bool, Mapping[str, float]] = {False: {}, True: {}}  # the scheduler's, by `reserved`
        self._waiting: dict[str, dict[str, Claimed]] = {}  # by tenant and request_id, oldest first
        self._drawn: dict[str, _Place] = {}  # by request_id
        self._tenants: set[str] = set()  # that have ever sampled

    def add(self, claimed: Claimed) -> None:
        record = claimed.record
        self._tenants.add(record.tenant)
        self._waiting.setdefault(record.tenant, {})[record.request_id] = claimed

    def remove(self, request_id: str) -> bool:
        """Remove a waiting sample. Return False if it is not waiting."""
        for tenant, samples in self._waiting.items():
            if samples.pop(request_id, None) is not None:
                if not samples:
                    del self._waiting[tenant]
                return True
        return False

    def clear(self) -> None:
        self._waiting.clear()

    def take(self) -> Claimed | None:
        """Take the sample that is drawn next. Return None if there is none, or no place for it."""
        heads = [next(iter(samples.values())) for samples in self._waiting.values()]
        taken = self._take_of(heads, reserved=False)
        if taken is None:
            drawn = {place.tenant for place in self._drawn.values()}
            others = [each for each in heads if each.record.tenant not in drawn]
            taken = self._take_of([each for each in others if self._fits(each, reserved=True)], reserved=True)
        return taken

    def end(self, request_id: str) -> None:
        """Free the places of a sample."""
        self._drawn.pop(request_id, None)

    def _take_of(self, heads: Sequence[Claimed], *, reserved: bool) -> Claimed | None:
        """Take the one that the scheduler chooses, if it fits."""
        by_id = {each.record.request_id: each for each in heads}
        pending = [replace(each.as_pending(), model_id=each.record.request_id) for each in heads]  # they have no order
        batch = self._scheduler.plan(pending, limits=self._limits, now_s=time.time(), memory=self._memory[reserved])
        if not batch.request_ids or not self._fits(by_id[batch.request_ids[0]], reserved=reserved):
            return None
        claimed = by_id[batch.request_ids[0]]
        self._memory[reserved] = batch.memory
        self.remove(claimed.record.request_id)
        place = _Place(tenant=claimed.record.tenant, sequences=self._sequences(claimed), reserved=reserved)
        self._drawn[claimed.record.request_id] = place
        return claimed

    def _fits(self, claimed: Claimed, *, reserved: bool) -> bool:
        size = self._num_reserved if reserved else self._num_common
        used = sum(place.sequences for place in self._drawn.values() if place.reserved is reserved)
        return self._sequences(claimed) <= size - used

    @property
    def _num_reserved(self) -> int:
        return -(-self._places // 8) if len(self._tenants) > 1 and self._places > 1 else 0

    @property
    def _num_common(self) -> int:
        ahead = self._places // 4 if len(self._tenants) <= 1 else 0
        return self._places + ahead - self._num_reserved

    def _sequences(self, claimed: Claimed) -> int:
        """Return how many places a sample takes: at most all that are not reserved."""
        if claimed.refused is not None:
            return 0
        return min(cast("ops.Sample", claimed.operation).num_samples, self._num_common)
