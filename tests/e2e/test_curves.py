"""Curves over HTTP: what a run of the SDK measured, what its client adds, and the stream of both."""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from fastapi.routing import APIRoute
from typer.testing import CliRunner

import tinsmith_trackers
from tinsmith.commands.cli import build_group
from tinsmith.lifeline import Tethered
from tinsmith.plugins.loading import Plugins
from tinsmith.server.routes import metrics
from tinsmith.server.run_views import thinned
from tinsmith.store import SessionRecord
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, rl_datum

WAIT_S = 300


def trained(training: tinker.TrainingClient, steps: int) -> list[float]:
    """Return what each pass told its client of the loss."""
    told = []
    for _ in range(steps):
        passed = training.forward_backward([datum([1, 2, 3, 4])], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=0.1)).result(WAIT_S)
        told.append(passed.result(WAIT_S).metrics["loss:sum"])
    return told


class Curves:
    """A run of three steps, and requests for its curves."""

    def __init__(self, server: RunningServer, client: tinker.ServiceClient) -> None:
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": "tml-ann"}, timeout=WAIT_S)
        self.url, self.store, self.app = server.url, server.store, server.app
        self.training = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
        self.run_id = self.training.get_info().model_id
        self.path = f"/runs/{self.run_id}/metrics"
        self.told = trained(self.training, 3)

    def get(self, **query: Any) -> dict[str, dict[str, Any]]:
        answer = self.http.get(self.path, params=query).raise_for_status().json()
        return {each.pop("name"): each for each in answer["series"]}

    def post(self, *points: Any, key: str = "tml-ann") -> httpx.Response:
        return self.http.post(self.path, json={"points": list(points)}, headers={"x-api-key": key})


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Curves]:
    with (
        running_server(tmp_path_factory.mktemp("curves")) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as client,
    ):
        yield Curves(server, client)


def test_a_run_has_the_curves_of_what_it_measured(curves: Curves) -> None:
    series = curves.get()
    assert series["loss:sum"]["steps"] == [0, 1, 2]
    assert series["loss:sum"]["values"] == curves.told
    assert series["trained_tokens:sum"]["values"] == [3.0, 3.0, 3.0]
    assert all(value > 0 for value in series["tokens_per_s"]["values"])
    assert list(curves.get(name="loss:sum", max_points=2)) == ["loss:sum"]
    (run,) = (each for each in curves.http.get("/runs").json()["runs"] if each["run_id"] == curves.run_id)
    assert (run["steps"], run["base_model"], run["state"]) == (3, "toy", "ready")


