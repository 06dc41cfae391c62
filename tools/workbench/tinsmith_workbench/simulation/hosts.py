"""The hosts between a client and an engine: server processes and the store."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from tinsmith_workbench.simulation import service_times
from tinsmith_workbench.simulation.clock import Action, Clock
from tinsmith_workbench.simulation.request import Request

Begin = Callable[[], tuple[float, Action]]
"""Begins a transaction: returns how long it takes, and what happens then."""


class Store:
    """Transactions in the order in which they are asked for, at most `writers` at a time."""

    def __init__(self, clock: Clock, times: service_times.Store) -> None:
        self.times = times
        self.busy_s = 0.0  # of all writers
        self.transactions = 0
        self._clock = clock
        self._free = times.writers
        self._waiting: deque[Begin] = deque()

    def transact(self, begin: Begin) -> None:
        self._waiting.append(begin)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            seconds, done = self._waiting.popleft()()
            self.busy_s += seconds
            self.transactions += 1
            self._clock.after(seconds, partial(self._ended, done))

    def _ended(self, done: Action) -> None:
        self._free += 1
        done()
        self._start_waiting()


class Server:
    """One server process: it handles one thing at a time, and submits that arrive during a commit share the next."""

    def __init__(
        self, clock: Clock, times: service_times.Server, store: Store, on_committed: Callable[[Sequence[Request]], None]
    ) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._times = times
        self._store = store
        self._on_committed = on_committed
        self._free_at_s = 0.0
        self._group: list[Request] = []

    def submit(self, request: Request) -> None:
        self._handle(self._times.submit_s, partial(self._commit, request))

    def answer(self, done: Action) -> None:
        self._handle(self._times.answer_s, done)

    def _handle(self, seconds: float, done: Action) -> None:
        self.busy_s += seconds
        self._free_at_s = max(self._clock.now_s, self._free_at_s) + seconds
        self._clock.at(self._free_at_s, done)

    def _commit(self, request: Request) -> None:
        self._group.append(request)
        if len(self._group) == 1:
            self._store.transact(self._begin)

    def _begin(self) -> tuple[float, Action]:
        group, self._group = self._group, []
        return self._store.times.submit.seconds(len(group)), partial(self._on_committed, group)
