"""An engine in virtual time: it chooses as the real one, and its work takes the time that the file says."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from tinsmith.backend import SamplerCapabilities
from tinsmith.engine.claimed import Claimed
from tinsmith.engine.claims import Holdings
from tinsmith.engine.recorder import MAX_TOGETHER
from tinsmith.engine.sampling import SampleQueue
from tinsmith.engine.training import TrainingQueue
from tinsmith.scheduler import Limits, Scheduler
from tinsmith.store import Claimable
from tinsmith_workbench.simulation.clock import Action, Clock
from tinsmith_workbench.simulation.device import Device
from tinsmith_workbench.simulation.hosts import Store
from tinsmith_workbench.simulation.request import Request
from tinsmith_workbench.simulation.service_times import ServiceTimes

Saw = Callable[[str, Request], None]
"""Is told what happens to a request: "arrived", "started" or "recorded"."""

_SORTS: Final = (True, False)  # operations of models, samples


class Engine:
    def __init__(self, clock: Clock, times: ServiceTimes, store: Store, scheduler: Scheduler, saw: Saw) -> None:
        backend = times.backend
        capabilities = SamplerCapabilities(
            vocab_size=1,
            max_context_tokens=backend.max_context_tokens,
            max_sequences=backend.max_sequences,
        )
        self.device = Device(clock, times.sampling, beside=backend.beside)
        self.training = TrainingQueue(scheduler, Limits(max_batch_tokens=backend.max_batch_tokens), clock=clock.read)
        self.samples = SampleQueue(scheduler, capabilities, clock=clock.read)
        self.holdings = Holdings()
        self._clock = clock
        self._times = times
        self._store = store
        self._saw = saw
        self._requests: dict[str, Request] = {}  # by request_id, until they are recorded
        self._queued: dict[bool, dict[str, deque[Request]]] = {sort: {} for sort in _SORTS}  # by tenant, in order
        self._claiming = False
        self._unrecorded: deque[list[Request]] = deque()
        self._recording = False

    def arrived(self, request: Request) -> None:
        """The request is durable."""
        record = request.claimed.record
        self._requests[request.request_id] = request
        self._queued[record.ordered].setdefault(record.tenant, deque()).append(request)
        self._saw("arrived", request)
        self._claim_more()

    # Claiming ---------------------------------------------------------------------------------------------------------

    def claimable(self) -> list[Request]:
        """Return what the engine would claim now, as `claim` of a store does."""
        return [each for sort in _SORTS for each in self._claimable(ordered=sort)]

    def _claimable(self, *, ordered: bool) -> list[Request]:
        queued, room = self._queued[ordered], self.holdings.room(ordered=ordered)
        if not queued:
            return []
        waiting = {
            tenant: [
                Claimable(key=each, num_bytes=each.num_bytes, arrival=each.claimed.record.seq_id)
                for each in islice(queued[tenant], limit)
            ]
            for tenant, limit in room.limits(queued).items()
        }
        return room.choose(waiting)

    def _claim_more(self) -> None:
        if not self._claiming and any(self._queued.values()):
            self._claiming = True
            self._store.transact(self._begin_claim)

    def _begin_claim(self) -> tuple[float, Action]:
        chosen = self.claimable()
        for each in chosen:
            record = each.claimed.record
            queue = self._queued[record.ordered][record.tenant]
            assert queue.popleft() is each
            if not queue:
                del self._queued[record.ordered][record.tenant]
        if not chosen:
            return 0.0, partial(self._claimed, chosen)  # no transaction
        self.holdings.add(each.claimed.record for each in chosen)
        self.device.stall(self._times.engine.seconds(len(chosen)))
        return self._store.times.claim.seconds(len(chosen)), partial(self._claimed, chosen)

    def _claimed(self, chosen: Sequence[Request]) -> None:
        self._claiming = False
        for each in chosen:
            queue = self.training if each.claimed.record.ordered else self.samples
            queue.add(each.claimed)
        if chosen:
            self._claim_more()
        self._train_next()
        self._sample_next()

    # Running ----------------------------------------------------------------------------------------------------------

    def _train_next(self) -> None:
        while not self.device.trains and (chosen := self._started(self.training.take())):
            if chosen[0].claimed.runs_in_batch:
                self.device.train(self._batch_s(chosen), partial(self._trained, chosen))
            else:
                self._clock.after(self._times.training.save_s, partial(self._record, chosen))

    def _started(self, taken: Sequence[Claimed]) -> list[Request]:
        requests = [self._requests[each.record.request_id] for each in taken]
        for each in requests:
            self._saw("started", each)
        return requests

    def _batch_s(self, batch: Sequence[Request]) -> float:
        times = self._times.training
        if batch[0].wanted.kind == "optim_step":
            return times.optim_batch_s + times.optim_operation_s * len(batch)
        tokens = sum(each.wanted.tokens for each in batch)
        return times.batch_s + times.operation_s * len(batch) + times.token_s * tokens

    def _trained(self, batch: list[Request]) -> None:
        self._record(batch)
        self._train_next()

    def _sample_next(self) -> None:
        times = self._times.sampling
        while (claimed := self.samples.take()) is not None:
            [request] = self._started([claimed])
            prompt_s = times.prompt_s + times.prompt_token_s * request.wanted.prompt_tokens
            self.device.draw(prompt_s, request.wanted.sequences, request.wanted.tokens, partial(self._sampled, request))

    def _sampled(self, request: Request) -> None:
        self.samples.end(request.request_id)
        self._sample_next()
        self._record([request])

    # Recording --------------------------------------------------------------------------------------------------------

    def _record(self, batch: list[Request]) -> None:
        """Batches that finish during one transaction share the next."""
        self._unrecorded.append(batch)
        if not self._recording:
            self._recording = True
            self._store.transact(self._begin_record)

    def _begin_record(self) -> tuple[float, Action]:
        together = self._unrecorded.popleft()
        while self._unrecorded and len(together) + len(self._unrecorded[0]) <= MAX_TOGETHER:
            together += self._unrecorded.popleft()
        self.device.stall(self._times.engine.seconds(len(together)))
        return self._store.times.record.seconds(len(together)), partial(self._recorded, together)

    def _recorded(self, requests: Sequence[Request]) -> None:
        self._recording = bool(self._unrecorded)
        if self._recording:
            self._store.transact(self._begin_record)
        self.holdings.remove(each.request_id for each in requests)
        for each in requests:
            del self._requests[each.request_id]
            if each.claimed.record.ordered and not each.claimed.runs_in_batch:
                self.training.end(each.claimed.record.subject_id)
            self._saw("recorded", each)
        self._claim_more()
        self._train_next()
