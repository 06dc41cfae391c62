"""One interface for what differs between databases: connections, durability, and the channel for wake-ups."""

from abc import ABC, abstractmethod

from sqlalchemy import Connection, Engine

from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.databases.wakeups import WakeUps


class Dialect(ABC):
    """One database. Creating it does no I/O."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The database's name in messages, without a password."""

    @abstractmethod
    def visitor(self) -> Engine | None:
        """Return what connects without changing or waiting for anything; None if the database is yet to be made.

        Raise ConfigError if it can never be used.
        """

    @abstractmethod
    def version(self, connection: Connection) -> str:
        """Return the database's name and version."""

    @abstractmethod
    def reader(self) -> Database:
        """Make a connection for reading."""

    def glances(self) -> Connection | None:
        """Open a connection whose reads of a few rows never wait, so that they need no thread; None if they may."""
        return None

    @abstractmethod
    def writer(self, *, durable: bool) -> Database:
        """Make a connection whose commits are durable, or else only visible to every process at once.

        A durable commit also makes every commit before it durable. A commit that is not durable may be lost only
        together with every process that has seen it.
        """

    @abstractmethod
    def wakeups(self) -> WakeUps:
        """Make the channel to the other processes on this database."""
