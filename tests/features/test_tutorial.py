"""The tutorial's plugin that keeps something, as it is shown: from the table to the page."""

import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from browser import running_browser
from tutorial_pages import files_of
from typer.testing import CliRunner

from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server

ANN, BOB = {"x-api-key": "tml-ann"}, {"x-api-key": "tml-bob"}
KEYS = [{"key": each["x-api-key"], "tenant": each["x-api-key"][4:]} for each in (ANN, BOB)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    root = tmp_path_factory.mktemp("notes")
    for name, content in files_of("keep-something").items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield import_module("tinsmith_notes.plugin")
    for name in [name for name in sys.modules if name.startswith("tinsmith_notes")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def server(plugin: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = tmp_path_factory.mktemp("data")
    with running_server(data, engines=False, server={"api_keys": KEYS}, extra_plugins=[plugin]) as running:
        yield running


def api(server: RunningServer, method: str, path: str, headers: dict[str, str], body: object = None) -> httpx.Response:
    return httpx.request(method, f"{server.url}/api/v1/{path}", headers=headers, json=body, timeout=300)


@pytest.fixture(scope="module")
def run(server: RunningServer) -> str:
    session = api(server, "POST", "create_session", ANN, {"tags": [], "sdk_version": "0.38.0"}).json()
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
    model_id: str = api(server, "POST", "create_model", ANN, body).json()["model_id"]
    api(server, "POST", f"runs/{model_id}/metrics", ANN, {"points": [{"step": 0, "values": {"reward": 0.5}}]})
    return model_id


def test_the_plugin_is_short() -> None:
    lines = [line for content in files_of("keep-something").values() for line in content.splitlines() if line.strip()]
    assert len(lines) < 150


def test_notes_are_kept_for_their_owner(server: RunningServer, run: str) -> None:
    answer = api(server, "POST", f"runs/{run}/notes", ANN, {"words": "too fast"})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert datetime.fromisoformat(made["created_at"]) <= datetime.now(UTC)
    assert made in api(server, "GET", f"runs/{run}/notes", ANN).json()
    assert api(server, "POST", f"runs/{run}/notes", ANN, {"words": ""}).status_code == 422
    for headers, status in ((BOB, 404), ({}, 401)):
        assert api(server, "GET", f"runs/{run}/notes", headers).status_code == status
        assert api(server, "POST", f"runs/{run}/notes", headers, {"words": "mine"}).status_code == status


def test_the_command_adds_a_note(plugin: ModuleType, server: RunningServer, run: str) -> None:
    plugins = Plugins.load([plugin])
    data_dir = str(server.settings.data_dir.root)
    command = ["runs", "note", "last", "from the terminal", "--data-dir", data_dir]
    made = CliRunner().invoke(build_group(plugins), command, obj=plugins)
    assert made.exit_code == 0, made.output
    listed = api(server, "GET", f"runs/{run}/notes", ANN).json()
    assert {"from the terminal": made.output.strip()}.items() <= {
        each["words"]: each["note_id"] for each in listed
    }.items()


def test_the_page_shows_notes(server: RunningServer, run: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium")
    assert api(server, "POST", f"runs/{run}/notes", ANN, {"words": "<b>seen</b>"}).status_code == 200
    with running_browser(chromium, tmp_path / "browser") as browser:
        browser.look(width=1280, height=800, dark=False)
        browser.open(f"{server.url}/#run={run}&key={ANN['x-api-key']}")
        browser.until("[...document.querySelectorAll('#notes li')].some((each) => each.textContent === '<b>seen</b>')")
        assert browser.problems == []
