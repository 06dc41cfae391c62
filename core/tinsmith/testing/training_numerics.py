"""The contract of forward and forward_backward: logprobs, losses as plain sums, and the gradients of those losses."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tinsmith.operations import Array, Datum
from tinsmith.testing import reference
from tinsmith.testing.contract import (
    assert_close_arrays,
    assert_same_arrays,
    assert_same_state,
    need,
    need_float32,
    norm,
)
from tinsmith.testing.model_driver import (
    ModelDriver,
    logprobs_of,
    off_policy_data,
    ragged_data,
    random_datum,
    slope,
    with_inputs,
)
from tinsmith.testing.training_suite import TrainingSuite
from tinsmith_checkpoints.huggingface import peft_layout

_ONE_OP, _A_MODEL = 1e-5, 1e-4  # allowed float32 difference: after one operation, after a pass through a model

_MODULES_OF_FLAG: Mapping[str, frozenset[str]] = {
    "attn": frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
    "mlp": frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}),  # of a dense layer, of experts
    "unembed": frozenset({"lm_head"}),
}
_OTHER_CONFIG: Mapping[str, Mapping[str, float]] = {
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.4},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.03},
}

each_loss = pytest.mark.parametrize("loss_fn", reference.LOSS_NAMES)


class AdapterContract(TrainingSuite):
    """The contract of create_model."""

    def test_seed_decides_the_weights(self, driver: ModelDriver) -> None:
        first, again, other = (driver.state(driver.create(seed=seed)).weights for seed in (5, 5, 6))
        assert_same_arrays(again, first, "two models with the seed 5")
        differs = [name for name in first if not np.array_equal(first[name], other[name])]
        assert differs == [name for name in first if ".lora_A." in name], "seed 6 must draw another A everywhere"

    def test_weights_are_a_peft_adapter(self, driver: ModelDriver) -> None:
        state = driver.state(driver.create(rank=4))
        peft_layout.check_weights(state.lora, state.weights)
        assert state.weights, "there are no weights"
        assert all(array.dtype == np.float32 for array in state.weights.values())

    def test_fresh_state_has_no_history(self, driver: ModelDriver) -> None:
        state = driver.state(driver.create())
        assert (state.step, state.adam_m, state.adam_v, state.gradients) == (0, {}, {}, {})
        assert all(not array.any() for name, array in state.weights.items() if ".lora_B." in name), "B must be zero"
        assert all(array.any() for name, array in state.weights.items() if ".lora_A." in name), "A must be random"

    @pytest.mark.parametrize("target", ["attn", "mlp", "unembed"])
    def test_flags_choose_the_modules(self, driver: ModelDriver, target: str) -> None:
        need(target in driver.capabilities.lora_targets, f"the LoRA target {target!r}")
        flags = {f"train_{name}": name == target for name in _MODULES_OF_FLAG}
        model_id = driver.create(flags=flags)
        driver.forward_backward(model_id, ragged_data(0, driver.capabilities.vocab_size))
        driver.optim_step(model_id)
        weights = driver.state(model_id).weights
        modules = set(peft_layout.target_modules(weights))
        assert modules, f"train_{target} alone must train something"
        assert modules <= _MODULES_OF_FLAG[target], f"train_{target} alone must train nothing else"

    def test_every_rank_up_to_the_limit(self, driver: ModelDriver) -> None:
        limit = driver.capabilities.max_lora_rank
        for rank in sorted({1, min(3, limit), limit}):
            state = driver.state(driver.create(rank=rank))
            assert state.lora.rank == rank
            peft_layout.check_weights(state.lora, state.weights)

    def test_fresh_adapter_changes_nothing(self, driver: ModelDriver) -> None:
        """B is zero, so a fresh model equals the base model for any rank and seed."""
        data = ragged_data(1, driver.capabilities.vocab_size)
        outputs = [logprobs_of(driver.forward(driver.create(rank=rank, seed=rank), data)) for rank in (1, 4)]
        for left, right in zip(*outputs, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_ONE_OP)

    def test_scale_is_alpha_over_rank(self, driver: ModelDriver) -> None:
        """A rank-1 adapter equals a rank-2 one that holds it twice, at half the weight each.

        Each product counts as one does at rank 4, which has a quarter of the scale. Four times as much makes single
        tokens of models with experts so ill-conditioned that any float32 is 1e-4 from float64.
        """
        need(driver.capabilities.max_lora_rank >= 2, "rank 2")
        data = ragged_data(2, driver.capabilities.vocab_size)
        one, two = driver.create_trained(rank=1), driver.create(rank=2)
        single, double = driver.state(one), driver.state(two)
        once = {name: array if ".lora_A." in name else array / 4 for name, array in single.weights.items()}
        twice = {
            name: np.concatenate([array, array], axis=-2 if ".lora_A." in name else -1) for name, array in once.items()
        }
        for model_id, state, weights in ((one, single, once), (two, double, twice)):
            driver.backend.restore_state(model_id, replace(state, weights=weights))
        for left, right in zip(*(logprobs_of(driver.forward(m, data)) for m in (one, two)), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_A_MODEL)


class NumericsContract(TrainingSuite):
    """The contract of forward and forward_backward."""

    def test_logprobs_have_the_shape_of_the_targets(self, driver: ModelDriver) -> None:
        data = ragged_data(3, driver.capabilities.vocab_size)
        for datum, logp in zip(data, logprobs_of(driver.forward(driver.create_trained(), data)), strict=True):
            assert logp.dtype == np.float32
            assert logp.shape == datum.loss_inputs["target_tokens"].shape
            assert (logp <= 0).all()

    def test_positions_see_the_past_only(self, driver: ModelDriver) -> None:
        """Changing the last token changes only the last logprob. Changing other sequences changes none."""
        vocab_size = driver.capabilities.vocab_size
        model_id = driver.create_trained()
        datum = random_datum(4, 33, vocab_size)
        tokens_T = datum.tokens_T.copy()
        tokens_T[-1] = (tokens_T[-1] + 1) % vocab_size
        other = replace(datum, tokens_T=tokens_T)
        (left, right, after) = logprobs_of(driver.forward(model_id, [datum, other, datum]))
        np.testing.assert_allclose(left[:-1], right[:-1], rtol=0, atol=_ONE_OP)
        assert left[-1] != right[-1]
        np.testing.assert_allclose(left, after, rtol=0, atol=_ONE_OP)

    def test_several_targets_per_token(self, driver: ModelDriver) -> None:
        """[T, K] targets give the logprobs and gradient of K data with [T] targets, in one pass."""
        need(driver.capabilities.max_targets_per_token >= 3, "three targets per token")
        datum = random_datum(5, 33, driver.capabilities.vocab_size, targets_per_token=3)
        columns = [
            replace(datum, loss_inputs={name: array[:, k] for name, array in datum.loss_inputs.items()})
            for k in range(3)
        ]
        model_id = driver.create_trained()
        (together,) = logprobs_of(driver.forward(model_id, [datum]))
        apart = logprobs_of(driver.forward(model_id, columns))
        np.testing.assert_allclose(together, np.stack(apart, axis=-1), rtol=0, atol=_ONE_OP)
        need_float32(driver.capabilities)
        assert_close_arrays(
            driver.gradient(model_id, [datum]), driver.gradient(model_id, columns), _A_MODEL, "gradient of [T, K]"
        )

    def test_probabilities_add_up_to_one(self, driver: ModelDriver) -> None:
        vocab_size = driver.capabilities.vocab_size
        need(driver.capabilities.max_targets_per_token >= vocab_size, "the whole vocabulary as targets")
        everything = np.tile(np.arange(vocab_size), (7, 1))
        datum = with_inputs(random_datum(6, 7, vocab_size), weights=np.zeros(everything.shape, np.float32))
        datum = replace(datum, loss_inputs={**datum.loss_inputs, "target_tokens": everything})
        (logp,) = logprobs_of(driver.forward(driver.create_trained(), [datum]))
        np.testing.assert_allclose(np.exp(logp.astype(np.float64)).sum(axis=-1), 1.0, rtol=_ONE_OP)

    def test_forward_leaves_gradients_alone(self, driver: ModelDriver) -> None:
        data = ragged_data(7, driver.capabilities.vocab_size)
        model_id = driver.create_trained()
        driver.forward(model_id, data)
        assert driver.state(model_id).gradients == {}
        driver.forward_backward(model_id, data)
        before = driver.state(model_id)
        driver.forward(model_id, data)
        assert_same_state(driver.state(model_id), before, "state around a forward")

    def test_forward_and_forward_backward_agree(self, driver: ModelDriver) -> None:
        data = ragged_data(8, driver.capabilities.vocab_size)
        model_id = driver.create_trained()
        scored, trained = driver.forward(model_id, data), driver.forward_backward(model_id, data)
        for left, right in zip(logprobs_of(scored), logprobs_of(trained), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_ONE_OP)
        assert math.isclose(scored.metrics["loss:sum"], trained.metrics["loss:sum"], rel_tol=_ONE_OP)

    @each_loss
    @pytest.mark.parametrize("defaults", [True, False])
    def test_loss_is_the_sum_that_the_oracle_gives(self, driver: ModelDriver, loss_fn: str, defaults: bool) -> None:
        data, model_id = self._loss_data(driver, loss_fn)
        config = dict((reference.NEEDED_CONFIG if defaults else _OTHER_CONFIG).get(loss_fn, {}))
        for call in (driver.forward, driver.forward_backward):
            output = call(model_id, data, loss_fn, **config)
            expected = reference.loss_sum(loss_fn, data, logprobs_of(output), config)
            assert math.isclose(output.metrics["loss:sum"], expected, rel_tol=_ONE_OP), loss_fn

    def test_loss_is_not_normalised(self, driver: ModelDriver) -> None:
        """The same data twice is twice the loss and twice the gradient; weights of zero or below are weights."""
        data = ragged_data(9, driver.capabilities.vocab_size)
        model_id = driver.create_trained()
        once, twice = driver.forward(model_id, data), driver.forward(model_id, data * 2)
        assert math.isclose(2 * once.metrics["loss:sum"], twice.metrics["loss:sum"], rel_tol=_ONE_OP)
        gradient = driver.gradient(model_id, data)
        doubled = {name: 2 * array for name, array in gradient.items()}
        assert_close_arrays(driver.gradient(model_id, data * 2), doubled, _A_MODEL, "gradient of the data twice")
        negated = [with_inputs(d, weights=-d.loss_inputs["weights"]) for d in data]
        opposite = {name: -array for name, array in gradient.items()}
        assert_close_arrays(driver.gradient(model_id, negated), opposite, _A_MODEL, "gradient of negated weights")

    def test_zero_weights_give_logprobs_and_no_gradient(self, driver: ModelDriver) -> None:
        data = ragged_data(10, driver.capabilities.vocab_size)
        ignored = [with_inputs(d, weights=np.zeros_like(d.loss_inputs["weights"])) for d in data]
        model_id = driver.create_trained()
        output = driver.forward_backward(model_id, ignored)
        assert output.metrics["loss:sum"] == 0
        assert norm(driver.state(model_id).gradients) == 0
        for left, right in zip(logprobs_of(output), logprobs_of(driver.forward(model_id, data)), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_ONE_OP)

    def test_gradient_is_that_of_the_loss(self, driver: ModelDriver) -> None:
        """Move the weights along the gradient and see the loss change by its norm, tensor by tensor and as a whole."""
        need_float32(driver.capabilities)
        data = ragged_data(11, driver.capabilities.vocab_size)
        model_id = driver.create_trained()
        gradient = driver.gradient(model_id, data)
        names = sorted(gradient)
        for chosen in (names, *([name] for name in names[:: max(1, len(names) // 6)])):
            length = norm({name: gradient[name] for name in chosen})
            assert length > 0, f"no gradient reaches {chosen[:3]}"
            direction = {name: gradient[name] / length for name in chosen}
            found = slope(driver, model_id, data, direction, distance=0.02 / length)
            assert math.isclose(found, length, rel_tol=1e-2), f"slope {found:.6g}, gradient {length:.6g}: {chosen[:3]}"

    @each_loss
    def test_gradient_of_every_loss(self, driver: ModelDriver, loss_fn: str) -> None:
        """It equals cross_entropy's gradient with -d loss / d logprob as weights, computed by the oracle."""
        need_float32(driver.capabilities)
        data, model_id = self._loss_data(driver, loss_fn)
        config = reference.NEEDED_CONFIG.get(loss_fn, {})
        linear = []
        for datum, logp in zip(data, logprobs_of(driver.forward(model_id, data, loss_fn, **config)), strict=True):
            slopes = reference.loss_derivatives(loss_fn, logp, datum.loss_inputs, config)
            linear.append(with_inputs(datum, weights=-slopes.astype(np.float32)))
        expected = driver.gradient(model_id, linear)
        assert norm(expected) > 0
        found = driver.gradient(model_id, data, loss_fn, **config)
        assert_close_arrays(found, expected, _A_MODEL, f"gradient of {loss_fn}")

    def test_longest_context(self, driver: ModelDriver) -> None:
        length = driver.capabilities.max_context_tokens
        datum = random_datum(12, length, driver.capabilities.vocab_size)
        (logp,) = logprobs_of(driver.forward(driver.create_trained(), [datum]))
        assert np.isfinite(logp).all()

    @staticmethod
    def _loss_data(driver: ModelDriver, loss_fn: str) -> tuple[list[Datum], str]:
        """Return data with the inputs of this loss, and a model to use them on."""
        need(loss_fn in driver.capabilities.losses, f"the loss {loss_fn!r}")
        data = ragged_data(13, driver.capabilities.vocab_size)
        model_id = driver.create_trained()
        if loss_fn != "cross_entropy":
            data = off_policy_data(13, data, logprobs_of(driver.forward(model_id, data)))
        if loss_fn == "gspo":
            data = [with_inputs(d, **_rl_inputs(d), sequence_ratio_mask=_all_but_first(d)) for d in data]
        return data, model_id


def _rl_inputs(datum: Datum) -> dict[str, Array]:
    return {name: datum.loss_inputs[name] for name in ("logprobs", "advantages")}


def _all_but_first(datum: Datum) -> Array:
    """Return the mask of an answer to a prompt of two tokens; of a single token, that one."""
    mask = np.ones(len(datum.tokens_T), np.float32)
    mask[:1] = len(mask) == 1
    return mask
