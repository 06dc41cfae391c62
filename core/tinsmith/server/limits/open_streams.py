"""How many streams are open: what costs while it is open is limited when it is opened.

A stream counts once for each run that it follows. Whoever has a key counts for the tenant. Holders of links have no
key, so they count by link, by run, for the run's tenant, and all together.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from tinsmith.errors import CapacityError
from tinsmith.settings import QuotaSettings
from tinsmith.settings.schema import LimitsSettings

_RETRY_S: Final = 10.0


class OpenStreams:
    """One per app, for the event loop. What its methods return counts while the block runs.

    To enter it raises CapacityError if there are too many.
    """

    def __init__(self, limits: LimitsSettings, quotas: QuotaSettings) -> None:
        self._limits = limits
        self._quotas = quotas
        self._open: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        """Return how many names are counted."""
        return len(self._open)

    def of_tenant(self, tenant: str, number: int) -> AbstractContextManager[None]:
        """Count a stream of somebody with a key that follows so many runs."""
        return self._counted({("tenant", tenant): self._quotas.of(tenant).streams}, number)

    def of_link(self, secret: str, model_ids: Sequence[str]) -> AbstractContextManager[None]:
        """Count a stream of somebody who says to have a share link. It costs nothing to refuse this one."""
        runs = {("run", each): self._limits.streams_per_run for each in model_ids}
        link, links = self._limits.streams_per_link, self._limits.keyless_streams
        return self._counted({("link", secret): link, **runs, ("links", ""): links}, 1)

    def of_links_to(self, tenant: str) -> AbstractContextManager[None]:
        """Count the same stream once it is known whose run it shows."""
        return self._counted({("tenant by links", tenant): self._quotas.of(tenant).streams}, 1)

    @contextmanager
    def _counted(self, bounds: Mapping[tuple[str, str], int | None], number: int) -> Iterator[None]:
        for name, most in bounds.items():
            if most is not None and self._open[name] + number > most:
                msg = f"{_WHAT[name[0]].format(most=most)}; close some, or try again later"
                raise CapacityError(msg, retry_after_s=_RETRY_S)
        added = Counter(dict.fromkeys(bounds, number))
        self._open += added
        try:
            yield
        finally:
            self._open -= added


_WHAT: Final = {
    "tenant": "at most {most} runs may be followed by streams of one tenant at each server (quotas.streams)",
    "tenant by links": (
        "at most {most} streams of links to one tenant's runs may be open at each server (quotas.streams)"
    ),
    "link": "at most {most} streams of one share link may be open at each server (server.limits.streams_per_link)",
    "run": (
        "at most {most} streams of share links to one run may be open at each server (server.limits.streams_per_run)"
    ),
    "links": "at most {most} streams of share links may be open at each server (server.limits.keyless_streams)",
}
"""The text of each limit."""
