"""`BASE:peft:N`, as the hosted service calls a base model with a context of N tokens."""

from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS

WAIT_S = 300
TOY = PluginSection.model_validate({"plugin": "toy", "max_context_tokens": 128})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = [ModelSettings(name=name, backend=TOY) for name in ("toy", "odd:peft:256")]
    with running_server(tmp_path_factory.mktemp("data"), models=models) as running:
        yield running


@pytest.fixture
def service(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-names")
    yield client
    client.close("success").result(timeout=WAIT_S)


def test_a_context_that_the_base_model_has_may_be_asked_for(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client("toy:peft:128", rank=4).result(WAIT_S)
    assert training.get_info().model_data.model_name == "toy"
    path = training.save_weights_for_sampler("one").result(WAIT_S).path
    state = training.save_state("one").result(WAIT_S).path
    assert service.create_training_client_from_state(state).result(WAIT_S).get_info().model_data.model_name == "toy"
    prompt, params = types.ModelInput.from_ints(TOKENS), types.SamplingParams(max_tokens=2, seed=1)
    for client in (
        service.create_sampling_client(base_model="toy:peft:100").result(WAIT_S),
        service.create_sampling_client(base_model="toy:peft:128", model_path=path).result(WAIT_S),
    ):
        assert client.sample(prompt, 1, params).result(WAIT_S).sequences


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("toy:peft:129", "asks for a context of 129 tokens, and 'toy' has 128; use base_model 'toy'"),
        ("other:peft:64", "no base model named 'other:peft:64'"),
        ("toy:peft:", "no base model named 'toy:peft:'"),
        ("toy:lora:64", "no base model named 'toy:lora:64'"),
    ],
)
def test_any_other_is_refused_by_name(service: tinker.ServiceClient, name: str, words: str) -> None:
    for call in (
        lambda: service.create_lora_training_client(name, rank=4).result(WAIT_S),
        lambda: service.create_sampling_client(base_model=name).result(WAIT_S),
    ):
        with pytest.raises(tinker.APIStatusError, match=words):
            call()


def test_a_configured_name_is_itself(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client("odd:peft:256", rank=4).result(WAIT_S)
    assert training.get_info().model_data.model_name == "odd:peft:256"
