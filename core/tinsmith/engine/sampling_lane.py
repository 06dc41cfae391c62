"""The sampling lane: as many samples at a time as the sampler draws, in an order that is fair to tenants."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, cast

from tinsmith import operations as ops
from tinsmith.backend import SamplingBackend
from tinsmith.engine.claimed import Claimed, Finished, Outcome, failed
from tinsmith.engine.failures import engine_failed
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.routed_experts import RoutedExpertsKeeper
from tinsmith.engine.sample_line import SampleLine
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.engine.snapshot_checks import SnapshotChecks
from tinsmith.errors import TinsmithError
from tinsmith.failpoints import durable_boundary

_TIDY_S: Final = 30.0


class SamplingLane:
    def __init__(  # noqa: PLR0913 - what a sample passes through
        self,
        sampler: SamplingBackend,
        snapshots: Snapshots,
        checks: SnapshotChecks,
        recorder: Recorder,
        experts: RoutedExpertsKeeper,
        line: SampleLine,
        tasks: asyncio.TaskGroup,
        *,
        on_room: Callable[[], None],
        stopping: asyncio.Event,
    ) -> None:
        """`on_room` is called whenever a sample has ended. Once `stopping` is set, none is started."""
        self._sampler = sampler
        self._snapshots = snapshots
        self._checks = checks
        self._recorder = recorder
        self._experts = experts
        self._line = line
        self._tasks = tasks
        self._on_room = on_room
        self._stopping = stopping
        self._running: dict[str, asyncio.Task[None]] = {}  # by request_id

    def add(self, claimed: Claimed) -> None:
        self._line.add(claimed)

    def start_waiting(self) -> None:
        """Start those of the waiting samples for which the sampler has places."""
        while not self._stopping.is_set() and (claimed := self._line.take()) is not None:
            self._start(claimed)

    def _start(self, claimed: Claimed) -> asyncio.Task[None]:
        request_id = claimed.record.request_id
        task = self._tasks.create_task(self._run(claimed), name=f"sample {request_id}")
        self._running[request_id] = task
        task.add_done_callback(partial(self._ended, request_id))
        return task

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        """Free the places of a task that was cancelled before its first step: nothing in `_run` has run."""
        if self._running.get(request_id) is task:
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        del self._running[request_id]
        self._line.end(request_id)
        self._on_room()

    async def run_alone(self, claimed: Claimed, *, unless: asyncio.Event) -> None:
        """Start a sample, and return when it ends or the event is set."""
        sample, stopped = self._start(claimed), self._tasks.create_task(unless.wait())
        await asyncio.wait([sample, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    def cancel(self, request_id: str) -> bool:
        """Cancel a sample that waits or is drawn. Return False if there is none."""
        task = self._running.get(request_id)
        return self._line.remove(request_id) or (task is not None and task.cancel())

    def cancel_all(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def tidy(self) -> None:
        """Until cancelled, free the snapshots that nobody may use any more, and those left idle for too long."""
        while True:
            await asyncio.sleep(_TIDY_S)
            await self._snapshots.drop_revoked()
            await self._snapshots.drop_idle()

    async def _run(self, claimed: Claimed) -> None:
        started = time.monotonic()
        try:
            result = claimed.refused or await self._sample(cast("ops.Sample", claimed.operation))
            outcome = await self._experts.outcome(claimed, result)
        except TinsmithError as error:
            outcome = Outcome(result=failed(error, during=f"sample {claimed.record.request_id}"))
        except Exception as error:
            raise engine_failed(claimed.record.base_model, "sample", error) from error
        finally:
            self._free(claimed.record.request_id)
        self.start_waiting()
        finished = Finished(claimed=claimed, outcome=outcome)
        await self._recorder.record([finished], time.monotonic() - started)

    @durable_boundary("engine.sample")
    async def _sample(self, operation: ops.Sample) -> ops.Result:
        self._checks.expect_not_refused(operation.snapshot_id)
        self._checks.hurry(operation.snapshot_id)
        async with self._snapshots.for_sample(operation) as versioned:
            result = await self._sampler.sample(versioned)
        await self._checks.expect_passed(operation.snapshot_id)
        if isinstance(result, ops.SampleOutput) and operation.target_layout is not None:
            return replace(result, target_layout=operation.target_layout)
        return result
