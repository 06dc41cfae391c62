"""A model, its checkpoint and its users, for the interleaving tester: real code on a real store and a real disk.

Ann saves versions of one checkpoint, each full of a number of its own, and Bob reads it while it is published. What
happened is noted after every step, so that the end can be judged.
"""

import asyncio
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from interleaving import Choice, current, pause, pause_thread, run

from tinsmith import operations as ops
from tinsmith.backend import ModelState, SamplerCapabilities, SamplingBackend, Snapshot
from tinsmith.builtin.toy_backend import ToyBackend
from tinsmith.checkpoints import atomic_directory
from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.engine.checkpoint_files import CheckpointReader, Checkpoints
from tinsmith.engine.context import EngineContext
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import NotFoundError, ServerError, TinsmithError
from tinsmith.hook_values import Principal
from tinsmith.processes.housekeeping import Housekeeping, remove_orphans
from tinsmith.server.auth import own_checkpoint, read_right
from tinsmith.server.routes import runs
from tinsmith.server.routes.downloads import make_grant, refuse_revoked
from tinsmith.settings import ServerSettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import (
    CheckpointKind,
    CheckpointRecord,
    CheckpointWritten,
    Completion,
    Lease,
    OperationRecord,
    RequestStore,
    RunRecord,
    RunState,
    RunStateChanged,
    SamplingSessionRecord,
)
from tinsmith.testing.engine_driver import EngineDriver, make_context, take_over
from tinsmith.testing.store_records import claim_records
from tinsmith_checkpoints import format as checkpoint_format
from tinsmith_checkpoints.format import MANIFEST

Work = Callable[[], Awaitable[None]]

ANN, BOB = Principal(tenant="ann"), Principal(tenant="bob")
ACTOR = {"actor": "ann"}
STEPS: Final = frozenset(
    {
        "get_checkpoint",
        "deleted_checkpoint",
        "expired_checkpoints",
        "update_checkpoint",
        "delete_checkpoint",
        "delete_version",
        "get_run",
        "get_sampling_session",
        "complete",
        "acquire_lease",
        "requeue",
        "claim",
        "end_session",
    }
)
"""The store's methods before which a session pauses."""

FILE_STEPS: Final = (
    (atomic_directory, "put"),
    (atomic_directory, "delete"),
    (atomic_directory, "find"),
    (checkpoint_format, "read_manifest"),
    (checkpoints, "files_in"),
)
"""The functions in threads before which a session pauses."""

READING: Final = frozenset({"put", "find", "read_manifest", "files_in"})
"""What three sessions do without a pause, so that all of their orders can be tried. Two sessions pause."""

CLEARING: Final = READING | {"get_run", "delete"}
"""If two of three sessions remove files, they do so without a pause, too. Of two sessions, each pauses before it."""


