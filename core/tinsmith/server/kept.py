"""Answers of the store for many requests, kept in memory: lasting ones, and ones read anew after a while."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, TypeVar

from tinsmith.store import EngineCapabilities, EngineRecord, EngineState, RequestStore, RunRecord

T = TypeVar("T")

_MOST: Final = 10_000  # a few megabytes
_KEPT_S: Final = 1.0
_KEPT_STARTING_S: Final = 0.1  # while an engine that somebody may wait for is not ready
_SHARE: Final = 20  # what is pending is read for at most this part of the time, however much it is
_ALIVE: Final = frozenset(EngineState) - {EngineState.RESTARTING, EngineState.FAILED, EngineState.STOPPED}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """The facts of a model that never change, from its creation until its session is forgotten."""

    model_id: str
    session_id: str
    tenant: str
    base_model: str

    @classmethod
    def of(cls, run: RunRecord) -> "KnownRun":
        return cls(model_id=run.model_id, session_id=run.session_id, tenant=run.tenant, base_model=run.base_model)


@dataclass(frozen=True, slots=True)
class KnownOwner:
    """What never changes of a session, or of an operation."""

    tenant: str


class Known(Generic[T]):
    """Looks each name up once; the one that nobody has asked for longest is looked up again.

    What has been deleted since is still found here, so whatever relies on it must ask the store as well.
    """

    def __init__(self, find: Callable[[str], Awaitable[T]], *, most: int = _MOST) -> None:
        """`find` raises NotFoundError for a name that does not exist, which is asked again."""
        self._find = find
        self._most = most
        self._found: OrderedDict[str, T] = OrderedDict()

    async def get(self, name: str, hidden: Callable[[T], bool] = lambda _: False) -> T:
        """`hidden`: whether the caller may not see what was found.

        Then the store is asked, as for a name that does not exist: the time of a refusal must not tell which it is.
        """
        found = self._found.get(name)
        if found is None or hidden(found):
            self.note(name, found := await self._find(name))
            return found
        self._found.move_to_end(name)
        return found

    def note(self, name: str, found: T) -> None:
        """Remember what need not be looked up at all."""
        self._found[name] = found
        if len(self._found) > self._most:
            self._found.popitem(last=False)


class Reading(Generic[T]):
    """A value that is read anew when it is old, once for all who ask meanwhile."""

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        kept_s: Callable[[T, float], float] = lambda _value, _took_s: _KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kept_s` returns for how long a value is kept; it takes the value, and the seconds that reading it took."""
        self._read = read
        self._kept_s = kept_s
        self._clock = clock
        self._value: T
        self._until_s = float("-inf")
        self._reading: asyncio.Task[T] | None = None

    @property
    def is_old(self) -> bool:
        return self._reading is None and self._clock() > self._until_s

    async def get(self) -> T:
        """Raises what reading it raises, for all who wait."""
        if self.is_old:
            self._reading = asyncio.create_task(self._read_anew())
        return self._value if self._reading is None else await asyncio.shield(self._reading)

    async def _read_anew(self) -> T:
        began = self._clock()
        try:
            self._value = await self._read()
        finally:
            self._reading = None
        ended = self._clock()
        self._until_s = ended + self._kept_s(self._value, ended - began)
        return self._value


def rarely(read: Callable[[], Awaitable[T]]) -> Reading[T]:
    """Return the reading of something for which the store reads every queued and running operation."""
    return Reading(read, lambda _found, took_s: max(_KEPT_S, _SHARE * took_s))


class Engines:
    """The last reports of the engines. An engine whose lease has run out is silent, whatever it reported last."""

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        self._reading = Reading(self._read, _kept_s)
        self._silent: set[str] = set()  # by engine_id, of those that the log names

    async def records(self) -> dict[str, EngineRecord]:
        return await self._reading.get()

    async def capabilities(self, base_model: str) -> EngineCapabilities | None:
        """Return None until the engine has reported them."""
        record = (await self.records()).get(base_model)
        return record.capabilities if record is not None else None

    async def _read(self) -> dict[str, EngineRecord]:
        overdue = await self._store.overdue_engines()
        records = {each.base_model: _as_it_is(each, overdue) for each in await self._store.list_engines()}
        self._log_silence(records)
        return records

    def _log_silence(self, records: Mapping[str, EngineRecord]) -> None:
        named = {record.engine_id: record for record in records.values() if record.engine_id is not None}
        for engine_id, record in named.items():
            if record.state is EngineState.SILENT and engine_id not in self._silent:
                self._silent.add(engine_id)
                _log.warning("the engine of %r is silent: %s", record.base_model, record.detail)
            elif record.state is not EngineState.SILENT and engine_id in self._silent:
                self._silent.discard(engine_id)
                _log.warning("the engine of %r is no longer silent: it is %s", record.base_model, record.state.value)
        self._silent &= named.keys()


def _kept_s(records: Mapping[str, EngineRecord], _took_s: float) -> float:
    return _KEPT_S if all(each.state is EngineState.READY for each in records.values()) else _KEPT_STARTING_S


def _as_it_is(record: EngineRecord, overdue: Mapping[str, float]) -> EngineRecord:
    """Replace the state of an engine that no longer renews its lease."""
    overdue_s = overdue.get(record.engine_id or "")
    if overdue_s is None or record.state not in _ALIVE:
        return record
    ran_out = datetime.now(UTC) - timedelta(seconds=overdue_s)
    detail = f"it gives no sign of life, and its lease ran out at {ran_out:%H:%M:%S} UTC"
    return replace(record, state=EngineState.SILENT, detail=detail, progress=None)
