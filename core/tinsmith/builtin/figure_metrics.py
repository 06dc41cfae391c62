"""The figures of this server and of its engines, as Prometheus reads them.

`base_model` says whose they are: it is empty for the server's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tinsmith.figures import FIGURES, Figure, Figures, Gpu, Report, Series, decode_report
from tinsmith.store import ReportedFigures

_OLD: Final = timedelta(minutes=1)
"""After which an engine's memory and GPUs are no longer shown, unless nothing else of it changes either."""

Owned = tuple[str, Series]


class FigureCollector(Collector):
    def __init__(self, own: Figures, reported: Sequence[ReportedFigures]) -> None:
        found = [(each, decode_report(each.report)) for each in reported]
        self._reports = [(each, report) for each, report in found if report is not None]
        self._series: list[Owned] = [("", each) for each in own.series() if each.name.startswith("store_")]
        for each, report in self._reports:
            self._series += [(each.base_model, series) for series in report.series]

    def collect(self) -> Iterator[Metric]:
        for figure in FIGURES:
            yield _family(figure, [each for each in self._series if each[1].name == figure.name])
        yield from _processes([(each.base_model, report) for each, report in self._reports])
        yield from _gpus(gpus_of(self._reports))


def _family(figure: Figure, series: Iterable[Owned]) -> Metric:
    name, labels = f"tinsmith_{figure.name}", ["base_model", *figure.labels]
    if not figure.buckets:
        counter = CounterMetricFamily(name, figure.help, labels=labels)
        for base_model, each in series:
            counter.add_metric([base_model, *each.labels], each.total)
        return counter
    histogram = HistogramMetricFamily(name, figure.help, labels=labels)
    bounds = [*map(str, figure.buckets), "+Inf"]
    for base_model, each in series:
        if len(each.counts) == len(bounds):  # another release may have had others
            buckets = list(zip(bounds, accumulate(each.counts), strict=True))
            histogram.add_metric([base_model, *each.labels], buckets, each.total)
    return histogram


def _processes(reports: Iterable[tuple[str, Report]]) -> list[Metric]:
    labels = ["base_model", "host"]
    memory = GaugeMetricFamily(
        "tinsmith_engine_resident_memory_bytes", "memory of the engine's process, as it last reported", labels=labels
    )
    cpu = CounterMetricFamily("tinsmith_engine_cpu_seconds", "CPU time of the engine's process", labels=labels)
    for base_model, report in reports:
        memory.add_metric([base_model, report.host.host], report.host.resident_bytes)
        cpu.add_metric([base_model, report.host.host], report.host.cpu_s)
    return [memory, cpu]


def gpus_of(reports: Iterable[tuple[ReportedFigures, Report]]) -> dict[tuple[str, str], tuple[str, Gpu]]:
    """Return host and GPU by host and uuid, each as it was reported last: several engines may share a host."""
    newest: dict[tuple[str, str], tuple[datetime, str, Gpu]] = {}
    for each, report in reports:
        if datetime.now(UTC) - each.reported_at > _OLD:
            continue
        for gpu in report.host.gpus:
            key = report.host.host, gpu.uuid
            if key not in newest or newest[key][0] < each.reported_at:
                newest[key] = each.reported_at, report.host.host, gpu
    return {key: (host, gpu) for key, (_, host, gpu) in sorted(newest.items())}


def _gpus(found: dict[tuple[str, str], tuple[str, Gpu]]) -> list[Metric]:
    labels = ["host", "gpu", "uuid", "model"]
    busy = GaugeMetricFamily(
        "tinsmith_gpu_utilization_ratio", "part of the last second in which the GPU computed", labels=labels
    )
    used = GaugeMetricFamily("tinsmith_gpu_memory_used_bytes", "memory of the GPU that is in use", labels=labels)
    total = GaugeMetricFamily("tinsmith_gpu_memory_bytes", "memory of the GPU", labels=labels)
    for host, gpu in found.values():
        names = [host, str(gpu.number), gpu.uuid, gpu.name]
        if gpu.utilisation is not None:
            busy.add_metric(names, gpu.utilisation)
        used.add_metric(names, gpu.used_bytes)
        total.add_metric(names, gpu.total_bytes)
    return [busy, used, total]
