"""Counters and timings of a process: for `/metrics`, the page, and the summary in the log.

An engine reports its figures to the store every few seconds while they change, and a server shows all engines' figures
beside its own. They start from zero when the process starts, as counters of Prometheus may.
"""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

_TIMES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOST_CALLS: Final = 1024
_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_SHARES: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A counter, or with `buckets` a histogram. On `/metrics` its name begins with `tinsmith_`.

    The values of labels come from small sets that no client can extend.
    """

    name: str  # with the unit last, and without the `_total` of a counter
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, ascending; a further bucket holds larger values


OPERATION_SECONDS: Final = Figure(
    name="operation_seconds",
    help="time from an operation's arrival until its result was recorded",
    labels=("kind", "outcome"),
    buckets=_TIMES_S,
)
OPERATION_RUN_SECONDS: Final = Figure(
    name="operation_run_seconds",
    help="part of that in the backend, shared by everything in the batch",
    labels=("kind",),
    buckets=_TIMES_S,
)
FIRST_TOKEN_SECONDS: Final = Figure(
    name="first_token_seconds",
    help="time from a sampler's receipt of a request until it had drawn the first token",
    buckets=_TIMES_S,
)
BATCH_OPERATIONS: Final = Figure(
    name="batch_operations", help="operations that ran together", labels=("kind",), buckets=_SIZES
)
BATCH_FILL: Final = Figure(
    name="batch_fill_ratio", help="tokens of a batch of passes, of as many as the trainer takes", buckets=_SHARES
)
PASS_TOKENS: Final = Figure(
    name="pass_tokens",
    help="tokens that the device computed in passes: of sequences, and of padding",
    labels=("of",),
)
TOKENS: Final = Figure(
    name="tokens",
    help="tokens of operations that succeeded: trained, prefilled (prompts, passes without a gradient) and sampled",
    labels=("of",),
)
PREFIX_TOKENS: Final = Figure(
    name="prefix_tokens", help="tokens of sampled prompts, by whether the cache held them", labels=("cache",)
)
COMPILATIONS: Final = Figure(name="compilations", help="programs that were compiled")
COMPILATION_SECONDS: Final = Figure(name="compilation_seconds", help="seconds that compiling them took")
RECOVERY_SECONDS: Final = Figure(
    name="recovery_seconds", help="time that an engine took at its start to rebuild its models", buckets=_TIMES_S
)
PLACE_SECONDS: Final = Figure(
    name="place_seconds",
    help="time in which an idle model was parked, or a parked one was brought back",
    labels=("move",),
    buckets=_TIMES_S,
)
COMMIT_SECONDS: Final = Figure(
    name="store_commit_seconds", help="time of a transaction that writes, its commit included", buckets=_TIMES_S
)
COMMIT_WRITES: Final = Figure(name="store_commit_writes", help="writes that shared a transaction", buckets=_SIZES)

FIGURES: Final = (
    OPERATION_SECONDS,
    OPERATION_RUN_SECONDS,
    FIRST_TOKEN_SECONDS,
    BATCH_OPERATIONS,
    BATCH_FILL,
    PASS_TOKENS,
    TOKENS,
    PREFIX_TOKENS,
    COMPILATIONS,
    COMPILATION_SECONDS,
    RECOVERY_SECONDS,
    PLACE_SECONDS,
    COMMIT_SECONDS,
    COMMIT_WRITES,
)


class Series(msgspec.Struct, frozen=True, array_like=True):
    """The values of one figure and one set of labels."""

    name: str
    labels: tuple[str, ...]
    total: float  # of a counter; of a histogram the sum of the observations
    counts: tuple[int, ...] = ()  # of a histogram: how many fell into each bucket, the one without a bound last


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    """A GPU of a host, as its driver tells. `utilisation` is the part of the last second in which it computed."""

    uuid: str
    number: int
    name: str
    utilisation: float | None  # 0 to 1; None: the driver does not tell
    used_bytes: int
    total_bytes: int


class Interface(msgspec.Struct, frozen=True, array_like=True):
    """A network interface of a host, and its traffic since the host started."""

    name: str
    received_bytes: int
    sent_bytes: int


class HostReport(msgspec.Struct, frozen=True, array_like=True):
    """Resource use of a process, or of several on one host, and of the host's GPUs and network."""

    host: str
    resident_bytes: int
    cpu_s: float
    gpus: tuple[Gpu, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    processes: int = 1


class MemoryPlan(msgspec.Struct, frozen=True, array_like=True):
    """What trainer and sampler of an engine were to take of memory when it started, on all of their devices."""

    parts: tuple[tuple[str, int], ...]  # bytes by purpose, with as many models as there are places
    total: int  # of trainer and sampler that take turns, the larger
    limit: int | None  # all that they may take; None: not known
    devices: tuple[str, ...] = ()  # numbers or UUIDs of GPUs of this machine; none: the memory is the machine's


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What an engine reports."""

    series: tuple[Series, ...]
    host: HostReport
    workers: tuple[HostReport, ...] = ()  # the engine's workers, one report for each host
    memory: MemoryPlan | None = None  # None: nothing was planned


class WorkerTime(NamedTuple):
    rank: int
    host: str
    took_s: float  # by the worker's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """A call of an engine's workers, as the engine saw it."""

    method: str
    began_at: datetime
    workers: tuple[WorkerTime, ...]


def _together(reports: Sequence[HostReport]) -> HostReport:
    """Join the reports of processes of one host, of which one reports its GPUs and network."""
    return HostReport(
        reports[0].host,
        sum(each.resident_bytes for each in reports),
        sum(each.cpu_s for each in reports),
        next((each.gpus for each in reports if each.gpus), ()),
        next((each.interfaces for each in reports if each.interfaces), ()),
        len(reports),
    )


class Figures:
    """The figures of one process. Thread-safe; counting takes a few microseconds."""

    def __init__(self) -> None:
        self.memory: MemoryPlan | None = None
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        self._workers: dict[tuple[str, int], HostReport] = {}  # by host and process id
        self._calls: deque[WorkerCall] | None = None  # None: nobody asks for them
        for figure in FIGURES:
            if not figure.labels:  # a series that is there from the start shows its first change
                self._totals[figure.name, ()] = 0.0
                if figure.buckets:
                    self._counts[figure.name, ()] = [0] * (len(figure.buckets) + 1)

    def count(self, figure: Figure, amount: float, *labels: str) -> None:
        """Add to a counter."""
        key = figure.name, labels
        with self._lock:
            self._totals[key] = self._totals.get(key, 0.0) + amount

    def observe(self, figure: Figure, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        key, at = (figure.name, labels), bisect_left(figure.buckets, value)
        with self._lock:
            self._totals[key] = self._totals.get(key, 0.0) + value
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(figure.buckets) + 1)
            counts[at] += 1

    # What backends and samplers may tell:

    def compiled(self, took_s: float) -> None:
        """Count a program that was compiled."""
        self.count(COMPILATIONS, 1)
        self.count(COMPILATION_SECONDS, took_s)

    def computed(self, *, tokens: int, padding: int) -> None:
        """Count tokens that the device computed in a pass: sequences' tokens, and others."""
        self.count(PASS_TOKENS, tokens, "sequences")
        self.count(PASS_TOKENS, padding, "padding")

    def drew_first(self, after_s: float) -> None:
        """Count a sample that has its first token, `seconds` after the sampler received it."""
        self.observe(FIRST_TOKEN_SECONDS, after_s)

    def keep_calls(self) -> None:
        """Keep the newest calls of workers from now on, for a tracer."""
        self._calls = deque(maxlen=_MOST_CALLS)

    def workers_called(self, method: str, began_at: datetime, workers: Iterable[WorkerTime]) -> None:
        """Note a call that all workers have answered, if calls are kept."""
        if self._calls is not None:
            with self._lock:
                self._calls.append(WorkerCall(method=method, began_at=began_at, workers=tuple(workers)))

    def calls_between(self, start: datetime, end: datetime) -> tuple[WorkerCall, ...]:
        """Return the calls that began then, and forget them and all before."""
        found: list[WorkerCall] = []
        with self._lock:
            while self._calls and self._calls[0].began_at <= end:
                found.append(self._calls.popleft())
        return tuple(each for each in found if each.began_at >= start)

    def worker_reported(self, pid: int, report: HostReport) -> None:
        """Keep the newest report of a worker process."""
        with self._lock:
            self._workers[report.host, pid] = report

    def workers_ended(self, pids: Iterable[tuple[str, int]]) -> None:
        """Forget workers, by host and process id."""
        with self._lock:
            for each in pids:
                self._workers.pop(each, None)

    def workers(self) -> tuple[HostReport, ...]:
        """Return one report for each host that has workers, by name."""
        with self._lock:
            reports = list(self._workers.values())
        hosts = sorted({each.host for each in reports})
        return tuple(_together([each for each in reports if each.host == host]) for host in hosts)

    def total(self, figure: Figure, *labels: str) -> float:
        with self._lock:
            return self._totals.get((figure.name, labels), 0.0)

    def series(self) -> tuple[Series, ...]:
        """Return all values, of one moment."""
        with self._lock:
            return tuple(
                Series(name, labels, total, tuple(self._counts.get((name, labels), ())))
                for (name, labels), total in self._totals.items()
            )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode_report(report: Report) -> bytes:
    return _encoder.encode(report)


def decode_report(encoded: bytes) -> Report | None:
    """Return None for one that another release wrote in another form."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError:
        return None
