"""The contract of abuse in sampling: no request that the checks let pass hurts others, or shows what they asked.

Attackers send every number at every extreme that `check_sample_operation` lets pass, beside neighbours whose answers
must not change, and sample from adapters that are not numbers.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from tinsmith.backend import SamplerCapabilities, SamplingBackend, Snapshot
from tinsmith.checks import check_sample_operation
from tinsmith.errors import CapacityError, OutOfMemoryError, UserError
from tinsmith.operations import Array, Failed, Sample, SampledSequence, SampleOutput
from tinsmith.testing.abuse_sampling_cases import GROUPS, Case, cases_of
from tinsmith.testing.abuse_tally import Tally
from tinsmith.testing.abuse_training import same_numbers
from tinsmith.testing.sampling_suite import (
    SamplingSuite,
    Shapes,
    in_one_loop,
    params,
    random_prompt,
    random_snapshot,
    with_tokens,
)

_AT_A_TIME = 8
_sessions = count()
_REFUSALS = (UserError, CapacityError, OutOfMemoryError)


class SamplingAbuseContract(SamplingSuite):
    long_form = False
    """Set this in a test that may take minutes: more values are tried, and each case alone as well."""
    random_cases = 24
    """How many random combinations are tried. Raise this there, too."""

    def processes(self, backend: SamplingBackend) -> object:
        """Override if the backend replaces processes that died: return what tells them apart, as their ids."""
        del backend
        return None

    @pytest.fixture
    def shapes_if_any(self, request: pytest.FixtureRequest) -> Shapes | None:
        """None if the suite cannot make adapters: then only the base model is attacked."""
        try:
            shapes: Shapes = request.getfixturevalue("adapter_shapes")
        except pytest.skip.Exception:
            return None
        return shapes

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of numbers that have become infinite or NaN
    @pytest.mark.parametrize("group", GROUPS)
    @in_one_loop
    async def test_abuse_in_sampling_hurts_nobody(
        self,
        backend: SamplingBackend,
        shapes_if_any: Shapes | None,
        group: str,
        record_property: Callable[[str, object], None],
    ) -> None:
        cases = list(cases_of(backend.sampler_capabilities, shapes_if_any, group, self.random_cases))
        tally = Tally(group=f"sampling: {group}", cases=len(cases))
        before = self.processes(backend)
        snapshot = None if shapes_if_any is None else random_snapshot(shapes_if_any, seed=72)
        neighbours = _Neighbours(backend, snapshot, tally)
        await neighbours.settle()
        for start in range(0, len(cases), _AT_A_TIME):
            await _attack(backend, cases[start : start + _AT_A_TIME], neighbours, tally)
        await neighbours.leave()
        for case in cases if self.long_form else ():
            await _attack(backend, [case], None, tally)
        if self.processes(backend) != before:
            tally.deaths.append(f"processes {before}, of which there are {self.processes(backend)} now")
        tally.report(self, record_property)

    @in_one_loop
    async def test_what_others_asked_does_not_show(
        self, backend: SamplingBackend, shapes_if_any: Shapes | None
    ) -> None:
        """In no field: a prompt that another session has asked about is answered like a new one.

        If cached prompts were shared, somebody who guesses a prompt block by block would see which guess is right.
        """
        snapshot = None if shapes_if_any is None else random_snapshot(shapes_if_any, seed=62)
        if snapshot is not None:
            await backend.load_snapshot(snapshot)
        for snapshot_id in (None, *([snapshot.snapshot_id] if snapshot is not None else [])):
            await _look_for_a_secret(backend, snapshot_id)
        if snapshot is not None:
            await backend.drop_snapshot(snapshot.snapshot_id)


async def _look_for_a_secret(backend: SamplingBackend, snapshot_id: str | None) -> None:
    """Ask about a prompt, and about one that begins like it, before and after somebody else has."""
    length = min(400, backend.sampler_capabilities.max_context_tokens - 8)
    secret, other = (random_prompt(63 + n, length, backend.sampler_capabilities.vocab_size) for n in range(2))
    guesses = (secret, with_tokens(secret[: length // 2], other[length // 2 :]))
    ask = Sample(sampling_session_id="", snapshot_id=snapshot_id, prompt_P=secret, params=params(max_tokens=2))

    async def answers() -> list[SampleOutput]:
        found = []
        for guess in guesses:
            answer = await backend.sample(replace(ask, prompt_P=guess, sampling_session_id=_new_session()))
            assert isinstance(answer, SampleOutput), answer
            found.append(answer)
        return found

    before, victim = await answers(), replace(ask, sampling_session_id=_new_session())
    for _ in range(2):  # the second time it may be in the victim's cache
        await backend.sample(victim)
    after = await answers()
    hits = [answer.prompt_cache_hit_tokens for answer in (*before, *after)]
    assert not any(hits), f"prompt_cache_hit_tokens are {hits} for prompts that only other sessions have asked about"
    for found, expected in zip(after, before, strict=True):
        changes = _changed_fields(backend.sampler_capabilities, found, expected)
        assert not changes, f"another session's prompt has changed {changes}"


# Attacks --------------------------------------------------------------------------------------------------------------


class _Neighbours:
    """Requests whose answers must be the same in any company."""

    def __init__(self, backend: SamplingBackend, snapshot: Snapshot | None, tally: Tally) -> None:
        self._backend, self._snapshot, self._tally = backend, snapshot, tally
        vocab_size, scores = backend.sampler_capabilities.vocab_size, backend.sampler_capabilities.prompt_logprobs
        plain = Sample(
            sampling_session_id=_new_session(),
            snapshot_id=None,
            prompt_P=random_prompt(70, 9, vocab_size),
            params=params(max_tokens=12),
            num_samples=2,
        )
        greedy = replace(
            plain,
            sampling_session_id=_new_session(),
            snapshot_id=None if snapshot is None else snapshot.snapshot_id,
            prompt_P=random_prompt(71, 30, vocab_size),
            params=params(max_tokens=12, temperature=0.0),
            prompt_logprobs=scores,
        )
        self._ops = [plain, greedy]
        self._expected: list[SampleOutput | Failed] = []

    async def settle(self) -> None:
        if self._snapshot is not None:
            await self._backend.load_snapshot(self._snapshot)
        self._expected = [await self._backend.sample(op) for op in self._ops]
        for op in self._ops:  # again: the first ones may have compiled
            await self._timed(op, self._tally.alone_s)

    def ask(self) -> list[asyncio.Task[SampleOutput | Failed]]:
        return [asyncio.create_task(self._timed(op, self._tally.beside_s)) for op in self._ops]

    async def _timed(self, op: Sample, seconds: list[float]) -> SampleOutput | Failed:
        began = time.monotonic()
        answer = await self._backend.sample(op)
        seconds.append(time.monotonic() - began)
        return answer

    async def check(self, asked: Sequence[asyncio.Task[SampleOutput | Failed]], what: str) -> None:
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for number, (found, expected) in enumerate(zip(answers, self._expected, strict=True)):
            if not isinstance(found, SampleOutput) or not isinstance(expected, SampleOutput):
                self._tally.changed.append(f"neighbour {number} {what}: {found!r}, and alone: {expected!r}")
            elif changes := _changed_fields(self._backend.sampler_capabilities, found, expected):
                self._tally.changed.append(f"neighbour {number} {what}: {changes}")

    async def leave(self) -> None:
        """Ask once more, alone."""
        await self.check(self.ask(), "after everything")
        if self._snapshot is not None:
            await self._backend.drop_snapshot(self._snapshot.snapshot_id)


async def _attack(
    backend: SamplingBackend, cases: Sequence[Case], neighbours: _Neighbours | None, tally: Tally
) -> None:
    """Run cases at the same time, beside the neighbours."""
    for case in cases:
        check_sample_operation(case.op, backend.sampler_capabilities)
    snapshots = {case.snapshot.snapshot_id: case.snapshot for case in cases if case.snapshot is not None}
    refused = {snapshot_id for snapshot_id, each in snapshots.items() if not await _loads(backend, each, tally)}
    running = [case for case in cases if case.op.snapshot_id not in refused]
    tally.refused += len(cases) - len(running)
    asked = [] if neighbours is None else neighbours.ask()
    answers = await asyncio.gather(*(backend.sample(case.op) for case in running), return_exceptions=True)
    for case, answer in zip(running, answers, strict=True):
        _count(case, answer, backend.sampler_capabilities, tally)
    if neighbours is not None:
        await neighbours.check(asked, "beside " + " and ".join(case.what for case in cases))
    for snapshot_id in snapshots:
        await backend.drop_snapshot(snapshot_id)


async def _loads(backend: SamplingBackend, snapshot: Snapshot, tally: Tally) -> bool:
    """A sampler may refuse an adapter that it cannot sample from."""
    try:
        await backend.load_snapshot(snapshot)
    except _REFUSALS:
        return False
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine would end
        tally.deaths.append(f"loading {snapshot.snapshot_id}: {type(error).__name__}: {error}")
        return False
    return True


def _count(case: Case, answer: object, capabilities: SamplerCapabilities, tally: Tally) -> None:
    if isinstance(answer, Failed):
        tally.refused += 1
    elif isinstance(answer, SampleOutput):
        if (fault := _fault(answer, case.op, capabilities)) is not None:
            tally.wrong.append(f"{case.what}: {fault}")
    else:
        tally.deaths.append(f"{case.what}: {type(answer).__name__}: {answer}")


def _fault(answer: SampleOutput, op: Sample, capabilities: SamplerCapabilities) -> str | None:
    if len(answer.sequences) != op.num_samples:
        return f"{len(answer.sequences)} sequences, not {op.num_samples}"
    for sequence in answer.sequences:
        tokens = sequence.tokens
        if not 1 <= len(tokens) <= op.params.max_tokens or len(sequence.logprobs) != len(tokens):
            return f"{len(tokens)} tokens and {len(sequence.logprobs)} logprobs"
        if tokens.min() < 0 or tokens.max() >= capabilities.vocab_size:
            return f"tokens {tokens.min()} to {tokens.max()}"
    return None


def _changed_fields(capabilities: SamplerCapabilities, found: SampleOutput, expected: SampleOutput) -> list[str]:
    """Name the fields that differ by more than company may change, except for tokens from the asker's own cache."""
    changes = []
    for name in ("prompt_logprobs", "target_prompt_logprobs"):
        pair = getattr(found, name), getattr(expected, name)
        if (pair[0] is None) != (pair[1] is None) or (pair[0] is not None and not _same(capabilities, *pair)):
            changes.append(name)
    for sequence, other in zip(found.sequences, expected.sequences, strict=True):
        changes += _changes_of(capabilities, sequence, other)
    return changes


def _changes_of(capabilities: SamplerCapabilities, found: SampledSequence, expected: SampledSequence) -> list[str]:
    """If isolation is not bitwise, a draw may take another turn at a near tie: what came before is compared."""
    common = min(len(found.tokens), len(expected.tokens))
    same = int(np.cumprod(found.tokens[:common] == expected.tokens[:common]).sum())
    changes = []
    if not _same(capabilities, found.logprobs[:same], expected.logprobs[:same]):
        changes.append("logprobs")
    if capabilities.isolation == "bitwise" and found.tokens.tolist() != expected.tokens.tolist():
        changes.append("tokens")
    if found.tokens.tolist() == expected.tokens.tolist() and found.stop_reason != expected.stop_reason:
        changes.append("stop_reason")
    return changes


def _same(capabilities: SamplerCapabilities, found: Array, expected: Array) -> bool:
    """Compare numbers that are NaN in the same places."""
    both = np.isnan(found) & np.isnan(expected)
    return same_numbers(capabilities, np.where(both, 0, found), np.where(both, 0, expected))


def _new_session() -> str:
    return f"abuse-{next(_sessions)}:sample:0"
