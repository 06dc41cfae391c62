"""The same script with the newest SDK and with the oldest that is supported: the same numbers.

`make setup` installs the old one into a directory of its own; ahead on the path, it hides the new one.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tinsmith.testing.harness import RunningServer, running_server

SCENARIO = Path(__file__).with_name("sdk_scenario.py")
OLDEST = Path(sys.prefix) / "sdk-0.22.3"  # the Makefile fills it
OF_EACH_RUN = ("sdk", "run_id")

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # the calls are those that the old SDK has


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def run(arguments: list[str], *, sdk: Path, **variables: str) -> str:
    assert sdk.is_dir(), f"the old SDK is not in {sdk}; run `make setup`"
    variables["PYTHONPATH"] = str(sdk)
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def scenario(server: RunningServer, sdk: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(run([str(SCENARIO), server.url], sdk=sdk).splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def new(server: RunningServer) -> dict[str, Any]:
    """What the newest SDK sees, in this process; its run and checkpoints stay on the server."""
    seen: dict[str, Any] = runpy.run_path(str(SCENARIO))["main"](server.url)
    return seen


def test_the_oldest_sdk_sees_what_the_newest_sees(server: RunningServer, new: dict[str, Any]) -> None:
    old = scenario(server, OLDEST)
    assert (old["sdk"], new["sdk"]) == ("0.22.3", "0.38.0")
    assert {key: value for key, value in old.items() if key not in OF_EACH_RUN} == {
        key: value for key, value in new.items() if key not in OF_EACH_RUN
    }


def test_the_old_command_line_downloads_an_archive(server: RunningServer, new: dict[str, Any], tmp_path: Path) -> None:
    path = f"tinker://{new['run_id']}/sampler_weights/for-sampling"
    command = ["-m", "tinker.cli", "checkpoint", "download", path, "--output", str(tmp_path)]
    run(command, sdk=OLDEST, TINKER_BASE_URL=server.url, TINKER_API_KEY="tml-scenario")
    found = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= found
    assert not list(tmp_path.rglob("*.tar"))


def test_an_archive_is_for_those_who_may_read_the_checkpoint(server: RunningServer, new: dict[str, Any]) -> None:
    route = f"api/v1/training_runs/{new['run_id']}/checkpoints/sampler_weights/for-sampling/archive"
    with httpx.Client(base_url=server.url, timeout=300) as http:
        assert http.get(route, headers={"x-api-key": "tml-stranger"}).status_code == 404
        url = http.get(route, headers={"x-api-key": "tml-scenario"}).json()["url"]
        assert http.get(url).status_code == 200
        assert http.get(url.replace("for-sampling", "for-nobody")).status_code == 401
        assert http.get(url.replace("/archives/", "/files/")).status_code == 404
