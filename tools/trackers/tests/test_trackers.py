"""Curves of real runs, copied by the real command to the real packages, and read back with these."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from typer.testing import CliRunner

import tinsmith_trackers
from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum
from tinsmith_trackers import Destination, Run, RunLog, Tracker, TrackerError
from tinsmith_trackers.copying import MOST_OPEN, SETTLED_S, Copying
from tinsmith_trackers.positions import TAIL, Positions
from tinsmith_trackers.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves connections open

WAIT_S = 300
Point = tuple[int, str, float]
ENVIRONMENT = Path(sys.executable).parents[1] / "trackers"
READERS = {
    "mlflow": """
import json, mlflow
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("ours")
(run,) = client.search_runs([experiment.experiment_id])
history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
print(json.dumps([[each.step, name, each.value] for name, points in history.items() for each in points]))
""",
    "wandb": """
import json, pathlib, struct
from wandb.proto import wandb_internal_pb2
points = []
for file in pathlib.Path().rglob("*.wandb"):  # LevelDB's log: in blocks of 32 KiB, after a header of 7 bytes
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a record, or the last part of one
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [[row["step"], name, value] for name, value in row.items()
                       if not name.startswith("_") and name not in ("step", "wall_time")]
print(json.dumps(points))
""",
    "trackio": """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("ours")
rows = SQLiteStorage.get_logs("ours", run)
print(json.dumps([[row["step"], name, value] for row in rows for name, value in row.items()
                  if name not in ("step", "timestamp", "wall_time")]))
""",
}
"""Programs that print what a tracker holds, as `[step, name, value]`."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("tracked")) as server:
        yield server


class Trained:
    """A tenant's run, and its curves as the server has them."""

    def __init__(self, server: RunningServer, key: str, client: tinker.ServiceClient) -> None:
        self.url, self.key, self.client = server.url, key, client
        self.training = self.client.create_lora_training_client(
            base_model="toy", rank=4, user_metadata={"who": "ann"}
        ).result(WAIT_S)
        self.run_id = self.training.get_info().model_id
        self.log = tinsmith_trackers.track(self.training).log

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.training.forward_backward([datum([1, 2, 3, 4])], "cross_entropy").result(WAIT_S)
            self.training.optim_step(tinker.AdamParams(learning_rate=0.1)).result(WAIT_S)

    def points(self) -> set[Point]:
        path = f"{self.url}/api/v1/runs/{self.run_id}/metrics"
        series = httpx.get(path, headers={"x-api-key": self.key}).raise_for_status().json()["series"]
        return {
            (step, each["name"], value)
            for each in series
            for step, value in zip(each["steps"], each["values"], strict=True)
            if value is not None
        }


@pytest.fixture
def trained(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Trained]:
    key = f"tml-{request.node.name}"
    with tinker.ServiceClient(base_url=server.url, api_key=key) as client:
        yield Trained(server, key, client)


class ListTracker(Tracker):
    """Keeps all in lists."""

    def __init__(self) -> None:
        super().__init__(Destination(project="ours"))
        self.points: dict[str, list[Point]] = {}
        self.runs: list[Run] = []
        self.open_now: set[str] = set()
        self.ended: list[str] = []

    def open(self, run: Run) -> RunLog:
        self.runs.append(run)
        self.open_now.add(run.run_id)
        return ListLog(self, run.run_id)


class ListLog(RunLog):
    def __init__(self, tracker: ListTracker, run_id: str) -> None:
        self._tracker = tracker
        self._run_id = run_id
        self._points: list[Point] = []

    def log(self, step: int, time_s: float, values: dict[str, float]) -> None:  # type: ignore[override]
        assert time_s > 0
        self._points += [(step, name, value) for name, value in values.items()]

    def flush(self) -> None:
        self._tracker.points.setdefault(self._run_id, []).extend(self._points)
        self._points = []

    def close(self, *, ended: bool) -> None:
        self.flush()
        self._tracker.open_now.remove(self._run_id)
        if ended:
            self._tracker.ended.append(self._run_id)


