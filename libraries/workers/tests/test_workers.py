"""The workers: launchers against their contract, and who may join."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from tinsmith import ConfigError, Figures
from tinsmith.host_usage import interfaces
from tinsmith.testing.ports import hold_port
from tinsmith_workers import Launch, MakeLauncher, WorkerDiedError, WorkerGroup, WorkersConfig
from tinsmith_workers.channel import Channel
from tinsmith_workers.code import code_of
from tinsmith_workers.command import run_host, worker
from tinsmith_workers.front_door import FrontDoor, Joined
from tinsmith_workers.group import by_rank
from tinsmith_workers.launching import KEY, LocalProcesses, Scheduler
from tinsmith_workers.messages import Hello, Refused
from tinsmith_workers.serving import connect, serve
from tinsmith_workers.testing import Nursery, WorkersContract
from tinsmith_workers.testing.contract import (
    PROGRAM,
    Group,
    OfAMissingPackage,
    Program,
    all_end,
    no_progress,
    wait_until_ended,
)

SECRET = "a secret of the test, long enough"
HELLO = Hello(version="0.0.1", host="here", pid=1, meeting=("127.0.0.1", 1), index=None, num_workers=None, code={})
WAIT_S = 300.0


class TestForkedWorkers(WorkersContract):
    @pytest.fixture(scope="class")
    @classmethod
    def launch_with(cls) -> Iterator[MakeLauncher]:  # type: ignore[override]
        nursery = Nursery("tinsmith_workers.testing.program")
        yield nursery.launch
        nursery.close()


def test_local_processes(capfd: pytest.CaptureFixture[str]) -> None:
    group = WorkerGroup(PROGRAM, WorkersConfig(nproc_per_node=2), no_progress)
    assert [place["rank"] for place in group.call(Program.place)] == [0, 1]
    all_end(group)

    def with_a_wrong_key(launch: Launch) -> LocalProcesses:
        return LocalProcesses(replace(launch, environment={**launch.environment, KEY: "wrong"}))

    with pytest.raises(WorkerDiedError, match=r"worker 0 left with 1; see their output"):
        WorkerGroup(PROGRAM, WorkersConfig(nproc_per_node=1), no_progress, launch_with=with_a_wrong_key)
    assert "has another TINSMITH_WORKER_KEY" in capfd.readouterr().err


def test_the_engine_learns_what_workers_and_their_host_use() -> None:
    """With an answer, now and then: nothing is sent to an engine that asks for nothing."""
    figures = Figures()
    group = WorkerGroup(PROGRAM, WorkersConfig(nproc_per_node=2), no_progress, figures=figures)
    while sum(each.processes for each in figures.workers()) < 2:
        group.call(Program.place)
    now = datetime.now(UTC)
    assert figures.calls_between(now - timedelta(hours=1), now) == (), "nobody asked for them"
    figures.keep_calls()
    group.call(Program.place)
    (call,) = figures.calls_between(now, datetime.now(UTC))
    assert (call.method, [worker.rank for worker in call.workers]) == ("place", [0, 1])
    assert all(worker.took_s > 0 for worker in call.workers)
    [host] = figures.workers()
    assert host.host == socket.gethostname()
    assert host.resident_bytes > 2 * 10_000_000
    assert host.cpu_s > 0
    assert [each.name for each in host.interfaces] == [each.name for each in interfaces()]
    all_end(group)
    assert figures.workers() == ()


OURS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({}, OURS),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_ALLOC_CONF": "x:1"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
    ],
)
def test_workers_have_expandable_segments_unless_the_operator_says_how_to_allocate(
    theirs: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By either name of the setting, and in no process but theirs."""
    started: list[dict[str, str]] = []

    class Started(Exception):  # noqa: N818
        pass

    def tethered(command: Sequence[str], *, env: dict[str, str]) -> None:
        del command
        started.append(env)
        raise Started

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    for module in ("launching", "command"):
        monkeypatch.setattr(f"tinsmith_workers.{module}.Tethered", tethered)
    launch = Launch(config=WorkersConfig(), environment={}, directory=tmp_path, gpus=None, default_per_node=1)
    with pytest.raises(Started):
        LocalProcesses(launch)
    with pytest.raises(Started):
        run_host("here:1", processes=1, index=None, wait_s=0, again=False)
    for environment in started:
        assert {name: value for name, value in environment.items() if "ALLOC_CONF" in name} == expected
    assert len(started) == 2
    assert {name for name in os.environ if "ALLOC_CONF" in name} == theirs.keys()


