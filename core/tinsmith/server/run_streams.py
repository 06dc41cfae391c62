"""The newest steps of runs, as they come: one reader for each run, however many streams show it.

The reader looks for what has changed and encodes it once, at most twice a second, and every stream sends these bytes.
All readers together take a twentieth of the server's time, however much they have to read.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import orjson

from tinsmith.errors import TinsmithError
from tinsmith.server.run_views import Step, finite, joined, read_measured
from tinsmith.stopping import unless_stopped
from tinsmith.store import RequestStore, RunRecord
from tinsmith_checkpoints.values import Json

_log = logging.getLogger(__name__)

STREAM_S: Final = 60.0
"""Then the stream ends: its reader asks again, and its key or link is checked again."""
_TAIL: Final = 64  # steps before the newest one that are looked at for changes
LEAST_S: Final = 0.5  # between two events of a run
_SHARE: Final = 20
_MOST_WAITING: Final = 32  # events that a slow client may leave unread; then its stream ends, and it asks again

Queue = asyncio.Queue[bytes | None]
"""Events, and None at the end."""


class RunStreams:
    """One per app, for the event loop."""

    def __init__(self, store: RequestStore, stopping: asyncio.Event) -> None:
        """When `stopping` is set, all streams end."""
        self._store = store
        self._stopping = stopping
        self._readers: dict[str, _Reader] = {}

    def __len__(self) -> int:
        """Return how many runs are read at this moment."""
        return len(self._readers)

    async def events(self, runs: Sequence[RunRecord]) -> AsyncIterator[bytes]:
        """Yield server-sent events for a minute: first the newest steps, then what changes."""
        queue: Queue = asyncio.Queue(_MOST_WAITING)
        until = asyncio.get_running_loop().time() + STREAM_S
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(self._listening(run, queue))
            while (event := await _next(queue, until)) is not None:
                yield event

    @contextmanager
    def _listening(self, run: RunRecord, queue: Queue) -> Iterator[None]:
        reader = self._readers.get(run.model_id)
        if reader is None:
            reader = self._readers[run.model_id] = _Reader(run)
            reader.task = asyncio.create_task(self._read(reader), name=f"stream of {run.model_id}")
        reader.add(queue)
        try:
            yield
        finally:
            reader.queues.discard(queue)
            if not reader.queues:
                self._forget(reader)

    def _forget(self, reader: "_Reader") -> None:
        if self._readers.get(reader.model_id) is reader:
            del self._readers[reader.model_id]
        if reader.task is not None:
            reader.task.cancel()

    async def _read(self, reader: "_Reader") -> None:
        """Follow a run until nobody listens any more, the run is gone, or the server stops."""
        known = -1
        try:
            while True:
                waiting = self._store.wait_for_metrics(reader.model_id, known=known, timeout_s=STREAM_S)
                written = await unless_stopped(self._stopping, waiting)
                if written is None:
                    return
                if written > known:
                    known = written
                    rows = await read_measured(self._store, reader.model_id, max(reader.newest - _TAIL, 0))
                    began_s = time.perf_counter()
                    reader.take(joined(rows)[-_TAIL - 1 :])
                    took_s = time.perf_counter() - began_s
                    await asyncio.sleep(max(LEAST_S, _SHARE * took_s * len(self._readers)))
        except TinsmithError as error:  # whoever listens asks again, and learns why
            _log.debug("the streams of %s end: %s", reader.model_id, error)
        except Exception:  # noqa: BLE001 - logged: nobody waits for this task
            _log.exception("the streams of %s end", reader.model_id)
        finally:
            for queue in reader.queues:
                _end(queue)
            reader.queues.clear()
            self._forget(reader)


class _Reader:
    """What is known of a run, and who listens."""

    def __init__(self, run: RunRecord) -> None:
        self.model_id = run.model_id
        self.newest = run.steps
        self.queues: set[Queue] = set()
        self.task: asyncio.Task[None] | None = None
        self._points: dict[int, Json] = {}
        self._whole: bytes | None = None  # the event with all points, for whoever comes next

    def add(self, queue: Queue) -> None:
        """Tell a newcomer what is there."""
        self.queues.add(queue)
        if self._points:
            if self._whole is None:
                self._whole = self._event(list(self._points.values()))
            _put(queue, self._whole)

    def take(self, steps: Sequence[Step]) -> None:
        """Tell everybody what has changed."""
        points = {step[0]: _point(step) for step in steps}
        changed = [point for step, point in points.items() if self._points.get(step) != point]
        self.newest, self._points = max(self.newest, *points, 0), points
        if changed:
            self._whole = None
            event = self._event(changed)
            for queue in self.queues:
                _put(queue, event)

    def _event(self, points: Sequence[Json]) -> bytes:
        content: Mapping[str, Json] = {"run_id": self.model_id, "points": list(points)}
        return b"data: " + orjson.dumps(content) + b"\n\n"


async def _next(queue: Queue, until: float) -> bytes | None:
    try:
        async with asyncio.timeout_at(until):
            return await queue.get()
    except TimeoutError:
        return None


def _put(queue: Queue, event: bytes) -> None:
    """A client that does not read makes the server keep nothing more for it."""
    if queue.full():
        _end(queue)
    else:
        queue.put_nowait(event)


def _end(queue: Queue) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)


def _point(step: Step) -> Json:
    number, at, values = step
    return {
        "step": number,
        "time": at.timestamp(),
        "values": {name: finite(value) for name, value in values.items()},
    }
