"""The engine of one base model: claims operations, runs them, records their results.

Operations of models are run by `training.py`, one batch at a time; samples by `sampling.py`, as many at a time as the
sampler draws. Each takes, runs and records. `assembly.py` builds an engine.
"""

import asyncio
import logging

from tinsmith.backend import TrainerCapabilities
from tinsmith.engine.claimed import Claimed
from tinsmith.engine.claims import Claims
from tinsmith.engine.context import EngineContext
from tinsmith.engine.recovery import Recovery, RecoveryProgress
from tinsmith.engine.sampling import Sampling
from tinsmith.engine.training import Training
from tinsmith.engine.upkeep import admit_models, close_gaps

_log = logging.getLogger(__name__)


class Engine:
    """Created once per process. `recover`, then `run` until `stop` is called or the backend fails."""

    def __init__(
        self,
        context: EngineContext,
        claims: Claims,
        training: Training,
        sampling: Sampling,
        recovery: Recovery,
        trainer: TrainerCapabilities,
    ) -> None:
        self._context = context
        self.training = training
        self._claims = claims
        self.sampling = sampling
        self._recovery = recovery
        self._trainer = trainer

    def stop(self) -> None:
        """Let `run` finish what is running, and return."""
        self._context.stopping.set()
        self._claims.wake()
        self.training.wake()

    async def recover(self, reason: str, progress: RecoveryProgress, *, interrupted: bool = False) -> None:
        """Rebuild what the previous engine held, and put what it was running back into the queue.

        `reason` says how that engine ended, `interrupted` whether it was killed from outside, as far as is known.
        Raise EngineFailedError if the backend fails.
        """
        await self._recovery.run(progress, interrupted=interrupted)
        for request_id in await self._claims.requeue(reason, interrupted=interrupted):
            _log.error("%s is not retried: %s", request_id, reason)

    async def run(self) -> None:
        """Serve until `stop`. Raise EngineFailedError if the backend fails, LeaseLostError if another engine took over.

        After either the next engine rebuilds the models.
        """
        try:
            async with self._context.tasks as tasks:
                endless = (
                    self._claims.watch_store(),
                    close_gaps(self._context),
                    admit_models(self._context, self._trainer),
                    self.sampling.tidy(),
                    self.sampling.tell_tokens(),
                )
                watching = [tasks.create_task(each) for each in endless]
                await asyncio.wait([tasks.create_task(self._feed()), tasks.create_task(self.training.run())])
                for task in watching:
                    task.cancel()
                self.sampling.cancel_all()
        except ExceptionGroup as failures:
            raise _first(failures) from failures
        await self._claims.requeue_all()

    async def _feed(self) -> None:
        """Claim what there is room for, and have it run."""
        await self._retry_suspects()
        self._claims.wake()
        while True:
            await self._claims.woken()
            if self._context.stopping.is_set():
                return
            await self._cancel_samples()
            for claimed in await self._claims.claim():
                self._runner_of(claimed).add(claimed)
            self.training.wake()
            self.sampling.start_waiting()

    async def _retry_suspects(self) -> None:
        """Retry what may have killed the previous engine, one operation at a time, so that nothing else suffers."""
        while not self._context.stopping.is_set() and (claimed := await self._claims.claim_suspect()) is not None:
            await self._runner_of(claimed).run_alone(claimed)

    def _runner_of(self, claimed: Claimed) -> Training | Sampling:
        return self.training if claimed.record.ordered else self.sampling

    async def _cancel_samples(self) -> None:
        for request_id in await self._claims.cancelled():
            if self.sampling.cancel(request_id):
                self._claims.release(request_id)


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return the failure of a group, which usually holds one."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
