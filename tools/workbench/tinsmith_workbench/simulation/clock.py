"""Virtual time: what happens when."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; actions of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def read(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now_s + seconds, action)

    def run(self, until_s: float) -> None:
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(events)
            action()
        self.now_s = until_s
