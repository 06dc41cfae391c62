"""Checks: functions, numbered within a group. A docstring says what is tested and what a failure means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tinsmith_conformance.tester import Tester

Function = Callable[..., None]
_NO_CASE: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    group: str
    number: int
    title: str
    meaning: str  # what its failure means to a user
    run: Callable[[Tester], None]

    @property
    def name(self) -> str:
        return f"{self.group}/{self.number}"


@dataclass(slots=True)
class Group:
    """Checks of one subject. A check keeps its number: new ones go to the end of a group."""

    name: str
    about: str
    checks: list[Check] = field(default_factory=list)

    def check(self, function: Function) -> Function:
        self._add(function, _NO_CASE)
        return function

    def each(self, cases: Sequence[Any]) -> Callable[[Function], Function]:
        """Add a check per case, which is the function's second argument. `{case}` in its docstring is the case's name.

        A case is a string, or a tuple that begins with its name.
        """

        def add(function: Function) -> Function:
            for case in cases:
                self._add(function, case)
            return function

        return add

    def _add(self, function: Function, case: Any) -> None:
        title, _, meaning = (inspect.getdoc(function) or "").partition("\n\n")
        assert meaning, f"the docstring of {function.__name__} does not say what its failure means"
        run = function
        if case is not _NO_CASE:
            named = str(case if isinstance(case, str) else case[0])
            title, meaning = (text.replace("{case}", named) for text in (title, meaning))
            run = partial(function, case=case)
        number = len(self.checks) + 1
        title, meaning = (" ".join(text.split()) for text in (title.removesuffix("."), meaning))
        self.checks.append(Check(group=self.name, number=number, title=title, meaning=meaning, run=run))


def selected(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """Return the checks that `only` names: groups, or GROUP/NUMBER. Without names all of them.

    Raises:
        ValueError: a name is neither.
    """
    names = {each.name for each in checks} | {each.group for each in checks}
    for name in only:
        if name not in names:
            msg = f"no check or group is called '{name}'; --list shows all of them"
            raise ValueError(msg)
    return [each for each in checks if not only or each.name in only or each.group in only]
