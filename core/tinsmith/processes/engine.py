"""The process of one engine, `tinsmith engine`: signals, the lease, and exit codes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NoReturn

import uvloop

from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.failures import EngineFailedError
from tinsmith.errors import ConfigError, LeaseLostError, PluginError, ServerError
from tinsmith.figures import Figures
from tinsmith.lifeline import end_with, leave
from tinsmith.placement.machine import this_machine
from tinsmith.placement.plan import make_plan, with_placement
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_scheduler, make_store, make_tracer
from tinsmith.processes.deaths import EXIT_MISCONFIGURED, EXIT_STORE, EXIT_SUPERSEDED, Cause
from tinsmith.processes.engine_child import ENGINE_ID, LAST_WORDS, SUPERVISED, new_engine_id
from tinsmith.processes.engine_run import EngineRun, Previous, StoppedWhileLoadingError
from tinsmith.processes.lease import give_back, hold_lease, life_sign, take_lease
from tinsmith.processes.logs import log_to_stderr
from tinsmith.processes.reports import EngineReports, last_report
from tinsmith.settings import Settings
from tinsmith.stopping import unless_stopped
from tinsmith.store import EngineRecord, EngineState, Lease
from tinsmith.tracer import Tracer

SWITCH_S: Final = 1e-6
"""How long a thread may hold the interpreter while another waits for it. By default 5 ms: a backend that computes in
Python would make each of some hundred steps of a transaction wait that long, while it keeps the server from writing.
The wait starts again whenever the other thread lets go of the interpreter and takes it back, as each small product of
NumPy does. So the time must be shorter than any computation, or the wait has no end."""

_log = logging.getLogger(__name__)


def run_engine(settings: Settings, model_name: str, plugins: Plugins) -> None:
    """Run until SIGTERM or SIGINT, or be killed when the supervisor ends.

    Exit with 1 or EXIT_STORE if another start may help. Raise ConfigError or PluginError if it cannot.
    """
    supervised = SUPERVISED in os.environ
    if supervised:
        end_with(0)
    sys.setswitchinterval(SWITCH_S)
    log_to_stderr(settings.server.log_level, settings.server.log_format)
    try:
        plan = make_plan(settings, plugins, this_machine(), [model_name])  # or as the server
        uvloop.run(_until_signalled(with_placement(settings, plan), model_name, plugins))
    except StoppedWhileLoadingError:
        leave(0)  # without waiting for the thread that loads
    except EngineFailedError as error:
        _end(error, 1, supervised=supervised)
    except ServerError as error:  # of the store: nothing that ran here is at fault
        _end(error, EXIT_STORE, supervised=supervised)


@contextmanager
def misconfiguration_told_once() -> Iterator[None]:
    """End an engine that has a supervisor with EXIT_MISCONFIGURED if the block raises ConfigError or PluginError."""
    supervised = SUPERVISED in os.environ
    try:
        yield
    except (ConfigError, PluginError) as error:
        if not supervised:
            raise
        _end(error, EXIT_MISCONFIGURED, supervised=True)


def _end(error: Exception, code: int, *, supervised: bool) -> NoReturn:
    """Say why this engine ends. If it has a supervisor, that one logs it."""
    if supervised:
        print(f"{LAST_WORDS}{' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)  # noqa: T201 - as above
    else:
        _log.error("%s", error)
    sys.exit(code)


async def _until_signalled(settings: Settings, model_name: str, plugins: Plugins) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    supervised = os.environ.pop(SUPERVISED, None)
    before = Cause(supervised) if supervised else None
    await serve_engine(settings, model_name, plugins, stopping=stopping, before=before, on_lost=_leave)


def _leave(error: LeaseLostError) -> None:
    """End at once: no other thread of this process may go on working beside the engine that serves now."""
    _log.error("%s; this engine ends", error)
    sys.stderr.flush()
    os._exit(EXIT_SUPERSEDED)


async def serve_engine(
    settings: Settings,
    model_name: str,
    plugins: Plugins,
    *,
    stopping: asyncio.Event,
    before: Cause | None = None,
    on_lost: Callable[[LeaseLostError], object] | None = None,
) -> None:
    """Serve one of the configured base models until `stopping` is set. First wait while another engine serves it.

    `before` is why the previous engine died, None if nobody saw it die.
    Raise ConfigError or PluginError if the engine cannot start as configured, ServerError if it cannot continue,
    LeaseLostError if another engine has taken over; `on_lost` is called before that is raised, at once.
    """
    model = settings.model(model_name)
    figures = Figures()
    store = make_store(settings, plugins, figures)  # of an engine's own thread, or process
    engine_id = os.environ.pop(ENGINE_ID, None) or new_engine_id()
    signs = settings.data_dir.life_signs(model_name)
    await store.open()
    tracer: Tracer | None = None
    try:
        tracer = make_tracer(settings, plugins, "engine")
        with life_sign(signs, engine_id):
            try:
                lease_s = settings.recovery.lease_s
                taken = await unless_stopped(
                    stopping, take_lease(store, model_name, engine_id=engine_id, duration_s=lease_s, directory=signs)
                )
                if taken is None:
                    return
                record = await last_report(store, model_name)
                engine_run = EngineRun(
                    settings=settings,
                    model=model,
                    data_dir=settings.data_dir,
                    plugins=plugins,
                    store=store,
                    lease=taken.lease,
                    scheduler=make_scheduler(settings, plugins),
                    reports=EngineReports(store, taken.lease, _first_record(record, taken.lease)),
                    previous=Previous.told_by(record, taken, before),
                    watch=CallWatch(settings.watchdog),
                    figures=figures,
                    tracer=tracer,
                )
                await hold_lease(store, taken.lease, engine_run.run(stopping), on_lost)
            finally:
                await give_back(store, model_name, engine_id, directory=signs)
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        await store.close()


def _first_record(found: EngineRecord, lease: Lease) -> EngineRecord:
    """Take over the record. The counts start again."""
    return replace(
        found,
        engine_id=lease.engine_id,
        pid=os.getpid(),
        state=EngineState.STARTING,
        detail="",
        progress=None,
        consistency=None,
        turn=None,
        sampler_trouble=None,
    )
