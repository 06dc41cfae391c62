"""The SQL store in a scratch directory, which ends with its server."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import Field

from tinsmith.backend import BackendConfig
from tinsmith.errors import ConfigError
from tinsmith.hookspecs import hookimpl
from tinsmith.scratch import Scratch
from tinsmith.settings import DataDir
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.store import RequestStore, StoreContext, StoreSpec

_PREFIX: Final = "tinsmith-store-"
_MEMORY: Final = Path("/dev/shm")
_ENOUGH_BYTES: Final = 1 << 30  # a container has 64 MB there unless told otherwise, and a run writes more


class ScratchStoreConfig(BackendConfig):
    """The `store:` section with `plugin: memory`."""

    directory: Path | None = Field(
        None,
        description="where the scratch directory is made; default: /dev/shm, which is memory, if 1 GiB is free there, "
        "else the directory for temporary files (TMPDIR)",
    )
    max_value_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        le=999_000_000,
        description="size in bytes of the largest request or result that is stored; a request that is larger, or whose "
        "result could be, is refused",
    )


@hookimpl
def tinsmith_register_stores() -> StoreSpec[ScratchStoreConfig]:
    return StoreSpec(
        name="memory",
        config=ScratchStoreConfig,
        create=_create,
        description="SQLite in memory, for trying things out: its database ends with the server",
        diagnose=_diagnose,
        hold=_hold,
    )


def _create(config: ScratchStoreConfig, context: StoreContext) -> RequestStore:
    from tinsmith.sql_store.store import SqlStore

    link = DataDir(context.data_dir).scratch_store
    if not link.is_dir():
        msg = (
            f"store.plugin 'memory': no server runs on {str(context.data_dir)!r}, and such a store ends with its "
            "server; start one, or choose its directory with --data-dir"
        )
        raise ConfigError(msg)
    own = SqlStoreConfig(synchronous="off", max_value_bytes=config.max_value_bytes)
    return SqlStore(own, replace(context, data_dir=link.resolve()))


def _diagnose(config: ScratchStoreConfig, context: StoreContext) -> str:
    """Refuse a durable store's data directory: engines would remove what this store does not know."""
    if context.shared:
        msg = "server.share_data_dir: several servers cannot share a store in memory; set store.plugin to 'sql'"
        raise ConfigError(msg)
    if (kept := _of_a_durable_store(DataDir(context.data_dir))) is not None:
        msg = (
            f"store.plugin 'memory': {str(kept)!r} belongs to a server whose store is durable, and a store in memory "
            "knows nothing of what that one kept; choose an empty directory with --data-dir"
        )
        raise ConfigError(msg)
    return f"SQLite in {_parent(config)}: sessions, models, operations and results end with the server"


def _of_a_durable_store(data_dir: DataDir) -> Path | None:
    if data_dir.database.exists():
        return data_dir.database
    if data_dir.scratch_store.is_symlink():
        return None
    of_engines = data_dir.root / "recovery", data_dir.root / "snapshots"
    return next((each for each in of_engines if each.is_dir() and any(each.iterdir())), None)


@contextmanager
def _hold(config: ScratchStoreConfig, context: StoreContext) -> Iterator[None]:
    """Make the scratch directory, and a link to it by which engines and commands find it."""
    link, parent = DataDir(context.data_dir).scratch_store, _parent(config)
    try:
        made = Scratch(_PREFIX, parent)
    except OSError as error:
        msg = (
            f"store.directory: cannot make a directory in {str(parent)!r} ({error.strerror}); name one on a local disk"
        )
        raise ConfigError(msg) from error
    with made as scratch:
        link.unlink(missing_ok=True)
        link.symlink_to(scratch.path)
        yield


def _parent(config: ScratchStoreConfig) -> Path:
    if config.directory is not None:
        return config.directory.expanduser().absolute()
    is_roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ENOUGH_BYTES
    return _MEMORY if is_roomy else Path(tempfile.gettempdir())
