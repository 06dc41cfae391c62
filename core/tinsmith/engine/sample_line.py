"""Whose sample is drawn next.

A sampler draws so many sequences at a time, and knows no tenants. So further samples wait here, and the scheduler
chooses among the oldest of each tenant.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from tinsmith import operations as ops
from tinsmith.backend import Capabilities
from tinsmith.engine.claimed import Claimed
from tinsmith.scheduler import Limits, Pending, Scheduler

_STAYS_S: Final = 60.0  # for which a tenant counts after its last sample; a clock that is set back ends it


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sample that waits, and what the scheduler sees of it."""

    claimed: Claimed
    pending: Pending


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
    drawn, so that one with long samples does not keep out the others. A tenant counts for a minute after its last
    sample: one that sends the next when it has read the last finds a place. All other places are given in the
    scheduler's order: a sample of many sequences waits until they fit, and nobody else takes their places meanwhile.

    The reserved places have an order of their own, over those tenants alone, and count nothing in the common one. They
    add to what a tenant gets there: one sample at a time, while nothing else of it is drawn.
    """

    def __init__(self, scheduler: Scheduler, sampling: Capabilities, *, clock: Callable[[], float] = time.time) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._places = sampling.max_sequences
        self._limits = Limits(max_batch_tokens=sampling.max_sequences * sampling.max_context_tokens)
        self._memory: dict[bool, Mapping[str, float]] = {False: {}, True: {}}  # the scheduler's, by `reserved`
        self._waiting: dict[str, dict[str, _Waiting]] = {}  # by tenant and request_id, oldest first
        self._drawn: dict[str, _Place] = {}  # by request_id
        self._present: dict[str, float] = {}  # by tenant, when it last had a sample here
        self._is_shared = False

    def add(self, claimed: Claimed) -> None:
        record = claimed.record
        pending = replace(claimed.as_pending(), model_id=record.request_id)  # samples have no order
        self._waiting.setdefault(record.tenant, {})[record.request_id] = _Waiting(claimed, pending)

    def remove(self, request_id: str) -> bool:
        """Remove a waiting sample. Return False if it is not waiting."""
        for tenant, samples in self._waiting.items():
            if samples.pop(request_id, None) is not None:
                self._present[tenant] = self._clock()
                if not samples:
                    del self._waiting[tenant]
                return True
        return False

    def clear(self) -> None:
        self._waiting.clear()

    def take(self) -> Claimed | None:
        """Take the sample that is drawn next. Return None if there is none, or no place for it."""
        self._look_who_is_present()
        heads = [next(iter(samples.values())) for samples in self._waiting.values()]
        taken = self._take_of(heads, reserved=False)
        if taken is None:
            drawn, free = {place.tenant for place in self._drawn.values()}, self._free(reserved=True)
            others = [each for each in heads if each.pending.tenant not in drawn and self._sequences(each) <= free]
            taken = self._take_of(others, reserved=True)
        return taken

    def end(self, request_id: str) -> None:
        """Free the places of a sample."""
        place = self._drawn.pop(request_id, None)
        if place is not None:
            self._present[place.tenant] = self._clock()

    def _look_who_is_present(self) -> None:
        now_s = self._clock()
        self._present |= dict.fromkeys((*self._waiting, *(place.tenant for place in self._drawn.values())), now_s)
        recent = {tenant: at_s for tenant, at_s in self._present.items() if abs(now_s - at_s) <= _STAYS_S}
        self._present, self._is_shared = recent, len(recent) > 1

    def _take_of(self, heads: Sequence[_Waiting], *, reserved: bool) -> Claimed | None:
        """Take the one that the scheduler chooses, if it fits."""
        free = self._free(reserved=reserved)
        if all(self._sequences(each) > free for each in heads):
            return None  # whichever it would choose
        by_id = {each.pending.request_id: each for each in heads}
        pending = [each.pending for each in heads]
        batch = self._scheduler.plan(pending, limits=self._limits, now_s=self._clock(), memory=self._memory[reserved])
        if not batch.request_ids or self._sequences(chosen := by_id[batch.request_ids[0]]) > free:
            return None
        self._memory[reserved] = batch.memory
        self.remove(chosen.pending.request_id)
        place = _Place(tenant=chosen.pending.tenant, sequences=self._sequences(chosen), reserved=reserved)
        self._drawn[chosen.pending.request_id] = place
        return chosen.claimed

    def _free(self, *, reserved: bool) -> int:
        size = self._num_reserved if reserved else self._num_common
        return size - sum(place.sequences for place in self._drawn.values() if place.reserved is reserved)

    @property
    def _num_reserved(self) -> int:
        return -(-self._places // 8) if self._is_shared and self._places > 1 else 0

    @property
    def _num_common(self) -> int:
        ahead = 0 if self._is_shared else self._places // 4
        return self._places + ahead - self._num_reserved

    def _sequences(self, waiting: _Waiting) -> int:
        """Return how many places a sample takes: at most all that are not reserved."""
        if waiting.claimed.refused is not None:
            return 0
        return min(cast("ops.Sample", waiting.claimed.operation).num_samples, self._num_common)
