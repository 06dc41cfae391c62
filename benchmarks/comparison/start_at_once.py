"""Answer at once what would need the engine: what remains is the SDK and HTTP.

    start_at_once --url URL --base-model NAME

The first answer to each of `REPEATED`, and to its future, comes from the server at the URL; every later one is a copy.
Whatever else is asked goes to that server. It never sees the seq_ids of what was answered with a copy, so a model may
only repeat the same calls.
"""

import asyncio
import http.client
import json
import os
import sys
from collections.abc import Mapping
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from comparison import launch

REPEATED: Final = ("optim_step", "save_weights_for_sampler", "create_sampling_session")
_RETRIEVE: Final = "retrieve_future"
_NOT_PASSED_ON: Final = ("transfer-encoding", "connection", "content-length", "host")
_OK: Final = 200


class Answers:
    """The server's, and copies of them."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._kept: dict[str, bytes] = {}  # by verb, or by request_id

    def kept(self, verb: str, body: bytes) -> bytes | None:
        return self._kept.get(self._key(verb, body))

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Ask the server. Return its answer as it goes over the wire."""
        connection = http.client.HTTPConnection(self._address)
        try:
            connection.request(method, path, body, _without(headers))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}", f"content-length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in _without(dict(answer.getheaders())).items()]
        wire = "\r\n".join([*lines, "", ""]).encode() + content
        if answer.status == _OK:
            self._keep(verb_of(path), body, content, wire)
        return wire

    def _keep(self, verb: str, body: bytes, content: bytes, wire: bytes) -> None:
        if verb in REPEATED:
            self._kept[verb] = wire
            request_id = json.loads(content).get("request_id")
            if request_id is not None:
                self._kept.pop(request_id, None)
        elif verb == _RETRIEVE:
            self._kept[self._key(verb, body)] = wire

    def _key(self, verb: str, body: bytes) -> str:
        return str(json.loads(body)["request_id"]) if verb == _RETRIEVE else verb


class _Connection(asyncio.Protocol):
    """Parses requests, one after the other, as the SDK's client sends them."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpRequestParser(self)
        self._headers: dict[str, str] = {}
        self._path, self._body = "", b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, b""

    def on_url(self, url: bytes) -> None:
        self._path = url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        kept = self._answers.kept(verb_of(self._path), self._body)
        if kept is not None:
            self._transport.write(kept)
            return
        task = asyncio.create_task(self._pass_on(self._parser.get_method().decode()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, method: str) -> None:
        asked = (method, self._path, self._headers, self._body)
        self._transport.write(await asyncio.to_thread(self._answers.ask, *asked))


def verb_of(path: str) -> str:
    return urlsplit(path).path.rsplit("/", 1)[-1]


def _without(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}


async def _serve(url: str, description: Mapping[str, object]) -> None:
    answers, loop = Answers(url), asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(answers), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}", "pid": os.getpid(), **description}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # the loop would wait for what is still being passed on


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--base-model", required=True)
    options = parser.parse_args()
    described = {"version": "", "configuration": {}, "base_model": options.base_model}
    uvloop.run(_serve(options.url, {"name": "at once", **described}))


if __name__ == "__main__":
    main()
