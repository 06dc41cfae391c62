"""What `make dist` builds, used as somebody would who has no clone; and the commands that the pages tell to type."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment, Environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[a-z]*/*/README.md")})
INSTALLS = re.compile(r"(?:^|[`\s/])(?:uv )?pip install ([^`\n#&)]+)")
OURS = re.compile(r"tinsmith|^\.|\s\.")
NAME = re.compile(r'^name = "(.+)"', re.MULTILINE)
NEWEST_PYTHON = "python3.13"
DATA = ("--data-dir", "data")  # not in the home directory: what is there is not ours

URL = "https://example.org/team/tinsmith"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("made") / "dist"
    command = [sys.executable, str(ROOT / "deploy" / "make_dist.py"), "--into", str(into), "--url", URL]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return into


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """With the core, the JAX backend and what the demo needs, installed by the documented command."""
    environment = CleanEnvironment(tmp_path_factory.mktemp("clean"), "tinsmith[examples]", "tinsmith-jax")
    environment.run("python", "-m", "pip", "install", "--quiet", "--find-links", str(dist), "tinsmith[jax,examples]")
    return environment


def descriptions(dist: Path) -> dict[str, Message]:
    """Return the metadata of each wheel, by name."""
    found = {}
    for wheel in dist.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            [name] = [each for each in files.namelist() if each.endswith(".dist-info/METADATA")]
            message = message_from_bytes(files.read(name))
            assert any(each.endswith("licenses/LICENSE") for each in files.namelist()), wheel
        found[canonicalize_name(str(message["Name"]))] = message
    return found


def targets(message: Message) -> list[str]:
    return re.findall(r"\]\(([^)#\s]+)", str(message.get_payload()))


def test_every_wheel_can_be_shown_by_an_index(dist: Path) -> None:
    """With its licence, classifiers, and a description whose links lead somewhere."""
    wheels = descriptions(dist)
    assert len(wheels) == 1 + len(list(ROOT.glob("*/*/pyproject.toml")))  # the core beside them
    for name, message in wheels.items():
        assert [each for each in targets(message) if not each.startswith(("https://", "http://"))] == [], name
        assert message["License-Expression"] == "Apache-2.0"
        assert message.get_all("Classifier"), name
    inside = [each for message in wheels.values() for each in targets(message) if each.startswith(URL)]
    assert len(inside) > 30
    assert [each for each in inside if not (ROOT / each.split("/", 7)[7]).exists()] == []


def test_the_source_of_the_core_has_its_constraints_and_no_readme_of_others(dist: Path) -> None:
    (file,) = dist.glob("tinsmith-[0-9]*.tar.gz")
    with tarfile.open(file) as archive:
        names = [Path(*Path(each).parts[1:]) for each in archive.getnames()]
    own = {"core", "examples", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "PKG-INFO"}
    assert {each.parts[0] for each in names if each.parts} - {".gitignore"} == own
    assert [each for each in names if each.name == "README.md"] == [Path("README.md")]


def documented() -> list[tuple[str, list[str]]]:
    """Return page and requirements of every `pip install` of tinsmith that a page tells to type."""
    found = [
        (page, command) for page in PAGES for command in INSTALLS.findall(page.read_text()) if OURS.search(command)
    ]
    return [(page.relative_to(ROOT).as_posix(), shlex.split(command)) for page, command in found]


def test_every_documented_command_can_be_resolved(dist: Path) -> None:
    """Each distribution that is named is in the clone, or among the wheels, and has the extras that are asked for."""
    wheels, commands = descriptions(dist), documented()
    assert len(commands) > 15
    for page, words in commands:
        for word in words:
            place, _, rest = word.partition("[")
            if place.startswith("."):  # of the clone; in the tutorial, the reader's own package
                name = NAME.findall((ROOT / place / "pyproject.toml").read_text())[0]
            elif place.startswith("tinsmith"):
                assert "--find-links" in words, f"{page}: no index has {word}; install from the clone or from wheels"
                name = place
            else:
                continue
            extras = set(rest.rstrip("]").split(",")) - {""}
            offered = set(wheels[name].get_all("Provides-Extra") or [])
            assert extras <= offered or page == "docs/how-to/write-a-loss.md", f"{page}: {word}; offered: {offered}"


def test_a_documented_command_of_the_clone_names_all_of_ours_that_it_needs() -> None:
    """Or pip would look for the others in an index, which has none."""
    for page, words in documented():
        places = {word.partition("[")[0] for word in words if word.startswith(".")}
        own = page.startswith("docs/tutorial/") or page == "docs/how-to/write-a-loss.md"  # the reader's package
        if "." in places and not own:
            projects = [tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"] for place in places]
            needed = {Requirement(each).name for project in projects for each in project["dependencies"]}
            missing = {name for name in needed if name.startswith("tinsmith")} - {each["name"] for each in projects}
            assert not missing, f"{page}: {' '.join(words)}"


def test_who_has_a_gpu_is_told_to_install_jax_for_it(dist: Path) -> None:
    """Without the extra, JAX computes on the CPU. README and every how-to gave that command alone."""
    assert {"cuda12", "cuda13", "tpu"} <= set(descriptions(dist)["tinsmith-jax"].get_all("Provides-Extra") or [])
    pages = {page for page, words in documented() if any(word.startswith("./plugins/jax_backend") for word in words)}
    assert {page for page in {*pages, "README.md"} if "/jax_backend[cuda13]" not in (ROOT / page).read_text()} == {
        "docs/reference/tpu.md"
    }


def test_all_of_ours_that_a_wheel_needs_is_built(dist: Path) -> None:
    wheels = descriptions(dist)
    needed = [Requirement(each).name for message in wheels.values() for each in message.get_all("Requires-Dist") or []]
    assert {each for each in needed if each.startswith("tinsmith")} <= set(wheels)


@pytest.fixture(params=["this Python", "the newest"])
def installed(request: pytest.FixtureRequest, dist: Path, tmp_path: Path) -> Environment:
    """With the core, the JAX backend and what the demo needs; for the newest Python, dependencies are downloaded."""
    if request.param == "this Python":
        here: Environment = request.getfixturevalue("environment")
        return here
    found = shutil.which(NEWEST_PYTHON)  # pyenv has a shim on the path even if it is not installed, so run it
    if found is None or subprocess.run([found, "--version"], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"{NEWEST_PYTHON} is not on the path")
    environment = Environment(tmp_path, NEWEST_PYTHON)
    install = ["-m", "pip", "install", "--quiet", "--find-links", str(dist), "-c", str(ROOT / "constraints.txt")]
    environment.run("python", *install, "tinsmith[jax,examples]")
    return environment


@pytest.mark.thorough  # test_stranger.py installs the core from a wheel
def test_the_wheels_work_without_a_clone(installed: Environment) -> None:
    imported = "import tinsmith, tinsmith_jax; print(tinsmith.__file__, tinsmith_jax.__file__)"
    assert str(ROOT) not in installed.run("python", "-c", imported)
    installed.run("tinsmith", "tiny-model", "tiny")
    assert "jax" in installed.run("tinsmith", "plugins")
    assert installed.run("tinsmith", "doctor", "tiny", *DATA).endswith("healthy\n")
    told = installed.run("tinsmith", "demo")
    assert "(right)" in told
    assert "tinsmith serve" in told
    process = installed.start("tinsmith", "serve", "--base-model", "tiny", "--port", "0", *DATA)
    assert process.stderr is not None
    with process.stderr as lines:
        assert any(line.startswith("ready") for line in lines)
        process.send_signal(signal.SIGTERM)
        lines.read()
    assert process.wait(300) == 0
