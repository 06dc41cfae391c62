"""The budget of captured states in memory: what is reserved, who waits, and what a state is expected to take."""

import asyncio
import logging

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.engine.budgets import WaitingStates
from tinsmith.operations import LoraConfig
from tinsmith_checkpoints.huggingface import StoredTensors

SMALL, LARGE = LoraConfig(rank=1, seed=1), LoraConfig(rank=2, seed=2)
WEIGHTS = 40  # bytes
WAIT_S = 300.0


def state(lora: LoraConfig, *, moments: bool = False) -> ModelState:
    tensors = {"w": np.zeros(10, np.float32)}
    return ModelState(lora=lora, weights=tensors, adam_m=tensors if moments else {}, adam_v=tensors if moments else {})


async def test_a_state_counts_from_before_it_is_captured_until_it_is_released() -> None:
    waiting = WaitingStates(1000)
    first = waiting.reserve_at_once(SMALL)
    assert first is not None
    assert waiting.reserve_at_once(SMALL) is None, "of the first, nobody knows yet how large it is"
    first.holds(state(SMALL))
    assert waiting.held_bytes == WEIGHTS
    second = waiting.reserve_at_once(SMALL)
    assert second is not None, "of the same configuration, so of known size"
    assert waiting.held_bytes == WEIGHTS + 4 * WEIGHTS, "what it can take: moments and a gradient may have come"
    second.holds(state(SMALL, moments=True))
    assert waiting.held_bytes == WEIGHTS + 3 * WEIGHTS
    assert waiting.reserve_at_once(LARGE) is None
    for reservation in (first, second, second):
        reservation.release()
    assert waiting.held_bytes == 0


async def test_no_more_than_the_budget_is_taken() -> None:
    waiting = WaitingStates(9 * WEIGHTS)
    reservations = []
    for _ in range(4):
        if (reservation := waiting.reserve_at_once(SMALL)) is not None:
            reservation.holds(state(SMALL, moments=True))
            reservations.append(reservation)
    assert len(reservations) == 2
    assert waiting.held_bytes == 6 * WEIGHTS


async def test_a_save_waits_and_goes_before_recovery_points() -> None:
    waiting = WaitingStates(5 * WEIGHTS)
    first = waiting.reserve_at_once(SMALL)
    assert first is not None
    first.holds(state(SMALL, moments=True))
    entered = asyncio.Event()

    async def save() -> None:
        async with waiting.reserve(SMALL) as reservation:
            reservation.holds(state(SMALL))
            entered.set()

    task = asyncio.create_task(save())
    await asyncio.sleep(0)
    assert not entered.is_set()
    assert waiting.reserve_at_once(SMALL) is None
    first.release()
    assert waiting.reserve_at_once(SMALL) is None, "the save waits already"
    await asyncio.wait_for(task, WAIT_S)
    assert waiting.held_bytes == 0
    assert waiting.reserve_at_once(SMALL) is not None


async def test_a_save_that_is_cancelled_stands_in_nobodys_way() -> None:
    waiting = WaitingStates(5 * WEIGHTS)
    first = waiting.reserve_at_once(SMALL)
    assert first is not None
    task = asyncio.create_task(waiting.reserve(SMALL).__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    first.release()
    assert waiting.reserve_at_once(SMALL) is not None


async def test_a_state_that_is_larger_than_the_budget_goes_alone_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    waiting = WaitingStates(WEIGHTS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            reservation = waiting.reserve_at_once(SMALL)
            assert reservation is not None
            reservation.holds(state(SMALL, moments=True))
            assert waiting.reserve_at_once(SMALL) is None
            reservation.release()
    (told,) = caplog.messages
    assert "LoRA rank 1 takes up to 160 bytes" in told
    assert "recovery.waiting_bytes is 40" in told


async def test_a_state_in_files_takes_none_of_it() -> None:
    waiting = WaitingStates(WEIGHTS)
    full = LoraConfig(rank=0, seed=0)
    held = waiting.reserve_at_once(SMALL)
    assert held is not None
    held.holds(state(SMALL))
    assert waiting.reserve_at_once(full) is None, "the first of its kind"
    held.release()
    first = waiting.reserve_at_once(full)
    assert first is not None
    first.holds(ModelState(lora=full, weights=StoredTensors({})))
    assert waiting.held_bytes == 0
    assert waiting.reserve_at_once(full) is not None
