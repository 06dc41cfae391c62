"""A sampler that lends its devices: its vLLM processes sleep, with their weights in the memory of the host."""

import asyncio
from contextlib import suppress

from tinsmith import BackendContext, Failed, Sample, SampleOutput, SleepableSamplingBackend, Snapshot
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.messages import Rest
from tinsmith_vllm.replica import Replica, ReplicaGoneError
from tinsmith_vllm.sampler import VllmSampler


class SleepyVllmSampler(VllmSampler, SleepableSamplingBackend):
    """A process that dies in its sleep is started again when the sampler wakes."""

    def __init__(self, config: VllmConfig, context: BackendContext) -> None:
        super().__init__(config, context)
        self._asleep = False

    @property
    def trouble(self) -> str | None:
        return None if self._asleep else super().trouble

    async def sleep(self) -> None:
        if self._asleep:
            return
        for replica in self._all_replicas:
            replica.hold_back()
        await asyncio.gather(*(self._rest(replica, asleep=True) for replica in self._all_replicas))
        self._asleep = True

    async def wake(self) -> None:
        if not self._asleep:
            return
        for replica in self._all_replicas:
            replica.go_on()
        await asyncio.gather(*(self._rest(replica, asleep=False) for replica in self._all_replicas))
        self._asleep = False

    async def _rest(self, replica: Replica, *, asleep: bool) -> None:
        """Return when the process sleeps, or is awake. One that dies has given all back, and its successor is awake."""
        request_id = next(self._request_ids)
        key = ("request", request_id)
        with suppress(ReplicaGoneError):  # for good
            call = replica.ask(key, Rest(request_id=request_id, asleep=asleep))
            try:
                await call.answers.get()
            finally:
                replica.forget(key)

    def _expect_awake(self) -> None:
        if self._asleep:
            msg = "vllm sleeps: wake it first"
            raise RuntimeError(msg)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        self._expect_awake()
        await super().load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self._expect_awake()
        await super().drop_snapshot(snapshot_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        self._expect_awake()
        return await super().sample(op)
