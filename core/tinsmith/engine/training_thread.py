"""The one thread in which an engine calls its training backend."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from tinsmith import operations as ops
from tinsmith.engine.call_watch import CallWatch, Sizes
from tinsmith.engine.device_turns import DeviceTurns, submit_in_turn
from tinsmith.engine.failures import BackendFailedError, backend_failed, contained
from tinsmith.errors import UserError
from tinsmith.settings import WatchdogSettings

P = ParamSpec("P")
T = TypeVar("T")

_PROBES: Final = "scoring of probes"


class TrainingThread:
    """Runs calls one after another, so that the event loop stays free while the device works."""

    def __init__(
        self,
        executor: ThreadPoolExecutor | None = None,
        turns: DeviceTurns | None = None,
        watch: CallWatch | None = None,
    ) -> None:
        """`executor` has one worker, the thread in which the backend was created. By default, start one.

        Each call waits for a turn of training, if there are `turns`. While one runs, it is watched.
        """
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")
        self._turns = turns
        self._watch = watch or CallWatch(WatchdogSettings())

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a call of `function` at once, ahead of every later call. Await its result.

        A UserError is passed on; any other exception of it is wrapped in BackendFailedError.
        """
        call = contained(partial(self._watched, function, *args, **kwargs))
        if self._turns is None:
            running = asyncio.get_running_loop().run_in_executor(self._executor, call)
        else:
            running = submit_in_turn(self._turns, self._executor, call)
        return asyncio.ensure_future(_result(running))

    def _watched(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._watch.call(getattr(function, "__name__", _PROBES), _sizes(args)):
            return function(*args, **kwargs)


def _sizes(arguments: Sequence[object]) -> Sizes:
    """Measure a call: the tokens of a batch, or its number of operations."""
    batch = arguments[0] if arguments else None
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        return {"calls": 1.0}
    tokens = sum(each.num_tokens for each in batch if isinstance(each, ops.ForwardBackward))
    return {"tokens": float(tokens)} if tokens else {"operations": float(len(batch))}


async def _result(running: asyncio.Future[T]) -> T:
    try:
        return await running
    except (UserError, BackendFailedError):
        raise
    except Exception as error:
        raise backend_failed(error) from error
