"""Decides whether a tenant may have more: requests, pending work, models, sessions, sampling sessions, checkpoints.

A request over a limit gets a 429, and the SDK sends it again. Nothing is recorded, so a training request keeps its
place in the order. A save without room is recorded as failed instead: only its tenant can make room, and the requests
behind it must not wait for that.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tinsmith.errors import CapacityError, UserError
from tinsmith.server.limits.counts import Tallies, TokenBuckets
from tinsmith.server.limits.disk_quota import DiskQuota
from tinsmith.settings import QuotaSettings
from tinsmith.store import NewOperation, PendingCounts, RequestStore
from tinsmith.store.disk_room import ReadSpace

_STANDING_S: Final = 10.0  # `Retry-After` for what only the tenant can make room for
_FEWER_SAMPLERS: Final = "close the service clients whose sampling clients you no longer need"
_OPEN_SAVES: Final = "open saves"  # counted beside the settings, and limited by `checkpoints`
_SAVES: Final = frozenset({"save_state", "save_for_sampler", "export_adapter"})
_FREES: Final = frozenset({"unload_model"})


class Quotas:
    """One per app. `admit_*` methods raise CapacityError if the tenant is over a limit."""

    def __init__(
        self,
        store: RequestStore,
        settings: QuotaSettings,
        *,
        read_space: ReadSpace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read_space` asks the disk; None: what is kept on it has no limit."""
        self.disk = DiskQuota(store, settings, read_space, clock)
        self._store = store
        self.settings = settings
        self._buckets = TokenBuckets(clock)
        self._in_progress: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._pending = Tallies(self._read_pending, clock)
        self._models = Tallies(_one("live_models", store.count_live_models), clock)
        self._sessions = Tallies(_one("sessions", store.count_live_sessions), clock)
        self._samplers = Tallies(_one("sampling_sessions", store.count_open_sampling_sessions), clock)
        self._kept = Tallies(self._read_kept, clock)
        self._api_keys = Tallies(_one("api_keys", store.count_api_keys), clock)

    def admit_request(self, tenant: str, key_id: Callable[[], str | None]) -> None:
        """Count a request towards the rate of its tenant, and of its key if keys have a limit."""
        limits = self.settings.of(tenant)
        if limits.key_requests_per_s is not None and (key := key_id()) is not None:
            self._take(f"{tenant} {key}", limits.key_requests_per_s, "key_requests_per_s")
        if limits.requests_per_s is not None:
            self._take(tenant, limits.requests_per_s, "requests_per_s")

    def _take(self, whose: str, per_s: float, setting: str) -> None:
        wait_s = self._buckets.take(whose, per_s=per_s)
        if wait_s > 0:
            msg = (
                f"you send more than {per_s:g} requests per second, your limit (quotas.{setting}); send fewer, or "
                "ask the operator to raise it"
            )
            raise CapacityError(msg, retry_after_s=wait_s)

    @contextmanager
    def in_progress(self, tenant: str, *, polls: bool) -> Iterator[None]:
        """Count a request while the block runs; a long poll counts as a request, too. Use on the event loop."""
        settings = ("requests_in_progress", "long_polls") if polls else ("requests_in_progress",)
        limits, counts = self.settings.of(tenant), self._in_progress[tenant]
        for setting in settings:
            limit: int | None = getattr(limits, setting)
            if limit is not None and counts[setting] >= limit:
                raise CapacityError(_too_much(setting, limit, "send this one again when some of them are answered"))
        counts.update(settings)
        try:
            yield
        finally:
            counts.subtract(settings)
            if counts["requests_in_progress"] == 0:
                del self._in_progress[tenant]

    async def admit_sample(self, operation: NewOperation) -> None:
        await self._admit_pending(operation, "pending_samples")

    async def admit_operation(self, operation: NewOperation) -> None:
        """Admit a training request.

        Later requests of the model may wait for this one and fill the quota. Such an awaited request may use up to
        twice the quota. One that frees space needs none.
        """
        try:
            await self._admit_pending(operation, "pending_operations")
        except CapacityError:
            if not await self._store.is_awaited(operation.subject_id, operation.seq_id):
                raise
            await self._admit_pending(operation, "pending_operations", awaited=True)

    async def _admit_pending(self, operation: NewOperation, setting: str, *, awaited: bool = False) -> None:
        """Count the bytes last: all tenants share them. If they are refused, the counts before are taken back."""
        tenant, num_bytes = operation.tenant, len(operation.payload)
        more = {setting: 1, "queued_bytes": num_bytes, _OPEN_SAVES: int(operation.kind in _SAVES)}
        remedy = "send this one again when some of them are done"
        counts = await self._admit(self._pending, tenant, more, remedy, times=2 if awaited else 1)
        if operation.kind in _FREES:
            return
        try:
            await self.disk.admit(tenant, num_bytes, awaited=awaited)
        except BaseException:
            counts.subtract(more)
            raise

    async def admit_model(self, tenant: str, described_bytes: int = 0) -> None:
        """`described_bytes`: of what the client says of it."""
        await self.disk.admit_described(tenant, described_bytes)
        await self._admit(self._models, tenant, {"live_models": 1}, "end sessions whose models you no longer need")

    async def admit_session(self, tenant: str, described_bytes: int = 0) -> None:
        await self.disk.admit_described(tenant, described_bytes)
        await self._admit(self._sessions, tenant, {"sessions": 1}, "close the clients that you no longer need")

    async def admit_sampling_session(self, tenant: str) -> None:
        await self.disk.admit_unowned()
        await self._admit(self._samplers, tenant, {"sampling_sessions": 1}, _FEWER_SAMPLERS)

    async def admit_api_key(self, tenant: str) -> None:
        await self.disk.admit_unowned()
        await self._admit(self._api_keys, tenant, {"api_keys": 1}, "delete keys that you no longer need")

    async def why_no_sampling_session(self, tenant: str) -> UserError | None:
        """Return why a tenant may not save for another sampling session, or None if it may. Saves that wait count."""
        number = (await self._samplers.of(tenant))["sampling_sessions"] + (await self._pending.of(tenant))[_OPEN_SAVES]
        limit = self._limit(tenant, "sampling_sessions")
        if limit is not None and number >= limit:
            return UserError(_too_much("sampling_sessions", limit, _FEWER_SAMPLERS))
        return await self.disk.why_no_save(tenant)

    async def why_no_checkpoint(self, tenant: str) -> UserError | None:
        """Return why a tenant may not save another checkpoint, or None if it may. Waiting saves count, too."""
        why = self._why_too_many(tenant, await self._kept.of(tenant), await self._open_saves(tenant), num_bytes=1)
        return why or await self.disk.why_no_save(tenant)

    async def admit_checkpoint(self, tenant: str, num_bytes: int) -> None:
        """Count a checkpoint that no operation saves. Raise UserError if there is no room for it."""
        why = await self.disk.why_no_save(tenant, num_bytes)
        saves, kept = await self._open_saves(tenant), await self._kept.of(tenant)
        if (why := why or self._why_too_many(tenant, kept, saves, num_bytes=num_bytes)) is not None:
            raise why
        kept.update(checkpoints=1, stored_bytes=num_bytes)

    async def _open_saves(self, tenant: str) -> int:
        return (await self._pending.of(tenant))[_OPEN_SAVES]

    def _why_too_many(self, tenant: str, kept: Counter[str], saves: int, *, num_bytes: int) -> UserError | None:
        """Return why one more, of that size, is too many. How large those are that wait is not known."""
        for setting, number in (
            ("checkpoints", kept["checkpoints"] + saves + 1),
            ("stored_bytes", kept["stored_bytes"] + num_bytes),
        ):
            if (limit := self._limit(tenant, setting)) is not None and number > limit:
                return UserError(_too_much(setting, limit, "delete checkpoints that you no longer need"))
        return None

    async def _admit(
        self, tallies: Tallies, tenant: str, more: Mapping[str, int], remedy: str, *, times: int = 1
    ) -> Counter[str]:
        """Admit and count all of `more`, or nothing. Something that is alone always fits. Return what counts it."""
        counts = await tallies.of(tenant)
        for setting, number in more.items():
            limit = self._limit(tenant, setting)
            if limit is not None and counts[setting] > 0 and counts[setting] + number > limit * times:
                retry_after_s = 1.0 if tallies is self._pending else _STANDING_S
                raise CapacityError(_too_much(setting, limit, remedy), retry_after_s=retry_after_s)
        counts.update(more)
        return counts

    def _limit(self, tenant: str, setting: str) -> int | None:
        limit: int | None = getattr(self.settings.of(tenant), setting) if setting in _WHAT else None
        return limit

    async def _read_pending(self, tenant: str) -> Counter[str]:
        return _by_setting(await self._store.pending(tenant))

    async def _read_kept(self, tenant: str) -> Counter[str]:
        kept = await self._store.kept_checkpoints(tenant)
        return Counter(checkpoints=kept.number, stored_bytes=kept.num_bytes)


