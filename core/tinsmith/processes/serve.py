"""Run a server: lock the data directory, open the store, supervise the engines, answer HTTP, and stop in order."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import uvicorn
import uvloop
from fastapi import FastAPI
from rich.console import Console
from rich.markup import escape

from tinsmith import scratch
from tinsmith.errors import ConfigError, ServerError
from tinsmith.figures import Figures
from tinsmith.hook_values import ServerStarted, ServerStopping
from tinsmith.lasting import Work, lasting
from tinsmith.placement.machine import this_machine
from tinsmith.placement.plan import make_plan_of_sound, with_placement
from tinsmith.placement.report import lines_of
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import hold_store, make_store, make_tracer
from tinsmith.processes.before_start import listen, obstacles, refuse
from tinsmith.processes.data_dir_lock import DataDirLock
from tinsmith.processes.display import EngineDisplay, is_busy, show_banner
from tinsmith.processes.garbage import collect_old, collect_rarely
from tinsmith.processes.housekeeping import Housekeeping
from tinsmith.processes.logs import RepeatedWarnings, console_of, log_to_stderr
from tinsmith.processes.supervisor import Supervisor, models_to_run
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.server.app import begin_shutdown, create_app
from tinsmith.server.context import ServerContext
from tinsmith.server.kept import Engines
from tinsmith.server.limits.bounded_http import BoundedHttp
from tinsmith.server.live_keys import LiveKeys
from tinsmith.settings import ServerSettings, Settings
from tinsmith.settings.environment import forget_settings
from tinsmith.store import EngineState, RequestStore
from tinsmith.tracer import Tracer

_EXIT_INTERRUPTED: Final = 130
_GRACE_S: Final = 10  # for responses in progress when the server stops
_LOADING_REFRESH_S: Final = 0.2
_WATCH_REFRESH_S: Final = 2.0
_BACKLOG: Final = 2048
_FILES: Final = 1 << 16
_OTHER_FILES: Final = 256  # databases, checkpoints, pipes of engines
_FEWEST_CONNECTIONS: Final = 16  # as in the setting

_REPEATED_WARNINGS: Final = RepeatedWarnings()

_log = logging.getLogger(__name__)


def serve(settings: Settings, plugins: Plugins, keys: LiveKeys | None = None) -> None:
    """Serve until SIGINT or SIGTERM; a second signal stops at once. Raise ConfigError if the server cannot start.

    `keys`: API keys that follow their files; default: a fixed set from the settings.
    """
    configure_logging(settings.server)
    refuse([each for each in obstacles(settings, plugins) if not each.may_pass])
    settings = with_files_for_connections(settings)
    forget_settings_of_environment(settings.server)
    if keys is not None:
        keys.warn_of_readers()
    if (stand_in := StandIn.of(settings.losses, plugins.losses.all())) is not None:
        _log.warning("%s", stand_in)
    settings = assign_devices(settings, plugins)
    held = DataDirLock(settings.data_dir, shared=settings.server.share_data_dir)
    with held as lock, hold_store(settings, plugins):
        listener = listen(settings.server)
        url = _url(settings.server, listener)
        with listener:
            uvloop.run(_serve(settings, plugins, keys, listener, url, lock))


def forget_settings_of_environment(server: ServerSettings) -> None:
    """Leave no setting in the environment, and say what cannot be changed because it came from there."""
    if forget_settings() and server.api_keys:
        _log.warning(
            "the API keys come from the environment, so none can be revoked until this server stops; keys in the "
            "configuration file can be removed while it runs"
        )


def assign_devices(settings: Settings, plugins: Plugins) -> Settings:
    """Assign devices and memory to the engines of this server, and print the plan.

    An engine that cannot work as configured has no part in it: it says so itself, and others are served.
    """
    own = [model.name for model in models_to_run(settings)]
    plan, faults = make_plan_of_sound(settings, plugins, this_machine(), own)
    for fault in faults.values():
        _log.error("not placed: %s", fault)
    if plan:
        terminal = console_of(_log, settings.server.log_format)
        terminal.print("[bold]placement[/]", *map(escape, lines_of(plan)), sep="\n", soft_wrap=True)
    return with_placement(settings, plan)


def configure_logging(server: ServerSettings) -> None:
    """Log to stderr, with time and logger name."""
    log_to_stderr(server.log_level, server.log_format)
    logging.getLogger("uvicorn.error").addFilter(_REPEATED_WARNINGS)  # a logger holds a filter once


def with_files_for_connections(settings: Settings) -> Settings:
    """Raise this process's limit of open files: each connection needs one, and the usual default is 1,024.

    If the hard limit is too low, lower the number of connections and say so: a server without free files could neither
    accept connections nor refuse them. Raise ConfigError if there would be too few.
    """
    limits = settings.server.limits
    files = allow_many_files(max(_FILES, limits.connections + _OTHER_FILES))
    room = files - _OTHER_FILES
    if limits.connections <= room:
        return settings
    told = (
        f"server.limits.connections is {limits.connections}, and this process may open {files} files (ulimit -Hn), of "
        f"which {_OTHER_FILES} are for other things"
    )
    if room < _FEWEST_CONNECTIONS:
        msg = f"{told}: raise the limit to at least {_OTHER_FILES + _FEWEST_CONNECTIONS}"
        raise ConfigError(msg)
    _log.warning("%s: lowered to %d connections; raise the limit, or lower the setting", told, room)
    server = settings.server.model_copy(update={"limits": limits.model_copy(update={"connections": room})})
    return settings.model_copy(update={"server": server})


def allow_many_files(wanted: int = _FILES) -> int:
    """Raise the limit, at most to the hard limit. Return the new one, or `wanted` if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= reachable:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    return reachable


