"""An engine's reports of its own state: every change reaches the store, and several at once are sent as one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.operations import Consistency
from tinsmith.settings.secrets import cleaned
from tinsmith.store import (
    ConsistencyCounts,
    DeviceTurn,
    EngineCapabilities,
    EngineRecord,
    EngineState,
    Lease,
    RequestStore,
)

_log = logging.getLogger(__name__)


class EngineReports:
    """Belongs to one event loop."""

    def __init__(self, store: RequestStore, lease: Lease, record: EngineRecord) -> None:
        self._store = store
        self._lease = lease
        self.record = record
        self._changed = asyncio.Event()
        self._silence: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send reports in the background while the block runs."""
        task = asyncio.create_task(self._send_changes(), name="engine-reports")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def say(
        self, state: EngineState, detail: str = "", *, capabilities: EngineCapabilities | None = None
    ) -> None:
        """Send a report now."""
        known = capabilities or self.record.capabilities
        self.record = replace(self.record, state=state, detail=cleaned(detail), progress=None, capabilities=known)
        await self._send()

    def progress(self, stage: str, fraction: float | None) -> None:
        """Record the backend's progress, to be sent soon."""
        if (stage, fraction) != (self.record.detail, self.record.progress):
            self.record = replace(self.record, detail=stage, progress=fraction)
            self._changed.set()

    def saved_for_sampling(self, found: Consistency) -> None:
        """Count a save by the verdict of the consistency gate, to be sent soon."""
        before = self.record.consistency or ConsistencyCounts()
        field = found.verdict.replace(" ", "_")
        counts = replace(before, **{field: getattr(before, field) + 1})
        if found.max_difference is not None:
            counts = replace(
                counts,
                last_max_difference=found.max_difference,
                last_mean_difference=found.mean_difference,
                largest_difference=max(found.max_difference, before.largest_difference or 0.0),
            )
        self.record = replace(self.record, consistency=counts)
        self._changed.set()

    def turn(self, turn: DeviceTurn) -> None:
        """Record who has the devices that trainer and sampler share, to be sent soon."""
        self.record = replace(self.record, turn=turn)
        self._changed.set()

    def sampler(self, trouble: str | None) -> None:
        """Record why nothing can be sampled for now, to be sent soon."""
        if trouble != self.record.sampler_trouble:
            self.record = replace(self.record, sampler_trouble=trouble)
            self._changed.set()

    def silence(self, why: str | None) -> None:
        """Report the engine as silent, or with None as before, soon."""
        if why != self._silence:
            self._silence = why
            self._changed.set()

    def _shown(self) -> EngineRecord:
        """An engine that is not ready yet keeps its state, and tells why it takes so long."""
        if self._silence is None:
            return self.record
        state = EngineState.SILENT if self.record.state is EngineState.READY else self.record.state
        return replace(self.record, state=state, detail=self._silence, progress=None)

    async def _send_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._send()
            except LeaseLostError:
                return  # `hold_lease` ends the engine
            except ServerError:
                _log.exception("cannot report progress")

    async def _send(self) -> None:
        self.record = replace(self.record, updated_at=datetime.now(UTC))
        await self._store.report_engine(self._shown(), lease=self._lease)
