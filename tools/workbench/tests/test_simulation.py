"""Scale on paper: what must hold whatever the service times are."""

from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from workbench_harness import typed

from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.errors import ConfigError, UserError
from tinsmith_workbench.simulation.clock import Clock
from tinsmith_workbench.simulation.device import Device
from tinsmith_workbench.simulation.figures import Report, jain
from tinsmith_workbench.simulation.request import Request
from tinsmith_workbench.simulation.service_times import DEFAULT, Sampling, ServiceTimes, Transaction
from tinsmith_workbench.simulation.simulation import Scenario, Simulation
from tinsmith_workbench.simulation.workload import TenantClass, Workload, workload_of

pytestmark = pytest.mark.thorough  # the workbench is no part of the daily path

TIMES = ServiceTimes.model_validate(
    {
        "measured": "nowhere",
        "backend": {
            "max_batch_tokens": 8192,
            "max_context_tokens": 512,
            "max_sequences": 32,
            "max_models": 64,
            "model_bytes": 1000,
            "beside": 0.5,
        },
        "server": {"submit_s": 0.001, "answer_s": 0.001},
        "store": {
            "submit": {"fixed_s": 0.002, "operation_s": 0.0003},
            "claim": {"fixed_s": 0.002, "operation_s": 0.0002},
            "record": {"fixed_s": 0.002, "operation_s": 0.0003},
        },
        "engine": {"fixed_s": 0.0005, "operation_s": 0.0001},
        "training": {
            "batch_s": 0.0001,
            "operation_s": 0.0005,
            "token_s": 0.00001,
            "optim_batch_s": 0.0001,
            "optim_operation_s": 0.0002,
            "save_s": 0.02,
        },
        "sampling": {"step_s": 0.001, "row_s": 0.0001, "prompt_s": 0.0002, "prompt_token_s": 0.000005},
    }
)
FAST = Transaction(fixed_s=0.0, operation_s=0.0)
"""What a store takes that is no bottleneck."""


def a_scenario(name: str | Workload, times: ServiceTimes = TIMES, **more: float) -> Scenario:
    workload = name if isinstance(name, Workload) else workload_of(name)
    fields = {"tenants": 12, "seconds": 20.0, **more}
    return Scenario(
        name="test", workload=workload, times=times, scheduler=lambda: FairScheduler(FairConfig()), **fields
    )  # type: ignore[arg-type]


def simulated(name: str | Workload, times: ServiceTimes = TIMES, **more: float) -> Report:
    return Simulation(a_scenario(name, times, **more)).run()


def without_store(times: ServiceTimes = TIMES) -> ServiceTimes:
    """Return service times with which only the devices take time."""
    store = times.store.model_copy(update={"submit": FAST, "claim": FAST, "record": FAST})
    server = times.server.model_copy(update={"submit_s": 0.0, "answer_s": 0.0})
    return times.model_copy(update={"store": store, "server": server, "engine": FAST})


@pytest.mark.parametrize("name", ["sft", "rl", "sampling", "mixed", "hog"])
@pytest.mark.parametrize("engines", [1, 3])
def test_each_operation_happens_once_and_those_of_a_model_in_order(
    name: str, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[str]] = defaultdict(list)
    order: dict[tuple[str, str], list[int]] = defaultdict(list)

    def saw(what: str, request: Request) -> None:
        seen[request.request_id].append(what)
        if request.claimed.record.ordered:
            order[what, request.claimed.record.subject_id].append(request.claimed.record.seq_id)

    simulation = Simulation(a_scenario(name, engines=engines, seconds=10.0), saw)
    simulation.run()
    for tenant in simulation.tenants:
        monkeypatch.setattr(tenant, "go_on", lambda: None)
    simulation.clock.run(600.0)  # what was sent comes to its end
    assert not any(tenant.outstanding for tenant in simulation.tenants)
    assert len(seen) > 50
    assert all(happened == ["arrived", "started", "recorded"] for happened in seen.values())
    for seq_ids in order.values():
        assert seq_ids == list(range(1, len(seq_ids) + 1))


@pytest.mark.parametrize("name", ["mixed", "hog"])
def test_no_device_idles_while_it_has_work(name: str) -> None:
    """After each action, what could be chosen runs. The store has a place and takes no time, so all is claimed."""
    simulation = Simulation(a_scenario(name, without_store(), tenants=20))
    for tenant in simulation.tenants:
        tenant.go_on()
    checked = 0
    for step in range(100):
        simulation.clock.run(0.1 * step)
        for engine in simulation.engines:
            assert not engine.claimable()
            checked += bool(engine.training.waiting)
            assert engine.device.trains or not engine.training.take()
            assert engine.samples.take() is None
    assert checked > 30


def test_a_neighbour_waits_for_one_pass_of_each_other_tenant() -> None:
    """The bound of the fair scheduler: what runs, then at most the longest operation of each of the others."""
    hog = TenantClass(name="hog", passes=64, pass_tokens=4096, think_s=0.0, tenants=3)
    mouse = TenantClass(name="mouse", passes=1, pass_tokens=64, think_s=0.5)
    simulation = Simulation(a_scenario(Workload(classes=(hog, mouse)), tenants=8, seconds=60.0))
    report = simulation.run()
    hogs, mice = report.classes
    training, largest = TIMES.training, TIMES.backend.max_batch_tokens
    longest_batch_s = training.batch_s + training.token_s * largest + training.operation_s * 8
    passes_s = 3 * training.token_s * largest  # one of each hog
    steps_s = 2 * (training.optim_batch_s + 8 * training.optim_operation_s)
    store = TIMES.store
    beside_s = 10 * sum(each.seconds(8) for each in (store.submit, store.claim, store.record)) + 8 * (
        TIMES.server.submit_s * 70 + TIMES.server.answer_s
    )
    assert mice.longest_s < 2 * longest_batch_s + passes_s + steps_s + beside_s
    assert hogs.longest_s > 10 * mice.longest_s  # so there was something to wait for
    assert hogs.jain > 0.99


