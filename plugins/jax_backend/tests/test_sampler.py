"""Sampling end to end on tiny models: against the trainer's own forward pass, against torch, alone and in company."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from jax_harness import add_model, make_backend, make_op, train
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all, trainer_logprobs
from transformers import AutoModelForCausalLM

from tinsmith import AdamParams, Failed, HostSnapshot, LoraConfig, Sample
from tinsmith_jax.backend import JaxBackend

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 160
LORAS = {"a": LoraConfig(rank=4, seed=1), "b": LoraConfig(rank=16, seed=2), "c": LoraConfig(rank=7, seed=3)}


@pytest.fixture(params=["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def with_experts(tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[JaxBackend]:
    backend = make_backend(tiny_models["qwen3_moe"], jax_cache, decode_slots=4)
    yield backend
    backend.close()


@pytest.fixture
async def backend(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[JaxBackend]:
    """A shared backend, which has four slots, with three published adapters."""
    shared: JaxBackend = request.getfixturevalue("tiny_backend" if kind == "qwen3" else "with_experts")
    for name, lora in LORAS.items():
        add_model(shared, name, lora, random_B=True)
        await shared.load_snapshot(shared.publish(name, f"snap-{name}"))
    yield shared
    for name in LORAS:
        await shared.drop_snapshot(f"snap-{name}")
        shared.unload_model(name)


# Against the trainer and torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [1, 64, 65, 129, 300, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 63, 66))]
)
async def test_sampled_logprobs_are_those_of_the_trainer(backend: JaxBackend, length: int) -> None:
    given = prompt(length, seed=length)
    output = await sample(backend, make_sample(given, "snap-b", max_tokens=12, num_samples=2))
    for sequence in output.sequences:
        whole = np.concatenate([given, sequence.tokens])
        expected = trainer_logprobs(backend, "b", whole)[length - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
async def test_logprobs_are_of_the_scaled_distribution_before_truncation(
    backend: JaxBackend, temperature: float
) -> None:
    given = prompt(20)
    op = make_sample(given, "snap-a", temperature=temperature, max_tokens=6, top_k=7, top_p=0.9)
    (sequence,) = (await sample(backend, op)).sequences
    whole = np.concatenate([given, sequence.tokens])
    every_token = np.tile(np.arange(VOCAB), (len(whole) - 1, 1))
    # the trainer takes 128 targets per token: ask for all of them in two parts
    parts = [trainer_logprobs(backend, "a", whole, part) for part in np.split(every_token, 2, axis=1)]
    logits = np.concatenate(parts, axis=1)[len(given) - 1 :] / temperature
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(sequence.logprobs, expected[np.arange(6), sequence.tokens], atol=1e-4)
    ranks = (expected > expected[np.arange(6), sequence.tokens][:, None]).sum(-1)
    assert (ranks < 7).all()


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("qwen3", "qwen3_untied", "qwen3_moe")), "llama3"],
)
async def test_greedy_equals_the_argmax_of_torch(tiny_models: dict[str, Path], jax_cache: Path, kind: str) -> None:
    backend = make_backend(tiny_models[kind], jax_cache, decode_slots=2)
    plain = {"dtype": torch.float64, "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[kind], **plain)
    for length in (1, 30, 70):
        given = prompt(length, seed=length)
        output = await sample(backend, make_sample(given, temperature=0.0, max_tokens=20, prompt_logprobs=True))
        (sequence,) = output.sequences
        with torch.no_grad():
            logits = reference(torch.tensor(np.concatenate([given, sequence.tokens]))[None]).logits[0]
        logp = torch.log_softmax(logits, -1).numpy()
        assert sequence.tokens.tolist() == logp[length - 1 : -1].argmax(-1).tolist()
        np.testing.assert_allclose(sequence.logprobs, logp[length - 1 : -1].max(-1), atol=1e-4)
        np.testing.assert_allclose(output.prompt_logprobs[1:], logp[np.arange(length - 1), given[1:]], atol=1e-4)
    backend.close()


@pytest.mark.thorough
async def test_bfloat16_agrees_with_its_trainer(tiny_models: dict[str, Path], jax_cache: Path) -> None:
    """Same weights, other order of rounding: about 0.02 apart, where a wrong cast or mask is off by nats."""
    backend = make_backend(tiny_models["llama3"], jax_cache, decode_slots=2, dtype="bfloat16")
    add_model(backend, "m", LORAS["a"], random_B=True)
    await backend.load_snapshot(backend.publish("m", "m"))
    given = prompt(100)
    output = await sample(backend, make_sample(given, "m", prompt_logprobs=True, topk_sample_logprobs=3))
    (sequence,) = output.sequences
    expected = trainer_logprobs(backend, "m", np.concatenate([given, sequence.tokens]))
    found = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
    np.testing.assert_allclose(found, expected, atol=0.1)
    backend.close()


@pytest.mark.parametrize("count", [500, pytest.param(3000, marks=pytest.mark.thorough)])
async def test_sampling_follows_the_models_distribution(backend: JaxBackend, count: int) -> None:
    """First tokens of many samples against softmax; a chi-square statistic with fixed seeds."""
    given = prompt(9)
    ops = [make_sample(given, "snap-a", max_tokens=1, num_samples=100, seed=seed) for seed in range(count // 100)]
    tokens = np.array([s.tokens[0] for output in await sample_all(backend, ops) for s in output.sequences])
    repeated = np.concatenate([given, [0]]).astype(np.int32)
    parts = np.split(np.arange(VOCAB)[None].repeat(len(given), 0), 2, axis=1)
    logp = np.concatenate([trainer_logprobs(backend, "a", repeated, part) for part in parts], axis=1)[-1]
    expected = np.exp(logp.astype(np.float64)) * count
    seen = np.bincount(tokens, minlength=VOCAB)
    likely = expected >= 5
    groups_seen = np.append(seen[likely], seen[~likely].sum())
    groups_expected = np.append(expected[likely], expected[~likely].sum())
    chi_square = ((groups_seen - groups_expected) ** 2 / groups_expected).sum()
    freedom = len(groups_seen) - 1
    assert freedom > 3
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


# Prompt scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 64, 65, 130, 300])
async def test_prompt_logprobs_are_those_of_the_trainer(backend: JaxBackend, length: int) -> None:
    given = prompt(length, seed=length)
    output = await sample(
        backend, make_sample(given, "snap-c", max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=5)
    )
    scored, top = output.prompt_logprobs, output.top_prompt_logprobs
    assert scored.shape == (length,)
    assert np.isnan(scored[0])
    assert top.token_ids.shape == top.logprobs.shape == (length, 5)
    assert top.token_ids[0].tolist() == [0] * 5
    assert (top.logprobs[0] == -99999.0).all()
    if length > 1:
        np.testing.assert_allclose(scored[1:], trainer_logprobs(backend, "c", given), atol=1e-4)
        best = trainer_logprobs(backend, "c", given, top.token_ids[1:].astype(np.int64))
        np.testing.assert_allclose(top.logprobs[1:], best, atol=1e-4)
        assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()
        assert (scored[1:] <= top.logprobs[1:, 0] + 1e-5).all()


async def test_only_the_last_n_prompt_positions_are_scored(backend: JaxBackend) -> None:
    given = prompt(150)
    full = await sample(backend, make_sample(given, prompt_logprobs=True, topk_prompt_logprobs=3))
    for last_n in (1, 20, 22, 100, 150, 151):
        op = make_sample(given, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=last_n)
        part = await sample(backend, op)
        first = max(1, len(given) - last_n)
        assert np.isnan(part.prompt_logprobs[:first]).all()
        np.testing.assert_array_equal(part.prompt_logprobs[first:], full.prompt_logprobs[first:])
        assert (part.top_prompt_logprobs.logprobs[:first] == -99999.0).all()
        assert (part.top_prompt_logprobs.token_ids[:first] == 0).all()
        np.testing.assert_array_equal(
            part.top_prompt_logprobs.token_ids[first:], full.top_prompt_logprobs.token_ids[first:]
        )


@pytest.mark.parametrize("columns", [1, 3, 70])
async def test_targets_of_the_prompt(backend: JaxBackend, columns: int) -> None:
    given = prompt(100)
    targets = np.random.default_rng(2).integers(0, VOCAB, (99, columns))
    targets[::3, 0] = -1
    op = make_sample(given, "snap-a", target_prompt_logprobs=targets, max_tokens=1, prompt_logprobs_last_n=1)
    found = (await sample(backend, op)).target_prompt_logprobs
    assert found.shape == (99, columns)
    assert (found[targets == -1] == 0).all()
    parts = [
        trainer_logprobs(backend, "a", given, np.maximum(targets[:, first : first + 16], 0))
        for first in range(0, columns, 16)
    ]
    expected = np.where(targets == -1, 0.0, np.concatenate(parts, axis=1))
    np.testing.assert_allclose(found, expected, atol=1e-4)


async def test_top_logprobs_of_sampled_tokens(backend: JaxBackend) -> None:
    plain = await sample(backend, make_sample(prompt(10), "snap-a", max_tokens=9))
    output = await sample(backend, make_sample(prompt(10), "snap-a", max_tokens=9, topk_sample_logprobs=VOCAB - 50))
    assert_same_sequences(plain, output)
    (sequence,) = output.sequences
    top = sequence.top_logprobs
    assert top.token_ids.shape == top.logprobs.shape == (9, VOCAB - 50)
    hits = 0
    for token, logprob, ids, values in zip(
        sequence.tokens, sequence.logprobs, top.token_ids, top.logprobs, strict=True
    ):
        assert (np.diff(values) <= 0).all()
        if token in ids:
            hits += 1
            assert values[ids.tolist().index(token)] == logprob
    assert hits > 0


# Isolation ------------------------------------------------------------------------------------------------------------


def mixed_requests(count: int) -> list[Sample]:
    rng = np.random.default_rng(11)
    requests = []
    for number in range(count):
        length = int(rng.choice([1, 5, 40, 64, 65, 100, 200, 280]))
        requests.append(
            make_sample(
                prompt(length, seed=number),
                [None, "snap-a", "snap-b", "snap-c"][number % 4],
                session=f"tenant-{number % 5}",
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.choice([0.0, 0.5, 1.0, 1.3])),
                top_k=int(rng.choice([-1, 1, 10])),
                top_p=float(rng.choice([1.0, 0.8])),
                seed=int(rng.integers(0, 2**63)),
                num_samples=int(rng.choice([1, 1, 1, 3, 6])),
                prompt_logprobs=bool(rng.random() < 0.5),
                topk_sample_logprobs=int(rng.choice([0, 0, 4])),
                stop_at_eos=bool(rng.random() < 0.5),
                stop_tokens=tuple(int(token) for token in rng.integers(0, VOCAB, rng.choice([0, 2, 12]))),
            )
        )
    return requests


@pytest.mark.parametrize("count", [32, pytest.param(64, marks=pytest.mark.thorough)])
async def test_mixed_requests_give_the_same_bits_as_each_alone(backend: JaxBackend, count: int) -> None:
    requests = mixed_requests(count)
    together = await sample_all(backend, requests)
    for request, result in list(zip(requests, together, strict=True))[::3]:
        alone = await sample(backend, request)
        assert_same_sequences(alone, result)
        if request.prompt_logprobs:
            np.testing.assert_array_equal(alone.prompt_logprobs, result.prompt_logprobs)
        assert len(result.sequences) == request.num_samples
        for sequence in result.sequences:
            assert 1 <= len(sequence.tokens) == len(sequence.logprobs) <= request.params.max_tokens


async def test_other_interleavings_give_the_same_bits(
    backend: JaxBackend, kind: str, tiny_models: dict[str, Path], jax_cache: Path
) -> None:
    """Other steps per dispatch, other prefill budget, another order of arrival."""
    requests = mixed_requests(12)
    here = await sample_all(backend, requests)
    other = make_backend(tiny_models[kind], jax_cache, decode_slots=4, decode_steps=7, prefill_tokens=64)
    for name in LORAS:
        await other.load_snapshot(backend.publish(name, f"snap-{name}"))
    there = await sample_all(other, requests[::-1])
    other.close()
    for one, another in zip(here, there[::-1], strict=True):
        assert_same_sequences(one, another)


async def test_samples_of_a_group_differ_and_do_not_depend_on_its_size(backend: JaxBackend) -> None:
    small = await sample(backend, make_sample(prompt(80), "snap-a", num_samples=2, max_tokens=10))
    large = await sample(backend, make_sample(prompt(80), "snap-a", num_samples=9, max_tokens=10))
    assert len({tuple(sequence.tokens.tolist()) for sequence in large.sequences}) == 9
    for one, other in zip(small.sequences, large.sequences, strict=False):
        assert one.tokens.tolist() == other.tokens.tolist()


async def test_seeds_use_all_their_bits(backend: JaxBackend) -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1]
    outputs = await sample_all(backend, [make_sample(prompt(5), seed=seed, max_tokens=12) for seed in seeds])
    assert len({tuple(output.sequences[0].tokens.tolist()) for output in outputs}) == len(seeds)


async def test_a_diverged_neighbour_fails_alone(backend: JaxBackend) -> None:
    weights = {name: np.full_like(value, np.nan) for name, value in backend.capture_state("a").weights.items()}
    await backend.load_snapshot(HostSnapshot("nan", LORAS["a"], weights))
    healthy = [make_sample(prompt(70, seed=n), "snap-b", max_tokens=25) for n in range(3)]
    before = await sample_all(backend, healthy)
    broken = make_sample(prompt(200), "nan", max_tokens=25)
    *during, failed = await asyncio.gather(*(backend.sample(op) for op in [*healthy, broken]))
    after = await sample_all(backend, healthy * 2)  # in the slot that held NaN as well
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert "not finite" in failed.message
    for one, two, three, four in zip(before, during, after[:3], after[3:], strict=True):
        for other in (two, three, four):
            assert_same_sequences(one, other)
    await backend.drop_snapshot("nan")


# Snapshots ------------------------------------------------------------------------------------------------------------


async def test_a_snapshot_stays_and_sampling_changes_no_training(backend: JaxBackend) -> None:
    """Two models alike: one trains while nothing is sampled, the other while samples of its first snapshot run."""
    adam = AdamParams(learning_rate=1e-2)
    requests = [make_sample(prompt(40), "old", max_tokens=15), make_sample(prompt(40), None, max_tokens=15)]
    for name in ("m", "quiet"):
        add_model(backend, name, LORAS["a"], random_B=True)
    quiet = [train(backend, make_op("quiet", step, [30, 50, 9]), adam) for step in range(3)]
    await backend.load_snapshot(backend.publish("m", "old"))
    first = await sample_all(backend, requests)
    busy = []
    for step in range(3):
        running = [asyncio.ensure_future(backend.sample(request)) for request in requests]
        busy.append(await asyncio.to_thread(train, backend, make_op("m", step, [30, 50, 9]), adam))
        for one, other in zip(first, await asyncio.gather(*running), strict=True):
            assert_same_sequences(one, other)
    await backend.load_snapshot(backend.publish("m", "new"))
    fresh = await sample(backend, make_sample(prompt(40), "new", max_tokens=15))
    assert fresh.sequences[0].logprobs.tolist() != first[0].sequences[0].logprobs.tolist()
    for (loss, logprobs), (quiet_loss, quiet_logprobs) in zip(busy, quiet, strict=True):
        assert loss == quiet_loss
        for one, other in zip(logprobs, quiet_logprobs, strict=True):
            np.testing.assert_array_equal(one, other)
    for name in ("old", "new"):
        await backend.drop_snapshot(name)


async def test_a_host_snapshot_samples_like_the_device_one(backend: JaxBackend) -> None:
    state = backend.capture_state("c")
    await backend.load_snapshot(HostSnapshot("host", LORAS["c"], state.weights))
    from_host = await sample(backend, make_sample(prompt(50), "host", max_tokens=10))
    from_device = await sample(backend, make_sample(prompt(50), "snap-c", max_tokens=10))
    assert_same_sequences(from_host, from_device)
    await backend.drop_snapshot("host")


async def test_dropping_waits_for_running_samples(backend: JaxBackend) -> None:
    await backend.load_snapshot(backend.publish("a", "short-lived"))
    running = asyncio.ensure_future(backend.sample(make_sample(prompt(30), "short-lived", max_tokens=100)))
    await asyncio.sleep(0)  # lets the sample take its reference
    await backend.drop_snapshot("short-lived")
    assert running.done()
    assert len(running.result().sequences[0].tokens) == 100
    refused = await backend.sample(make_sample(prompt(3), "short-lived"))
    assert isinstance(refused, Failed)
    assert "no snapshot 'short-lived'" in refused.message
    await backend.drop_snapshot("short-lived")  # unknown by now: ignored
