"""`tinsmith runs`: what people and scripts see."""

import fcntl
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from tinsmith import operations as ops
from tinsmith.commands import cli
from tinsmith.errors import TinsmithError
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import RunningServer, running_server

RUN = "s1:train:0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("runs") / "data") as server:
        for tenant in ("ann", "bob"):
            client = EngineDriver(server.store, "toy", tenant=tenant, session_id="s1" if tenant == "ann" else "s2")
            server.call(client.open_session())
            server.call(client.result(server.call(client.create_model())))
            server.call(train(client))
        with sqlite3.connect(server.settings.server.data_dir / "tinsmith.db") as database:
            database.execute("UPDATE operations SET attempts = 2 WHERE subject_id = ? AND seq_id = 2", (RUN,))
        database.close()
        yield server


async def train(client: EngineDriver) -> None:
    tokens = np.arange(5)
    inputs = {"target_tokens": tokens + 1, "weights": np.ones(5, np.float32)}
    datum = ops.Datum(tokens_T=tokens.astype(np.int32), loss_inputs=inputs)
    await client.run(ops.ForwardBackward(model_id=client.model_id(), data=(datum,)))
    await client.run(ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams()))
    await client.run(ops.SaveState(model_id=client.model_id(), path=client.path("x")))
    await client.run(ops.LoadState(model_id=client.model_id(), path=client.path("gone"), load_optimizer=False))


def runs(server: RunningServer | Path, *arguments: str) -> str:
    data_dir = server if isinstance(server, Path) else server.settings.server.data_dir
    return invoked(*arguments, "--data-dir", str(data_dir))


