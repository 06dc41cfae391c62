"""The request store for commands that read it, whether the server runs or not, and how people name a run in it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from tinsmith.errors import ConfigError, NotFoundError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store
from tinsmith.settings import Settings
from tinsmith.store import RequestStore

_PAGE: Final = 1000
_NAMED: Final = 3  # in a message

T = TypeVar("T")


def use_store(
    settings: Settings, plugins: Plugins, use: Callable[[RequestStore], Awaitable[T]], *, create: bool = False
) -> T:
    """Return what `use` returns for the store of the settings. Raise ConfigError as `opened_store` does."""

    async def opened() -> T:
        async with opened_store(settings, plugins, create=create) as store:
            return await use(store)

    return asyncio.run(opened())


@asynccontextmanager
async def opened_store(settings: Settings, plugins: Plugins, *, create: bool = False) -> AsyncIterator[RequestStore]:
    """Open the store of the settings. Raise ConfigError if the data directory contains none, unless `create` is set."""
    default = settings.store.plugin == "sql" and settings.store.options().get("url") is None
    if default and not create and not settings.data_dir.database.is_file():
        msg = (
            f"server.data_dir: {str(settings.data_dir.root)!r} contains no tinsmith.db; pass the server's directory "
            "with --data-dir, or its configuration file with --config"
        )
        raise ConfigError(msg)
    store = make_store(settings, plugins)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def find_run(store: RequestStore, text: str) -> str:
    """Return the model_id that is meant.

    Raises NotFoundError if no run is, UserError if several are.
    """
    newest, total = await store.list_runs(None, limit=_PAGE, offset=0)
    ids = [each.model_id for each in newest]
    while len(ids) < total and text != "last":
        more, total = await store.list_runs(None, limit=_PAGE, offset=len(ids))
        if not more:  # some have been deleted meanwhile
            break
        ids += [each.model_id for each in more]
    return run_meant(ids, text)


def run_meant(ids: Sequence[str], text: str) -> str:
    """Return which of the ids, newest first, a text stands for. Raises as `find_run` does."""
    if text in ids:
        return text
    meant = list(ids[:1]) if text == "last" else [each for each in ids if each.startswith(text)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        msg = f"{len(meant)} runs begin with {text!r}, such as {_listed(meant)}; type more of the id"
        raise UserError(msg)
    there = f"the newest are {_listed(ids)}" if ids else "there are none yet"
    msg = f"no run {text!r}: {there}; `tinsmith runs list` prints all of them"
    raise NotFoundError(msg)


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:_NAMED]))
