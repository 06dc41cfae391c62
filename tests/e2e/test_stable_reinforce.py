"""A server on which another loss stands in for `stable_reinforce`, through the SDK: it says so wherever it matters."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tinsmith.testing.harness import RunningServer, running_server

THRESHOLDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    losses = {"stable_reinforce": "gspo", "stable_reinforce_config": THRESHOLDS}
    with running_server(tmp_path_factory.mktemp("stands_in"), losses=losses) as running:
        yield running


def test_samples_are_recorded_and_trained_on(
    server: RunningServer, connect: Callable[[str, str], tinker.ServiceClient], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        client = connect(server.url, "tml-any")
        training = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)
    assert "'stable_reinforce' is computed as 'gspo', clip_high_threshold 1.2" in caplog.text
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result(timeout=300)
    prompt = [3, 4, 5]
    sampled = sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=4, stop=[])).result(
        timeout=300
    )
    data = [_datum(prompt, sequence, 1.0 - 2 * index) for index, sequence in enumerate(sampled.sequences)]
    result = training.forward_backward(data, "stable_reinforce").result(timeout=300)
    assert result.metrics["stable_reinforce_is_gspo:max"] == 1.0
    assert result.metrics["loss:sum"] == pytest.approx(0.0, abs=1e-5)  # on policy, the ratio is one
    training.optim_step(types.AdamParams(learning_rate=0.5)).result(timeout=300)
    twin = [tinker.Datum(model_input=each.model_input, loss_fn_inputs=_with_mask(each, len(prompt))) for each in data]
    stood_in = training.forward(data, "stable_reinforce").result(timeout=300)
    asked_for = training.forward(twin, "gspo", THRESHOLDS).result(timeout=300)
    assert stood_in.metrics["loss:sum"] == asked_for.metrics["loss:sum"] != 0.0
    assert "stable_reinforce_is_gspo:max" not in asked_for.metrics


def test_sequences_are_their_tenants_and_outlive_the_server(tmp_path: Path) -> None:
    """Nothing is stored for them, so a server that starts again knows them by their signatures."""
    losses = {"stable_reinforce": "ppo"}
    with running_server(tmp_path, losses=losses) as running:
        recorded, plain = (_sampled(running, "tml-ann", record=record) for record in (True, False))
    with running_server(tmp_path, losses=losses) as running:
        assert "loss:sum" in _trained(running, "tml-ann", recorded).metrics
        with pytest.raises(tinker.RequestFailedError, match="sampled without record_stability_info"):
            _trained(running, "tml-ann", plain)
        with pytest.raises(tinker.RequestFailedError, match=r"data\[0\]: model_input_spans: sequence .* is not known"):
            _trained(running, "tml-bob", recorded)


def _sampled(server: RunningServer, key: str, *, record: bool) -> tinker.Datum:
    with tinker.ServiceClient(base_url=server.url, api_key=key) as client:
        sampler = client.create_sampling_client(base_model="toy", record_stability_info=record).result(timeout=300)
        prompt, params = [3, 4, 5], types.SamplingParams(max_tokens=4, stop=[])
        sampled = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(timeout=300)
        return _datum(prompt, sampled.sequences[0], 1.0)


def _trained(server: RunningServer, key: str, datum: tinker.Datum) -> types.ForwardBackwardOutput:
    with tinker.ServiceClient(base_url=server.url, api_key=key) as client:
        model = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)
        return model.forward_backward([datum], "stable_reinforce").result(timeout=300)


def test_capabilities_and_metrics_name_what_stands_in(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": "tml-any"}, timeout=300) as http:
        answer = http.get("/api/v1/get_server_capabilities").json()
        assert answer["stand_ins"] == {"stable_reinforce": "gspo"}
        assert 'tinsmith_stand_in_passes_total{base_model="toy",loss_fn="stable_reinforce",stand_in="gspo"}' in (
            http.get("/metrics").text
        )


def _datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> tinker.Datum:
    """As the cookbook makes them."""
    before, tokens, name = len(prompt) - 1, list(sequence.tokens), sequence.sequence_id
    assert sequence.logprobs is not None
    inputs = {
        "target_tokens": torch.tensor([*prompt[1:], *tokens]),
        "logprobs": torch.tensor([0.0] * before + list(sequence.logprobs)),
        "advantages": torch.tensor([0.0] * before + [advantage] * len(tokens)),
    }
    plain = tinker.Datum(model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]), loss_fn_inputs=inputs)
    return plain.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=before),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def _with_mask(datum: tinker.Datum, prompt: int) -> dict[str, types.TensorData]:
    mask = np.ones(datum.model_input.length, np.float32)
    mask[: prompt - 1] = 0
    return {**datum.loss_fn_inputs, "sequence_ratio_mask": types.TensorData.from_numpy(mask)}
