"""A step that requests share fails because of one of them: that one is refused, and the others' bits stay the same."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax_harness import add_model, lose_pages, make_backend, sampling_of
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all

from tinsmith import Failed, LoraConfig, Sample, SampleOutput, SamplingBackend
from tinsmith_checkpoints.huggingface.stopping import DecodedTail
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.sampling_values import PageCopy, PromptTile, SlotInput

pytestmark = pytest.mark.usefixtures("quick_compilation")

CULPRIT_SEED = 77
MARK = 150  # a token of the culprit's prompt alone
BAD_SCALE = 3.0  # of an adapter that cannot be written


class PlantedError(RuntimeError):
    pass


@pytest.fixture
def backend(tiny_backend: JaxBackend) -> JaxBackend:
    return tiny_backend


@pytest.fixture
def culprit() -> Sample:
    tokens = prompt(70)
    tokens[tokens == MARK] = MARK - 1
    tokens[5] = MARK
    return make_sample(
        tokens,
        session="culprit",
        seed=CULPRIT_SEED,
        max_tokens=20,
        num_samples=2,
        prompt_logprobs=True,
        topk_sample_logprobs=2,
    )


def neighbours(count: int = 5) -> list[Sample]:
    """Requests of several kinds, two of which begin with the same page. None has the culprit's seed or mark."""
    ops = []
    for n in range(count):
        tokens = prompt(90 if n < 2 else 9 + n, seed=3 if n < 2 else n)
        tokens[tokens == MARK] = MARK - 1
        scored = {"prompt_logprobs": n % 2 == 0, "topk_prompt_logprobs": 2 * (n % 2)}
        ops.append(make_sample(tokens, session=f"s{n % 3}", seed=n, max_tokens=16, num_samples=1 + n % 2, **scored))
    return ops


async def at_once(backend: SamplingBackend, ops: list[Sample]) -> list[SampleOutput | Failed]:
    return list(await asyncio.gather(*(backend.sample(op) for op in ops)))


def assert_same(result: SampleOutput | Failed, expected: SampleOutput) -> None:
    assert isinstance(result, SampleOutput), result
    assert_same_sequences(result, expected)
    for name in ("prompt_logprobs", "target_prompt_logprobs"):
        one, other = getattr(result, name), getattr(expected, name)
        np.testing.assert_array_equal(one, other)
    if expected.top_prompt_logprobs is not None:
        assert result.top_prompt_logprobs is not None
        np.testing.assert_array_equal(result.top_prompt_logprobs.logprobs, expected.top_prompt_logprobs.logprobs)


def plant(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, step: str, *, lost: bool = False) -> list[int]:
    """Let a step fail whenever the culprit is in it. Return a list that gets an entry with each failure."""
    device, failures = sampling_of(backend), []
    original, has_culprit = getattr(device, step), CulpritFinder()

    def planted(given: Any, *rest: Any, **options: Any) -> Any:
        if not has_culprit(given):
            return original(given, *rest, **options)
        failures.append(1)
        if lost:
            lose_pages(device)
        msg = "planted"
        raise PlantedError(msg)

    if step == "copy_pages":
        monkeypatch.setattr(device, "prefill", has_culprit.noting(device.prefill))
    monkeypatch.setattr(device, step, planted)
    return failures


class CulpritFinder:
    """Tells whether the culprit is in what a step of the device is given."""

    def __init__(self) -> None:
        self._pages: set[tuple[int, int]] = set()  # of the culprit's prompt, by shard

    def noting(self, prefill: Any) -> Any:
        def noted(tiles: list[PromptTile]) -> Any:
            for tile in tiles:
                own = MARK in tile.tokens or any((tile.shard, page) in self._pages for page in tile.pages[:-1])
                (self._pages.add if own else self._pages.discard)((tile.shard, tile.pages[-1]))
            return prefill(tiles)

        return noted

    def __call__(self, given: SlotInput | PromptTile | list[PageCopy | PromptTile]) -> bool:
        if isinstance(given, SlotInput):  # not at its first token, so that there is something to put back
            at_work = (given.seed_words[:, 1] == CULPRIT_SEED) & (given.left > 0) & (given.positions > 75)
            return bool(at_work.any())
        each = given if isinstance(given, list) else [given]
        return any(self._is_culprits(one) for one in each)

    def _is_culprits(self, one: PageCopy | PromptTile) -> bool:
        return (one.shard, one.source) in self._pages if isinstance(one, PageCopy) else MARK in one.tokens