def test_a_pass_of_reinforcement_learning_shows_how_far_sampler_and_trainer_are_apart(
    curves: Curves, connect: Callable[[str, str], tinker.ServiceClient]
) -> None:
    """The client is told nothing else than before."""
    training = connect(curves.url, "tml-rl").create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
    sampler = training.save_weights_and_get_sampling_client().result(WAIT_S)
    params = tinker.SamplingParams(max_tokens=4, seed=1)
    (drawn,) = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params).result(WAIT_S).sequences
    apart = [0.0, 0.0, *[logprob + 0.5 for logprob in drawn.logprobs]]
    for logprobs in ([0.0, 0.0, *drawn.logprobs], apart):
        passed = training.forward_backward([rl_datum([1, 2, 3, *drawn.tokens], logprobs, 1.0)], "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=0.0)).result(WAIT_S)
        assert not [name for name in passed.result(WAIT_S).metrics if "kl" in name]
    path = f"/runs/{training.get_info().model_id}/metrics"
    found = curves.http.get(path, headers={"x-api-key": "tml-rl"}).json()["series"]
    series = {each["name"]: each for each in found}
    assert series["sampler_kl:mean"]["values"] == pytest.approx([0.0, 0.5], abs=1e-5)
    assert series["sampler_kl_k3:mean"]["values"] == pytest.approx([0.0, math.exp(-0.5) - 0.5], abs=1e-5)
    times = series["engine_s:sum"]["times"]
    assert series["step_s"]["steps"] == [1]
    assert series["step_s"]["values"] == pytest.approx([times[1] - times[0]], abs=0.01)
    assert "sampler_kl:mean" not in curves.get()


def test_a_script_adds_its_reward_in_two_lines(curves: Curves) -> None:
    log = tinsmith_trackers.track(curves.training).log
    log(0, reward=0.25)
    log(0, reward=0.5)
    log(1, {"reward": math.nan, "env/length": 12})
    series = curves.get()
    assert (series["reward"]["steps"], series["reward"]["values"]) == ([0, 1], [0.5, None])
    assert series["env/length"]["values"] == [12.0]
    with pytest.raises(ValueError, match=r"refuses.*step"):
        log(-1, reward=1.0)


@pytest.mark.parametrize(
    ("point", "found"),
    [
        ({"step": 1, "values": {"x": 1.0}, "colour": "red"}, "colour"),
        ({"step": 2**53, "values": {"x": 1.0}}, "step"),
        ({"step": 1, "values": {"x": "1e400"}}, "x"),
        ({"step": 1, "values": {"": 1.0}}, "values"),
        ({"step": 1, "values": {f"m{n}": 1.0 for n in range(513)}}, "512"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(curves: Curves, point: Any, found: str) -> None:
    answer = curves.post(point)
    assert 400 <= answer.status_code < 500
    assert found in answer.text


def test_a_run_takes_a_limited_number_of_bytes(curves: Curves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_BYTES", 10)
    answer = curves.post({"step": 0, "values": {"too/much": 1.0}})
    assert answer.status_code == 400
    assert "beyond 10" in answer.text
    assert "too/much" not in curves.get()


def test_a_run_that_is_deleted_while_it_is_listed_is_left_out(curves: Curves, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(session_ids: Collection[str]) -> dict[str, SessionRecord]:
        assert curves.training.get_info().model_id.split(":")[0] in session_ids
        return {}

    monkeypatch.setattr(curves.store, "find_sessions", gone)
    assert curves.http.get("/runs").raise_for_status().json()["runs"] == []


def test_another_tenant_sees_no_run(curves: Curves) -> None:
    stranger = {"x-api-key": "tml-bob"}
    unknown = curves.http.get("/runs/none/metrics", headers=stranger)
    for answer in (
        curves.http.get(curves.path, headers=stranger),
        curves.http.get("/run_events", params={"run": curves.run_id}, headers=stranger),
        curves.post({"step": 0, "values": {"x": 1.0}}, key="tml-bob"),
    ):
        assert answer.status_code == unknown.status_code == 404
        assert answer.text == unknown.text.replace("none", curves.run_id)
    assert curves.http.get("/runs", headers=stranger).json()["runs"] == []
    assert "x" not in curves.get()


def test_another_tenants_run_is_on_no_route(curves: Curves) -> None:
    """A walk over all routes: ann's names are unknown to bob, as names are that nobody has, and no list has them."""
    session_id = curves.run_id.split(":")[0]
    saved = curves.training.save_state("walked").result(WAIT_S).path
    theirs = {"model_id": curves.run_id, "session_id": session_id, "kind": "weights", "name": "walked"}
    nobodys = {"model_id": "none:train:0", "session_id": "none", "kind": "weights", "name": "walked"}
    bob = {"x-api-key": "tml-bob"}
    routes = [each for each in curves.app.routes if isinstance(each, APIRoute) and each.path.startswith("/api/v1/")]
    walked, listed = set[str](), set[str]()
    for route in routes:
        names = re.findall(r"{(\w+)}", route.path)
        for method in sorted(route.methods & {"GET", "DELETE", "PUT"} if set(names) <= set(theirs) else ()):
            ask = partial(curves.http.request, method, headers=bob, json=_BODIES.get(route.path.rpartition("/")[2]))
            if not names:
                answer = ask(route.path[len("/api/v1") :], params=_QUERIES.get(route.path, {}))
                assert not any(name in answer.text for name in (session_id, saved)), route.path
                listed.add(route.path)
                continue
            answer, unknown = (ask(route.path[len("/api/v1") :].format(**of)) for of in (theirs, nobodys))
            assert answer.status_code == unknown.status_code in {404, 501}, (method, route.path, answer.text)
            hidden = answer.text.replace(curves.run_id, "none:train:0").replace(session_id, "none")
            assert hidden == unknown.text, (method, route.path)
            walked.add(route.path)
    assert {"/api/v1/runs/{model_id}/metrics", "/api/v1/training_runs/{model_id}"} <= walked
    assert {"/api/v1/runs", "/api/v1/engines", "/api/v1/sessions"} <= listed
    assert curves.run_id in curves.http.get("/runs").text


_BODIES = {"project": {"project_id": "p"}, "ttl": {"ttl_seconds": 60}}
_QUERIES = {"/api/v1/run_events": {"run": "none"}}


def test_without_keys_whoever_sends_none_sees_all_runs_and_changes_none(curves: Curves, tmp_path: Path) -> None:
    with httpx.Client(base_url=f"{curves.url}/api/v1", timeout=WAIT_S) as http:
        assert curves.run_id in [each["run_id"] for each in http.get("/runs").json()["runs"]]
        assert http.get(curves.path).json()["steps"] == 3
        assert http.post(curves.path, json={"points": []}).status_code == 401
        assert http.get("/training_runs").status_code == 401
    keys = [{"key": "tml-secret", "tenant": "ann"}]
    with running_server(tmp_path, server={"api_keys": keys}, engines=False) as server:
        for path in ("/runs", "/runs/none/metrics", "/run_events?run=none", "/engines"):
            assert httpx.get(f"{server.url}/api/v1{path}", timeout=WAIT_S).status_code == 401


def test_a_stream_tells_of_each_new_step(curves: Curves) -> None:
    with curves.http.stream("GET", "/run_events", params={"run": curves.run_id}) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        assert [point["step"] for point in next(events)["points"]] == [0, 1, 2]
        tinsmith_trackers.track(curves.training).log(7, reward=0.75)
        event = next(events)
        assert event["run_id"] == curves.run_id
        assert [(each["step"], each["values"]) for each in event["points"]] == [(7, {"reward": 0.75})]


def test_a_log_of_the_cookbook_is_followed(curves: Curves, tmp_path: Path) -> None:
    """A line that a crash has cut off is left out, or one nested too deeply. One that is being written waits."""
    first, *rest = [
        json.dumps({"step": step, "env/all/reward/total": step / 4, "what": "text"}) + "\n" for step in range(3)
    ]
    deep = f'{{"step": 8, "deep": {1100 * "["}{1100 * "]"}}}\n'
    written = "".join([first, '{"step": 9, "hal\x1b{"step": 9}\n', deep, *rest, '{"step": 3, "half'])
    (tmp_path / "metrics.jsonl").write_text(written, encoding="utf-8")
    group = build_group(Plugins.load())
    command = ["track", str(tmp_path), "--once", "--run", "last", "--url", curves.url, "--key", "tml-ann"]
    for _ in range(2):
        result = CliRunner().invoke(group, command)
        assert result.exit_code == 0, result.output
        assert f'no JSON: the line at byte {len(first)}: {{"step": 9, "hal\\x1b{{"step": 9}}' in result.output
    assert curves.run_id in result.output
    assert curves.get()["env/all/reward/total"]["values"] == [0.0, 0.25, 0.5]


def test_metrics_are_added_to_no_run_that_is_not_named(curves: Curves, tmp_path: Path) -> None:
    """The newest run may be another script's: the one that writes this file may not have begun yet."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "stray": 1.0}\n', encoding="utf-8")
    command = ["track", str(tmp_path), "--once", "--url", curves.url, "--key", "tml-ann"]
    result = CliRunner().invoke(build_group(Plugins.load()), command)
    assert result.exit_code == 2
    assert re.search(rf"--run says which run .*{curves.run_id} \(created ", result.output)
    assert "stray" not in curves.get()


def test_a_file_that_is_replaced_or_emptied_is_read_again(curves: Curves, tmp_path: Path) -> None:
    file, written = tmp_path / "metrics.jsonl", "replaced/and/emptied"

    def line(step: int) -> str:
        return json.dumps({"step": step, written: float(step)}) + "\n"

    def until(steps: list[int]) -> None:
        while (series := curves.get().get(written)) is None or series["steps"] != steps:
            assert following.poll() is None

    file.write_text(line(1) + line(2), encoding="utf-8")
    command = ["track", str(tmp_path), "--run", curves.run_id, "--url", curves.url, "--key", "tml-ann"]
    with Tethered([sys.executable, "-m", "tinsmith", *command], env=os.environ) as following:
        until([1, 2])
        file.with_name("fresh").write_text(line(3) + line(4) + line(5), encoding="utf-8")
        file.with_name("fresh").rename(file)
        until([1, 2, 3, 4, 5])
        file.write_text(line(6), encoding="utf-8")
        until([1, 2, 3, 4, 5, 6])
        file.rename(tmp_path / "old")
        file.write_text(line(7), encoding="utf-8")
        until([1, 2, 3, 4, 5, 6, 7])


def test_a_thin_curve_keeps_its_peaks() -> None:
    values = [math.nan if at % 7 == 0 else float(at % 5) for at in range(1000)]
    values[333], values[777] = 99.0, -99.0
    kept = thinned(values, 100)
    assert len(kept) <= 100
    assert {333, 777} <= set(kept)
    assert thinned(values, 1000) == list(range(1000))
