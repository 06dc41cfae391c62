"""Shares: how much of its claims an engine takes of each tenant, and which models get its places.

The engine always holds some work of every tenant that has any. So the scheduler sees all of them, and can serve them
fairly.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Generic, TypeVar

from tinsmith.store.records import PlaceLimits, PlaceWait

_T = TypeVar("_T")

_READ_AHEAD: Final = 64  # operations of a tenant that uses what others leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What an engine has claimed of one tenant and not yet recorded."""

    operations: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable(Generic[_T]):
    """An operation that could be claimed."""

    key: _T
    num_bytes: int  # once decoded
    arrival: int  # orders operations of different tenants, roughly by age


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRoom:
    """How many operations of one sort an engine may hold, and how many it holds: of models, or samples.

    Each tenant with work has an equal share of `operations` and of `num_bytes`. What others leave unused, a tenant may
    use as well: all the operations, and half of the bytes. So there are at most twice as many operations, since a
    share can be taken whatever is in use. Bytes are bounded more strictly:

    - Each tenant may always hold `reserved_bytes`.
    - Beyond that, all tenants together hold at most `num_bytes`, except for a single larger operation.
    - If the first operation of a tenant does not fit yet, nobody else grows beyond the reserve until it does.
    """

    operations: int
    num_bytes: int
    reserved_bytes: int = 0
    held: Mapping[str, Holding] = field(default_factory=dict)  # by tenant

    @property
    def unused(self) -> int:
        """Return how many more operations fit, of any tenant."""
        return max(0, self.operations - sum(each.operations for each in self.held.values()))

    def limits(self, waiting: Iterable[str]) -> dict[str, int]:
        """Return how many operations to read of each tenant with waiting work. Leave out tenants with no room."""
        waiting = set(waiting)
        share, more = self.share_of(waiting), min(self.unused, _READ_AHEAD)
        limits = {tenant: max(share - self.held.get(tenant, Holding()).operations, more) for tenant in waiting}
        return {tenant: number for tenant, number in limits.items() if number > 0}

    def share_of(self, waiting: Iterable[str]) -> int:
        """Return each tenant's share of `operations`, if these have something waiting."""
        return max(1, self.operations // max(1, len(self.held.keys() | set(waiting))))

    def choose(self, waiting: Mapping[str, Sequence[Claimable[_T]]]) -> list[_T]:
        """Choose from the operations of each tenant, which are in order. The tenant that holds least goes first."""
        tally = _Tally(self, waiting)
        order = [(tally.operations(tenant), each[0].arrival, tenant, 0) for tenant, each in waiting.items() if each]
        heapq.heapify(order)
        chosen: list[_T] = []
        while order:
            _, _, tenant, number = heapq.heappop(order)
            operation = waiting[tenant][number]
            if not tally.add(tenant, operation.num_bytes):
                continue  # what comes later of this tenant must not pass it
            chosen.append(operation.key)
            if number + 1 < len(waiting[tenant]):
                following = waiting[tenant][number + 1]
                heapq.heappush(order, (tally.operations(tenant), following.arrival, tenant, number + 1))
        return chosen


class _Tally:
    """Each tenant's holdings, including the choices so far."""

    def __init__(self, room: ClaimRoom, waiting: Iterable[str]) -> None:
        waiting = set(waiting)
        self._room = room
        self._held = {tenant: (each.operations, each.num_bytes) for tenant, each in room.held.items()}
        self._unused = room.unused
        self._share = room.share_of(waiting)
        self._share_bytes = room.num_bytes // max(1, len(room.held.keys() | waiting))
        self._beyond_reserves = sum(self._beyond_reserve(num_bytes) for _, num_bytes in self._held.values())
        self._crowded = False  # the first operation of a tenant waits for room

    def operations(self, tenant: str) -> int:
        return self._held.get(tenant, (0, 0))[0]

    def add(self, tenant: str, num_bytes: int) -> bool:
        """Add an operation if there is room for it."""
        operations, held_bytes = self._held.get(tenant, (0, 0))
        if operations >= self._share and self._unused <= 0:
            return False
        after = held_bytes + num_bytes
        grows = self._beyond_reserve(after) - self._beyond_reserve(held_bytes)
        if grows and not self._fits(after, grows, first=operations == 0):
            return False
        self._unused -= 1
        self._held[tenant] = operations + 1, after
        self._beyond_reserves += grows
        return True

    def _fits(self, after: int, grows: int, *, first: bool) -> bool:
        total = self._room.num_bytes
        in_use = self._beyond_reserves + min(grows, total)
        if self._crowded or in_use > total:
            self._crowded = self._crowded or first
            return False
        return first or after <= self._share_bytes or in_use <= total // 2

    def _beyond_reserve(self, num_bytes: int) -> int:
        return max(0, num_bytes - self._room.reserved_bytes)


# places on a backend


@dataclass(frozen=True, slots=True)
class Applicant:
    """A model that waits for a place."""

    model_id: str
    tenant: str
    since: datetime
    full: bool = False  # all weights are trained


@dataclass(frozen=True, slots=True)
class Taken:
    """The places that are taken."""

    by_tenant: Counter[str]
    full: int = 0  # by models with all weights trained


def next_ones(waiting: Sequence[Applicant], taken: Taken, limits: PlaceLimits) -> Iterator[Applicant]:
    """Yield the models that get the free places; `waiting` begins with the model that has waited longest."""
    waiting, by_tenant, full = list(waiting), taken.by_tenant.copy(), taken.full
    while (free := limits.max_models - by_tenant.total()) > 0:
        full_is_free = limits.max_full_models is None or full < limits.max_full_models
        able = [
            each
            for each in waiting
            if (full_is_free or not each.full) and (free > limits.kept or not by_tenant[each.tenant])
        ]
        if not able:
            return
        chosen = min(able, key=lambda each: (by_tenant[each.tenant], each.since))
        yield chosen
        waiting.remove(chosen)
        by_tenant[chosen.tenant] += 1
        full += chosen.full


def place_wait(model_id: str, tenant: str, waiting: Sequence[Applicant], taken: Taken) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    return PlaceWait(
        taken=taken.by_tenant.total(),
        taken_by_tenant=taken.by_tenant[tenant],
        num_waiting=len(waiting),
        taken_full=taken.full if any(each.full for each in waiting if each.model_id == model_id) else None,
    )
