"""Maintenance beside users' operations, in every order of their steps, on both stores.

`make test` draws some orders of each scenario, `make test-all` runs them all. Each fault that was once found is planted
again, and must be found.
"""

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from example_databases import Databases, PostgresTables, SqliteFiles
from interleaving import Choice, all_orders
from mortal_engine import a_backend
from silent_world import SilentWorld
from small_world import CLEARING, READING, Scenario, World, Worlds, pausing_files

from tinsmith import operations as ops
from tinsmith.builtin.toy_backend import ToyBackend
from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.engine import checkpoint_files, context
from tinsmith.sql_store.store import SqlStore
from tinsmith.testing.postgres import Postgres

NUM_DRAWN: Final = 3
MOST_DRAWN_FOR_A_FAULT: Final = 300


def two_samples(world: World) -> dict[str, Any]:
    """Bob samples the version that Ann deletes; then she saves another, and samples from that."""
    snapshots = world.snapshots()

    async def ann() -> None:
        await world.deleting_then_saving()
        own = await world.open_sampling_session("ann")
        number = await world.sampled(snapshots, own)
        if number != world.number_of[world.recorded[-1].created_at]:
            world.wrong.append(f"ann got version {number} of her own")

    async def bob() -> None:
        sample = world.bobs_sample
        assert sample is not None
        await world.reads(lambda: world.sampled(snapshots, sample))

    return {"ann": ann, "bob": bob}


async def open_bobs(world: World) -> None:
    world.bobs_sample = await world.open_sampling_session("bob")


SCENARIOS: Final[dict[str, Scenario]] = {
    "save and expiry": Scenario(lambda w: {"save": w.saving, "expire": w.expiring}, ttl_s=3600),
    "save and deletion": Scenario(lambda w: {"save": w.saving, "delete": w.deleting}),
    "save and sweep": Scenario(lambda w: {"save": w.saving, "sweep": w.sweeping_later}),
    "save and the session's end": Scenario(lambda w: {"save": w.saving, "end": w.ending_the_session}),
    "more time and expiry": Scenario(lambda w: {"keep": w.keeping_longer, "expire": w.expiring}, ttl_s=3600),
    "deletion and expiry": Scenario(lambda w: {"delete": w.deleting, "expire": w.expiring}, ttl_s=3600),
    "load and overwriting": Scenario(lambda w: {"load": w.loading, "ann": w.unpublishing_then_saving}),
    "load and a new version": Scenario(lambda w: {"load": w.loading, "ann": w.deleting_then_saving}),
    "download and overwriting": Scenario(lambda w: {"download": w.downloading, "ann": w.unpublishing_then_saving}),
    "download and a new version": Scenario(lambda w: {"download": w.downloading, "ann": w.deleting_then_saving}),
    "samples of two versions": Scenario(two_samples, kind="sampler", prepare=open_bobs),
    "a takeover": Scenario(lambda w: {"first": w.saving_until_taken_over, "second": w.taking_over}),
    "save, deletion and load": Scenario(
        lambda w: {"save": w.saving, "delete": w.deleting, "load": w.loading}, skipped=READING
    ),
    "save, expiry and load": Scenario(
        lambda w: {"save": w.saving, "expire": w.expiring, "load": w.loading}, ttl_s=3600, skipped=READING
    ),
    "save, expiry and deletion": Scenario(
        lambda w: {"save": w.saving, "expire": w.expiring, "delete": w.deleting}, ttl_s=3600, skipped=CLEARING
    ),
    "save, sweep and deletion": Scenario(
        lambda w: {"save": w.saving, "sweep": w.sweeping_later, "delete": w.deleting}, skipped=CLEARING
    ),
    "save, unpublishing and download": Scenario(
        lambda w: {"save": w.saving, "unpublish": w.unpublishing, "download": w.downloading}, skipped=READING
    ),
    "save, unpublishing and load": Scenario(
        lambda w: {"save": w.saving, "unpublish": w.unpublishing, "load": w.loading}, skipped=READING
    ),
}


