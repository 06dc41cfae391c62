"""Engine processes: started, watched, restarted, given up, and never left behind."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import sqlite3
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from launcher import HANGING
from processes import Launcher

from tinsmith import operations as ops
from tinsmith.errors import LeaseLostError, StoreError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes import deaths, engine_child
from tinsmith.processes import supervisor as supervisor_module
from tinsmith.processes.engine import serve_engine
from tinsmith.processes.supervisor import Supervisor
from tinsmith.server.kept import Engines
from tinsmith.server.waiting_reasons import explain
from tinsmith.settings import (
    ApiKey,
    ModelSettings,
    PluginSection,
    QuotaSettings,
    RecoverySettings,
    ServerSettings,
    Settings,
    SupervisorSettings,
    WatchdogSettings,
)
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import EngineRecord, EngineState, RunState, StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, take_over
from tinsmith_checkpoints.huggingface.safetensors_files import read_header, shard_name, write_index
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

STAY = (
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
    ":glibc.malloc.arena_max=1"
)
TOY = ModelSettings(name="org/toy", backend=PluginSection(plugin="toy"))


def settings_for(tmp_path: Path, *models: ModelSettings, max_restarts: int = 3) -> Settings:
    return Settings(
        server=ServerSettings(
            data_dir=tmp_path, api_keys=(ApiKey.model_validate({"key": "tml-secret", "tenant": "ann"}),)
        ),
        supervisor=SupervisorSettings(restart_backoff_s=0.01, max_restarts=max_restarts),
        models=models or (TOY,),
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@asynccontextmanager
async def supervised(settings: Settings, store: SqlStore) -> AsyncIterator[Supervisor]:
    before = psutil.Process().children()  # of tests that share this process
    supervisor = Supervisor(settings, store)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()
    assert [child for child in psutil.Process().children() if child not in before] == []


async def until(store: SqlStore, condition: Callable[[EngineRecord], bool], base_model: str = TOY.name) -> EngineRecord:
    """Look at what the engine reports until it is as expected."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for record in await store.list_engines():
                if record.base_model == base_model and condition(record):
                    return record
            await asyncio.sleep(0.02)  # the engine needs the processor, too


async def end_of(process: psutil.Process) -> None:
    """Wait without reaping: whoever started the process has to learn how it ended."""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - it tells its parent alone
                await asyncio.sleep(0.02)


def all_stopped(process: psutil.Process) -> bool:
    states = []
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}