def test_what_is_served_does_not_fall_with_more_capacity() -> None:
    crowd = Workload(classes=(TenantClass(name="busy", passes=2, samples=1, think_s=0.1),))
    more = [simulated(crowd, tenants=24, engines=engines, seconds=10.0).operations_per_s for engines in (1, 2, 4, 8)]
    assert more == sorted(more)
    assert more[1] > 1.5 * more[0]
    training = TIMES.training
    faster = [
        simulated(
            crowd, TIMES.model_copy(update={"training": training.model_copy(update={"token_s": token_s})}), seconds=10.0
        )
        for token_s in (4 * training.token_s, 2 * training.token_s, training.token_s)
    ]
    assert [each.operations_per_s for each in faster] == sorted(each.operations_per_s for each in faster)


def test_a_seed_decides_everything() -> None:
    first, again, other = (asdict(simulated("mixed", seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first["operations_per_s"] != other["operations_per_s"]


def test_without_company_a_step_takes_the_sum_of_its_parts() -> None:
    """One tenant with passes of one length: the figures can be computed by hand."""
    lone = TenantClass(name="lone", passes=1, pass_tokens=1000, spread=0.0, think_s=0.0)
    report = simulated(Workload(classes=(lone,)), tenants=1)
    server, store, training = TIMES.server, TIMES.store, TIMES.training
    until_claimed = 2 * server.submit_s + store.submit.seconds(1) + store.claim.seconds(1)
    shortest = until_claimed + training.batch_s + training.operation_s + 1000 * training.token_s
    [figures] = report.classes
    assert shortest < figures.step_p50_s < shortest + 0.5 * shortest
    assert figures.trained_tokens_per_s == pytest.approx(1000 * figures.steps_per_s, rel=0.05)
    assert figures.steps_per_s == pytest.approx(1 / figures.step_p50_s, rel=0.05)


def test_rows_advance_together_and_training_shares_the_device() -> None:
    times = Sampling(step_s=0.01, row_s=0.001, prompt_s=0.5, prompt_token_s=0.0)
    clock = Clock()
    device = Device(clock, times, beside=0.5)
    ended: dict[str, float] = {}

    def end(name: str) -> None:
        ended[name] = clock.now_s

    device.draw(0.5, 1, 10, partial(end, "alone"))
    clock.run(5.0)
    assert ended["alone"] == pytest.approx(0.5 + 10 * 0.011)
    clock = Clock()
    device = Device(clock, times, beside=0.5)
    device.draw(0.0, 2, 10, partial(end, "first"))
    device.draw(0.0, 8, 20, partial(end, "second"))
    clock.run(5.0)
    assert ended["first"] == pytest.approx(10 * 0.020)
    assert ended["second"] == pytest.approx(10 * 0.020 + 10 * 0.018)
    clock = Clock()
    device = Device(clock, times, beside=0.5)
    device.train(0.1, partial(end, "batch"))
    device.draw(0.0, 1, 10, partial(end, "beside"))
    clock.run(5.0)
    assert ended["batch"] == pytest.approx(0.2)
    assert ended["beside"] == pytest.approx(0.2 + 0.11 - 0.1)
    assert device.busy_s == pytest.approx(0.21)


def test_tenants_divide_into_classes_by_weight() -> None:
    classes = (
        TenantClass(name="a", passes=1, tenants=2),
        TenantClass(name="b", passes=1, weight=3.0),
        TenantClass(name="c", samples=1),
    )
    names = [each.name for each in Workload(classes=classes).tenants(10)]
    assert names == ["a"] * 2 + ["b"] * 6 + ["c"] * 2
    with pytest.raises(UserError, match="3 tenants do not divide into these classes: a, b, c"):
        Workload(classes=classes).tenants(3)


def test_jain() -> None:
    assert jain([5, 5, 5]) == 1.0
    assert jain([1, 0, 0, 0]) == 0.25


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"up to 100 models each, and the service times allow 64 .*at least 2 engines"):
        simulated("sft", tenants=100)
    with pytest.raises(UserError, match="no workload 'stf'; there are sft, rl"):
        workload_of("stf")
    wrong = tmp_path / "times.json"
    wrong.write_text(DEFAULT.read_text().replace('"token_s"', '"token"'))
    with pytest.raises(ConfigError, match="does not hold ServiceTimes"):
        ServiceTimes.read(wrong)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    output = typed("simulate", "hog", "--tenants", "4", "--minutes", "0.2", "--json", str(tmp_path / "report.json"))
    assert "hog" in output
    assert "p99 s" in output
    assert '"workload": "hog"' in (tmp_path / "report.json").read_text()


def test_thousands_of_tenants() -> None:
    report = simulated("mixed", tenants=4096, engines=64, seconds=60.0)
    assert report.operations_per_s > 0
    assert all(each.jain > 0.5 for each in report.classes)
