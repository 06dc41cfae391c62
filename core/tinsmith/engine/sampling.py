"""Sampling: as many samples at a time as the sampler draws, in an order that is fair to tenants."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, cast

import numpy as np

from tinsmith import operations as ops
from tinsmith.backend import SamplerCapabilities, SamplingBackend
from tinsmith.engine.claimed import Claimed, Finished, Outcome, Ran, Stopwatch, failed
from tinsmith.engine.consistency_gate import ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import ending_the_engine
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.token_streams import TokenTeller
from tinsmith.errors import TinsmithError
from tinsmith.failpoints import durable_boundary
from tinsmith.scheduler import Limits, Scheduler
from tinsmith.store import ExpertsSampled, OperationRecord
from tinsmith.store.codec import digest_of, encode_experts

_STAYS_S: Final = 60.0  # for which a tenant counts after its last sample; a clock that is set back ends it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """The slots and tokens that a running sample occupies."""

    tenant: str
    sequences: int
    reserved: bool


class SampleQueue:
    """Samples that wait, and the slots of those that are drawn. Decides whose is drawn next.

    A sampler draws a few sequences at a time, and knows no tenants. So further samples wait here, and the scheduler
    chooses among the oldest of each tenant.

    While there is a single tenant, the sampler gets a quarter more than it draws, so that it never waits for the next
    one. As soon as there is a second tenant, an eighth of the slots is reserved for tenants of which nothing is being
    drawn, so that one with long samples does not keep out the others. A tenant counts for a minute after its last
    sample: one that sends the next when it has read the last finds a slot. All other slots are given in the
    scheduler's order: a sample of many sequences waits until they fit, and nobody else takes their slots meanwhile.

    The reserved slots have an order of their own, over those tenants alone, and count nothing in the common one. They
    add to what a tenant gets there: one sample at a time, while nothing else of it is drawn.
    """

    def __init__(
        self, scheduler: Scheduler, sampler: SamplerCapabilities, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._slots = sampler.max_sequences
        self._limits = Limits(max_batch_tokens=sampler.max_sequences * sampler.max_context_tokens)
        self._memory: dict[bool, Mapping[str, float]] = {False: {}, True: {}}  # the scheduler's, by `reserved`
        self._waiting: dict[str, dict[str, Claimed]] = {}  # by tenant and request_id, oldest first
        self._drawn: dict[str, _Drawing] = {}  # by request_id
        self._present: dict[str, float] = {}  # by tenant, when it last had a sample here
        self._is_shared = False

    def add(self, claimed: Claimed) -> None:
        self._waiting.setdefault(claimed.record.tenant, {})[claimed.record.request_id] = claimed

    def remove(self, request_id: str) -> bool:
        """Remove a waiting sample. Return False if it is not waiting."""
        for tenant, samples in self._waiting.items():
            if samples.pop(request_id, None) is not None:
                self._present[tenant] = self._clock()
                if not samples:
                    del self._waiting[tenant]
                return True
        return False

    def take(self) -> Claimed | None:
        """Take the sample that is drawn next. Return None if there is none, or no slot for it."""
        self._note_who_is_present()
        heads = [next(iter(samples.values())) for samples in self._waiting.values()]
        taken = self._take_of(heads, reserved=False)
        if taken is None:
            drawn, free = {drawing.tenant for drawing in self._drawn.values()}, self._free(reserved=True)
            others = [each for each in heads if each.pending.tenant not in drawn and self._sequences(each) <= free]
            taken = self._take_of(others, reserved=True)
        return taken

    def end(self, request_id: str) -> None:
        """Free the slots of a sample."""
        drawing = self._drawn.pop(request_id, None)
        if drawing is not None:
            self._present[drawing.tenant] = self._clock()

    def _note_who_is_present(self) -> None:
        now_s = self._clock()
        self._present |= dict.fromkeys((*self._waiting, *(drawing.tenant for drawing in self._drawn.values())), now_s)
        recent = {tenant: at_s for tenant, at_s in self._present.items() if abs(now_s - at_s) <= _STAYS_S}
        self._present, self._is_shared = recent, len(recent) > 1

    def _take_of(self, heads: Sequence[Claimed], *, reserved: bool) -> Claimed | None:
        """Take the one that the scheduler chooses, if it fits."""
        free = self._free(reserved=reserved)
        if all(self._sequences(each) > free for each in heads):
            return None  # whichever it would choose
        by_id = {each.pending.request_id: each for each in heads}
        pending = [each.pending for each in heads]
        batch = self._scheduler.plan(pending, limits=self._limits, now_s=self._clock(), memory=self._memory[reserved])
        if not batch.request_ids or self._sequences(chosen := by_id[batch.request_ids[0]]) > free:
            return None
        self._memory[reserved] = batch.memory
        self.remove(chosen.pending.request_id)
        drawing = _Drawing(tenant=chosen.pending.tenant, sequences=self._sequences(chosen), reserved=reserved)
        self._drawn[chosen.pending.request_id] = drawing
        return chosen

    def _free(self, *, reserved: bool) -> int:
        size = self._num_reserved if reserved else self._num_common
        return size - sum(drawing.sequences for drawing in self._drawn.values() if drawing.reserved is reserved)

    @property
    def _num_reserved(self) -> int:
        return -(-self._slots // 8) if self._is_shared and self._slots > 1 else 0

    @property
    def _num_common(self) -> int:
        ahead = 0 if self._is_shared else self._slots // 4
        return self._slots + ahead - self._num_reserved

    def _sequences(self, claimed: Claimed) -> int:
        """Return how many slots a sample takes: at most all that are not reserved."""
        if claimed.refused is not None:
            return 0
        return min(cast("ops.Sample", claimed.operation).num_samples, self._num_common)


@dataclass(slots=True, eq=False)
class Sampling:
    """One task for each sample that is drawn: it runs the sample, and records the result."""

    engine: EngineContext
    queue: SampleQueue
    sampler: SamplingBackend
    snapshots: Snapshots
    gate: ConsistencyGate
    recorder: Recorder
    teller: TokenTeller
    on_room: Callable[[], None]  # called whenever a sample has ended
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)  # by request_id

    def start_waiting(self) -> None:
        """Start the waiting samples for which the sampler has slots."""
        while not self.engine.stopping.is_set() and (claimed := self.queue.take()) is not None:
            self._start(claimed)

    def _start(self, claimed: Claimed) -> asyncio.Task[None]:
        request_id = claimed.record.request_id
        task = self.engine.tasks.create_task(self._step(claimed), name=f"sample {request_id}")
        self._running[request_id] = task
        task.add_done_callback(partial(self._ended, request_id))
        return task

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        """Free the slots of a task that was cancelled before its first step: nothing in `_step` has run."""
        if self._running.get(request_id) is task:
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        del self._running[request_id]
        self.queue.end(request_id)
        self.on_room()

    async def run_alone(self, claimed: Claimed) -> None:
        """Start a sample, and return when it ends or the engine stops."""
        sample, stopped = self._start(claimed), self.engine.tasks.create_task(self.engine.stopping.wait())
        await asyncio.wait([sample, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    def cancel(self, request_id: str) -> bool:
        """Cancel a sample that waits or is drawn. Return False if there is none."""
        task = self._running.get(request_id)
        return self.queue.remove(request_id) or (task is not None and task.cancel())

    def cancel_all(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _step(self, claimed: Claimed) -> None:
        """Run a sample, start what waited for its slots, and record its result."""
        stopwatch = Stopwatch()
        try:
            with ending_the_engine(claimed.record.base_model, "in sample"):
                outcome = await self._outcome(claimed)
        finally:
            self._free(claimed.record.request_id)
        self.start_waiting()
        finished = Finished(claimed=claimed, outcome=outcome)
        await self.recorder.record([finished], stopwatch.read())

    async def _outcome(self, claimed: Claimed) -> Outcome:
        if claimed.refused is not None:
            return Outcome(result=claimed.refused)
        asked = cast("ops.Sample", claimed.operation)
        operation = replace(asked, snapshot_id=self.snapshots.newest(asked.snapshot_id))
        try:
            result, ran = await self._sample(operation, claimed.record)
        except TinsmithError as error:
            return Outcome(result=failed(error, during=f"sample {claimed.record.request_id}"))
        if isinstance(result, ops.Failed):
            return Outcome(result=result, ran=ran)
        return replace(await self._drawn(operation, result, claimed.record), ran=ran)

    async def _drawn(self, operation: ops.Sample, result: ops.SampleOutput, record: OperationRecord) -> Outcome:
        """What its client does not know, such as a sample's experts, is recorded beside the result, never in it."""
        sequences = tuple(
            replace(each, routed_experts=None, weights=_weights(operation, each)) for each in result.sequences
        )
        answer = replace(result, sequences=sequences, first_token_s=None)
        model_id, replay = self.snapshots.model_of(operation.snapshot_id), self.engine.model.routing_replay
        if model_id is None or not replay.enabled:
            return Outcome(result=answer)
        sampled = ExpertsSampled(
            tenant=record.tenant,
            model_id=model_id,
            sequences=await asyncio.to_thread(_encoded_experts, operation, result),
            max_bytes=replay.tenant_bytes,
        )
        return Outcome(result=answer, effects=(sampled,))

    @durable_boundary("engine.sample")
    async def _sample(
        self, operation: ops.Sample, record: OperationRecord
    ) -> tuple[ops.SampleOutput | ops.Failed, Ran]:
        async with self.gate.for_sample(operation) as versioned:
            stopwatch = Stopwatch()
            result = await self._draw(versioned, record)
            ran = stopwatch.read(result.first_token_s if isinstance(result, ops.SampleOutput) else None)
        if isinstance(result, ops.SampleOutput) and operation.target_layout is not None:
            return replace(result, target_layout=operation.target_layout), ran
        return result, ran

    async def _draw(self, operation: ops.Sample, record: OperationRecord) -> ops.SampleOutput | ops.Failed:
        if not operation.streamed:
            return await self.sampler.sample(operation)
        with self.teller.telling(record) as on_tokens:
            return await self.sampler.sample_streaming(operation, on_tokens)


def _weights(operation: ops.Sample, sequence: ops.SampledSequence) -> tuple[ops.WeightsSpan, ...]:
    """Return whose weights drew the tokens of a sequence, if that depends on when it was drawn."""
    name = operation.snapshot_id or ""
    if not name.endswith(ops.INFLIGHT):
        return ()
    return sequence.weights or (ops.WeightsSpan(snapshot_id=name, length=len(sequence.tokens)),)


def _encoded_experts(operation: ops.Sample, output: ops.SampleOutput) -> dict[bytes, bytes]:
    return {
        digest_of(np.concatenate((operation.prompt_P, each.tokens[:-1]))): encode_experts(each.routed_experts)
        for each in output.sequences
        if each.routed_experts is not None
    }