class Copies:
    """Copies the runs of a key to lists, with a clock that the test moves."""

    def __init__(self, trained: Trained, positions: Path) -> None:
        self.now = 0.0
        self.tracker = ListTracker()
        self._trained = trained
        self.copying = Copying(
            Server(trained.url, trained.key), self.tracker, Positions(positions), now=lambda: self.now
        )

    def points(self) -> set[Point]:
        """Return what was copied of the run, each value once."""
        points = self.tracker.points.get(self._trained.run_id, [])
        assert len(points) == len(set(points))
        return set(points)


def steps_of(points: set[Point]) -> set[int]:
    return {step for step, _, _ in points}


def test_a_step_is_copied_once_it_is_over(trained: Trained, tmp_path: Path) -> None:
    copies = Copies(trained, tmp_path / "copied.json")
    trained.train(2)
    copies.copying.round()
    assert steps_of(copies.points()) == {0}
    copies.now += SETTLED_S - 1
    copies.copying.round()
    trained.log(1, reward=0.5)  # it is not quiet
    copies.now += SETTLED_S - 1
    copies.copying.round()
    assert steps_of(copies.points()) == {0}
    copies.now += SETTLED_S
    copies.copying.round()
    assert copies.points() == trained.points()
    (run,) = copies.tracker.runs
    assert (run.about["who"], run.about["base_model"]) == ("ann", "toy")


def test_late_names_arrive_and_other_processes_go_on(trained: Trained, tmp_path: Path) -> None:
    trained.train(3)
    first = Copies(trained, tmp_path / "copied.json")
    first.copying.round(last=True)
    first.copying.close()
    assert first.points() == trained.points()
    assert not first.tracker.open_now
    trained.log(1, reward=0.25, broken=float("nan"))
    trained.train(1)
    second = Copies(trained, tmp_path / "copied.json")
    second.copying.round(last=True)
    assert second.points() == trained.points() - first.points()
    assert (1, "reward", 0.25) in second.points()
    assert second.copying.round(last=True) == 0


def test_an_ended_run_is_whole_and_said_to_have_ended(trained: Trained, tmp_path: Path) -> None:
    copies = Copies(trained, tmp_path / "copied.json")
    trained.train(1)
    trained.client.close("success").result(WAIT_S)
    copies.copying.round()
    assert copies.points() == trained.points()
    assert copies.tracker.ended == [trained.run_id]


def test_long_curves_are_copied_whole(trained: Trained, tmp_path: Path) -> None:
    """More steps than one answer holds, with gaps, in a run without optimizer steps."""
    steps = [step * 3 for step in range(12_001)]
    for at in range(0, len(steps), 1000):
        body = {"points": [{"step": step, "values": {"reward": float(step)}} for step in steps[at : at + 1000]]}
        path = f"{trained.url}/api/v1/runs/{trained.run_id}/metrics"
        httpx.post(path, json=body, headers={"x-api-key": trained.key}, timeout=WAIT_S).raise_for_status()
    copies = Copies(trained, tmp_path / "copied.json")
    copies.copying.round()
    assert copies.points() == {(step, "reward", float(step)) for step in steps[:-1]}
    copies.copying.round(last=True)
    assert steps_of(copies.points()) == set(steps)
    held = json.loads((tmp_path / "copied.json").read_text())[trained.run_id]
    assert len(held) == TAIL


def test_only_so_many_runs_are_open(server: RunningServer, trained: Trained, tmp_path: Path) -> None:
    copies = Copies(trained, tmp_path / "copied.json")
    runs = [Trained(server, trained.key, trained.client) for _ in range(MOST_OPEN + 1)]
    for run in runs:
        run.log(0, reward=1.0)
    copies.copying.round(last=True)
    assert len(copies.tracker.open_now) == MOST_OPEN
    runs[0].log(1, reward=2.0)
    copies.copying.round(last=True)
    assert len(copies.tracker.open_now) == MOST_OPEN
    assert copies.tracker.points[runs[0].run_id] == [(0, "reward", 1.0), (1, "reward", 2.0)]


