"""The request store for commands that look at what a server keeps, while it runs or when it is stopped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinsmith.errors import ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store
from tinsmith.settings import Settings
from tinsmith.store import RequestStore


@asynccontextmanager
async def opened_store(settings: Settings, plugins: Plugins) -> AsyncIterator[RequestStore]:
    """Open the store that the settings name. Raise ConfigError where the data directory has none: none is made."""
    default = settings.store.plugin == "sql" and settings.store.options().get("url") is None
    if default and not settings.data_dir.database.is_file():
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
