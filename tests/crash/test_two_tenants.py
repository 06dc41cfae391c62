"""One tenant's operations kill the engine again and again; the other, on the same engine, gets its bits, with delays.

`make test-crash` prints the second tenant's time per step, undisturbed and disturbed.
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tinker
from campaign import SETTINGS
from processes import POISON, Launcher, Served
from scenario import WAIT_S, state_at

from tinsmith.testing.harness import TOY
from tinsmith.testing.sdk_data import datum, logprobs, ragged

STEPS = 40


def well_behaved(served: Served) -> tuple[list[Any], dict[str, bytes | int], list[float]]:
    """Return what this tenant saw, its end, and the seconds of each step."""
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-good")
    training = service.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=WAIT_S)
    seen, took_s = [], []
    for number in range(STEPS):
        started = time.monotonic()
        passed = training.forward_backward(ragged(2, number), "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        seen += [logprobs(passed.result(timeout=WAIT_S)), stepped.result(timeout=WAIT_S).metrics]
        took_s.append(time.monotonic() - started)
    path = training.save_state("end").result(timeout=WAIT_S).path
    service.close("success").result(timeout=WAIT_S)
    return seen, state_at(served.data_dir, path), took_s


def poisoner(served: Served, number: int, stop: Event) -> tuple[int, list[str]]:
    """Send an operation that ends the engine, and one that does not, by turns; return how many failed, and why."""
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-bad")
    training = service.create_lora_training_client(base_model="toy", rank=4, seed=2).result(timeout=WAIT_S)
    failures: list[str] = []
    while len(failures) < number and not stop.is_set():
        poison = training.forward_backward([datum([POISON, 1, 2])], "cross_entropy")
        innocent = training.forward_backward(ragged(2, 1), "cross_entropy")
        with pytest.raises(tinker.RequestFailedError) as failed:
            poison.result(timeout=WAIT_S)
        failures.append(str(failed.value))
        innocent.result(timeout=WAIT_S)
    service.close("success").result(timeout=WAIT_S)
    return len(failures), failures


def figures(what: str, took_s: list[float]) -> str:
    ordered = sorted(took_s)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return f"{what}: p50 {statistics.median(ordered):.3f} s, p99 {p99:.3f} s, max {ordered[-1]:.3f} s"


@pytest.mark.crash
@pytest.mark.timeout(900)
def test_a_tenant_whose_operations_kill_the_engine(launcher: Launcher, tmp_path: Path) -> None:
    num_poisonous = 5
    served = Served(launcher, tmp_path / "alone", [TOY], settings=SETTINGS)
    try:
        seen, state, alone_s = well_behaved(served)
        assert served.stop() == 0
    finally:
        served.close()
    deaths: list[int] = []
    served = Served(
        launcher,
        tmp_path / "together",
        [TOY],
        settings=SETTINGS,
        on_event=lambda event: deaths.append(event.pid) if event.what == "died" and event.role == "engine" else None,
        poisoned=True,
    )
    stop = Event()
    try:
        with ThreadPoolExecutor(1) as pool:
            bad = pool.submit(poisoner, served, num_poisonous, stop)
            try:
                found = well_behaved(served)
            finally:
                stop.set()
            poisoned, reasons = bad.result()
        assert served.stop() == 0
    finally:
        served.close()
    print(figures("alone", alone_s), figures(f"beside {len(deaths) - 1} deaths", found[2]), sep="\n", file=sys.stderr)
    assert found[:2] == (seen, state)
    assert poisoned >= 2
    for reason in reasons:
        assert "the engine ended 3 times while this forward_backward ran" in reason
        assert "SIGABRT" in reason
    assert len(deaths) - 1 == 3 * poisoned  # the last death is the orderly stop
