"""How samples end: stop rules, limits, cancellation, failures, closing; and what they must not do: compile."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from few_programs import FEW_PROGRAMS
from jax_harness import add_model, local, make_backend, sampling_of
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all

from tinsmith import Failed, LoraConfig
from tinsmith_checkpoints.huggingface import StopRules
from tinsmith_jax.backend import JaxBackend
from tinsmith_workers import WorkerDiedError

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 160
EOS = 2  # of the tiny models' configuration


@pytest.fixture
def backend(tiny_backend: JaxBackend) -> JaxBackend:
    return tiny_backend


async def until_busy(backend: JaxBackend, *, busy: bool = True) -> None:
    """Wait until some slot is occupied, or none. No timing: a sample enters and leaves whenever its dispatch comes."""
    while bool(backend.sampler.slots.draws) != busy:  # noqa: ASYNC110 - the sampler's thread knows no loop
        await asyncio.sleep(0.001)


# Stops ----------------------------------------------------------------------------------------------------------------


async def test_a_stop_token_stays_and_ends_the_sequence(backend: JaxBackend) -> None:
    free = (await sample(backend, make_sample(prompt(6), max_tokens=20))).sequences[0]
    assert free.stop_reason == "length"
    for cut in (0, 1, 5, 10):
        token = int(free.tokens[cut])
        first = free.tokens.tolist().index(token) + 1
        stopped = (await sample(backend, make_sample(prompt(6), max_tokens=20, stop_tokens=(token,)))).sequences[0]
        assert stopped.tokens.tolist() == free.tokens[:first].tolist()
        assert stopped.stop_reason == "stop"
        np.testing.assert_array_equal(stopped.logprobs, free.logprobs[:first])


async def test_more_stop_tokens_than_the_device_table_holds(backend: JaxBackend) -> None:
    free = (await sample(backend, make_sample(prompt(6), max_tokens=20))).sequences[0]
    token = int(free.tokens[7])
    others = [n for n in range(VOCAB) if n not in free.tokens.tolist()][:30]
    first = free.tokens.tolist().index(token) + 1
    op = make_sample(prompt(6), max_tokens=20, stop_tokens=(*others, token))
    assert (await sample(backend, op)).sequences[0].tokens.tolist() == free.tokens[:first].tolist()


async def test_end_of_sequence_stops_unless_it_is_switched_off(backend: JaxBackend) -> None:
    """At a high temperature every token comes up now and then, the one that ends a sequence too."""
    settings = {"max_tokens": 200, "temperature": 100.0, "num_samples": 6}
    free = await sample(backend, make_sample(prompt(4), stop_at_eos=False, **settings))
    ended = await sample(backend, make_sample(prompt(4), stop_at_eos=True, **settings))
    num_ended = 0
    for whole, cut in zip(free.sequences, ended.sequences, strict=True):
        tokens = whole.tokens.tolist()
        assert len(tokens) == 200
        if EOS in tokens:
            num_ended += 1
            tokens = tokens[: tokens.index(EOS) + 1]
        assert cut.tokens.tolist() == tokens
        assert cut.stop_reason == ("stop" if EOS in tokens else "length")
    assert num_ended > 1


async def test_a_stop_string_cuts_after_the_token_that_completes_it(backend: JaxBackend, spelled: Path) -> None:
    tokenizer = StopRules.of_model(spelled).tokenizer
    assert tokenizer is not None
    free = (await sample(backend, make_sample(prompt(6), max_tokens=40))).sequences[0]
    text = tokenizer.decode(free.tokens.tolist())
    for start in (3, 9, 21):
        string = text[start : start + 3]
        op = make_sample(prompt(6), max_tokens=40, stop_strings=("zzzzzzz", string))
        stopped = (await sample(backend, op)).sequences[0]
        count = next(n for n in range(1, 41) if string in tokenizer.decode(free.tokens[:n].tolist()))
        assert stopped.tokens.tolist() == free.tokens[:count].tolist()
        assert stopped.stop_reason == "stop"
        assert len(stopped.logprobs) == count


async def test_stop_strings_without_a_tokenizer_are_refused(tiny_models: dict[str, Path], jax_cache: Path) -> None:
    backend = make_backend(tiny_models["qwen3"], jax_cache)
    assert not backend.sampler_capabilities.stop_strings
    result = await backend.sample(make_sample(prompt(3), stop_strings=("x",)))
    assert isinstance(result, Failed)
    assert result.category == "user"
    assert "tokenizer.json" in result.message
    backend.close()


async def test_prompt_and_sample_fill_the_context_and_no_more(backend: JaxBackend) -> None:
    context = backend.sampler_capabilities.max_context_tokens
    full = await sample(backend, make_sample(prompt(context - 10), max_tokens=10, num_samples=2))
    assert [len(sequence.tokens) for sequence in full.sequences] == [10, 10]
    refused = await backend.sample(make_sample(prompt(context - 10), max_tokens=11))
    assert isinstance(refused, Failed)
    assert f"the context window is {context} tokens" in refused.message


# Cancellation, failure, closing ---------------------------------------------------------------------------------------


async def test_cancelling_frees_the_slots_of_running_and_waiting_samples(backend: JaxBackend) -> None:
    expected = await sample(backend, make_sample(prompt(9), max_tokens=5))
    hogs = [
        asyncio.ensure_future(backend.sample(make_sample(prompt(9), max_tokens=300, num_samples=50))) for _ in range(3)
    ]
    await until_busy(backend)
    for hog in hogs:
        hog.cancel()
    assert all(
        isinstance(result, asyncio.CancelledError) for result in await asyncio.gather(*hogs, return_exceptions=True)
    )
    await until_busy(backend, busy=False)
    assert_same_sequences(await sample(backend, make_sample(prompt(9), max_tokens=5)), expected)


async def test_closing_answers_everyone(spelled: Path, jax_cache: Path) -> None:
    backend = make_backend(spelled, jax_cache, decode_slots=4)
    await sample(backend, make_sample(prompt(4)))
    endless = make_sample(prompt(4), max_tokens=300, num_samples=50)
    waiting = [asyncio.ensure_future(backend.sample(endless)) for _ in range(5)]
    await until_busy(backend)
    await asyncio.to_thread(backend.close)
    for result in await asyncio.gather(*waiting, backend.sample(make_sample(prompt(4)))):
        assert isinstance(result, Failed)
        assert result.category == "server"
        assert "closing" in result.message


async def test_closing_before_any_sample(spelled: Path, jax_cache: Path) -> None:
    backend = make_backend(spelled, jax_cache)
    backend.close()
    assert isinstance(await backend.sample(make_sample(prompt(4))), Failed)


async def test_one_session_does_not_shut_others_out(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    device, both = sampling_of(backend), threading.Event()
    decode = device.decode

    def held(*args: Any) -> Any:
        """The hog has its slots, and goes on when the mouse has come."""
        assert both.wait(600)
        return decode(*args)

    monkeypatch.setattr(device, "decode", held)

    async def run(name: str, num_samples: int) -> None:
        await sample(backend, make_sample(prompt(5), session=name, num_samples=num_samples, max_tokens=20))
        order.append(name)

    hog = asyncio.ensure_future(run("hog", 40))
    await until_busy(backend)
    mouse = asyncio.ensure_future(run("mouse", 1))
    await asyncio.sleep(0)  # it asks before it waits
    both.set()
    await asyncio.gather(mouse, hog)
    assert order == ["mouse", "hog"]


# Compilation ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compilations() -> list[str]:
    """Names of JAX's own events for every program it builds, also those of stray operations outside the registry."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


