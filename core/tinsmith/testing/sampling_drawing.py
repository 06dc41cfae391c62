"""The contract of drawing tokens: seeds, temperature, truncation, and when a sequence ends."""

import math

import numpy as np
import pytest

from tinsmith.backend import SamplingBackend
from tinsmith.operations import AdamParams, Datum, Sample, SampleOutput, TokenArray
from tinsmith.testing.contract import need
from tinsmith.testing.model_driver import ModelDriver
from tinsmith.testing.reference import Float64Array
from tinsmith.testing.sampling_suite import (
    Detokenize,
    SamplingSuite,
    all_logprobs,
    ask,
    ask_one,
    assert_same_sequence,
    in_one_loop,
    new_snapshot_id,
    params,
    random_prompt,
    with_tokens,
)

_A_MODEL = 1e-4  # allowed float32 difference after a pass through a model


class DrawingContract(SamplingSuite):
    @in_one_loop
    async def test_sequences_are_whole(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(0, 5, backend.sampler_capabilities.vocab_size)
        for max_tokens in (1, 8):
            for sequence in (await ask(backend, prompt, params(max_tokens=max_tokens), num_samples=3)).sequences:
                assert sequence.tokens.dtype == np.int32
                assert sequence.logprobs.dtype == np.float32
                assert sequence.tokens.shape == sequence.logprobs.shape == (max_tokens,)
                assert ((sequence.tokens >= 0) & (sequence.tokens < backend.sampler_capabilities.vocab_size)).all()
                assert (np.isfinite(sequence.logprobs) & (sequence.logprobs <= 0)).all()
                assert sequence.stop_reason == "length"
                assert sequence.top_logprobs is None

    @in_one_loop
    async def test_seed_decides(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(1, 5, backend.sampler_capabilities.vocab_size)
        hot = {"max_tokens": 16, "temperature": 2.0}
        first, again, other, huge = [
            await ask(backend, prompt, params(seed=seed, **hot), num_samples=2) for seed in (3, 3, 4, 2**63 - 1)
        ]
        for left, right in zip(first.sequences, again.sequences, strict=True):
            assert left.tokens.tolist() == right.tokens.tolist(), "the same seed must draw the same tokens"
        drawn = [tuple(s.tokens.tolist()) for output in (first, other, huge) for s in output.sequences]
        assert len(set(drawn)) == len(drawn), "other seeds, and the samples of one request, must draw other tokens"

    @in_one_loop
    async def test_a_stream_tells_what_is_sampled(self, backend: SamplingBackend) -> None:
        """Whatever is told, and however often: at its place in the result are the same tokens."""
        prompt = random_prompt(9, 5, backend.sampler_capabilities.vocab_size)
        wanted, told = params(max_tokens=12, temperature=2.0, seed=5), list[tuple[int, int, list[int]]]()
        op = Sample(
            sampling_session_id="contract:sample:0", snapshot_id=None, prompt_P=prompt, params=wanted, num_samples=2
        )
        streamed = await backend.sample_streaming(op, lambda *piece: told.append((*piece[:2], list(piece[2]))))
        assert isinstance(streamed, SampleOutput), streamed
        drawn = [each.tokens.tolist() for each in (await ask(backend, prompt, wanted, num_samples=2)).sequences]
        assert [each.tokens.tolist() for each in streamed.sequences] == drawn
        for sequence, first, tokens in told:
            assert tokens
            assert drawn[sequence][first : first + len(tokens)] == tokens
            assert all(type(token) is int for token in tokens)

    @in_one_loop
    async def test_greedy_takes_the_best(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(2, 5, backend.sampler_capabilities.vocab_size)
        sequence = await ask_one(backend, prompt, params(temperature=0.0, seed=1))
        assert_same_sequence(await ask_one(backend, prompt, params(temperature=0.0, seed=2)), sequence, "another seed")
        logp = (await all_logprobs(backend, with_tokens(prompt, sequence.tokens)))[len(prompt) - 1 :]
        chosen = logp[np.arange(len(sequence.tokens)), sequence.tokens]
        assert (logp.max(axis=-1) - chosen <= _A_MODEL).all(), "greedy must take the most likely token"
        np.testing.assert_allclose(sequence.logprobs, chosen, rtol=0, atol=_A_MODEL, err_msg="temperature 1 if greedy")

    @in_one_loop
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    async def test_logprobs_are_of_the_scaled_distribution(self, backend: SamplingBackend, temperature: float) -> None:
        """Logprobs refer to the whole distribution, even if top_k and top_p truncate it."""
        prompt = random_prompt(3, 5, backend.sampler_capabilities.vocab_size)
        wanted = params(temperature=temperature, top_k=20, top_p=0.9)
        sequence = await ask_one(backend, prompt, wanted)
        logp = (await all_logprobs(backend, with_tokens(prompt, sequence.tokens)))[len(prompt) - 1 :]
        scaled = _log_softmax(logp / temperature)[np.arange(len(sequence.tokens)), sequence.tokens]
        np.testing.assert_allclose(sequence.logprobs, scaled, rtol=0, atol=_A_MODEL)

    @in_one_loop
    @pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 5, "top_p": 1e-6}])
    async def test_cut_to_one_token_is_greedy(self, backend: SamplingBackend, cut: dict[str, float]) -> None:
        prompt = random_prompt(4, 5, backend.sampler_capabilities.vocab_size)
        greedy = await ask_one(backend, prompt, params(temperature=0.0))
        sequence = await ask_one(backend, prompt, params(temperature=1.5, **cut))
        assert sequence.tokens.tolist() == greedy.tokens.tolist()

    @in_one_loop
    async def test_top_k_and_top_p_cut(self, backend: SamplingBackend) -> None:
        """All of many draws at a high temperature are among the k best, or within the mass p, and cover them."""
        prompt = random_prompt(5, 5, backend.sampler_capabilities.vocab_size)
        temperature = 2.0
        scaled = _log_softmax((await all_logprobs(backend, with_tokens(prompt, [0])))[-1] / temperature)
        better_mass = {token: np.exp(scaled)[scaled > scaled[token]].sum() for token in range(len(scaled))}
        rank = {token: int((scaled > scaled[token]).sum()) for token in range(len(scaled))}
        near_even = 1e-3  # float32 may order or add up close calls differently
        few = await self._first_tokens(backend, prompt, temperature=temperature, top_k=4)
        assert {token for token in few if rank[token] > 3 and scaled[token] < sorted(scaled)[-4] - near_even} == set()
        assert len(set(few)) > 1
        nucleus = await self._first_tokens(backend, prompt, temperature=temperature, top_p=0.6)
        assert {token for token in nucleus if better_mass[token] > 0.6 + near_even} == set()
        assert len(set(nucleus)) > 1

    @in_one_loop
    async def test_frequencies_are_the_probabilities(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(6, 5, backend.sampler_capabilities.vocab_size)
        probabilities = np.exp((await all_logprobs(backend, with_tokens(prompt, [0])))[-1])
        drawn = np.array(await self._first_tokens(backend, prompt))
        counts = np.bincount(drawn, minlength=len(probabilities))
        likely = np.argsort(-probabilities)[:3]
        for token in likely:
            p = probabilities[token]
            spread = math.sqrt(p * (1 - p) / len(drawn))
            assert abs(counts[token] / len(drawn) - p) < 5 * spread + 1e-3, f"token {token}: {counts[token]} of 128"

    @in_one_loop
    async def test_stop_token_ends_and_stays(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(7, 5, backend.sampler_capabilities.vocab_size)
        free = await ask_one(backend, prompt, params(temperature=0.0, max_tokens=12))
        stop = int(free.tokens[5])
        end = free.tokens.tolist().index(stop) + 1
        stopped = await ask_one(backend, prompt, params(temperature=0.0, max_tokens=12, stop_tokens=(stop,)))
        assert stopped.tokens.tolist() == free.tokens[:end].tolist()
        assert stopped.stop_reason == "stop"
        np.testing.assert_allclose(stopped.logprobs, free.logprobs[:end], rtol=0, atol=1e-5)

    @in_one_loop
    async def test_stop_at_the_last_token_is_a_stop(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(8, 5, backend.sampler_capabilities.vocab_size)
        free = await ask_one(backend, prompt, params(temperature=0.0, max_tokens=1))
        stop = (int(free.tokens[0]),)
        stopped = await ask_one(backend, prompt, params(temperature=0.0, max_tokens=1, stop_tokens=stop))
        assert (stopped.tokens.tolist(), stopped.stop_reason) == (free.tokens.tolist(), "stop")

    @in_one_loop
    async def test_stop_string_ends_and_stays(self, backend: SamplingBackend, detokenize: Detokenize | None) -> None:
        need(backend.sampler_capabilities.stop_strings, "stop strings")
        if detokenize is None:
            pytest.skip("override the fixture 'detokenize' to have stop strings tested")
        prompt = random_prompt(9, 5, backend.sampler_capabilities.vocab_size)
        free = await ask_one(backend, prompt, params(temperature=2.0, max_tokens=24))
        tokens = free.tokens.tolist()
        stop = _spanning_text(tokens, detokenize)
        end = next(n for n in range(1, len(tokens) + 1) if stop in detokenize(tokens[:n]))
        wanted = params(temperature=2.0, max_tokens=24, stop_strings=("never to be seen", stop))
        stopped = await ask_one(backend, prompt, wanted)
        assert stopped.tokens.tolist() == tokens[:end], f"stop string {stop!r}"
        assert stopped.stop_reason == "stop"

    @in_one_loop
    async def test_end_of_sequence(self, backend: SamplingBackend, driver: ModelDriver, eos_token: int | None) -> None:
        """A model taught to end after a prompt does, the token stays, and an empty stop list runs over it."""
        if eos_token is None:
            pytest.skip("override the fixture 'eos_token' to have the end of sequence tested")
        prompt = random_prompt(10, 5, backend.sampler_capabilities.vocab_size)
        snapshot_id = await _taught_to_answer(backend, driver, prompt, eos_token)
        ended = await ask_one(backend, prompt, params(temperature=0.0, stop_at_eos=True), snapshot_id=snapshot_id)
        assert (ended.tokens.tolist(), ended.stop_reason) == ([eos_token], "stop")
        free = await ask_one(backend, prompt, params(temperature=0.0), snapshot_id=snapshot_id)
        assert free.tokens[0] == eos_token
        assert (len(free.tokens), free.stop_reason) == (8, "length")
        await backend.drop_snapshot(snapshot_id)

    @staticmethod
    async def _first_tokens(backend: SamplingBackend, prompt: TokenArray, **fields: float) -> list[int]:
        output = await ask(backend, prompt, params(max_tokens=1, **fields), num_samples=128)
        return [int(sequence.tokens[0]) for sequence in output.sequences]


async def _taught_to_answer(backend: SamplingBackend, driver: ModelDriver, prompt: TokenArray, token: int) -> str:
    """Train until the token is the answer to the prompt, and load that as a snapshot."""
    model_id = driver.create(rank=4)
    inputs = {"target_tokens": np.full(len(prompt), token), "weights": np.ones(len(prompt), np.float32)}
    for _ in range(30):
        driver.forward_backward(model_id, [Datum(tokens_T=prompt, loss_inputs=inputs)])
        driver.optim_step(model_id, AdamParams(learning_rate=0.05))
    snapshot = driver.backend.publish(model_id, new_snapshot_id())
    await backend.load_snapshot(snapshot)
    return snapshot.snapshot_id


def _spanning_text(tokens: list[int], detokenize: Detokenize) -> str:
    """Find a text that two tokens make together, so that neither of them alone would stop the sequence."""
    for i in range(2, len(tokens) - 2):
        left, both = detokenize(tokens[i : i + 1]), detokenize(tokens[i : i + 2])
        text = both[max(0, len(left) - 1) :][:2]
        if len(text) == 2 and text.isascii() and text in detokenize(tokens):
            return text
    pytest.skip("no two neighbouring tokens that were drawn make a text")


def _log_softmax(logits: Float64Array) -> Float64Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Float64Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
