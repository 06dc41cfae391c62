"""Runs checks in a child process, with a limit in time for each. A check that takes longer ends with its process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tinsmith_conformance.registry import Check
from tinsmith_conformance.tester import Target
from tinsmith_conformance.verdicts import Outcome, Verdict
from tinsmith_conformance.worker import WARM_UP

LIMIT_S: Final = 60.0
WARM_UP_LIMIT_S: Final = 600.0
_START_S: Final = 120.0
_PATIENCE: Final = 3  # checks in a row without an answer, after which the others get a tenth of the time
_WAIT_S: Final = 0.2  # between looks at the child, so that Ctrl-C is heard


class Runner:
    def __init__(self, target: Target, limit_s: float = LIMIT_S, warm_up_limit_s: float = WARM_UP_LIMIT_S) -> None:
        self._target = target
        self._limit_s = limit_s
        self._warm_up_limit_s = warm_up_limit_s
        self._child: _Child | None = None
        self._silent = 0

    def outcomes(self, checks: Sequence[Check]) -> Generator[tuple[Check, Outcome]]:
        """Run the checks, and yield how each ended."""
        try:
            self._ask(WARM_UP, self._warm_up_limit_s)
            for check in checks:
                yield check, self._outcome(check.name)
        finally:
            self._end()

    def _outcome(self, name: str) -> Outcome:
        limit_s = self._limit_s if self._silent < _PATIENCE else self._limit_s / 10
        outcome = self._ask(name, limit_s)
        if outcome is not None:
            self._silent = 0
            return outcome
        self._silent += 1
        return Outcome(verdict=Verdict.FAILED, detail=f"no end after {limit_s:g} s", seconds=limit_s)

    def _ask(self, name: str, limit_s: float) -> Outcome | None:
        """Return the outcome, or None if the child did not tell in time; then its process is ended."""
        if self._child is None:
            self._child = _Child(self._target)
        answer = self._child.ask(name, limit_s)
        if answer is None:
            self._end()
            return None
        return Outcome(**{**answer, "verdict": Verdict(answer["verdict"])})

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Child:
    def __init__(self, target: Target) -> None:
        here = str(Path(__file__).parents[1])  # the child imports what this process did
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith_conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(json.dumps(asdict(target)))
        self._answer(_START_S)  # it has imported the SDK

    def ask(self, name: str, limit_s: float) -> Mapping[str, Any] | None:
        """Return what the child answers, or None if it does not within the limit."""
        self._send(name)
        line = self._answer(limit_s)
        return dict(json.loads(line)) if line else None

    def _answer(self, limit_s: float) -> str:
        ends = time.monotonic() + limit_s
        while (now := time.monotonic()) < ends:
            try:
                return self._lines.get(timeout=min(_WAIT_S, ends - now))
            except queue.Empty:
                continue
        return ""

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended: the reader says so
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        except ValueError:  # closed meanwhile
            pass
        self._lines.put("")
