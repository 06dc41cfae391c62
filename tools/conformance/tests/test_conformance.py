"""The checks against our server, which must pass them, with faults, which they must find, and against a broken one."""

import ast
import json
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import syntax_trees
from conformance_faults import FAULTS
from openai_served import VOCAB_SIZE, toy_model
from safetensors.numpy import save_file
from typer.testing import CliRunner

import tinsmith_conformance
from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_conformance import plugin, tester
from tinsmith_conformance.checks import CHECKS
from tinsmith_conformance.command import main, run
from tinsmith_conformance.registry import Check, selected
from tinsmith_conformance.runner import Runner
from tinsmith_conformance.tester import Model, Target
from tinsmith_conformance.verdicts import Outcome, Verdict

PACKAGE = Path(tinsmith_conformance.__file__).parent
SHORT = ("wire/1", "ordering/3", "idempotency/3", "poisoned/3", "losses/2", "losses/24", "resume/2", "rest/8")
FAST_FAULTS = (
    "gradients replace each other",
    "sequence ids are left out",
    "an ended session may beat",
    "recorded sequences are anybody's",
    "anybody deletes a key",
)
FAULT_LIMIT_S = 60.0
HIDDEN_SIZE = 16  # of the toy model
BY_TITLE = {check.title: check for check in CHECKS}

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the SDK


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It has all that a check may need.

    A tokenizer, for the endpoints of OpenAI's API; the shapes of its layers, for uploads; a loss for
    `stable_reinforce`; and configured keys, without which no others can be made.
    """
    directory, losses = tmp_path_factory.mktemp("toy"), {"stable_reinforce": "ppo"}
    model = toy_model(directory / "model")
    shapes = {
        "model.embed_tokens": (VOCAB_SIZE, HIDDEN_SIZE),
        "model.layers.0.self_attn.q_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "model.layers.0.mlp.up_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "lm_head": (VOCAB_SIZE, HIDDEN_SIZE),
    }
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, directory / "model/model.safetensors")
    keys = [{"key": f"tml-conformance-{name}", "tenant": name} for name in ("a", "b")]
    with running_server(directory, models=[model], losses=losses, server={"api_keys": keys}) as server:
        yield server


def target(url: str) -> Target:
    return Target(url=url, model="toy", key="tml-conformance-a", other_key="tml-conformance-b")


def test_every_check_can_be_named_and_says_what_its_failure_means() -> None:
    assert len({check.name for check in CHECKS}) == len({check.title for check in CHECKS}) == len(CHECKS)
    assert all(check.meaning.endswith(".") and "{case}" not in check.title + check.meaning for check in CHECKS)


def test_our_server_passes(toy: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole, as the command: the table, the JSON and the exit code."""
    names = {*SHORT, *(BY_TITLE[FAULTS[name].check].name for name in FAST_FAULTS)}
    only = [part for name in names for part in ("--only", name)]
    with pytest.raises(SystemExit) as ended:
        main(["--url", toy.url, "--model", "toy", "--json", str(tmp_path / "card.json"), *only])
    shown = capsys.readouterr().out
    assert ended.value.code == 0, shown
    assert f"{len(names)} of {len(names)} checks" in shown
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["total"] == {"passed": len(names), "failed": 0, "skipped": 0}
    assert [each["check"] for each in card["checks"]] == [check.name for check in selected(CHECKS, list(names))]


def missed(url: str, faults: Sequence[str]) -> dict[str, Outcome]:
    """Return the faults whose check does not fail. Each is planted only while its check runs."""
    checks = [BY_TITLE[FAULTS[name].check] for name in faults]
    outcomes = Runner(target(url), FAULT_LIMIT_S).outcomes(checks)
    found = {}
    for name in faults:
        with FAULTS[name].planted():
            _, found[name] = next(outcomes)
    outcomes.close()
    return {name: outcome for name, outcome in found.items() if outcome.verdict is not Verdict.FAILED}


