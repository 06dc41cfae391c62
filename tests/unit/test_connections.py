"""Bounds of connections, over real sockets. Time passes by looks, which the tests take themselves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tinsmith.server.limits import bounded_http
from tinsmith.server.limits.body_budget import STRANGER_BYTES
from tinsmith.server.limits.bounded_http import (
    BODY_GRACE_S,
    HEAD_S,
    MAX_HEADERS,
    MAX_PIPELINED,
    MIN_BYTES_PER_S,
    UNREAD_S,
    BoundedHttp,
    Connections,
    Phase,
)

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK"


class App:
    """Answers a request with the size of its body, once it may."""

    def __init__(self, most: int) -> None:
        self.state = SimpleNamespace(connections=Connections(most))
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answer = b""
        self.refuses = False
        self.port = 0
        self.clients: list[Client] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b"" if self.refuses else await Request(scope, receive).body()
        await self.may_answer.wait()
        answer = self.answer or b"%d" % len(body)
        headers = [
            (b"content-length", b"%d" % len(answer)),
            (b"connection", b"close" if self.refuses else b"keep-alive"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    @property
    def connections(self) -> list[BoundedHttp]:
        return list(self.state.connections.all)

    def look(self, times: int) -> None:
        for _ in range(times):
            self.state.connections.check()

    async def connect(self) -> "Client":
        """Return when the server has taken the connection."""
        before = len(self.connections)
        client = await self.dial()
        await until(lambda: len(self.connections) > before)
        return client

    async def dial(self) -> "Client":
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        """Return the head of the next answer, and read its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await self.reader.readexactly(int(length.split(b":")[1]))
        return head

    async def is_cut(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


async def until(happened: Callable[[], bool]) -> None:
    """Let the server work until something is so; the test's own limit ends a wait in vain."""
    while not happened():  # noqa: ASYNC110 - sockets have no events
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(most: int = 100) -> AsyncIterator[App]:
    app, state = App(most), ServerState()
    config = uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, timeout_keep_alive=3600)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}, loop), "127.0.0.1", 0)
    try:
        app.port = server.sockets[0].getsockname()[1]
        yield app
    finally:
        server.close()
        app.may_answer.set()
        for client in app.clients:
            client.writer.transport.abort()
        await until(lambda: not state.connections)
        await server.wait_closed()
        await asyncio.gather(*state.tasks)


@pytest.mark.parametrize("sent", [b"", b"GET", GET[:-2], b"\r\n"])
async def test_half_open_connections_are_cut(sent: bytes) -> None:
    async with serving() as app:
        client = await app.connect()
        client.send(sent)
        app.look(HEAD_S)
        assert len(app.connections) == 1
        app.look(1)
        assert (await client.answer()).startswith(b"HTTP/1.1 408 ")
        assert await client.is_cut()
        assert app.connections == []


async def idle_after_a_request(app: App) -> tuple[Client, BoundedHttp]:
    client = await app.connect()
    client.send(GET)
    assert (await client.answer()).startswith(OK)
    [connection] = app.connections
    await until(lambda: connection.phase is Phase.HEAD)
    return client, connection


async def test_an_idle_connection_is_left_to_the_keep_alive_timer() -> None:
    async with serving() as app:
        client, _ = await idle_after_a_request(app)
        app.look(10 * HEAD_S)
        client.send(GET)
        assert (await client.answer()).startswith(OK)


@pytest.mark.parametrize("more", [b"", b"x"], ids=["silent", "trickling"])
async def test_half_a_head_after_a_request_is_cut_too(more: bytes) -> None:
    async with serving() as app:
        client, connection = await idle_after_a_request(app)
        client.send(b"G")
        await until(lambda: connection.is_awaited)
        client.send(b"ET /")
        for _ in range(HEAD_S + 1):
            client.send(more)
            await asyncio.sleep(0)
            app.look(1)
        assert (await client.answer()).startswith(b"HTTP/1.1 408 ")


async def test_a_slow_body_is_cut_and_one_that_keeps_the_rate_is_not() -> None:
    async with serving() as app:
        slow, steady = await app.connect(), await app.connect()
        num_bytes = 20 * MIN_BYTES_PER_S
        for client, sent in ((slow, 10), (steady, num_bytes)):
            client.send(HEAD % (num_bytes + 1) + sent * b"x")
        first, second = app.connections
        await until(lambda: (first.body_bytes, second.body_bytes) == (10, num_bytes))
        app.look(BODY_GRACE_S + 20)
        assert (await slow.answer()).startswith(b"HTTP/1.1 408 ")
        assert await slow.is_cut()
        steady.send(b"x")
        assert (await steady.answer()).startswith(OK)


