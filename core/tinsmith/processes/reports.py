"""An engine's reports of its own state: every change reaches the store, and several at once are sent as one."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from tinsmith.backend import SamplingBackend
from tinsmith.engine.backend_calls import SAMPLER_CALLS
from tinsmith.engine.call_watch import CallWatch
from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.lasting import alongside
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

_LOOK_S: Final = 0.5  # at the sampler

_log = logging.getLogger(__name__)


def fresh_report(base_model: str, state: EngineState = EngineState.STARTING, detail: str = "") -> EngineRecord:
    return EngineRecord(base_model=base_model, state=state, updated_at=datetime.now(UTC), detail=detail)


async def last_report(store: RequestStore, base_model: str) -> EngineRecord:
    """Return what an engine or its supervisor has reported last, or a fresh report."""
    known = (record for record in await store.list_engines() if record.base_model == base_model)
    return next(known, fresh_report(base_model))


class EngineReports:
    """Belongs to one event loop."""

    def __init__(self, store: RequestStore, lease: Lease, record: EngineRecord) -> None:
        self._store = store
        self._lease = lease
        self.record = record
        self._changed = asyncio.Event()
        self._silence: str | None = None

    def running(self) -> AbstractAsyncContextManager[None]:
        """Send reports in the background while the block runs."""
        return alongside(self._send_changes, name="engine-reports")

    async def say(
        self, state: EngineState, detail: str = "", *, capabilities: EngineCapabilities | None = None
    ) -> None:
        """Send a report now."""
        known = capabilities or self.record.capabilities
        self.record = replace(self.record, state=state, detail=cleaned(detail), progress=None, capabilities=known)
        await self._send()

    def progress(self, stage: str, fraction: float | None) -> None:
        """Record the backend's progress, to be sent soon."""
        self._change(detail=stage, progress=fraction)

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
        self._change(consistency=counts)

    def turn(self, turn: DeviceTurn) -> None:
        """Record who has the devices that trainer and sampler share, to be sent soon."""
        self._change(turn=turn)

    async def watch_sampler(self, sampler: SamplingBackend, watch: CallWatch) -> None:
        """Report the sampler's trouble until cancelled. Meanwhile its calls wait, and do not count as hung."""
        while True:
            trouble = sampler.trouble
            if trouble is not None:
                watch.progressed(SAMPLER_CALLS)
            if trouble != self.record.sampler_trouble:
                _log.warning("the sampler of %r: %s", self.record.base_model, trouble or "it works again")
                self._change(sampler_trouble=trouble)
            await asyncio.sleep(_LOOK_S)

    def silence(self, why: str | None) -> None:
        """Report the engine as silent, or with None as before, soon."""
        if why != self._silence:
            self._silence = why
            self._changed.set()

    def _change(self, **fields: Any) -> None:
        changed = replace(self.record, **fields)
        if changed != self.record:
            self.record = changed
            self._changed.set()

    def _shown(self) -> EngineRecord:
        """An engine that is not ready yet keeps its state, and tells why it is slow."""
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
            except Exception:
                self._changed.set()  # to be sent when this starts again
                raise

    async def _send(self) -> None:
        self.record = replace(self.record, updated_at=datetime.now(UTC))
        await self._store.report_engine(self._shown(), lease=self._lease)
