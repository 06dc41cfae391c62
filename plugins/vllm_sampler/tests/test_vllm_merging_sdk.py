"""Through the SDK: models with experts, and fully trained ones, sampled with one set of weights at a time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from vllm_harness import TRAINERS, VOCAB, prompt, settings

from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import datum, logprobs, step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # connections that the SDK leaves to the collector
]

AGREE = 1e-3  # what is promised between two engines in float32
WAIT_S = 900
RANKS = {"tiny/experts": (4, 8), "tiny/full": (0, 4)}  # of two tenants


@pytest.fixture(scope="module")
def url(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One snapshot of each model stays resident, so the others come back from disk."""
    backends = {
        "tiny/experts": ("qwen3_moe", {"plugin": "jax", **TRAINERS["jax"]}, {}),
        "tiny/full": ("qwen3", {"plugin": "fsdp", **TRAINERS["fsdp"], "max_full_models": 1}, {"full_replicas": 1}),
    }
    models = [
        {
            "name": name,
            "path": tiny_models[family],
            "backend": backend,
            "sampler": {"plugin": "vllm", **settings(**changed)},
            "resident_snapshots": 1,
        }
        for name, (family, backend, changed) in backends.items()
    ]
    found = [ModelSettings.model_validate(model) for model in models]
    with running_server(tmp_path_factory.mktemp("served"), models=found) as server:
        yield server.url


@pytest.mark.parametrize("base_model", RANKS)
def test_two_tenants_sample_what_they_trained(url: str, base_model: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-merging")
    start = prompt(1).tolist()
    samplers, models = [], []
    for number, rank in enumerate(RANKS[base_model]):
        model = service.create_lora_training_client(base_model=base_model, rank=rank, seed=1).result(timeout=WAIT_S)
        tokens = np.random.default_rng(number).integers(3, VOCAB, 24).tolist()
        for _ in range(3):
            step(model, [datum(tokens)], learning_rate=0.01)
        path = model.save_weights_for_sampler(f"kept-{number}").result(timeout=WAIT_S).path
        kept = service.create_sampling_client(model_path=path).result(timeout=WAIT_S)
        ephemeral = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        models.append(model)
        samplers += [kept, ephemeral]
    base = service.create_sampling_client(base_model=base_model).result(timeout=WAIT_S)
    params = tinker.SamplingParams(max_tokens=16, seed=3, stop=[])
    asked = [each.sample(tinker.ModelInput.from_ints(start), 2, params) for each in samplers]
    for number, future in enumerate(asked):
        for sequence in future.result(timeout=WAIT_S).sequences:
            whole = [*start, *sequence.tokens]
            trained = logprobs(models[number // 2].forward([datum(whole)], "cross_entropy").result(timeout=WAIT_S))[0]
            np.testing.assert_allclose(sequence.logprobs, trained[-16:], atol=AGREE, rtol=0)
            without = base.compute_logprobs(tinker.ModelInput.from_ints(whole)).result(timeout=WAIT_S)
            assert np.abs(np.subtract(without[1:], trained)).max() > 10 * AGREE, "training must make a difference"
    service.close("success").result(timeout=WAIT_S)