@contextmanager
def pausing_files() -> Iterator[None]:
    """Pause before each change of the disk. Nothing is flushed: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in FILE_STEPS:
            patch.setattr(module, name, _paused(getattr(module, name), name))
        patch.setattr(atomic_directory, "synchronise", lambda _: None)
        yield


def _paused(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def paused(*args: Any, **options: Any) -> Any:
        pause_thread(name)
        return function(*args, **options)

    return paused


@dataclass(frozen=True)
class Seen:
    """What there was after a step: the number that the checkpoint holds, and whether it was published."""

    number: int | None
    public: bool = False


class _Store:
    """The store as one session sees it: it pauses, and the world notes what it read and changed."""

    def __init__(self, world: "World", session: str) -> None:
        self._world = world
        self._session = session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._world.store, name)
        if name not in STEPS:
            return method

        async def stepped(*args: Any, **options: Any) -> Any:
            await pause(name)
            self._world.begun.setdefault(current(), len(self._world.timeline) - 1)
            try:
                result = await method(*args, **options)
            finally:
                await self._world.look()
            if name == "get_checkpoint":
                self._world.read_by.setdefault(self._session, set()).add(result.created_at)
            return result

        return stepped


class NumberSampler(SamplingBackend):
    """Answers with the number that the snapshot holds."""

    def __init__(self, capabilities: SamplerCapabilities) -> None:
        self._capabilities = capabilities
        self.loaded: dict[str, int] = {}

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await pause("load_snapshot")
        self.loaded.setdefault(snapshot.snapshot_id, number_in(snapshot.adapter_weights()))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self.loaded.pop(snapshot_id, None)

    async def sample(self, op: ops.Sample) -> ops.SampleOutput | ops.Failed:
        await pause("sample")
        if op.snapshot_id not in self.loaded:
            return ops.Failed(message=f"no snapshot {op.snapshot_id!r}")
        return ops.SampleOutput(sequences=(), prompt_cache_hit_tokens=self.loaded[op.snapshot_id])


class _Room:
    async def expect(self, tenant: str, num_bytes: int) -> None:
        """There is room."""


def number_in(weights: Any) -> int:
    return int(next(iter(weights.values())).flat[0])


@dataclass
class World:
    """One run's. All runs share the store and the disk, but no names."""

    store: RequestStore
    root: Path
    backend: ToyBackend
    run_id: int
    kind: CheckpointKind = "training"
    timeline: list[Seen] = field(default_factory=list)
    read_by: dict[str, set[datetime]] = field(default_factory=dict)  # `created_at` of the versions, by session
    recorded: list[CheckpointRecord] = field(default_factory=list)  # by saves that were acknowledged, in order
    number_of: dict[datetime, int] = field(default_factory=dict)  # by `created_at`, which no two versions share
    begun: dict[str, int] = field(default_factory=dict)  # by session: where in the timeline its first step was
    kept: set[datetime] = field(default_factory=set)  # `created_at` of what no longer expires
    wrong: list[str] = field(default_factory=list)
    deleted: bool = False  # a deletion was acknowledged
    bobs_sample: ops.Sample | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def begin(self, *, public: bool, ttl_s: int | None = None) -> None:
        self.client = EngineDriver(self.store, "toy", session_id=f"s{self.run_id}")
        self.model_id = self.client.model_id()
        self.path = self.client.path("x", {"training": "weights"}.get(self.kind, "sampler_weights"))
        self.lease = await take_over(self.store, "toy")
        self.template = self.backend.capture_state("template")
        self.sampler = NumberSampler(self.backend.sampler_capabilities)
        await self.client.open_session()
        await self._create_model()
        await self.save(self.store_of("nobody"), ttl_s=ttl_s)
        if public:
            await self.store.update_checkpoint(self.path, lambda it: replace(it, public=True))
        self.first = await self.store.get_checkpoint(self.path)
        self.right = read_right(self.first, BOB)
        await self.look()

    async def _create_model(self) -> None:
        now, lora = datetime.now(UTC), self.template.lora
        creation = self.client.new_operation(ops.CreateModel(model_id=self.model_id, lora=lora), self.model_id, 0)
        new = RunRecord(
            model_id=self.model_id,
            session_id=self.client.session_id,
            tenant="ann",
            base_model="toy",
            lora=lora,
            created_at=now,
            last_request_at=now,
        )
        self.client.next_seq_id[self.model_id] = 1
        request_id = await self.store.create_run(new, creation)
        await self.claimed(self.store)
        ready = RunStateChanged(model_id=self.model_id, state=RunState.READY)
        created = Completion(request_id=request_id, result=ops.ModelCreated(model_id=self.model_id), effects=(ready,))
        await self.store.complete(self.lease, [created])

    def store_of(self, session: str) -> Any:
        return _Store(self, session)

    def context(self, session: str) -> Any:
        async def nobody(*_: object) -> None:
            """No key stands behind a link that was made without one."""

        keys = SimpleNamespace(id_used=lambda *_: None, made_with=lambda *_: "", look_up_owner=nobody)
        disk = SimpleNamespace(freed=lambda _: None)
        return SimpleNamespace(
            store=self.store_of(session),
            now=lambda: datetime.now(UTC),
            checkpoint_root=self.root,
            api_keys=keys,
            quotas=SimpleNamespace(disk=disk),
        )

    def engine(self, store: Any, lease: Lease) -> EngineContext:
        context = make_context(store, lease, self.root.parent)
        context.room = _Room()  # type: ignore[assignment]
        return context

    async def look(self) -> None:
        try:
            found = await self.store.get_checkpoint(self.path)
        except NotFoundError:
            seen = Seen(None)
        else:
            seen = Seen(self.number_of.get(found.created_at), found.public)
        if not self.timeline or self.timeline[-1] != seen:
            self.timeline.append(seen)

    async def claimed(self, store: Any, lease: Lease | None = None) -> OperationRecord | None:
        found = await claim_records(store, lease or self.lease, 1)
        return found[0] if found else None

    # Ann -----------------------------------------------------------------------------------------------------------

    async def submit_save(self) -> None:
        await self.client.submit(ops.SaveState(model_id=self.model_id, path=self.path, overwrite=True))

    async def save(self, store: Any, *, ttl_s: int | None = None) -> None:
        """Submit a save, and run it as an engine does."""
        await self.submit_save()
        record = await self.claimed(self.store)
        assert record is not None
        await self.write(store, record, self.lease, ttl_s=ttl_s)

    async def write(self, store: Any, record: OperationRecord, lease: Lease, *, ttl_s: int | None = None) -> None:
        number = next(self.numbers)
        writer = Checkpoints(self.engine(store, lease))
        save = ops.SaveState(model_id=self.model_id, path=self.path, ttl_seconds=ttl_s, overwrite=True)
        written = await writer.write(save, self._state(number), record)
        self.number_of[written.created_at] = number
        saved = ops.WeightsSaved(path=self.path)
        effects = (CheckpointWritten(record=written),)
        await store.complete(lease, [Completion(request_id=record.request_id, result=saved, effects=effects)])
        self.recorded.append(written)
        await writer.tidy(self.path)

    def _state(self, number: int) -> ModelState:
        weights = {name: np.full_like(array, number) for name, array in self.template.weights.items()}
        return replace(self.template, weights=weights)

    async def saving(self) -> None:
        await self.save(self.store_of("save"))

    async def deleting(self) -> None:
        path = TinkerPath.parse(self.path)
        segment, _, name = path.checkpoint_id.partition("/")
        with suppress(NotFoundError):  # there was none when it looked: it has promised nothing
            await runs.delete_checkpoint(self.model_id, segment, name, ANN, ACTOR, self.context("delete"))
            self.deleted = True

    async def unpublishing(self) -> None:
        path = TinkerPath.parse(self.path)
        segment, _, name = path.checkpoint_id.partition("/")
        await runs.unpublish(self.model_id, segment, name, ANN, ACTOR, self.context("unpublish"))

    async def unpublishing_then_saving(self) -> None:
        await self.unpublishing()
        await self.saving()

    async def deleting_then_saving(self) -> None:
        await self.deleting()
        await self.saving()

    async def keeping_longer(self) -> None:
        """Take the expiry time away."""
        with suppress(NotFoundError):  # it has been deleted
            await own_checkpoint(self.context("keep"), ANN, self.path)
            changed = await self.store_of("keep").update_checkpoint(self.path, lambda it: replace(it, expires_at=None))
            self.kept.add(changed.created_at)

    async def ending_the_session(self) -> None:
        await self.store_of("end").end_session(self.client.session_id, "success", None)
        if (unload := await self.claimed(self.store)) is not None:
            effects = (RunStateChanged(model_id=self.model_id, state=RunState.UNLOADED),)
            result = ops.ModelUnloaded(model_id=self.model_id)
            done = Completion(request_id=unload.request_id, result=result, effects=effects)
            await self.store_of("end").complete(self.lease, [done])

    # The server and engines ----------------------------------------------------------------------------------------

    async def expiring(self) -> None:
        """A round two hours later."""
        now = datetime.now(UTC) + timedelta(hours=2)
        settings = ServerSettings(session_timeout_s=60, result_retention_s=1e6)
        clock = SteadyClock(lambda: now, lambda: 0.0)
        await Housekeeping(settings, self.store_of("expire"), self.root, clock=clock).round()

    async def sweeping_later(self) -> None:
        await pause("sweep")  # before the save there are no files, and nothing to look at
        await self.sweeping()

    async def sweeping(self) -> None:
        await remove_orphans(self.store_of("sweep"), self.root, older_than_s=0)

    async def saving_until_taken_over(self) -> None:
        try:
            await self.saving()
        except ServerError:  # its half-written files are gone, or the lease is: what it records is refused
            return

    async def taking_over(self) -> None:
        """Another engine takes the lease, and runs what the first one was running."""
        store = self.store_of("second")
        await pause("take over")
        lease = await take_over(self.store, "toy")
        await store.requeue(lease, max_attempts=9, reason=None)
        while (record := await self.claimed(store, lease)) is not None:
            await self.write(store, record, lease)

    # Bob -----------------------------------------------------------------------------------------------------------

    async def reads(self, read: Callable[[], Awaitable[int | None]]) -> None:
        """What is read must have been published at some time while it was read."""
        try:
            number = await read()
        except (TinsmithError, FileNotFoundError):
            return
        allowed = {seen.number for seen in self.timeline[self.begun[current()] :] if seen.public}
        if number is not None and number not in allowed:
            self.wrong.append(f"bob got version {number}, published were {sorted(map(str, allowed))}")

    async def loading(self) -> None:
        reader = CheckpointReader(self.store_of("load"), self.root, base_model="toy")

        async def read() -> int:
            state, _ = await reader.state_at(self.path, load_optimizer=True, right=self.right, tenant="bob")
            return number_in(state.weights)

        await self.reads(read)

    async def downloading(self) -> None:
        context = self.context("download")
        grant = make_grant(context, BOB, self.first, {})

        async def read() -> int:
            record, _ = await refuse_revoked(context, self.path.removeprefix("tinker://"), grant)
            files = await asyncio.to_thread(checkpoints.open_checkpoint_files, self.root, record.directory)
            try:
                (manifest,) = (json.load(file) for file in files if file.name.endswith(MANIFEST))
                return self.number_of[datetime.fromisoformat(manifest["created_at"])]
            finally:
                for file in files:
                    file.close()

        await self.reads(read)

    def snapshots(self) -> Snapshots:
        return Snapshots(self.engine(self.store_of("sample"), self.lease), self.sampler)

    async def open_sampling_session(self, tenant: str) -> ops.Sample:
        record = await self.store.get_checkpoint(self.path)
        session = SamplingSessionRecord(
            sampling_session_id=f"{self.client.session_id}:sample:{tenant}",
            session_id=self.client.session_id,
            tenant=tenant,
            base_model="toy",
            created_at=datetime.now(UTC),
            snapshot_id=self.path,
            model_path=self.path,
            checkpoint_created_at=record.created_at,
            only_while_public=tenant != record.tenant,
        )
        await self.store.create_sampling_session(session)
        params = ops.SamplingParams(max_tokens=1, seed=0)
        return ops.Sample(
            sampling_session_id=session.sampling_session_id,
            snapshot_id=self.path,
            prompt_P=np.zeros(1, np.int32),
            params=params,
        )

    async def sampled(self, snapshots: Snapshots, sample: ops.Sample) -> int | None:
        async with snapshots.for_sample(sample) as versioned:
            answer = await self.sampler.sample(versioned)
        return answer.prompt_cache_hit_tokens if isinstance(answer, ops.SampleOutput) else None

    # The end -------------------------------------------------------------------------------------------------------

    async def judge(self) -> list[str]:
        """Return what is wrong after all sessions have ended."""
        last = self.recorded[-1]
        try:
            record = await self.store.get_checkpoint(self.path)
        except NotFoundError:
            record = None
        expired = last.expires_at is not None and last.created_at not in self.kept
        asked_for = self.read_by.get("delete", set())
        if record is None:
            if last.created_at not in asked_for and not expired:
                self.wrong.append(f"version {self.number_of[last.created_at]} was acknowledged, and is gone")
        elif record.created_at != last.created_at:
            self.wrong.append("another version is recorded than the last one acknowledged")
        elif self.deleted and asked_for == {last.created_at}:
            self.wrong.append("the deletion was acknowledged, and the version is there")
        else:
            await self._judge_files(record)
        await remove_orphans(self.store, self.root, older_than_s=0)
        atomic_directory.sweep(self.root / self.model_id, older_than_s=0)
        found = {
            file.parent.relative_to(self.root).as_posix() for file in self.root.glob(f"{self.model_id}/**/{MANIFEST}")
        }
        if found != ({record.directory} if record is not None else set()):
            self.wrong.append(f"records and files differ: {record and record.directory}, {sorted(found)}")
        return self.wrong

    async def _judge_files(self, record: CheckpointRecord) -> None:
        try:
            found = checkpoints.read_checkpoint(self.root, record.directory)
            number = number_in(found.state.weights)
        except TinsmithError as error:
            self.wrong.append(f"a version that was acknowledged cannot be read: {error}")
            return
        if number != self.number_of[record.created_at] or found.created_at != record.created_at:
            self.wrong.append(f"the record has version {self.number_of[record.created_at]}, its files have {number}")

    async def end(self) -> None:
        with suppress(NotFoundError):
            await self.store.delete_checkpoint(self.path)
        shutil.rmtree(self.root / self.model_id, ignore_errors=True)


@dataclass(frozen=True)
class Scenario:
    """What there is before, and the sessions that then run beside one another."""

    sessions: Callable[[World], dict[str, Work]]
    public: bool = True
    ttl_s: int | None = None
    kind: CheckpointKind = "training"
    skipped: frozenset[str] = frozenset()
    prepare: Callable[[World], Awaitable[None]] | None = None


class Worlds:
    """One world after another, on one store."""

    def __init__(self, store: RequestStore, root: Path, backend: ToyBackend) -> None:
        self.store = store
        self._root = root
        self._backend = backend
        self._ids = itertools.count()

    async def run(self, scenario: Scenario, choices: Any) -> tuple[list[Choice], list[str]]:
        """Return the order of the steps, and what was wrong at its end."""
        world = World(self.store, self._root, self._backend, next(self._ids), scenario.kind)
        await world.begin(public=scenario.public, ttl_s=scenario.ttl_s)
        if scenario.prepare is not None:
            await scenario.prepare(world)
        made = await run(scenario.sessions(world), choices, skipped=scenario.skipped)
        wrong = await world.judge()
        await world.end()
        return made, wrong
