"""Where the time of an RL run went: attributed nearly whole, by the server's own times, and as a trace."""

import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from browser import Browser
from typer.testing import CliRunner

from tinsmith.commands.cli import build_group
from tinsmith.errors import UserError
from tinsmith.phases import PHASES
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum

WAIT_S = 300
KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": False} for name in ("ann", "bob")]


class Loop:
    """An RL loop of three iterations, which measures its own part."""

    def __init__(self, server: RunningServer, service: tinker.ServiceClient) -> None:
        self.server = server
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": "tml-ann"}, timeout=WAIT_S)
        self.service = service
        training = self.service.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
        self.run_id = training.get_info().model_id
        self.session_id = self.run_id.partition(":")[0]
        self.own_s, began_s = 0.0, time.monotonic()
        prompt = tinker.ModelInput.from_ints([1, 2, 3])
        for _ in range(3):
            sampler = training.save_weights_and_get_sampling_client().result(WAIT_S)
            params = tinker.SamplingParams(max_tokens=16, temperature=1.0)
            sampler.sample(prompt, num_samples=4, sampling_params=params).result(WAIT_S)
            sampler.compute_logprobs(prompt).result(WAIT_S)
            self._compute_rewards()
            training.forward([datum([1, 2, 3, 4])], "cross_entropy").result(WAIT_S)
            passed = training.forward_backward([datum([1, 2, 3, 4])], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=0.1)).result(WAIT_S)
            passed.result(WAIT_S)
        self.wall_s = time.monotonic() - began_s

    def _compute_rewards(self) -> None:
        """Take time on the client alone."""
        began_s, matrix = time.monotonic(), np.eye(300)
        for _ in range(10):
            matrix = matrix @ matrix
        self.own_s += time.monotonic() - began_s


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with (
        running_server(tmp_path_factory.mktemp("time"), server={"api_keys": KEYS}) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as service,
    ):
        yield Loop(server, service)


def test_nearly_all_of_an_iteration_is_attributed(loop: Loop) -> None:
    found = loop.http.get(f"/runs/{loop.run_id}/time").raise_for_status().json()
    assert [each["step"] for each in found["iterations"]] == [0, 1, 2]
    for each in (found, *found["iterations"]):
        assert each["attributed"] >= 0.95
        assert sum(each["phases"].values()) == pytest.approx(each["wall_s"])
        assert set(each["phases"]) <= set(PHASES)
        for phase in (
            "passes",
            "step",
            "scoring",
            "decode",
            "prefill",
            "weight_sync",
            "recording",
            "wait_queue",
            "client",
        ):
            assert each["phases"][phase] > 0, phase
    assert found["meanings"].keys() == found["phases"].keys()
    assert found["phases"]["client"] >= loop.own_s, "what the client measured of its own"
    last = found["iterations"][-1]
    assert loop.wall_s * 0.95 <= found["wall_s"] <= loop.wall_s + found["iterations"][0]["wall_s"]
    (one,) = loop.http.get(f"/runs/{loop.run_id}/time?iterations=1").json()["iterations"]
    assert one == last


def test_the_sdk_exports_a_trace(loop: Loop) -> None:
    rest = tinker.RestClient(base_url=loop.server.url, api_key="tml-ann")
    url = rest.export_session_trace(loop.session_id).result(WAIT_S)
    with urllib.request.urlopen(url) as answer:  # without a key
        trace = json.load(answer)
    phases = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    spent = loop.http.get(f"/runs/{loop.run_id}/time").json()
    for phase in ("passes", "step", "decode", "prefill", "weight_sync", "client"):
        told_s = sum(each["dur"] for each in phases if each["name"] == phase) / 1e6
        assert told_s >= spent["phases"][phase] - 1e-4 * len(phases), phase
    for first, second in pairwise(phases):
        assert first["ts"] + first["dur"] == second["ts"], "no gaps"
    open_: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for each in trace["traceEvents"]:
        if each["ph"] in "be":
            stack = open_[each["pid"], each["cat"], each["id"]]
            stack.append(each["name"]) if each["ph"] == "b" else stack.remove(each["name"])
    assert len(open_) >= 3 * 6 + 1
    assert not any(open_.values()), "each has an end"


