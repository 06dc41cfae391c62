"""Models by their names on the hub: in the cache, or downloaded from a stand-in over HTTP; and what can go wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, run
from processes import Launcher
from stand_in_hub import TOKEN, StandInHub

from tinsmith_checkpoints.huggingface.hub_cache import HubReference, cache_directory, is_offline
from tinsmith_checkpoints.huggingface.safetensors_files import ShardWriter, StoredTensors
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

pytestmark = pytest.mark.slow  # each download is a process of its own

TINY = HubReference("maker/tiny")
WHOLE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "tiny"
    write_tiny_model(directory, TinyShape(num_layers=1, hidden_size=32, intermediate_size=64))
    return directory


@pytest.fixture(scope="module")
def sharded(tiny: Path) -> Path:
    """The same model in several files."""
    directory = tiny.with_name("sharded")
    directory.mkdir()
    for file in tiny.glob("*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = StoredTensors.of(tiny, "model")
    with ShardWriter(directory, "model", list(tensors), shard_bytes=30_000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return directory


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with StandInHub.running() as hub:
        yield hub


@pytest.fixture
def environment(hub: StandInHub, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}


DOWNLOAD = """
import json, logging, sys
from tinsmith.errors import TinsmithError
from tinsmith_checkpoints.huggingface.hub_cache import HubReference, cached_model
from tinsmith_checkpoints.huggingface.hub_download import download_model
logging.basicConfig(level="INFO")
reference, stages = HubReference.parse(sys.argv[1]), []
try:
    directory = download_model(reference, lambda *stage: stages.append(stage))
except TinsmithError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error), "stages": stages}))
else:
    print(json.dumps({"directory": str(directory), "cached": str(cached_model(reference)), "stages": stages}))
