"""The request store for commands that read what a server keeps, whether the server runs or not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinsmith.errors import ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_shared_store
from tinsmith.settings import Settings
from tinsmith.store import RequestStore


@asynccontextmanager
async def opened_store(settings: Settings, plugins: Plugins) -> AsyncIterator[RequestStore]:
    """Open the store of the settings. Raise ConfigError if the data directory contains none; never create one."""
    default = settings.store.plugin == "sql" and settings.store.options().get("url") is None
    if default and not settings.data_dir.database.is_file():
        msg = (
            f"server.data_dir: {str(settings.data_dir.root)!r} contains no tinsmith.db; pass the server's directory "
            "with --data-dir, or its configuration file with --config"
        )
        raise ConfigError(msg)
    store = make_shared_store(settings, plugins)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
