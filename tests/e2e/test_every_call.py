"""Every public method of the SDK's clients and every command of `tinker` is answered, or on the list of refusals.

The SDK tells which there are. So a new one fails here, by name, until the table has a proper call of it.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import huggingface_hub
import pytest
import tinker
import torch
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.lib.internal_client_holder import sessionless_holder_cache
from tinker.lib.public_interfaces import rest_client_common

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, datum
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

# calls that are old or experimental count too
pytestmark = pytest.mark.filterwarnings("ignore:(DEPRECATED|.*is experimental):FutureWarning")

WAIT_S = 300
KEY = "tml-every-call"
PROMPT = types.ModelInput.from_ints(TOKENS)
PARAMS = types.SamplingParams(max_tokens=3, seed=1)
RANKS: dict[str, types.CustomLossInputRank] = {"logprobs": 1, "weights": 1}
STEP = types.AdamParams(learning_rate=0.01)


class World:
    """What the calls are about. Those that end, delete or replace something make one of their own."""

    def __init__(self, server: RunningServer, home: Path) -> None:
        self.server, self.home = server, home
        (self.base,) = (model.name for model in server.settings.models)
        self.service = self.new_service()
        self.training = self.service.create_lora_training_client(self.base, rank=4, seed=1).result(WAIT_S)
        self.rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        self.admin = tinker.AdminClient(base_url=server.url, api_key=KEY)
        self.run_id = self.training.get_info().model_id
        self.session_id = self.run_id.partition(":")[0]
        passed, stepped = self.training.forward_backward([datum()], "cross_entropy"), self.training.optim_step(STEP)
        for each in (passed, stepped):
            each.result(WAIT_S)
        self.state = self.save("kept")
        self.snapshot = self.training.save_weights_for_sampler("kept").result(WAIT_S).path
        self.sampler = self.service.create_sampling_client(model_path=self.snapshot).result(WAIT_S)
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        self.window = now - timedelta(days=1), now + timedelta(days=1)
        self.copies: list[tinker.SamplingClient] = []

    def new_service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url, api_key=KEY, project_id="project")

    def sampler_of_another_process(self) -> tinker.SamplingClient:
        """It has connections and heartbeats of its own."""
        handle = self.sampler.get_sampler_handle()
        self.copies.append(tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY))
        return self.copies[-1]

    def save(self, name: str) -> str:
        return self.training.save_state(name).result(WAIT_S).path

    def cli(self, *arguments: str, typed: str | None = None, key: str | None = KEY) -> str:
        env = {"TINKER_BASE_URL": self.server.url, "TINKER_API_KEY": key, "HOME": str(self.home)}
        result = CliRunner(env={**env, "TINKER_TELEMETRY": "0"}).invoke(main_cli, ["-f", "json", *arguments], typed)
        assert result.exit_code == 0, f"{result.output}{result.exception!r}"
        return result.output


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = tmp_path_factory.mktemp("tiny")  # for its tokenizer: sampling clients look for it by the model's name
    write_tiny_model(model, TinyShape(num_layers=1, hidden_size=64, intermediate_size=96), overwrite=True)
    settings = ModelSettings(name=str(model), backend=PluginSection(plugin="toy"))
    data = tmp_path_factory.mktemp("server")
    with running_server(data, models=[settings]) as server, pytest.MonkeyPatch.context() as patch:
        # the commands share one client in a process, whatever the URL: not with other tests and their servers
        patch.setattr(rest_client_common, "sessionless_holder_cache", type(sessionless_holder_cache)())
        world = World(server, tmp_path_factory.mktemp("home"))
        yield world
        for sampler in world.copies:
            sampler.holder.close()
        world.service.close("success").result(WAIT_S)


def squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    del data
    return torch.stack([each.square().sum() for each in logprobs]).sum(), {}


def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighted:sum": loss}


# The calls ------------------------------------------------------------------------------------------------------------

Call = Callable[[World], Any]
SDK_CALLS: dict[str, Call] = {
    "ServiceClient.close": lambda w: w.new_service().close("success"),
    "ServiceClient.copy_weights": lambda w: w.service.copy_weights(w.state),
    "ServiceClient.create_custom_loss": lambda w: w.service.create_custom_loss(weighted, RANKS),
    "ServiceClient.create_lora_training_client": lambda w: w.service.create_lora_training_client(w.base, rank=2),
    "ServiceClient.create_rest_client": lambda w: w.service.create_rest_client(),
    "ServiceClient.create_sampling_client": lambda w: w.service.create_sampling_client(base_model=w.base),
    "ServiceClient.create_training_client_from_state": lambda w: w.service.create_training_client_from_state(w.state),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda w: (
        w.service.create_training_client_from_state_with_optimizer(w.state)
    ),
    "ServiceClient.get_console_url": lambda w: w.service.get_console_url(),
    "ServiceClient.get_server_capabilities": lambda w: w.service.get_server_capabilities(),
    "ServiceClient.get_telemetry": lambda w: w.service.get_telemetry(),
    "TrainingClient.create_sampling_client": lambda w: w.training.create_sampling_client(w.snapshot),
    "TrainingClient.forward": lambda w: w.training.forward([datum()], "cross_entropy"),
    "TrainingClient.forward_backward": lambda w: w.training.forward_backward([datum()], "cross_entropy"),
    "TrainingClient.forward_backward_custom": lambda w: w.training.forward_backward_custom([datum()], squares),
    "TrainingClient.get_console_url": lambda w: w.training.get_console_url(),
    "TrainingClient.get_info": lambda w: w.training.get_info(),
    "TrainingClient.get_telemetry": lambda w: w.training.get_telemetry(),
    "TrainingClient.get_tokenizer": lambda w: w.training.get_tokenizer(),
    "TrainingClient.load_state": lambda w: w.training.load_state(w.state),
    "TrainingClient.load_state_with_optimizer": lambda w: w.training.load_state_with_optimizer(w.state),
    "TrainingClient.optim_step": lambda w: w.training.optim_step(STEP),
    "TrainingClient.save_state": lambda w: w.training.save_state("a", user_metadata={"a": "b"}),
    "TrainingClient.save_weights_and_get_sampling_client": lambda w: w.training.save_weights_and_get_sampling_client(),
    "TrainingClient.save_weights_external": lambda w: w.training.save_weights_external("a"),
    "TrainingClient.save_weights_for_sampler": lambda w: w.training.save_weights_for_sampler("a", ttl_seconds=7200),
    "SamplingClient.compute_logprobs": lambda w: w.sampler.compute_logprobs(PROMPT),
    "SamplingClient.create": lambda w: tinker.SamplingClient.create(w.service.holder, base_model=w.base),
    "SamplingClient.from_sampler_handle": lambda w: w.sampler_of_another_process(),
    "SamplingClient.get_base_model": lambda w: w.sampler.get_base_model(),
    "SamplingClient.get_sampler_handle": lambda w: w.sampler.get_sampler_handle(),
    "SamplingClient.get_telemetry": lambda w: w.sampler.get_telemetry(),
    "SamplingClient.get_tokenizer": lambda w: w.sampler.get_tokenizer(),
    "SamplingClient.sample": lambda w: w.sampler.sample(PROMPT, 2, PARAMS, include_prompt_logprobs=True),
    "RestClient.assign_session_project": lambda w: w.rest.assign_session_project(w.session_id, "project"),
    "RestClient.copy_weights": lambda w: w.rest.copy_weights(w.state, "archive"),
    "RestClient.delete_checkpoint": lambda w: w.rest.delete_checkpoint(w.run_id, w.save("gone-1").split("/", 3)[3]),
    "RestClient.delete_checkpoint_from_tinker_path": lambda w: w.rest.delete_checkpoint_from_tinker_path(
        w.save("gone-2")
    ),
    "RestClient.export_session_trace": lambda w: w.rest.export_session_trace(w.session_id),
    "RestClient.get_audit_log": lambda w: w.rest.get_audit_log(),
    "RestClient.get_billing_usage": lambda w: w.rest.get_billing_usage(*w.window),
    "RestClient.get_current_checkpoint_storage_usage": lambda w: w.rest.get_current_checkpoint_storage_usage(),
    "RestClient.get_external_weights_urls": lambda w: w.rest.get_external_weights_urls(
        w.training.save_weights_external("linked").result(WAIT_S).path
    ),
    "RestClient.get_sampler": lambda w: w.rest.get_sampler(sampler_id(w)),
    "RestClient.get_server_capabilities": lambda w: w.rest.get_server_capabilities(),
    "RestClient.get_session": lambda w: w.rest.get_session(w.session_id),
    "RestClient.get_telemetry": lambda w: w.rest.get_telemetry(),
    "RestClient.get_training_run": lambda w: w.rest.get_training_run(w.run_id),
    "RestClient.get_training_run_by_tinker_path": lambda w: w.rest.get_training_run_by_tinker_path(w.state),
    "RestClient.get_weights_info_by_tinker_path": lambda w: w.rest.get_weights_info_by_tinker_path(w.state),
    "RestClient.list_checkpoints": lambda w: w.rest.list_checkpoints(w.run_id),
    "RestClient.list_sessions": lambda w: w.rest.list_sessions(),
    "RestClient.list_training_runs": lambda w: w.rest.list_training_runs(),
    "RestClient.list_user_checkpoints": lambda w: w.rest.list_user_checkpoints(),
    "RestClient.publish_checkpoint_from_tinker_path": lambda w: w.rest.publish_checkpoint_from_tinker_path(w.state),
    "RestClient.search_sessions": lambda w: w.rest.search_sessions(types.SessionSearchRequest()),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda w: w.rest.set_checkpoint_ttl_from_tinker_path(
        w.save("short"), 7200
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda w: w.rest.unpublish_checkpoint_from_tinker_path(w.state),
    "RestClient.whoami": lambda w: w.rest.whoami(),
    "AdminClient.get_audit_log": lambda w: w.admin.get_audit_log(),
    "AdminClient.get_billing_usage": lambda w: w.admin.get_billing_usage(*w.window),
    "AdminClient.get_current_checkpoint_storage_usage": lambda w: w.admin.get_current_checkpoint_storage_usage(),
    "AdminClient.get_telemetry": lambda w: w.admin.get_telemetry(),
}
CALLED_BY_THE_SDK = {"SamplingClient.on_queue_state_change"}  # its own observer: no request

CLI_CALLS: dict[str, Call] = {
    "auth login": lambda w: w.cli("auth", "login", typed=f"{KEY}\n", key=None),
    "auth logout": lambda w: w.cli("auth", "logout", key=None),
    "auth status": lambda w: w.cli("auth", "status"),
    "auth whoami": lambda w: w.cli("auth", "whoami"),
    "billing checkpoint-storage": lambda w: w.cli("billing", "checkpoint-storage"),
    "billing usage": lambda w: w.cli("billing", "usage", *(f"{each:%Y-%m-%dT%H:00:00Z}" for each in w.window)),
    "checkpoint delete": lambda w: w.cli("checkpoint", "delete", w.save("gone-3"), "-y"),
    "checkpoint download": lambda w: w.cli("checkpoint", "download", w.state, "-o", str(w.home / "adapter")),
    "checkpoint info": lambda w: w.cli("checkpoint", "info", w.state),
    "checkpoint list": lambda w: w.cli("checkpoint", "list"),
    "checkpoint publish": lambda w: w.cli("checkpoint", "publish", w.state),
    "checkpoint push-hf": lambda w: w.cli("checkpoint", "push-hf", w.state, "--repo", "me/adapter"),
    "checkpoint set-ttl": lambda w: w.cli("checkpoint", "set-ttl", w.save("shorter"), "--ttl", "7200"),
    "checkpoint unpublish": lambda w: w.cli("checkpoint", "unpublish", w.state),
    "model list": lambda w: w.cli("model", "list"),
    "run info": lambda w: w.cli("run", "info", w.run_id),
    "run list": lambda w: w.cli("run", "list"),
    "session export-trace": lambda w: w.cli("session", "export-trace", w.session_id, "-o", str(w.home / "trace")),
    "version": lambda w: w.cli("version"),
}
SILENT = {"checkpoint publish", "checkpoint set-ttl", "checkpoint unpublish"}  # say nothing if all is well


def sampler_id(world: World) -> str:
    return world.rest.get_session(world.session_id).result(WAIT_S).sampler_ids[0]


# What there is --------------------------------------------------------------------------------------------------------


def clients() -> dict[str, type]:
    """Return the SDK's public clients, by name."""
    named = {name: getattr(tinker, name) for name in tinker.__all__ if name.endswith("Client")}
    return {name: each for name, each in named.items() if inspect.isclass(each)}


