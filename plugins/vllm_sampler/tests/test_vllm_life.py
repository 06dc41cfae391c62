"""Snapshots that come and go, samples that are given up, processes that die."""

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from vllm_harness import CONTEXT, blank_adapter, draw, make_sampler, op, prompt, random_adapter

from tinsmith import Failed, HostSnapshot, LoraConfig, Sample, SampleOutput, Snapshot, UnsupportedError, UserError
from tinsmith.testing import in_one_loop
from tinsmith_vllm.adapters import AdapterFiles
from tinsmith_vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # it starts vLLM

_ids = count()


def adapter(seed: int) -> HostSnapshot:
    return random_adapter(f"life-{next(_ids)}", blank_adapter(), seed=seed)


def assert_same(left: SampleOutput, right: SampleOutput) -> None:
    for one, other in zip(left.sequences, right.sequences, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.stop_reason == other.stop_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_publishes", [10, pytest.param(50, marks=pytest.mark.thorough)])
@in_one_loop
async def test_publishes_of_one_tenant_leave_another_alone(qwen3: VllmSampler, num_publishes: int) -> None:
    """No sample of the neighbour fails, is cut, or changes, while adapters come, are used and go."""
    own = adapter(0)
    await qwen3.load_snapshot(own)
    wanted = [op(prompt(n), own.snapshot_id, max_tokens=40, seed=n, num_samples=2) for n in range(4)]
    expected = [await draw(qwen3, each) for each in wanted]
    published, enough = asyncio.Event(), asyncio.Event()
    during = 0

    async def neighbour() -> None:
        nonlocal during
        while not published.is_set():
            outputs = await asyncio.gather(*(draw(qwen3, each) for each in wanted))
            for output, right in zip(outputs, expected, strict=True):
                assert_same(output, right)
                during += 1
            if during >= 8:
                enough.set()

    async def publisher() -> None:
        seen = set()
        for number in range(num_publishes):
            if number == num_publishes * 4 // 5:
                await enough.wait()  # there were samples under way, however slow this machine is
            snapshot = adapter(100 + number)
            await qwen3.load_snapshot(snapshot)
            output = await draw(qwen3, op(prompt(9), snapshot.snapshot_id, max_tokens=4, temperature=0.0))
            seen.add(tuple(output.sequences[0].logprobs.tolist()))
            await qwen3.drop_snapshot(snapshot.snapshot_id)
        assert len(seen) == num_publishes, "every publish must be sampled with its own weights"
        published.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(neighbour())
        group.create_task(publisher())
    assert during >= 8
    await qwen3.drop_snapshot(own.snapshot_id)


@in_one_loop
async def test_a_publish_that_takes_long_pauses_nobody(
    qwen3: VllmSampler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One adapter is read for as long as this test likes: others are sampled, published and dropped meanwhile."""
    pipes: asyncio.Queue[tuple[Path, str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    files, write = AdapterFiles(tmp_path, tmp_path, count(1_000_000)), qwen3.files.write

    def with_pipe(snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        """Put a pipe in the place of the small file: vLLM's loader waits in it until somebody writes."""
        adapter_id, directory = files.write(snapshot, base_model)
        config = directory / "adapter_config.json"
        text = config.read_text()
        config.unlink()
        os.mkfifo(config)
        loop.call_soon_threadsafe(pipes.put_nowait, (config, text))
        return adapter_id, directory

    own, other, slow = adapter(20), adapter(21), adapter(22)
    await qwen3.load_snapshot(own)
    wanted = [op(prompt(70 + n), own.snapshot_id, max_tokens=20, seed=n) for n in range(4)]
    expected = [await draw(qwen3, each) for each in wanted]
    monkeypatch.setattr(qwen3.files, "write", with_pipe)
    publishing = asyncio.create_task(qwen3.load_snapshot(slow))
    path, config = await pipes.get()
    pipe = await asyncio.to_thread(path.open, "w")  # returns as soon as vLLM has begun to read
    monkeypatch.setattr(qwen3.files, "write", write)
    for _ in range(3):
        for output, right in zip(await asyncio.gather(*(draw(qwen3, each) for each in wanted)), expected, strict=True):
            assert_same(output, right)
    await qwen3.load_snapshot(other)
    await draw(qwen3, op(prompt(9), other.snapshot_id))
    await qwen3.drop_snapshot(other.snapshot_id)
    assert not publishing.done()
    with pipe:
        pipe.write(config)
    await publishing
    await draw(qwen3, op(prompt(9), slow.snapshot_id))
    qwen3.adapters[slow.snapshot_id].files = files
    for snapshot in (own, slow):
        await qwen3.drop_snapshot(snapshot.snapshot_id)
    files.close()


@in_one_loop
async def test_evicted_adapters_come_back(qwen3: VllmSampler) -> None:
    """Six adapters where two fit on the device and two in host memory: in turn, and all at once."""
    snapshots = [adapter(n) for n in range(6)]
    for snapshot in snapshots:
        await qwen3.load_snapshot(snapshot)
    wanted = [op(prompt(20), snapshot.snapshot_id, max_tokens=12) for snapshot in snapshots]
    first = [await draw(qwen3, each) for each in wanted]
    assert len({tuple(output.sequences[0].logprobs.tolist()) for output in first}) == 6
    for each, right in reversed(list(zip(wanted, first, strict=True))):
        assert_same(await draw(qwen3, each), right)
    for output, right in zip(await asyncio.gather(*(draw(qwen3, each) for each in wanted)), first, strict=True):
        assert_same(output, right)
    for snapshot in snapshots:
        await qwen3.drop_snapshot(snapshot.snapshot_id)


@in_one_loop
async def test_the_base_model_stays_itself_where_every_place_has_an_adapter(qwen3: VllmSampler) -> None:
    """Its draws and its prompt, in a batch of its own and beside adapters; vLLM's CPU operators alone get it wrong."""
    wanted = op(prompt(25), max_tokens=12, prompt_logprobs=True)
    before = await draw(qwen3, wanted)
    snapshots = [adapter(n) for n in range(2)]
    for snapshot in snapshots:
        await qwen3.load_snapshot(snapshot)
    company = [op(prompt(26), snapshot.snapshot_id, max_tokens=30) for snapshot in snapshots]
    beside, *others = await asyncio.gather(*(draw(qwen3, each) for each in [wanted, *company]))
    after = await draw(qwen3, wanted)
    for output in (beside, after):
        assert_same(output, before)
        assert output.prompt_logprobs is not None
        np.testing.assert_allclose(output.prompt_logprobs, before.prompt_logprobs, atol=1e-4, rtol=0)
    assert others[0].sequences[0].logprobs.tolist() != others[1].sequences[0].logprobs.tolist()
    for snapshot in snapshots:
        await qwen3.drop_snapshot(snapshot.snapshot_id)


@in_one_loop
async def test_a_cancelled_sample_leaves_vllm(qwen3: VllmSampler) -> None:
    doomed = [
        asyncio.create_task(draw(qwen3, op(prompt(30, 5), max_tokens=CONTEXT - 5, seed=n, num_samples=4)))
        for n in range(25)
    ]
    while not await qwen3.num_running():
        pass  # each question is a round trip to the process
    for task in doomed:
        task.cancel()
    ended = await asyncio.gather(*doomed, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ended)
    assert await qwen3.num_running() == 0


@in_one_loop
async def test_snapshots_that_vllm_cannot_take_are_refused_by_name(qwen3: VllmSampler) -> None:
    too_large = random_adapter("too large", blank_adapter(rank=16), seed=1)
    with pytest.raises(UserError, match=r"'too large' has rank 16; .* up to 8: its setting max_lora_rank"):
        await qwen3.load_snapshot(too_large)
    odd = HostSnapshot(
        "odd",
        LoraConfig(rank=4, seed=0),
        {
            "base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight": np.zeros((4, 64), np.float32),
            "base_model.model.model.layers.0.self_attn.z_proj.lora_B.weight": np.zeros((64, 4), np.float32),
        },
    )
    with pytest.raises(UnsupportedError, match=r"rejects the adapter of snapshot 'odd': .*z_proj"):
        await qwen3.load_snapshot(odd)
    assert isinstance(await qwen3.sample(op(prompt(1), "odd")), Failed)
    whole = HostSnapshot("whole", LoraConfig(rank=0, seed=0), {"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(UnsupportedError, match=r"'whole' holds all weights of a model, .* setting full_replicas"):
        await qwen3.load_snapshot(whole)


@in_one_loop
async def test_what_it_cannot_do_is_refused_by_name(qwen3: VllmSampler) -> None:
    cold = await qwen3.sample(op(prompt(1), temperature=0.005))
    assert isinstance(cold, Failed)
    assert "temperature 0.005" in cold.message
    long = await qwen3.sample(op(prompt(1, 9), max_tokens=CONTEXT))
    assert isinstance(long, Failed)
    assert "the context window is 128 tokens" in long.message


@in_one_loop
async def test_the_end_of_sequence_stays_and_an_empty_stop_list_runs_over_it(
    qwen3: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await draw(qwen3, op(prompt(40), max_tokens=12))
    tokens = free.sequences[0].tokens.tolist()
    monkeypatch.setattr(qwen3.rules, "eos_tokens", frozenset({tokens[5]}))
    (ended,) = (await draw(qwen3, op(prompt(40), max_tokens=12, stop_at_eos=True))).sequences
    assert (ended.tokens.tolist(), ended.stop_reason) == (tokens[: tokens.index(tokens[5]) + 1], "stop")
    assert_same(await draw(qwen3, op(prompt(40), max_tokens=12)), free)


@in_one_loop
async def test_a_stop_string_in_the_first_tokens_still_answers_about_the_prompt(qwen3: VllmSampler) -> None:
    assert qwen3.rules.tokenizer is not None
    free = await draw(qwen3, op(prompt(41), max_tokens=12, num_samples=2))
    texts = [qwen3.rules.tokenizer.decode(each.tokens.tolist()[:1]) for each in free.sequences]
    wanted = op(prompt(41), max_tokens=100, num_samples=2, stop_strings=tuple(texts), prompt_logprobs=True)
    output = await draw(qwen3, wanted)
    assert output.prompt_logprobs is not None
    assert np.isfinite(output.prompt_logprobs[1:]).all()
    assert output.sequences[0].stop_reason == "stop"
    while await qwen3.num_running():
        pass  # the order to end what runs past the string is under way


@pytest.fixture(scope="module")
def two_replicas(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    sampler = make_sampler(tiny_models["qwen3"], tmp_path_factory.mktemp("vllm-two"), replicas=2)
    yield sampler
    sampler.close()


class Undertaker:
    """Kills processes of replicas, and lets them start again when it is told to."""

    def __init__(self, sampler: VllmSampler) -> None:
        self._replicas = sampler.replicas
        for replica in self._replicas:
            replica.hold_back()

    def kill(self, number: int) -> None:
        pid = self._replicas[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async def wait_for(self, number: int, *, running: bool) -> None:
        """Its end may be seen after its last answer."""
        while self._replicas[number].is_running != running:  # noqa: ASYNC110 - another thread says so
            await asyncio.sleep(0.01)

    def allow(self, number: int) -> None:
        self._replicas[number].go_on()


@pytest.fixture
def undertaker(two_replicas: VllmSampler) -> Iterator[Undertaker]:
    made = Undertaker(two_replicas)
    yield made
    for number in range(2):
        made.allow(number)


@pytest.mark.thorough  # test_vllm_processes.py has replicas that come and go, with small processes in vLLM's place
@in_one_loop
async def test_two_replicas_stand_behind_each_snapshot(
    two_replicas: VllmSampler, qwen3: VllmSampler, undertaker: Undertaker
) -> None:
    """Both draw, and the same. Where one dies the other draws its samples again, and serves all until it is back."""
    published = [adapter(8), adapter(9)]
    for snapshot in published:
        await qwen3.load_snapshot(snapshot)
    first, second, third, fourth = (
        [op(prompt(begin + n), snapshot.snapshot_id, max_tokens=30, seed=n) for n in range(8)]
        for begin in (60, 70)
        for snapshot in published
    )
    right = [await draw(qwen3, each) for each in (*first, *second, *third, *fourth)]

    def start_drawing(wanted: list[Sample]) -> list[asyncio.Task[SampleOutput]]:
        return [asyncio.create_task(draw(two_replicas, each)) for each in wanted]

    async def assert_right(running: list[asyncio.Task[SampleOutput]], expected: list[SampleOutput]) -> None:
        for output, wanted in zip(await asyncio.gather(*running), expected, strict=True):
            assert_same(output, wanted)

    def shares() -> list[int]:
        return [replica.num_sequences.total() for replica in two_replicas.replicas]

    await two_replicas.load_snapshot(published[0])
    running = start_drawing(first)
    await asyncio.sleep(0)
    assert shares() == [4, 4]
    await assert_right(running, right[:8])

    running = start_drawing(first)
    await asyncio.sleep(0)
    undertaker.kill(0)
    await assert_right(running, right[:8])
    await undertaker.wait_for(0, running=False)
    await two_replicas.load_snapshot(published[1])  # nor does a publish wait for the process to come back
    running = start_drawing(second)
    await asyncio.sleep(0)
    assert shares() == [0, 8]
    await assert_right(running, right[8:16])

    undertaker.allow(0)
    await undertaker.wait_for(0, running=True)
    running = start_drawing([*third, *fourth])  # no replica knows their prompts
    await asyncio.sleep(0)
    assert shares() == [8, 8]
    await assert_right(running, right[16:])  # the new process has been told of both snapshots
    for snapshot in published:
        for sampler in (two_replicas, qwen3):
            await sampler.drop_snapshot(snapshot.snapshot_id)
