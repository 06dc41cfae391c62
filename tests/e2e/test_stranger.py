"""A stranger's path: write a plugin, build and install it in a clean environment, select it by configuration, train."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment
from tutorial_pages import files_of

ROOT = Path(__file__).parents[2]
CONFIG = """\
server: {port: 0, data_dir: data}
models:
  - name: fresh
    backend: {plugin: fresh, vocab_size: 48}
    sampler: {plugin: none}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """With the core in it, from its wheel, and a stranger's plugin."""
    environment = CleanEnvironment(tmp_path_factory.mktemp("stranger"), "tinsmith[testing,examples]")
    install = ("-m", "pip", "install", "--quiet", "--no-build-isolation")  # builds a wheel of each source first
    environment.run("python", *install, str(ROOT), str(ROOT / "libraries/checkpoints"))
    environment.run("tinsmith", "new-plugin", "fresh", "--kind", "backend")
    environment.run("python", *install, "./tinsmith-fresh")
    return environment


@pytest.fixture
def server(environment: CleanEnvironment) -> Iterator[str]:
    """A model of the plugin, chosen by configuration alone: the URL."""
    (environment.home / "tinsmith.yaml").write_text(CONFIG)
    process = environment.start("tinsmith", "serve", "--config", "tinsmith.yaml")
    assert process.stderr is not None
    told: list[str] = []
    try:
        for line in process.stderr:
            told.append(line)
            if line.split()[:2] == ["ready", "fresh"] or line.startswith("failed"):
                break
        assert not told[-1].startswith("failed"), "".join(told)
        [url] = [line.split()[1] for line in told if line.startswith("url")]
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        process.stderr.close()
        assert process.wait(300) == 0


def test_nothing_of_the_clone_is_seen(environment: CleanEnvironment) -> None:
    where = environment.run("python", "-c", "import tinsmith, tinsmith_fresh; print(tinsmith.__file__)")
    assert str(ROOT) not in where
    assert "site-packages" in where
    listed = environment.run("tinsmith", "plugins")
    assert "backend fresh" in listed
    assert "jax" not in listed


@pytest.mark.thorough  # contract/test_new_plugins.py runs the suites of new plugins
def test_its_suites_are_green(environment: CleanEnvironment) -> None:
    told = environment.run("tinsmith", "check-plugin", "fresh")
    assert ", 0 failed" in told
    assert "plugin fresh of tinsmith-fresh 0.1.0" in told
    own = environment.run("python", "-m", "pytest", "-q", cwd=environment.home / "tinsmith-fresh")
    assert " passed" in own
    assert "failed" not in own


def test_the_sdk_trains_it(environment: CleanEnvironment, server: str) -> None:
    """With the script of the tutorial, which ends in an error if the model learns nothing."""
    script = files_of("first-backend")["train.py"]
    assert 'base_model="bigram"' in script
    (environment.home / "train.py").write_text(script.replace('base_model="bigram"', 'base_model="fresh"'))
    assert len(environment.run("python", "train.py", server).split()) == 20
