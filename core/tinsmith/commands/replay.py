"""`tinsmith replay`: rebuild a model as it was, on a backend of its own, and write it as a checkpoint."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tinsmith.backend import ModelState, TrainingBackend
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.commands.open_store import find_run, opened_store
from tinsmith.engine.backend_calls import TrainingThread
from tinsmith.engine.checkpoint_files import CheckpointReader
from tinsmith.engine.failures import BackendFailedError
from tinsmith.engine.models import Models
from tinsmith.engine.replay import Rebuilt, Replayer, check_reachable, rebuild_at
from tinsmith.errors import ConfigError, NotFoundError, ServerError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_trainer
from tinsmith.processes.logs import console as new_console
from tinsmith.settings import DataDir, ModelSettings, Settings
from tinsmith.store import CheckpointRecord, RequestStore, RunRecord

_EXIT_INTERRUPTED: Final = 130
_CLOSING_S: Final = 10.0

T = TypeVar("T")


def run_replay(
    settings: Settings, plugins: Plugins, *, run: str, until: int, to: str, accept_differences: bool = False
) -> None:
    """Rebuild the model, write it, and print where it is. Raise TinsmithError, writing nothing, if that fails."""
    console = new_console(stderr=True)
    replay = Replay(settings, plugins, console)
    try:
        asyncio.run(replay.run(run, until, to, accept_differences=accept_differences))
    except KeyboardInterrupt:
        console.print("stopped; nothing was written" if replay.written is None else f"written: {replay.written}")
        sys.stderr.flush()
        os._exit(_EXIT_INTERRUPTED)  # do not wait for a backend that is still loading


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the checkpoint goes: to a directory of its own, or to a path that the store records."""

    root: Path
    directory: str
    path: TinkerPath | None = None

    def __str__(self) -> str:
        return str(self.path or self.root / self.directory)


