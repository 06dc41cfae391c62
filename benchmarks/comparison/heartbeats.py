"""Heartbeats of many sessions, sent while the client of their server is measured."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import cycle
from typing import Any, Final, Self

import httpx

from comparison.servers import Server

_EACH_S: Final = 10.0  # the SDK sends a session's heartbeat so often
_TIMEOUT_S: Final = 60.0


class Heartbeats:
    """Sends one session's heartbeat after another at an even pace, over one connection, while it is entered."""

    def __init__(self, url: str, api_key: str, session_ids: Sequence[str]) -> None:
        self._client = httpx.Client(base_url=url, headers={"X-API-Key": api_key}, timeout=_TIMEOUT_S)
        self._session_ids = cycle(session_ids)
        self._interval_s = _EACH_S / len(session_ids)
        self._stop = threading.Event()
        self._error: Exception | None = None
        self.sent = 0
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Raise what went wrong: a figure without heartbeats would be none."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        started, first = time.monotonic(), self.sent
        try:
            while not self._stop.wait(max(0.0, (self.sent - first) * self._interval_s - (time.monotonic() - started))):
                body = {"session_id": next(self._session_ids)}
                self._client.post("/api/v1/session_heartbeat", json=body).raise_for_status()
                self.sent += 1
        except httpx.HTTPError as error:
            self._error = error
        self.seconds += time.monotonic() - started


@dataclass(slots=True, kw_only=True)
class ServerWithHeartbeats(Server):
    """A server that gets heartbeats while it is measured. Sending them, in this process, is not others' load."""

    heartbeats: Heartbeats

    @classmethod
    def of(cls, server: Server, heartbeats: Heartbeats, *, name: str) -> Self:
        """Return the same server and client under another name."""
        same = {each.name: getattr(server, each.name) for each in fields(Server)}
        return cls(**{**same, "name": name}, heartbeats=heartbeats)

    def ask(self, command: str, scenario: str) -> dict[str, Any]:
        if command != "measure":
            return Server.ask(self, command, scenario)
        before_s = time.process_time()
        with self.heartbeats:
            answer = Server.ask(self, command, scenario)
        if "error" not in answer:
            answer["others_cpu_s"] -= time.process_time() - before_s
        return answer
