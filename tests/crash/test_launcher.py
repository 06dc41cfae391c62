"""The process that forks servers and engines must outlive all of them."""

import os
import signal

import psutil
from processes import launching

SLEEP = ["-c", "import time; time.sleep(600)"]


def test_it_outlives_a_child_that_dies_together_with_who_asked_for_it() -> None:
    """Both at once: it is held while they go, and hears of them in one round, in either order."""
    with launching() as launcher:
        for _ in range(5):
            connection = launcher.ask(SLEEP, {}, 1, 2)
            child = psutil.Process(int(connection.recv(64)))
            launcher.process.send_signal(signal.SIGSTOP)
            child.kill()
            while child.status() != psutil.STATUS_ZOMBIE:  # its parent is held, so nobody reaps it
                os.sched_yield()
            connection.close()
            launcher.process.send_signal(signal.SIGCONT)
        connection = launcher.ask(SLEEP, {}, 1, 2)
        assert connection.recv(64)
        connection.close()
