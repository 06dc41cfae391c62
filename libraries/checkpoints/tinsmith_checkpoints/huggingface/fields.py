"""What happens to each field of a file from elsewhere: it is honoured, taken at some values alone, or has no meaning.

A file's table is an allow-list. Readers refuse, or announce, a field without a row; the documentation shows the rows.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tinsmith_checkpoints.values import Json

Status = Literal["honoured", "only", "no meaning"]

OFF: Final = (False, None)
"""Both ways in which files say that something is not used."""

ANNOUNCEMENTS: Final = logging.getLogger("tinsmith.files")
"""Says which fields nothing reads, once for each file in a process. `tinsmith doctor` listens to it."""

_SHOWN: Final = 60  # characters of a refused value
_announced: Final = set[tuple[Path, tuple[str, ...]]]()


@dataclass(frozen=True, slots=True)
class Field:
    """`taken`: the values of a field that is refused at any other one. `in_lists`: also lists of these values."""

    status: Status
    note: str
    taken: tuple[Json, ...] = ()
    in_lists: bool = False

    def takes(self, value: Json) -> bool:
        if self.status != "only" or any(_same(value, each) for each in self.taken):
            return True
        return self.in_lists and isinstance(value, list) and all(map(self.takes, value))

    def described(self) -> str:
        """Return the status as the documentation has it."""
        if self.status != "only":
            return self.status
        return f"only {' or '.join(f'`{json.dumps(each)}`' for each in self.taken)}"


def honoured(note: str = "") -> Field:
    return Field("honoured", note)


def only(*taken: Json, otherwise: str) -> Field:
    """`otherwise`: why other values are refused, or what to do instead."""
    return Field("only", otherwise, taken)


def only_in_lists(*taken: Json, otherwise: str) -> Field:
    """Like `only`, of a field with a value for each layer."""
    return Field("only", otherwise, (None, *taken), in_lists=True)


def no_meaning(why: str) -> Field:
    return Field("no meaning", why)


@dataclass(frozen=True, slots=True)
class FileFields:
    """The table of a file, or of an object in it."""

    file: str
    fields: Mapping[str, Field]

    def refusals(self, content: Mapping[str, Json]) -> Iterator[str]:
        """Say of each known field whose value is not taken which it is, and why."""
        for name, value in content.items():
            field = self.fields.get(name)
            if field is not None and not field.takes(value):
                yield f"{name} is {shown(value)}: {field.note}"

    def unknown(self, content: Mapping[str, Json]) -> list[str]:
        """Return the fields without a row, sorted, but for those that hold nothing, which their writer has not set."""
        return sorted(name for name, value in content.items() if name not in self.fields and holds_something(value))


def announce(file: Path, names: Sequence[str]) -> None:
    """Log that a file has fields without a row, unless that has been said."""
    if names and (file, tuple(names)) not in _announced:
        _announced.add((file, tuple(names)))
        ANNOUNCEMENTS.warning(
            "%s has fields that nothing here reads: %s; docs/reference/files.md lists the known ones",
            file,
            ", ".join(names),
        )


@contextmanager
def announced() -> Iterator[list[str]]:
    """Collect what is announced in the block."""
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    ANNOUNCEMENTS.addHandler(listener)
    try:
        yield said
    finally:
        ANNOUNCEMENTS.removeHandler(listener)


def shown(value: Any) -> str:
    """Return a value of a file for an error, at a bounded length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def holds_something(value: Json) -> bool:
    """Return whether a value is more than what a writer gives a field that is not used."""
    return value not in (None, False, 0, "", [], {})


def _same(left: Json, right: Json) -> bool:
    """Compare values of JSON, in which true is not 1."""
    return isinstance(left, bool) is isinstance(right, bool) and left == right
