"""The suite that every loss passes: subclass `LossContract` and give it a `loss` fixture.

    class TestMyLoss(LossContract):
        @pytest.fixture
        def loss(self):
            return my_loss_spec

Array suffixes: T = tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tinsmith.losses import LossSpec
from tinsmith.operations import Array
from tinsmith.testing.contract import Contract

_STEP = 1e-6  # of the central difference, in float64
_ONE_OP = 1e-5  # allowed float32 difference after a few operations
_NUM_TOKENS = 64
_NAMESPACES = {"torch": "torch", "jax": "jax.numpy"}  # keyed by the package that must be installed


class LossContract(Contract):
    """The contract of `LossSpec.per_token`."""

    @pytest.fixture
    def loss(self) -> LossSpec:
        """Override: the loss under test."""
        msg = f"{type(self).__name__} must override the fixture 'loss' and return a LossSpec"
        raise NotImplementedError(msg)

    def test_derivative_is_that_of_the_loss(self, loss: LossSpec) -> None:
        """Checked by central differences, in float64."""
        if loss.stops_gradients:
            pytest.skip("part of the loss counts as constant, so its derivative is not that of the whole")
        logp_T, inputs = _tokens(loss)
        (_, actual_T), upper, lower = (
            loss.per_token(np, logp_T + h, inputs, config_of(loss)) for h in (0, _STEP, -_STEP)
        )
        np.testing.assert_allclose(actual_T, (upper[0] - lower[0]) / (2 * _STEP), rtol=1e-4, atol=1e-6)

    def test_every_token_is_on_its_own(self, loss: LossSpec) -> None:
        """Backends pack requests of several tenants into one call, and may cut it anywhere."""
        logp_T, inputs = _tokens(loss)
        together = loss.per_token(np, logp_T, inputs, config_of(loss))
        for index in range(_NUM_TOKENS):
            one = {name: array[index : index + 1] for name, array in inputs.items()}
            apart = loss.per_token(np, logp_T[index : index + 1], one, config_of(loss))
            for left, right in zip(apart, together, strict=True):
                np.testing.assert_allclose(left, right[index : index + 1], rtol=1e-12)

    def test_the_loss_grows_in_proportion_to_the_input_that_scales_it(self, loss: LossSpec) -> None:
        """Off-policy corrections multiply a token's loss by way of that input; 0 masks it."""
        if not loss.scaled_by:
            pytest.skip("no input scales this loss")
        logp_T, inputs = _tokens(loss)
        plain = loss.per_token(np, logp_T, inputs, config_of(loss))
        for factor in (0.0, 0.25, 3.0):
            scaled = {**inputs, loss.scaled_by: factor * inputs[loss.scaled_by]}
            for left, right in zip(loss.per_token(np, logp_T, scaled, config_of(loss)), plain, strict=True):
                np.testing.assert_allclose(left, factor * right, rtol=1e-12, atol=1e-300)

    def test_config_may_differ_from_token_to_token(self, loss: LossSpec) -> None:
        """Arrays filled with one value give the same result as that value, as packed batches hold one per request."""
        logp_T, inputs = _tokens(loss)
        spread = {name: np.full(_NUM_TOKENS, value) for name, value in config_of(loss).items()}
        for left, right in zip(
            loss.per_token(np, logp_T, inputs, spread), loss.per_token(np, logp_T, inputs, config_of(loss)), strict=True
        ):
            np.testing.assert_allclose(left, right, rtol=1e-12)

    def test_shapes_and_precision_are_kept(self, loss: LossSpec) -> None:
        logp_T, inputs = _tokens(loss)
        narrow = {name: array.astype(np.float32).reshape(8, 8) for name, array in inputs.items()}
        for result in loss.per_token(np, logp_T.astype(np.float32).reshape(8, 8), narrow, config_of(loss)):
            assert result.shape == (8, 8)
            assert result.dtype == np.float32

    def test_nothing_is_written_into(self, loss: LossSpec) -> None:
        arrays = logp_T, inputs = _tokens(loss)
        logp_T.flags.writeable = False
        for array in inputs.values():
            array.flags.writeable = False
        loss.per_token(np, *arrays, config_of(loss))

    def test_extremes_are_finite(self, loss: LossSpec) -> None:
        """Tokens that are certain, and tokens that are nearly impossible."""
        logp_T, inputs = _tokens(loss)
        logp_T[:8], logp_T[8:16] = 0.0, -40.0
        inputs = {name: logp_T.copy() if name == "logprobs" else array for name, array in inputs.items()}
        for result in loss.per_token(np, logp_T, inputs, config_of(loss)):
            assert np.isfinite(result).all()

    @pytest.mark.parametrize("package", _NAMESPACES)
    def test_any_namespace_gives_the_same(self, loss: LossSpec, package: str) -> None:
        xp: Any = pytest.importorskip(_NAMESPACES[package])
        logp_T, inputs = _tokens(loss)
        theirs = {name: xp.asarray(array.astype(np.float32)) for name, array in inputs.items()}
        config = {name: xp.asarray(np.full(_NUM_TOKENS, value, np.float32)) for name, value in config_of(loss).items()}
        results = loss.per_token(xp, xp.asarray(logp_T.astype(np.float32)), theirs, config)
        for left, right in zip(results, loss.per_token(np, logp_T, inputs, config_of(loss)), strict=True):
            np.testing.assert_allclose(np.asarray(left), right, rtol=_ONE_OP, atol=_ONE_OP)


def _tokens(loss: LossSpec) -> tuple[Array, Mapping[str, Array]]:
    """Draw logprobs, and inputs of both signs; sampling logprobs are near the model's own.

    Sums over the sequence run over all tokens.
    """
    rng = np.random.default_rng(7)
    logp_T = -rng.exponential(size=_NUM_TOKENS) - 0.01
    inputs: dict[str, Array] = {name: rng.normal(size=_NUM_TOKENS) for name in loss.inputs}
    if "logprobs" in inputs:
        inputs["logprobs"] = np.minimum(logp_T - rng.normal(scale=0.5, size=_NUM_TOKENS), -1e-3)
    if loss.summands is not None:
        parts = loss.summands(np, logp_T, inputs, config_of(loss))
        inputs |= {name: np.full(_NUM_TOKENS, part.sum()) for name, part in zip(loss.sums, parts, strict=True)}
    return logp_T, inputs


def config_of(loss: LossSpec) -> Mapping[str, float]:
    """Return every setting of a loss: 1 for those without a default."""
    return {**dict.fromkeys(loss.required_config, 1.0), **loss.config}
