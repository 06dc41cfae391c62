"""The connections of one store."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.errors import StoreError
from tinsmith.sql_store.choose import dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.group_commit import Reader, Writer
from tinsmith.sql_store.migrate import Schema, migrate
from tinsmith.sql_store.packages import Packages
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import StoreContext

T = TypeVar("T")


class Connections:
    """What every subject of the store works with.

    `durable` is for what a client or another operation relies on. `relaxed` is for what a power cut may undo, because
    it undoes what depends on it as well: claims of an engine, its state, heartbeats.
    """

    durable: Writer[Transaction]
    relaxed: Writer[Transaction]
    reader: Reader

    def __init__(self, config: SqlStoreConfig, context: StoreContext) -> None:
        """Does no I/O."""
        self._dialect = dialect_of(config, context)
        self._max_readers = config.max_readers
        self._figures = context.figures
        self.wakeups = self._dialect.wakeups()
        self._databases: list[Database] = []
        self._glances: Connection | None = None
        self._schemas = [Schema.of(name, tables) for name, tables in context.tables.items()]
        self._packages = Packages.of(context.tables.values())

    async def open(self) -> None:
        durable, relaxed = await self._migrated(), self._dialect.writer(durable=False)
        readers = [self._dialect.reader() for _ in range(self._max_readers)]
        self._databases = [durable, relaxed, *readers]
        begin = partial(Transaction, packages=self._packages)
        self.durable = Writer(durable, self.wakeups, begin, self._figures)
        self.relaxed = Writer(relaxed, self.wakeups, begin, self._figures)
        self.reader = Reader(readers)
        self._glances = self._dialect.glances()
        await self.wakeups.open()
        for each in (self.durable, self.relaxed, self.reader):
            each.open()

    async def _migrated(self) -> Database:
        """Return the connection for durable writes, to a database with the newest schema."""
        durable = self._dialect.writer(durable=True)
        try:
            await durable.migrate(partial(migrate, name=self._dialect.name, packages=self._schemas))
        except (SQLAlchemyError, OSError) as error:
            await durable.close()
            msg = f"cannot open the database {self._dialect.name!r}: {error}"
            raise StoreError(msg) from error
        except BaseException:
            await durable.close()
            raise
        return durable

    async def close(self) -> None:
        """Run the calls that wait, then close."""
        self.wakeups.unsubscribe()
        if self._glances is not None:
            self._glances.engine.dispose()
            self._glances = None
        for each in (self.durable, self.relaxed, self.reader):
            await each.close()
        for database in self._databases:
            await database.close()
        await self.wakeups.close()

    def glance(self, look: Callable[[Connection, str], T | None], name: str) -> T | None:
        """Look something small up at once: the way to a reader's thread and back takes much longer. None: ask a reader.

        It sees everything that was committed before, as a reader does. `look` may raise that there is nothing.
        """
        if self._glances is None:
            return None
        try:
            return look(self._glances, name)
        except SQLAlchemyError:
            return None  # the reader reports the error
