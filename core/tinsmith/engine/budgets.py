"""What an engine may take up: disk, within a tenant's share and without the reserve; memory, for captured states."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from tinsmith.backend import ModelState
from tinsmith.engine.failures import with_retries
from tinsmith.errors import UserError
from tinsmith.operations import LoraConfig
from tinsmith.settings import QuotaSettings
from tinsmith.store import KeptBytes, RequestStore
from tinsmith.store.disk_room import DiskSpace, ReadSpace, why_in_reserve, why_over_share

_log = logging.getLogger(__name__)

_STALE_AFTER_S: Final = 1.0
_PARTS: Final = 4  # a state has weights, two moments and a gradient, of one size


@dataclass(slots=True)
class _Known:
    """A tenant's stored bytes when last read, and its grants since."""

    kept: KeptBytes
    asked_at_s: float
    granted: int = 0

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.asked_at_s <= _STALE_AFTER_S


@dataclass(slots=True, eq=False)
class DiskRoom:
    """Remembers for a second what a tenant keeps. Before it refuses something, it asks again."""

    store: RequestStore
    settings: QuotaSettings
    read_space: ReadSpace
    _known: dict[str, _Known] = field(default_factory=dict, init=False)  # by tenant

    async def expect(self, tenant: str, num_bytes: int) -> None:
        """Raise UserError, with the reason and the remedy, if the tenant may not write `num_bytes` more."""
        space = await self._space()
        why = why_in_reserve(self.settings, space, more=num_bytes)
        if why is not None:
            raise UserError(why)
        known = self._known.get(tenant)
        if known is None or not known.is_fresh or self._why_over_share(known, space, num_bytes) is not None:
            known = await self._ask(tenant)
            if (why := self._why_over_share(known, space, num_bytes)) is not None:
                raise UserError(why)
        known.granted += num_bytes

    async def why_not(self, num_bytes: int) -> str | None:
        """Return why `num_bytes` more would use the reserve, or None if they would not."""
        return why_in_reserve(self.settings, await self._space(), more=num_bytes)

    def _why_over_share(self, known: _Known, space: DiskSpace, num_bytes: int) -> str | None:
        return why_over_share(self.settings, known.kept, space, more=known.granted + num_bytes)

    async def _ask(self, tenant: str) -> _Known:
        asked_at_s = time.monotonic()
        found = await with_retries(self.store.kept_bytes, tenant)
        self._known = {name: each for name, each in self._known.items() if each.is_fresh}
        known = self._known[tenant] = _Known(found[0] if found else KeptBytes(tenant=tenant), asked_at_s)
        return known

    async def _space(self) -> DiskSpace:
        return await asyncio.to_thread(self.read_space)


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory for one state, from before it is captured until it is on disk."""

    waiting: "WaitingStates"
    lora: LoraConfig
    num_bytes: int

    def holds(self, state: ModelState) -> None:
        """Count the captured bytes instead of the expected ones."""
        self.num_bytes = state.memory_bytes
        self.waiting.measured(self.lora, state)

    def release(self) -> None:
        self.waiting.release(self)


class WaitingStates:
    """The budget of captured states that wait for the disk in memory. Belongs to one event loop.

    A state that is larger than the whole budget is captured while no other waits.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._reservations: list[Reservation] = []
        self._expected: dict[LoraConfig, int] = {}  # by configuration without the seed, the most that a state can take
        self._asking = 0
        self._released = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return sum(reservation.num_bytes for reservation in self._reservations)

    def reserve_at_once(self, lora: LoraConfig) -> Reservation | None:
        """Return a reservation, or None if there is no room, or others wait for room already."""
        return self._take(lora) if self._fits(lora) and not self._asking else None

    @asynccontextmanager
    async def reserve(self, lora: LoraConfig) -> AsyncIterator[Reservation]:
        """Wait for a reservation, which is released when the block ends."""
        self._asking += 1
        try:
            while not self._fits(lora):
                self._released.clear()
                await self._released.wait()
            reservation = self._take(lora)
        finally:
            self._asking -= 1
        try:
            yield reservation
        finally:
            reservation.release()

    def _fits(self, lora: LoraConfig) -> bool:
        expected = self._expected.get(_key(lora), self._budget_bytes)  # one of unknown size goes alone
        return not self._reservations or self.held_bytes + expected <= self._budget_bytes

    def _take(self, lora: LoraConfig) -> Reservation:
        reservation = Reservation(self, lora, self._expected.get(_key(lora), self._budget_bytes))
        self._reservations.append(reservation)
        return reservation

    def measured(self, lora: LoraConfig, state: ModelState) -> None:
        """Learn from a captured state how much one of this configuration can take."""
        key, most = _key(lora), _PARTS * state.weights_bytes
        if key not in self._expected and most > self._budget_bytes:
            _log.warning(
                "a training state of LoRA rank %d takes up to %d bytes of memory while it waits for the disk, and "
                "recovery.waiting_bytes is %d: such states are captured one at a time",
                lora.rank,
                most,
                self._budget_bytes,
            )
        self._expected[key] = most

    def release(self, reservation: Reservation) -> None:
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._released.set()


def _key(lora: LoraConfig) -> LoraConfig:
    return replace(lora, seed=0)
