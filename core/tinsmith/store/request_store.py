"""The request store's interface: the durable log of operations, and the few tables around it.

Server and engine share nothing else. A store is asynchronous: its waits are driven by events, and what it acknowledges
is durable. One `RequestStore` object belongs to one process; several processes open the same database.

An operation is submitted (queued), claimed (running) and completed (succeeded or failed). Operations that are `ordered`
address a model and are claimed in seq_id order without gaps. Operations of a sampling session have no order; their
seq_ids only have to be unique within it.

The methods are grouped by reader, with a file for each group; `RequestStore` is all of them together.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from tinsmith.backend import BackendConfig
from tinsmith.figures import Figures
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.engine_log import EngineLog
from tinsmith.store.engine_states import EngineStates
from tinsmith.store.leases import Leases
from tinsmith.store.log_inspection import LogInspection
from tinsmith.store.metrics import Metrics
from tinsmith.store.model_places import ModelPlaces
from tinsmith.store.recovery import Recovery
from tinsmith.store.routed_experts import RoutedExperts
from tinsmith.store.runs import Runs
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.server_log import ServerLog
from tinsmith.store.sessions import Sessions
from tinsmith.store.token_streams import TokenStreams
from tinsmith.store.usage import UsageLog


class RequestStore(
    Sessions,
    Runs,
    SamplingSessions,
    Checkpoints,
    ServerLog,
    EngineLog,
    ModelPlaces,
    LogInspection,
    Leases,
    Recovery,
    EngineStates,
    UsageLog,
    RoutedExperts,
    Metrics,
    TokenStreams,
):
    """Every method may be called concurrently from the process's event loop.

    Methods raise NotFoundError for an id that does not exist, and StoreError if the database cannot be reached.
    """

    @property
    @abstractmethod
    def max_value_bytes(self) -> int:
        """The largest payload or result that the store can hold, as `codec` encodes it.

        Servers refuse an operation whose payload is larger, or whose result could be. Engines record a failure in
        place of a result that is larger. So `submit` and `complete` are never asked to store more.
        """

    @abstractmethod
    async def open(self) -> None:
        """Connect, migrate to the newest schema, and listen for wake-ups."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def secret(self, name: str) -> bytes:
        """Return the 32 random bytes of that name, which are the same for every process on this database."""

    @abstractmethod
    async def expect_writes(self) -> None:
        """Raise StoreError if the last write failed, and a small one fails now."""

    @abstractmethod
    async def prune(self, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
        """Delete operations that finished before then, with payloads and results. Return how many.

        Whatever the recovery of a live model could need is kept: the operations after its oldest recovery point, or
        all of them if it has none. With `idle_since`, the whole log of a model is kept if a request for it has arrived
        since then. When this returns, deleted content must be unreadable in the database's files, as far as the
        database can guarantee that.
        """


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContext:
    data_dir: Path
    shared: bool = False  # other servers use the directory, and this store, at the same time
    figures: Figures = field(default_factory=Figures)  # of this process: a store may time its commits there


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(Generic[C]):
    """An offer of a store. `create` does no I/O; `open` does."""

    name: str
    config: type[C]
    create: Callable[[C, StoreContext], RequestStore]
    description: str = ""
    in_process: bool = False
    """Whether only the process that makes the store can open it.

    Then the server runs its engine in a thread, serves one base model and ends with it, and no other command can read
    what it keeps.
    """
    diagnose: Callable[[C, StoreContext], str] | None = None
    """Look at the store without changing it, before each start of a server and for `tinsmith doctor`.

    Return what it is and how it does, in a line. Raise ConfigError if it cannot be opened as configured, StoreError if
    it cannot be reached for now.
    """
