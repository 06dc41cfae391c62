"""Sampling while training runs, on a mesh in several processes, through the unmodified SDK."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import datum, logprobs, ragged
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

WAIT_S = 1800  # the first operations compile
PROMPT = [5, 9, 17, 4]
ADAM = tinker.AdamParams(learning_rate=0.02)
MESHES = {
    "2 processes": {"mesh": {"fsdp": 2, "tensor": 2}, "nproc_per_node": 2, "simulated_devices": 2},
    "4 processes": {"mesh": {"data": 2, "tensor": 2}, "nproc_per_node": 4, "simulated_devices": 1},
}


@pytest.fixture(scope="module", params=MESHES.values(), ids=MESHES)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    directory = tmp_path_factory.mktemp("mesh")
    write_tiny_model(directory / "tiny", SHAPE)
    backend = PluginSection.model_validate({"plugin": "jax", "warm_up": False, **FEW_PROGRAMS, **request.param})
    model = ModelSettings(name="tiny", path=directory / "tiny", backend=backend)
    with running_server(directory / "data", models=[model]) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        yield client
        client.close("success").result(timeout=WAIT_S)


def new_model(client: tinker.ServiceClient, seed: int) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result(timeout=WAIT_S)


def submit_steps(model: tinker.TrainingClient, steps: range) -> list[Any]:
    return [
        future
        for seed in steps
        for future in (model.forward_backward(ragged(3, seed), "cross_entropy"), model.optim_step(ADAM))
    ]


def curve(futures: Sequence[Any]) -> list[Any]:
    return [future.result(timeout=WAIT_S).metrics for future in futures]


def submit_samples(sampler: tinker.SamplingClient) -> list[Any]:
    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = [tinker.SamplingParams(max_tokens=16, seed=seed, temperature=1.0) for seed in range(6)]
    return [sampler.sample(prompt, num_samples=2, sampling_params=each) for each in params]


def drawn(futures: Sequence[Any]) -> list[tuple[list[int], list[float]]]:
    answers = [future.result(timeout=WAIT_S) for future in futures]
    return [(list(each.tokens), list(each.logprobs)) for answer in answers for each in answer.sequences]


def test_training_and_sampling_at_once_are_as_each_alone(client: tinker.ServiceClient) -> None:
    """Bit for bit. What is sampled is what was trained, and stays so while its model is trained on."""
    model, alone = new_model(client, 1), new_model(client, 2)
    curve(submit_steps(model, range(3)))
    sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    at_rest, expected = drawn(submit_samples(sampler)), curve(submit_steps(alone, range(10, 16)))
    scores = [
        logprobs(model.forward([datum([*PROMPT, *tokens])], "cross_entropy").result(timeout=WAIT_S))[0]
        for tokens, _ in at_rest
    ]
    for (_, sampled), scored in zip(at_rest, scores, strict=True):
        np.testing.assert_allclose(sampled, scored[len(PROMPT) - 1 :], rtol=0, atol=1e-4)
    beside, base = new_model(client, 2), client.create_sampling_client(base_model="tiny").result(timeout=WAIT_S)
    training = submit_steps(beside, range(10, 16))
    going_on = submit_steps(model, range(3, 9))
    samples, others = submit_samples(sampler), submit_samples(base)
    assert drawn(samples) == at_rest
    assert curve(training) == expected
    assert drawn(others) != at_rest
    curve(going_on)
    assert drawn(submit_samples(sampler)) == at_rest