@pytest.mark.parametrize("call", ["Program.hang, -1", "Program.hold_the_interpreter"])
def test_workers_end_with_a_killed_engine(call: str) -> None:
    """They are in the middle of a call, perhaps in native code, and nothing but a closed connection tells them."""
    code = f"""
        from tinsmith_workers.testing.contract import Program, no_progress
        from tinsmith_workers import WorkerGroup, WorkersConfig
        group = WorkerGroup({PROGRAM!r}, WorkersConfig(nproc_per_node=1), no_progress)
        print(*group.pids, flush=True)
        group.call({call})
    """
    with subprocess.Popen([sys.executable, "-c", dedent(code)], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = [int(word) for word in engine.stdout.readline().split()]
        assert len(pids) == 1
        engine.kill()
    wait_until_ended(pids)


# workers that something else has started


@contextmanager
def scheduled(monkeypatch: pytest.MonkeyPatch, nnodes: int = 2, **settings: Any) -> Iterator["Engine"]:
    """An engine, in a thread, that waits for workers."""
    monkeypatch.setenv(KEY, SECRET)
    engine = Engine(WorkersConfig(launcher="scheduler", nnodes=nnodes, control_address="127.0.0.1:0", **settings))
    try:
        yield engine
    finally:
        engine.thread.join(WAIT_S)
        if engine.group is not None:
            engine.group.close()


class Engine:
    def __init__(self, config: WorkersConfig) -> None:
        self.group: Group | None = None
        self.error: Exception | None = None
        self._address: str = ""
        self._listens = threading.Event()
        self.thread = threading.Thread(target=self._start, args=(config,))
        self.thread.start()

    def _start(self, config: WorkersConfig) -> None:
        def launch_with(launch: Any) -> Scheduler:
            self._address = launch.environment["TINSMITH_COORDINATOR"]
            self._listens.set()
            return Scheduler(launch)

        try:
            self.group = WorkerGroup(PROGRAM, config, no_progress, launch_with=launch_with)
        except Exception as error:  # noqa: BLE001 - for the test to see
            self.error = error

    @property
    def address(self) -> str:
        assert self._listens.wait(WAIT_S)
        return self._address

    def started(self) -> Group:
        self.thread.join(WAIT_S)
        assert self.group is not None, self.error
        return self.group


@contextmanager
def host(address: str, *options: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tinsmith", "worker", "--coordinator", address, *options]
    with subprocess.Popen(command, env={**os.environ, KEY: SECRET}, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_tinsmith_worker_joins_from_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        scheduled(monkeypatch, nnodes=1, nproc_per_node=1) as engine,
        host(engine.address, "--index", "0") as machine,
    ):
        group = engine.started()
        array = np.arange(1 << 18, dtype=np.float64)
        ((received,),) = group.call(Program.echo, array)
        np.testing.assert_array_equal(received, array)
        group.close()
        assert machine.wait(WAIT_S) == 0


def test_a_host_whose_worker_dies_ends_the_others_and_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--again`, the next group finds it."""
    monkeypatch.setenv(KEY, SECRET)
    with hold_port() as held, host(address := f"127.0.0.1:{held.getsockname()[1]}", "--processes", "2", "--again"):
        config = WorkersConfig(launcher="scheduler", nproc_per_node=2, control_address=address)
        group = WorkerGroup(PROGRAM, config, no_progress)
        pids = group.pids
        os.kill(pids[0], 9)
        with pytest.raises(WorkerDiedError):
            group.call(Program.hang, 0)
        all_end(group)
        again = WorkerGroup(PROGRAM, config, no_progress)
        assert not set(again.pids) & set(pids)
        again.close()


def test_without_a_key_nobody_elsewhere_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match="TINSMITH_WORKER_KEY is not set"):
        WorkerGroup(PROGRAM, WorkersConfig(launcher="scheduler", control_address="127.0.0.1:0"), no_progress)
    command = [sys.executable, "-m", "tinsmith", "worker", "--coordinator", "127.0.0.1:1"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "TINSMITH_WORKER_KEY is not set" in refused.stderr


@pytest.mark.parametrize("address", ["nonsense", "host:port", "host:"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    with pytest.raises(ConfigError, match=f"--coordinator '{address}' is not HOST:PORT"):
        worker(address)


def test_who_does_not_come_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduled(monkeypatch, nnodes=2, start_timeout_s=0.5) as engine:
        engine.thread.join(WAIT_S)
        assert isinstance(engine.error, WorkerDiedError)
        assert "0 of 2 workers joined" in str(engine.error)


# the door


@pytest.fixture
def door(tmp_path: Path) -> Iterator[FrontDoor]:
    """Its path is longer than the address of a socket."""
    long = tmp_path / ("d" * 150)
    long.mkdir()
    door = FrontDoor(None, long / "control", SECRET.encode(), code_of("tinsmith"))
    yield door
    door.close()


Knock = Callable[..., Channel]


@pytest.fixture
def knock(door: FrontDoor) -> Iterator[Knock]:
    """Connects as a worker does."""
    channels: list[Channel] = []

    def knock(hello: object, key: str = SECRET) -> Channel:
        channels.append(Channel(connect(door.address, 0.0)))
        channels[-1].prove(key.encode(), "worker")
        channels[-1].send(hello)
        return channels[-1]

    yield knock
    for channel in channels:
        channel.close()


def newest(**changes: Any) -> Hello:
    from importlib.metadata import version

    return replace(HELLO, version=version("tinsmith"), **{"code": code_of("tinsmith"), **changes})


def wait_for(door: FrontDoor, enough: Callable[[Sequence[Joined]], bool]) -> Sequence[Joined]:
    return next(joined for joined, _ in door.joining(None) if enough(joined))


def test_strangers_do_not_keep_workers_from_joining(door: FrontDoor, knock: Knock) -> None:
    with connect(door.address, 0.0) as silent, connect(door.address, 0.0) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with pytest.raises(AuthenticationError):
            knock(newest(), key="another")
        connect(door.address, 0.0).close()
        knock(newest(host="welcome"))
        assert [each.host for each in wait_for(door, bool)] == ["welcome"]
        assert silent.fileno() > 0, "and it is still there"


def test_another_version_is_refused_by_name_and_keeps_nobody_else_out(door: FrontDoor, knock: Knock) -> None:
    refused = knock(HELLO).receive()
    assert isinstance(refused, Refused)
    assert "the worker on here has tinsmith 0.0.1" in refused.message
    knock(newest(host="welcome"))
    assert [each.host for each in wait_for(door, bool)] == ["welcome"]
    assert door.refusals == [refused.message]


@pytest.mark.parametrize(("code", "theirs"), [({}, "none"), ({"tinsmith": "0123456789abcdef"}, r"0123456789ab\.\.\.")])
def test_other_code_of_the_same_version_is_refused(
    door: FrontDoor, knock: Knock, code: dict[str, str], theirs: str
) -> None:
    refused = knock(newest(code=code)).receive()
    assert isinstance(refused, Refused)
    problem = rf"the worker on here has other code of the package tinsmith than this machine \(digests {theirs} and "
    assert re.match(problem, refused.message)


@pytest.mark.parametrize(("theirs", "joins"), [(None, True), ("another", False)])
def test_a_program_may_be_in_a_package_without_plugins(tmp_path: Path, theirs: str | None, *, joins: bool) -> None:
    """Of such a package workers tell no digest."""
    door = FrontDoor(None, tmp_path / "control", SECRET.encode(), {**code_of("tinsmith"), "programs": "own"})
    channel = Channel(connect(door.address, 0.0))
    try:
        channel.prove(SECRET.encode(), "worker")
        channel.send(newest(code={**code_of("tinsmith"), **({"programs": theirs} if theirs else {})}))
        if joins:
            assert len(wait_for(door, bool)) == 1
        else:
            assert isinstance(channel.receive(), Refused)
    finally:
        channel.close()
        door.close()


def test_code_is_told_apart_by_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = set()
    for name, text in (("one", "x = 1"), ("two", "x = 2"), ("same", "x = 1")):
        (tmp_path / f"package_{name}").mkdir()
        (tmp_path / f"package_{name}" / "__init__.py").write_text(text)
        digests |= set(code_of(f"package_{name}").values())
    assert len(digests) == 2
    assert code_of("no_such_package") == {}


def test_an_editors_lock_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a link that leads nowhere, named like the file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("edited", "closed"):
        (tmp_path / f"package_{name}").mkdir()
        (tmp_path / f"package_{name}" / "__init__.py").write_text("x = 4")
    (tmp_path / "package_edited" / ".#__init__.py").symlink_to("me@machine.123:456")
    [digest] = set(code_of("package_edited", "package_closed").values())
    assert digest


@pytest.mark.parametrize(
    ("key", "problem"),
    [("x", "has 1 characters, and must have at least 32"), ("ab" * 32, "has 2 different characters")],
)
def test_a_key_that_can_be_guessed_is_refused(key: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine and by its workers, with the remedy."""
    monkeypatch.setenv(KEY, key)
    problem += ".*openssl rand -hex 32"
    with pytest.raises(ConfigError, match=problem):
        WorkerGroup(PROGRAM, WorkersConfig(launcher="scheduler", control_address="127.0.0.1:0"), no_progress)
    with pytest.raises(ConfigError, match=problem):
        worker("127.0.0.1:1")


def test_a_first_message_that_cannot_be_read_keeps_nobody_else_out(
    door: FrontDoor, knock: Knock, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version may send what this one does not know."""
    with pytest.raises(EOFError):
        knock(OfAMissingPackage()).receive()
    assert "install the same version of tinsmith there" in caplog.text
    knock(newest(host="welcome"))
    assert [each.host for each in wait_for(door, bool)] == ["welcome"]


def test_the_newest_of_two_with_one_index_counts(door: FrontDoor, knock: Knock) -> None:
    """The host of the first may have lost power, which nobody notices for a while."""
    knock(newest(index=0, pid=1))
    assert [each.pid for each in wait_for(door, bool)] == [1]
    knock(newest(index=0, pid=2))
    assert [each.pid for each in wait_for(door, lambda those: [each.pid for each in those] == [2])] == [2]


def test_nobody_passes_for_an_engine_with_what_another_worker_answers() -> None:
    """A stranger without the key passes the challenges of two workers back and forth."""
    ends = [socket.socketpair() for _ in range(2)]
    outcomes: list[type[BaseException] | None] = [None, None]

    def join(number: int) -> None:
        with ends[number][0] as own:
            try:
                Channel(own).prove(SECRET.encode(), "worker")
            except (AuthenticationError, EOFError, OSError) as error:
                outcomes[number] = type(error)

    workers = [threading.Thread(target=join, args=(number,)) for number in range(2)]
    for joining in workers:
        joining.start()
    with (
        Connection(ends[0][1].detach()) as first,
        Connection(ends[1][1].detach()) as second,
        suppress(EOFError, OSError),
    ):
        first.send_bytes(b"#CHALLENGE#" + bytes(20))
        first.recv_bytes()
        first.send_bytes(b"#WELCOME#")
        second.send_bytes(first.recv_bytes())
        first.send_bytes(second.recv_bytes())
        assert first.recv_bytes() != b"#WELCOME#"
    for joining in workers:
        joining.join()
    assert outcomes[0] is not None


def test_a_worker_that_dies_before_all_have_come_may_come_again(door: FrontDoor, knock: Knock) -> None:
    dying = knock(newest(index=0, pid=1))
    assert [each.pid for each in wait_for(door, bool)] == [1]
    joining = door.joining(None)
    dying.close()
    knock(newest(index=0, pid=2))
    assert [each.pid for each in next(joined for joined, _ in joining if [each.pid for each in joined] == [2])] == [2]


def test_who_comes_late_is_turned_away(door: FrontDoor) -> None:
    door.close()
    with pytest.raises(OSError, match=r"refused|No such file"):
        serve(door.address, SECRET.encode())


@pytest.mark.parametrize(
    ("indexes", "expected"),
    [([None, None, None, None], [0, 2, 1, 3]), ([3, 1, 0, 2], [2, 1, 3, 0])],
)
def test_ranks_follow_indexes_or_else_hosts(indexes: list[int | None], expected: list[int]) -> None:
    hosts = ["a", "b", "a", "b"]
    ones = [
        Joined(None, newest(index=index, host=host, pid=pid))  # type: ignore[arg-type]  # not used
        for pid, (index, host) in enumerate(zip(indexes, hosts, strict=True))
    ]
    assert [one.pid for one in by_rank(ones)] == expected


@pytest.mark.parametrize("indexes", [[0, 0], [0, None], [0, 2]])
def test_indexes_must_be_complete(indexes: list[int | None]) -> None:
    ones = [Joined(None, newest(index=index, host=f"h{n}")) for n, index in enumerate(indexes)]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be 0 to 1, each once; found: 0 on h0, (0|None|2) on h1"):
        by_rank(ones)


# settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"nnodes": 2}, "starts workers on this machine alone"),
        ({"nnodes": 2, "launcher": "ray"}, "set control_address"),
        ({"launcher": "scheduler"}, "set control_address"),
        ({"launcher": "torchrun"}, "choose local for one machine; for several, choose scheduler"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkersConfig.model_validate(settings)


def test_an_address_where_nobody_can_listen_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    with pytest.raises(ConfigError, match=r"control_address '192\.0\.2\.1:0': this machine cannot listen there"):
        WorkerGroup(PROGRAM, WorkersConfig(launcher="scheduler", control_address="192.0.2.1:0"), no_progress)
