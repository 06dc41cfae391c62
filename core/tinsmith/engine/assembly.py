"""Building an engine from what it works with."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.engine.backend_calls import NoSampler, TrainingThread, WatchedSampler
from tinsmith.engine.checkpoint_files import Checkpoints
from tinsmith.engine.claims import Claims, Decoder
from tinsmith.engine.consistency_gate import MOST_WAITING, ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.device_turns import DeviceTurns
from tinsmith.engine.engine import Engine
from tinsmith.engine.model_operations import ModelOperations
from tinsmith.engine.models import Models
from tinsmith.engine.probes import Probes
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.recovery import Recovery
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.replay import Replayer
from tinsmith.engine.sampling import SampleQueue, Sampling
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.steps import Steps
from tinsmith.engine.token_streams import TokenTeller
from tinsmith.engine.training import Training, TrainingQueue
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import LossSpec
from tinsmith.scheduler import Limits, Scheduler
from tinsmith.store import EngineCapabilities

_SHARE_OF_WAITING: Final = 4  # snapshots that wait to be compared take at most this share of what the sampler holds


def assemble_engine(
    engine: EngineContext,
    *,
    backend: TrainingBackend,
    sampler: SamplingBackend | None,
    scheduler: Scheduler,
    losses: Mapping[str, LossSpec],
    on_finished: Callable[[OperationFinished], None],
    thread: ThreadPoolExecutor | None = None,
    turns: DeviceTurns | None = None,
) -> Engine:
    """Connect the parts of an engine. Each is described in its own module.

    `thread` has one worker, in which the backend was created; None: a new one. `turns` are those of trainer and
    sampler, if they share devices by turns.
    """
    trainer = backend.trainer_capabilities
    drawing = NoSampler(trainer) if sampler is None else WatchedSampler(sampler, engine.watch, turns)
    capabilities = EngineCapabilities.of(trainer, None if sampler is None else sampler.sampler_capabilities)

    training_thread = TrainingThread(thread, turns, engine.watch)
    probes = Probes(backend, drawing, engine.options.consistency, call=training_thread.call)
    models = Models(backend, training_thread, losses=losses, before_change=probes.before_change)
    steps = Steps(engine.store)
    snapshots = Snapshots(engine, drawing)
    gate = ConsistencyGate(engine, probes, snapshots, most_waiting=_most_waiting(engine, drawing, turns))
    checkpoints = Checkpoints(engine)
    points = RecoveryPoints(engine, models, gate)
    operations = ModelOperations(engine, models, steps, checkpoints, snapshots, gate, points)

    claims = Claims(engine, Decoder(capabilities=capabilities, losses=losses))
    recorder = Recorder(engine, claims, on_finished, most_tokens=trainer.max_batch_tokens)
    waiting = TrainingQueue(scheduler, Limits(max_batch_tokens=trainer.max_batch_tokens), models.why_not)
    training = Training(engine, waiting, models, steps, operations, points, recorder)
    samples = SampleQueue(scheduler, drawing.sampler_capabilities)
    teller = TokenTeller(engine.store)
    sampling = Sampling(engine, samples, drawing, snapshots, gate, recorder, teller, on_room=claims.wake)
    replayer = Replayer(models, checkpoints, recovery_root=engine.data_dir.recovery_points(engine.base_model))
    recovery = Recovery(engine, models, replayer, snapshots, gate, points, steps)
    return Engine(engine, claims, training, sampling, recovery, trainer)


def _most_waiting(engine: EngineContext, sampler: SamplingBackend, turns: DeviceTurns | None) -> int:
    """Return the most unverified snapshots in the sampler; 0 if checking one would change the turn of the devices."""
    if turns is not None:
        return 0
    most = min(MOST_WAITING, engine.options.keeping.max_resident - 1)
    held = sampler.sampler_capabilities.max_snapshots
    return most if held is None else min(most, held // _SHARE_OF_WAITING)
