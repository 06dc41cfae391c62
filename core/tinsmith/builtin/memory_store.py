"""The request store in memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from pydantic import Field

from tinsmith.backend import BackendConfig
from tinsmith.errors import ConfigError
from tinsmith.hookspecs import hookimpl
from tinsmith.settings import DataDir
from tinsmith.store import RequestStore, StoreContext, StoreSpec

if TYPE_CHECKING:
    from tinsmith.memory_store.memory import Memory

_MEMORIES: "Final[WeakValueDictionary[Path, Memory]]" = WeakValueDictionary()
"""By data directory: the server of this process and its engines each make a store, and must get the same rows."""


class MemoryStoreConfig(BackendConfig):
    """The `store:` section with `plugin: memory`."""

    max_value_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        description="size in bytes of the largest request or result that is stored; a request that is larger, or whose "
        "result could be, is refused",
    )


@hookimpl
def tinsmith_register_stores() -> StoreSpec[MemoryStoreConfig]:
    return StoreSpec(
        name="memory",
        config=MemoryStoreConfig,
        create=_create,
        description="memory of the server, for trying things out: nothing survives its process",
        diagnose=_diagnose,
        in_process=True,
    )


def _create(config: MemoryStoreConfig, context: StoreContext) -> RequestStore:
    from tinsmith.memory_store.memory import Memory
    from tinsmith.memory_store.store import MemoryStore

    _diagnose(config, context)
    memory = _MEMORIES.setdefault(context.data_dir, Memory())
    return MemoryStore(memory, max_value_bytes=config.max_value_bytes)


def _diagnose(config: MemoryStoreConfig, context: StoreContext) -> str:
    """Refuse a durable store's data directory: the engine would remove what this store does not know."""
    del config
    if context.shared:
        msg = "server.share_data_dir: several servers cannot share a store in memory; set store.plugin to 'sql'"
        raise ConfigError(msg)
    if (kept := _of_a_durable_store(DataDir(context.data_dir))) is not None:
        msg = (
            f"store.plugin 'memory': {str(kept)!r} belongs to a server whose store is durable, and a store in memory "
            "knows nothing of what that one kept; choose an empty directory with --data-dir"
        )
        raise ConfigError(msg)
    return "in memory: sessions, models, operations and results end with the server"


def _of_a_durable_store(data_dir: DataDir) -> Path | None:
    if data_dir.database.exists():
        return data_dir.database
    if data_dir.in_memory.exists():
        return None
    of_engines = data_dir.root / "recovery", data_dir.root / "snapshots"
    return next((each for each in of_engines if each.is_dir() and any(each.iterdir())), None)
