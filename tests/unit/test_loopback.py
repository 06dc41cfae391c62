"""Programs that talk to this machine pass every proxy by, and to other machines they take it."""

import ast
import tomllib
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from urllib.request import Request

import pytest
from syntax_trees import tree_of
from typer.testing import CliRunner

import tinsmith.loopback
import tinsmith_conformance.loopback
import tinsmith_trackers.loopback
from tinsmith.commands.cli import build_group
from tinsmith.loopback import is_loopback, open_url
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.ports import hold_port
from tinsmith_trackers.tracking import ScriptLog

ROOT = Path(__file__).parents[2]
ONE_PLACE = ROOT / "core/tinsmith/loopback.py"
HTTPX = {"tinsmith_conformance", "tinsmith_trackers", "tinsmith_oidc"}
"""Packages with clients that read `no_proxy`. Their programs call `exempt_loopback`, tinsmith's for the last one."""
Exempt = Callable[[MutableMapping[str, str]], None]
EXEMPT = [
    module.exempt_loopback for module in (tinsmith.loopback, tinsmith_conformance.loopback, tinsmith_trackers.loopback)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("loopback")) as server:
        yield server


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with hold_port() as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        yield url


@pytest.mark.parametrize("command", [("status",), ("top",), ("runs", "list")], ids=" ".join)
def test_a_command_passes_the_proxy_by(server: RunningServer, dead_proxy: str, command: tuple[str, ...]) -> None:
    group, plugins = build_group(Plugins.load()), Plugins.load()
    words = [*command, "--url", server.url]
    while (done := CliRunner().invoke(group, words, obj=plugins, catch_exceptions=False)).exit_code == 1:
        pass  # the engine starts
    assert done.exit_code == 0, done.output


def test_a_script_that_logs_metrics_passes_the_proxy_by(server: RunningServer, dead_proxy: str) -> None:
    with pytest.raises(ValueError, match="no-such-run"):  # so the server has answered
        ScriptLog(server.url, "tml-x", "no-such-run").log(0, reward=1.0)


def test_the_proxy_is_asked_for_other_machines(dead_proxy: str) -> None:
    with pytest.raises(OSError, match="Connection refused"):
        open_url(Request("http://model.example/readyz"), timeout_s=60)


@pytest.mark.parametrize(
    ("url", "is_it"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.8.9.1/x", True),
        ("https://localhost:1/", True),
        ("http://tinsmith.localhost", True),
        ("http://[::1]:80/", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1.example", False),
        ("no url", False),
    ],
)
def test_what_is_this_machine(url: str, is_it: bool) -> None:
    assert is_loopback(url) is is_it


@pytest.mark.parametrize("exempt", EXEMPT, ids=lambda each: each.__module__)
@pytest.mark.parametrize(
    ("before", "hosts"),
    [
        ({}, None),
        ({"NO_PROXY": "a.example"}, "a.example"),
        ({"http_proxy": "http://p"}, "localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "http://p", "NO_PROXY": " a.example, 127.0.0.1"}, "a.example,127.0.0.1,localhost,::1"),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "a", "no_proxy": "b"}, "b,localhost,127.0.0.1,::1"),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "*"}, "*"),
        ({"HTTP_PROXY": "", "NO_PROXY": "a"}, "a"),
    ],
)
def test_loopback_is_exempt_where_a_proxy_is_named(exempt: Exempt, before: dict[str, str], hosts: str | None) -> None:
    environ = dict(before)
    exempt(environ)
    assert environ.get("no_proxy", environ.get("NO_PROXY")) == hosts
    assert {name: value for name, value in environ.items() if name.lower() != "no_proxy"} == {
        name: value for name, value in before.items() if name.lower() != "no_proxy"
    }


def files_with(*words: str) -> list[Path]:
    """Return the product's files whose text has one of these words: to parse them all takes seconds."""
    places = ("core/tinsmith", "libraries/*/tinsmith_*", "plugins/*/tinsmith_*", "tools/*/tinsmith_*")
    every = [file for place in places for each in ROOT.glob(place) for file in each.rglob("*.py")]
    return [file for file in every if any(word in file.read_text(encoding="utf-8") for word in words)]


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_requests_are_sent_in_one_place() -> None:
    """What `urllib.request` can do but describe a request, and every other client, is for this one place."""
    clients = ("urllib.request", "http.client", "requests", "aiohttp", "urllib3", "httpx")
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in files_with("urllib", "http.client", "import requests", "from requests", "aiohttp", "httpx")
        for name in imported(file)
        if name.startswith(clients) and name != "urllib.request.Request" and file != ONE_PLACE
    }
    assert {each for each in found if not (each[1].startswith("httpx") and HTTPX & set(Path(each[0]).parts))} == set()


def test_every_program_exempts_loopback() -> None:
    programs = {}
    for file in (ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        programs.update({name: (file.parent, entry) for name, entry in project.get("scripts", {}).items()})
    assert len(programs) >= 3
    for name, (place, entry) in programs.items():
        module, _, function = entry.partition(":")
        path = Path(*module.split(".")).with_suffix(".py")
        file = next(each for each in (place / path, place / "core" / path) if each.exists())
        body = next(node for node in tree_of(file).body if isinstance(node, ast.FunctionDef) and node.name == function)
        assert "exempt_loopback(os.environ)" in ast.unparse(body), name
