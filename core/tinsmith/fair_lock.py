"""A lock between threads that goes to the thread that has waited longest."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A first-come, first-served lock between threads: use it in a `with` statement.

    A thread that has just released a `threading.Lock` may acquire it again at once, starving other threads for as
    long as it has work. Here a thread that asks again queues behind those already waiting. Not re-entrant: a thread
    that asks twice deadlocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    @property
    def num_waiting(self) -> int:
        """The number of threads waiting for the lock. A holder uses it to decide how long to continue."""
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()  # the lock stays taken: it is handed over directly
            else:
                self._taken = False
