"""A tenant that does harm: prepares requests, and sends them from a process of its own over many connections."""

import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import local
from urllib.parse import urlsplit

import orjson
import wire_bodies

ANSWER_S = 300.0  # a request that is not answered by then hangs
IDLE_S = 1.0  # then a connection is not used again: the server may be about to close it


@dataclass(frozen=True, slots=True)
class Request:
    path: str  # below /api/v1, or from the root
    body: bytes
    media: str = wire_bodies.JSON
    zstd: bool = False
    method: str = "POST"

    @classmethod
    def json(cls, path: str, /, **fields: object) -> "Request":
        return cls(path, orjson.dumps(fields))


@dataclass(frozen=True, slots=True)
class Answer:
    status: int  # 0: none, the server closed the connection or did not answer
    content: bytes
    took_s: float

    @property
    def text(self) -> str:
        return self.content[:2000].decode(errors="replace")

    @property
    def request_id(self) -> str | None:
        """Of an operation that was accepted."""
        return self._fields.get("request_id") if self.status == 200 else None

    @property
    def error_category(self) -> str | None:
        """Of an operation that failed."""
        return self._fields.get("category") if "error" in self._fields else None

    @property
    def _fields(self) -> dict[str, str]:
        return orjson.loads(self.content) if self.content.startswith(b'{"') else {}


class Attacker:
    def __init__(self, url: str, key: str, base_model: str) -> None:
        self.url = url
        self.key = key
        self.base_model = base_model
        self._own = local()  # a connection for each thread
        self._session_id = ""
        self._every: list[http.client.HTTPConnection] = []

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._every:
            connection.close()

    def send(self, request: Request) -> Answer:
        began = time.monotonic()
        try:
            status, content = self._exchange(request)
        except (OSError, http.client.HTTPException) as error:
            self._own.http.close()  # connects again
            return Answer(0, repr(error).encode(), time.monotonic() - began)
        return Answer(status, content, time.monotonic() - began)

    def send_until_accepted(self, request: Request) -> Answer:
        while (answer := self.send(request)).status == 429:
            time.sleep(1.0)  # the server asks for it
        return answer

    def _exchange(self, request: Request) -> tuple[int, bytes]:
        headers = {"X-API-Key": self.key, "Content-Type": request.media}
        if request.zstd:
            headers["Content-Encoding"] = "zstd"
        connection = self._connection()
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has answered before it has read everything
            path = request.path if request.path.startswith("/") else f"/api/v1/{request.path}"
            connection.request(request.method, path, request.body, headers)
        answer = connection.getresponse()
        content = answer.read()
        self._own.answered_at = time.monotonic()
        return answer.status, content

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._own, "http"):
            address = urlsplit(self.url)
            self._own.http = http.client.HTTPConnection(address.hostname or "", address.port, timeout=ANSWER_S)
            self._every.append(self._own.http)
        connection: http.client.HTTPConnection = self._own.http
        if time.monotonic() - getattr(self._own, "answered_at", 0.0) > IDLE_S:
            connection.close()  # connects again
        return connection

    def ask(self, path: str, /, **fields: object) -> dict[str, str]:
        """Send a request that must succeed."""
        answer = self.send(Request.json(path, **fields))
        assert answer.status == 200, answer
        found: dict[str, str] = orjson.loads(answer.content)
        return found

    def new_session(self) -> str:
        self._session_id = self.ask("create_session")["session_id"]
        return self._session_id

    def end_session(self) -> None:
        """End the last session, and free its models' places."""
        if self._session_id:
            self.ask(f"sessions/{self._session_id}/finish", reason={"type": "success"})
            self._session_id = ""

    def new_sampler(self) -> str:
        fields = {"session_id": self.new_session(), "sampling_session_seq_id": 0, "base_model": self.base_model}
        return self.ask("create_sampling_session", **fields)["sampling_session_id"]

    def new_model(self) -> str:
        fields = {"session_id": self.new_session(), "model_seq_id": 0, "base_model": self.base_model}
        created = self.ask("create_model", **fields, lora_config={"rank": 4, "seed": 8})
        answer = self.result(created["request_id"])
        assert answer.error_category is None, answer
        return created["model_id"]

    def result(self, request_id: str) -> Answer:
        """Wait for the end of an operation that was accepted."""
        while True:
            answer = self.send(Request.json("retrieve_future", request_id=request_id))
            if answer.status != 408:
                return answer


def assault(
    url: str,
    key: str,
    base_model: str,
    requests: Sequence[Request],
    *,
    connections: int,
    persists: bool,
    await_first: bool,
) -> list[Answer]:
    """Send all requests. With `await_first`, also wait for the end of the first operation that was accepted."""
    with Attacker(url, key, base_model) as attacker:
        with ThreadPoolExecutor(connections) as pool:
            answers = list(pool.map(attacker.send_until_accepted if persists else attacker.send, requests))
        accepted = next((answer.request_id for answer in answers if answer.request_id), None)
        return [*answers, attacker.result(accepted)] if await_first and accepted else answers
