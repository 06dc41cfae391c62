"""Reporting why nothing can be sampled for now, while training goes on."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tinsmith.backend import SamplingBackend
from tinsmith.engine.backend_calls import SAMPLER_CALLS
from tinsmith.engine.call_watch import CallWatch
from tinsmith.processes.reports import EngineReports

_LOOK_S: Final = 0.5

_log = logging.getLogger(__name__)


@contextmanager
def watching(sampler: SamplingBackend | None, reports: EngineReports, watch: CallWatch | None = None) -> Iterator[None]:
    """Report the sampler's trouble while the block runs. Meanwhile its calls wait, and do not count as hung."""
    if sampler is None:
        yield
        return
    task = asyncio.create_task(_watch(sampler, reports, watch), name="sampler-watch")
    try:
        yield
    finally:
        task.cancel()


async def _watch(sampler: SamplingBackend, reports: EngineReports, watch: CallWatch | None) -> None:
    while True:
        trouble = sampler.trouble
        if trouble is not None and watch is not None:
            watch.progressed(SAMPLER_CALLS)
        if trouble != reports.record.sampler_trouble:
            _log.warning("the sampler of %r: %s", reports.record.base_model, trouble or "it works again")
            reports.sampler(trouble)
        await asyncio.sleep(_LOOK_S)
