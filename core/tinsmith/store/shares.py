"""Shares: how much of its claims an engine takes of each tenant, and which models get its places.

The engine always holds some work of every tenant that has any. So the scheduler sees all of them, and can serve them
fairly.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Generic, TypeVar

from tinsmith.store.records.places import Parking, PlaceLimits, PlaceMoves, PlaceWait

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
    parked: bool = False  # it had a place before


@dataclass(frozen=True, slots=True)
class Idle:
    """A model that has a place and nothing to do."""

    model_id: str
    tenant: str
    since: datetime
    seq_id: int  # of its last operation
    full: bool = False  # all weights are trained
    abandoned: bool = False  # its client sends no heartbeats


@dataclass(frozen=True, slots=True)
class Taken:
    """The places that are taken."""

    by_tenant: Counter[str]
    full: int = 0  # by models with all weights trained


class _Places:
    """The places, while they change hands one after another."""

    def __init__(self, taken: Taken, limits: PlaceLimits) -> None:
        self.by_tenant = taken.by_tenant.copy()
        self._full = taken.full
        self._limits = limits

    @property
    def _free(self) -> int:
        return self._limits.max_models - self.by_tenant.total()

    def _full_is_free(self) -> bool:
        return self._limits.max_full_models is None or self._full < self._limits.max_full_models

    def next_of(self, waiting: Sequence[Applicant]) -> Applicant:
        return min(waiting, key=lambda each: (self.by_tenant[each.tenant], each.since))

    def has_one_for(self, each: Applicant) -> bool:
        if self._free <= 0 or (each.full and not self._full_is_free()):
            return False
        kept_from = self.by_tenant[each.tenant] > 0 and each.model_id not in self._limits.freed_for
        return self._free > self._limits.kept or not kept_from

    def can_pass(self, idle: Idle, to: Applicant) -> bool:
        """A tenant may exchange its own models. Others give way to tenants that have fewer places, or if abandoned."""
        if self._free < 0 or (to.full and not idle.full and not self._full_is_free()):
            return False
        if idle.tenant == to.tenant:
            return True
        own = self.by_tenant[to.tenant]
        gives_way = idle.abandoned or own < self.by_tenant[idle.tenant]
        return gives_way and (own == 0 or self._free + 1 > self._limits.kept)

    def give(self, each: Applicant) -> None:
        self.by_tenant[each.tenant] += 1
        self._full += each.full

    def pass_on(self, idle: Idle, to: Applicant) -> None:
        self.by_tenant[idle.tenant] -= 1
        self._full -= idle.full
        self.give(to)


def next_ones(waiting: Sequence[Applicant], taken: Taken, limits: PlaceLimits) -> Iterator[Applicant]:
    """Yield the models that get the free places; `waiting` begins with the model that has waited longest."""
    waiting, places = list(waiting), _Places(taken, limits)
    while able := [each for each in waiting if places.has_one_for(each)]:
        chosen = places.next_of(able)
        yield chosen
        waiting.remove(chosen)
        places.give(chosen)


def to_park(
    waiting: Sequence[Applicant], idle: Sequence[Idle], taken: Taken, limits: PlaceLimits
) -> Iterator[tuple[Idle, Applicant]]:
    """Yield the models to park, each with the one that gets its place; `waiting` are those for which none is free.

    Those that have been idle longest come first.
    """
    waiting, idle, places = list(waiting), sorted(idle, key=lambda each: each.since), _Places(taken, limits)
    while waiting and idle:
        chosen = places.next_of(waiting)
        waiting.remove(chosen)
        found = next((each for each in idle if places.can_pass(each, chosen)), None)
        if found is not None:
            yield found, chosen
            idle.remove(found)
            places.pass_on(found, chosen)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the models that wait."""

    admitted: tuple[str, ...]  # new models with a place
    late: tuple[str, ...]  # new models that have waited for too long
    moves: PlaceMoves


def decide(
    waiting: Sequence[Applicant], taken: Taken, limits: PlaceLimits, idle: Callable[[datetime], Sequence[Idle]]
) -> Decision:
    """`waiting` begins with the model that has waited longest; `idle` returns the models idle since before a time."""
    served = list(next_ones(waiting, taken, limits))
    left = [each for each in waiting if each not in served]
    late = [each for each in left if not each.parked and each.since < limits.give_up_before]
    left = [each for each in left if each not in late]
    resting = idle(limits.idle_since) if left and limits.idle_since is not None else []
    resting = [each for each in resting if each.model_id not in limits.staying]
    after = Taken(
        taken.by_tenant + Counter(each.tenant for each in served), taken.full + sum(each.full for each in served)
    )
    park = tuple(
        Parking(model_id=each.model_id, tenant=each.tenant, seq_id=each.seq_id, for_model_id=to.model_id)
        for each, to in to_park(left, resting, after, limits)
    )
    come_back = tuple(each.model_id for each in served if each.parked)
    return Decision(
        admitted=tuple(sorted(each.model_id for each in served if not each.parked)),
        late=tuple(each.model_id for each in late),
        moves=PlaceMoves(park=park, come_back=come_back, waiting=bool(left or come_back)),
    )


def place_wait(model_id: str, tenant: str, waiting: Sequence[Applicant], taken: Taken) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    own = next((each for each in waiting if each.model_id == model_id), None)
    return PlaceWait(
        taken=taken.by_tenant.total(),
        taken_by_tenant=taken.by_tenant[tenant],
        num_waiting=len(waiting),
        taken_full=taken.full if own is not None and own.full else None,
        parked=own is not None and own.parked,
    )
