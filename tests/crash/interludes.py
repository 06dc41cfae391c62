"""What happens to servers and networks while a client trains: it begins at a step of the client, and ends later."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from processes import WAIT_S


@dataclass(frozen=True, slots=True)
class Interlude:
    """`during` is open until `last` returns."""

    step: int
    during: Callable[[], AbstractContextManager[object]]
    last: Callable[[], object]


class Interludes:
    """One after the other, in the order of their steps."""

    def __init__(self, planned: Sequence[Interlude]) -> None:
        self._planned = planned
        self._begun = self._done = 0
        self._step = -1
        self._finished = False
        self._news = threading.Condition()

    @contextmanager
    def running(self) -> Iterator[Callable[[int], None]]:
        """The block must call what it gets at each step; raise AssertionError if the last interlude is not over then.

        The call returns once what is to begin at this step has begun.
        """
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._run)
            try:
                yield self._at_step
            finally:
                with self._news:
                    self._finished = True
                    self._news.notify_all()
                running.result()
        assert self._done == len(self._planned)

    def _at_step(self, number: int) -> None:
        due = sum(each.step <= number for each in self._planned)
        with self._news:
            self._step = number
            self._news.notify_all()
            assert self._news.wait_for(lambda: self._begun >= due, WAIT_S)

    def _run(self) -> None:
        for each in self._planned:
            with self._news:
                self._news.wait_for(lambda step=each.step: self._step >= step or self._finished)
                if self._finished:
                    return
            with each.during():
                with self._news:
                    self._begun += 1
                    self._news.notify_all()
                each.last()
            self._done += 1