"""


def start(launcher: Launcher, environment: dict[str, str], reference: str) -> Forked:
    """Download in a process of its own: the library reads its environment once."""
    return Forked(launcher, "-c", DOWNLOAD, reference, environ=environment)


def download(launcher: Launcher, environment: dict[str, str], reference: str = "maker/tiny") -> dict[str, Any]:
    done = run(launcher, "-c", DOWNLOAD, reference, environ=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def downloaded(launcher: Launcher, environment: dict[str, str], reference: str = "maker/tiny") -> Path:
    done = download(launcher, environment, reference)
    assert done.get("directory") == done.get("cached"), done
    return Path(done["directory"])


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def test_what_a_model_needs_is_downloaded_and_nothing_else(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    (published / "original").mkdir(parents=True)
    for file in tiny.iterdir():
        (published / file.name).write_bytes(file.read_bytes())
    (published / "additional_chat_templates").mkdir()
    (published / TEMPLATE).write_text("{{ tools }}")
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", "original/params.json", "run.py", "README.md"):
        (published / name).write_bytes(b"not wanted")
    (published / "consolidated.safetensors").write_bytes(b"not wanted")
    hub.add("maker/tiny", published)
    done = download(launcher, environment)
    assert "directory" in done, done
    directory = Path(done["directory"])
    assert set(hub.sent) == {*WHOLE, TEMPLATE}
    assert names(directory) == {*WHOLE, "additional_chat_templates"}
    assert (directory / TEMPLATE).read_text() == "{{ tools }}"
    assert done["cached"] == str(directory)
    assert directory.is_relative_to(tmp_path / "home" / "hub")
    assert (directory / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert [f"asking {hub.url} for maker/tiny", None] in done["stages"]


def test_a_revision_is_a_branch_or_a_commit(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tiny: Path
) -> None:
    commit = hub.add("maker/tiny", tiny).revisions["main"]
    hub.repositories["maker/tiny"].revisions["refs/pr/1"] = commit
    for revision in ("refs/pr/1", commit):
        assert downloaded(launcher, environment, f"maker/tiny@{revision}").name == commit
    assert download(launcher, environment, "maker/tiny@v2")["message"].startswith(
        "the model 'maker/tiny' has no revision 'v2'"
    )


def test_shards_are_those_that_the_index_names(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], sharded: Path
) -> None:
    hub.add("maker/tiny", sharded).files["model-00001-of-00099.safetensors"] = b"of an older version"
    assert names(downloaded(launcher, environment)) == names(sharded)
    assert len([file for file in hub.sent if file.endswith(".safetensors")]) > 2


def test_a_broken_connection_goes_on_where_it_was(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tmp_path: Path
) -> None:
    """The library writes what it has every 10 MiB."""
    large = tmp_path / "large"
    write_tiny_model(large, TinyShape(num_layers=1, hidden_size=512, intermediate_size=2048))
    hub.add("maker/tiny", large)
    hub.cut_after, hub.cuts = 11 << 20, 1
    weights = downloaded(launcher, environment) / "model.safetensors"
    assert weights.read_bytes() == (large / "model.safetensors").read_bytes()
    assert hub.sent.count("model.safetensors") == 2
    assert hub.ranges == [f"bytes={10 << 20}-"]


def test_a_killed_download_goes_on_with_what_is_missing(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], sharded: Path, tmp_path: Path
) -> None:
    hub.add("maker/tiny", sharded)
    *first, last = sorted(file.name for file in sharded.glob("*.safetensors"))
    hub.hold = last
    with start(launcher, environment, "maker/tiny") as process:
        assert hub.held.wait(300)
        snapshots = tmp_path / "home" / "hub" / "models--maker--tiny" / "snapshots"
        while not all(list(snapshots.glob(f"*/{file}")) for file in first):
            assert process.poll() is None
        process.kill()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert download(launcher, offline)["error"] == "ConfigError"  # it is not taken for whole
    hub.hold = None
    hub.release.set()
    hub.sent.clear()
    assert names(downloaded(launcher, environment)) == names(sharded)
    assert hub.sent == [last]
    assert not list((tmp_path / "home").rglob("*.incomplete"))


def test_two_processes_download_each_file_once(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tiny: Path
) -> None:
    hub.add("maker/tiny", tiny)
    hub.hold = "model.safetensors"
    with start(launcher, environment, "maker/tiny") as first:
        assert hub.held.wait(300)
        before = hub.num_requests
        with start(launcher, environment, "maker/tiny") as second:
            while hub.num_requests < before + 3 and second.poll() is None:  # it has come to the weights
                pass
            hub.release.set()
            assert second.wait(300) == first.wait(300) == 0
    assert hub.sent.count("model.safetensors") == 1


@pytest.mark.parametrize(
    ("properties", "token", "said"),
    [
        ({"gated": True}, None, "is gated: ask for access at"),
        ({"private": True}, None, "neither a local directory nor a model visible on"),
        ({}, "hf_wrong", "refuses the token"),
    ],
)
def test_without_the_right_token_the_remedy_is_named(
    launcher: Launcher,
    hub: StandInHub,
    environment: dict[str, str],
    tiny: Path,
    properties: dict[str, bool],
    token: str | None,
    said: str,
) -> None:
    hub.add("maker/tiny", tiny, **properties)
    found = download(launcher, {**environment, **({"HF_TOKEN": token} if token else {})})
    assert found["error"] == "ConfigError"
    assert said in found["message"]
    assert "HF_TOKEN" in found["message"]
    assert names(downloaded(launcher, {**environment, "HF_TOKEN": TOKEN})) == WHOLE


def test_a_name_that_does_not_exist(launcher: Launcher, hub: StandInHub, environment: dict[str, str]) -> None:
    found = download(launcher, environment, "maker/tyni")
    assert found["error"] == "ConfigError"
    assert f"'maker/tyni' is neither a local directory nor a model visible on {hub.url}" in found["message"]


def test_a_model_without_safetensors(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "pytorch_model.bin").write_bytes(b"pickle")
    hub.add("maker/tiny", published)
    assert "its repository has no config.json" in download(launcher, environment)["message"]
    (published / "config.json").write_text("{}")
    hub.add("maker/tiny", published)
    assert "reads safetensors only" in download(launcher, environment)["message"]
    assert "pytorch_model.bin" not in hub.sent


def test_a_hub_that_cannot_be_reached_may_be_tried_again(launcher: Launcher, environment: dict[str, str]) -> None:
    found = download(launcher, {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert found["error"] == "ServerError"
    assert "from http://127.0.0.1:9 was interrupted" in found["message"]
    assert "check the network and HF_ENDPOINT" in found["message"]


@pytest.mark.parametrize("endpoint", ["{}/no-such-mirror", "mirror.example"])
def test_a_mirror_that_will_never_answer_is_not_asked_again(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], endpoint: str
) -> None:
    """It answers 404 without a reason, as a web server does that is no hub, or it is no URL."""
    found = download(launcher, {**environment, "HF_ENDPOINT": endpoint.format(hub.url)})
    assert found["error"] == "ConfigError"
    told = "no-such-mirror answers 404 to a request for 'maker/tiny'" if "{}" in endpoint else "is not a URL"
    assert told in found["message"]
    assert "HF_ENDPOINT" in found["message"]


def test_offline(launcher: Launcher, hub: StandInHub, environment: dict[str, str]) -> None:
    found = download(launcher, {**environment, "HF_HUB_OFFLINE": "1"})
    assert found["error"] == "ConfigError"
    assert "HF_HUB_OFFLINE forbids downloading it" in found["message"]
    assert hub.num_requests == 0


def test_a_model_that_does_not_fit_on_the_disk(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("maker/tiny", tiny)
    code = f"import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(9, 9, 9)\n{DOWNLOAD}"
    monkeypatch.setitem(globals(), "DOWNLOAD", code)
    found = download(launcher, environment)
    assert found["error"] == "ConfigError"
    assert "no space for 'maker/tiny'" in found["message"]
    assert "set HF_HOME to a directory on a larger disk" in found["message"]
    assert "model.safetensors" not in hub.sent


def test_references() -> None:
    assert HubReference.parse("Qwen/Qwen3-0.6B") == HubReference("Qwen/Qwen3-0.6B", "main")
    assert HubReference.parse("gpt2@v1/x") == HubReference("gpt2", "v1/x")
    for text in ("", "/models/x", "./x", "~/x", "a/b/c", "a//b", "a--b", "../x", "a b", "models/"):
        assert HubReference.parse(text) is None, text


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "/somewhere"},
        {"HF_HUB_CACHE": "~/cache", "HF_HOME": "/somewhere"},
        {"HUGGINGFACE_HUB_CACHE": "/old"},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HUB_OFFLINE": "yes"},
        {"TRANSFORMERS_OFFLINE": "1"},
        {"HF_HUB_OFFLINE": "0"},
    ],
)
def test_the_environment_means_what_it_means_to_the_library(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE)"
    said = subprocess.check_output([sys.executable, "-c", code], env=dict(os.environ), text=True).split()
    assert said == [str(cache_directory()), str(is_offline())]
