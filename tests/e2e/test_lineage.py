"""Which runs came from which: by loads and copies of the SDK, for each tenant its own, also once a source is gone."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tinker
from browser import Browser
from typer.testing import CliRunner

from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, step

WAIT_S = 300
KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "root"} for name in ("ann", "bob", "root")]


class Family:
    """A run with a published checkpoint; from it came another run, a copy with a run of its own, and a run of bob's."""

    def __init__(self, server: RunningServer, ann: tinker.ServiceClient, bob: tinker.ServiceClient) -> None:
        self.server = server
        first = ann.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
        self.first = first.get_info().model_id
        for _ in range(2):
            step(first, [datum([1, 2, 3, 4])], learning_rate=0.1)
        self.path = first.save_state("two").result(WAIT_S).path
        self.post(f"/training_runs/{self.first}/checkpoints/weights/two/publish")
        second = ann.create_training_client_from_state_with_optimizer(self.path).result(WAIT_S)
        self.second = second.get_info().model_id
        step(second, [datum([1, 2, 3, 4])], learning_rate=0.1)
        three = second.save_state("three").result(WAIT_S).path
        with pytest.warns(FutureWarning, match="load_state"):
            second.load_state(three).result(WAIT_S)
        copied = self.post("/copy_weights", {"source_path": self.path, "destination_project_id": "p"})["tinker_path"]
        self.copy = copied.split("/")[2]
        self.third = ann.create_training_client_from_state(copied).result(WAIT_S).get_info().model_id
        self.bobs = bob.create_training_client_from_state(self.path).result(WAIT_S).get_info().model_id

    def post(self, path: str, body: Any = None) -> Any:
        url = f"{self.server.url}/api/v1{path}"
        answer = httpx.post(url, json=body, headers={"x-api-key": "tml-ann"}, timeout=WAIT_S)
        return answer.raise_for_status().json()

    def ask(self, run_id: str, key: str = "tml-ann") -> httpx.Response:
        url = f"{self.server.url}/api/v1/runs/{run_id}/lineage"
        return httpx.get(url, headers={"x-api-key": key}, timeout=WAIT_S)

    def get(self, run_id: str, key: str = "tml-ann") -> dict[str, Any]:
        """Return the origins of each run in its lineage."""
        found = self.ask(run_id, key).raise_for_status().json()
        return {each["run_id"]: each["origins"] for each in found["runs"]}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    with (
        running_server(tmp_path_factory.mktemp("lineage"), server={"api_keys": KEYS}) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as ann,
        tinker.ServiceClient(base_url=server.url, api_key="tml-bob") as bob,
    ):
        yield Family(server, ann, bob)


def told(origins: list[dict[str, Any]]) -> list[tuple[str, str | None, int, int]]:
    return [(each["path"], each.get("source"), each["seq_id"], each["step"]) for each in origins]


def test_each_run_of_a_lineage_says_where_its_weights_came_from(family: Family) -> None:
    found = family.get(family.third)
    assert list(found) == [family.first, family.second, family.copy, family.third]
    assert {run_id: told(origins) for run_id, origins in found.items()} == {
        family.first: [],
        family.second: [
            (family.path, family.first, 0, 2),
            (f"tinker://{family.second}/weights/three", family.second, 4, 0),
        ],
        family.copy: [(family.path, family.first, 0, 2)],
        family.third: [(f"tinker://{family.copy}/weights/two", family.copy, 0, 0)],
    }
    whole = family.ask(family.first).json()
    assert whole["complete"] is True
    assert [(each["path"], each["step"], each["public"]) for each in whole["checkpoints"]] == [(family.path, 2, True)]


def test_a_lineage_ends_at_other_tenants_runs(family: Family) -> None:
    assert told(family.get(family.bobs, "tml-bob")[family.bobs]) == [(family.path, None, 0, 0)]
    assert list(family.get(family.bobs, "tml-bob")) == [family.bobs]
    assert family.bobs in family.get(family.first, "tml-root")
    assert family.ask(family.first, "tml-bob").status_code == 404


def test_the_command_says_the_same(family: Family) -> None:
    data_dir = str(family.server.settings.server.data_dir)

    def show(*more: str) -> str:
        command = ["runs", "show", family.second, "--data-dir", data_dir, *more]
        done = CliRunner().invoke(build_group(Plugins.load()), command, obj=Plugins.load(), catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert f"{'came from':<17}{family.path}, by seq_id 0" in show()
    lineage = json.loads(show("--json"))["lineage"]
    assert [each["run_id"] for each in lineage][:2] == [family.first, family.second]


def test_the_page_draws_the_tree(family: Family, browser: Browser, take: Callable[[str], None]) -> None:
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{family.server.url}/#run={family.third}&view=lineage&key=tml-ann")
    browser.until("document.querySelector('.tree a[aria-current]')")
    tree = (
        "(function below(list) { return [...list.children].map((item) => "
        "[item.querySelector('a').textContent, ...(item.querySelector('ul') ? [below(item.querySelector('ul'))] : [])])"
        "})(document.querySelector('.tree'))"
    )
    assert browser.evaluate(tree) == [[family.first, [[family.second], [family.copy, [[family.third]]]]]]
    assert browser.evaluate("document.querySelector('.tree [aria-current]').textContent") == family.third
    browser.evaluate("document.querySelector('.tree a').click()")
    browser.until("document.querySelector('#checkpoints code')")
    assert browser.evaluate("document.querySelector('#checkpoints code').textContent") == family.path
    commands = browser.evaluate("[...document.querySelectorAll('#checkpoints pre')].map((each) => each.textContent)")
    assert [f'("{family.path}")' in commands[0], f"replay {family.first} --until" in commands[1]] == [True, True]
    take("lineage")
    assert browser.problems == []


def test_a_deleted_checkpoint_is_still_an_origin(family: Family) -> None:
    url = f"{family.server.url}/api/v1/training_runs/{family.first}/checkpoints/weights/two"
    httpx.delete(url, headers={"x-api-key": "tml-ann"}, timeout=WAIT_S).raise_for_status()
    found = family.ask(family.first).json()
    assert found["checkpoints"] == []
    assert told(family.get(family.first)[family.second])[0] == (family.path, family.first, 0, 2)
