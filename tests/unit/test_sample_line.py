"""Whose sample is drawn next: places, reserves and turns."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import Capabilities
from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.engine.claimed import Claimed
from tinsmith.engine.sample_line import SampleLine
from tinsmith.engine.sampling_lane import SamplingLane
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


def a_line(places: int = 8, clock: Callable[[], float] = time.time, **weights: float) -> SampleLine:
    capabilities = Capabilities(
        vocab_size=8, max_context_tokens=1000, max_batch_tokens=1000, sampling=True, max_sequences=places
    )
    return SampleLine(FairScheduler(FairConfig(weights=weights)), capabilities, clock=clock)


def add(line: SampleLine, tenant: str, count: int, **more: int) -> None:
    for number in range(count):
        line.add(a_sample(tenant, number, **more))


def take_all(line: SampleLine) -> list[str]:
    taken = []
    while (claimed := line.take()) is not None:
        taken.append(claimed.record.request_id)
    return taken


def test_a_single_tenant_keeps_the_sampler_busy() -> None:
    line = a_line()
    add(line, "hog", 30)
    assert take_all(line) == [f"hog{n}" for n in range(10)]
    line.end("hog3")
    assert take_all(line) == ["hog10"]


def test_a_place_is_free_for_whoever_has_none() -> None:
    line = a_line()
    add(line, "hog", 30)
    take_all(line)
    add(line, "ann", 2)
    assert take_all(line) == ["ann0"]
    for number in range(4):
        line.end(f"hog{number}")
    assert take_all(line) == ["ann1"]
    line.end("ann0")
    assert take_all(line) == []  # the reserve is for others
    add(line, "bob", 1)
    assert take_all(line) == ["bob0"]


@pytest.mark.parametrize("end", [SampleLine.end, SampleLine.remove], ids=["drawn", "cancelled"])
def test_places_are_kept_for_others_while_there_are_any(end: Callable[[SampleLine, str], object]) -> None:
    now_s = [1000.0]
    line = a_line(32, clock=lambda: now_s[0])
    add(line, "ann", 1)
    if end is SampleLine.end:
        take_all(line)
    now_s[0] += 600  # as long as a sample may take
    end(line, "ann0")
    add(line, "hog", 90)
    taken = take_all(line)
    assert len(taken) == 28 + (1 if "ann0" in taken else 0)
    now_s[0] += 61
    taken += take_all(line)
    assert len([each for each in taken if each.startswith("hog")]) == 40
    add(line, "bob", 1)  # whoever comes is another tenant at once
    assert take_all(line) == ["bob0"]
    now_s[0] += 600
    line.end("hog0")
    assert take_all(line) == [], "bob is still there"


def test_places_go_to_whoever_was_served_least() -> None:
    line = a_line()
    add(line, "ann", 30, max_tokens=300)
    add(line, "bob", 30, max_tokens=100)
    taken = take_all(line)
    for _ in range(20):
        line.end(taken[-7])
        taken += take_all(line)
    tokens = dict.fromkeys(("ann", "bob"), 0)
    for request_id in taken:
        tokens[request_id[:3]] += 301 if request_id[:3] == "ann" else 101
    assert abs(tokens["ann"] - tokens["bob"]) <= 301


def test_reserved_places_leave_the_common_order_alone() -> None:
    line = a_line()
    add(line, "ann", 60, max_tokens=300)
    add(line, "bob", 60, max_tokens=100)
    taken = take_all(line)
    for number in range(30):
        line.add(a_sample("eve", number, max_tokens=900))
        assert take_all(line) == [f"eve{number}"]
        line.end(taken[-7])
        taken += take_all(line)
        line.end(f"eve{number}")
    tokens = dict.fromkeys(("ann", "bob"), 0)
    for request_id in taken:
        tokens[request_id[:3]] += 301 if request_id[:3] == "ann" else 101
    assert abs(tokens["ann"] - tokens["bob"]) <= 301


async def test_a_sample_cancelled_before_its_first_step_frees_its_places() -> None:
    line, unused = a_line(places=1), cast("Any", None)
    line.add(a_sample("ann", 0))
    line.add(a_sample("ann", 1))
    async with asyncio.TaskGroup() as tasks:
        room, stopping = asyncio.Event(), asyncio.Event()
        lane = SamplingLane(unused, unused, unused, unused, unused, line, tasks, on_room=room.set, stopping=stopping)
        lane.start_waiting()
        assert lane.cancel("ann0")
        await room.wait()
    assert take_all(line) == ["ann1"]


def test_weights_count() -> None:
    line = a_line(ann=3.0)
    add(line, "ann", 60)
    add(line, "bob", 60)
    taken = take_all(line)
    for _ in range(32):
        line.end(taken[-7])
        taken += take_all(line)
    assert abs(sum(each.startswith("ann") for each in taken) - 3 * len(taken) / 4) <= 1


def test_many_sequences_wait_until_they_fit_and_are_not_passed() -> None:
    line = a_line()
    add(line, "hog", 4)
    first = take_all(line)
    add(line, "ann", 1, sequences=500)
    add(line, "hog", 4)
    for request_id in first:
        assert take_all(line) == []
        line.end(request_id)
    assert take_all(line) == ["ann0", "hog0"]  # hog0 takes the reserved place


def test_a_waiting_sample_can_be_removed() -> None:
    line = a_line(places=1)
    add(line, "ann", 3)
    assert take_all(line) == ["ann0"]
    assert line.remove("ann1")
    assert not line.remove("ann0")
    line.end("ann0")
    assert take_all(line) == ["ann2"]
