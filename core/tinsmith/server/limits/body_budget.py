"""Limits the bytes of request bodies in memory: a budget for each tenant, and one for all tenants together.

A request takes its bytes before that memory is filled, and returns them when it has been answered.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, cast

from starlette.requests import Request

from tinsmith.errors import CapacityError

WAIT_S: Final = 10.0
"""How long a request waits for memory. Its unread body waits in the network meanwhile."""

MAX_WAITING: Final = 64
"""How many requests of a tenant may wait. Further ones are refused at once."""

_TENANTS: Final = 8
"""How many tenants may use up their budgets at the same time."""

FREE_BYTES: Final = 1 << 16
"""Smaller bodies are not counted, so small requests never wait for large ones."""

STRANGER_BYTES: Final = FREE_BYTES
"""The largest body that is read from an unknown caller. Routes authenticate every caller in any case."""

LEASE: Final = "tinsmith.lease"
"""The key in the ASGI scope under which a request with a body finds its lease."""


class BodyBudget:
    """One per app. A request that is alone always fits, and counts as at most the whole budget.

    `BodyLimits` limits the size of a single request.
    """

    def __init__(self, *, total_bytes: int, tenant_bytes: int | None = None) -> None:
        """`tenant_bytes`: one tenant's budget; by default an eighth of the whole."""
        self._total_bytes = total_bytes
        self._tenant_bytes = total_bytes // _TENANTS if tenant_bytes is None else tenant_bytes
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._waiting: dict[asyncio.Future[None], tuple[Lease, int]] = {}  # the longest first
        self._num_waiting: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @contextmanager
    def lease(self, tenant: str = "") -> Iterator["Lease"]:
        """Use on the event loop. Leaving the block returns everything.

        If the tenant is not known yet, set it on the lease before taking anything.
        """
        lease = Lease(self, tenant)
        try:
            yield lease
        finally:
            lease.resize(0)

    def _take(self, lease: "Lease", num_bytes: int) -> None:
        """Raises CapacityError if a budget is spent."""
        shrinks = num_bytes < lease.num_bytes
        if not self._try(lease, num_bytes):
            raise self._refusal(lease, num_bytes - lease.num_bytes)
        if shrinks:
            self._admit_waiting()

    async def _take_in_order(self, lease: "Lease", num_bytes: int) -> None:
        if self._try(lease, num_bytes):
            return
        if self._num_waiting[lease.tenant] < MAX_WAITING:
            with self._waits(lease, num_bytes) as admitted, suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await admitted
                    return
        self._take(lease, num_bytes)

    @contextmanager
    def _waits(self, lease: "Lease", num_bytes: int) -> Iterator[asyncio.Future[None]]:
        admitted = asyncio.get_running_loop().create_future()
        self._waiting[admitted] = (lease, num_bytes)
        self._num_waiting[lease.tenant] += 1
        try:
            yield admitted
        finally:
            self._waiting.pop(admitted, None)
            self._num_waiting[lease.tenant] -= 1
            if self._num_waiting[lease.tenant] == 0:
                del self._num_waiting[lease.tenant]

    def _admit_waiting(self) -> None:
        """Admit the waiting requests that now fit, in order of arrival."""
        for admitted, (lease, num_bytes) in list(self._waiting.items()):
            if self._held_bytes >= self._total_bytes:
                return
            if not admitted.done() and self._try(lease, num_bytes):
                del self._waiting[admitted]
                admitted.set_result(None)

    def _try(self, lease: "Lease", num_bytes: int) -> bool:
        """Take the bytes if they fit. Return whether they did."""
        num_bytes = min(num_bytes, self._total_bytes)
        more = num_bytes - lease.num_bytes
        with self._lock:
            if self._tenant_is_over(lease, more) or self._all_are_over(lease, more):
                return False
            self._held[lease.tenant] += more
            self._held_bytes += more
            lease.num_bytes = num_bytes
            if self._held[lease.tenant] == 0:
                del self._held[lease.tenant]  # so that tenants of the past take no memory
        return True

    def _tenant_is_over(self, lease: "Lease", more: int) -> bool:
        held = self._held[lease.tenant]
        return more > 0 and held > lease.num_bytes and held + more > self._tenant_bytes

    def _all_are_over(self, lease: "Lease", more: int) -> bool:
        held = self._held_bytes
        return more > 0 and held > lease.num_bytes and held + more > self._total_bytes

    def _refusal(self, lease: "Lease", more: int) -> CapacityError:
        if self._tenant_is_over(lease, more):
            msg = (
                f"the server is reading {self._held[lease.tenant]} bytes of your requests, and this one needs {more} "
                f"more; allowed: {self._tenant_bytes}, a share of server.limits.body_bytes; send fewer at a time, then "
                "repeat this one"
            )
            return CapacityError(msg)
        msg = (
            f"the server is reading {self._held_bytes} bytes of requests, and this one needs {more} more; allowed: "
            f"{self._total_bytes} (server.limits.body_bytes); repeat this one later"
        )
        return CapacityError(msg, queue_state="paused_capacity")


class Lease:
    """The bytes that one request holds."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Raises CapacityError if not enough is free. May grow in any thread; shrink only on the event loop."""
        self._budget._take(self, num_bytes)  # noqa: SLF001 - two classes of one thing

    async def wait_to_resize(self, num_bytes: int) -> None:
        """Wait until enough is free. Raises CapacityError after too long, or if many of the tenant already wait."""
        await self._budget._take_in_order(self, num_bytes)  # noqa: SLF001 - as above


def lease_of(request: Request) -> Lease:
    return cast("Lease", request.scope[LEASE])


async def hold_decoded(request: Request, tenant: str, num_bytes: int) -> None:
    """Take memory for the decoded body until the request is answered. Raises CapacityError if not enough is free."""
    if num_bytes > FREE_BYTES:
        lease = lease_of(request)
        lease.tenant = tenant
        await lease.wait_to_resize(lease.num_bytes + num_bytes)
