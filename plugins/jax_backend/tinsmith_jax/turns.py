"""Turns on the device: training micro-batches and sampling dispatches alternate in the order in which they asked."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A first-come, first-served lock between threads.

    `threading.Lock` may give itself back to the thread that has just released it, which starves the others for as
    long as one of them has work. Here a thread that asks again goes behind those that wait already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the device inside the `with`. Not re-entrant: a thread that asks twice waits for itself."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    @property
    def num_waiting(self) -> int:
        """Threads that wait for a turn right now; what a holder looks at to decide how long it goes on."""
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
                self._waiting.popleft().set()  # the device stays taken: it changes hands directly
            else:
                self._taken = False
