"""A request store: the SQL store, with its database in a directory of its own.

SQLite wants a local disk; checkpoints may lie on a shared one.
"""

from pathlib import Path

from pydantic import Field

import tinsmith
from tinsmith.stores import SqlStore, SqlStoreConfig, StoreContext, StoreSpec


class SkeletonConfig(SqlStoreConfig):
    directory: Path | None = Field(None, description="directory of the database; default: the data directory")


class SkeletonStore(SqlStore):
    def __init__(self, config: SkeletonConfig, context: StoreContext) -> None:
        self._directory = config.directory or context.data_dir
        super().__init__(config, StoreContext(data_dir=self._directory))

    async def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)  # here: creating a store does no I/O
        await super().open()


@tinsmith.hookimpl
def tinsmith_register_stores() -> StoreSpec[SkeletonConfig]:
    return StoreSpec(
        name="skeleton",
        config=SkeletonConfig,
        create=SkeletonStore,
        description="SQLite in a directory of its own",
    )
