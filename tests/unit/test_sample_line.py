"""Whose sample is drawn next: places, reserves and turns."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import SamplerCapabilities
from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.engine.claimed import Claimed
from tinsmith.engine.context import EngineContext
from tinsmith.engine.sampling import SampleQueue, Sampling
from tinsmith.store import OperationRecord, OperationState


def a_sample(tenant: str, number: int, *, sequences: int = 1, max_tokens: int = 100) -> Claimed:
    operation = ops.Sample(
        sampling_session_id=tenant,
        snapshot_id=None,
        prompt_P=np.array([1], np.int32),
        params=ops.SamplingParams(max_tokens=max_tokens, seed=1),
        num_samples=sequences,
    )
    record = OperationRecord(
        request_id=f"{tenant}{number}",
        base_model="toy",
        kind="sample",
        tenant=tenant,
        session_id=tenant,
        subject_id=tenant,
        seq_id=number,
        ordered=False,
        num_tokens=1 + sequences * max_tokens,
        state=OperationState.RUNNING,
        created_at=datetime.fromtimestamp(number, UTC),
    )
    return Claimed(record=record, operation=operation)


def a_queue(places: int = 8, clock: Callable[[], float] = time.time, **weights: float) -> SampleQueue:
    capabilities = SamplerCapabilities(vocab_size=8, max_context_tokens=1000, max_sequences=places)
    return SampleQueue(FairScheduler(FairConfig(weights=weights)), capabilities, clock=clock)


def add(queue: SampleQueue, tenant: str, count: int, **more: int) -> None:
    for number in range(count):
        queue.add(a_sample(tenant, number, **more))


def take_all(queue: SampleQueue) -> list[str]:
    taken = []
    while (claimed := queue.take()) is not None:
        taken.append(claimed.record.request_id)
    return taken


def test_a_single_tenant_keeps_the_sampler_busy() -> None:
    queue = a_queue()
    add(queue, "hog", 30)
    assert take_all(queue) == [f"hog{n}" for n in range(10)]
    queue.end("hog3")
    assert take_all(queue) == ["hog10"]


def test_a_place_is_free_for_whoever_has_none() -> None:
    queue = a_queue()
    add(queue, "hog", 30)
    take_all(queue)
    add(queue, "ann", 2)
    assert take_all(queue) == ["ann0"]
    for number in range(4):
        queue.end(f"hog{number}")
    assert take_all(queue) == ["ann1"]
    queue.end("ann0")
    assert take_all(queue) == []  # the reserve is for others
    add(queue, "bob", 1)
    assert take_all(queue) == ["bob0"]


@pytest.mark.parametrize("end", [SampleQueue.end, SampleQueue.remove], ids=["drawn", "cancelled"])
def test_places_are_kept_for_others_while_there_are_any(end: Callable[[SampleQueue, str], object]) -> None:
    now_s = [1000.0]
    queue = a_queue(32, clock=lambda: now_s[0])
    add(queue, "ann", 1)
    if end is SampleQueue.end:
        take_all(queue)
    now_s[0] += 600  # as long as a sample may take
    end(queue, "ann0")
    add(queue, "hog", 90)
    taken = take_all(queue)
    assert len(taken) == 28 + (1 if "ann0" in taken else 0)
    now_s[0] += 61
    taken += take_all(queue)
    assert len([each for each in taken if each.startswith("hog")]) == 40
    add(queue, "bob", 1)  # whoever comes is another tenant at once
    assert take_all(queue) == ["bob0"]
    now_s[0] += 600
    queue.end("hog0")
    assert take_all(queue) == [], "bob is still there"


def test_places_go_to_whoever_was_served_least() -> None:
    queue = a_queue()
    add(queue, "ann", 30, max_tokens=300)
    add(queue, "bob", 30, max_tokens=100)
    taken = take_all(queue)
    for _ in range(20):
        queue.end(taken[-7])
        taken += take_all(queue)
    tokens = dict.fromkeys(("ann", "bob"), 0)
    for request_id in taken:
        tokens[request_id[:3]] += 301 if request_id[:3] == "ann" else 101
    assert abs(tokens["ann"] - tokens["bob"]) <= 301


def test_reserved_places_leave_the_common_order_alone() -> None:
    queue = a_queue()
    add(queue, "ann", 60, max_tokens=300)
    add(queue, "bob", 60, max_tokens=100)
    taken = take_all(queue)
    for number in range(30):
        queue.add(a_sample("eve", number, max_tokens=900))
        assert take_all(queue) == [f"eve{number}"]
        queue.end(taken[-7])
        taken += take_all(queue)
        queue.end(f"eve{number}")
    tokens = dict.fromkeys(("ann", "bob"), 0)
    for request_id in taken:
        tokens[request_id[:3]] += 301 if request_id[:3] == "ann" else 101
    assert abs(tokens["ann"] - tokens["bob"]) <= 301


async def test_a_sample_cancelled_before_its_first_step_frees_its_places() -> None:
    queue, unused = a_queue(places=1), cast("Any", None)
    queue.add(a_sample("ann", 0))
    queue.add(a_sample("ann", 1))
    async with asyncio.TaskGroup() as tasks:
        room = asyncio.Event()
        engine = cast("EngineContext", SimpleNamespace(tasks=tasks, stopping=asyncio.Event()))
        sampling = Sampling(engine, queue, unused, unused, unused, unused, unused, on_room=room.set)
        sampling.start_waiting()
        assert sampling.cancel("ann0")
        await room.wait()
    assert take_all(queue) == ["ann1"]


def test_weights_count() -> None:
    queue = a_queue(ann=3.0)
    add(queue, "ann", 60)
    add(queue, "bob", 60)
    taken = take_all(queue)
    for _ in range(32):
        queue.end(taken[-7])
        taken += take_all(queue)
    assert abs(sum(each.startswith("ann") for each in taken) - 3 * len(taken) / 4) <= 1


def test_many_sequences_wait_until_they_fit_and_are_not_passed() -> None:
    queue = a_queue()
    add(queue, "hog", 4)
    first = take_all(queue)
    add(queue, "ann", 1, sequences=500)
    add(queue, "hog", 4)
    for request_id in first:
        assert take_all(queue) == []
        queue.end(request_id)
    assert take_all(queue) == ["ann0", "hog0"]  # hog0 takes the reserved place


def test_a_waiting_sample_can_be_removed() -> None:
    queue = a_queue(places=1)
    add(queue, "ann", 3)
    assert take_all(queue) == ["ann0"]
    assert queue.remove("ann1")
    assert not queue.remove("ann0")
    queue.end("ann0")
    assert take_all(queue) == ["ann2"]
