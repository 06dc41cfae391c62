"""How many bytes of request bodies the server holds in memory: a budget for each tenant, and one for all together.

A request takes what it needs before that memory is filled, and gives it back when it is answered.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

from starlette.requests import Request

from tinsmith.errors import CapacityError

_WAIT_S: Final = 10.0
"""How long a request waits for others to be answered. Its body waits with it, unread, in the network."""

FREE_BYTES: Final = 1 << 16
"""Smaller bodies are not counted, so small requests never wait for large ones."""

LEASE: Final = "tinsmith.lease"
"""Key of the scope: the lease of a request that may have a body."""


class BodyBudget:
    """One per app. A request that is alone always fits, and counts as at most the whole budget.

    Its own size is limited elsewhere.
    """

    def __init__(self, *, total_bytes: int, tenant_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._tenant_bytes = tenant_bytes
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._given_back = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    @contextmanager
    def lease(self, tenant: str = "") -> Iterator["Lease"]:
        """Use on the event loop. Everything is given back at the end of the block.

        The tenant is named later if it is not known yet, before anything is taken.
        """
        lease = Lease(self, tenant)
        try:
            yield lease
        finally:
            lease.resize(0)

    def _take(self, lease: "Lease", num_bytes: int) -> None:
        """Raises CapacityError if a budget is spent."""
        num_bytes = min(num_bytes, self._total_bytes)
        more = num_bytes - lease.num_bytes
        with self._lock:
            if more > 0:
                self._check(lease, more)
            self._held[lease.tenant] += more
            lease.num_bytes = num_bytes
            if self._held[lease.tenant] == 0:
                del self._held[lease.tenant]  # so that tenants of the past take no memory
        if more < 0:
            self._given_back.set()
            self._given_back = asyncio.Event()

    def _check(self, lease: "Lease", more: int) -> None:
        of_tenant, of_all = self._held[lease.tenant], self._held.total()
        if of_tenant > lease.num_bytes and of_tenant + more > self._tenant_bytes:
            msg = (
                f"the server is reading {of_tenant} bytes of your requests, and this one needs {more} more; allowed: "
                f"{self._tenant_bytes} (server.limits.tenant_body_bytes); send fewer at a time, and this one again"
            )
            raise CapacityError(msg)
        if of_all > lease.num_bytes and of_all + more > self._total_bytes:
            msg = (
                f"the server is reading {of_all} bytes of requests, and this one needs {more} more; allowed: "
                f"{self._total_bytes} (server.limits.body_bytes); send this one again later"
            )
            raise CapacityError(msg)


class Lease:
    """What one request holds."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Raises CapacityError if that is more than is free. May grow in any thread, and shrinks on the event loop."""
        self._budget._take(self, num_bytes)  # noqa: SLF001 - two classes of one thing

    async def wait_to_resize(self, num_bytes: int) -> None:
        """Wait until so much is free. Raises CapacityError if it takes too long."""
        try:
            async with asyncio.timeout(_WAIT_S):
                while not self._fits(num_bytes):
                    await self._budget._given_back.wait()  # noqa: SLF001 - as above
        except TimeoutError:
            self.resize(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        try:
            self.resize(num_bytes)
        except CapacityError:
            return False
        return True


def lease_of(request: Request) -> Lease:
    return cast("Lease", request.scope[LEASE])


async def hold_decoded(request: Request, tenant: str, num_bytes: int) -> None:
    """Take memory for what a body decodes to, until the request is answered. Raises CapacityError."""
    if num_bytes > FREE_BYTES:
        lease = lease_of(request)
        lease.tenant = tenant
        await lease.wait_to_resize(lease.num_bytes + num_bytes)
