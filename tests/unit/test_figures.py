"""Figures of engines: counted, reported, and shown once, GPUs included, with and without NVIDIA's library."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinsmith.builtin.metrics_endpoint import figure_metrics
from tinsmith.figures import (
    BATCH_OPERATIONS,
    COMMIT_SECONDS,
    TOKENS,
    Figures,
    Gpu,
    HostReport,
    Interface,
    MemoryPlan,
    Report,
    decode_report,
    encode_report,
)
from tinsmith.host_usage import Gpus, interfaces
from tinsmith.protocol import wire
from tinsmith.server.figure_views import hosts_of, times_of, with_figures
from tinsmith.server.kept import rarely
from tinsmith.store import PendingWork, ReportedFigures


class NvmlError(Exception):
    """As `pynvml.NVMLError`."""


class Nvml(SimpleNamespace):
    """NVIDIA's library with two cards: the first is divided, and tells no utilisation; the last has fallen off."""

    NVMLError = NvmlError

    def __init__(self, *, driver: bool = True) -> None:
        super().__init__(driver=driver)

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NvmlError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle == 2:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(used=20 + handle, total=80)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H100"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 0:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=75)


def test_gpus_are_read_as_far_as_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    gpus = Gpus()
    assert gpus.any
    assert gpus.read() == (Gpu("GPU-0", 0, "H100", None, 20, 80), Gpu("GPU-1", 1, "H100", 0.75, 21, 80))


