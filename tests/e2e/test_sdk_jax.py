"""The promises through the unmodified SDK on the JAX backend, several base models on one server.

The harness runs the engines in this process; what is compiled is shared by the tests of this file.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, logprobs, step
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

WAIT_S = 600  # the first operations compile
OTHERS = ("tiny/llama", "tiny/qwen3_moe")
BASE_MODELS = ["tiny/qwen3", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)]
# rank, learning rate, weight decay, clipping
TENANTS = [
    (1, 1e-2, 0.0, 0.0),
    (2, 3e-3, 0.1, 0.0),
    (8, 2e-2, 0.3, 0.5),
    (4, 1e-2, 0.0, 1.0),
    (8, 1e-3, 0.0, 0.0),
    (3, 5e-3, 0.0, 0.0),
    (5, 1e-1, 0.0, 0.0),
    (7, 1e-2, 0.01, 0.0),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ModelSettings]:
    root = tmp_path_factory.mktemp("models")
    backend = PluginSection.model_validate({"plugin": "jax", "warm_up": False, **FEW_PROGRAMS})
    made = []
    for family in ("qwen3", "llama", "qwen3_moe"):
        write_tiny_model(root / family, replace(SHAPE, family=family, tied=family == "qwen3"))
        made.append(ModelSettings(name=f"tiny/{family}", path=root / family, backend=backend))
    return made


@pytest.fixture(scope="module")
def server(models: list[ModelSettings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("jax-server"), models=models) as running:
        yield running


@pytest.fixture
def make_client(server: RunningServer, api_key: str) -> Iterator[Callable[[], tinker.ServiceClient]]:
    made: list[tinker.ServiceClient] = []

    def make() -> tinker.ServiceClient:
        made.append(tinker.ServiceClient(base_url=server.url, api_key=api_key))
        return made[-1]

    yield make
    for client in made:
        client.close("success").result(timeout=300)


def new_model(client: tinker.ServiceClient, base_model: str, rank: int, seed: int = 1) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=base_model, rank=rank, seed=seed).result(timeout=WAIT_S)


def sequences(seed: int, count: int = 2) -> list[tinker.Datum]:
    random = np.random.default_rng(seed)
    return [datum(random.integers(3, 300, random.integers(2, 60)).tolist()) for _ in range(count)]


@pytest.mark.parametrize(
    ("base_model", "num_tenants"),
    [
        ("tiny/qwen3", 4),
        *(pytest.param(base_model, 8, marks=pytest.mark.thorough) for base_model in ("tiny/qwen3", "tiny/llama")),
    ],
)
def test_tenants_at_once_have_their_solo_curves(
    make_client: Callable[[], tinker.ServiceClient], base_model: str, num_tenants: int
) -> None:
    """Everything is submitted before anything is awaited, so the scheduler merges what it can."""

    def adam(tenant: int) -> tinker.AdamParams:
        _, rate, decay, clip = TENANTS[tenant]
        return tinker.AdamParams(learning_rate=rate, weight_decay=decay, grad_clip_norm=clip)

    def submit(model: tinker.TrainingClient, tenant: int, number: int) -> tuple[Any, Any]:
        passed = model.forward_backward(sequences(100 * tenant + number), "cross_entropy")
        return passed, model.optim_step(adam(tenant))

    def outcome(futures: tuple[Any, Any]) -> tuple[Any, ...]:
        passed, stepped = (future.result(timeout=WAIT_S) for future in futures)
        return passed.metrics, logprobs(passed), stepped.metrics

    solo = []
    tenants = TENANTS[:num_tenants]
    for tenant, (rank, *_) in enumerate(tenants):
        model = new_model(make_client(), base_model, rank, seed=tenant)
        solo.append([outcome(submit(model, tenant, number)) for number in range(3)])
    together = [new_model(make_client(), base_model, rank, seed=n) for n, (rank, *_) in enumerate(tenants)]
    futures = [[submit(model, tenant, number) for tenant, model in enumerate(together)] for number in range(3)]
    for tenant in range(num_tenants):
        assert [outcome(futures[number][tenant]) for number in range(3)] == solo[tenant], f"tenant {tenant}"


def test_a_run_resumes_bit_for_bit_in_a_new_session(make_client: Callable[[], tinker.ServiceClient]) -> None:
    model = new_model(make_client(), "tiny/qwen3", 8)
    for seed in range(2):
        step(model, sequences(seed))
    model.forward_backward(sequences(50), "cross_entropy").result(timeout=WAIT_S)  # pending in the checkpoint
    path = model.save_state("middle").result(timeout=WAIT_S).path

    def go_on(model: tinker.TrainingClient) -> list[Any]:
        outputs = [step(model, sequences(seed)) for seed in range(2, 5)]
        return [(output.metrics, logprobs(output)) for output in outputs]

    resumed = make_client().create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)
    assert go_on(resumed) == go_on(model)


@pytest.mark.parametrize("base_model", BASE_MODELS)
def test_a_snapshot_is_what_was_trained_and_stays_so(
    make_client: Callable[[], tinker.ServiceClient], base_model: str
) -> None:
    model = new_model(make_client(), base_model, 4)
    step(model, sequences(1), learning_rate=0.05)
    sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    prompt = [5, 9, 17, 4]

    def draw() -> tuple[list[int], list[float]]:
        params = tinker.SamplingParams(max_tokens=12, seed=3, temperature=1.0, stop=[])
        answer = sampler.sample(tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params)
        sequence = answer.result(timeout=WAIT_S).sequences[0]
        assert sequence.logprobs is not None
        return list(sequence.tokens), list(sequence.logprobs)

    def score(tokens: list[int]) -> list[float]:
        """The trainer's logprobs of what was sampled."""
        output = model.forward([datum([*prompt, *tokens])], "cross_entropy").result(timeout=WAIT_S)
        return logprobs(output)[0][len(prompt) - 1 :]

    tokens, sampled = draw()
    scored = score(tokens)
    np.testing.assert_allclose(sampled, scored, atol=1e-4)
    assert score(tokens) == scored  # sampling did not change training
    step(model, sequences(2), learning_rate=0.05)
    assert draw() == (tokens, sampled)  # training did not change the snapshot
    assert np.abs(np.subtract(score(tokens), scored)).max() > 1e-2