def public_methods(kind: type) -> set[str]:
    names = {name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")}
    return {name for name in names if name.removesuffix("_async") == name or name.removesuffix("_async") not in names}


def commands(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        else:
            yield " ".join((*above, name))


def test_every_method_of_the_sdk_has_a_call() -> None:
    assert {"ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"} <= clients().keys()
    found = {f"{client}.{name}" for client, kind in clients().items() for name in public_methods(kind)}
    assert found == SDK_CALLS.keys() | CALLED_BY_THE_SDK


def test_the_futures_of_clients_have_no_calls_of_their_own() -> None:
    """They pass the client's on."""
    for future, client in (
        (tinker.BackcompatTrainingClientFuture, tinker.TrainingClient),
        (tinker.BackcompatSamplingClientFuture, tinker.SamplingClient),
    ):
        assert public_methods(future) <= public_methods(client) | public_methods(tinker.APIFuture)


def test_every_command_has_a_call() -> None:
    assert set(commands(main_cli)) == CLI_CALLS.keys()


# The answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SDK_CALLS)
def test_a_method_is_answered(world: World, name: str) -> None:
    """With what the SDK's own annotation says."""
    client, _, method = name.partition(".")
    answer = SDK_CALLS[name](world)
    answer = answer.result(WAIT_S) if hasattr(answer, "result") else answer
    promised = inspect.signature(getattr(clients()[client], method)).return_annotation
    bare = re.sub(r"^(?:APIFuture|AwaitableConcurrentFuture)\[(.*)\]$", r"\1", promised)
    bare = re.sub(r"^Backcompat(\w+)Future$", r"\1", bare)
    allowed = {each.partition("[")[0].rpartition(".")[2] for each in re.split(r" \| (?![^\[]*\])", bare)}
    have = {each.__name__.replace("NoneType", "None") for each in type(answer).__mro__}
    have |= {"PreTrainedTokenizer"} if "PreTrainedTokenizerBase" in have else set()
    assert allowed & have, f"{name} promises {promised} and answered {answer!r}"


def test_a_custom_loss_that_the_sdk_traced_runs_in_the_client(world: World) -> None:
    service = world.new_service()  # a session makes each loss once
    loss = service.create_custom_loss(weighted, RANKS).result(WAIT_S)
    training = service.create_lora_training_client(world.base, rank=2).result(WAIT_S)
    output = training.forward_backward_custom([datum()], loss).result(WAIT_S)
    service.close("success").result(WAIT_S)
    assert loss.loss_id is None, "the server would run it"
    assert output.metrics["custom/weighted:sum"] == output.metrics["loss:sum"]
    assert "surrogate_loss:sum" in output.metrics, "the SDK has computed the loss"


class Hub:
    """Stands in for the Hugging Face hub, which is elsewhere: it keeps what it is given."""

    given: dict[str, list[str]] = {}  # noqa: RUF012 - the command makes the object

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def create_repo(self, *, repo_id: str, **_: object) -> None:
        self.given[repo_id] = []

    def upload_folder(self, *, folder_path: str, repo_id: str, **_: object) -> None:
        self.given[repo_id] += [each.name for each in Path(folder_path).iterdir()]


def nothing_there(**_: object) -> str:
    raise FileNotFoundError


@pytest.mark.parametrize("name", CLI_CALLS)
def test_a_command_is_answered(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", nothing_there)
    output = CLI_CALLS[name](world)
    assert bool(output) == (name not in SILENT)
    if name == "checkpoint push-hf":
        assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(Hub.given["me/adapter"])
