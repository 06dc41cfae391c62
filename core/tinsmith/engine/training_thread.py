"""The one thread in which an engine calls its training backend."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tinsmith.engine.failures import BackendFailedError
from tinsmith.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


class TrainingThread:
    """Runs calls one after another, so that the event loop stays free while the device works."""

    def __init__(self, executor: ThreadPoolExecutor | None = None) -> None:
        """`executor` has one worker, the thread in which the backend was created. By default, start one."""
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in the thread. Pass a UserError on; wrap any other exception in BackendFailedError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))
        except UserError:
            raise
        except Exception as error:
            msg = f"{type(error).__name__}: {error}"
            raise BackendFailedError(msg) from error
