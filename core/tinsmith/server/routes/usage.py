"""The usage of tenants: the SDK's billing calls, without prices, and counters for Prometheus.

A tenant sees its own usage, an administrator all tenants'.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import AfterValidator

from tinsmith.errors import UserError
from tinsmith.protocol import wire
from tinsmith.server.auth import Caller, Viewer, visible_tenant
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.limits.disk_quota import DiskUse
from tinsmith.store import StoredCheckpoints, UsageRecord

router = APIRouter(prefix=API_PREFIX, tags=["usage"], route_class=JsonRoute)


def _in_utc(time: datetime) -> datetime:
    """Raise ValueError for a time that UTC cannot express: the first and last hours of the calendar, elsewhere."""
    try:
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except OverflowError as error:
        msg = "is out of range in UTC"
        raise ValueError(msg) from error


Time = Annotated[datetime, Query(description="without a zone: in UTC"), AfterValidator(_in_utc)]

_GIGABYTE: Final = 1e9
_HOUR: Final = timedelta(hours=1)
_LONGEST: Final = timedelta(days=31)


@router.get("/billing/usage/events", response_model=wire.BillingUsage, response_model_exclude_none=True)
async def usage_events(
    starting_on: Time,
    ending_before: Time,
    caller: Caller,
    context: Context,
) -> Response:
    """List what was used in every hour that the window touches. Hours are in UTC."""
    if not timedelta() < ending_before - starting_on <= _LONGEST:
        msg = (
            f"the window from {starting_on.isoformat()} to {ending_before.isoformat()} must end after it starts and "
            f"last at most {_LONGEST.days} days"
        )
        raise UserError(msg)
    last = ending_before - timedelta(microseconds=1)
    read = partial(context.store.hourly_usage, visible_tenant(caller, "accessible"), first=starting_on, last=last)
    return await context.large_answers.build(caller.tenant, read, _usage)


def _usage(used: Sequence[UsageRecord]) -> wire.BillingUsage:
    return wire.BillingUsage(data=[event for record in used for event in _events(record)])


def _events(record: UsageRecord) -> Iterator[wire.BillingEvent]:
    assert record.hour is not None
    for info in (
        wire.BillingEventInfo(type="training", token_count=record.trained_tokens),
        wire.BillingEventInfo(type="sampling_prefill", token_count=record.prefilled_tokens, cached=False),
        wire.BillingEventInfo(type="sampling_sample", token_count=record.sampled_tokens),
        wire.BillingEventInfo(type="checkpoint", count=record.checkpoints),
    ):
        if info.token_count or info.count:
            yield wire.BillingEvent(
                bucket_start=record.hour,
                bucket_end=record.hour + _HOUR,
                base_model=record.base_model,
                user_id=record.tenant,
                user_name=record.tenant,
                event_info=info,
            )


@router.get("/billing/usage/checkpoints/current", response_model_exclude_none=True)
async def stored_now(caller: Caller, context: Context, project_id: str | None = None) -> wire.StorageUsage:
    stored = await context.store.stored_checkpoints(visible_tenant(caller, "accessible"), project_id=project_id)
    return wire.StorageUsage(data=[_stored(each) for each in stored])


def _stored(each: StoredCheckpoints) -> wire.StorageUsageItem:
    return wire.StorageUsageItem(
        project_id=each.project_id,
        user_name=each.tenant,
        checkpoint_count=each.number,
        size_bytes=each.num_bytes,
        size_gigabytes=each.num_bytes / _GIGABYTE,
    )


@router.get("/usage/disk")
async def disk_usage(caller: Viewer, context: Context) -> wire.DiskUsage:
    """List the bytes kept, and the limits."""
    disk = context.quotas.disk
    uses = await disk.uses(visible_tenant(caller, "accessible"))
    space, reserve = await disk.space(), await disk.reserve_bytes()
    return wire.DiskUsage(
        data=[_disk_use(each) for each in uses], free_bytes=max(0, space.free_bytes), reserve_bytes=reserve
    )


def _disk_use(use: DiskUse) -> wire.DiskUsageItem:
    kept = use.kept
    return wire.DiskUsageItem(
        tenant=kept.tenant,
        log_bytes=kept.log,
        checkpoint_bytes=kept.checkpoints,
        snapshot_bytes=kept.snapshots,
        recovery_point_bytes=kept.recovery_points,
        routed_expert_bytes=kept.routed_experts,
        metric_bytes=kept.metrics,
        description_bytes=kept.descriptions,
        total_bytes=kept.total,
        allowed_bytes=use.allowed_bytes,
    )


@router.get("/usage/metrics", include_in_schema=False)
async def usage_metrics(caller: Caller, context: Context) -> Response:
    """Answer in the format of Prometheus. It names tenants, so unlike `/metrics` it needs a key."""
    tenant = visible_tenant(caller, "accessible")
    used, stored = await context.store.total_usage(tenant), await context.store.stored_checkpoints(tenant)
    families = [*_used_metrics(used), *_stored_metrics(stored), *_disk_metrics(await context.quotas.disk.uses(tenant))]
    return PlainTextResponse(generate_latest(_Found(families)), media_type=CONTENT_TYPE_LATEST)


class _Found(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _used_metrics(used: Iterable[UsageRecord]) -> list[Metric]:
    of = ["tenant", "base_model"]
    tokens = CounterMetricFamily("tinsmith_usage_tokens", "tokens of operations that succeeded", labels=[*of, "kind"])
    seconds = CounterMetricFamily("tinsmith_usage_engine_seconds", "time in the backend", labels=of)
    checkpoints = CounterMetricFamily("tinsmith_usage_checkpoints", "checkpoints written", labels=of)
    written = CounterMetricFamily("tinsmith_usage_stored_bytes", "bytes written in checkpoints", labels=of)
    for each in used:
        names = [each.tenant, each.base_model]
        tokens.add_metric([*names, "trained"], each.trained_tokens)
        tokens.add_metric([*names, "prefilled"], each.prefilled_tokens)
        tokens.add_metric([*names, "sampled"], each.sampled_tokens)
        seconds.add_metric(names, each.engine_s)
        checkpoints.add_metric(names, each.checkpoints)
        written.add_metric(names, each.stored_bytes)
    return [tokens, seconds, checkpoints, written]


def _stored_metrics(stored: Iterable[StoredCheckpoints]) -> list[Metric]:
    of = ["tenant", "project"]
    number = GaugeMetricFamily("tinsmith_checkpoints_kept", "checkpoints that exist", labels=of)
    num_bytes = GaugeMetricFamily("tinsmith_checkpoints_kept_bytes", "bytes of the checkpoints that exist", labels=of)
    for each in stored:
        number.add_metric([each.tenant, each.project_id or ""], each.number)
        num_bytes.add_metric([each.tenant, each.project_id or ""], each.num_bytes)
    return [number, num_bytes]


def _disk_metrics(uses: Iterable[DiskUse]) -> list[Metric]:
    kept = GaugeMetricFamily(
        "tinsmith_kept_bytes", "bytes kept on the disk and in the database", labels=["tenant", "of"]
    )
    allowed = GaugeMetricFamily("tinsmith_allowed_bytes", "bytes that may be kept", labels=["tenant"])
    for each in uses:
        for of, num_bytes in each.kept.by_kind.items():
            kept.add_metric([each.kept.tenant, of], num_bytes)
        allowed.add_metric([each.kept.tenant], each.allowed_bytes)
    return [kept, allowed]
