"""The engine of one base model: claims operations, plans batches, runs them, records what came of it.

Training operations go through the scheduler to the backend's one thread; what reads or writes files holds up its own
model alone. Samples run at the same time, as many as there are, on the sampler, which batches for itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast
from urllib.parse import quote

from tinsmith import operations as ops
from tinsmith.backend import ModelState, SamplingBackend, TrainingBackend
from tinsmith.checkpoints.format import SHARD_BYTES
from tinsmith.checks import check_operation
from tinsmith.engine.checkpoint_files import CheckpointFiles
from tinsmith.engine.claimed import Claimed, as_pending, failed, finished_event
from tinsmith.engine.execution import BackendFailedError, BatchOperation, Execution, Outcome, SingleOperation
from tinsmith.engine.recovery import Recovery, RecoveryProgress
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.engine.store_retries import insist
from tinsmith.errors import LeaseLostError, NotFoundError, ServerError, TinsmithError
from tinsmith.failpoints import durable_boundary
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import LossSpec
from tinsmith.scheduler import Limits, Scheduler
from tinsmith.settings import ConsistencySettings, RecoverySettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import Completion, Lease, OperationRecord, RequestStore
from tinsmith.store.codec import decode_operation

_MAX_CLAIMED: Final = 512  # training operations in memory
_MAX_SAMPLES: Final = 1024  # samples in flight
_IDLE_S: Final = 60.0
_BATCHED: Final = frozenset({"forward", "forward_backward", "optim_step"})
_LARGE_BYTES: Final = 1 << 17  # payloads from here on are decoded and checked beside the event loop


T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineFailedError(ServerError):
    """The engine cannot go on: what its backend holds is unknown."""


class Engine:
    """Made once per process; `run` works until `stop` is called or the backend fails."""

    def __init__(  # noqa: PLR0913 - one per part of an engine
        self,
        *,
        lease: Lease,
        store: RequestStore,
        scheduler: Scheduler,
        backend: TrainingBackend,
        sampler: SamplingBackend | None,
        losses: Mapping[str, LossSpec],
        checkpoint_root: Path,
        gap_timeout_s: float,
        resident_snapshots: int,
        on_finished: Callable[[OperationFinished], None],
        recovery: RecoverySettings | None = None,
        consistency: ConsistencySettings | None = None,
        model_path: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`thread` has one worker, in which the backend was made; without it the engine starts one.

        `model_path` is the base model's directory; full fine-tuning copies its configuration and tokenizer.
        """
        self._lease = lease
        self._base_model = base_model = lease.base_model
        self._store = store
        self._scheduler = scheduler
        self._capabilities = backend.capabilities
        self._sampler = sampler
        self._losses = losses
        self._gap_timeout_s = gap_timeout_s
        self._on_finished = on_finished
        self._recovery = recovery or RecoverySettings()
        own = quote(base_model, safe="")
        spilled = checkpoint_root.parent / "snapshots" / own
        self._recovery_points = RecoveryPoints(
            store, lease, root=checkpoint_root.parent / "recovery" / own, settings=self._recovery
        )
        self._snapshots: Snapshots | None = None
        if sampler is not None:
            self._snapshots = Snapshots(
                sampler,
                checkpoint_root=checkpoint_root,
                spill_root=spilled,
                max_resident=resident_snapshots,
                epoch=lease.epoch,
            )
        self._execution = Execution(
            base_model=base_model,
            backend=backend,
            snapshots=self._snapshots,
            files=CheckpointFiles(
                checkpoint_root,
                base_model=base_model,
                is_recorded=self._is_recorded,
                epoch=lease.epoch,
                model_path=model_path,
                shard_bytes=shard_bytes,
            ),
            thread=thread or ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training"),
            recovery_points=self._recovery_points,
            sampler=sampler,
            consistency=consistency or ConsistencySettings(),
        )
        self._limits = Limits(max_batch_tokens=backend.capabilities.max_batch_tokens)
        self._memory: Mapping[str, float] = {}  # the scheduler's
        self._pending: dict[str, Claimed] = {}  # training operations whose turn has not come
        self._busy: set[str] = set()  # models with an operation of their own under way
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()  # claimed, and not recorded yet
        self._claim_unheard = False
        self._look = asyncio.Event()  # at the store
        self._plan = asyncio.Event()  # something can be planned
        self._stopping = asyncio.Event()
        self._recording = asyncio.Lock()  # results are recorded in the order in which they came about

    def stop(self) -> None:
        """Let `run` finish the batch that is running, and end."""
        self._stopping.set()
        self._look.set()
        self._plan.set()

    async def recover(self, reason: str, progress: RecoveryProgress, *, interrupted: bool = False) -> None:
        """Rebuild what the engine before this one held, and queue again what it was running. Call before `run`.

        `reason` is how that engine ended, `interrupted` whether it was killed from outside, as far as anybody knows.
        Raise EngineFailedError where the backend fails.
        """
        recovery = Recovery(
            lease=self._lease,
            store=self._store,
            execution=self._execution,
            snapshots=self._snapshots,
            recovery_points=self._recovery_points,
            progress=progress,
            max_attempts=self._recovery.max_retries + 1,
            interrupted=interrupted,
        )
        try:
            await recovery.run()
        except BackendFailedError as error:
            msg = f"the engine of {self._base_model!r} failed while it rebuilt a model: {error}"
            raise EngineFailedError(msg) from error
        for request_id in await self._requeue(reason, interrupted=interrupted):
            _log.error("%s is not tried again: %s", request_id, reason)

    async def run(self) -> None:
        """Raise EngineFailedError where the backend failed, LeaseLostError where another engine has taken over.

        The next engine rebuilds the models.
        """
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._watch_store()), group.create_task(self._watch_gaps())]
                lanes = [group.create_task(self._claim(group)), group.create_task(self._train(group))]
                await asyncio.wait(lanes)
                for task in [*beside, *self._samples.values()]:
                    task.cancel()
        except ExceptionGroup as failures:
            raise _first(failures) from failures
        self._held.clear()
        await self._requeue(None)

    async def _requeue(self, reason: str | None, *, interrupted: bool = False) -> list[str]:
        requeue = partial(
            self._store.requeue,
            self._lease,
            max_attempts=self._recovery.max_retries + 1,
            reason=reason,
            max_interruptions=self._recovery.max_interruptions if interrupted else None,
            held=self._held,
        )
        return await insist(requeue)

    # claiming

    async def _watch_store(self) -> None:
        while True:
            await self._store.wait_for_work(self._base_model, _IDLE_S)
            self._look.set()

    async def _watch_gaps(self) -> None:
        clock = SteadyClock()
        while True:
            await asyncio.sleep(min(5.0, self._gap_timeout_s / 4))
            now, steady_s = clock.read()
            if steady_s < self._gap_timeout_s:
                continue  # clients may have been unable to send what is missing while nothing ran here
            older_than = now - timedelta(seconds=self._gap_timeout_s)
            await insist(partial(self._store.fail_gaps, self._base_model, older_than=older_than))

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        await self._retry_alone(group)
        self._look.set()
        while True:
            await self._look.wait()
            self._look.clear()
            if self._stopping.is_set():
                return
            for request_id in await insist(lambda: self._store.cancelled(self._lease)):
                if (task := self._samples.get(request_id)) is not None:
                    task.cancel()
                    self._held.discard(request_id)
            for claimed in await self._claim_what_fits():
                request_id = claimed.record.request_id
                if claimed.record.ordered:
                    self._pending[request_id] = claimed
                else:
                    self._samples[request_id] = group.create_task(self._sample(claimed), name=f"sample {request_id}")
            self._plan.set()

    async def _retry_alone(self, group: asyncio.TaskGroup) -> None:
        """Run what may have killed the engine before this one with nothing beside it, so that nothing else suffers."""
        while not self._stopping.is_set() and (records := await self._claim_records(1, ordered=None, alone=True)):
            claimed = self._check(records[0])
            if not claimed.record.ordered:
                await self._sample_alone(claimed, group)
                continue
            missing = self._execution.why_not(claimed.record.subject_id, claimed.operation)
            claimed = replace(claimed, refused=claimed.refused or missing)
            if claimed.record.kind in _BATCHED and claimed.refused is None:
                await self._run_batch(group, [claimed])
                async with self._recording:
                    pass  # it is recorded
            else:
                await self._run_single(claimed)

    async def _sample_alone(self, claimed: Claimed, group: asyncio.TaskGroup) -> None:
        request_id = claimed.record.request_id
        sample = group.create_task(self._sample(claimed), name=f"sample {request_id}")
        self._samples[request_id] = sample
        stopped = group.create_task(self._stopping.wait())
        await asyncio.wait([sample, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _claim_what_fits(self) -> list[Claimed]:
        training, samples = _MAX_CLAIMED - len(self._pending), _MAX_SAMPLES - len(self._samples)
        together = min(training, samples)
        records = await self._claim_records(together, ordered=None)
        if len(records) == together:  # there may be more of one sort
            training -= sum(record.ordered for record in records)
            samples -= sum(not record.ordered for record in records)
            records += await self._claim_records(training, ordered=True)
            records += await self._claim_records(samples, ordered=False)
        if sum(len(record.payload or b"") for record in records) >= _LARGE_BYTES:
            return await asyncio.to_thread(lambda: [self._check(record) for record in records])
        return [self._check(record) for record in records]

    async def _claim_records(self, room: int, *, ordered: bool | None, alone: bool = False) -> list[OperationRecord]:
        if room <= 0:
            return []
        claim = partial(
            self._store.claim,
            self._lease,
            max_operations=room,
            ordered=ordered,
            alone=alone,
        )
        records = await insist(partial(self._heard, claim))
        self._held.update(record.request_id for record in records)
        return records

    async def _heard(self, claim: Callable[[], Awaitable[list[OperationRecord]]]) -> list[OperationRecord]:
        """Claim; where the answer to the claim before was lost, put back first what it may have taken."""
        if self._claim_unheard:
            await self._requeue(None)
        self._claim_unheard = True
        records = await claim()
        self._claim_unheard = False
        return records

    def _check(self, record: OperationRecord) -> Claimed:
        """Decode and check; what is wrong with an operation is its own."""
        assert record.payload is not None
        capabilities = self._capabilities if record.ordered or self._sampler is None else self._sampler.capabilities
        operation: ops.Operation | None = None
        try:
            operation = decode_operation(record.kind, record.payload)
            check_operation(operation, capabilities, self._losses)
        except TinsmithError as error:
            return Claimed(record=record, operation=operation, refused=failed(error))
        return Claimed(record=record, operation=operation)

    # training

    async def _train(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._plan.wait()
            self._plan.clear()
            while (chosen := self._choose()) and not self._stopping.is_set():
                self._look.set()  # there is room for more
                first = chosen[0]
                if first.record.kind in _BATCHED and first.refused is None:
                    await self._run_batch(group, chosen)
                    continue
                self._busy.add(first.record.subject_id)
                group.create_task(self._run_single(first), name=f"{first.record.kind} of {first.record.subject_id}")
            if self._stopping.is_set():
                return

    def _choose(self) -> list[Claimed]:
        """Take what runs next out of `_pending`: a batch, or one operation that is refused or runs by itself."""
        runnable: list[Claimed] = []
        for queue in self._queues():
            head = queue[0]
            missing = self._execution.why_not(head.record.subject_id, head.operation)
            if missing is not None or head.refused is not None:
                return [self._take(replace(head, refused=head.refused or missing))]
            first_refused = next((n for n, each in enumerate(queue) if each.refused is not None), len(queue))
            runnable.extend(queue[:first_refused])
        batch = self._scheduler.plan(
            [as_pending(each.record) for each in runnable],
            limits=self._limits,
            now_s=time.time(),
            memory=self._memory,
        )
        self._memory = batch.memory
        return [self._take(self._pending[request_id]) for request_id in batch.request_ids]

    def _queues(self) -> list[list[Claimed]]:
        """Return what is pending of each model that is free, in order."""
        queues: dict[str, list[Claimed]] = {}
        for each in self._pending.values():
            if each.record.subject_id not in self._busy:
                queues.setdefault(each.record.subject_id, []).append(each)
        return [sorted(queue, key=lambda each: each.record.seq_id) for queue in queues.values()]

    def _take(self, claimed: Claimed) -> Claimed:
        del self._pending[claimed.record.request_id]
        return claimed

    async def _run_batch(self, group: asyncio.TaskGroup, chosen: Sequence[Claimed]) -> None:
        started = time.monotonic()
        kind = chosen[0].record.kind
        operations = [cast("BatchOperation", each.operation) for each in chosen]
        try:
            results = await self._execution.run_batch(kind, operations)
        except BackendFailedError as error:
            raise self._failed_on(kind, error) from error
        outcomes = [Outcome(result=result) for result in results]
        recorded = group.create_task(self._record(chosen, outcomes, time.monotonic() - started))
        for each in chosen:
            self._recovery_points.ran(each.record.subject_id, each.record.seq_id)
        for model_id in dict.fromkeys(each.record.subject_id for each in chosen):
            if self._recovery_points.due(model_id):
                await self._take_snapshot(group, model_id, recorded)

    @durable_boundary("engine.run_single")
    async def _run_single(self, claimed: Claimed) -> None:
        """The model stays busy until the result is recorded: a retry must find what the store knows of its files."""
        started = time.monotonic()
        subject_id, kind = claimed.record.subject_id, claimed.record.kind
        try:
            if claimed.refused is not None:
                outcome = self._execution.refused(claimed.operation, claimed.refused)
            else:
                outcome = await self._execution.run_single(cast("SingleOperation", claimed.operation), claimed.record)
        except BackendFailedError as error:
            raise self._failed_on(kind, error) from error
        self._recovery_points.ran(subject_id, claimed.record.seq_id)
        await self._record([claimed], [outcome], time.monotonic() - started)
        await self._tidy_after(kind, subject_id, outcome.result)
        self._busy.discard(subject_id)
        self._plan.set()

    async def _tidy_after(self, kind: str, model_id: str, result: ops.Result) -> None:
        never_made = kind == "create_model" and isinstance(result, ops.Failed)
        try:
            if kind == "unload_model" or never_made:
                await self._recovery_points.forget(model_id)
            elif kind == "load_state":
                await self._recovery_points.tidy(model_id)
        except TinsmithError as error:  # the next start removes it
            _log.warning("snapshots of %s that are not needed any more stay for now: %s", model_id, error)

    # snapshots of the training state

    async def _take_snapshot(self, group: asyncio.TaskGroup, model_id: str, recorded: asyncio.Task[None]) -> None:
        """Copy the state between two batches; write it while training goes on."""
        seq_id = self._recovery_points.begin(model_id)
        try:
            state = await self._execution.capture(model_id)
        except BackendFailedError as error:
            raise self._failed_on("capture_state", error) from error
        group.create_task(self._write_snapshot(model_id, seq_id, state, recorded), name=f"snapshot of {model_id}")

    async def _write_snapshot(
        self, model_id: str, seq_id: int, state: ModelState, recorded: asyncio.Task[None]
    ) -> None:
        try:
            await self._execution.persist_ephemeral(model_id)
            written = await self._recovery_points.write(model_id, seq_id, state)
            await asyncio.wait([recorded])  # never ahead of the results
            await self._recovery_points.register(written)
        except LeaseLostError:
            raise
        except TinsmithError as error:
            _log.warning("no snapshot of %s was taken, the next one may be: %s", model_id, error)
        finally:
            self._recovery_points.end(model_id)

    async def _is_recorded(self, path: str) -> bool:
        try:
            await insist(lambda: self._store.get_checkpoint(path))
        except NotFoundError:
            return False
        return True

    # sampling

    async def _sample(self, claimed: Claimed) -> None:
        started = time.monotonic()
        operation = cast("ops.Sample", claimed.operation)
        try:
            result = claimed.refused or await self._draw(operation)
        except TinsmithError as error:
            result = failed(error)
        except Exception as error:
            raise self._failed_on("sample", error) from error
        finally:
            del self._samples[claimed.record.request_id]
            self._look.set()  # there is room for another
        await self._complete([claimed], [Outcome(result=result)], time.monotonic() - started)

    @durable_boundary("engine.sample")
    async def _draw(self, operation: ops.Sample) -> ops.Result:
        if self._sampler is None or self._snapshots is None:
            return ops.Failed(message=f"base model {self._base_model!r} has no sampler; it can only be trained")
        async with self._snapshots.use(operation.snapshot_id, base_model=self._base_model):
            result = await self._sampler.sample(operation)
        if isinstance(result, ops.SampleOutput) and operation.target_layout is not None:
            return replace(result, target_layout=operation.target_layout)
        return result

    # results

    async def _record(self, finished: Sequence[Claimed], outcomes: Sequence[Outcome], run_s: float) -> None:
        async with self._recording:
            await self._complete(finished, outcomes, run_s)

    @durable_boundary("engine.record")
    async def _complete(self, finished: Sequence[Claimed], outcomes: Sequence[Outcome], run_s: float) -> None:
        pairs = list(zip(finished, outcomes, strict=True))
        completions = [
            Completion(request_id=each.record.request_id, result=outcome.result, effects=outcome.effects)
            for each, outcome in pairs
        ]
        await insist(lambda: self._store.complete(self._lease, completions))
        self._held.difference_update(each.record.request_id for each in finished)
        for each, outcome in pairs:
            event = finished_event(each.record, outcome.result, run_s, batch_size=len(finished))
            self._on_finished(replace(event, consistency=outcome.consistency))

    def _failed_on(self, what: str, error: Exception) -> EngineFailedError:
        """Leave what was running as it is in the store: the next engine tries it again, alone."""
        _log.error("the backend failed in %s", what, exc_info=error)
        return EngineFailedError(f"the engine of {self._base_model!r} failed in {what}: {error}")


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return what happened, of a group that holds one failure as a rule."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
