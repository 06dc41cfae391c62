"""What engines reported of their processes and hosts, as people and programs read it."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Final

from tinsmith.figures import RECOVERY_SECONDS, Figure, HostReport, Report, Series, decode_report
from tinsmith.protocol import wire
from tinsmith.store import ReportedFigures

_MOST: Final = 0.99  # the share of observations that `most_s` bounds


def with_figures(engine: wire.EngineView, reported: Sequence[ReportedFigures], *, operator: bool) -> wire.EngineView:
    """Add what an engine last reported of its process; for operators, what it uses of its devices."""
    found = next((each for each in reported if each.base_model == engine.base_model), None)
    report = None if found is None else decode_report(found.report)
    if report is None:
        return engine
    recoveries = times_of(report.series, RECOVERY_SECONDS)
    return engine.model_copy(
        update={
            "resident_bytes": report.host.resident_bytes or None,
            "memory": _memory(report) if operator else None,
            "recoveries": recoveries if recoveries.number else None,
        }
    )


def _memory(report: Report) -> wire.MemoryView | None:
    plan, host = report.memory, report.host
    devices = () if plan is None else plan.devices
    gpus = [gpu for gpu in host.gpus if {str(gpu.number), gpu.uuid} & set(devices)]
    if gpus and len(gpus) == len(devices):  # the driver tells of all of them
        used, used_of = sum(gpu.used_bytes for gpu in gpus), "devices"
    else:
        used, used_of = sum(each.resident_bytes for each in (host, *report.workers)), "processes"
    return wire.MemoryView(
        planned={} if plan is None else dict(plan.parts),
        planned_total=None if plan is None else plan.total,
        limit=None if plan is None else plan.limit,
        used=used,
        used_of=used_of,
    )


def times_of(series: Sequence[Series], figure: Figure) -> wire.TimesView:
    """Summarise a histogram."""
    found = next((each for each in series if each.name == figure.name and not each.labels), None)
    number = 0 if found is None else sum(found.counts)
    if found is None or not number:
        return wire.TimesView(number=0)
    bounds = [*figure.buckets, None]
    most = next(
        (bound for bound, until in zip(bounds, accumulate(found.counts), strict=True) if until >= _MOST * number), None
    )
    return wire.TimesView(number=number, mean_s=found.total / number, most_s=most)


def hosts_of(reported: Sequence[ReportedFigures]) -> list[wire.HostView]:
    """Return the hosts of engines and their workers by name, each as it was reported last: several may share one."""
    newest: dict[str, tuple[datetime, HostReport]] = {}
    engines: dict[str, set[str]] = {}
    workers: dict[str, list[HostReport]] = {}
    for each in reported:
        if (report := decode_report(each.report)) is None:
            continue
        for host in (*report.workers, report.host):
            engines.setdefault(host.host, set()).add(each.base_model)
            if host.host not in newest or newest[host.host][0] <= each.reported_at:
                newest[host.host] = each.reported_at, host
        for host in report.workers:
            workers.setdefault(host.host, []).append(host)
    return [_host(name, engines[name], workers.get(name, ()), *newest[name]) for name in sorted(newest)]


def _host(
    name: str, engines: Iterable[str], workers: Sequence[HostReport], reported_at: datetime, report: HostReport
) -> wire.HostView:
    gpus = [
        wire.GpuView(
            number=gpu.number,
            name=gpu.name,
            utilization=gpu.utilisation,
            used_bytes=gpu.used_bytes,
            total_bytes=gpu.total_bytes,
        )
        for gpu in report.gpus
    ]
    interfaces = [wire.InterfaceView.model_validate(each, from_attributes=True) for each in report.interfaces]
    return wire.HostView(
        host=name,
        engines=sorted(engines),
        workers=sum(each.processes for each in workers),
        worker_bytes=sum(each.resident_bytes for each in workers) or None,
        worker_cpu_s=sum(each.cpu_s for each in workers) or None,
        reported_at=reported_at,
        gpus=gpus,
        interfaces=interfaces,
    )
