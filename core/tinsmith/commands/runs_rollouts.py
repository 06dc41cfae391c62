"""What `tinsmith runs rollouts` reads in a data directory: the rollouts of a step, and one in full."""

from collections.abc import Sequence
from pathlib import Path

from tinsmith.commands.open_store import find_run, use_store
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol import wire
from tinsmith.server.rollout_views import directory_of, list_of, step_of, view_of
from tinsmith.server.step_rollouts import StepRollouts, read_step
from tinsmith.settings import Settings
from tinsmith.store import RequestStore, RunRecord


class RunsOfStore:
    """All methods raise TinsmithError as `use_store` and `find_run` do."""

    def __init__(self, settings: Settings, plugins: Plugins) -> None:
        self._settings = settings
        self._plugins = plugins

    def rollouts(self, run: str, step: int | None) -> wire.RolloutList:
        """Return those of a step, by default of the newest one that has any."""

        async def read(store: RequestStore) -> wire.RolloutList:
            found = await store.get_run(await find_run(store, run))
            steps = await store.rollout_steps(found.model_id)
            chosen = steps[-1] if step is None and steps else step
            of_step = StepRollouts() if chosen is None else await self._read(store, found, chosen, steps)
            return list_of(found.model_id, steps, chosen, of_step, self._directory(found))

        return use_store(self._settings, self._plugins, read)

    def rollout(self, run: str, name: str) -> wire.RolloutView:
        """Raise NotFoundError if the run has no rollout of this name, or no longer."""

        async def read(store: RequestStore) -> wire.RolloutView:
            found, step = await store.get_run(await find_run(store, run)), step_of(name)
            of_step = await self._read(store, found, step, await store.rollout_steps(found.model_id))
            return view_of(found.model_id, step, name, of_step, self._directory(found))

        return use_store(self._settings, self._plugins, read)

    async def _read(self, store: RequestStore, run: RunRecord, step: int, steps: Sequence[int]) -> StepRollouts:
        return await read_step(store, run, step, steps, self._settings.server.rollout_bytes)

    def _directory(self, run: RunRecord) -> Path | None:
        return directory_of(run.base_model, self._settings, self._plugins)
