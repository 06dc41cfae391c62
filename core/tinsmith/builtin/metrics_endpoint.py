"""`GET /metrics`: the server's counters and its engines' latest figures, for Prometheus. No names of tenants."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tinsmith.errors import TinsmithError
from tinsmith.figures import FIGURES, Figure, Figures, Gpu, Report, Series, decode_report
from tinsmith.hook_values import RoutesContext
from tinsmith.store import ConsistencyCounts, EngineRecord, EngineState, PendingWork, ReportedFigures

KEPT_S: Final = 1.0
_OLD: Final = timedelta(minutes=1)
"""After which an engine's memory and GPUs are no longer shown, unless nothing else of it changes either."""

_Owned = tuple[str, Series]  # base_model, empty for the server's own, and one of its figures


def metrics_router(context: RoutesContext) -> APIRouter:
    """Return the route. It needs no key; without one, an answer may be a second old."""
    router, page = APIRouter(tags=["service"]), _Page(context)

    @router.get("/metrics", include_in_schema=False)
    @context.public
    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await page.text(fresh=_has_key(request)), media_type=CONTENT_TYPE_LATEST)

    def _has_key(request: Request) -> bool:
        try:
            context.caller(request)
        except TinsmithError:
            return False
        return True

    return router


class _Page:
    """What `/metrics` shows, rendered once at a time for all who ask meanwhile."""

    def __init__(self, context: RoutesContext) -> None:
        self._context = context
        self._rendering: asyncio.Task[bytes] | None = None
        self._text = b""
        self._rendered_at_s = -1e9

    async def text(self, *, fresh: bool) -> bytes:
        if not fresh and time.monotonic() - self._rendered_at_s < KEPT_S:
            return self._text
        if self._rendering is None:
            self._rendering = asyncio.create_task(self._render())
        return await asyncio.shield(self._rendering)

    async def _render(self) -> bytes:
        try:
            store = self._context.store
            overdue, since = await store.overdue_engines(), await store.running_since()
            found = [
                *_engine_metrics(await store.list_engines(), overdue, since),
                *_queue_metrics(await self._context.pending()),
                *figure_metrics(self._context.figures, await store.list_figures()),
            ]
            self._text = generate_latest(self._context.registry) + generate_latest(_Found(found))
            self._rendered_at_s = time.monotonic()
            return self._text
        finally:
            self._rendering = None


