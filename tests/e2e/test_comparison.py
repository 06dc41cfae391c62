"""The program that compares servers, at a small scale: what it asks, what it throws away, and what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comparison import page
from comparison.client import Client
from comparison.proc import Usage
from comparison.rounds import Effort, Result, measure
from comparison.scenarios import SCENARIOS
from comparison.workbench import Workbench
from where_time_goes import STAGES, Trace, find

from tinsmith.testing.harness import RunningServer

ROOT = Path(__file__).parents[2]
CHEAP = ("start", "forward", "optim-step", "sample-lone", "logprobs", "first-token", "faults")
TOO_LONG_FOR_THE_TOY = "sft-long"


@pytest.fixture(scope="module")
def toy_client(toy_server: RunningServer) -> Iterator[Client]:
    bench = Workbench(url=toy_server.url, base_model="toy", vocab_size=64, rank=4)
    yield Client(bench, None)
    for service in bench.services:
        service.close("success").result(timeout=300)


@pytest.mark.parametrize(
    "name",
    [
        name if name in CHEAP else pytest.param(name, marks=pytest.mark.thorough)
        for name in SCENARIOS
        if name != TOO_LONG_FOR_THE_TOY
    ],
)
def test_a_scenario_is_prepared_and_measured(toy_client: Client, name: str) -> None:
    prepared = toy_client.answer("prepare", name)
    assert len(prepared["warm_up_s"]) == SCENARIOS[name].warm_ups  # type: ignore[arg-type]
    measured = toy_client.answer("measure", name)
    assert measured["value"] == 0 if SCENARIOS[name].unit == "count" else measured["value"] > 0  # type: ignore[operator]


def test_what_a_server_refuses_is_an_answer(toy_client: Client) -> None:
    assert "the context holds 512" in str(toy_client.answer("prepare", TOO_LONG_FOR_THE_TOY)["error"])


def test_the_work_of_others_is_what_is_left() -> None:
    assert Usage(machine_s=3.0, server_s=1.0, client_s=0.5).others_s == 1.5
    program = "import time\ninput()\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        before = Usage.now(server.pid)
        server.stdin.write(b"\n")
        server.stdin.flush()
        server.stdout.readline()
        used = Usage.now(server.pid).since(before)
        server.communicate(b"\n")
    assert used.server_s > 0.1
    assert used.machine_s > used.server_s - 0.05


class AServer(SimpleNamespace):
    """Answers what it is told to, in turn, and notes in `asked` who was."""

    def ask(self, command: str, scenario: str) -> dict[str, Any]:
        if command == "prepare":
            return {"warm_up_s": [], "sdk": "1"}
        self.asked.append(self.name)
        value, others_s = self.answers.pop(0)
        if value < 0:
            return {"error": "a reason"}
        return {
            "value": value,
            "seconds": 1.0,
            "server_cpu_s": 0.5,
            "others_cpu_s": others_s,
            "peak_mib": 10,
        }

    def cpu_s(self) -> float:
        return 0.0


def servers(ours: list[tuple[float, float]], peers: list[tuple[float, float]]) -> tuple[list[Any], list[str]]:
    asked: list[str] = []
    made = [AServer(name=name, asked=asked, answers=answers) for name, answers in (("us", ours), ("peer", peers))]
    return list(made), asked


EFFORT = Effort(rounds=2, fewest=1, limit_s=60.0)


def test_rounds_alternate_and_a_disturbed_one_counts_for_nobody() -> None:
    both, asked = servers([(100.0, 0.0), (7.0, 0.0), (300.0, 0.0)], [(50.0, 0.0), (60.0, 0.9), (100.0, 0.0)])
    result = measure("sft", both, EFFORT, allow_load=False)
    assert asked == ["peer", "us"] * 3
    assert result.values == {"us": [100.0, 300.0], "peer": [50.0, 100.0]}
    assert (result.thrown_away, round(result.most_others, 2)) == (1, 0.87)


def test_a_busy_machine_gives_no_figure_unless_load_is_allowed() -> None:
    busy = [(1.0, 1.0)] * 4
    both, _ = servers(list(busy), list(busy))
    assert measure("sft", both, EFFORT, allow_load=False).values == {}
    both, _ = servers(list(busy), list(busy))
    assert measure("sft", both, EFFORT, allow_load=True).values == {"us": [1.0, 1.0], "peer": [1.0, 1.0]}


def test_a_server_that_fails_does_not_keep_others_from_being_measured() -> None:
    both, _ = servers([(1.0, 0.0)] * 4, [(1.0, 0.0), (-1.0, 0.0)])
    result = measure("sft", both, EFFORT, allow_load=False)
    assert result.values == {"us": [1.0, 1.0], "peer": [1.0]}
    assert result.errors == {"peer": "a reason"}


def found(result: Result, *, allow_load: bool = False) -> dict[str, Any]:
    row = {"version": "1", "configuration": {"slots": 10}, "cache_was_warm": True, "settled_s": 3, "start_cpu_s": 4}
    rows = [{"name": name, "sdk": "0.25.0", "peak_mib": 2170, **row} for name in ("us", "peer")]
    model = {"model": "tiny", "parameters": 4_200_000, "servers": rows, "figures": [result.as_json()]}
    machine = {"cores": 2, "cpu": "some", "memory_gib": 24, "system": "Linux", "python": "3.11"}
    method = {"most_cores_of_others": 0.1, "load_was_allowed": allow_load}
    return {"when": "now", "commit": "abc", "machine": machine, "method": method, "models": [model]}


@pytest.mark.parametrize(
    ("unit", "ratio", "loses"), [("tokens/s", "x0.5 (0.4 to 1.5)", True), ("s", "x2 (0.667 to 2.5)", False)]
)
def test_the_page_tells_ratios_and_losses(unit: str, ratio: str, loses: bool) -> None:
    values = {"us": [100.0, 200.0, 300.0], "peer": [200.0, 500.0, 200.0]}
    text = page.render(found(Result(scenario="x", figure="a figure", unit=unit, values=values)))
    assert f"| a figure | {unit} | 200 (100 to 300) | 200 (200 to 500) | {ratio} |" in text
    assert ("- a figure (tiny): x0.5" in text) is loses


def test_the_page_tells_what_was_thrown_away_and_what_failed() -> None:
    result = Result(scenario="x", figure="a figure", unit="s", values={"us": [1.0]}, thrown_away=2, most_others=0.5)
    result.errors["peer"] = "a reason"
    text = page.render(found(result))
    assert "- a figure (tiny): 2, others used up to 0.5 cores; 1 kept" in text
    assert "- a figure (tiny), peer: a reason" in text
    assert "its figures prove nothing" in page.render(found(result, allow_load=True))


@pytest.mark.thorough  # it imports the SDK in a process of its own
def test_a_client_ends_with_its_input_even_in_a_call() -> None:
    """Nothing answers at this address, and the SDK goes on trying."""
    command = [sys.executable, "-m", "comparison.client", "--url", "http://127.0.0.1:9", "--base-model", "x"]
    command += ["--vocab-size", "64", "--rank", "4"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, stderr=subprocess.DEVNULL) as client:
        client.communicate(b"prepare forward\n", timeout=300)
    assert client.returncode == 0


def test_the_stages_of_an_operation_are_where_they_are_looked_for() -> None:
    for place, _, _ in STAGES:
        if not place.startswith("tinsmith_jax"):
            owner, name = find(place)
            assert callable(getattr(owner, name)), place


def test_a_stage_is_timed_and_left_as_it_was() -> None:
    trace, place = Trace(), "tinsmith.server.results:_read"
    owner, name = find(place)
    original = getattr(owner, name)
    with trace.installed(with_jax=False), pytest.raises(AttributeError):
        getattr(owner, name)(None, None)
    assert [span.stage for span in trace.spans] == ["answer"]
    assert getattr(owner, name) is original


@pytest.mark.thorough
def test_the_program_compares_two_servers(tmp_path: Path, toy_server: RunningServer) -> None:
    """As `make bench` does, with processes of its own; the peer is a server that runs already."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "--backend", "toy", "--models", "tiny"]
    command += ["--only", "optim-step", "--rounds", "1", "--allow-load", "--work-dir", str(tmp_path / "work")]
    command += ["--json", str(figures), "--peer", f"running --url {toy_server.url} --base-model toy --name other"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    [model] = json.loads(figures.read_text())["models"]
    [figure] = model["figures"]
    assert set(figure["values"]) == {"tinsmith", "other"}
    assert [server["sdk"] != "" for server in model["servers"]] == [True, True]
