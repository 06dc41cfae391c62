"""Links to the curves of one run: whoever has one sees these, and nothing else."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from browser import running_browser
from typer.testing import CliRunner

from tinsmith.commands.cli import build_group
from tinsmith.errors import NotFoundError
from tinsmith.features.share_links.links import MOST_LINKS, make_link
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server

ANN, BOB = {"x-api-key": "tml-ann"}, {"x-api-key": "tml-bob"}
KEYS = [{"key": each["x-api-key"], "tenant": each["x-api-key"][4:]} for each in (ANN, BOB)]


@contextmanager
def served(directory: Path) -> Iterator[RunningServer]:
    with running_server(directory, engines=False, server={"api_keys": KEYS}) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with served(tmp_path_factory.mktemp("data")) as running:
        yield running


def api(server: RunningServer, method: str, path: str, headers: dict[str, str], body: object = None) -> httpx.Response:
    return httpx.request(method, f"{server.url}/api/v1/{path}", headers=headers, json=body, timeout=300)


def a_run(server: RunningServer, headers: dict[str, str] = ANN) -> str:
    session = api(server, "POST", "create_session", headers, {"tags": [], "sdk_version": "0.38.0"}).json()
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
    created = api(server, "POST", "create_model", headers, body).json()
    run: str = created["model_id"]
    logged = api(server, "POST", f"runs/{run}/metrics", headers, {"points": [{"step": 0, "values": {"reward": 0.5}}]})
    assert logged.status_code == 200, logged.text
    return run


def secret_in(url: str) -> dict[str, str]:
    (secret,) = parse_qs(urlsplit(url).fragment)["share"]
    return {"x-share-secret": secret}


def shared(server: RunningServer, run: str, **body: object) -> tuple[str, dict[str, str]]:
    answer = api(server, "POST", f"runs/{run}/share_links", ANN, body).json()
    assert urlsplit(answer["url"]).path == "/"
    return answer["share_id"], secret_in(answer["url"])


def test_a_link_shows_the_curves_of_its_run_until_it_is_revoked(server: RunningServer) -> None:
    run = a_run(server)
    share_id, link = shared(server, run)
    curves = api(server, "GET", f"runs/{run}/metrics", link)
    assert [(each["name"], each["values"]) for each in curves.json()["series"]] == [("reward", [0.5])]
    with httpx.stream("GET", f"{server.url}/api/v1/run_events?run={run}", headers=link, timeout=300) as events:
        assert json.loads(next(events.iter_lines()).removeprefix("data: "))["run_id"] == run
    listed = api(server, "GET", f"runs/{run}/share_links", ANN).json()["links"]
    assert [sorted(each) for each in listed] == [["created_at", "share_id"]], "its secret is kept nowhere"
    assert api(server, "DELETE", f"runs/{run}/share_links/{share_id}", ANN).status_code == 200
    assert api(server, "GET", f"runs/{run}/metrics", link).status_code == 404
    assert api(server, "GET", f"run_events?run={run}", link).status_code == 404
    assert api(server, "DELETE", f"runs/{run}/share_links/{share_id}", ANN).status_code == 404
    days = [(datetime.now(UTC) - timedelta(days=back)).date() for back in (1, 0)]
    entries = [each for day in days for each in api(server, "GET", f"audit?day={day}", ANN).json()["entries"]]
    about = [each for each in entries if each["event_details"].get("share_id") == share_id]
    assert [(each["event"], each["event_details"]["actor"]) for each in about] == [
        ("share_link_create", "ann"),
        ("share_link_delete", "ann"),
    ]


def test_a_link_shows_nothing_else(server: RunningServer) -> None:
    run, other = a_run(server), a_run(server)
    _, link = shared(server, run)
    assert api(server, "GET", f"runs/{other}/metrics", link).status_code == 404
    assert api(server, "GET", f"run_events?run={run}&run={other}", link).status_code == 404
    described = httpx.get(f"{server.url}/openapi.json", headers=ANN, timeout=300).json()
    open_to_all = ("/api/v1/healthz", "/api/v1/readyz")
    with httpx.Client(base_url=server.url, headers=link, timeout=300) as http:
        for path, operations in described["paths"].items():
            if (
                "{signature}" in path
                or "/metrics" in path
                or path.endswith("run_events")
                or path.startswith(open_to_all)
                or not path.startswith("/api/v1/")
            ):
                continue
            for method in operations:
                concrete = path.replace("{model_id}", run).replace("{", "").replace("}", "")
                answer = http.request(method, concrete, json={})
                assert answer.status_code == 401, (method, path, answer.text)
    assert api(server, "POST", f"runs/{run}/metrics", link, {"points": []}).status_code == 401


def test_another_tenants_run_cannot_be_shared(server: RunningServer) -> None:
    run = a_run(server)
    share_id, link = shared(server, run)
    for method, path in (("POST", ""), ("GET", ""), ("DELETE", f"/{share_id}")):
        answer = api(server, method, f"runs/{run}/share_links{path}", BOB, {} if method == "POST" else None)
        assert answer.status_code == 404
    assert api(server, "GET", f"runs/{run}/metrics", link).status_code == 200
    assert api(server, "GET", f"runs/{run}/metrics", {**BOB, "x-share-secret": "guessed"}).status_code == 404


def test_a_link_ends_at_its_time(server: RunningServer) -> None:
    run = a_run(server)
    assert api(server, "POST", f"runs/{run}/share_links", ANN, {"expires_in_s": 0}).status_code == 422
    _, link = shared(server, run, expires_in_s=3600)
    (listed,) = api(server, "GET", f"runs/{run}/share_links", ANN).json()["links"]
    assert datetime.fromisoformat(listed["expires_at"]) - datetime.now(UTC) > timedelta(minutes=30)
    assert api(server, "GET", f"runs/{run}/metrics", link).status_code == 200
    _, ended = server.call(make_link(server.store, run, lasts_s=-1))
    assert api(server, "GET", f"runs/{run}/metrics", {"x-share-secret": ended}).status_code == 404


def test_the_command_makes_and_revokes_links_that_survive_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        run = a_run(server)
    command = ["runs", "share", "last", "--data-dir", str(tmp_path)]
    plugins = Plugins.load()
    group = build_group(plugins)
    made = CliRunner().invoke(group, [*command, "--hours", "24"], obj=plugins)
    assert made.exit_code == 0, made.output
    link = secret_in(made.stdout.strip())
    with served(tmp_path) as server:
        assert api(server, "GET", f"runs/{run}/metrics", link).status_code == 200
    revoked = CliRunner().invoke(group, [*command, "--revoke", "all"], obj=plugins)
    assert revoked.output.startswith("revoked ")
    with pytest.raises(NotFoundError, match="has no share link 'all'; its links: none"):
        CliRunner().invoke(group, [*command, "--revoke", "all"], obj=plugins, catch_exceptions=False)
    with served(tmp_path) as server:
        assert api(server, "GET", f"runs/{run}/metrics", link).status_code == 404
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in files if link["x-share-secret"].encode() in file.read_bytes()], "it is kept nowhere"


def test_the_page_makes_a_link_that_shows_the_run_without_a_key(server: RunningServer, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium")
    run = a_run(server)
    drawn = "[...document.querySelectorAll('figcaption')].some((each) => each.textContent === 'reward0.5')"
    with running_browser(chromium, tmp_path / "owner") as owner:
        owner.look(width=1280, height=800, dark=False)
        owner.open(f"{server.url}/#run={run}&key={ANN['x-api-key']}")
        owner.until(drawn)
        owner.evaluate("document.querySelector('#share').click()")
        owner.until("document.querySelector('#curves p a')?.href.includes('share=')")
        owner.look(width=390, height=844, dark=True)
        assert owner.evaluate("document.documentElement.scrollWidth <= innerWidth")
        url = owner.evaluate("document.querySelector('#curves p a').href")
        assert owner.problems == []
    with running_browser(chromium, tmp_path / "friend") as friend:
        friend.look(width=1280, height=800, dark=False)
        friend.open(url)
        friend.until(drawn)
        friend.until("document.querySelector('#live').textContent === 'live'")
        assert friend.evaluate("document.querySelector('#share').hidden")
        friend.evaluate("document.querySelector('figure .uplot').focus()")
        for key in ("End", "Enter"):
            friend.press(key)
        friend.until("document.querySelector('#point').open")
        assert "reward0.5" in friend.evaluate("document.querySelector('#point-values').textContent")
        assert friend.evaluate("document.querySelector('#point-more').children.length") == 0, (
            "no checkpoint, no rollout"
        )
        assert friend.problems == []


def test_a_run_has_a_bounded_number_of_links(server: RunningServer) -> None:
    run = a_run(server)
    names = [shared(server, run)[0] for _ in range(MOST_LINKS)]
    refused = api(server, "POST", f"runs/{run}/share_links", ANN, {})
    assert (refused.status_code, f"has {MOST_LINKS} share links" in refused.text) == (400, True)
    api(server, "DELETE", f"runs/{run}/share_links/{names[0]}", ANN)
    shared(server, run)
