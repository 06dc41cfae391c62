"""A complete server in this process, for tests: HTTP on a free loopback port, the store, and an engine per model.

    with running_server(tmp_path) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")

Server and engines run in threads of their own and share only the database, like separate processes. By default one
model named "toy" is served by the toy backend.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import uvicorn
from fastapi import FastAPI

from tinsmith.figures import Figures
from tinsmith.loopback import exempt_loopback
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store, make_tracer
from tinsmith.server.app import begin_shutdown, create_app
from tinsmith.server.limits.bounded_http import BoundedHttp
from tinsmith.settings import (
    LossSettings,
    ModelSettings,
    PluginSection,
    QuotaSettings,
    RecoverySettings,
    ServerSettings,
    Settings,
)
from tinsmith.store import RequestStore
from tinsmith.testing.engine_thread import engine_thread
from tinsmith.testing.loop_thread import LoopThread

T = TypeVar("T")

TOY: Final = ModelSettings(name="toy", backend=PluginSection(plugin="toy"))
_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 300.0


class RunningServer:
    """A test's handle to the server."""

    def __init__(self, *, url: str, settings: Settings, app: FastAPI, store: RequestStore, loop: "LoopThread") -> None:
        self.url = url
        self.settings = settings
        self.app = app
        self.store = store  # of the server: use it through `call`
        self._loop = loop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, such as a method of `store`, on the server's event loop."""
        return self._loop.call(work)


@contextmanager
def running_server(  # noqa: PLR0913 - sections of the settings
    data_dir: Path,
    *,
    models: Sequence[ModelSettings] = (TOY,),
    server: Mapping[str, object] | None = None,
    recovery: Mapping[str, object] | None = None,
    quotas: Mapping[str, object] | None = None,
    losses: Mapping[str, object] | None = None,
    login: Mapping[str, object] | None = None,
    tracing: Mapping[str, object] | None = None,
    store_options: Mapping[str, object] | None = None,
    extra_plugins: Sequence[object] = (),
    engines: bool = True,
) -> Iterator[RunningServer]:
    """Serve until the block ends. Without `engines`, all work stays queued.

    `server`, `recovery`, `quotas` and `losses` override fields of these sections of the settings, `store_options` those
    of the store; `login` and `tracing` are these sections. A second server on the same `data_dir` finds what the first
    one left.
    """
    exempt_loopback(os.environ)  # for clients in this process
    settings = Settings(
        server=ServerSettings.model_validate({"data_dir": data_dir, "port": 0, **(server or {})}),
        store=PluginSection.model_validate({"plugin": "sql", **(store_options or {})}),
        recovery=RecoverySettings.model_validate(recovery or {}),
        quotas=QuotaSettings.model_validate(quotas or {}),
        losses=LossSettings.model_validate(losses or {}),
        login=None if login is None else PluginSection.model_validate(login),
        tracing=None if tracing is None else PluginSection.model_validate(tracing),
        models=tuple(models),
    )
    with ExitStack() as stack:
        loop = stack.enter_context(LoopThread.running("tinsmith-server"))
        figures = Figures()
        store = make_store(settings, Plugins.load(extra_plugins), figures)
        loop.call(store.open())
        stack.callback(lambda: loop.call(store.close()))
        plugins = Plugins.load(extra_plugins)
        tracer = make_tracer(settings, plugins, "server")
        if tracer is not None:
            stack.callback(tracer.close)
        app = loop.call(create_app(settings, store=store, plugins=plugins, figures=figures, tracer=tracer))
        url = stack.enter_context(_http(app, loop))
        for model in settings.models if engines else ():
            own = Plugins.load(extra_plugins)
            stack.enter_context(engine_thread(settings, model, own, make_store(settings, own)))
        yield RunningServer(url=url, settings=settings, app=app, store=store, loop=loop)


class _HttpServer(uvicorn.Server):
    """Signals when it accepts requests, and ends long polls when it stops."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, access_log=False, backlog=2048
        )
        super().__init__(config)
        self._app = app
        self.answering = threading.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the test runner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        begin_shutdown(self._app)
        await super().shutdown(sockets)


@contextmanager
def _http(app: FastAPI, loop: LoopThread) -> Iterator[str]:
    server = _HttpServer(app)
    # with all arguments: otherwise asyncio leaves Nagle's algorithm on, and each response waits 40 ms for an ACK
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.run_coroutine_threadsafe(server.serve([listener]), loop.loop)
        if not server.answering.wait(_START_TIMEOUT_S):
            msg = "the test server did not start"
            raise TimeoutError(msg)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            serving.result(_STOP_TIMEOUT_S)
