"""What came of a group of cases, as a line of the table that the abuse suites print."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

ABUSE: Final = "abuse"
"""The test property that holds the line: the group, and named counts."""


@dataclass(slots=True, kw_only=True)
class Tally:
    group: str
    cases: int
    refused: int = 0  # by a Failed, or by an error that the interface allows
    deaths: list[str] = field(default_factory=list)  # any other exception, which ends the engine; dead processes
    changed: list[str] = field(default_factory=list)  # what a neighbour got, or its state
    wrong: list[str] = field(default_factory=list)  # answers that the interface does not allow
    alone_s: list[float] = field(default_factory=list)  # what neighbours' requests took
    beside_s: list[float] = field(default_factory=list)  # and beside the cases

    def report(self, suite: object, record_property: Callable[[str, object], None]) -> None:
        """Print the line and record it; fail the test if anybody was hurt."""
        counts = {
            "cases": self.cases,
            "refused": self.refused,
            "deaths": len(self.deaths),
            "changes to neighbours": len(self.changed),
        }
        line = " | ".join([type(suite).__name__, self.group, *(f"{number} {what}" for what, number in counts.items())])
        times = ""
        if self.alone_s and self.beside_s:
            alone_ms, beside_ms = (1000 * median(each) for each in (self.alone_s, self.beside_s))
            times = f" | a neighbour's request {alone_ms:.0f} -> {beside_ms:.0f} ms"
        print(f"\nabuse | {line}{times}")  # noqa: T201 - pytest -s shows the table
        record_property(ABUSE, {"group": self.group, **counts})
        hurt = [*self.deaths, *self.changed, *self.wrong]
        assert not hurt, f"{line}: " + "; ".join(hurt[:5])
