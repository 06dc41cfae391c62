"""An event loop in a thread of its own, for harnesses."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

_CALL_TIMEOUT_S: Final = 600.0  # on any machine, only a hanging call takes this long
_STOP_TIMEOUT_S: Final = 300.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    @classmethod
    @contextmanager
    def running(cls, name: str) -> Iterator["LoopThread"]:
        self = cls()
        thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.call(self.loop.shutdown_asyncgens())
            self.call(self.loop.shutdown_default_executor())
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join(_STOP_TIMEOUT_S)
            self.loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_CALL_TIMEOUT_S)
