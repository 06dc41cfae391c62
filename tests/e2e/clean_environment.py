"""Virtual environments in which neither the clone nor anything else that is installed here can be seen."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

LIMIT_S = 600


class Environment:
    """A virtual environment of the given Python with nothing in it, and an empty folder to work in."""

    def __init__(self, directory: Path, python: str, *options: str) -> None:
        self.home = directory / "home"
        self.home.mkdir()
        self._bin = directory / "venv" / "bin"
        self._run([python, "-m", "venv", *options, str(directory / "venv")])

    def run(self, program: str, *arguments: str, cwd: Path | None = None, code: int = 0) -> str:
        """Return stdout and stderr."""
        return self._run([str(self._bin / program), *arguments], cwd=cwd, code=code)

    def start(self, program: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [str(self._bin / program), *arguments]
        return subprocess.Popen(command, cwd=self.home, env=self.variables(), stderr=subprocess.PIPE, text=True)

    def _run(self, command: list[str], *, cwd: Path | None = None, code: int = 0) -> str:
        done = subprocess.run(
            command,
            cwd=cwd or self.home,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    @staticmethod
    def variables() -> dict[str, str]:
        ours = ("TINSMITH_", "PYTHON", "PIP_", "PYTEST_", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class CleanEnvironment(Environment):
    """With the dependencies of what is wanted, but without tinsmith.

    Nothing is downloaded: they are linked into it from this environment, distribution by distribution.
    """

    def __init__(self, directory: Path, *wanted: str) -> None:
        super().__init__(directory, sys.executable, "--without-pip")  # pip is linked, too
        self._link_dependencies(directory / "dependencies", wanted)

    @staticmethod
    def variables() -> dict[str, str]:
        return {**Environment.variables(), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}

    def _link_dependencies(self, links: Path, wanted: Sequence[str]) -> None:
        links.mkdir()
        for each in closure(*wanted, "hatchling", "pip"):
            for top in sorted({file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}):
                if not (links / top).exists():
                    (links / top).symlink_to(str(each.locate_file(top)))
        site = "import sysconfig; print(sysconfig.get_path('purelib'))"
        (Path(self.run("python", "-c", site).strip()) / "dependencies.pth").write_text(f"{links}\n")


def closure(*wanted: str) -> list[Distribution]:
    """Return all that the wanted requirements come to, but for what is developed here."""
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
    return [each for name, each in found.items() if not name.startswith("tinsmith")]
