"""Looks at the running calls of an engine from a thread of its own, and ends an engine in which one does not return."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from tinsmith.engine.call_watch import CallWatch, Seen
from tinsmith.processes.deaths import EXIT_HUNG

_log = logging.getLogger(__name__)


class Watchdog:
    def __init__(
        self, watch: CallWatch, *, tell: Callable[[str | None], None], end: Callable[[str], None] | None = None
    ) -> None:
        """`tell` gets the reason when the engine becomes silent, and None when it no longer is.

        `end` gets the reason and ends the process, by default with EXIT_HUNG. The thread that looks calls both.
        """
        self._watch = watch
        self._tell = tell
        self._end = end or end_process
        self._silent: str | None = None  # what kind of call does not return
        self._stopped = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="tinsmith-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._watch.check_s):
            try:
                self.check()
            except Exception:  # noqa: BLE001 - whatever it is: nobody else ends an engine that hangs
                _log.exception("the watchdog could not look at the running calls, and looks again")

    def check(self) -> None:
        call = self._watch.check()
        if call is not None and call.is_silent:
            if self._silent != call.kind:
                self._silent, why = call.kind, _since(call)
                _log.warning("this engine is silent: %s", why)
                self._tell(why)
            if call.is_hung:
                self._end(f"{call.kind} did not return within {call.bound_s:g} s, so this engine ends")
        elif self._silent is not None:
            _log.warning("this engine is no longer silent: %s has returned or reports progress", self._silent)
            self._silent = None
            self._tell(None)


def _since(call: Seen) -> str:
    now = datetime.now(UTC)
    began, ends = now - timedelta(seconds=call.age_s), now + timedelta(seconds=call.bound_s - call.age_s)
    return (
        f"{call.kind} has not returned since {began:%H:%M:%S} UTC; if it does not by {ends:%H:%M:%S}, the engine ends"
    )


def end_process(why: str) -> None:
    """End this process at once, since nobody knows what would still return. Print where each thread is."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    _log.critical("%s", why)
    sys.stderr.flush()
    os._exit(EXIT_HUNG)
