"""The calls of trainer and sampler: watched, in their turn, and whatever they raise reaches the engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Never, ParamSpec, TypeVar

from tinsmith import operations as ops
from tinsmith.backend import OnTokens, SamplerCapabilities, SamplingBackend, Snapshot, TrainerCapabilities
from tinsmith.engine.call_watch import ONE_CALL, CallWatch, Sizes, Watched
from tinsmith.engine.device_turns import DeviceTurns, submit_in_turn
from tinsmith.engine.failures import BackendFailedError, backend_failed, contained, guarded
from tinsmith.errors import UserError
from tinsmith.operations import Failed, Sample, SampleOutput
from tinsmith.result_checks import WrongResultError, check_sample
from tinsmith.settings import WatchdogSettings

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_PROBES: Final = "scoring of probes"
_LOAD, _DROP, _MOVE, _SAMPLE = "load_snapshot", "drop_snapshot", "move_samples", "sample"

SAMPLER_CALLS: Final = (_LOAD, _DROP, _MOVE, _SAMPLE)


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
        return ONE_CALL
    tokens = sum(each.num_tokens for each in batch if isinstance(each, ops.ForwardBackward))
    return {"tokens": float(tokens)} if tokens else {"operations": float(len(batch))}


async def _result(running: asyncio.Future[T]) -> T:
    try:
        return await running
    except (UserError, BackendFailedError):
        raise
    except Exception as error:
        raise backend_failed(error) from error


@dataclass(frozen=True, slots=True)
class WatchedSampler(SamplingBackend):
    """A sampler behind whose calls nothing is lost. Each waits for a turn of sampling, if there are `turns`."""

    sampler: SamplingBackend
    watch: CallWatch
    turns: DeviceTurns | None = None

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self.sampler.sampler_capabilities

    @property
    def trouble(self) -> str | None:
        return self.sampler.trouble

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        async with self._call(_LOAD):
            await guarded(partial(self.sampler.load_snapshot, snapshot))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        async with self._call(_DROP):
            await guarded(partial(self.sampler.drop_snapshot, snapshot_id))

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        async with self._call(_MOVE):
            await guarded(partial(self.sampler.move_samples, snapshot_id, newer_id))

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        """Draw. A result that the contract does not allow is a failure of its own request."""
        return await self._drawn(op, partial(self.sampler.sample, op))

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        return await self._drawn(op, partial(self.sampler.sample_streaming, op, on_tokens))

    async def _drawn(
        self, op: Sample, draw: Callable[[], Coroutine[Any, Any, SampleOutput | Failed]]
    ) -> SampleOutput | Failed:
        async with self._call(_SAMPLE, self._sizes(op, op.params.max_tokens)) as call:
            result = self._checked(op, await guarded(draw))
            call.did = {} if isinstance(result, Failed) else self._sizes(op, _longest(result))
            return result

    @asynccontextmanager
    async def _call(self, kind: str, sizes: Sizes = ONE_CALL) -> AsyncIterator[Watched]:
        """Watch a call from when its turn has come."""
        if self.turns is None:
            with self.watch.call(kind, sizes) as call:
                yield call
            return
        async with self.turns.turn("sampling"):
            with self.watch.call(kind, sizes) as call:
                yield call

    def _checked(self, op: Sample, result: SampleOutput | Failed) -> SampleOutput | Failed:
        try:
            check_sample(op, result, self.sampler_capabilities.vocab_size)
        except WrongResultError as error:
            msg = f"the sampler {type(self.sampler).__qualname__} breaks its contract: {error}"
            _log.error("%s", msg)
            return Failed(message=msg, category="server")
        return result

    def _sizes(self, op: Sample, drawn: int) -> Sizes:
        """Sequences are drawn side by side, as many as the sampler has slots for."""
        rounds = -(-op.num_samples // self.sampler_capabilities.max_sequences)
        return {"steps": float(rounds * drawn), "prompt": float(len(op.prompt_P))}


def _longest(output: SampleOutput) -> int:
    return max((len(each.tokens) for each in output.sequences), default=0)


@dataclass(frozen=True, slots=True)
class NoSampler(SamplingBackend):
    """Stands in for the sampler of a base model that can only be trained. Samples and ephemeral saves are refused."""

    trainer: TrainerCapabilities

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        """Claim nothing."""
        return SamplerCapabilities(
            vocab_size=self.trainer.vocab_size, max_context_tokens=self.trainer.max_context_tokens
        )

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        raise AssertionError(snapshot.snapshot_id)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        """There is none to drop."""

    async def sample(self, op: Sample) -> Never:
        raise AssertionError(op.sampling_session_id)