_WHAT: Final = {
    "requests_in_progress": "requests may be in progress at each server",
    "long_polls": "requests may wait for results at each server",
    "pending_operations": "training requests may wait",
    "pending_samples": "samples may wait",
    "queued_bytes": "bytes of requests may wait",
    "live_models": "models may be in training",
    "sessions": "sessions may be open",
    "sampling_sessions": "sampling sessions may be open",
    "api_keys": "API keys may be made over HTTP",
    "checkpoints": "checkpoints may be kept",
    "stored_bytes": "bytes of checkpoints may be kept",
}
"""The text of each limit."""


def _too_much(setting: str, limit: int, remedy: str) -> str:
    return (
        f"at most {limit} {_WHAT[setting]} for one tenant (quotas.{setting}), and you have reached that; {remedy}, or "
        "ask the operator to raise the limit"
    )


def _one(setting: str, count: Callable[[str], Awaitable[int]]) -> Callable[[str], Awaitable[Counter[str]]]:
    async def read(tenant: str) -> Counter[str]:
        return Counter({setting: await count(tenant)})

    return read


def _by_setting(pending: PendingCounts) -> Counter[str]:
    number = Counter(pending.by_kind)
    return Counter(
        {
            "pending_samples": number["sample"],
            "pending_operations": number.total() - number["sample"],
            "queued_bytes": pending.num_bytes,
            _OPEN_SAVES: sum(number[kind] for kind in _SAVES),
        }
    )
