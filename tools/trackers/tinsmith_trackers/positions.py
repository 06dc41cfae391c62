"""How far each run has been copied, in a file, so that a later process goes on there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from tinsmith_trackers.tracker import TrackerError

TAIL: Final = 64
"""Steps before the newest copied one that are looked at for names that a client has logged late."""


class Positions:
    """By run: the names that were copied of each of its last `TAIL` steps. All steps before these are copied."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            self._copied = {
                run_id: {int(step): set(names) for step, names in steps.items()} for run_id, steps in content.items()
            }
        except (OSError, ValueError, AttributeError, TypeError) as error:
            msg = f"cannot read {file}, which says what has been copied: {error}; delete it to copy all again"
            raise TrackerError(msg) from error

    def first_step(self, run_id: str) -> int:
        """Return the step to read a run from."""
        return min(self._copied.get(run_id, {}), default=0)

    def copied(self, run_id: str, step: int) -> set[str]:
        """Return the names of a step, not before `first_step`, that were copied."""
        return self._copied.get(run_id, {}).get(step, set())

    def add(self, run_id: str, step: int, names: set[str]) -> None:
        steps = self._copied.setdefault(run_id, {})
        steps.setdefault(step, set()).update(names)
        for old in sorted(steps)[:-TAIL]:
            del steps[old]

    def save(self) -> None:
        """Write the file, whole or not at all."""
        content = {
            run_id: {str(step): sorted(names) for step, names in steps.items()}
            for run_id, steps in self._copied.items()
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f"{self._file.name}.new")
        with new.open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(self._file)