async def test_nothing_compiles_after_the_warm_up(spelled: Path, jax_cache: Path, compilations: list[str]) -> None:
    backend = make_backend(spelled, jax_cache, decode_slots=4)
    device = sampling_of(backend)
    local(backend).programs.start_warm_up(device.all_programs())
    assert await asyncio.to_thread(local(backend).programs.wait_until_warm, 600)
    warm = local(backend).programs.compile_count
    assert warm == len(device.all_programs())
    for rank in (1, 8, 11, 16):
        add_model(backend, f"m{rank}", LoraConfig(rank=rank, seed=rank))
        await backend.load_snapshot(backend.publish(f"m{rank}", f"m{rank}"))
    rng = np.random.default_rng(0)
    ops = []
    for number in range(40):
        length = int(rng.integers(1, 280))
        columns = int(rng.integers(1, 80))
        ops.append(
            make_sample(
                prompt(length, seed=number),
                [None, "m1", "m8", "m11", "m16"][number % 5],
                max_tokens=int(rng.integers(1, 20)),
                num_samples=int(rng.integers(1, 4)),
                temperature=float(rng.uniform(0, 2)),
                top_k=int(rng.integers(-1, 50)),
                top_p=float(rng.uniform(0.1, 1)),
                prompt_logprobs=bool(rng.random() < 0.3),
                topk_prompt_logprobs=int(rng.integers(0, 9)),
                topk_sample_logprobs=int(rng.integers(0, 9)),
                target_prompt_logprobs=rng.integers(-1, VOCAB, (length - 1, columns)) if number % 3 == 0 else None,
                stop_strings=("ab",) if number % 4 == 0 else (),
            )
        )
    assert compilations  # the listener works
    compilations.clear()
    await sample_all(backend, ops)
    assert local(backend).programs.compile_count == warm
    assert compilations == []
    backend.close()


async def test_dead_workers_end_the_engine_and_fail_no_sample(
    contract_model: Path, jax_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that wait nor those that come before the engine has ended: the next engine draws them."""
    backend = make_backend(contract_model, jax_cache, **FEW_PROGRAMS)

    def die(*_: object) -> None:
        raise WorkerDiedError("worker 1 died")

    monkeypatch.setattr(sampling_of(backend), "decode", die)
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="worker 1 died"):
            await backend.sample(make_sample(prompt(1), max_tokens=2))
    backend.close()
