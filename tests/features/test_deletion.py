"""Each feature of the core is a folder that can be deleted: what remains works, as if it had never been there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tinsmith

ROOT = Path(__file__).parents[2]
FEATURES = sorted(each.parent.name for each in (ROOT / "core/tinsmith/features").glob("*/plugin.py"))
SHORT = ("tests/unit/test_housekeeping.py",)
CORE = ("tests/unit", "tests/contract", "tests/e2e")
OF_THE_WHOLE_TREE = ("test_docs", "test_public_api", "test_private_names")
"""Tests of files: documentation and lists name features."""


@pytest.fixture(params=["all of them", *(pytest.param(each, marks=pytest.mark.thorough) for each in FEATURES)])
def without(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a core without some features."""
    copy = tmp_path / "core" / "tinsmith"
    shutil.copytree(Path(tinsmith.__file__ or "").parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FEATURES if request.param == "all of them" else [request.param]:
        shutil.rmtree(copy / "features" / name)
    return {**os.environ, "PYTHONPATH": str(copy.parent)}


def run(environment: dict[str, str], cwd: Path, *command: str) -> str:
    """Return what a module of Python says in the core without features."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_core_works_without_a_feature(without: dict[str, str]) -> None:
    listed = run(without, ROOT, "tinsmith", "plugins")
    assert any(name not in listed for name in FEATURES)
    told = run(without, ROOT, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *SHORT)
    assert " passed" in told


@pytest.mark.thorough
def test_all_suites_of_the_core_and_the_demo_pass_without_a_feature(without: dict[str, str], tmp_path: Path) -> None:
    ignored = [f"--ignore-glob=*/{name}.py" for name in OF_THE_WHOLE_TREE]
    marks = ("-m", "not thorough and not crash and not malice")
    told = run(without, ROOT, "pytest", "-q", "-p", "no:cacheprovider", *marks, *ignored, *CORE)
    assert " passed" in told
    run(without, tmp_path, "tinsmith", "demo")
