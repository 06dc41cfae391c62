"""The same script with the newest SDK and with older ones, from the oldest that is supported on: the same numbers.

`make setup` installs some of the old ones, and `make sdks` all, each into a directory of its own.
"""

import json
import runpy
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import sdk_versions

from tinsmith.protocol.unknown_fields import SDK_VERSIONS
from tinsmith.testing.harness import RunningServer, running_server

OLDEST = sdk_versions.releases()[0]
NEVER_PUBLISHED = {37}  # minor releases

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # the calls are those that the old SDK has


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def new(server: RunningServer) -> dict[str, Any]:
    """What the newest SDK sees, in this process; its run and checkpoints stay on the server."""
    seen: dict[str, Any] = runpy.run_path(str(sdk_versions.SCENARIO))["main"](server.url)
    return seen


@pytest.mark.parametrize(
    "release",
    [
        pytest.param(release, marks=[] if release in sdk_versions.releases(in_short=True) else pytest.mark.thorough)
        for release in sdk_versions.releases()
    ],
)
def test_an_older_sdk_sees_what_the_newest_sees(server: RunningServer, new: dict[str, Any], release: str) -> None:
    found, numbers = sdk_versions.scenario(server.url, sdk_versions.place(release))
    assert found == release
    assert numbers == {key: value for key, value in new.items() if key not in sdk_versions.OF_EACH_RUN}


def test_every_minor_release_is_tried_and_recorded() -> None:
    tried = [*sdk_versions.releases(), version("tinker")]
    minors = [int(release.split(".")[1]) for release in tried]
    assert minors == [each for each in range(minors[0], minors[-1] + 1) if each not in NEVER_PUBLISHED]
    assert {OLDEST} < set(sdk_versions.releases(in_short=True))
    assert f"{OLDEST} to {tried[-1]}" == SDK_VERSIONS
    rows = json.loads(sdk_versions.RECORD.read_text())["releases"]
    assert [(row["sdk"], row["same_numbers"]) for row in rows] == [(release, True) for release in tried]


def test_the_old_command_line_downloads_an_archive(server: RunningServer, new: dict[str, Any], tmp_path: Path) -> None:
    path = f"tinker://{new['run_id']}/sampler_weights/for-sampling"
    command = ["-m", "tinker.cli", "checkpoint", "download", path, "--output", str(tmp_path)]
    sdk_versions.run(command, sdk_versions.place(OLDEST), TINKER_BASE_URL=server.url, TINKER_API_KEY="tml-scenario")
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
