"""What keeps a server from starting is refused alike, and by name, by `serve`, `doctor` and `check-config`."""

import fcntl
import json
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tinsmith.commands import cli
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.before_start import look_at_store
from tinsmith.processes.data_dir_lock import DataDirLock
from tinsmith.settings import DataDir, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.migrate import schema_of_log
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing import TinyShape, write_tiny_model

KEYS = [{"key": "tml-ann", "tenant": "ann"}, {"key": "tml-bob", "tenant": "bob"}]
COMMANDS = ("serve", "check-config", "doctor")


def run(command: str, file: Path, patch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the whole command line in this process. Return its exit code and all that it printed."""
    patch.setattr(sys, "argv", ["tinsmith", command, "--config", str(file)])
    with pytest.raises(SystemExit) as exited:
        cli.app()
    return int(exited.value.code or 0), " ".join("".join(capfd.readouterr()).split())


def at(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Return a change to a configuration: a value at a path."""

    def change(config: dict[str, Any]) -> None:
        node: Any = config
        *before, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        for part in before:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        node[last] = value

    return change


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    with DataDirLock(DataDir.at(directory / "data")):
        yield


@contextmanager
def without_locks(_: Path) -> Iterator[None]:
    """With a stand-in for a file system that grants every lock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda *_: None)
        yield


@contextmanager
def without_a_compiler(directory: Path) -> Iterator[None]:
    before = os.environ.get("CXX")
    os.environ["CXX"] = str(directory / "absent")
    yield
    del os.environ["CXX"]
    os.environ.update({} if before is None else {"CXX": before})


@contextmanager
def with_files(directory: Path) -> Iterator[None]:
    (directory / "file").write_text("no database, and no directory")
    for name, revision in (("newer.db", "9999"), ("older.db", "0022")):
        connection = sqlite3.connect(directory / name)
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES (?)", [revision])
        connection.commit()
        connection.close()
    python = directory / "python"
    python.write_text("#!/bin/sh\necho no numpy here >&2\nexit 3\n")
    python.chmod(0o755)
    yield


@dataclass(frozen=True, slots=True)
class Bad:
    """A mistake: how it gets into a good configuration, and what names it. `{}` stands for the test's directory."""

    named: str
    changes: tuple[Callable[[dict[str, Any]], None], ...] = ()
    during: Callable[[Path], AbstractContextManager[None]] = field(default=lambda _: nullcontext())
    of_file: bool = True  # false: it may pass, so `check-config` says nothing about it


VLLM = {"plugin": "vllm"}
TOY = {"name": "tiny", "backend": {"plugin": "toy"}}
FSDP = at("models.0.backend", {"plugin": "fsdp", "device": "cpu", "compile": True})
BAD = {
    "a database of no known kind": Bad("store.url: 'oracle' is not supported", (at("store.url", "oracle://x/y"),)),
    "no URL": Bad("store.url is not a database URL", (at("store.url", "nowhere"),)),
    "a dead database": Bad(
        "postgresql+psycopg://ann@127.0.0.1:9/none",
        (at("store.url", "postgres://ann@127.0.0.1:9/none"),),
        of_file=False,
    ),
    "no database": Bad("file is not a database", (at("store.url", "sqlite:///{}/file"),), with_files, of_file=False),
    "a database of a newer tinsmith": Bad(
        "has the schema '9999' of a newer tinsmith", (at("store.url", "sqlite:///{}/newer.db"),), with_files
    ),
    "a database of before 0.1.0": Bad(
        "has the schema '0022' of a tinsmith before 0.1.0", (at("store.url", "sqlite:///{}/older.db"),), with_files
    ),
    "a shared SQLite database": Bad("several servers cannot share an SQLite", (at("server.share_data_dir", True),)),
    "a data directory in use": Bad("data' is in use by another server", (), in_use, of_file=False),
    "a data directory that is none": Bad(
        "cannot write to '{}/file'", (at("server.data_dir", "{}/file/x"),), with_files, of_file=False
    ),
    "a file system without locks": Bad("grants one lock twice", (), without_locks, of_file=False),
    "a port in use": Bad("is in use on 127.0.0.1", (at("server.port", "TAKEN"),), of_file=False),
    "a host of another machine": Bad("192.0.2.1", (at("server.host", "192.0.2.1"),), of_file=False),
    "one key for two tenants": Bad("server.api_keys", (at("server.api_keys.1.key", "tml-ann"),)),
    "quotas of nobody": Bad("quotas.tenants.eve: no key", (at("quotas.tenants", {"eve": {"sessions": 5}}),)),
    "quotas without keys": Bad(
        "quotas.tenants.ann: without", (at("server.api_keys", []), at("quotas.tenants", {"ann": {"sessions": 5}}))
    ),
    "fsdp without a sampler": Bad("models.0: the backend fsdp of 'tiny' only trains", (FSDP,)),
    "no compiler": Bad("no C++ compiler", (FSDP, at("models.0.sampler", {"plugin": "none"})), without_a_compiler),
    "no compiler for vllm": Bad(
        "no C++ compiler", (at("models.0.sampler", {**VLLM, "enforce_eager": False}),), without_a_compiler
    ),
    "a sampler without an interpreter": Bad(
        "python: '{}/absent' cannot be run: No such file", (at("models.0.sampler", {**VLLM, "python": "{}/absent"}),)
    ),
    "a sampler whose interpreter fails": Bad(
        "ended with 3: no numpy here", (at("models.0.sampler", {**VLLM, "python": "{}/python"}),), with_files
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyShape(num_layers=1), overwrite=True)
    return directory


@pytest.mark.parametrize("name", BAD)
def test_all_commands_refuse_the_same(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = BAD[name]
    config: dict[str, Any] = {
        "server": {"port": 0, "data_dir": str(tmp_path / "data"), "api_keys": [dict(key) for key in KEYS]},
        "store": {"plugin": "sql", "outage_s": 0.01},
        "models": [{"name": "tiny", "path": str(model), "backend": {"plugin": "jax"}}],
    }
    for change in bad.changes:
        change(config)
    monkeypatch.setattr("tinsmith.commands.doctor.command.check_model", lambda *_: ())  # loads frameworks
    monkeypatch.setattr("tinsmith.commands.doctor.command.check_sampler", lambda *_: ())
    with socket.create_server(("127.0.0.1", 0)) as taken, bad.during(tmp_path):
        text = json.dumps(config).replace('"TAKEN"', str(taken.getsockname()[1])).replace("{}/", f"{tmp_path}/")
        (tmp_path / "tinsmith.yaml").write_text(text)
        told = {command: run(command, tmp_path / "tinsmith.yaml", monkeypatch, capfd) for command in COMMANDS}
    if not bad.of_file:
        code, printed = told.pop("check-config")
        assert code == 0, printed
    for command, (code, printed) in told.items():
        assert bad.named.replace("{}", str(tmp_path)) in printed, f"{command}: {printed}"
        assert code != 0, f"{command} passes {name}"


def test_a_good_configuration_passes_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tinsmith.yaml"
    config = {"server": {"port": 0, "data_dir": str(tmp_path / "data")}, "models": [{"name": "toy"}]}
    config["models"][0]["backend"] = {"plugin": "toy"}  # type: ignore[index]
    file.write_text(json.dumps(config))
    for command in ("check-config", "doctor"):
        code, printed = run(command, file, monkeypatch, capfd)
        assert code == 0, printed
    assert "data/tinsmith.db will be made" in printed
    assert list(tmp_path.iterdir()) == [file]


async def test_the_store_says_its_version_its_schema_and_its_latency(tmp_path: Path) -> None:
    settings = Settings.model_validate({"server": {"data_dir": tmp_path}})
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    try:
        told = look_at_store(settings, Plugins.load()) or ""
    finally:
        await store.close()
    version, schema, latency = told.split(", ")
    assert version == f"SQLite {sqlite3.sqlite_version}"
    assert schema == f"schema {schema_of_log().revisions[-1]}"
    assert latency.startswith("answers in ")
