"""Breadth-first search of every reachable state, so the first counterexample is a shortest one."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from exactly_once.invariants import broken_by, broken_in, is_finished
from exactly_once.steps import Step, Steps
from exactly_once.values import FINISHED, Bounds, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result. `broken` None means that every invariant holds within the bounds."""

    states: int
    steps: int
    broken: str | None = None
    trace: tuple[str, ...] = ()


def check(bounds: Bounds, mutations: Iterable[str] = ()) -> Checked:
    return _Search(bounds, frozenset(mutations)).run()


class _Search:
    def __init__(self, bounds: Bounds, mutations: frozenset[str]) -> None:
        self._bounds = bounds
        self._steps = Steps(bounds, mutations)
        start = bounds.start()
        self._numbers: dict[State, int] = {start: 0}
        self._came_by: list[tuple[int, str]] = [(-1, "")]  # the state before, and the step from it
        self._before: dict[int, list[int]] = defaultdict(list)  # along steps without faults
        self._finished: list[int] = []
        self._num_steps = 0

    def run(self) -> Checked:
        frontier = list(self._numbers)
        while frontier:
            reached: list[State] = []
            for state in frontier:
                if (found := self._expand(state, reached)) is not None:
                    return found
            frontier = reached
        return self._stuck() or Checked(states=len(self._numbers), steps=self._num_steps)

    def _expand(self, state: State, reached: list[State]) -> Checked | None:
        number = self._numbers[state]
        if is_finished(state):
            self._finished.append(number)
        for step in self._steps.of(state):
            self._num_steps += 1
            after = self._numbers.get(step.state)
            broken = broken_by(state, step)
            if after is None:
                after = self._numbers[step.state] = len(self._numbers)
                self._came_by.append((number, _describe(step)))
                reached.append(step.state)
                broken = broken or broken_in(step.state, self._bounds)
            if broken is not None:
                return self._counterexample(broken, number, _describe(step))
            if not step.fault and after != number:
                self._before[after].append(number)
        return None

    def _stuck(self) -> Checked | None:
        """Find a state from which a run without further faults cannot finish everything."""
        can_finish = set(self._finished)
        open_ = list(self._finished)
        while open_:
            for number in self._before[open_.pop()]:
                if number not in can_finish:
                    can_finish.add(number)
                    open_.append(number)
        stuck = [state for state, number in self._numbers.items() if number not in can_finish]
        if not stuck:
            return None
        most = max(stuck, key=_progress)  # what it leaves unfinished is the point
        return self._counterexample(
            f"from here nothing finishes everything, though no more faults happen: {_unfinished(most)}",
            self._numbers[most],
        )

    def _counterexample(self, broken: str, number: int, *last: str) -> Checked:
        trace = list(last)
        while number > 0:
            number, step = self._came_by[number]
            trace.insert(0, step)
        return Checked(states=len(self._numbers), steps=self._num_steps, broken=broken, trace=tuple(trace))


def _progress(state: State) -> tuple[int, int]:
    rows = [row for subject in state.subjects for row in subject.rows if row is not None]
    return len(rows), sum(row.state in FINISHED for row in rows)


def _unfinished(state: State) -> str:
    rows = [(n, seq_id, row) for n, subject in enumerate(state.subjects) for seq_id, row in enumerate(subject.rows)]
    return ", ".join(
        f"seq_id {seq_id} of subject {n} is {'not there' if row is None else row.state}"
        for n, seq_id, row in rows
        if row is None or row.state not in FINISHED
    )


_OF_ENGINES = (
    *("an engine ", "the engine ", "the backend", "poison", "superseded", "nothing", "claim", "complete", "requeue"),
    *("fail_gaps", "copy", "write", "add_recovery_point", "tidy"),
)


def _describe(step: Step) -> str:
    """Return for instance `complete (engine 0, subject 1, seq_id 2)`."""
    names = ("engine", "subject", "seq_id") if step.what.startswith(_OF_ENGINES) else ("subject", "seq_id")
    places = ", ".join(f"{name} {number}" for name, number in zip(names, step.where, strict=False))
    return f"{step.what} ({places})"
