"""The built-in losses under the suite that every loss runs, and that suite under losses that are wrong."""

from typing import Any

import numpy as np
import pytest

from tinsmith.losses import BUILTIN_LOSSES, LossFunction, LossSpec
from tinsmith.testing import LossContract


class TestBuiltinLosses(LossContract):
    @pytest.fixture(params=BUILTIN_LOSSES, ids=lambda loss: loss.name)
    def loss(self, request: pytest.FixtureRequest) -> LossSpec:
        spec: LossSpec = request.param
        return spec


def negated(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    return -inputs["weights"] * logp, inputs["weights"]


def averaged(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    return -inputs["weights"] * logp / len(logp), -inputs["weights"] / len(logp)


def in_place(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    logp *= inputs["weights"]
    return -logp, -inputs["weights"]


def widened(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    return -inputs["weights"] * logp.astype(np.float64), -inputs["weights"]


def of_numpy(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    return logp.copy(), xp.ones_like(logp)  # tensors have no such method


def explosive(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    return 1 / (1 - xp.exp(logp)), xp.exp(logp) / (1 - xp.exp(logp)) ** 2


def branching(xp: Any, logp: Any, inputs: Any, config: Any) -> tuple[Any, Any]:
    scale = config["scale"] if config["scale"] > 0 else 0.0
    return -scale * logp, -scale * xp.ones_like(logp)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (negated, "test_derivative_is_that_of_the_loss"),
        (averaged, "test_every_token_is_on_its_own"),
        (in_place, "test_nothing_is_written_into"),
        (widened, "test_shapes_and_precision_are_kept"),
        (of_numpy, "test_any_namespace_gives_the_same"),
        (explosive, "test_extremes_are_finite"),
        (branching, "test_config_may_differ_from_token_to_token"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what is infinite
def test_the_suite_catches(fault: LossFunction, test: str) -> None:
    spec = LossSpec(name="faulty", inputs=("weights",), per_token=fault, config={"scale": 1.0})
    arguments = {"package": "torch"} if test == "test_any_namespace_gives_the_same" else {}
    with pytest.raises((AssertionError, AttributeError, ValueError)):
        getattr(LossContract(), test)(spec, **arguments)
