"""What differs between databases, behind one interface: connections, durability, and the channel for wake-ups."""

from abc import ABC, abstractmethod

from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.databases.wakeups import WakeUps


class Dialect(ABC):
    """One database. Creating it does no I/O."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The database as messages may show it: no password."""

    @abstractmethod
    def reader(self) -> Database:
        """Make a connection for reading."""

    @abstractmethod
    def writer(self, *, durable: bool) -> Database:
        """Make a connection whose commits are durable, or only visible to every process at once.

        What a durable commit follows is durable with it. Commits that are not may be lost only together with every
        process that has seen them.
        """

    @abstractmethod
    def wakeups(self) -> WakeUps:
        """Make the channel to the other processes on this database."""
