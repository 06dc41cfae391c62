"""What `tinsmith new-plugin` writes passes its suite as written; `tinsmith check-plugin` finds what is broken in it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from processes import Launcher

from tinsmith.authoring.new_plugin import PluginKind, write_plugin
from tinsmith.errors import UserError
from tinsmith.plugins.loading import Plugins

Check = Callable[..., tuple[int, Any]]


def run(
    launcher: Launcher, module: str, *arguments: str, cwd: Path, path: list[Path] | None = None
) -> "subprocess.CompletedProcess[str]":
    ours = ("TINSMITH_", "PYTEST_", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    variables["PYTEST_ADDOPTS"] = "-p no:schemathesis"  # it takes long to import, and no suite uses it
    variables["PYTHONPATH"] = os.pathsep.join(str(each) for each in path or ())
    return forked.run(launcher, "-m", module, *arguments, environ=variables, cwd=cwd)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        *((kind, "") for kind in PluginKind if kind not in {PluginKind.LOSS, PluginKind.STORE}),
        (PluginKind.LOSS, "not torch"),  # torch takes longer to import than the suite
        (PluginKind.STORE, "session"),  # each test of a store makes a database
        *(pytest.param(kind, "", marks=pytest.mark.thorough) for kind in (PluginKind.LOSS, PluginKind.STORE)),
    ],
)
def test_a_new_plugin_passes_its_suite(launcher: Launcher, kind: PluginKind, chosen: str, tmp_path: Path) -> None:
    root = write_plugin("on-trial", kind, tmp_path / "it", installed=())
    for text in (path.read_text() for path in root.rglob("*") if path.is_file()):
        assert "skeleton" not in text.lower()
    forked_with = "ignore:Module already imported"  # the launcher has imported anyio, which is a plugin of pytest, too
    strict = ("-p", "no:cacheprovider", "-W", "error", "-W", forked_with, "-k", chosen)
    done = run(launcher, "pytest", "-q", *strict, cwd=root)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    test_file = (root / "tests" / "test_contract.py").read_text()
    _, _, suite = test_file.partition("\n\n\n")
    assert len(suite.splitlines()) <= 10


@pytest.fixture
def check(launcher: Launcher, tmp_path: Path) -> Check:
    """Install plugins where only a process of ours sees them, and check the first."""

    def check_one(*sources: tuple[str, PluginKind, list[tuple[str, str]]], options: tuple[str, ...] = ()) -> Any:
        roots = []
        for name, kind, edits in sources:
            root = write_plugin(name, kind, tmp_path / name, installed=())
            module = f"tinsmith_{name.replace('-', '_')}"
            text = (root / f"{module}.py").read_text()
            for before, after in edits:
                assert before in text
                text = text.replace(before, after)
            (root / f"{module}.py").write_text(text)
            info = root / f"{module}-0.1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tinsmith-{name}\nVersion: 0.1.0\n")
            (info / "entry_points.txt").write_text(f"[tinsmith]\n{name} = {module}\n")
            roots.append(root)
        done = run(launcher, "tinsmith", "check-plugin", sources[0][0], *options, cwd=tmp_path, path=roots)
        told = json.loads(done.stdout) if "--json" in options and done.stdout else done.stdout + done.stderr
        return done.returncode, told

    return check_one


def outcomes(offer: dict[str, Any], outcome: str) -> set[str]:
    return {each["area"] for each in offer["tests"] if each["outcome"] == outcome}


def test_a_fault_is_found_in_its_part_of_the_contract(check: Check) -> None:
    without_decay = ("adam.learning_rate * adam.weight_decay", "0.0")
    options = ("--option", "hidden_size=8", "--json")
    code, (offer,) = check(("faulty", PluginKind.BACKEND, [without_decay]), options=options)
    assert code == 1
    assert offer["capabilities"]["trainer"]["max_lora_rank"] == 8, "the option has reached the plugin"
    assert outcomes(offer, "failed") == {"optimizer"}
    assert {"numerics", "adapter", "state", "isolation", "checkpoint"} <= outcomes(offer, "passed")
    reasons = {each["reason"] for each in offer["tests"] if each["outcome"] == "skipped"}
    assert "the backend's capabilities do not claim the LoRA target 'attn'" in reasons
    assert "it trains, and does not sample" in reasons
    assert {each["outcome"] for each in offer["tests"] if each["area"] == "full fine-tuning"} == {"skipped"}
    assert offer["capabilities"]["trainer"]["isolation"] == "bitwise"
    assert offer["isolation_difference"] == 0
    assert {row["group"] for row in offer["abuse"]} >= {"training: steps", "training: random"}
    assert all(row["cases"] > 0 and row["deaths"] == row["changes to neighbours"] == 0 for row in offer["abuse"])


def test_the_difference_that_company_makes_is_measured(check: Check) -> None:
    """Where bitwise isolation is not claimed the suite allows a difference, and the report says how large it is."""
    method = "    _company = 0.0\n\n    def _noted(self, ops):\n        self._company = 1e-8 * (len(ops) - 1)\n"
    method += "        return ops\n\n    @np.errstate"
    edits = [
        ('isolation="bitwise"', 'isolation="close", isolation_error=1e-3'),
        ("backward=True) for op in ops]", "backward=True) for op in self._noted(ops)]"),
        ("    @np.errstate", method),
        ("self._embedding_VH[datum.tokens_T]", "self._embedding_VH[datum.tokens_T] * (1 + self._company)"),
    ]
    code, told = check(("close", PluginKind.BACKEND, edits))
    assert code == 0, told
    _, _, measured = told.partition("close claimed; measured logprobs alone and in company differ by at most ")
    assert 0 < float(measured.split()[0]) < 1e-3


def test_trainer_and_sampler_are_held_together(check: Check) -> None:
    trainer = ("its-trainer", PluginKind.BACKEND, list[tuple[str, str]]())
    sampler = ("its-sampler", PluginKind.SAMPLER, list[tuple[str, str]]())
    code, (offer,) = check(sampler, trainer, options=("--trainer", "its-trainer", "--json"))
    assert code == 0
    assert {"consistency", "snapshots", "drawing", "logprobs"} <= outcomes(offer, "passed")


def test_a_sampler_is_held_together_with_the_trainer_of_its_plugin(check: Check) -> None:
    hook = "@tinsmith.hookimpl\ndef tinsmith_register_samplers"
    edits = [(hook, "from tinsmith_its_trainer import tinsmith_register_backends\n\n\n" + hook)]
    trainer = ("its-trainer", PluginKind.BACKEND, list[tuple[str, str]]())
    code, offers = check(("both", PluginKind.SAMPLER, edits), trainer, options=("--json",))
    assert code == 0
    assert [(offer["kind"], offer["name"]) for offer in offers] == [("backend", "its-trainer"), ("sampler", "both")]
    assert {"consistency", "snapshots"} <= outcomes(offers[1], "passed")


def test_a_plugin_that_cannot_be_made_fails_every_test_and_says_why(check: Check) -> None:
    edits = [("        del context\n", "        raise RuntimeError('no device')\n")]
    code, told = check(("unmade", PluginKind.SAMPLER, edits))
    assert code == 1
    assert "RuntimeError: no device" in told


@pytest.mark.parametrize("name", ["", "1st", "Upper", "two words", "a--b", "a-", "class", "x" * 41, "a.b", "../a"])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be the name of a plugin"):
        write_plugin(name, PluginKind.LOSS, tmp_path / "it", installed=())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "kind"), [("toy", "backend"), ("fair", "scheduler"), ("ppo", "loss"), ("sql", "store")]
)
def test_a_name_that_is_taken_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"'{name}' is taken: tinsmith .* offers the {kind} {name}; choose another"):
        write_plugin(name, PluginKind(kind), tmp_path / "it", installed=Plugins.load().report())


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    for directory in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UserError, match=r"exists already; choose another directory with --directory"):
            write_plugin("fine", PluginKind.LOSS, directory, installed=())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "precious"
