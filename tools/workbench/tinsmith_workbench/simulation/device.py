"""An engine's device: it trains one batch at a time, and draws all its samples together."""

import heapq
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from tinsmith_workbench.simulation.clock import Action, Clock
from tinsmith_workbench.simulation.service_times import Sampling

_INSTANT_S: Final = 1e-9
_INSTANT_STEPS: Final = 1e-6


@dataclass(slots=True, eq=False)
class _Work:
    left_s: float
    done: Action


@dataclass(slots=True, eq=False)
class _Drawing:
    rows: int
    tokens: int
    done: Action


class Device:
    """Training and sampling slow each other down to `beside` while both run.

    All rows advance by one token per step, whose time grows with the rows. While a prompt is read they stand still. So
    a row ends when the device has made a certain number of steps, whichever rows join or leave meanwhile.
    """

    def __init__(self, clock: Clock, times: Sampling, *, beside: float) -> None:
        self.training_s = 0.0  # busy until now
        self.sampling_s = 0.0
        self.busy_s = 0.0  # with either
        self._clock = clock
        self._times = times
        self._beside = beside
        self._stall_s = 0.0  # left
        self._since_s = 0.0  # everything here is as of this time
        self._batch: _Work | None = None
        self._prompts: deque[tuple[_Work, _Drawing]] = deque()
        self._ends: list[tuple[float, int, _Drawing]] = []  # a heap by the step at which each ends
        self._rows = 0
        self._steps = 0.0
        self._count = 0
        self._look = 0  # the number of the look that counts

    @property
    def trains(self) -> bool:
        return self._batch is not None

    def train(self, seconds: float, done: Action) -> None:
        """Run a batch. There must be none."""
        assert self._batch is None
        self.advance()
        self._batch = _Work(seconds, done)
        self._look_again()

    def draw(self, prompt_s: float, rows: int, tokens: int, done: Action) -> None:
        """Read a prompt, then draw `tokens` in each of `rows`."""
        self.advance()
        self._prompts.append((_Work(prompt_s, lambda: None), _Drawing(rows, tokens, done)))
        self._look_again()

    def stall(self, seconds: float) -> None:
        """Stand still for `seconds`, or that much longer."""
        if seconds:
            self.advance()
            self._stall_s += seconds
            self._look_again()

    @property
    def _samples(self) -> bool:
        return bool(self._prompts) or self._rows > 0

    @property
    def _speed(self) -> float:
        return self._beside if self._batch is not None and self._samples else 1.0

    @property
    def _step_s(self) -> float:
        return self._times.step_s + self._times.row_s * self._rows

    def advance(self) -> None:
        """Bring everything up to date."""
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        if passed_s == 0.0:
            return
        stalled_s = min(passed_s, self._stall_s)
        self._stall_s -= stalled_s
        done_s = (passed_s - stalled_s) * self._speed
        self.training_s += passed_s if self._batch else 0.0
        self.sampling_s += passed_s if self._samples else 0.0
        self.busy_s += passed_s if self._batch or self._samples else 0.0
        if self._batch is not None:
            self._batch.left_s -= done_s
        if self._prompts:
            self._prompts[0][0].left_s -= done_s
        elif self._rows:
            self._steps += done_s / self._step_s

    def _look_again(self) -> None:
        """Look again when the next thing ends, as things are."""
        self._look += 1
        left = [] if self._batch is None else [self._batch.left_s]
        if self._prompts:
            left.append(self._prompts[0][0].left_s)
        elif self._ends:
            left.append((self._ends[0][0] - self._steps) * self._step_s)
        if left:
            self._clock.after(self._stall_s + max(0.0, min(left)) / self._speed, partial(self._end_due, self._look))

    def _end_due(self, look: int) -> None:
        if look != self._look:
            return
        self.advance()
        ended: list[Action] = []
        if self._batch is not None and self._batch.left_s <= _INSTANT_S:
            ended.append(self._batch.done)
            self._batch = None
        if self._prompts and self._prompts[0][0].left_s <= _INSTANT_S:
            self._start_rows(self._prompts.popleft()[1])
        while self._ends and self._ends[0][0] <= self._steps + _INSTANT_STEPS:
            drawing = heapq.heappop(self._ends)[2]
            self._rows -= drawing.rows
            ended.append(drawing.done)
        for done in ended:
            done()
        self._look_again()

    def _start_rows(self, drawing: _Drawing) -> None:
        self._count += 1
        self._rows += drawing.rows
        heapq.heappush(self._ends, (self._steps + drawing.tokens, self._count, drawing))
