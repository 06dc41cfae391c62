"""The bytes that tenants keep, and their limits. A tenant sees its own, an administrator all tenants'."""

from fastapi import APIRouter

from tinsmith.protocol import wire
from tinsmith.server.auth import Viewer, visible_tenant
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.store import DiskUse

router = APIRouter(prefix=API_PREFIX, tags=["usage"], route_class=JsonRoute)


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