class Replay:
    def __init__(self, settings: Settings, plugins: Plugins, console: Console) -> None:
        self._settings = settings
        self._plugins = plugins
        self._console = console
        self._data_dir = settings.data_dir
        self.written: str | None = None

    async def run(self, run: str, until: int, to: str, *, accept_differences: bool) -> None:
        async with opened_store(self._settings, self._plugins) as store:
            model_id = await find_run(store, run)
            log = await store.run_log(model_id)
            model = self._model_of(log.run)
            target = _target(to, log.run, self._data_dir)
            await self._refuse_taken(store, target)
            check_reachable(log, until)
            rebuilt, state = await self._rebuilt(store, model, model_id, until)
            self._show_differences(rebuilt, accept=accept_differences)
            await _to_its_end(self._write(store, target, log.run, until, state))
        self._summarize(target, model_id, until, rebuilt, state.step)

    def _model_of(self, run: RunRecord) -> ModelSettings:
        try:
            return self._settings.model(run.base_model)
        except UserError as error:
            msg = (
                f"run {run.model_id!r} belongs to another model: {error}; pass the server's --config, or its "
                "--base-model and --name"
            )
            raise ConfigError(msg) from error

    async def _refuse_taken(self, store: RequestStore, target: _Target) -> None:
        taken = await asyncio.to_thread(os.path.lexists, target.root / target.directory)
        if target.path is not None and not taken:
            try:
                await store.get_checkpoint(str(target.path))
            except NotFoundError:
                return
            taken = True
        if taken:
            msg = f"--to {str(target)!r} exists already; choose another name"
            raise UserError(msg)

    async def _rebuilt(
        self, store: RequestStore, model: ModelSettings, model_id: str, until: int
    ) -> tuple[Rebuilt, ModelState]:
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as progress:
            task = progress.add_task(f"loading {model.name}", total=None)
            thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")
            async with self._backend(model, thread, progress, task) as backend:
                models = Models(backend, TrainingThread(thread), losses=self._plugins.losses.all())
                checkpoints = CheckpointReader(store, self._data_dir.checkpoints, base_model=model.name)
                replayer = Replayer(models, checkpoints, recovery_root=self._data_dir.recovery_points(model.name))
                progress.update(task, description=f"rebuilding {model_id}", total=until + 1, completed=0)
                try:
                    rebuilt = await rebuild_at(
                        model_id,
                        until,
                        store=store,
                        replayer=replayer,
                        progress=lambda seq_id: progress.update(task, completed=seq_id + 1),
                    )
                    state = await models.capture(model_id)
                    spoilt = await store.failed_pass(model_id, after_seq_id=None, before_seq_id=until + 1)
                    return rebuilt, state if spoilt is None else replace(state, gradients={})  # as a save has it
                except BackendFailedError as error:
                    msg = f"the backend failed while it rebuilt {model_id!r}: {error}"
                    raise ServerError(msg) from error

    @asynccontextmanager
    async def _backend(
        self, model: ModelSettings, thread: ThreadPoolExecutor, progress: Progress, task: TaskID
    ) -> AsyncIterator[TrainingBackend]:
        """Create a backend as the engine of this model does. The engine's own backend is not touched."""

        def loaded(stage: str, fraction: float | None) -> None:
            total, done = (None, None) if fraction is None else (100.0, 100.0 * fraction)
            progress.update(task, description=stage or f"loading {model.name}", total=total, completed=done)

        loop = asyncio.get_running_loop()
        backend = await loop.run_in_executor(
            thread, partial(make_trainer, model, self._plugins, self._data_dir, loaded, samples=False)
        )
        try:
            yield backend
        finally:
            await asyncio.wait([loop.run_in_executor(thread, backend.close)], timeout=_CLOSING_S)
            thread.shutdown(wait=False)

    def _show_differences(self, rebuilt: Rebuilt, *, accept: bool) -> None:
        if not rebuilt.differences:
            return
        msg = (
            f"{len(rebuilt.differences)} of {rebuilt.num_replayed} operations gave results that differ from "
            f"the recorded ones; the first is {rebuilt.differences[0]}"
        )
        if not accept:
            msg = f"{msg}. Nothing was written; --accept-differences writes the result anyway"
            raise ServerError(msg)
        self._console.print(f"[bold yellow]warning:[/] {msg}", highlight=False, soft_wrap=True)

    async def _write(self, store: RequestStore, target: _Target, run: RunRecord, until: int, state: ModelState) -> None:
        now = datetime.now(UTC)
        metadata = {"replayed_run": run.model_id, "replayed_until": str(until)}
        if target.path is None:
            target.root.mkdir(parents=True, exist_ok=True)
        write = partial(
            write_checkpoint,
            kind="training",
            state=state,
            base_model=run.base_model,
            user_metadata=metadata,
            created_at=now,
            overwrite=False,
            beside_others=True,
        )
        size = await asyncio.to_thread(write, target.root, target.directory)
        if target.path is not None:
            record = CheckpointRecord(
                path=str(target.path),
                model_id=run.model_id,
                tenant=run.tenant,
                kind="training",
                base_model=run.base_model,
                lora=state.lora,
                created_at=now,
                size_bytes=size,
                directory=target.directory,
                step=state.step,
                user_metadata=metadata,
            )
            await store.add_checkpoint(record)
        self.written = str(target)

    def _summarize(self, target: _Target, model_id: str, until: int, rebuilt: Rebuilt, step: int) -> None:
        start = (
            "its creation" if rebuilt.point_seq_id is None else f"the recovery point of seq_id {rebuilt.point_seq_id}"
        )
        same = "" if rebuilt.differences or not rebuilt.num_replayed else ", with the recorded results bit for bit"
        told = (
            f"{model_id} after seq_id {until} (optimizer step {step}): from {start}, "
            f"{rebuilt.num_replayed} operations replayed{same}"
        )
        self._console.print(told, highlight=False, soft_wrap=True)
        print(target)  # noqa: T201 - on stdout, for scripts


def _target(to: str, run: RunRecord, data_dir: DataDir) -> _Target:
    if not to.startswith("tinker://"):
        directory = Path(to).expanduser().absolute()
        return _Target(root=directory.parent, directory=directory.name)
    path = TinkerPath.parse(to)
    if path.kind != "training" or path.model_id != run.model_id:
        msg = f"--to {to!r} does not name a training state of this run: use tinker://{run.model_id}/weights/<name>"
        raise UserError(msg)
    return _Target(root=data_dir.checkpoints, directory=path.new_directory(), path=path)


async def _to_its_end(work: Awaitable[T]) -> T:
    """Finish the work even if Ctrl-C arrives: a half-written checkpoint would be worse."""
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await doing
        raise
