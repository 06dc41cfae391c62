"""The contract of abuse in training: no request that the checks let pass ends the backend or changes a neighbour.

Attackers send every number at every extreme that `check_operation` lets pass, in the same calls as a neighbour, and
train from weights that are not numbers. Such a request may ruin its own model, or be refused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from tinsmith.backend import Capabilities
from tinsmith.checks import check_operation
from tinsmith.errors import CapacityError, OutOfMemoryError, UserError
from tinsmith.operations import (
    AdamParams,
    Array,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    OptimStep,
    OptimStepOutput,
)
from tinsmith.store import EngineCapabilities
from tinsmith.testing.abuse_tally import Tally
from tinsmith.testing.abuse_training_cases import GROUPS, LOSSES, Case, Step, cases_of
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, random_datum
from tinsmith.testing.training_suite import TrainingSuite

_MOST_ATTACKERS = 6
_OF_CALLS = (OutOfMemoryError,)  # which the interface allows of any call
_OF_MODELS = (UserError, CapacityError)  # and of methods that handle one model


class TrainingAbuseContract(TrainingSuite):
    long_form = False
    """Set this in a test that may take minutes: more values are tried, and each case alone as well."""
    random_cases = 24
    """How many random combinations are tried. Raise this there, too."""

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of numbers that have become infinite or NaN
    @pytest.mark.parametrize("group", GROUPS)
    def test_abuse_in_training_hurts_nobody(
        self, driver: ModelDriver, group: str, record_property: Callable[[str, object], None]
    ) -> None:
        cases = list(cases_of(driver.capabilities, group, self.random_cases, long_form=self.long_form))
        tally = Tally(group=f"training: {group}", cases=len(cases))
        attack(driver, cases, tally)
        if self.long_form:
            attack(driver, cases, tally, alone=True)
        tally.report(self, record_property)


def attack(
    driver: ModelDriver, cases: Sequence[Case], tally: Tally, *, alone: bool = False, most_models: int | None = None
) -> None:
    """Run the cases, several at a time and beside a neighbour, or each alone."""
    room = driver.capabilities.max_models if most_models is None else most_models
    if alone or room == 1:
        _Attack(driver, tally, num_attackers=1, neighbour=None).run(cases)
        return
    num_attackers = max(1, min(_MOST_ATTACKERS, room - 2))
    _Attack(driver, tally, num_attackers=num_attackers, neighbour=_Neighbour(driver, tally)).run(cases)


class _Attack:
    """Runs cases: several attackers at a time, in the same calls as the neighbour."""

    def __init__(
        self, driver: ModelDriver, tally: Tally, *, num_attackers: int, neighbour: "_Neighbour | None"
    ) -> None:
        self._driver, self._tally, self._neighbour = driver, tally, neighbour
        self._attackers = [driver.create_trained(seed=seed) for seed in range(num_attackers)]
        self._healthy = [driver.state(model_id) for model_id in self._attackers]

    def run(self, cases: Sequence[Case]) -> None:
        for case in (case for case in cases if case.lora is not None):
            self._run_with_a_model_of_its_own(case)
        shared, size = [case for case in cases if case.lora is None], len(self._attackers)
        for start in range(0, len(shared), size):
            self._run_together(shared[start : start + size])
        for model_id in self._attackers:
            self._driver.unload(model_id)
        if self._neighbour is not None:
            self._neighbour.check_state()

    def _run_with_a_model_of_its_own(self, case: Case) -> None:
        lora, created = case.lora, list[str]()
        assert lora is not None
        self._driver.unload(self._attackers.pop())  # there is a place for one more model
        self._healthy.pop()
        if self._survives(lambda: created.append(self._driver.create_with(lora)), case.what):
            self._call([case], created)
            self._driver.unload(*created)
        self._attackers.append(self._driver.create_trained(seed=len(self._attackers)))
        self._healthy.append(self._driver.state(self._attackers[-1]))

    def _run_together(self, cases: Sequence[Case]) -> None:
        models = self._attackers[: len(cases)]
        for case, model_id, healthy in zip(cases, models, self._healthy, strict=False):
            self._survives(partial(self._driver.backend.restore_state, model_id, case.ruined(healthy)), case.what)
        self._call(cases, models)

    def _call(self, cases: Sequence[Case], models: Sequence[str]) -> None:
        """Make the calls of all cases, the first of each together, then the second, and so on."""
        scripts = [list(case.calls(model_id)) for case, model_id in zip(cases, models, strict=True)]
        capabilities = EngineCapabilities(trainer=self._driver.capabilities, sampler=None)
        for script in scripts:
            for op in script:
                check_operation(op, capabilities, LOSSES)
        for number in range(max(map(len, scripts))):
            current = [
                (case, script[number]) for case, script in zip(cases, scripts, strict=True) if number < len(script)
            ]
            for kind in (Forward, ForwardBackward, OptimStep):
                self._send(kind, [(case, op) for case, op in current if type(op) is kind])
        for case, model_id in zip(cases, models, strict=True):  # what a save would do
            self._survives(partial(_read, self._driver, model_id), case.what)

    def _send(self, kind: type[Step], asked: Sequence[tuple[Case, Step]]) -> None:
        """Send the operations in calls that core would make: as many tokens together as a call may have."""
        room = self._driver.capabilities.max_batch_tokens
        beside = 0 if self._neighbour is None else self._neighbour.num_tokens
        call: list[tuple[Case, Step]] = []
        for case, op in asked:
            if call and sum(map(_num_tokens, (op, *(each for _, each in call)))) + beside > room:
                self._send_together(kind, call, room)
                call = []
            call.append((case, op))
        if call:
            self._send_together(kind, call, room)

    def _send_together(self, kind: type[Step], asked: Sequence[tuple[Case, Step]], room: int) -> None:
        ops, what = [op for _, op in asked], " and ".join(case.what for case, _ in asked)
        place, neighbour = len(ops) // 2, self._neighbour
        if neighbour is not None and sum(map(_num_tokens, ops)) + neighbour.num_tokens <= room:
            ops.insert(place, neighbour.op(kind))
        else:
            neighbour = None
        results: list[ForwardBackwardOutput | OptimStepOutput | Failed] = []
        if self._survives(lambda: results.extend(_call_of(self._driver, kind)(ops)), what, allowed=_OF_CALLS):
            if neighbour is not None:
                neighbour.check(kind, results.pop(place), what)
            self._tally.refused += sum(isinstance(result, Failed) for result in results)

    def _survives(
        self, call: Callable[[], object], what: str, allowed: tuple[type[Exception], ...] = (*_OF_MODELS, *_OF_CALLS)
    ) -> bool:
        """Return whether the call went through. An exception that the interface allows is a refusal."""
        try:
            call()
        except allowed:
            self._tally.refused += 1
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine would end
            self._tally.deaths.append(f"{what}: {type(error).__name__}: {error}")
            return False
        return True


def _num_tokens(op: Step) -> int:
    return 0 if isinstance(op, OptimStep) else op.num_tokens


class _Neighbour:
    """A model whose passes and steps, of learning rate 0, must give the same results in any company."""

    def __init__(self, driver: ModelDriver, tally: Tally) -> None:
        self._driver, self._tally = driver, tally
        self._data = tuple(
            random_datum(70 + n, length, driver.capabilities.vocab_size) for n, length in enumerate((5, 33))
        )
        self._adam = AdamParams(learning_rate=0.0)
        self._model_id = driver.create_trained(seed=70)
        self._start = driver.state(self._model_id)
        self._expected = logprobs_of(driver.forward(self._model_id, self._data))
        self._made: list[type[Step]] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_T) for datum in self._data)

    def op(self, kind: type[Step]) -> Step:
        self._made.append(kind)
        return self._op(kind, self._model_id)

    def _op(self, kind: type[Step], model_id: str) -> Step:
        if kind is OptimStep:
            return OptimStep(model_id=model_id, adam=self._adam)
        return kind(model_id=model_id, data=self._data)  # type: ignore[call-arg]  # mypy does not narrow the union

    def check(self, kind: type[Step], result: object, what: str) -> None:
        if not isinstance(result, OptimStepOutput if kind is OptimStep else ForwardBackwardOutput):
            self._tally.changed.append(f"beside {what}: {result}")
        if not isinstance(result, ForwardBackwardOutput):
            return
        for found, expected in zip(logprobs_of(result), self._expected, strict=True):
            if not same_numbers(self._driver.capabilities, found, expected):
                self._tally.changed.append(f"beside {what}: logprobs")

    def check_state(self) -> None:
        """Compare the state with one after the same calls without company."""
        twin = self._driver.create_trained(seed=70)
        self._driver.backend.restore_state(twin, self._start)
        for kind in self._made:
            _call_of(self._driver, kind)([self._op(kind, twin)])
        actual, expected = self._driver.state(self._model_id), self._driver.state(twin)
        if actual.step != expected.step:
            self._tally.changed.append(f"steps: {actual.step}, not {expected.step}")
        for part in ("weights", "adam_m", "adam_v", "gradients"):
            arrays: Mapping[str, Array] = getattr(expected, part)
            for name, array in arrays.items():
                scale = 1.0 if part == "weights" else max(1.0, float(np.abs(array).max()))
                found = getattr(actual, part).get(name)
                if found is None or not same_numbers(self._driver.capabilities, found, array, scale=scale):
                    self._tally.changed.append(f"{part} {name}")


def same_numbers(capabilities: Capabilities, found: Array, expected: Array, *, scale: float = 1.0) -> bool:
    """Compare what must not depend on company, as strictly as `isolation` promises."""
    match capabilities.isolation:
        case "bitwise":
            return found.tobytes() == expected.tobytes()
        case "close":
            return bool(np.all(np.abs(found - expected) <= scale * capabilities.isolation_error))
        case _:
            return bool(np.isfinite(found).all())


def _call_of(
    driver: ModelDriver, kind: type[Step]
) -> Callable[..., Sequence[ForwardBackwardOutput | OptimStepOutput | Failed]]:
    if kind is OptimStep:
        return driver.backend.optim_step
    return driver.backend.forward if kind is Forward else driver.backend.forward_backward


def _read(driver: ModelDriver, model_id: str) -> None:
    for arrays in (
        driver.state(model_id).weights,
        driver.backend.publish(model_id, f"{model_id}-abuse").adapter_weights(),
    ):
        for name in arrays:
            assert arrays[name].dtype == np.float32, name
