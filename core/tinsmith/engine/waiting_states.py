"""The budget of captured states that wait for the disk in the engine's memory."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tinsmith.backend import ModelState
from tinsmith.operations import LoraConfig

_log = logging.getLogger(__name__)

_PARTS = 4  # a state has weights, two moments and a gradient, of one size


class Place:
    """Room for one state, from before it is captured until it is on disk."""

    def __init__(self, waiting: "WaitingStates", lora: LoraConfig, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._waiting = waiting
        self._lora = lora

    def holds(self, state: ModelState) -> None:
        """Count what was captured, instead of what was expected."""
        self.num_bytes = state.memory_bytes
        self._waiting.measured(self._lora, state)

    def release(self) -> None:
        self._waiting.release(self)


class WaitingStates:
    """Belongs to one event loop. A state that is larger than the whole budget is captured while no other waits."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._places: list[Place] = []
        self._expected: dict[LoraConfig, int] = {}  # by configuration without the seed, the most that a state can take
        self._asking = 0
        self._released = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return sum(place.num_bytes for place in self._places)

    def place_at_once(self, lora: LoraConfig) -> Place | None:
        """Return a place, or None if there is no room, or others wait for room already."""
        return self._take(lora) if self._fits(lora) and not self._asking else None

    @asynccontextmanager
    async def place(self, lora: LoraConfig) -> AsyncIterator[Place]:
        """Wait for a place, which is released when the block ends."""
        self._asking += 1
        try:
            while not self._fits(lora):
                self._released.clear()
                await self._released.wait()
            place = self._take(lora)
        finally:
            self._asking -= 1
        try:
            yield place
        finally:
            place.release()

    def _fits(self, lora: LoraConfig) -> bool:
        expected = self._expected.get(_key(lora), self._budget_bytes)  # one of unknown size goes alone
        return not self._places or self.held_bytes + expected <= self._budget_bytes

    def _take(self, lora: LoraConfig) -> Place:
        place = Place(self, lora, self._expected.get(_key(lora), self._budget_bytes))
        self._places.append(place)
        return place

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

    def release(self, place: Place) -> None:
        if place in self._places:
            self._places.remove(place)
            self._released.set()


def _key(lora: LoraConfig) -> LoraConfig:
    return replace(lora, seed=0)
