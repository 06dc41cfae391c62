"""A cache of facts from the store that never change."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tinsmith.store import RunRecord

T = TypeVar("T")

_MOST: Final = 10_000  # a few megabytes


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
class KnownSession:
    """The facts of a session that never change."""

    tenant: str


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """The facts of an operation that never change."""

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

    async def get(self, name: str) -> T:
        if name not in self._found:
            self.note(name, found := await self._find(name))
            return found
        self._found.move_to_end(name)
        return self._found[name]

    def note(self, name: str, found: T) -> None:
        """Remember what need not be looked up at all."""
        self._found[name] = found
        if len(self._found) > self._most:
            self._found.popitem(last=False)
