"""The routes. A tenant sees its own usage, an administrator all tenants'."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import AfterValidator, BaseModel

from tinsmith.errors import UserError
from tinsmith.features.usage.counts import StoredCheckpoints, UsageRecord, hourly, in_all, stored
from tinsmith.hook_values import Principal, RoutesContext
from tinsmith.store import DiskUse


class BillingEventInfo(BaseModel):
    """Which of the numbers is set depends on the type."""

    type: Literal["training", "sampling_prefill", "sampling_sample", "checkpoint"]
    token_count: int | None = None
    cached: bool | None = None
    count: int | None = None


class BillingEvent(BaseModel):
    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    event_info: BillingEventInfo


class BillingUsage(BaseModel):
    data: list[BillingEvent]


class StorageUsageItem(BaseModel):
    project_id: str | None = None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class StorageUsage(BaseModel):
    data: list[StorageUsageItem]


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


def usage_routes(context: RoutesContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["usage"], route_class=context.json_route)
    store = context.store
    Caller = Annotated[Principal, Depends(context.caller)]

    @router.get("/billing/usage/events", response_model=BillingUsage, response_model_exclude_none=True)
    async def usage_events(starting_on: Time, ending_before: Time, caller: Caller) -> Response:
        """List what was used in every hour that the window touches. Hours are in UTC."""
        if not timedelta() < ending_before - starting_on <= _LONGEST:
            msg = (
                f"the window from {starting_on.isoformat()} to {ending_before.isoformat()} must end after it starts "
                f"and last at most {_LONGEST.days} days"
            )
            raise UserError(msg)
        last = ending_before - timedelta(microseconds=1)
        read = partial(store.read, hourly, _visible(caller), first=starting_on, last=last)
        return await context.large_answer(caller.tenant, read, _usage)

    @router.get("/billing/usage/checkpoints/current", response_model_exclude_none=True)
    async def stored_now(caller: Caller, project_id: str | None = None) -> StorageUsage:
        kept = await store.read(stored, _visible(caller), project_id=project_id)
        return StorageUsage(data=[_stored(each) for each in kept])

    @router.get("/usage/metrics", include_in_schema=False)
    async def usage_metrics(caller: Caller) -> Response:
        """Answer in the format of Prometheus. It names tenants, so unlike `/metrics` it needs a key."""
        tenant = _visible(caller)
        used, kept = await store.read(in_all, tenant), await store.read(stored, tenant)
        families = [*_used_metrics(used), *_stored_metrics(kept), *_disk_metrics(await context.disk_uses(tenant))]
        return PlainTextResponse(generate_latest(_Found(families)), media_type=CONTENT_TYPE_LATEST)

    return router


def _visible(caller: Principal) -> str | None:
    return None if caller.admin else caller.tenant


def _usage(used: Sequence[UsageRecord]) -> BillingUsage:
    return BillingUsage(data=[event for record in used for event in _events(record)])


def _events(record: UsageRecord) -> Iterator[BillingEvent]:
    assert record.hour is not None
    for info in (
        BillingEventInfo(type="training", token_count=record.trained_tokens),
        BillingEventInfo(type="sampling_prefill", token_count=record.prefilled_tokens, cached=False),
        BillingEventInfo(type="sampling_sample", token_count=record.sampled_tokens),
        BillingEventInfo(type="checkpoint", count=record.checkpoints),
    ):
        if info.token_count or info.count:
            yield BillingEvent(
                bucket_start=record.hour,
                bucket_end=record.hour + _HOUR,
                base_model=record.base_model,
                user_id=record.tenant,
                user_name=record.tenant,
                event_info=info,
            )


def _stored(each: StoredCheckpoints) -> StorageUsageItem:
    return StorageUsageItem(
        project_id=each.project_id,
        user_name=each.tenant,
        checkpoint_count=each.number,
        size_bytes=each.num_bytes,
        size_gigabytes=each.num_bytes / _GIGABYTE,
    )


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
