"""What `tinsmith runs rollouts` reads in a data directory: the rollouts of a step, and one in full."""

from pathlib import Path

from tinsmith.commands.open_store import find_run, use_store
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol import wire
from tinsmith.server.rollout_views import directory_of, list_of, step_of, view_of
from tinsmith.settings import Settings
from tinsmith.store import RequestStore


class RunsOfStore:
    """All methods raise TinsmithError as `use_store` and `find_run` do."""

    def __init__(self, settings: Settings, plugins: Plugins) -> None:
        self._settings = settings
        self._plugins = plugins

    def rollouts(self, run: str, step: int | None) -> wire.RolloutList:
        """Return those of a step, by default of the newest one that has any."""

        async def read(store: RequestStore) -> wire.RolloutList:
            model_id = await find_run(store, run)
            steps = await store.rollout_steps(model_id)
            chosen = steps[-1] if step is None and steps else step
            rows = [] if chosen is None else await store.read_rollouts(model_id, chosen)
            return list_of(model_id, steps, chosen, rows, await self._directory(store, model_id))

        return use_store(self._settings, self._plugins, read)

    def rollout(self, run: str, name: str) -> wire.RolloutView:
        """Raise NotFoundError if the run has no rollout of this name, or no longer."""

        async def read(store: RequestStore) -> wire.RolloutView:
            model_id, step = await find_run(store, run), step_of(name)
            rows = await store.read_rollouts(model_id, step)
            return view_of(model_id, step, name, rows, await self._directory(store, model_id))

        return use_store(self._settings, self._plugins, read)

    async def _directory(self, store: RequestStore, model_id: str) -> Path | None:
        return directory_of((await store.get_run(model_id)).base_model, self._settings, self._plugins)
