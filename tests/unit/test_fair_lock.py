"""The fair lock: first come, first served, and never lost."""

import threading
from itertools import pairwise

import pytest

from tinsmith.fair_lock import FairLock

WAIT_S = 300.0  # only a broken lock waits that long


def wait_until_waiting(lock: FairLock, count: int) -> None:
    """Spin until that many threads queue: the order of the test rests on it."""
    reached = threading.Event()
    while lock.num_waiting < count:
        reached.wait(0.001)


def start(lock: FairLock, name: str, order: list[str]) -> threading.Thread:
    def take() -> None:
        with lock:
            order.append(name)

    thread = threading.Thread(target=take)
    thread.start()
    return thread


def test_the_lock_goes_to_threads_in_the_order_of_asking() -> None:
    lock, order = FairLock(), list[str]()
    with lock:
        threads = []
        for number, name in enumerate("abc"):
            threads.append(start(lock, name, order))
            wait_until_waiting(lock, number + 1)
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["a", "b", "c"]


def test_a_thread_that_asks_again_goes_behind_the_others() -> None:
    lock, order = FairLock(), list[str]()
    with lock:
        other = start(lock, "other", order)
        wait_until_waiting(lock, 1)
    with lock:  # released and asked again at once: the lock must not come back to this thread first
        order.append("again")
    other.join(WAIT_S)
    assert order == ["other", "again"]


def test_two_busy_threads_alternate() -> None:
    lock, order = FairLock(), list[str]()
    ready = threading.Barrier(2)

    def work(name: str) -> None:
        ready.wait(WAIT_S)
        for _ in range(50):
            with lock:
                order.append(name)
                if len(order) < 90:  # hold until the other one queues, as it does while a device computes
                    while not lock.num_waiting and order.count("a") < 50 and order.count("b") < 50:
                        threading.Event().wait(0.0005)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(order) == 100
    assert all(first != second for first, second in pairwise(order[:90]))


def test_an_exception_releases_the_lock() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="broken"), lock:
        raise ValueError("broken")
    with lock:
        pass
