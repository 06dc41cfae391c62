"""Turns: first come, first served, and never lost."""

import threading
from itertools import pairwise

import pytest

from tinsmith.turns import Turns

WAIT_S = 300.0  # only a broken lock waits that long


def wait_until_waiting(turns: Turns, count: int) -> None:
    """Spin until that many threads stand in line: the order of the test rests on it."""
    reached = threading.Event()
    while turns.num_waiting < count:
        reached.wait(0.001)


def start(turns: Turns, name: str, order: list[str]) -> threading.Thread:
    def take() -> None:
        with turns.turn():
            order.append(name)

    thread = threading.Thread(target=take)
    thread.start()
    return thread


def test_turns_go_in_the_order_of_asking() -> None:
    turns, order = Turns(), list[str]()
    with turns.turn():
        threads = []
        for number, name in enumerate("abc"):
            threads.append(start(turns, name, order))
            wait_until_waiting(turns, number + 1)
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["a", "b", "c"]


def test_a_thread_that_asks_again_goes_behind_the_others() -> None:
    turns, order = Turns(), list[str]()
    with turns.turn():
        other = start(turns, "other", order)
        wait_until_waiting(turns, 1)
    with turns.turn():  # released and asked again at once: the lock must not come back to this thread first
        order.append("again")
    other.join(WAIT_S)
    assert order == ["other", "again"]


def test_two_busy_threads_alternate() -> None:
    turns, order = Turns(), list[str]()
    ready = threading.Barrier(2)

    def work(name: str) -> None:
        ready.wait(WAIT_S)
        for _ in range(50):
            with turns.turn():
                order.append(name)
                if len(order) < 90:  # hold until the other one stands in line, as it does while a device computes
                    while not turns.num_waiting and order.count("a") < 50 and order.count("b") < 50:
                        threading.Event().wait(0.0005)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(order) == 100
    assert all(first != second for first, second in pairwise(order[:90]))


def test_an_exception_gives_the_turn_back() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="broken"), turns.turn():
        raise ValueError("broken")
    with turns.turn():
        pass