def suspend_between_writes(process: psutil.Process, database: Path) -> None:
    """A process that stops while it writes keeps SQLite's lock, and everybody waits for it."""
    while True:
        process.suspend()
        while not all_stopped(process):
            time.sleep(0.001)  # a thread that is in a system call finishes it first, and may get the lock by it
        with contextlib.closing(sqlite3.connect(database, timeout=1.0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.resume()
            else:
                connection.execute("ROLLBACK")
                return


async def until_it_is(engines: Engines, state: EngineState) -> EngineRecord:
    """Look at what the server makes of the engine, until it is in this state."""
    async with asyncio.timeout(WAIT_S):
        while (seen := (await engines.records())[TOY.name]).state is not state:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
    return seen


async def ready(store: SqlStore) -> EngineRecord:
    return await until(store, lambda record: record.state == EngineState.READY)


def use_command(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(engine_child, "engine_command", lambda _: (sys.executable, "-c", script))


@pytest.fixture
def forked_engines(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork engines from a process that has imported them. The other tests start them as they are shipped."""
    launcher.engines_here(monkeypatch)


@pytest.mark.thorough  # tests/crash/test_campaign.py kills engines in `make test`
async def test_a_killed_engine_is_replaced_and_its_models_go_on(tmp_path: Path, store: SqlStore) -> None:
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    async with supervised(settings_for(tmp_path), store):
        first = await ready(store)
        assert first.capabilities is not None
        assert first.capabilities.sampler is not None
        assert first.pid is not None
        await client.result(await client.create_model())
        await client.run(step)
        os.kill(first.pid, signal.SIGKILL)
        second = await until(store, lambda record: record.state == EngineState.READY and record.pid != first.pid)
        assert second.restarts == 1
        assert isinstance(await client.run(step), ops.OptimStepOutput)
    assert (await store.list_engines())[0].state == EngineState.STOPPED
    async with supervised(settings_for(tmp_path), store):  # an orderly stop keeps them as well
        assert isinstance(await client.run(step), ops.OptimStepOutput)
        run = await store.get_run(client.model_id())
        assert (run.state, run.state_reason, run.applied_seq_id) == (RunState.READY, None, 3)


async def test_two_models_have_an_engine_each(tmp_path: Path, store: SqlStore) -> None:
    other = TOY.model_copy(update={"name": "other"})
    async with supervised(settings_for(tmp_path, TOY, other), store):
        engines = [await ready(store), await until(store, lambda it: it.state == EngineState.READY, "other")]
        assert len({engine.pid for engine in engines}) == 2


@pytest.mark.usefixtures("forked_engines")
async def test_a_wrong_configuration_is_given_up_at_once_and_told_once(
    tmp_path: Path, store: SqlStore, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = ModelSettings(name="broken", path=tmp_path / "missing", backend=PluginSection(plugin="toy"))
    client = EngineDriver(store, "broken")
    await client.open_session()
    waiting = await client.create_model()
    async with supervised(settings_for(tmp_path, missing), store):
        failed = await client.failure(waiting)
        assert failed.category == "server"
        assert "ended with exit code 2 (reference" in failed.message
        assert "there is no directory" not in failed.message  # it names a path: see the log
        engine = await client.engine()
        assert (engine.state, engine.restarts) == (EngineState.FAILED, 0)
    logged = [record.getMessage() for record in caplog.records]
    assert "".join([*logged, *capfd.readouterr()]).count("there is no directory") == 1
    [line] = [line for line in logged if "there is no directory" in line]
    assert line.startswith("reference ")


@pytest.mark.usefixtures("forked_engines")
async def test_a_broken_download_is_given_up_at_once_and_the_file_is_named(tmp_path: Path, store: SqlStore) -> None:
    """It was taken for a crash, and tried again for minutes."""
    directory = tmp_path / "model"
    write_tiny_model(directory, TinyShape(num_layers=1))
    shard = (directory / "model.safetensors").rename(directory / shard_name("model", 0, 1))
    write_index(directory, "model", dict.fromkeys(read_header(shard), shard.name), 1)
    size = shard.stat().st_size
    os.truncate(shard, size - 8)
    broken = ModelSettings(name="broken", path=directory, backend=PluginSection(plugin="jax"))
    async with supervised(settings_for(tmp_path, broken), store):
        failed = await until(store, lambda record: record.restarts or record.state == EngineState.FAILED, "broken")
    assert (failed.state, failed.restarts) == (EngineState.FAILED, 0)
    assert "fix it and restart the server" in failed.detail
    assert failed.failure is not None
    assert f"{shard.name} is damaged: it is cut short: it has {size - 8} bytes, and its" in failed.failure.cause
    assert "download or copy the files again" in failed.failure.cause


async def test_that_an_engine_is_given_up_is_told_once_the_store_can_be_written(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it would seem to be restarting, and whoever waits for it would wait for ever."""
    use_command(monkeypatch, "raise SystemExit(2)")
    report, outages = store.report_engine, iter(range(3))

    async def failing(record: EngineRecord, **options: Any) -> None:
        if record.state is EngineState.FAILED and next(outages, None) is not None:
            raise StoreError("the disk is full")
        await report(record, **options)

    monkeypatch.setattr(store, "report_engine", failing)
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    waiting = await client.create_model()
    async with supervised(settings_for(tmp_path), store):
        assert "ended with exit code 2" in (await client.failure(waiting)).message
        assert next(outages, None) is None


async def test_an_engine_that_dies_again_and_again_is_given_up(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    use_command(monkeypatch, "import os; print('no such device'); os._exit(7)")  # flushes nothing, like a killed one
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    waiting = await client.create_model()
    async with supervised(settings_for(tmp_path, max_restarts=2), store):
        message = (await client.failure(waiting)).message
        assert "ended with exit code 7 (reference" in message
        engine = await client.engine()
        assert (engine.state, engine.restarts) == (EngineState.FAILED, 2)
        assert "exit code 7" in (await client.failure(await client.create_model(1))).message
    assert capfd.readouterr().err.count("[org/toy] no such device") == 3


@pytest.mark.usefixtures("forked_engines")
async def test_the_models_of_an_engine_that_was_given_up_go_on_when_it_is_started_again(
    tmp_path: Path, store: SqlStore
) -> None:
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    async with supervised(settings_for(tmp_path), store):
        await client.result(await client.create_model())
        await client.run(step)
    wrong = TOY.model_copy(update={"path": tmp_path / "missing"})
    async with supervised(settings_for(tmp_path, wrong), store):
        await until(store, lambda record: record.state == EngineState.FAILED)
        waiting = await client.submit(step)
        reason = explain(await store.get_operation(waiting), await store.waiting(waiting), QuotaSettings())
        assert reason.queue_state == "paused_capacity"
        assert "restart the server" in reason.text
    async with supervised(settings_for(tmp_path), store):
        assert isinstance(await client.result(waiting), ops.OptimStepOutput)
    run = await store.get_run(client.model_id())
    assert (run.state, run.state_reason, run.applied_seq_id) == (RunState.READY, None, 2)


async def test_deaths_from_outside_do_not_use_up_the_restarts(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    script = f"""
import os, signal
with open({str(seen)!r}, "a") as seen:
    seen.write(os.environ["_TINSMITH_SUPERVISED"] + ".")
number = open({str(seen)!r}).read().count(".")
if number % 3 == 0:
    os.abort()
os.kill(os.getpid(), signal.SIGKILL)
"""
    use_command(monkeypatch, script)
    monkeypatch.setattr(deaths, "COUNTERS", tmp_path / "none")  # who else runs out of memory is not counted
    settings = settings_for(tmp_path, max_restarts=2)
    settings = settings.model_copy(update={"recovery": RecoverySettings(max_interruptions=5)})
    async with supervised(settings, store):
        failed = await until(store, lambda record: record.state == EngineState.FAILED)
        assert "SIGKILL" in failed.detail
    # three crashes are too many, and so are six deaths from outside: these come first
    assert seen.read_text() == ".interruption.interruption.crash.interruption.interruption.crash.interruption."


async def test_an_outage_of_the_store_gives_up_no_engine(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it lasts. Once the store can be written, interruptions count."""
    outage = 6

    async def refuse(*_: object) -> None:
        nonlocal outage
        outage -= 1
        if not outage:
            patch.undo()
        msg = "the database has not been reachable"
        raise StoreError(msg)

    use_command(monkeypatch, f"raise SystemExit({deaths.EXIT_STORE})")
    settings = settings_for(tmp_path)
    settings = settings.model_copy(update={"recovery": RecoverySettings(max_interruptions=2)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "release_lease", refuse)
        async with supervised(settings, store):
            failed = await until(store, lambda record: record.state == EngineState.FAILED)
    assert (outage, failed.restarts) == (0, 6 + 2)


def moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The interpreter has moved, and comes back."""
    there = tmp_path / "python"
    monkeypatch.setattr(engine_child, "engine_command", lambda _: (str(there), "-c", "raise SystemExit(2)"))
    return lambda: there.symlink_to(sys.executable)


def no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The machine has no room for another process for a while."""
    use_command(monkeypatch, "raise SystemExit(2)")
    start, full = asyncio.create_subprocess_exec, True

    async def refusing(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        if full:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **options)

    def free() -> None:
        nonlocal full
        full = False

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refusing)
    return free


def no_place_for_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The settings of the engine cannot be written."""
    use_command(monkeypatch, "raise SystemExit(2)")
    directory = settings_for(tmp_path).data_dir.engine_settings(TOY.name, server="").parent
    directory.write_text("in the way")
    return directory.unlink


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (moved_away, "FileNotFoundError: [Errno 2] No such file or directory"),
        (no_processes, "BlockingIOError: [Errno 11] Resource temporarily unavailable"),
        (no_place_for_settings, "FileExistsError: [Errno 17] File exists"),
    ],
)
async def test_an_engine_that_cannot_be_started_is_tried_again_and_says_why(
    tmp_path: Path,
    store: SqlStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Path, pytest.MonkeyPatch], Callable[[], None]],
    words: str,
) -> None:
    mend = fault(tmp_path, monkeypatch)
    async with supervised(settings_for(tmp_path), store):
        record = await until(store, lambda record: record.restarts >= 2)
        assert record.state == EngineState.RESTARTING
        assert "the engine of 'org/toy' could not be started (reference" in record.detail
        assert "; restarting in " in record.detail
        assert record.failure is not None
        assert record.failure.cause.startswith(words)
        assert words in caplog.text
        mend()
        failed = await until(store, lambda record: record.state == EngineState.FAILED)
        assert "ended with exit code 2" in failed.detail


async def test_an_engine_that_can_never_be_started_is_given_up(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_away(tmp_path, monkeypatch)
    settings = settings_for(tmp_path).model_copy(update={"recovery": RecoverySettings(max_interruptions=2)})
    async with supervised(settings, store):
        failed = await until(store, lambda record: record.state == EngineState.FAILED)
        assert "could not be started" in failed.detail
        assert failed.restarts == 2


async def test_a_start_that_failed_tells_nothing_about_the_crash_before(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an operation that kills its engine would not be suspected of it."""
    told = tmp_path / "told"
    script = f"import os; open({str(told)!r}, 'a').write(os.environ['_TINSMITH_SUPERVISED'] + ' '); raise SystemExit(7)"
    commands = iter([(sys.executable, "-c", script), ("/missing",), (sys.executable, "-c", script)])
    last = (sys.executable, "-c", "raise SystemExit(2)")
    monkeypatch.setattr(engine_child, "engine_command", lambda _: next(commands, last))
    async with supervised(settings_for(tmp_path), store):
        await until(store, lambda record: record.state == EngineState.FAILED)
    assert told.read_text() == " crash "


@pytest.mark.parametrize("method", ["release_lease", "list_engines", "report_engine", "overdue_engines"])
async def test_a_fault_in_the_supervisor_is_logged_and_its_engine_watched_again(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    call, faults, us = getattr(store, method), 1, asyncio.current_task()

    async def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal faults
        if asyncio.current_task() is not us and faults:
            faults -= 1
            msg = "a fault of ours"
            raise RuntimeError(msg)
        return await call(*arguments, **options)

    use_command(monkeypatch, "input()" if method == "overdue_engines" else "raise SystemExit(2)")
    settings = settings_for(tmp_path).model_copy(update={"watchdog": WatchdogSettings(lost_s=1.0)})
    monkeypatch.setattr(store, method, failing)
    async with supervised(settings, store):
        if method == "overdue_engines":
            async with asyncio.timeout(WAIT_S):
                while "failed, and starts again" not in caplog.text:  # noqa: ASYNC110 - logged by a task
                    await asyncio.sleep(0.02)
        else:
            await until(store, lambda record: record.state == EngineState.FAILED)
    assert "org/toy failed, and starts again in" in caplog.text
    assert "RuntimeError: a fault of ours" in caplog.text


async def test_an_engine_does_not_wait_for_a_log_that_cannot_be_written(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait for ever to write into a pipe that nobody empties."""
    use_command(monkeypatch, "import sys; [print('x' * 1000) for _ in range(1000)]; sys.exit(2)")
    with os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        async with supervised(settings_for(tmp_path), store):
            await until(store, lambda record: record.state == EngineState.FAILED)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


async def test_an_engine_that_was_killed_for_memory_has_crashed(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 1\noom_kill 3\n")
    monkeypatch.setattr(deaths, "COUNTERS", counters)
    use_command(
        monkeypatch,
        f"import os, signal; open({str(counters)!r}, 'w').write('oom_kill 4'); os.kill(os.getpid(), signal.SIGKILL)",
    )
    async with supervised(settings_for(tmp_path, max_restarts=0), store):
        failed = await until(store, lambda record: record.state == EngineState.FAILED)
        assert "was killed by signal SIGKILL, while this machine was out of memory" in failed.detail


@pytest.mark.parametrize(
    ("tunables", "of_engine"),
    [
        ("", f"glibc.malloc.hugetlb=1:{STAY}"),
        ("glibc.malloc.check=0", f"glibc.malloc.check=0:glibc.malloc.hugetlb=1:{STAY}"),
        ("glibc.malloc.hugetlb=0", f"glibc.malloc.hugetlb=0:{STAY}"),
    ],
)
async def test_the_settings_reach_the_engine_privately_and_without_keys(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch, tunables: str, of_engine: str
) -> None:
    monkeypatch.setenv("TINSMITH_SERVER__PORT", "1")
    monkeypatch.setenv("TINSMITH_OTHER", "2")
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    seen = tmp_path / "seen.json"
    script = f"""
import json, os
with open({str(tmp_path / "new")!r}, "w") as file:
    json.dump(dict(os.environ), file)
os.rename({str(tmp_path / "new")!r}, {str(seen)!r})
input()
"""
    use_command(monkeypatch, script)
    settings = settings_for(tmp_path)
    async with supervised(settings, store):
        file = settings.data_dir.engine_settings(TOY.name, server="")
        await until(store, lambda _: file.exists() and file.stat().st_size > 0)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        content = json.loads(file.read_text())
        assert content["models"][0]["name"] == TOY.name
        assert "tml-secret" not in file.read_text()
        await until(store, lambda _: seen.exists())
        environment = json.loads(seen.read_text())
        assert "TINSMITH_SERVER__PORT" not in environment
        assert environment["TINSMITH_OTHER"] == "2"
        assert environment["GLIBC_TUNABLES"] == of_engine
    assert not file.exists()


async def test_an_engine_that_does_not_stop_is_killed(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_S", 0.1)
    deaf = tmp_path / "deaf"
    use_command(
        monkeypatch,
        "import signal, pathlib, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(deaf)!r}).touch(); time.sleep(600)",
    )
    async with supervised(settings_for(tmp_path), store):
        await until(store, lambda _: deaf.exists())


async def test_an_engine_ends_with_its_supervisor(tmp_path: Path, store: SqlStore) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tinsmith.settings import Settings\n"
        "from tinsmith.sql_store.config import SqlStoreConfig\n"
        "from tinsmith.sql_store.store import SqlStore\n"
        "from tinsmith.store import StoreContext\n"
        "from tinsmith.processes.supervisor import Supervisor\n"
        "async def main():\n"
        "    settings = Settings.model_validate_json(sys.argv[1])\n"
        "    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=settings.server.data_dir))\n"
        "    await store.open()\n"
        "    await Supervisor(settings, store).start()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    settings = settings_for(tmp_path)
    settings = settings.model_copy(update={"server": settings.server.model_copy(update={"api_keys": ()})})
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), settings.model_dump_json())
    try:
        engine = psutil.Process((await ready(store)).pid)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await end_of(engine)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.usefixtures("forked_engines")
async def test_a_second_engine_of_a_base_model_waits_for_the_end_of_the_first(
    tmp_path: Path, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    settings, stopping = settings_for(tmp_path), asyncio.Event()
    async with supervised(settings, store):
        first = await ready(store)
        await client.result(await client.create_model())
        standby = asyncio.create_task(serve_engine(settings, TOY.name, Plugins.load(), stopping=stopping))
        async with asyncio.timeout(WAIT_S):
            while f"standby: engine {first.engine_id} serves" not in caplog.text:  # noqa: ASYNC110 - logged by a task
                await asyncio.sleep(0.02)
        assert (await client.engine()).pid == first.pid
    await until(store, lambda record: record.state == EngineState.READY and record.pid == os.getpid())
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    assert isinstance(await client.run(step), ops.OptimStepOutput)
    stopping.set()
    await standby
    assert (await client.engine()).state == EngineState.STOPPED


async def test_a_superseded_engine_ends(tmp_path: Path, store: SqlStore) -> None:
    settings = settings_for(tmp_path).model_copy(update={"recovery": RecoverySettings(lease_s=1.0)})
    lost: list[LeaseLostError] = []
    engine = asyncio.create_task(
        serve_engine(settings, TOY.name, Plugins.load(), stopping=asyncio.Event(), on_lost=lost.append)
    )
    await ready(store)
    other = await take_over(store, TOY.name)
    with pytest.raises(LeaseLostError, match=other.engine_id):
        await engine
    assert len(lost) == 1


@pytest.mark.usefixtures("forked_engines")
async def test_an_engine_that_was_stopped_past_its_lease_is_replaced_and_refused(
    tmp_path: Path, store: SqlStore
) -> None:
    settings = settings_for(tmp_path).model_copy(update={"recovery": RecoverySettings(lease_s=5.0)})
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    stopping = asyncio.Event()
    async with supervised(settings, store):
        first = await ready(store)
        assert first.pid is not None
        await client.result(await client.create_model())
        assert isinstance(await client.run(step), ops.OptimStepOutput)
        stopped = psutil.Process(first.pid)
        suspend_between_writes(stopped, tmp_path / "tinsmith.db")
        patient = settings.model_copy(update={"recovery": RecoverySettings(lease_s=3600.0)})  # however busy we are
        standby = asyncio.create_task(serve_engine(patient, TOY.name, Plugins.load(), stopping=stopping))
        assert isinstance(await client.run(step), ops.OptimStepOutput)
        assert (await client.engine()).pid == os.getpid()
        stopped.resume()
        await end_of(stopped)
        assert isinstance(await client.run(step), ops.OptimStepOutput)
        assert (await client.engine()).pid == os.getpid()
        stopping.set()
        await standby
        third = await until(store, lambda record: record.state == EngineState.READY and record.pid != os.getpid())
        assert third.pid != first.pid
        assert isinstance(await client.run(step), ops.OptimStepOutput)
        run = await store.get_run(client.model_id())
        assert (run.state, run.state_reason, run.applied_seq_id) == (RunState.READY, None, 4)


@pytest.mark.usefixtures("forked_engines")
async def test_a_supervised_engine_that_was_superseded_is_started_again(tmp_path: Path, store: SqlStore) -> None:
    settings = settings_for(tmp_path, max_restarts=0).model_copy(update={"recovery": RecoverySettings(lease_s=1.0)})
    async with supervised(settings, store):
        first = await ready(store)
        process = psutil.Process(first.pid)  # now: it ends as soon as it hears
        other = await take_over(store, TOY.name)
        await end_of(process)
        await store.release_lease(TOY.name, other.engine_id)
        second = await until(store, lambda record: record.state == EngineState.READY and record.pid != first.pid)
        assert second.restarts == 0


@pytest.mark.usefixtures("forked_engines")
async def test_a_standby_that_keeps_crashing_is_given_up_and_the_engine_that_serves_is_not(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    async with supervised(settings_for(tmp_path), store):
        first = await ready(store)
        await client.result(await client.create_model())
        use_command(monkeypatch, "raise SystemExit('no such device')")
        standby = Supervisor(settings_for(tmp_path, max_restarts=2), store)
        others = asyncio.all_tasks()
        await standby.start()
        watching = [task for task in asyncio.all_tasks() - others if task.get_name().startswith("supervise")]
        await asyncio.wait_for(asyncio.gather(*watching), WAIT_S)
        assert caplog.text.count("no such device") == 3
        assert (await ready(store)).pid == first.pid
        step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
        assert isinstance(await client.run(step), ops.OptimStepOutput)


def a_pass(client: EngineDriver, token: int) -> ops.ForwardBackward:
    inputs = {"target_tokens": np.ones(1, np.int64), "weights": np.ones(1, np.float32)}
    datum = ops.Datum(tokens_T=np.array([token], np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=client.model_id(), data=(datum,))


@pytest.mark.usefixtures("forked_engines")
async def test_a_call_that_never_returns_ends_its_engine_and_fails_in_the_end(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(HANGING, "62")
    settings = settings_for(tmp_path).model_copy(
        update={
            "watchdog": WatchdogSettings(least_s=2.0, first_s=2.0),
            "recovery": RecoverySettings(max_retries=1),
        }
    )
    client, other = EngineDriver(store, TOY.name), EngineDriver(store, TOY.name, tenant="bob", session_id="s2")
    for each in (client, other):
        await each.open_session()
    async with supervised(settings, store):
        for each in (client, other):
            await each.result(await each.create_model())
        hanging = await client.submit(a_pass(client, 62))
        theirs = await other.submit(a_pass(other, 3))
        behind = await client.submit(a_pass(client, 3))
        failed = await client.failure(hanging)
        assert "a call of its backend did not return" in failed.message
        assert isinstance(await client.result(behind), ops.ForwardBackwardOutput)
        assert isinstance(await other.result(theirs), ops.ForwardBackwardOutput)
        assert (await ready(store)).restarts == 2
    said = capfd.readouterr().err
    assert "this engine is silent: forward_backward has not returned since" in said
    assert "forward_backward did not return within 2 s, so this engine ends" in said
    assert "in poisonous" in said  # where each thread was


async def test_an_engine_that_stays_stopped_is_killed(
    tmp_path: Path, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(tmp_path).model_copy(
        update={"watchdog": WatchdogSettings(lost_s=1.0), "recovery": RecoverySettings(lease_s=1.0)}
    )
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    async with supervised(settings, store):
        first = await ready(store)
        await client.result(await client.create_model())
        suspend_between_writes(psutil.Process(first.pid), tmp_path / "tinsmith.db")
        waiting = await client.submit(step)
        assert isinstance(await client.result(waiting), ops.OptimStepOutput)
        second = await until(store, lambda record: record.state == EngineState.READY and record.pid != first.pid)
        assert second.restarts == 1
        assert "without a sign of life: it was stopped" in caplog.text


async def test_an_engine_that_is_stopped_is_silent_and_not_killed_if_it_goes_on_in_time(
    tmp_path: Path, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(tmp_path).model_copy(update={"recovery": RecoverySettings(lease_s=1.0)})
    client, engines = EngineDriver(store, TOY.name), Engines(store)
    await client.open_session()
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    async with supervised(settings, store):
        first = await ready(store)
        await client.result(await client.create_model())
        process = psutil.Process(first.pid)
        suspend_between_writes(process, tmp_path / "tinsmith.db")
        waiting = await client.submit(step)
        assert "its lease ran out" in (await until_it_is(engines, EngineState.SILENT)).detail
        assert "is silent: it gives no sign of life" in caplog.text
        process.resume()
        await until_it_is(engines, EngineState.READY)
        assert isinstance(await client.result(waiting), ops.OptimStepOutput)
        assert ((await ready(store)).pid, (await ready(store)).restarts) == (first.pid, 0)
        assert "is no longer silent: it is ready" in caplog.text


async def test_an_engine_of_no_configured_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no base model named 'x'; available: 'org/toy'"):
        await serve_engine(settings_for(tmp_path), "x", Plugins.load(), stopping=asyncio.Event())
