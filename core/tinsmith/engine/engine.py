"""The engine of one base model: claims operations, runs them, records their results.

Operations of models are run by `training.py`, one batch at a time; samples by `sampling.py`, as many at a time as the
sampler draws. Each takes, runs and records.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.engine.backend_calls import NoSampler, TrainingThread, WatchedSampler
from tinsmith.engine.checkpoint_files import Checkpoints
from tinsmith.engine.claimed import Claimed
from tinsmith.engine.claims import Claims
from tinsmith.engine.consistency_gate import MOST_WAITING, ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.device_turns import DeviceTurns
from tinsmith.engine.model_operations import ModelOperations
from tinsmith.engine.models import Models
from tinsmith.engine.places import Places
from tinsmith.engine.probes import Probes
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.recovery import Recovery, RecoveryProgress
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.replay import Replayer
from tinsmith.engine.sampling import SampleQueue, Sampling
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.steps import Steps
from tinsmith.engine.token_streams import TokenTeller
from tinsmith.engine.training import Training, TrainingQueue
from tinsmith.engine.upkeep import admit_models, close_gaps, drop_snapshots
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import LossSpec
from tinsmith.scheduler import Limits, Scheduler
from tinsmith.store import EngineCapabilities

_SHARE_OF_WAITING: Final = 4  # snapshots that wait to be compared take at most this share of the sampler's places

_log = logging.getLogger(__name__)


class Engine:
    """Created once per process. `recover`, then `run` until `stop` is called or the backend fails."""

    def __init__(
        self,
        context: EngineContext,
        *,
        backend: TrainingBackend,
        sampler: SamplingBackend | None,
        scheduler: Scheduler,
        losses: Mapping[str, LossSpec],
        on_finished: Callable[[OperationFinished], None],
        thread: ThreadPoolExecutor | None = None,
        turns: DeviceTurns | None = None,
    ) -> None:
        """Connect the parts. Each is described in its own module.

        `thread` has one worker, in which the backend was created; None: a new one. `turns`: of trainer and
        sampler, if they share devices by turns.
        """
        self._context = context
        self._trainer = trainer = backend.trainer_capabilities
        drawing = NoSampler(trainer) if sampler is None else WatchedSampler(sampler, context.watch, turns)
        capabilities = EngineCapabilities.of(trainer, None if sampler is None else sampler.sampler_capabilities)
        limits = Limits(max_batch_tokens=trainer.max_batch_tokens)

        training_thread = TrainingThread(thread, turns, context.watch)
        probes = Probes(backend, drawing, context.model.consistency, call=training_thread.call)
        models = Models(backend, training_thread, losses=losses, before_change=probes.before_change)
        steps = Steps(context.store)
        snapshots = Snapshots(context, drawing)
        gate = ConsistencyGate(context, probes, snapshots, most_waiting=_most_waiting(context, drawing, turns))
        checkpoints = Checkpoints(context)
        points = RecoveryPoints(context, models, gate)
        operations = ModelOperations(context, models, steps, checkpoints, snapshots, gate, points)

        self._claims = Claims(context, capabilities, losses)
        recorder = Recorder(context, self._claims, on_finished, limits)
        waiting = TrainingQueue(scheduler, limits, models.why_not)
        self.training = Training(context, waiting, models, steps, operations, points, recorder)
        samples = SampleQueue(scheduler, drawing.sampler_capabilities)
        teller = TokenTeller(context.store)
        self.sampling = Sampling(
            context, samples, drawing, snapshots, gate, recorder, teller, on_room=self._claims.wake
        )
        replayer = Replayer(models, checkpoints, recovery_root=context.data_dir.recovery_points(context.base_model))
        self._recovery = Recovery(context, models, replayer, snapshots, gate, points, steps)
        self._places = Places(context, waiting, models, points, self._recovery, on_moved=self.training.wake)

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
                    admit_models(self._context, self._trainer, self._places),
                    drop_snapshots(self.sampling.snapshots),
                    self.sampling.teller.run(),
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
        """Claim as much as there is room for, and run it."""
        await self._retry_suspects()
        self._claims.wake()
        while True:
            await self._claims.woken()
            if self._context.stopping.is_set():
                return
            await self._cancel_samples()
            for claimed in await self._claims.claim():
                self._runner_of(claimed).queue.add(claimed)
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


def _most_waiting(context: EngineContext, sampler: SamplingBackend, turns: DeviceTurns | None) -> int:
    """Return the most unverified snapshots in the sampler; 0 if checking one would change the turn of the devices."""
    if turns is not None:
        return 0
    most = min(MOST_WAITING, context.model.resident_snapshots - 1)
    held = sampler.sampler_capabilities.max_snapshots
    return most if held is None else min(most, held // _SHARE_OF_WAITING)


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return the failure of a group, which usually holds one."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
