"""Sampling through the unmodified SDK."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import tinker
from tinker import SamplingParams

from tinsmith.testing.sdk_data import TOKENS, datum, logprobs, step

PROMPT = tinker.ModelInput.from_ints(TOKENS)


@pytest.fixture
def base(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model="toy").result(timeout=300)


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)


def tokens_of(sampler: tinker.SamplingClient, seed: int = 3, count: int = 1) -> list[list[int]]:
    params = SamplingParams(max_tokens=6, seed=seed, stop=[])
    response = sampler.sample(PROMPT, count, params).result(timeout=300)
    return [list(sequence.tokens) for sequence in response.sequences]


def test_a_seed_decides_the_samples(base: tinker.SamplingClient) -> None:
    one, again, other = tokens_of(base, 3, 4), tokens_of(base, 3, 4), tokens_of(base, 4, 4)
    assert one == again != other
    assert len({tuple(each) for each in one}) > 1
    assert all(len(each) == 6 for each in one)


def test_sequences_have_ids_and_logprobs(base: tinker.SamplingClient) -> None:
    response = base.sample(PROMPT, 3, SamplingParams(max_tokens=4, stop=[])).result(timeout=300)
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        assert sequence.stop_reason == "length"
        assert len(sequence.logprobs or []) == len(sequence.tokens) == 4
        assert all(logprob <= 0 for logprob in sequence.logprobs or [])


def test_greedy_is_the_best_token(base: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    response = base.sample(PROMPT, 1, params, topk_sample_logprobs=3).result(timeout=300)
    (sequence,) = response.sequences
    assert sequence.topk_logprobs is not None
    assert [row[0][0] for row in sequence.topk_logprobs] == list(sequence.tokens)


def test_a_stop_token_stays_in_the_output(base: tinker.SamplingClient) -> None:
    (free,) = tokens_of(base, 3)
    params = SamplingParams(max_tokens=6, seed=3, stop=[free[2]])
    (sequence,) = base.sample(PROMPT, 1, params).result(timeout=300).sequences
    assert list(sequence.tokens) == free[: free.index(free[2]) + 1]
    assert sequence.stop_reason == "stop"


def test_prompt_scores_agree_with_forward(model: tinker.TrainingClient) -> None:
    step(model, [datum()], learning_rate=0.05)
    sampler = model.save_weights_and_get_sampling_client().result(timeout=300)
    scored = sampler.compute_logprobs(PROMPT).result(timeout=300)
    forward = logprobs(model.forward([datum()], "cross_entropy").result(timeout=300))[0]
    assert scored[0] is None
    assert len(scored) == len(TOKENS)
    np.testing.assert_allclose(scored[1:], forward, atol=1e-5)


def test_only_the_last_prompt_tokens_are_scored_where_asked(base: tinker.SamplingClient) -> None:
    whole = base.compute_logprobs(PROMPT).result(timeout=300)
    last = base.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result(timeout=300)
    assert last[:-2] == [None] * (len(TOKENS) - 2)
    assert last[-2:] == pytest.approx(whole[-2:])


def test_top_prompt_logprobs(base: tinker.SamplingClient) -> None:
    response = base.sample(
        PROMPT, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result(timeout=300)
    rows = response.topk_prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    for row in rows[1:]:
        assert row is not None
        scores = [score for _, score in row]
        assert scores == sorted(scores, reverse=True)
        assert len(row) == 3


def test_scores_of_chosen_tokens(base: tinker.SamplingClient) -> None:
    targets = np.full((len(TOKENS) - 1, 2), -1, np.int64)
    targets[:, 0] = TOKENS[1:]
    response = base.sample(
        PROMPT,
        1,
        SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        target_prompt_logprobs=tinker.TensorData.from_numpy(targets),
    ).result(timeout=300)
    assert response.target_prompt_logprobs is not None
    scores = response.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(scores[:, 0], response.prompt_logprobs[1:], atol=1e-6)
    np.testing.assert_array_equal(scores[:, 1], 0.0)


def test_scores_of_sparse_targets_keep_their_indices(base: tinker.SamplingClient) -> None:
    asked = {  # rows 1 and 4, the columns out of order
        "sparse_crow_indices": [0, 0, 2, 2, 2, *[3] * (len(TOKENS) - 5)],
        "sparse_col_indices": [5, 2, 0],
    }
    targets = tinker.TensorData(data=[TOKENS[2], 11, TOKENS[5]], dtype="int64", shape=[len(TOKENS) - 1, 7], **asked)
    response = base.sample(
        PROMPT, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True, target_prompt_logprobs=targets
    ).result(timeout=300)
    scores = response.target_prompt_logprobs
    assert scores is not None
    assert (scores.dtype, scores.shape) == ("float32", targets.shape)
    assert {name: list(getattr(scores, name)) for name in asked} == asked
    expected = [response.prompt_logprobs[2], response.prompt_logprobs[5]]
    np.testing.assert_allclose([scores.data[0], scores.data[2]], expected, atol=1e-6)
    assert scores.data[1] < 0


def test_a_snapshot_never_changes(model: tinker.TrainingClient) -> None:
    """Taken at step k it gives the same after training went on; sampling changes no training."""
    step(model, [datum()], learning_rate=0.1)
    ephemeral = model.save_weights_and_get_sampling_client().result(timeout=300)
    path = model.save_weights_for_sampler("kept").result(timeout=300).path
    persisted = model.create_sampling_client(path).result(timeout=300)
    before = tokens_of(ephemeral), ephemeral.compute_logprobs(PROMPT).result(timeout=300)
    assert (tokens_of(persisted), persisted.compute_logprobs(PROMPT).result(timeout=300)) == before
    for _ in range(3):
        step(model, [datum()], learning_rate=0.5)
    newest = model.save_weights_and_get_sampling_client().result(timeout=300)
    assert newest.compute_logprobs(PROMPT).result(timeout=300) != before[1]
    assert (tokens_of(ephemeral), ephemeral.compute_logprobs(PROMPT).result(timeout=300)) == before
    assert (tokens_of(persisted), persisted.compute_logprobs(PROMPT).result(timeout=300)) == before


def test_many_samples_at_once(base: tinker.SamplingClient) -> None:
    params = [SamplingParams(max_tokens=1 + index % 7, seed=index, stop=[]) for index in range(64)]
    futures = [base.sample(PROMPT, 1, each) for each in params]
    for each, future in zip(params, futures, strict=True):
        (sequence,) = future.result(timeout=300).sequences
        assert len(sequence.tokens) == each.max_tokens


def test_a_pickled_sampler_samples_too(base: tinker.SamplingClient) -> None:
    clone = pickle.loads(pickle.dumps(base))
    assert tokens_of(clone) == tokens_of(base)
    clone.holder.close()  # it has connections and heartbeats of its own


def test_alternatives_of_prompt_tokens_are_drawn_at_the_temperature(base: tinker.SamplingClient) -> None:
    """Each token as often as its probability at that temperature says, with its logprob at temperature 1."""
    number = 30 * 64
    futures = [
        base.sample(PROMPT, 1, SamplingParams(max_tokens=1, temperature=0.5, seed=seed), prompt_alt_tokens_k=64)
        for seed in range(30)
    ]
    drawn = [each.result(timeout=300).prompt_alt_tokens for each in futures]
    rows = PROMPT.length - 1
    tokens = np.concatenate([each.tokens.to_numpy() for each in drawn if each is not None], axis=1)
    logprobs = np.concatenate([each.logprobs.to_numpy() for each in drawn if each is not None], axis=1)
    assert tokens.shape == logprobs.shape == (rows, number)
    assert (tokens.dtype, logprobs.dtype) == (np.int64, np.float32)
    vocabulary = np.tile(np.arange(64), (rows, 1))
    targets = tinker.TensorData.from_numpy(vocabulary)
    scored = base.sample(PROMPT, 1, SamplingParams(max_tokens=1), target_prompt_logprobs=targets).result(timeout=300)
    assert scored.target_prompt_logprobs is not None
    logp = scored.target_prompt_logprobs.to_numpy().astype(np.float64)
    np.testing.assert_allclose(logprobs, np.take_along_axis(logp, tokens, axis=1), rtol=0, atol=1e-5)
    expected = np.exp(2 * logp) / np.exp(2 * logp).sum(axis=1, keepdims=True)
    counts = (tokens[:, :, None] == np.arange(64)).sum(axis=1)
    spread = np.sqrt(number * expected * (1 - expected))
    assert (np.abs(counts - number * expected) <= 6 * spread + 1).all()


def test_what_is_not_offered_is_refused_by_name(
    base: tinker.SamplingClient, model: tinker.TrainingClient, new_client: Callable[[], tinker.ServiceClient]
) -> None:
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k is 65; allowed: 0 to 64"):
        base.sample(PROMPT, 1, SamplingParams(max_tokens=1), prompt_alt_tokens_k=65).result(timeout=300)
    with pytest.raises(tinker.BadRequestError, match="exceeds the model's context window"):
        base.sample(PROMPT, 1, SamplingParams(max_tokens=100_000)).result(timeout=300)