def invoked(*arguments: str) -> str:
    group = cli.build_group(Plugins.load())
    done = CliRunner().invoke(group, ["runs", *arguments], obj=Plugins.load(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_runs_are_listed(server: RunningServer) -> None:
    shown = runs(server, "list")
    newest, oldest = [line for line in shown.splitlines() if ":train:" in line]
    assert newest.split()[:6] == ["s2:train:0", "toy", "bob", "ready", "4", "1"]
    assert oldest.startswith("s1:train:0")
    assert "s2:train:0" not in runs(server, "list", "--tenant", "ann")
    assert "no runs of tenant 'eve'" in runs(server, "list", "--tenant", "eve")
    assert "1 to 1 of 2; for more, pass --offset 1" in runs(server, "list", "--limit", "1")
    assert "--offset 7 is past the last" in runs(server, "list", "--offset", "7")
    listed = json.loads(runs(server, "list", "--json", "--limit", "1"))
    assert (listed["cursor"]["total_count"], [run["run_id"] for run in listed["runs"]]) == (2, ["s2:train:0"])
    key = {"x-api-key": "tml-nobody"}
    assert httpx.get(f"{server.url}/api/v1/runs?limit=1", headers=key).json()["runs"] == []
    read_by_page = httpx.get(f"{server.url}/api/v1/runs?limit=1").json()
    for found in (listed, read_by_page):
        waits = found["runs"][0]["waits_for"]
        assert waits.pop("since_s") >= 0
        assert waits.pop("text").startswith("nothing is pending, so it is the client's turn")
        assert waits == {"kind": "client"}
    assert read_by_page == listed, "the page reads the same"


@pytest.mark.parametrize(
    "command",
    [
        ("list", "--json"),
        ("show", RUN, "--json"),
        ("show", "last", "--json", "--limit", "2"),
        ("show", RUN, "--from", "1"),
    ],
)
def test_a_server_says_what_its_data_directory_holds(server: RunningServer, command: tuple[str, ...]) -> None:
    """From any machine, to an administrator: on a server without keys, the page and commands read every run."""
    asked, read = invoked(*command, "--url", server.url, "--key", ""), runs(server, *command)
    assert timeless(asked) == timeless(read)
    assert "it is the client's turn" in asked


def timeless(told: str) -> str:
    """Leave out for how long a run has waited, which differs between two looks."""
    told = told.replace("; no heartbeat has come from it for more than 30 s", "")
    return re.sub(r"""(?<="since_s": )[\d.]+|(?<=client's turn )\([\d.]+ m?s\)""", "", told)


def test_a_server_names_nothing_of_others(server: RunningServer) -> None:
    own = ("--url", server.url, "--key", "tml-nobody")
    assert json.loads(invoked("list", "--json", *own))["runs"] == []
    with pytest.raises(TinsmithError, match="no run 's1:train:0': there are none yet"):
        invoked("show", RUN, *own)
    with pytest.raises(TinsmithError, match="--tenant is for a data directory"):
        invoked("list", "--tenant", "ann", *own)
    with pytest.raises(TinsmithError, match="sends at most 200 operations at a time"):
        invoked("show", RUN, "--limit", "201", *own)
    key = {"x-api-key": "tml-nobody"}
    assert httpx.get(f"{server.url}/api/v1/runs/{RUN}/log", headers=key).status_code == 404


def test_what_is_typed_precedes_the_environment(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rule for all of `runs`: --url, then a directory or settings, then TINKER_BASE_URL, then the directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    for command in (("list",), ("show", RUN)):
        assert "s1:train:0" in invoked(*command, "--key", ""), "the server"
    with pytest.raises(TinsmithError, match=r"contains no tinsmith\.db"):
        invoked("list", "--data-dir", str(tmp_path))
    with pytest.raises(TinsmithError, match=r"contains no tinsmith\.db"):
        invoked("list", "--server.data_dir", str(tmp_path))
    with pytest.raises(TinsmithError, match="--url asks a server, and --data-dir"):
        invoked("list", "--url", server.url, "--data-dir", str(tmp_path))
    monkeypatch.setenv("TINKER_API_KEY", "tml-nobody")
    assert json.loads(invoked("list", "--json"))["runs"] == []
    monkeypatch.setenv("TINKER_BASE_URL", "")
    with pytest.raises(TinsmithError, match=r"contains no tinsmith\.db"):
        invoked("list")


def test_a_run_is_shown(server: RunningServer) -> None:
    shown = runs(server, "show", RUN)
    for line in (
        "run              s1:train:0",
        "base model       toy, LoRA of rank 4, seed 0",
        "tenant           ann, session s1",
        "state            ready",
        "applied          up to seq_id 4",
        "checkpoint       tinker://s1:train:0/weights/x (",
        "replay           possible for --until 0 to 4",
        "seq_id 0 to 4; the log has 5 operations",
        "optim_step         succeeded (attempt 2)",
    ):
        assert line in shown, line
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()[:1].isdigit()}
    assert "loss:sum" in lines["1"]
    assert "grad_norm" in lines["2"]
    assert "no checkpoint 'tinker" in lines["4"] or "no checkpoint" in lines["4"]
    (total,) = [line.split() for line in shown.splitlines() if line.startswith("all ")]
    assert total[1:4] == ["5", "1", "5"], "operations, retried, tokens"


def test_a_run_is_named_by_how_it_begins(server: RunningServer) -> None:
    assert "run              s1:train:0" in runs(server, "show", "s1")
    assert "run              s2:train:0" in runs(server, "show", "last")
    with pytest.raises(TinsmithError, match="2 runs begin with 's', such as 's2:train:0', 's1:train:0'; type more"):
        runs(server, "show", "s")


def test_a_narrow_terminal_shows_ids_whole(server: RunningServer) -> None:
    """They are what people copy."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    long, data_dir = f"{'6b39c7bd' * 4}:train:0", server.settings.server.data_dir
    _rename(data_dir, "s2:train:0", long)
    command = [sys.executable, "-m", "tinsmith", "runs", "list", "--data-dir", str(data_dir)]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    try:
        subprocess.run(command, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, check=True, timeout=120)
    finally:
        _rename(data_dir, long, "s2:train:0")
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert [line for line in lines if ":train:" in line] == [long, "s1:train:0"]
    assert max(map(len, lines)) <= 60


def _rename(data_dir: Path, run: str, new: str) -> None:
    with sqlite3.connect(data_dir / "tinsmith.db") as database:
        database.execute("UPDATE runs SET model_id = ? WHERE model_id = ?", (new, run))
    database.close()


def test_a_page_of_a_run(server: RunningServer) -> None:
    shown = runs(server, "show", RUN, "--from", "1", "--limit", "2")
    assert "the log has 5 operations; for earlier ones, pass --from 0; for later ones, pass --from 3" in shown
    assert "seq_id 3 to 4; the log has 5 operations; for earlier ones, pass --from 1" in runs(
        server, "show", RUN, "--limit", "2"
    )
    assert "no operations from there on" in runs(server, "show", RUN, "--from", "99")


def test_a_run_for_scripts(server: RunningServer) -> None:
    found: dict[str, Any] = json.loads(runs(server, "show", RUN, "--json"))
    assert [each["kind"] for each in found["operations"]] == [
        "create_model",
        "forward_backward",
        "optim_step",
        "save_state",
        "load_state",
    ]
    passed, failed = found["operations"][1], found["operations"][4]
    assert passed["metrics"]["loss:sum"] > 0
    assert passed["num_tokens"] == 5
    assert passed["queued_s"] >= 0 <= passed["run_s"]
    assert failed["error"].startswith("user: no checkpoint")
    assert found["run"]["state"] == "ready"
    assert found["oldest_replayable"] == 0


def test_mistakes_are_explained(server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(
        TinsmithError, match=r"no run 'nope': the newest are 's2:train:0', 's1:train:0'; `tinsmith runs"
    ):
        runs(server, "show", "nope")
    with pytest.raises(TinsmithError, match=r"contains no tinsmith.db.*--data-dir"):
        runs(tmp_path, "list")
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_runs(tmp_path: Path) -> None:
    with running_server(tmp_path, engines=False):
        assert "a run begins when a client creates a training client" in runs(tmp_path, "list")
        with pytest.raises(TinsmithError, match="there are none yet"):
            runs(tmp_path, "show", "nope")


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("show", RUN), ("show", RUN, "--json")])
def test_a_terminal_obeys_no_tenant(server: RunningServer, arguments: tuple[str, ...]) -> None:
    with sqlite3.connect(server.settings.server.data_dir / "tinsmith.db") as database:
        (tenant,) = database.execute("SELECT tenant FROM runs WHERE model_id = ?", (RUN,)).fetchone()
        database.execute("UPDATE runs SET tenant = ? WHERE model_id = ?", ("\x1b]0;x\x07\x9b31m\u202e", RUN))
    try:
        assert all(line.isprintable() for line in runs(server, *arguments).split("\n"))
    finally:
        with database:
            database.execute("UPDATE runs SET tenant = ? WHERE model_id = ?", (tenant, RUN))
        database.close()
