"""The request store for commands that look at what a server keeps, while it runs or when it is stopped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinsmith.errors import ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import Settings
from tinsmith.store import RequestStore, StoreContext


@asynccontextmanager
async def opened_store(settings: Settings, plugins: Plugins) -> AsyncIterator[RequestStore]:
    """Open the store that the settings name. Raise ConfigError where the data directory has none: none is made."""
    data_dir = settings.server.data_dir
    default = settings.store.plugin == "sql" and settings.store.options().get("url") is None
    if default and not (data_dir / "tinsmith.db").is_file():
        msg = (
            f"server.data_dir: there is no tinsmith.db in {str(data_dir)!r}; name the server's directory with "
            "--data-dir, or its configuration with --config"
        )
        raise ConfigError(msg)
    spec = plugins.stores.get(settings.store.plugin)
    store = spec.create(spec.config.model_validate(settings.store.options()), StoreContext(data_dir=data_dir))
    await store.open()
    try:
        yield store
    finally:
        await store.close()