def test_the_command_writes_the_same_trace(loop: Loop, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    command = ["session", "export-trace", loop.session_id, "--output", str(file), "--url", loop.server.url, "--key"]
    result = CliRunner().invoke(build_group(Plugins.load()), [*command, "tml-ann"])
    assert result.exit_code == 0, result.output
    assert str(file) in result.output.replace("\n", "")
    assert {each["ph"] for each in json.loads(file.read_text())["traceEvents"]} == {"M", "X", "b", "e"}
    refused = CliRunner().invoke(build_group(Plugins.load()), [*command, "tml-bob"])
    assert isinstance(refused.exception, UserError)
    assert "404" in str(refused.exception)


def test_the_page_draws_where_the_time_went(loop: Loop, browser: Browser, take: Callable[[str], None]) -> None:
    spent = loop.http.get(f"/runs/{loop.run_id}/time").json()
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{loop.server.url}/#run={loop.run_id}&key=tml-ann")
    browser.until("document.querySelector('figure')")
    browser.evaluate("document.querySelector('#run-views a[href*=time]').click()")
    browser.until("document.querySelectorAll('#bars tbody tr').length === 3")
    assert browser.evaluate("document.querySelector('#run-views [aria-current]').textContent") == "time"
    told = (
        "[...document.querySelectorAll('#phases tbody tr')]"
        ".map(({ cells: [phase] }) => [...phase.firstChild.childNodes].slice(2).map((each) => each.textContent))"
    )
    words = {phase: phase.replace("wait_", "wait: ").replace("_", " ") for phase in PHASES}
    assert browser.evaluate(told) == [[words[phase], PHASES[phase]] for phase in spent["phases"]]
    assert "3 iterations in " in browser.evaluate("document.querySelector('#spent').textContent")
    drawn = browser.evaluate(
        "[...document.querySelectorAll('#bars .bar-of')].map((bar) => "
        "[...bar.children].map((piece) => [piece.className, piece.getBoundingClientRect().width]))"
    )
    longest_s = max(each["wall_s"] for each in spent["iterations"])
    whole = max(sum(width for _, width in bar) for bar in drawn)
    for bar, iteration in zip(drawn, reversed(spent["iterations"]), strict=True):
        assert [name for name, _ in bar] == [f"at {phase}" for phase in iteration["phases"]]
        for (_, width), seconds in zip(bar, iteration["phases"].values(), strict=True):
            assert width == pytest.approx(whole * seconds / longest_s, abs=1)
    assert "decode" in browser.evaluate("document.querySelector('#bars .bar-of').ariaLabel")
    take("time")
    assert browser.problems == []


def test_the_page_saves_the_trace(loop: Loop, browser: Browser, tmp_path: Path) -> None:
    browser.save_downloads(tmp_path)
    browser.open(f"{loop.server.url}/#run={loop.run_id}&view=time&key=tml-ann")
    browser.until("document.querySelectorAll('#bars tbody tr').length === 3")
    browser.evaluate("document.querySelector('#trace').click()")
    browser.downloaded()
    file = tmp_path / f"{loop.session_id}.trace.json"
    assert {each["ph"] for each in json.loads(file.read_text())["traceEvents"]} == {"M", "X", "b", "e"}


def test_what_is_anothers_does_not_exist(loop: Loop) -> None:
    for path in (f"/runs/{loop.run_id}/time", f"/sessions/{loop.session_id}/trace_export"):
        assert loop.http.get(path, headers={"x-api-key": "tml-bob"}).status_code == 404
    url = loop.http.get(f"/sessions/{loop.session_id}/trace_export").json()["url"]
    assert httpx.get(url).status_code == 200
    assert httpx.get(url.replace(loop.session_id, "0" * 32)).status_code == 401
