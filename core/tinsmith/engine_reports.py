"""What an engine says of itself: every change reaches the store, several at once as one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

from tinsmith.backend import Capabilities
from tinsmith.errors import ServerError
from tinsmith.store import EngineRecord, EngineState, RequestStore

_log = logging.getLogger(__name__)


class EngineReports:
    """Belongs to one event loop."""

    def __init__(self, store: RequestStore, record: EngineRecord) -> None:
        self._store = store
        self.record = record
        self._changed = asyncio.Event()

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

    async def say(self, state: EngineState, detail: str = "", *, capabilities: Capabilities | None = None) -> None:
        """Report now."""
        known = capabilities or self.record.capabilities
        self.record = replace(self.record, state=state, detail=detail, progress=None, capabilities=known)
        await self._send()

    def progress(self, stage: str, fraction: float | None) -> None:
        """Note how far the backend has come; sent soon."""
        if (stage, fraction) != (self.record.detail, self.record.progress):
            self.record = replace(self.record, detail=stage, progress=fraction)
            self._changed.set()

    async def _send_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._send()
            except ServerError:
                _log.exception("could not report progress")

    async def _send(self) -> None:
        self.record = replace(self.record, updated_at=datetime.now(UTC))
        await self._store.report_engine(self.record)
