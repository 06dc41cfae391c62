"""Building an engine from what it works with and how it is configured."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.checkpoints.format import SHARD_BYTES
from tinsmith.engine.backend_calls import NoSampler, TrainingThread, WatchedSampler
from tinsmith.engine.batches import Batches
from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.checkpoint_files import CheckpointReader, CheckpointWriter
from tinsmith.engine.claims import Claims, Decoder
from tinsmith.engine.consistency_gate import ConsistencyGate
from tinsmith.engine.device_turns import DeviceTurns
from tinsmith.engine.disk_room import DiskRoom
from tinsmith.engine.engine import Engine
from tinsmith.engine.model_operations import ModelOperations
from tinsmith.engine.model_places import Places
from tinsmith.engine.models import Models
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.recovery import Recovery
from tinsmith.engine.recovery_point_taker import RecoveryPointTaker
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.replay import Replayer
from tinsmith.engine.routed_experts import RoutedExpertsKeeper
from tinsmith.engine.sample_line import SampleLine
from tinsmith.engine.sampling_lane import SamplingLane
from tinsmith.engine.sampling_snapshots import Keeping, Snapshots
from tinsmith.engine.save_for_sampler import SaveForSampler
from tinsmith.engine.snapshot_checks import MOST_WAITING, SnapshotChecks
from tinsmith.engine.training_lane import TrainingLane
from tinsmith.engine.training_line import TrainingLine
from tinsmith.engine.waiting_states import WaitingStates
from tinsmith.engine.windows import Windows
from tinsmith.hook_values import OperationFinished
from tinsmith.host_memory import host_memory
from tinsmith.losses import LossSpec
from tinsmith.scheduler import Limits, Scheduler
from tinsmith.settings import (
    ConsistencySettings,
    DataDir,
    ModelSettings,
    QuotaSettings,
    RecoverySettings,
    RoutingReplaySettings,
    Settings,
    WatchdogSettings,
)
from tinsmith.store import Lease, RequestStore
from tinsmith.store.disk_room import space_at

_SHARE_OF_SNAPSHOTS: Final = 4  # snapshots take this part of the host's memory, unless configured otherwise
_SHARE_OF_WAITING: Final = 4  # snapshots that wait to be compared take at most this part of a sampler's places


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine is configured."""

    gap_timeout_s: float
    keeping: Keeping
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    consistency: ConsistencySettings = field(default_factory=ConsistencySettings)
    quotas: QuotaSettings = field(default_factory=QuotaSettings)
    model_path: Path | None = None  # the base model's directory
    shard_bytes: int = SHARD_BYTES
    routing_replay: RoutingReplaySettings = field(default_factory=RoutingReplaySettings)

    @classmethod
    def configured(cls, settings: Settings, model: ModelSettings, *, model_path: Path | None) -> "EngineOptions":
        return cls(
            gap_timeout_s=settings.server.gap_timeout_s,
            keeping=Keeping(
                max_resident=model.resident_snapshots,
                max_bytes=model.resident_snapshot_bytes or host_memory() // _SHARE_OF_SNAPSHOTS,
                idle_s=model.ephemeral_idle_s,
            ),
            recovery=settings.recovery,
            consistency=model.consistency,
            quotas=settings.quotas,
            model_path=model_path,
            shard_bytes=model.checkpoint_shard_bytes,
            routing_replay=model.routing_replay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine works with."""

    store: RequestStore
    lease: Lease
    data_dir: DataDir
    backend: TrainingBackend
    sampler: SamplingBackend | None
    scheduler: Scheduler
    losses: Mapping[str, LossSpec]
    on_finished: Callable[[OperationFinished], None]
    thread: ThreadPoolExecutor | None = None  # of one worker, in which the backend was created; None: a new one
    turns: DeviceTurns | None = None  # if trainer and sampler share devices by turns
    watch: CallWatch = field(default_factory=lambda: CallWatch(WatchdogSettings()))  # somebody may look at it


def assemble_engine(parts: EngineParts, options: EngineOptions) -> Engine:
    """Connect the parts of an engine. Each is described in its own module."""
    store, lease, backend, data_dir = parts.store, parts.lease, parts.backend, parts.data_dir
    sampler = _sampler(parts)
    tasks, stopping = asyncio.TaskGroup(), asyncio.Event()

    thread = TrainingThread(parts.thread, parts.turns, parts.watch)
    gate = ConsistencyGate(backend, sampler, options.consistency, call=thread.call)
    models = Models(backend, thread, before_change=gate.before_change)
    reader = CheckpointReader(store, data_dir.checkpoints, base_model=lease.base_model, watch=parts.watch)
    room = DiskRoom(store, options.quotas, parts.watch.files(partial(space_at, data_dir.root)))
    writer = CheckpointWriter(
        store,
        data_dir.checkpoints,
        lease=lease,
        room=room,
        model_path=options.model_path,
        shard_bytes=options.shard_bytes,
        watch=parts.watch,
    )
    recovery_root = data_dir.recovery_points(lease.base_model)
    waiting = WaitingStates(options.recovery.waiting_bytes)
    recovery_points = RecoveryPoints(store, lease, root=recovery_root, settings=options.recovery, watch=parts.watch)
    snapshots = Snapshots(
        store,
        sampler,
        lease=lease,
        checkpoint_root=data_dir.checkpoints,
        spill_root=data_dir.spilled_snapshots(lease.base_model),
        keeping=options.keeping,
        room=room,
        watch=parts.watch,
    )
    checks = SnapshotChecks(
        store, lease, snapshots, gate, tasks, most_waiting=_most_waiting(parts, sampler, options.keeping)
    )

    decoder = Decoder(training=backend.capabilities, sampling=sampler.capabilities, losses=parts.losses)
    claims = Claims(store, lease, decoder=decoder, settings=options.recovery, gap_timeout_s=options.gap_timeout_s)
    recorder = Recorder(store, lease, claims, on_finished=parts.on_finished)
    windows = Windows(store)
    taker = RecoveryPointTaker(recovery_points, models, checks, waiting, room, tasks)
    limits = Limits(max_batch_tokens=backend.capabilities.max_batch_tokens)
    training = TrainingLane(
        TrainingLine(parts.scheduler, limits, models.why_not),
        Batches(models, windows),
        ModelOperations(
            models,
            SaveForSampler(store, models, snapshots, gate, checks, checkpoints=writer, room=room),
            checks,
            reader=reader,
            writer=writer,
            recovery_points=taker,
            waiting=waiting,
            windows=windows,
        ),
        windows,
        recorder,
        taker,
        tasks,
        stopping=stopping,
    )
    line = SampleLine(parts.scheduler, sampler.capabilities)
    replay = options.routing_replay
    experts = RoutedExpertsKeeper(snapshots, replay.tenant_bytes if replay.enabled else None)
    sampling = SamplingLane(
        sampler, snapshots, checks, recorder, experts, line, tasks, on_room=claims.wake, stopping=stopping
    )
    recovery = Recovery(
        store,
        lease,
        models,
        Replayer(models, reader, recovery_root=recovery_root),
        snapshots,
        checks,
        recovery_points,
        max_attempts=options.recovery.max_retries + 1,
    )
    places = Places(store, lease, capabilities=backend.capabilities, settings=options.quotas)
    return Engine(claims, training, sampling, recovery, places, tasks=tasks, stopping=stopping)


def _most_waiting(parts: EngineParts, sampler: SamplingBackend, keeping: Keeping) -> int:
    """Return the most unverified snapshots in the sampler; 0 if checking one would change the turn of the devices."""
    if parts.turns is not None:
        return 0
    most, places = min(MOST_WAITING, keeping.max_resident - 1), sampler.capabilities.max_snapshots
    return most if places is None else min(most, places // _SHARE_OF_WAITING)


def _sampler(parts: EngineParts) -> SamplingBackend:
    if parts.sampler is None:
        return NoSampler(parts.backend.capabilities)
    return WatchedSampler(parts.sampler, parts.watch, parts.turns)
