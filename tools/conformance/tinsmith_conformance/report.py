"""The results of a run of checks: shown while it goes on, as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinsmith_conformance.registry import Check
from tinsmith_conformance.verdicts import Outcome, Verdict

_STYLES: Final = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.SKIPPED: "yellow"}


@dataclass(slots=True)
class Card:
    """The outcomes so far, in the order of the checks."""

    outcomes: dict[Check, Outcome] = field(default_factory=dict)

    def count(self, verdict: Verdict, group: str | None = None) -> int:
        found = (check for check, each in self.outcomes.items() if each.verdict is verdict)
        return sum(group in (None, check.group) for check in found)

    def as_json(self, **about: Any) -> str:
        groups = {name: self._score(name) for name in dict.fromkeys(check.group for check in self.outcomes)}
        checks = [
            {
                "check": check.name,
                "title": check.title,
                "meaning": check.meaning,
                "verdict": str(outcome.verdict),
                "detail": outcome.detail,
                "seconds": round(outcome.seconds, 3),
            }
            for check, outcome in self.outcomes.items()
        ]
        return json.dumps({**about, "total": self._score(None), "groups": groups, "checks": checks}, indent=1) + "\n"

    def _score(self, group: str | None) -> Mapping[str, int]:
        return {str(verdict): self.count(verdict, group) for verdict in Verdict}


class Terminal:
    """Shows progress where the output is a terminal, and failures as they come."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description:12}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID = self.progress.add_task("warming up", total=total)

    def show(self, check: Check, outcome: Outcome) -> None:
        self.progress.update(self._task, advance=1, description=check.group)
        if outcome.verdict is not Verdict.PASSED:
            style = _STYLES[outcome.verdict]
            self.progress.console.print(Text(f"{outcome.verdict} {check.name}: {check.title}", style))
            self.progress.console.print(Text(f"  {outcome.detail}"))
            if outcome.verdict is Verdict.FAILED:
                self.progress.console.print(Text(f"  {check.meaning}", "dim"))


def table(card: Card) -> Table:
    shown = Table(title="Conformance", show_footer=True)
    shown.add_column("Group", "All")
    for verdict in Verdict:
        shown.add_column(str(verdict), str(card.count(verdict)), justify="right", footer_style=_STYLES[verdict])
    shown.add_column("seconds", f"{sum(each.seconds for each in card.outcomes.values()):.1f}", justify="right")
    for group in dict.fromkeys(check.group for check in card.outcomes):
        seconds = sum(each.seconds for check, each in card.outcomes.items() if check.group == group)
        counts = (str(card.count(verdict, group)) for verdict in Verdict)
        shown.add_row(group, *counts, f"{seconds:.1f}")
    return shown


def listing(checks: Sequence[Check]) -> Table:
    shown = Table("Check", "What it tests", "What its failure means")
    for check in checks:
        shown.add_row(check.name, check.title, check.meaning)
    return shown
