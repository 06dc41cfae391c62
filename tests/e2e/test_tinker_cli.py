"""The `tinker` command line, unmodified, in this process: it keeps one client, so all tests have one key."""

import json
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from tinsmith.testing.harness import RunningServer
from tinsmith.testing.sdk_data import datum, step

API_KEY = "tml-command-line"


class Cli:
    def __init__(self, url: str, home: Path) -> None:
        self.home = home
        self._runner = CliRunner(
            env={"TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY, "HOME": str(home), "TINKER_TELEMETRY": "0"}
        )

    def run(self, *arguments: str) -> Result:
        return self._runner.invoke(main_cli, ["-f", "json", *arguments])

    def __call__(self, *arguments: str) -> Any:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        start = result.output.find("{")
        return json.JSONDecoder().raw_decode(result.output[start:])[0] if start >= 0 else None


@pytest.fixture
def api_key() -> str:
    return API_KEY


@pytest.fixture
def cli(toy_server: RunningServer, tmp_path: Path) -> Cli:
    return Cli(toy_server.url, tmp_path)


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    model = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)
    step(model, [datum()])
    return model


def paths(listed: Any) -> set[str]:
    return {each["tinker_path"] for each in listed["checkpoints"]}


def test_models_and_runs(cli: Cli, model: tinker.TrainingClient) -> None:
    run_id = model.get_info().model_id
    assert "toy" in json.dumps(cli("model", "list"))
    assert run_id in [run["training_run_id"] for run in cli("run", "list")["runs"]]
    assert cli("run", "info", run_id)["training_run_id"] == run_id
    assert "yes" in cli.run("auth", "status").output


def test_checkpoints(cli: Cli, model: tinker.TrainingClient) -> None:
    run_id = model.get_info().model_id
    state = model.save_state("a").result(timeout=300).path
    sampler = model.save_weights_for_sampler("a").result(timeout=300).path
    assert {state, sampler} <= paths(cli("checkpoint", "list"))
    assert paths(cli("checkpoint", "list", "--run-id", run_id)) == {state, sampler}
    assert cli("checkpoint", "info", state)["lora_rank"] == 4
    cli("checkpoint", "set-ttl", state, "--ttl", "7200")
    assert cli("checkpoint", "info", state)["expires_at"] is not None
    cli("checkpoint", "set-ttl", state, "--remove")
    assert cli("checkpoint", "info", state)["expires_at"] is None
    cli("checkpoint", "publish", state)
    assert cli("checkpoint", "info", state)["public"] is True
    cli("checkpoint", "unpublish", state)
    assert cli("checkpoint", "delete", sampler, "-y") == {"deleted_count": 1, "failed": []}
    assert paths(cli("checkpoint", "list", "--run-id", run_id)) == {state}


def test_a_training_checkpoint_is_downloaded_as_an_adapter(cli: Cli, model: tinker.TrainingClient) -> None:
    state = model.save_state("a").result(timeout=300).path
    answer = cli("checkpoint", "download", state, "-o", str(cli.home / "out"))
    files = {path.name for path in Path(answer["destination"]).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    exports = [path for path in paths(cli("checkpoint", "list")) if "/external_weights/" in path]
    assert exports == []  # the one made for the download is gone


def test_who_one_is(cli: Cli) -> None:
    identity = cli("auth", "whoami")
    assert identity["user_urn"].startswith("key-")
    assert identity["org_urn"] == f"tml:organization:{identity['user_urn']}"
    unmatched = cli.run("model", "list", "NOMATCH")
    assert isinstance(unmatched.exception, TinkerCliError)
    assert f"No model name contains 'NOMATCH' for organization {identity['org_urn']}" in str(unmatched.exception)


def test_errors_are_shown(cli: Cli) -> None:
    result = cli.run("run", "info", "nobody:train:0")
    assert isinstance(result.exception, TinkerCliError)
    assert "nobody:train:0" in f"{result.exception} {result.exception.details}"