@pytest.mark.parametrize("lost", [False, True], ids=["intact", "lost"])
@pytest.mark.parametrize("step", ["prefill", "score", "copy_pages", "decode"])
async def test_a_step_that_fails_because_of_one_refuses_that_one(
    backend: JaxBackend, culprit: Sample, monkeypatch: pytest.MonkeyPatch, step: str, *, lost: bool
) -> None:
    """Whether the device's state is as before, or lost, so that all must be drawn anew."""
    others = neighbours()
    expected = await sample_all(backend, others)
    failures = plant(backend, monkeypatch, step, lost=lost)
    refused, *results = await at_once(backend, [culprit, *others])
    assert failures
    assert isinstance(refused, Failed)
    assert refused.category == "server"
    assert "this request alone" in refused.message
    assert "reference" in refused.message  # the error's text is the operator's
    assert "planted" not in refused.message
    for result, right in zip(results, expected, strict=True):
        assert_same(result, right)
    monkeypatch.undo()
    assert isinstance(await backend.sample(culprit), SampleOutput)
    for op, right in zip(others, expected, strict=True):  # what the cache keeps of prompts is right, too
        assert_same(await backend.sample(op), right)


@pytest.mark.parametrize("lost", [False, True], ids=["intact", "lost"])
@pytest.mark.parametrize("step", ["prefill", "decode"])
async def test_a_step_that_fails_once_refuses_nobody(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, step: str, *, lost: bool
) -> None:
    ops = neighbours(8)
    expected = await sample_all(backend, ops)
    device, calls = sampling_of(backend), []
    original = getattr(device, step)

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            if lost:
                lose_pages(device)
            msg = "out of memory"
            raise RuntimeError(msg)
        return original(*args)

    monkeypatch.setattr(device, step, fail_once)
    for result, right in zip(await at_once(backend, ops), expected, strict=True):
        assert_same(result, right)


async def test_an_adapter_that_cannot_be_written_fails_its_own_samples(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "bad"):
        lora = LoraConfig(rank=4, seed=1, alpha=4.0 if name == "good" else 4.0 * BAD_SCALE)
        add_model(backend, name, lora, random_B=True)
        await backend.load_snapshot(backend.publish(name, name))
    mine = [make_sample(prompt(20, seed=n), "good", session=f"s{n}", max_tokens=9) for n in range(3)]
    expected = await sample_all(backend, mine)
    device = sampling_of(backend)
    write = device.write_adapter

    def planted(row: int, arrays: Any, scale: float) -> None:
        if scale == BAD_SCALE:
            msg = "planted"
            raise PlantedError(msg)
        write(row, arrays, scale)

    monkeypatch.setattr(device, "write_adapter", planted)
    for _ in range(7):  # more often than there are rows: a failure uses none up
        refused, *results = await at_once(backend, [make_sample(prompt(20), "bad", session="bad"), *mine])
        assert isinstance(refused, Failed)
        for result, right in zip(results, expected, strict=True):
            assert_same(result, right)
    for name in ("good", "bad"):
        await backend.drop_snapshot(name)


HOSTILE = {
    "top_k": {"top_k": 2**31},
    "seed": {"seed": 2**64},
    "max_tokens": {"max_tokens": -(2**70)},
    "stop_tokens": {"stop_tokens": (2**40,)},
    "stop_strings": {"stop_strings": (7,)},
}


@pytest.mark.parametrize("field", HOSTILE)
async def test_numbers_that_the_host_cannot_prepare_refuse_their_request(backend: JaxBackend, field: str) -> None:
    """The checks refuse most of these: here is what one that slips through does."""
    others = neighbours()
    expected = await sample_all(backend, others)
    hostile = make_sample(prompt(4), session="hostile", **HOSTILE[field])
    refused, *results = await at_once(backend, [hostile, *others])
    assert isinstance(refused, Failed)
    for result, right in zip(results, expected, strict=True):
        assert_same(result, right)


