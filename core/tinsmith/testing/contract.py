"""The base of all contract suites: no silent overrides, and comparisons as strict as the backend's claims."""

from collections.abc import Mapping

import numpy as np
import pytest

from tinsmith.backend import Capabilities, ModelState
from tinsmith.operations import Array

_SHIPPED = "tinsmith.testing"


class Contract:
    """Base class of the suites. A subclass provides fixtures. If it overrides a test, it must mark it xfail."""

    def test_overridden_tests_are_expected_failures(self) -> None:
        """Without this, the easiest way to pass a suite is to replace its tests."""
        for cls in type(self).__mro__:
            if cls.__module__.startswith(_SHIPPED):
                continue
            for name, value in vars(cls).items():
                if name.startswith("test_") and _is_shipped(type(self), name):
                    marks = getattr(value, "pytestmark", [])
                    reasons = [mark.kwargs.get("reason") for mark in marks if mark.name == "xfail"]
                    assert any(reasons), (
                        f"{cls.__qualname__} overrides {name} of the contract; mark it "
                        "@pytest.mark.xfail(reason=...) and call the original, so that the gap stays visible"
                    )


def _is_shipped(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith(_SHIPPED))


def need(capable: object, what: str) -> None:
    """Skip the test if the backend's capabilities do not claim `what`."""
    if not capable:
        pytest.skip(f"the backend's capabilities do not claim {what}")


def need_float32(capabilities: Capabilities) -> None:
    """Skip the test if rounding is too coarse to tell a fault from it."""
    if capabilities.dtype == "bfloat16":
        pytest.skip("the backend computes in bfloat16, whose rounding would hide what the test looks for")


def assert_same_numbers(capabilities: Capabilities, actual: Array, expected: Array, what: str) -> None:
    """Compare results that must not depend on other tenants, as strictly as `isolation` promises."""
    need(capabilities.isolation != "none", "isolation")
    if capabilities.isolation == "bitwise":
        np.testing.assert_array_equal(actual, expected, err_msg=what)
    else:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=capabilities.isolation_error, err_msg=what)


def assert_same_arrays(actual: Mapping[str, Array], expected: Mapping[str, Array], what: str) -> None:
    """Compare bit for bit."""
    assert actual.keys() == expected.keys(), what
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=f"{what}: {name}")


def assert_same_state(actual: ModelState, expected: ModelState, what: str) -> None:
    """Compare everything that a checkpoint holds, bit for bit; empty moments or gradients are not zeros."""
    assert actual.lora == expected.lora, what
    assert actual.step == expected.step, what
    assert_same_arrays(actual.weights, expected.weights, f"{what}: weights")
    assert_same_arrays(actual.adam_m, expected.adam_m, f"{what}: adam_m")
    assert_same_arrays(actual.adam_v, expected.adam_v, f"{what}: adam_v")
    assert_same_arrays(actual.gradients, expected.gradients, f"{what}: gradients")


def assert_close_arrays(actual: Mapping[str, Array], expected: Mapping[str, Array], relative: float, what: str) -> None:
    """Compare each array by the norm of its difference, relative to its own norm.

    Arrays that hold less than a thousandth of the whole count as that thousandth: their own digits are noise.
    """
    assert actual.keys() == expected.keys(), what
    floor = 1e-3 * norm(expected)
    for name in expected:
        difference = norm({name: actual[name].astype(np.float64) - expected[name]})
        allowed = relative * max(norm({name: expected[name]}), floor)
        assert difference <= allowed, f"{what}: {name} is off by {difference:.3g}, allowed {allowed:.3g}"


def norm(arrays: Mapping[str, Array]) -> float:
    """Return the L2 norm over all arrays."""
    return float(np.sqrt(sum(np.sum(array.astype(np.float64) ** 2) for array in arrays.values())))
