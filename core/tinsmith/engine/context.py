"""State that one engine's components share: store and lease, files and their room, options, tasks, and the end."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.engine.budgets import DiskRoom, WaitingStates
from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.failures import in_a_thread
from tinsmith.figures import Figures
from tinsmith.settings import DataDir, ModelSettings, Settings, WatchdogSettings
from tinsmith.store import CheckpointKind, Lease, RequestStore
from tinsmith.store.disk_room import space_at
from tinsmith.tracer import Tracer


@dataclass(slots=True, kw_only=True)
class EngineContext:
    """Belongs to one engine, and to one event loop."""

    store: RequestStore
    lease: Lease
    data_dir: DataDir
    settings: Settings
    model: ModelSettings
    model_path: Path | None = None  # the base model's directory
    watch: CallWatch = field(default_factory=lambda: CallWatch(WatchdogSettings()))  # somebody may look at it
    figures: Figures = field(default_factory=Figures)
    tracer: Tracer | None = None
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)  # if one fails, the engine ends
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # once it is set, nothing new is started
    room: DiskRoom = field(init=False)
    waiting: WaitingStates = field(init=False)

    def __post_init__(self) -> None:
        space = self.watch.files(partial(space_at, self.data_dir.root))
        self.room = DiskRoom(self.store, self.settings.quotas, space)
        self.waiting = WaitingStates(self.settings.recovery.waiting_bytes)

    @property
    def base_model(self) -> str:
        return self.lease.base_model

    async def write_state(
        self,
        root: Path,
        directory: str,
        kind: CheckpointKind,
        state: Callable[[], ModelState],
        *,
        num_bytes: int,
        created_at: datetime,
        asked_with: Mapping[str, str] | None = None,
        recipients: Sequence[str] = (),
    ) -> int:
        """Make a state durable under the lease, outside the training thread, where `state` is called, too.

        `asked_with` is the metadata of a checkpoint that a client asked for. Without it, the state is the engine's own:
        it may replace another, lacks the files of the base model, and need not be finite. Return the size of the files.
        """

        def write() -> int:
            return write_checkpoint(
                root,
                directory,
                kind=kind,
                state=state(),
                base_model=self.base_model,
                user_metadata=asked_with or {},
                created_at=created_at,
                overwrite=asked_with is None,
                epoch=self.lease.epoch,
                model_path=None if asked_with is None else self.model_path,
                shard_bytes=self.model.checkpoint_shard_bytes,
                finite=asked_with is not None,
                recipients=recipients,
            )

        return await in_a_thread(self.watch.files(write, num_bytes))