class _Found(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _engine_metrics(
    records: Sequence[EngineRecord], overdue: Mapping[str, float], running_since: Mapping[str, datetime]
) -> list[Metric]:
    ready = GaugeMetricFamily("tinsmith_engine_ready", "1 while the engine is ready", labels=["base_model"])
    restarts = GaugeMetricFamily("tinsmith_engine_restarts", "restarts so far", labels=["base_model"])
    silent = GaugeMetricFamily(
        "tinsmith_engine_silent",
        "1 while the engine lives and does nothing: a call does not return, or its lease has run out",
        labels=["base_model"],
    )
    oldest = GaugeMetricFamily(
        "tinsmith_engine_oldest_operation_seconds",
        "how long ago the engine took the oldest operation that it is running, 0 if it runs none",
        labels=["base_model"],
    )
    now = datetime.now(UTC)
    for record in records:
        is_silent = record.state is EngineState.SILENT or record.engine_id in overdue
        age = now - running_since.get(record.base_model, now)
        ready.add_metric([record.base_model], float(record.state is EngineState.READY and not is_silent))
        restarts.add_metric([record.base_model], record.restarts)
        silent.add_metric([record.base_model], float(is_silent))
        oldest.add_metric([record.base_model], max(0.0, age.total_seconds()))
    return [ready, restarts, silent, oldest, *_consistency(records), *_turns(records)]


def _queue_metrics(pending: Sequence[PendingWork]) -> list[Metric]:
    """Queued and running operations, by kind. Tenants' names stay inside."""
    labels = ["base_model", "kind", "state"]
    number = GaugeMetricFamily("tinsmith_pending_operations", "operations that are queued or running", labels=labels)
    age = GaugeMetricFamily(
        "tinsmith_pending_oldest_seconds", "how long ago the oldest of these operations arrived", labels=labels
    )
    numbers, oldest = Counter[tuple[str, str, str]](), dict[tuple[str, str, str], datetime]()
    for each in pending:
        key = each.base_model, each.kind, each.state.value
        numbers[key] += each.number
        oldest[key] = min(each.oldest_at, oldest.get(key, each.oldest_at))
    now = datetime.now(UTC)
    for key, found in sorted(numbers.items()):
        number.add_metric(key, found)
        age.add_metric(key, max(0.0, (now - oldest[key]).total_seconds()))
    return [number, age]


def _turns(records: Sequence[EngineRecord]) -> list[Metric]:
    changes = CounterMetricFamily(
        "tinsmith_turn_changes",
        "times since the engine started that trainer and sampler gave each other the devices",
        labels=["base_model"],
    )
    changing = CounterMetricFamily(
        "tinsmith_turn_changing_seconds", "seconds that these changes took", labels=["base_model"]
    )
    for record in records:
        if record.turn is not None:
            changes.add_metric([record.base_model], record.turn.changes)
            changing.add_metric([record.base_model], record.turn.changing_s)
    return [changes, changing]


def _consistency(records: Sequence[EngineRecord]) -> list[Metric]:
    saves = CounterMetricFamily(
        "tinsmith_saves_compared",
        "saves for sampling since the engine started, by what the consistency gate found",
        labels=["base_model", "verdict"],
    )
    difference = GaugeMetricFamily(
        "tinsmith_consistency_difference_nats",
        "logprobs of the probes, trainer against sampler: of the last save (max, mean), of all of them (largest)",
        labels=["base_model", "of"],
    )
    for record in records:
        name, counts = record.base_model, record.consistency or ConsistencyCounts()
        saves.add_metric([name, "consistent"], counts.consistent)
        saves.add_metric([name, "inconsistent"], counts.inconsistent)
        saves.add_metric([name, "not compared"], counts.not_compared)
        for of, value in (
            ("max", counts.last_max_difference),
            ("mean", counts.last_mean_difference),
            ("largest", counts.largest_difference),
        ):
            if value is not None:
                difference.add_metric([name, of], value)
    return [saves, difference]


def figure_metrics(own: Figures, reported: Sequence[ReportedFigures]) -> Iterator[Metric]:
    """Yield the figures of this server and of its engines. `base_model` is empty for the server's own."""
    found = [(each, decode_report(each.report)) for each in reported]
    reports = [(each, report) for each, report in found if report is not None]
    series = [("", each) for each in own.series() if each.name.startswith("store_")]
    series += [(each.base_model, of_engine) for each, report in reports for of_engine in report.series]
    for figure in FIGURES:
        yield _family(figure, [each for each in series if each[1].name == figure.name])
    yield from _processes([(each.base_model, report) for each, report in reports])
    yield from _gpus(_gpus_of(reports))


def _family(figure: Figure, series: Iterable[_Owned]) -> Metric:
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
    of_workers = GaugeMetricFamily(
        "tinsmith_workers_resident_memory_bytes", "memory of the engine's workers on a host", labels=labels
    )
    workers_cpu = CounterMetricFamily(
        "tinsmith_workers_cpu_seconds", "CPU time of the engine's workers on a host", labels=labels
    )
    for base_model, report in reports:
        memory.add_metric([base_model, report.host.host], report.host.resident_bytes)
        cpu.add_metric([base_model, report.host.host], report.host.cpu_s)
        for each in report.workers:
            of_workers.add_metric([base_model, each.host], each.resident_bytes)
            workers_cpu.add_metric([base_model, each.host], each.cpu_s)
    return [memory, cpu, of_workers, workers_cpu]


def _gpus_of(reports: Iterable[tuple[ReportedFigures, Report]]) -> dict[tuple[str, str], tuple[str, Gpu]]:
    """Return host and GPU by host and uuid, each as it was reported last: several engines may share a host."""
    newest: dict[tuple[str, str], tuple[datetime, str, Gpu]] = {}
    for each, report in reports:
        if datetime.now(UTC) - each.reported_at > _OLD:
            continue
        for host in (*report.workers, report.host):
            for gpu in host.gpus:
                key = host.host, gpu.uuid
                if key not in newest or newest[key][0] <= each.reported_at:
                    newest[key] = each.reported_at, host.host, gpu
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
