"""A sampler behind whose calls nothing is lost: they are watched, and whatever they raise reaches the engine."""

import logging
from functools import partial
from typing import Final

from tinsmith.backend import Capabilities, SamplingBackend, Snapshot
from tinsmith.engine.call_watch import CallWatch, Sizes
from tinsmith.engine.failures import guarded
from tinsmith.operations import Failed, Sample, SampleOutput
from tinsmith.result_checks import WrongResultError, check_sample

_log = logging.getLogger(__name__)

_LOAD, _DROP, _SAMPLE = "load_snapshot", "drop_snapshot", "sample"
CALLS: Final = (_LOAD, _DROP, _SAMPLE)


class GuardedSampler(SamplingBackend):
    def __init__(self, sampler: SamplingBackend, watch: CallWatch) -> None:
        self._sampler = sampler
        self._watch = watch

    @property
    def capabilities(self) -> Capabilities:
        return self._sampler.capabilities

    @property
    def trouble(self) -> str | None:
        return self._sampler.trouble

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        with self._watch.call(_LOAD):
            await guarded(partial(self._sampler.load_snapshot, snapshot))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        with self._watch.call(_DROP):
            await guarded(partial(self._sampler.drop_snapshot, snapshot_id))

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        """Draw. A result that the contract does not allow is a failure of its own request."""
        with self._watch.call(_SAMPLE, self._sizes(op, op.params.max_tokens)) as call:
            result = self._checked(op, await guarded(partial(self._sampler.sample, op)))
            call.did = {} if isinstance(result, Failed) else self._sizes(op, _longest(result))
            return result

    def _checked(self, op: Sample, result: SampleOutput | Failed) -> SampleOutput | Failed:
        try:
            check_sample(op, result, self.capabilities.vocab_size)
        except WrongResultError as error:
            msg = f"the sampler {type(self._sampler).__qualname__} breaks its contract: {error}"
            _log.error("%s", msg)
            return Failed(message=msg, category="server")
        return result

    def _sizes(self, op: Sample, drawn: int) -> Sizes:
        """Sequences are drawn side by side, as many as the sampler has places for."""
        rounds = -(-op.num_samples // self.capabilities.max_sequences)
        return {"steps": float(rounds * drawn), "prompt": float(len(op.prompt_P))}


def _longest(output: SampleOutput) -> int:
    return max((len(each.tokens) for each in output.sequences), default=0)