async def test_collecting_that_fails_refuses_its_request(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop rules decode text, of any tokens."""
    others = neighbours()
    expected = await sample_all(backend, others)
    culprit = make_sample(prompt(12), session="culprit", max_tokens=30, stop_strings=("\x00",))

    def broken(*_: object) -> bool:
        msg = "planted"
        raise PlantedError(msg)

    monkeypatch.setattr(DecodedTail, "push", broken)
    refused, *results = await at_once(backend, [culprit, *others])
    assert isinstance(refused, Failed)
    assert "this request alone" in refused.message
    for result, right in zip(results, expected, strict=True):
        assert_same(result, right)


@pytest.fixture
def own_backend(contract_model: Any, jax_cache: Any) -> Iterator[JaxBackend]:
    from few_programs import FEW_PROGRAMS

    backend = make_backend(contract_model, jax_cache, **FEW_PROGRAMS)
    yield backend
    backend.close()


@pytest.fixture
def small_steps(contract_model: Any, jax_cache: Any) -> Iterator[JaxBackend]:
    """A backend that reads one tile and decodes two tokens in a round."""
    from few_programs import FEW_PROGRAMS

    backend = make_backend(contract_model, jax_cache, **FEW_PROGRAMS, decode_steps=2, prefill_tokens=64)
    yield backend
    backend.close()


async def test_a_late_failure_does_not_part_what_had_gone_well_together(
    small_steps: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is lost, so all are drawn anew: together, but for the step that failed."""
    ops = [make_sample(prompt(9, seed=n), session=f"s{n}", seed=n, max_tokens=100) for n in range(4)]
    calls: list[int] = []
    device = sampling_of(small_steps)
    original = device.decode

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(device, "decode", counted)
    expected = await sample_all(small_steps, ops)
    undisturbed = len(calls)
    last = undisturbed - 2

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == last:
            lose_pages(device)
            msg = "out of memory"
            raise RuntimeError(msg)
        return original(*args)

    calls.clear()
    monkeypatch.setattr(device, "decode", fail_once)
    for result, right in zip(await at_once(small_steps, ops), expected, strict=True):
        assert_same(result, right)
    assert len(calls) <= 2 * undisturbed + 2 * len(ops), f"{undisturbed} without the failure"


async def test_suspects_do_not_wait_behind_a_load_that_does_not_end(
    small_steps: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose reading failed are read alone, though others always wait to be read."""
    device, calls, both_wait = sampling_of(small_steps), [], threading.Event()
    original = device.prefill

    def planted(tiles: list[PromptTile]) -> Any:
        calls.append(1)
        both_wait.wait()
        if len(calls) == 2:  # in a step of all who wait to be read
            msg = "out of memory"
            raise RuntimeError(msg)
        return original(tiles)

    async def keep_loading(number: int) -> None:
        for n in range(6):
            tokens = prompt(100, seed=100 * number + n)
            await sample(small_steps, make_sample(tokens, session=f"load{number}", max_tokens=1))

    monkeypatch.setattr(device, "prefill", planted)
    ops = [make_sample(prompt(100, seed=n), session=str(n), max_tokens=1) for n in range(2)]
    samples = [asyncio.ensure_future(sample(small_steps, op)) for op in ops]
    await asyncio.sleep(0)  # each asks in its first step
    both_wait.set()
    loads = [asyncio.ensure_future(keep_loading(number)) for number in range(1, 5)]
    await asyncio.gather(*samples)
    assert len(calls) > 2
    assert not any(each.done() for each in loads)
    await asyncio.gather(*loads)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [PlantedError, StopIteration, SystemExit])
async def test_a_device_that_fails_by_itself_ends_the_engine(
    own_backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, count: int, kind: type[BaseException]
) -> None:
    """No sample is refused: the next engine draws them."""

    def broken(*_: object) -> None:
        raise kind

    monkeypatch.setattr(sampling_of(own_backend), "decode", broken)
    ops = [make_sample(prompt(1, seed=n), max_tokens=2, session=str(n)) for n in range(count)]
    results = await asyncio.gather(*(own_backend.sample(op) for op in ops), return_exceptions=True)
    expected = PlantedError if kind is PlantedError else RuntimeError
    assert [type(result) for result in results] == [expected] * count
    with pytest.raises(expected):
        await own_backend.sample(ops[0])


async def test_a_device_that_does_not_start_again_ends_the_engine(
    own_backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = sampling_of(own_backend)

    def broken(*_: object) -> None:
        lose_pages(device)
        msg = "the device is lost"
        raise PlantedError(msg)

    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(device, "decode", broken)
    monkeypatch.setattr(device, "reset", no_memory)
    with pytest.raises(MemoryError):
        await own_backend.sample(make_sample(prompt(1), max_tokens=2))


async def test_the_right_sequences_come_after_many_faults(
    backend: JaxBackend, culprit: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that fails again and again does not keep the others from ending."""
    others = neighbours(8)
    expected = await sample_all(backend, others)
    plant(backend, monkeypatch, "decode")

    async def attack() -> None:
        for _ in range(6):
            assert isinstance(await backend.sample(culprit), Failed)

    attacking = asyncio.ensure_future(attack())
    for result, right in zip(await at_once(backend, others), expected, strict=True):
        assert_same(result, right)
    await attacking
    assert_same_sequences(await sample(backend, others[0]), expected[0])