def test_a_sampler_scores_what_fills_the_context_and_tells_what_it_had_read(
    make_client: Callable[[], tinker.ServiceClient],
) -> None:
    client, whole = make_client(), np.random.default_rng(3).integers(3, 300, FEW_PROGRAMS["max_context_tokens"] + 1)
    sampler = client.create_sampling_client(base_model="tiny/qwen3").result(timeout=WAIT_S)
    prompt, params = tinker.ModelInput.from_ints(whole[:100].tolist()), tinker.SamplingParams(max_tokens=1)
    answers = [sampler.sample(prompt, 1, params).result(timeout=WAIT_S) for _ in range(2)]
    assert [answer.prompt_cache_hit_tokens for answer in answers] == [0, 64]
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(whole[:-1].tolist())).result(timeout=WAIT_S)
    fresh = new_model(client, "tiny/qwen3", 8)
    trained = fresh.forward([datum(whole.tolist())], "cross_entropy").result(timeout=WAIT_S)
    np.testing.assert_allclose(np.asarray(scored[1:], float), logprobs(trained)[0][:-1], atol=1e-4)


def test_two_calls_equal_one(make_client: Callable[[], tinker.ServiceClient]) -> None:
    client = make_client()
    first, second = (new_model(client, "tiny/qwen3", 8) for _ in range(2))
    left, right = sequences(7, 3), sequences(8, 2)
    first.forward_backward([*left, *right], "cross_entropy").result(timeout=WAIT_S)
    second.forward_backward(left, "cross_entropy").result(timeout=WAIT_S)
    second.forward_backward(right, "cross_entropy").result(timeout=WAIT_S)
    norms = [model.optim_step(tinker.AdamParams(learning_rate=0.01)) for model in (first, second)]
    one, two = (norm.result(timeout=WAIT_S).metrics for norm in norms)
    assert one == two
    one_after, two_after = (
        logprobs(model.forward(left, "cross_entropy").result(timeout=WAIT_S)) for model in (first, second)
    )
    assert one_after == two_after


def test_alternatives_of_prompt_tokens_are_scored_as_the_prompt_is(
    make_client: Callable[[], tinker.ServiceClient],
) -> None:
    client, tokens = make_client(), np.random.default_rng(5).integers(3, 300, 100).tolist()  # more than one tile
    sampler = client.create_sampling_client(base_model="tiny/qwen3").result(timeout=WAIT_S)
    prompt, params = tinker.ModelInput.from_ints(tokens), tinker.SamplingParams(max_tokens=1, seed=4, temperature=0.7)
    answer = sampler.sample(prompt, 1, params, prompt_alt_tokens_k=3).result(timeout=WAIT_S).prompt_alt_tokens
    assert answer is not None
    drawn, found = answer.tokens.to_numpy(), answer.logprobs.to_numpy()
    assert drawn.shape == found.shape == (99, 3)
    for row in (10, 98):
        changed = tinker.ModelInput.from_ints([*tokens[: row + 1], int(drawn[row, 2])])
        scored = sampler.compute_logprobs(changed).result(timeout=WAIT_S)
        assert found[row, 2] == pytest.approx(scored[row + 1], abs=1e-4)