def _url(server: ServerSettings, listener: socket.socket) -> str:
    if server.public_url:
        return server.public_url.rstrip("/")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(
    settings: Settings,
    plugins: Plugins,
    keys: LiveKeys | None,
    listener: socket.socket,
    url: str,
    lock: DataDirLock,
) -> None:
    figures = Figures()
    store = make_store(settings, plugins, figures)
    await store.open()
    supervisor = Supervisor(settings, store)
    tracer: Tracer | None = None
    try:
        await supervisor.start()  # first: engines take longer to start than all that follows
        tracer = make_tracer(settings, plugins, "server")
        app = await create_app(settings, store=store, plugins=plugins, keys=keys, figures=figures, tracer=tracer)
        context: ServerContext = app.state.context
        http = _HttpServer(app)
        terminal = console_of(_log, settings.server.log_format)
        if settings.server.log_format == "json":
            _log.info("serving %s at %s", ", ".join(model.name for model in settings.models), url)
        else:
            show_banner(terminal, settings, plugins, url)
        with _signals(http, supervisor, terminal):
            collect_rarely()
            try:
                async with asyncio.TaskGroup() as beside:
                    works: dict[str, Work] = {
                        "housekeeping": partial(_housekeeping, settings, store, context),
                        "the watch for pauses": context.hearing.watch,
                        "the watch of the disk": context.storage.watch,
                        "the announcement of the server": partial(_announce, http, settings, plugins, url, lock),
                        "the display of the engines": partial(_show_engines, http, terminal, settings, context.engines),
                        "the collection of garbage": collect_old,
                    }
                    tasks = [beside.create_task(lasting(work, name=name)) for name, work in works.items()]
                    await http.serve([listener])
                    for task in tasks:
                        task.cancel()
            finally:
                plugins.server_stopping(ServerStopping(url=url))
                await supervisor.stop()  # here, where a second signal ends it at once
    finally:
        await supervisor.stop()  # if the app could not be made
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        await store.close()


async def _housekeeping(settings: Settings, store: RequestStore, context: ServerContext) -> None:
    housekeeping = Housekeeping(
        settings.server,
        store,
        settings.data_dir.checkpoints,
        recovery=settings.recovery,
        hearing=context.hearing,
        server_id=context.server_id,
        uploads_root=settings.data_dir.uploads,
    )
    await housekeeping.run()


async def _announce(http: _HttpServer, settings: Settings, plugins: Plugins, url: str, lock: DataDirLock) -> None:
    """Say where the server is once it answers."""
    await http.answering.wait()
    lock.describe(url=url)
    plugins.server_started(ServerStarted(url=url, base_models=tuple(model.name for model in settings.models)))


async def _show_engines(http: _HttpServer, terminal: Console, settings: Settings, engines: Engines) -> None:
    """Show what the engines report once the server answers: often while they load, rarely afterwards."""
    await http.answering.wait()
    names = tuple(model.name for model in settings.models)
    display = EngineDisplay(terminal, names)
    try:
        while True:
            settled = await _show_once(display, names, engines)
            await asyncio.sleep(_WATCH_REFRESH_S if settled else _LOADING_REFRESH_S)
    finally:
        display.close()


async def _show_once(display: EngineDisplay, names: tuple[str, ...], engines: Engines) -> bool:
    """Return whether every engine is ready and has compiled, or has failed."""
    try:
        records = [record for name, record in (await engines.records()).items() if name in names]
    except ServerError as error:  # requests report it to their clients; the display tries again
        _log.warning("cannot read what the engines report: %s", error)
        return True
    display.update(records)
    resting = (EngineState.READY, EngineState.SILENT, EngineState.FAILED)
    settled = [record for record in records if record.state in resting and not is_busy(record)]
    return len(settled) == len(names)


class _HttpServer(uvicorn.Server):
    """Uvicorn without its signal handling. Ends long polls before it waits for responses in progress."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)
        self._app = app
        self.answering = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `_signals` handles them

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        begin_shutdown(self._app)
        await super().shutdown(sockets)


@contextmanager
def _signals(http: _HttpServer, supervisor: Supervisor, terminal: Console) -> Iterator[None]:
    """At the first signal, stop in order; at the second, kill the engines and exit.

    SIGINT stays ignored if it was so before: a script has started the server with `&`, and Ctrl-C is for the script.
    """
    loop = asyncio.get_running_loop()
    background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    handled = (signal.SIGTERM,) if background else (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        if http.should_exit:
            supervisor.kill()
            scratch.remove_all()
            os._exit(_EXIT_INTERRUPTED)
        http.should_exit = True
        terminal.print("\nstopping; press Ctrl-C again to stop at once")

    for number in handled:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
