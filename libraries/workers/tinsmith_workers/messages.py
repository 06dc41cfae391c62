"""Messages between the engine and its workers. They are pickled, so only peers with the key may send them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith.figures import HostReport

# Any below: arguments and results of the program's methods.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a worker."""

    version: str  # of tinsmith
    host: str
    pid: int
    meeting: tuple[str, int]  # where the workers meet if this one becomes rank 0
    index: int | None  # the rank that its starter has chosen; None: any
    num_workers: int | None  # how many there are, if its starter knows
    code: Mapping[str, str]  # a digest of the source of each package that may hold the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The first message of the engine, after all workers have joined."""

    program: str
    rank: int
    num_workers: int
    local_rank: int  # among the workers of the same host
    local_size: int
    meeting: tuple[str, int]  # a host and port that rank 0 keeps free for the framework's own rendezvous


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine's answer to a worker that it does not take."""

    message: str


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the program, by name."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a method, how long it took, and now and then what its worker and its host use."""

    value: Any
    took_s: float = 0.0
    usage: HostReport | None = None


@dataclass(frozen=True, slots=True)
class ProgressMade:
    stage: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The last message of a worker. `config`: the configuration is at fault, so there is no traceback."""

    message: str
    config: bool = False