def test_faults_are_found(toy: RunningServer) -> None:
    """Their checks pass without them: see the first test."""
    assert missed(toy.url, FAST_FAULTS) == {}


def test_every_fault_can_be_planted() -> None:
    """So that whoever changes a line that a fault is planted in, or a title, learns it here, not from the long test."""
    for fault in FAULTS.values():
        assert fault.check in BY_TITLE
        with fault.planted():
            pass


@pytest.mark.thorough
def test_every_fault_is_found(toy: RunningServer) -> None:
    assert len(FAULTS) >= 40
    assert missed(toy.url, list(FAULTS)) == {}


@pytest.mark.thorough
def test_our_server_passes_every_check(toy: RunningServer) -> None:
    wrong = {
        check.name: outcome.detail
        for check, outcome in Runner(target(toy.url)).outcomes(CHECKS)
        if outcome.verdict is not Verdict.PASSED and "Images" not in check.title
    }
    assert wrong == {}


class _Broken(BaseHTTPRequestHandler):
    """Answers with something else, and healthz never."""

    released = threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith("healthz"):
            self.released.wait()
            return
        self.do_POST()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "7")
        self.end_headers()
        self.wfile.write(b"rubbish")

    def log_message(self, *_: object) -> None:
        pass


def test_a_broken_server_fails_its_checks_and_the_run_goes_on() -> None:
    checks = selected(CHECKS, ("wire/1", "wire/7", "wire/8"))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        runner = Runner(target(f"http://127.0.0.1:{server.server_port}"), limit_s=5)
        outcomes = {check.name: outcome for check, outcome in runner.outcomes(checks)}
        _Broken.released.set()
        server.shutdown()
    assert [each.verdict for each in outcomes.values()] == [Verdict.FAILED] * 3
    assert "not JSON" in outcomes["wire/1"].detail
    assert outcomes["wire/7"].detail == "no end after 5 s"
    assert "not JSON" in outcomes["wire/8"].detail


class _WithoutEnds(_Broken):
    """Has no call that ends a session."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append(self.path.rpartition("/")[2])
        self.send_response(404 if self.path.endswith("/finish") else 200)
        self.send_header("content-length", "19")
        self.end_headers()
        self.wfile.write(b'{"session_id": "s"}')


def test_models_are_unloaded_where_sessions_do_not_end() -> None:
    """They would fill a server that has few places."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _WithoutEnds) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tester.Tester(target(f"http://127.0.0.1:{server.server_port}")) as opened:
            Model(opened, f"{opened.session}:train:0")
        server.shutdown()
    assert _WithoutEnds.asked == ["create_session", "finish", "unload_model"]


def test_an_interrupted_run_shows_what_was_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Runner, checks: list[Check]) -> Iterator[tuple[Check, Outcome]]:
        yield checks[0], Outcome(verdict=Verdict.PASSED, detail="", seconds=0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "outcomes", interrupted)
    file = tmp_path / "card.json"
    options = {"url": "http://x", "model": "x", "key": "tml-a", "other_key": "tml-b", "json": file, "limit": 1.0}
    assert run(Namespace(**options, only=[], list=False)) == 130
    assert f"1 of {len(CHECKS)} checks" in capsys.readouterr().out
    assert json.loads(file.read_text())["total"]["passed"] == 1


def test_only_names_checks_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--url", "http://x", "--model", "x", "--only", "wire/9999"])
    assert ended.value.code == 2
    assert "no check or group is called 'wire/9999'" in capsys.readouterr().out


def test_nothing_imports_tinsmith() -> None:
    for source in PACKAGE.rglob("*.py"):
        for node in ast.walk(syntax_trees.tree_of(source)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not [each for each in names if each.split(".")[0] == "tinsmith"], source


def test_tinsmith_offers_the_command() -> None:
    plugins = Plugins.load([plugin])
    shown = CliRunner().invoke(build_group(plugins), ["conformance", "--list"], obj=plugins, env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "wire/1" in shown.stdout
