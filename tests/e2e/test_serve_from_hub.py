"""`tinsmith serve NAME`: a model comes from a stand-in for the hub while the server answers; then the SDK trains it."""

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tinker
import toy_of_a_directory
from forked import Forked
from processes import Launcher
from stand_in_hub import StandInHub

from tinsmith.testing.sdk_data import datum, step
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

pytestmark = pytest.mark.slow

START_S = 300
NAME = "maker/tiny"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    write_tiny_model(tmp_path / "tiny", TinyShape(num_layers=1, hidden_size=64, intermediate_size=96))
    with StandInHub.running() as hub:
        hub.add(NAME, tmp_path / "tiny")
        yield hub


@pytest.fixture
def environment(hub: StandInHub, tmp_path: Path) -> dict[str, str]:
    ours = ("TINSMITH_", "HF_", "TRANSFORMERS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    metadata = tmp_path / "site" / "tinsmith_of_a_directory-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tinsmith-of-a-directory\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(toy_of_a_directory.ENTRY_POINTS)
    path = os.pathsep.join([str(metadata.parent), str(Path(toy_of_a_directory.__file__).parent)])
    return {**kept, "PYTHONPATH": path, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}


@contextmanager
def serving(
    launcher: Launcher, tmp_path: Path, environment: dict[str, str], *arguments: str
) -> Iterator[tuple[Forked, str]]:
    """Yield the process and its URL, once it answers; stop it in order."""
    command = ("serve", *arguments, "--port", "0", "--data-dir", str(tmp_path / "data"))
    lock = tmp_path / "data" / "server.lock"
    lock.unlink(missing_ok=True)
    with (tmp_path / "log").open("ab") as log:
        process = Forked(launcher, *command, environ=environment, errors=log)
    try:
        while not lock.exists() or not json.loads(lock.read_text() or "{}").get("url"):
            assert waited(process), (tmp_path / "log").read_text()
        yield process, json.loads(lock.read_text())["url"]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 0


def waited(process: Forked) -> bool:
    """Wait a moment; return whether the process runs still."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.1)
    return process.poll() is None


def engine(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/readyz", headers={"X-API-Key": "tml-a"})) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            body = json.load(error)
    return dict(body["engines"][NAME])


def wait_for(process: Forked, url: str, state: str, detail: str = "") -> dict[str, Any]:
    while (found := engine(url))["state"] != state or not found["detail"].startswith(detail):
        assert waited(process), found
    return found


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(("--backend", "toy-of-a-directory"), id="toy"),
        pytest.param(("--backend", "jax", "--models.0.backend.warm_up", "false"), marks=pytest.mark.thorough, id="jax"),
    ],
)
def test_a_name_is_downloaded_served_and_trained(
    launcher: Launcher, hub: StandInHub, environment: dict[str, str], tmp_path: Path, backend: tuple[str, ...]
) -> None:
    arguments = (NAME, *backend)
    hub.hold = "model.safetensors"
    with serving(launcher, tmp_path, environment, *arguments) as (process, url):
        assert hub.held.wait(START_S)
        assert wait_for(process, url, "loading", "downloading")["detail"] == "downloading 0.0 of 0.3 MB"
        while "loading maker/tiny: downloading 0.0 of 0.3 MB" not in (tmp_path / "log").read_text():
            assert waited(process)  # the console follows
    assert f"from {hub.url}, to be downloaded" in " ".join((tmp_path / "log").read_text().split())

    hub.hold = None
    hub.release.set()
    hub.sent.clear()
    with serving(launcher, tmp_path, environment, *arguments) as (_, url):
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        model = client.create_lora_training_client(base_model=NAME, rank=4).result(timeout=START_S)
        first, second = (step(model, [datum()]).metrics["loss:sum"] for _ in range(2))
        assert second < first
        tokenizer = Path(model.get_info().model_data.tokenizer_id)
        assert tokenizer.is_relative_to(tmp_path / "home")
        assert (tokenizer / "tokenizer.json").exists()
        client.close("success").result(timeout=START_S)
    assert hub.sent == ["model.safetensors"]


def test_a_name_that_the_hub_does_not_know_fails_with_a_remedy(
    launcher: Launcher, environment: dict[str, str], tmp_path: Path, hub: StandInHub
) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_text("models: [{name: maker/tiny, revision: v9, backend: {plugin: toy-of-a-directory}}]")
    with serving(launcher, tmp_path, environment, "--config", str(file)) as (process, url):
        detail = wait_for(process, url, "failed")["detail"]
    reference = re.search("reference [0-9a-f]+", detail)
    assert reference is not None, detail
    log = " ".join((tmp_path / "log").read_text().split())
    told = log[log.index(f"{reference[0]}:") :]
    assert f"the model 'maker/tiny' has no revision 'v9'; see {hub.url}/maker/tiny/branches" in told
