"""The contract of questions about the prompt, of alternatives, and of agreement with the trainer."""

from functools import partial

import numpy as np
import pytest

from tinsmith.backend import SamplingBackend
from tinsmith.operations import Array, Datum, TopLogprobs
from tinsmith.testing.contract import need
from tinsmith.testing.model_driver import ModelDriver, logprobs_of
from tinsmith.testing.sampling_suite import (
    SamplingSuite,
    ask,
    in_one_loop,
    new_snapshot_id,
    params,
    random_prompt,
    with_tokens,
)

_ONE_OP, _A_MODEL = 1e-5, 1e-4
_UNUSED_LOGPROB = -99999.0


class LogprobsContract(SamplingSuite):
    @in_one_loop
    @pytest.mark.parametrize("length", [1, 2, 20])
    async def test_prompt_logprobs(self, backend: SamplingBackend, length: int) -> None:
        """One logprob per prompt token. The first has no context and is NaN."""
        need(backend.sampler_capabilities.prompt_logprobs, "prompt logprobs")
        prompt = random_prompt(20, length, backend.sampler_capabilities.vocab_size)
        output = await ask(backend, prompt, params(max_tokens=1), prompt_logprobs=True)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.dtype == np.float32
        assert output.prompt_logprobs.shape == (length,)
        assert np.isnan(output.prompt_logprobs[0])
        assert np.isfinite(output.prompt_logprobs[1:]).all()
        assert (output.prompt_logprobs[1:] <= 0).all()

    @in_one_loop
    async def test_a_prompt_that_fills_the_context_is_scored(self, backend: SamplingBackend) -> None:
        """A trainer takes a sequence as long as the context, so a teacher must score it: `compute_logprobs`."""
        limits = backend.sampler_capabilities
        need(limits.prompt_logprobs, "prompt logprobs")
        prompt = random_prompt(28, limits.max_context_tokens, limits.vocab_size)
        whole, shorter = [
            await ask(backend, part, params(max_tokens=1), prompt_logprobs=True) for part in (prompt, prompt[:-1])
        ]
        assert whole.prompt_logprobs is not None
        assert shorter.prompt_logprobs is not None
        assert np.isfinite(whole.prompt_logprobs[1:]).all()
        np.testing.assert_allclose(whole.prompt_logprobs[:-1], shorter.prompt_logprobs, rtol=0, atol=_A_MODEL)
        assert len(whole.sequences[0].tokens) == 1

    @in_one_loop
    async def test_nothing_is_answered_that_was_not_asked(self, backend: SamplingBackend) -> None:
        output = await ask(backend, random_prompt(21, 6, backend.sampler_capabilities.vocab_size), params())
        assert output.prompt_logprobs is None
        assert output.top_prompt_logprobs is None
        assert output.target_prompt_logprobs is None
        assert output.prompt_alt_tokens is None

    @in_one_loop
    async def test_last_n_leaves_the_rest_unscored(self, backend: SamplingBackend) -> None:
        need(backend.sampler_capabilities.prompt_logprobs, "prompt logprobs")
        k = min(2, backend.sampler_capabilities.max_topk_logprobs)
        prompt = random_prompt(22, 12, backend.sampler_capabilities.vocab_size)
        whole = await ask(backend, prompt, params(max_tokens=1), prompt_logprobs=True, topk_prompt_logprobs=k)
        assert whole.prompt_logprobs is not None
        for last_n, first in ((4, 8), (12, 1), (50, 1)):
            part = await ask(
                backend,
                prompt,
                params(max_tokens=1),
                prompt_logprobs=True,
                prompt_logprobs_last_n=last_n,
                topk_prompt_logprobs=k,
            )
            assert part.prompt_logprobs is not None
            assert np.isnan(part.prompt_logprobs[:first]).all()
            np.testing.assert_allclose(
                part.prompt_logprobs[first:], whole.prompt_logprobs[first:], rtol=0, atol=_ONE_OP
            )
            if part.top_prompt_logprobs is not None:
                assert (part.top_prompt_logprobs.logprobs[:first] == _UNUSED_LOGPROB).all()
                assert (part.top_prompt_logprobs.logprobs[first:] > _UNUSED_LOGPROB).all()

    @in_one_loop
    async def test_top_prompt_logprobs(self, backend: SamplingBackend) -> None:
        k = min(5, backend.sampler_capabilities.max_topk_logprobs)
        need(k, "top-k logprobs")
        need(backend.sampler_capabilities.prompt_logprobs, "prompt logprobs")
        prompt = random_prompt(23, 12, backend.sampler_capabilities.vocab_size)
        output = await ask(backend, prompt, params(max_tokens=1), prompt_logprobs=True, topk_prompt_logprobs=k)
        assert output.prompt_logprobs is not None
        assert output.top_prompt_logprobs is not None
        _assert_best_first(output.top_prompt_logprobs, len(prompt), k, first=1)
        best = output.top_prompt_logprobs
        assert (best.token_ids[0] == 0).all()
        assert (best.logprobs[0] == _UNUSED_LOGPROB).all()
        assert (output.prompt_logprobs[1:] <= best.logprobs[1:, 0] + _ONE_OP).all()
        asked = await ask(backend, prompt[:4], params(max_tokens=1, temperature=0.0), topk_prompt_logprobs=k)
        assert best.token_ids[4, 0] == asked.sequences[0].tokens[0], "row 4 must be what the first 4 tokens lead to"

    @in_one_loop
    async def test_top_sample_logprobs(self, backend: SamplingBackend) -> None:
        """They are of the same distribution as `logprobs`: a token drawn from the k best has the same value in both."""
        k = min(5, backend.sampler_capabilities.max_topk_logprobs)
        need(k, "top-k logprobs")
        prompt = random_prompt(24, 6, backend.sampler_capabilities.vocab_size)
        output = await ask(backend, prompt, params(temperature=0.7, top_k=k), num_samples=4, topk_sample_logprobs=k)
        for sequence in output.sequences:
            best = sequence.top_logprobs
            assert best is not None
            _assert_best_first(best, len(sequence.tokens), k, first=0)
            rows, columns = np.nonzero(best.token_ids == sequence.tokens[:, None])
            assert rows.tolist() == list(range(len(sequence.tokens))), "every token must be one of its row's k best"
            np.testing.assert_allclose(sequence.logprobs, best.logprobs[rows, columns], rtol=0, atol=_ONE_OP)

    @in_one_loop
    async def test_target_prompt_logprobs(self, backend: SamplingBackend) -> None:
        need(backend.sampler_capabilities.target_prompt_logprobs, "target_prompt_logprobs")
        vocab_size = backend.sampler_capabilities.vocab_size
        prompt = random_prompt(25, 12, vocab_size)
        targets = np.stack([prompt[1:], random_prompt(26, 11, vocab_size), np.full(11, -1)], axis=-1).astype(np.int64)
        targets[3, 1] = -1
        output = await ask(backend, prompt, params(max_tokens=1), prompt_logprobs=True, target_prompt_logprobs=targets)
        answer = output.target_prompt_logprobs
        assert answer is not None
        assert output.prompt_logprobs is not None
        assert answer.dtype == np.float32
        assert answer.shape == targets.shape
        assert (answer[targets < 0] == 0).all()
        assert (answer[targets >= 0] < 0).all()
        np.testing.assert_allclose(answer[:, 0], output.prompt_logprobs[1:], rtol=0, atol=_ONE_OP)

    @in_one_loop
    async def test_prompt_alternatives(self, backend: SamplingBackend) -> None:
        """Drawn from the distributions that score the prompt; greedily, they are the best tokens."""
        k = min(32, backend.sampler_capabilities.max_prompt_alt_tokens)
        need(k, "alternatives of prompt tokens")
        prompt = random_prompt(29, 30, backend.sampler_capabilities.vocab_size)
        draw = partial(ask, backend, prompt, prompt_alt_tokens_k=k, topk_prompt_logprobs=1, prompt_logprobs=True)
        output = await draw(params(max_tokens=1))
        drawn, best = output.prompt_alt_tokens, output.top_prompt_logprobs
        assert drawn is not None
        assert best is not None
        assert drawn.token_ids.shape == drawn.logprobs.shape == (29, k)
        assert drawn.token_ids.dtype == np.int32
        assert drawn.logprobs.dtype == np.float32
        scored = await ask(
            backend, prompt, params(max_tokens=1), target_prompt_logprobs=drawn.token_ids.astype(np.int64)
        )
        assert scored.target_prompt_logprobs is not None
        np.testing.assert_allclose(drawn.logprobs, scored.target_prompt_logprobs, rtol=0, atol=_A_MODEL)
        probability = np.exp(best.logprobs[1:].astype(np.float64))
        found, expected = (drawn.token_ids == best.token_ids[1:]).sum(), k * probability.sum()
        deviation = np.sqrt(k * (probability * (1 - probability)).sum())
        assert abs(found - expected) <= 5 * deviation + 1, f"the best are {found} of {drawn.token_ids.size} tokens"
        again = await draw(params(max_tokens=1))
        assert again.prompt_alt_tokens is not None
        np.testing.assert_array_equal(again.prompt_alt_tokens.token_ids, drawn.token_ids)
        other = await draw(params(max_tokens=1, seed=99))
        assert other.prompt_alt_tokens is not None
        assert (other.prompt_alt_tokens.token_ids != drawn.token_ids).any()
        greedy = await draw(params(max_tokens=1, temperature=0.0))
        assert greedy.prompt_alt_tokens is not None
        np.testing.assert_array_equal(greedy.prompt_alt_tokens.token_ids, np.broadcast_to(best.token_ids[1:], (29, k)))

    @in_one_loop
    async def test_a_prompt_of_one_token_has_no_alternatives(self, backend: SamplingBackend) -> None:
        k = min(2, backend.sampler_capabilities.max_prompt_alt_tokens)
        need(k, "alternatives of prompt tokens")
        output = await ask(backend, np.array([1], np.int32), params(max_tokens=1), prompt_alt_tokens_k=k)
        assert output.prompt_alt_tokens is not None
        assert output.prompt_alt_tokens.token_ids.shape == (0, k)

    def test_what_is_sampled_can_be_trained_on(self, backend: SamplingBackend, driver: ModelDriver) -> None:
        """A distillation trains on the alternatives that it has sampled, so it needs as many targets per token."""
        sampled, trained = backend.sampler_capabilities.max_topk_logprobs, driver.capabilities.max_targets_per_token
        assert trained >= sampled, (
            f"max_topk_logprobs is {sampled} and max_targets_per_token {trained}; raise the latter or lower the former"
        )

    @in_one_loop
    async def test_sampler_and_trainer_agree(self, backend: SamplingBackend, driver: ModelDriver) -> None:
        """Logprobs from drawing, from the prompt and from `forward` agree to 1e-4 for the same tokens."""
        model_id = driver.create_trained(rank=4, seed=11)
        snapshot = driver.backend.publish(model_id, new_snapshot_id())
        await backend.load_snapshot(snapshot)
        prompt = random_prompt(27, 21, backend.sampler_capabilities.vocab_size)
        drawn = await ask(backend, prompt, params(max_tokens=20), snapshot_id=snapshot.snapshot_id, num_samples=2)
        for sequence in drawn.sequences:
            tokens = with_tokens(prompt, sequence.tokens)
            weights = np.zeros(len(tokens) - 1, np.float32)
            inputs: dict[str, Array] = {"target_tokens": tokens[1:].astype(np.int64), "weights": weights}
            datum = Datum(tokens_T=tokens[:-1], loss_inputs=inputs)
            (trained,) = logprobs_of(driver.forward(model_id, [datum]))
            np.testing.assert_allclose(sequence.logprobs, trained[len(prompt) - 1 :], rtol=0, atol=_A_MODEL)
            if backend.sampler_capabilities.prompt_logprobs:
                again = await ask(
                    backend, tokens, params(max_tokens=1), snapshot_id=snapshot.snapshot_id, prompt_logprobs=True
                )
                assert again.prompt_logprobs is not None
                np.testing.assert_allclose(again.prompt_logprobs[1:], trained, rtol=0, atol=_A_MODEL)
        await backend.drop_snapshot(snapshot.snapshot_id)


def _assert_best_first(top: TopLogprobs, length: int, k: int, *, first: int) -> None:
    assert top.token_ids.shape == top.logprobs.shape == (length, k)
    assert top.token_ids.dtype == np.int32
    assert top.logprobs.dtype == np.float32
    used = top.logprobs[first:]
    assert (np.diff(used, axis=-1) <= 0).all(), "the best come first"
    assert (used > _UNUSED_LOGPROB).all()
    assert all(len(set(row)) == k for row in top.token_ids[first:].tolist()), "no token occurs twice in a row"