async def test_who_is_refused_may_send_the_rest_and_reads_the_answer() -> None:
    """Closing at once would reset the connection, and a client that still sends would see nothing else."""
    async with serving() as app:
        app.refuses = True
        client = await app.connect()
        client.send(HEAD % (8 << 20) + bytes(1 << 20))
        assert (await client.answer()).startswith(OK)
        client.send(bytes(7 << 20))
        await client.writer.drain()
        assert await client.is_cut()
        client.writer.write_eof()
        await until(lambda: not app.connections)


@pytest.mark.parametrize("how", ["slowly", "without end"])
async def test_who_is_refused_may_not_go_on_for_ever(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as app:
        app.refuses = True
        client = await app.connect()
        client.send(HEAD % (8 << 20))
        assert (await client.answer()).startswith(OK)
        if how == "slowly":
            app.look(BODY_GRACE_S + 1)
        else:
            monkeypatch.setattr(bounded_http, "LINGER_BYTES", 1 << 20)
            client.send(bytes(2 << 20))
        await until(lambda: not app.connections)


async def test_a_long_poll_may_take_its_time() -> None:
    async with serving() as app:
        app.may_answer.clear()
        client = await app.connect()
        client.send(GET)
        [connection] = app.connections
        await until(lambda: connection.phase is Phase.ANSWER)
        app.look(10_000)
        app.may_answer.set()
        assert (await client.answer()).startswith(OK)


async def test_an_answer_that_nobody_reads_is_cut_and_one_that_is_read_slowly_is_not() -> None:
    async with serving() as app:
        app.answer = b"x" * (64 << 20)
        client = await app.connect()
        client.send(GET)
        [connection] = app.connections
        await until(lambda: connection.transport.get_write_buffer_size() > 0)
        for _ in range(3):
            app.look(UNREAD_S // 2)
            unsent = connection.transport.get_write_buffer_size()
            while connection.transport.get_write_buffer_size() > unsent - MIN_BYTES_PER_S:
                await client.reader.read(1 << 16)
        assert len(app.connections) == 1
        client.writer.transport.pause_reading()
        app.look(UNREAD_S + 2)
        await until(lambda: not app.connections)


async def test_a_new_connection_replaces_the_longest_idle_one() -> None:
    async with serving(most=3) as app:
        app.may_answer.clear()
        busy, idle, half_open = [await app.connect() for _ in range(3)]
        first = app.connections[0]
        busy.send(GET)
        half_open.send(b"GET")
        await until(lambda: first.phase is Phase.ANSWER)
        client = await app.dial()
        assert await idle.is_cut()
        client.send(GET)
        app.may_answer.set()
        assert (await client.answer()).startswith(OK)
        assert (await busy.answer()).startswith(OK)
        assert len(app.connections) == 3


async def test_requests_that_do_not_arrive_make_room_after_idle_connections() -> None:
    """Without a key, a client could hold all connections with bodies of which it sends nothing."""
    async with serving(most=3) as app:
        app.may_answer.clear()
        stranger, known, idle = [await app.connect() for _ in range(3)]
        first, second, _ = app.connections
        stranger.send(HEAD % 100 + b"x")
        known.send(HEAD % (1 << 20) + bytes(STRANGER_BYTES + 1))
        await until(lambda: (first.body_bytes, second.body_bytes) == (1, STRANGER_BYTES + 1))
        for replaced in (idle, stranger):
            client = await app.dial()
            assert await replaced.is_cut()
            client.send(GET)
            newest = app.connections[-1]
            await until(lambda newest=newest: newest.phase is Phase.ANSWER)  # type: ignore[misc]
        assert (await (await app.dial()).answer()).startswith(b"HTTP/1.1 503 ")
        assert second in app.connections


async def test_a_connection_too_many_is_told_so() -> None:
    async with serving(most=2) as app:
        app.may_answer.clear()
        for client in [await app.connect() for _ in range(2)]:
            client.send(GET)
        await until(lambda: all(connection.phase is Phase.ANSWER for connection in app.connections))
        third = await app.dial()
        assert (await third.answer()).startswith(b"HTTP/1.1 503 ")
        assert await third.is_cut()
        assert len(app.connections) == 2


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(GET[:-2] + b"a:b\r\n" * MAX_HEADERS + b"\r\n", id="headers"),
        pytest.param(GET * (MAX_PIPELINED + 2), id="requests at once"),
    ],
)
async def test_what_one_packet_may_hold_is_bounded(sent: bytes) -> None:
    async with serving() as app:
        client = await app.connect()
        client.send(sent)
        assert (await client.answer()).startswith(b"HTTP/1.1 400 ")


async def test_requests_at_once_are_answered_in_turn() -> None:
    async with serving() as app:
        client = await app.connect()
        client.send(GET * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            assert (await client.answer()).startswith(OK)
        [connection] = app.connections
        await until(lambda: connection.phase is Phase.HEAD)