def command(trained: Trained, *arguments: str) -> Any:
    line = ["trackers", *arguments, "--url", trained.url, "--key", trained.key]
    return CliRunner().invoke(build_group(Plugins.load()), line)


def test_tensorboard_shows_what_the_server_has(trained: Trained, tmp_path: Path) -> None:
    trained.train(3)
    trained.log(1, reward=0.5)
    options = ["--dir", str(tmp_path / "runs"), "--project", "ours", "--state", str(tmp_path / "state.json"), "--once"]
    for _ in range(2):  # the second copies nothing again
        result = command(trained, "tensorboard", *options)
        assert result.exit_code == 0, result.output
    single = sorted((step, name.replace(":", "_"), float(np.float32(value))) for step, name, value in trained.points())
    assert sorted(event_file_points(tmp_path / "runs" / "ours")) == single


def event_file_points(directory: Path) -> list[Point]:
    from tensorboardX.proto.event_pb2 import Event

    points: list[Point] = []
    for file in directory.rglob("events.out.*"):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            values = [each for each in event.summary.value if each.HasField("simple_value")]
            points += [(event.step, each.tag, each.simple_value) for each in values]
            data = data[16 + length :]
    return points


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "there is no tracker 'nowhere'; installed: mlflow, tensorboard, trackio, wandb"),
        (["mlflow"], "the tracker 'mlflow' needs mlflow: pip install 'tinsmith-trackers[mlflow]'"),
        (["tensorboard"], "TensorBoard needs --dir"),
        (["tensorboard", "--dir", "{tmp}", "--run", "none"], "begins with 'none'; there are 1 runs"),
        (["tensorboard", "--dir", "{tmp}", "--url", "http://127.0.0.1:9"], "does not answer"),
        (["tensorboard", "--dir", "{tmp}", "--url", "127.0.0.1"], "is no URL of a server"),
        (["tensorboard", "--dir", "{tmp}", "--state", "{broken}"], "delete it to copy all again"),
    ],
)
def test_mistakes_are_named(trained: Trained, tmp_path: Path, arguments: list[str], told: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("[1]")
    filled = [each.format(tmp=tmp_path, broken=broken) for each in arguments]
    state = [] if "--state" in filled else ["--state", str(tmp_path / "state.json")]
    url = [] if "--url" in filled else ["--url", trained.url]
    line = ["trackers", *filled, *url, *state, "--key", trained.key, "--once"]
    result = CliRunner().invoke(build_group(Plugins.load()), line)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    keys = [{"key": "tml-right", "tenant": "ann"}]
    with running_server(tmp_path / "server", server={"api_keys": keys}) as server:
        copying = Copying(Server(server.url, "tml-wrong"), ListTracker(), Positions(tmp_path / "state.json"))
        with pytest.raises(TrackerError, match="does not know this key"):
            copying.round()


@pytest.mark.thorough
@pytest.mark.parametrize("tracker", sorted(READERS))
def test_the_real_packages_show_what_the_server_has(trained: Trained, tmp_path: Path, tracker: str) -> None:
    """In the environment that `make test-all` makes: what these packages need conflicts with what others need."""
    trained.train(3)
    trained.log(1, reward=0.5)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))},
        "HOME": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
    }
    options = ["--project", "ours", "--once", "--url", trained.url, "--key", trained.key]
    for _ in range(2):  # the second copies nothing again
        run_in(ENVIRONMENT, "-m", "tinsmith_trackers.command", tracker, *options, cwd=tmp_path, env=environment)
    shown = json.loads(run_in(ENVIRONMENT, "-c", READERS[tracker], cwd=tmp_path, env=environment).splitlines()[-1])
    assert sorted(map(tuple, shown)) == sorted(trained.points())


def run_in(environment: Path, *arguments: str, cwd: Path, env: dict[str, str]) -> str:
    python = environment / "bin" / "python"
    ran = subprocess.run([python, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