@pytest.mark.parametrize("module", [None, Nvml(driver=False)], ids=["no package", "no driver"])
def test_without_package_or_driver_there_are_no_gpus(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert not Gpus().any
    assert Gpus().read() == ()


def reported(base_model: str, used: int, *, age_s: float = 0.0, figures: Figures | None = None) -> ReportedFigures:
    host = HostReport("node-1", 1000, 2.5, (Gpu("GPU-1", 1, "H100", 0.75, used, 80),))
    report = encode_report(Report((figures or Figures()).series(), host))
    at = datetime.now(UTC) - timedelta(seconds=age_s)
    return ReportedFigures(base_model=base_model, reported_at=at, report=report)


def shown(*reports: ReportedFigures) -> dict[tuple[str, tuple[str, ...]], float]:
    families = list(figure_metrics(Figures(), reports))
    return {(each.name, tuple(each.labels.values())): each.value for family in families for each in family.samples}


def test_a_gpu_that_two_engines_report_is_shown_once_and_as_it_was_last() -> None:
    key = ("tinsmith_gpu_memory_used_bytes", ("node-1", "1", "GPU-1", "H100"))
    assert shown(reported("a", 30, age_s=5), reported("b", 40))[key] == 40
    assert shown(reported("a", 30), reported("b", 40, age_s=5))[key] == 30
    assert key not in shown(reported("a", 30, age_s=3600))


def test_histograms_add_up_and_other_releases_are_left_out() -> None:
    figures = Figures()
    for size in (1, 3, 1000):
        figures.observe(BATCH_OPERATIONS, size, "optim_step")
    figures.count(TOKENS, 7, "trained")
    found = shown(
        reported("a", 1, figures=figures),
        ReportedFigures(base_model="b", reported_at=datetime.now(UTC), report=b"\xc1 of another release"),
    )
    of = {
        bound: found["tinsmith_batch_operations_bucket", ("a", "optim_step", bound)]
        for bound in ("1.0", "2.0", "4.0", "256.0", "+Inf")
    }
    assert of == {"1.0": 1, "2.0": 1, "4.0": 2, "256.0": 2, "+Inf": 3}
    assert found["tinsmith_batch_operations_sum", ("a", "optim_step")] == 1004
    assert found["tinsmith_tokens_total", ("a", "trained")] == 7


def test_a_report_of_another_form_is_none() -> None:
    assert decode_report(b"\xc1") is None


async def test_the_backlog_is_read_once_for_all_who_ask() -> None:
    class Store:
        reads = 0

        async def list_pending(self) -> list[PendingWork]:
            self.reads += 1
            return []

    store = Store()
    backlog = rarely(store.list_pending)
    for _ in range(3):
        assert await backlog.get() == []
    assert store.reads == 1


def test_a_histogram_tells_its_number_mean_and_what_bounds_nearly_all() -> None:
    figures = Figures()
    assert times_of(figures.series(), COMMIT_SECONDS).number == 0
    for _ in range(99):
        figures.observe(COMMIT_SECONDS, 0.002)
    figures.observe(COMMIT_SECONDS, 0.102)
    found = times_of(figures.series(), COMMIT_SECONDS)
    assert (found.number, found.most_s) == (100, 0.0025)
    assert found.mean_s == pytest.approx(0.003)
    for _ in range(10):
        figures.observe(COMMIT_SECONDS, 1e9)  # beyond the largest bound
    assert times_of(figures.series(), COMMIT_SECONDS).most_s is None


def test_a_host_is_shown_once_as_it_was_reported_last() -> None:
    (host,) = hosts_of([reported("b", 10, age_s=9.0), reported("a", 20), reported("c", 30, age_s=5.0)])
    assert (host.host, host.engines, host.gpus[0].used_bytes) == ("node-1", ["a", "b", "c"], 20)


def test_hosts_of_workers_are_shown_beside_the_engines() -> None:
    """The workers of a host are one report, and only one of them tells of its GPUs."""
    figures, card = Figures(), Gpu("GPU-9", 0, "H200", 0.5, 7, 10)
    figures.worker_reported(11, HostReport("node-2", 100, 1.0, (card,), (Interface("eth0", 3, 4),)))
    figures.worker_reported(12, HostReport("node-2", 200, 2.0))
    figures.worker_reported(11, HostReport("node-1", 50, 4.0))
    report = encode_report(Report((), HostReport("node-1", 1, 0.5), figures.workers()))
    found = ReportedFigures(base_model="a", reported_at=datetime.now(UTC), report=report)
    ours, theirs = hosts_of([found])
    assert (ours.host, ours.workers, ours.worker_bytes, ours.gpus) == ("node-1", 1, 50, [])
    assert (theirs.host, theirs.engines, theirs.workers, theirs.worker_bytes) == ("node-2", ["a"], 2, 300)
    assert (theirs.worker_cpu_s, theirs.gpus[0].used_bytes, theirs.interfaces[0].sent_bytes) == (3.0, 7, 4)
    exported = shown(found)
    assert exported["tinsmith_gpu_memory_used_bytes", ("node-2", "0", "GPU-9", "H200")] == 7
    assert exported["tinsmith_workers_resident_memory_bytes", ("a", "node-2")] == 300
    assert exported["tinsmith_workers_cpu_seconds_total", ("a", "node-1")] == 4.0
    figures.workers_ended([("node-2", 11), ("node-2", 12)])
    assert [each.host for each in figures.workers()] == ["node-1"]


def memory_view(report: Report, *, operator: bool = True) -> wire.MemoryView | None:
    found = ReportedFigures(base_model="a", reported_at=datetime.now(UTC), report=encode_report(report))
    engine = wire.EngineView(base_model="a", state="ready", restarts=0, work=[])
    return with_figures(engine, [found], operator=operator).memory


def test_memory_by_the_plan_is_beside_what_is_used() -> None:
    """Of the plan's GPUs if the driver tells of all of them, else of the engine and its workers."""
    cards = tuple(Gpu(f"GPU-{number}", number, "H200", 0.5, 7 + number, 10) for number in range(3))
    workers = HostReport("node-1", 50, 1.0), HostReport("node-2", 200, 1.0)
    plan = MemoryPlan((("weights", 6), ("keys and values", 3)), 9, 16, ("0", "GPU-2"))
    report = Report((), HostReport("node-1", 100, 1.0, cards), workers, plan)
    found = memory_view(report)
    assert found is not None
    assert (found.planned, found.planned_total, found.limit) == ({"weights": 6, "keys and values": 3}, 9, 16)
    assert (found.used, found.used_of) == (7 + 9, "devices")
    assert memory_view(report, operator=False) is None
    silent = memory_view(Report((), HostReport("node-1", 100, 1.0, cards[:2]), workers, plan))
    assert silent is not None
    assert (silent.used, silent.used_of) == (350, "processes")
    unplanned = memory_view(Report((), HostReport("node-1", 100, 1.0, cards)))
    assert unplanned is not None
    assert (unplanned.planned, unplanned.limit, unplanned.used) == ({}, None, 100)


def test_interfaces_are_read_as_the_system_lists_them(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(
        "Inter-|   Receive       |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes\n"
        "    lo: 10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n  ifb0: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
        "eth0:123 2 0 0 0 0 0 0 456 3 0 0 0 0 0 0\n"
    )
    assert interfaces(tmp_path / "dev") == (Interface("lo", 10, 10), Interface("eth0", 123, 456))
    assert interfaces(tmp_path / "none") == ()