@asynccontextmanager
async def worlds_on(databases: Databases, data_dir: Path) -> AsyncIterator[Worlds]:
    databases.empty(data_dir)
    store = databases.store(data_dir)
    await store.open()
    backend = a_backend(ToyBackend, data_dir)
    backend.create_model(ops.CreateModel(model_id="template", lora=ops.LoraConfig(rank=1, seed=0)))
    try:
        with pausing_files():
            yield Worlds(store, data_dir / "checkpoints", backend)
    finally:
        await store.close()


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return SqliteFiles(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def on_postgres(postgres: Postgres) -> Iterator[Databases]:
    databases = PostgresTables(postgres.new_database())
    yield databases
    databases.close()


@pytest.fixture(params=["sqlite", "postgres"])
def databases(request: pytest.FixtureRequest) -> Databases:
    found: Databases = request.getfixturevalue({"sqlite": "sqlite", "postgres": "on_postgres"}[request.param])
    return found


def drawn(seed: int) -> list[int]:
    return [random.Random(f"{seed}:{step}").randrange(1000) for step in range(60)]


def told(name: str, made: Sequence[Choice], wrong: Sequence[str]) -> str:
    return "\n".join([f"{name}: {'; '.join(wrong)}; in this order:", *(each.step for each in made)])


async def test_some_orders(databases: Databases, tmp_path: Path) -> None:
    async with worlds_on(databases, tmp_path / "data") as worlds:
        for name, scenario in SCENARIOS.items():
            for seed in range(NUM_DRAWN):
                made, wrong = await worlds.run(scenario, drawn(seed))
                assert not wrong, told(name, made, wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCENARIOS)
async def test_all_orders(databases: Databases, tmp_path: Path, name: str) -> None:
    async with worlds_on(databases, tmp_path / "data") as worlds:
        tried = 0

        async def try_one(choices: Sequence[int]) -> list[Choice]:
            made, wrong = await worlds.run(SCENARIOS[name], choices)
            assert not wrong, told(name, made, wrong)
            return made

        async for _ in all_orders(try_one):
            tried += 1
        print(f"{name}: {tried} orders")


async def test_an_outage_ends_no_session_in_any_order(databases: Databases, tmp_path: Path) -> None:
    async with worlds_on(databases, tmp_path / "data") as worlds:
        for seed in range(NUM_DRAWN):
            made, wrong = await SilentWorld(worlds.store, seed).run(drawn(seed))
            assert not wrong, told("silence", made, wrong)


@pytest.mark.thorough
async def test_an_outage_ends_no_session_in_all_orders(databases: Databases, tmp_path: Path) -> None:
    async with worlds_on(databases, tmp_path / "data") as worlds:
        tried = 0

        async def try_one(choices: Sequence[int]) -> list[Choice]:
            made, wrong = await SilentWorld(worlds.store, tried).run(choices)
            assert not wrong, told("silence", made, wrong)
            return made

        async for _ in all_orders(try_one):
            tried += 1
        print(f"an outage: {tried} orders")


# Faults that were found, planted again --------------------------------------------------------------------------------


def rights_of_the_submit(patch: pytest.MonkeyPatch) -> None:
    """A load keeps the right that it had when it was sent."""

    async def unchecked(store: Any, path: str, **_: Any) -> Any:
        return await store.get_checkpoint(path)

    patch.setattr(checkpoint_files, "loadable_checkpoint", unchecked)


def deletion_by_path(patch: pytest.MonkeyPatch) -> None:
    """Expiry deletes whatever has the name by then."""
    patch.setattr(SqlStore, "delete_version", lambda store, read: store.delete_checkpoint(read.path))


def directories_by_name(patch: pytest.MonkeyPatch) -> None:
    """All versions share a directory, so a slow deletion removes the files of a later one."""
    write = checkpoints.write_checkpoint
    patch.setattr(TinkerPath, "new_directory", lambda path: f"{path.model_id}/{path.checkpoint_id}")
    patch.setattr(context, "write_checkpoint", lambda *args, **more: write(*args, **{**more, "overwrite": True}))


FAULTS: Final[dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str]]]] = {
    "rights of the submit": (rights_of_the_submit, ["load and overwriting"]),
    "deletion by path": (deletion_by_path, ["save and expiry", "more time and expiry"]),
    "directories by name": (directories_by_name, ["save and deletion", "a takeover"]),
}


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, (_, names) in FAULTS.items() for name in names])
async def test_a_planted_fault_is_found(sqlite: Databases, tmp_path: Path, fault: str, name: str) -> None:
    plant, _ = FAULTS[fault]
    async with worlds_on(sqlite, tmp_path / "data") as worlds:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            for seed in range(MOST_DRAWN_FOR_A_FAULT):
                made, wrong = await worlds.run(SCENARIOS[name], drawn(seed))
                if wrong:
                    print(f"found after {seed + 1} orders\n{told(name, made, wrong)}")
                    return
    pytest.fail(f"{fault} was not found in {MOST_DRAWN_FOR_A_FAULT} orders of {name}")


async def test_silence_that_counts_during_an_outage_is_found(sqlite: Databases, tmp_path: Path) -> None:
    async with worlds_on(sqlite, tmp_path / "data") as worlds:
        for seed in range(MOST_DRAWN_FOR_A_FAULT):
            made, wrong = await SilentWorld(worlds.store, seed, hears=False).run(drawn(seed))
            if wrong:
                print(f"found after {seed + 1} orders\n{told('silence', made, wrong)}")
                return
    pytest.fail(f"it was not found in {MOST_DRAWN_FOR_A_FAULT} orders")
