"""The part of the store contract about lineage: which runs took their weights from which checkpoints."""

from dataclasses import replace
from datetime import timedelta

from tinsmith.operations import ModelUnloaded, WeightsLoaded
from tinsmith.store import Origin, RequestStore, RunState, RunStateChanged
from tinsmith.testing.store_records import NOW, a_model, a_run, an_operation, claim, complete, done
from tinsmith.testing.store_suite import StoreSuite

_MODEL, _OTHER = "s1:train:0", "s2:train:0"
_PATH = f"tinker://{_OTHER}/weights/a"
_ORIGIN = Origin(model_id=_MODEL, seq_id=1, path=_PATH, source_id=_OTHER, step=7, created_at=NOW)


async def _loaded(store: RequestStore, origin: Origin) -> None:
    """Complete a load of the model."""
    request_id = await store.submit(an_operation(origin.model_id, origin.seq_id, kind="load_state"))
    await claim(store)
    await complete(store, [done(request_id, WeightsLoaded(model_id=origin.model_id, path=origin.path), origin)])


class OriginsContract(StoreSuite):
    async def test_origins_are_found_from_both_ends(self, store: RequestStore) -> None:
        await a_model(store)
        later = replace(_ORIGIN, seq_id=2, step=0, created_at=NOW + timedelta(seconds=1))
        own = replace(_ORIGIN, seq_id=3, path=f"tinker://{_MODEL}/weights/b", source_id=_MODEL)
        for each in (_ORIGIN, later, own):
            await _loaded(store, each)
        assert await store.origins_of([_MODEL, _OTHER]) == [_ORIGIN, own, later]
        assert await store.derived_from([_OTHER]) == [_ORIGIN, later]
        assert await store.derived_from([_MODEL, _OTHER]) == [_ORIGIN, own, later]
        assert await store.origins_of([_OTHER]) == []
        assert await store.origins_of([]) == await store.derived_from([]) == []

    async def test_a_copy_has_an_origin_from_the_first_call(self, store: RequestStore) -> None:
        await a_model(store)
        run = a_run("s3:train:0", session_id="s1", state=RunState.UNLOADED)
        origin = replace(_ORIGIN, model_id=run.model_id, seq_id=0)
        await store.add_unloaded_run(run, origin)
        await store.add_unloaded_run(run, replace(origin, step=8))
        assert await store.origins_of([run.model_id]) == [origin]

    async def test_the_origins_of_a_run_are_deleted_with_it(self, store: RequestStore) -> None:
        await a_model(store)
        await a_model(store, _OTHER, tenant="bob")
        back = replace(_ORIGIN, model_id=_OTHER, path=f"tinker://{_MODEL}/weights/b", source_id=_MODEL)
        for each in (_ORIGIN, back):
            await _loaded(store, each)
        await store.end_session("s1", "success", None)
        for request_id in await claim(store):
            unloaded = RunStateChanged(model_id=_MODEL, state=RunState.UNLOADED)
            await complete(store, [done(request_id, ModelUnloaded(model_id=_MODEL), unloaded)])
        later = NOW.replace(year=NOW.year + 9)
        await store.prune(later)
        assert await store.origins_of([_MODEL]) == [_ORIGIN]
        await store.forget_sessions(later)
        assert await store.origins_of([_MODEL]) == []
        assert await store.derived_from([_MODEL]) == [back], "what came of it is still there"
