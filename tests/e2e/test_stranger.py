"""A stranger's path: write a plugin, build it, install it into a clean environment, select it by configuration, train.

Beside the new plugin stands an old one, from a wheel of the tutorial as it was before the core was arranged in rooms.

Nothing is downloaded: what the core depends on is linked from this environment into the clean one, distribution by
distribution, so that neither the clone nor anything else that is installed here can be seen from there.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).with_name("built_before_the_rooms")
TUTORIAL = (ROOT / "docs" / "tutorial" / "first-backend.md").read_text()
LIMIT_S = 600
MODELS = ("fresh", "bigram")
CONFIG = """\
server: {port: 0, data_dir: data}
models:
  - name: fresh
    backend: {plugin: fresh, vocab_size: 48}
  - name: bigram
    backend: {plugin: bigram}
"""


class Environment:
    """A virtual environment and an empty folder, in which a stranger works."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.home.mkdir()
        self._bin = directory / "venv" / "bin"
        self._run([sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")])  # pip is linked, too
        self._link_dependencies(directory / "dependencies")

    def run(self, program: str, *arguments: str, cwd: Path | None = None, code: int = 0) -> str:
        """Return stdout and stderr."""
        return self._run([str(self._bin / program), *arguments], cwd=cwd, code=code)

    def start(self, program: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [str(self._bin / program), *arguments]
        return subprocess.Popen(command, cwd=self.home, env=self._variables(), stderr=subprocess.PIPE, text=True)

    def _run(self, command: list[str], *, cwd: Path | None = None, code: int = 0) -> str:
        done = subprocess.run(
            command,
            cwd=cwd or self.home,
            env=self._variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    @staticmethod
    def _variables() -> dict[str, str]:
        ours = ("TINSMITH_", "PYTHON", "PIP_", "PYTEST_", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def _link_dependencies(self, links: Path) -> None:
        links.mkdir()
        for each in closure("tinsmith[testing,examples]", "hatchling", "pip"):
            for top in sorted({file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}):
                if not (links / top).exists():
                    (links / top).symlink_to(str(each.locate_file(top)))
        site = "import sysconfig; print(sysconfig.get_path('purelib'))"
        (Path(self.run("python", "-c", site).strip()) / "dependencies.pth").write_text(f"{links}\n")


def closure(*wanted: str) -> list[Distribution]:
    """Return all that the wanted requirements come to, but for the core itself."""
    found: dict[str, Distribution] = {}
    todo, seen = [Requirement(each) for each in wanted], set[tuple[str, frozenset[str]]]()
    while todo:
        each = todo.pop()
        key = (each.name.lower(), frozenset(each.extras))
        if key in seen:
            continue
        seen.add(key)
        found[each.name.lower()] = installed = distribution(each.name)
        for requirement in map(Requirement, installed.requires or ()):
            extras = each.extras or {""}
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(requirement)
    del found["tinsmith"]
    return list(found.values())


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the core in it, from its wheel, and a stranger's plugins."""
    environment = Environment(tmp_path_factory.mktemp("stranger"))
    install = ("-m", "pip", "install", "--quiet", "--no-build-isolation")  # builds a wheel of each source first
    environment.run("python", *install, str(ROOT))
    environment.run("tinsmith", "new-plugin", "fresh", "--kind", "backend")
    environment.run("python", *install, "./tinsmith-fresh", str(shutil.copytree(OLD, environment.home / "old")))
    return environment


@pytest.fixture
def server(environment: Environment) -> Iterator[str]:
    """A model of each plugin, chosen by configuration alone: the URL."""
    (environment.home / "tinsmith.yaml").write_text(CONFIG)
    process = environment.start("tinsmith", "serve", "--config", "tinsmith.yaml")
    assert process.stderr is not None
    told: list[str] = []
    try:
        for line in process.stderr:
            told.append(line)
            if line.startswith("failed") or {"ready fresh", "ready bigram"} <= {
                " ".join(each.split()[:2]) for each in told
            }:
                break
        assert not told[-1].startswith("failed"), "".join(told)
        [url] = [line.split()[1] for line in told if line.startswith("url")]
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        process.stderr.close()
        assert process.wait(300) == 0


def test_nothing_of_the_clone_is_seen(environment: Environment) -> None:
    where = environment.run("python", "-c", "import tinsmith, tinsmith_fresh; print(tinsmith.__file__)")
    assert str(ROOT) not in where
    assert "site-packages" in where
    listed = environment.run("tinsmith", "plugins")
    assert "backend fresh" in listed
    assert "backend bigram" in listed
    assert "jax" not in listed


@pytest.mark.thorough  # contract/test_new_plugins.py runs the suites of new plugins
def test_its_suites_are_green(environment: Environment) -> None:
    told = environment.run("tinsmith", "check-plugin", "fresh")
    assert ", 0 failed" in told
    assert "of tinsmith-fresh 0.1.0, built for version 1 of the plugin contract" in told
    own = environment.run("python", "-m", "pytest", "-q", cwd=environment.home / "tinsmith-fresh")
    assert " passed" in own
    assert "failed" not in own


def test_the_sdk_trains_them(environment: Environment, server: str) -> None:
    """With the script of the tutorial, which ends in an error if a model learns nothing."""
    [script] = re.findall(r"<!-- file: train.py -->\n```python\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE)
    assert 'base_model="bigram"' in script
    for model in MODELS:
        (environment.home / f"{model}.py").write_text(script.replace('base_model="bigram"', f'base_model="{model}"'))
    # in one process, because it takes longer to import the SDK than to train
    both = "import runpy; " + "; ".join(f"runpy.run_path('{model}.py')" for model in MODELS)
    losses = environment.run("python", "-c", both, server).split()
    assert len(losses) == 20 * len(MODELS)
