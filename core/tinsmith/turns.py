"""Turns: a lock between threads that goes to whoever has waited longest."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A first-come, first-served lock between threads.

    A thread that has just released a `threading.Lock` may acquire it again at once, starving other threads for as
    long as it has work. Here a thread that asks again queues behind those already waiting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock inside the `with` block. Not re-entrant: a thread that asks twice deadlocks."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    @property
    def num_waiting(self) -> int:
        """The number of threads waiting for a turn. A holder uses it to decide how long to continue."""
        return len(self._waiting)

    def _acquire(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def _release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()  # the lock stays taken: it is handed over directly
            else:
                self._taken = False
