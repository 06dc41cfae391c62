"""Failpoints: nothing in production, every boundary described, and actions that do what they say."""

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import forked
import pytest
import syntax_trees
from processes import Launcher

import tinsmith
import tinsmith_workers
from tinsmith import failpoints

FULL, BROKEN = f"errno {errno.ENOSPC}", f"errno {errno.EIO}"
PACKAGES = [Path(each.__file__).parent for each in (tinsmith, tinsmith_workers)]


def marked() -> Iterator[tuple[str, str, str]]:
    """Yield module, qualified name and boundary of every function that carries the decorator, or is made with it."""
    for root, file in ((package.parent, file) for package in PACKAGES for file in package.rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        tree = syntax_trees.tree_of(file)
        scopes = [("", tree), *((f"{each.name}.", each) for each in tree.body if isinstance(each, ast.ClassDef))]
        for prefix, scope in scopes:
            for function in scope.body:
                match function:
                    case ast.Assign(
                        targets=[ast.Name(id=made)],
                        value=ast.Call(
                            func=ast.Name(id="_durable" | "_relaxed"), args=[_, ast.Constant(value=str(name))]
                        ),
                    ):
                        yield module, prefix + made, name
                for decorator in getattr(function, "decorator_list", []):
                    match decorator:
                        case ast.Call(func=ast.Name(id="durable_boundary"), args=[ast.Constant(value=str(name))]):
                            yield module, prefix + function.name, name  # type: ignore[attr-defined]


def test_every_boundary_is_marked_and_described() -> None:
    """Two methods may share one that each of them passes: claiming and claiming a suspect."""
    assert {name for _, _, name in marked()} == set(failpoints.BOUNDARIES)


def test_nothing_is_left_of_them_in_production() -> None:
    assert failpoints.VARIABLE not in os.environ

    def function() -> None: ...

    assert failpoints.durable_boundary("store.submit")(function) is function
    for module, qualified, _ in marked():
        found: object = import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
        assert not hasattr(found, "__wrapped__"), f"{module}.{qualified} is wrapped"


def test_a_name_that_is_not_described_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'store\.x' is not in failpoints.BOUNDARIES"):
        failpoints.durable_boundary("store.x")


@pytest.mark.parametrize("wrong", ["store.x.before=kill", "store.submit=kill", "store.submit.after=explode"])
def test_a_specification_that_cannot_be_read_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"no (failpoint|action)"):
        failpoints.arm(wrong)


SCRIPT = """
import asyncio, sys, time
from tinsmith.failpoints import durable_boundary

@durable_boundary("store.submit")
def submit(n):
    print("submitted", n, flush=True)

@durable_boundary("store.claim")
async def claim(n):
    print("claimed", n, flush=True)

for n in range(4):
    try:
        submit(n)
        asyncio.run(claim(n))
    except OSError as error:
        print("errno", error.errno, flush=True)
"""


def run(launcher: Launcher, specification: str) -> tuple[int, list[str]]:
    environ = {**os.environ, failpoints.VARIABLE: specification}
    done = forked.run(launcher, "-c", SCRIPT, environ=environ)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("specification", "code", "printed"),
    [
        ("store.submit.before=kill@2", -signal.SIGKILL, ["submitted 0", "claimed 0"]),
        ("store.claim.after=kill", -signal.SIGKILL, ["submitted 0", "claimed 0"]),
        (
            "store.claim.before=enospc@2-3",
            0,
            ["submitted 0", "claimed 0", *["submitted 1", FULL], *["submitted 2", FULL], "submitted 3", "claimed 3"],
        ),
        (
            "store.submit.before=eio@3+",
            0,
            ["submitted 0", "claimed 0", "submitted 1", "claimed 1", BROKEN, BROKEN],
        ),
        ("", 0, [f"{what} {n}" for n in range(4) for what in ("submitted", "claimed")]),
    ],
)
def test_actions(launcher: Launcher, specification: str, code: int, printed: list[str]) -> None:
    assert run(launcher, specification) == (code, printed)


def test_chances_repeat_with_their_seed_and_delays_delay(launcher: Launcher) -> None:
    first, second = (run(launcher, "store.submit.before=eio@p0.5:7") for _ in range(2))
    assert first == second
    assert run(launcher, "store.claim.before=delay:0.01@1+")[0] == 0


def test_what_acts_is_logged_in_a_process_that_is_started_with_the_variable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environ = {**os.environ, failpoints.VARIABLE: f"log={log};store.submit.after=eio@1+;store.claim.after=kill"}
    started = subprocess.run([sys.executable, "-c", SCRIPT], check=False, env=environ, capture_output=True, timeout=300)
    assert started.returncode == 0
    assert log.read_text().splitlines() == ["store.submit.after"] * 4
