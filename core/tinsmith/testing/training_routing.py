"""The contract of routing replay: given experts compute a token in place of the router's choice."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tinsmith.backend import ReplayedExperts
from tinsmith.operations import Datum, ExpertArray, ForwardBackward
from tinsmith.testing.contract import assert_same_numbers, need, norm
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, ragged_data, random_datum, slope, succeeded
from tinsmith.testing.training_suite import TrainingSuite

NOT_SAMPLED: ExpertArray = np.zeros((0, 0, 0), np.uint16)
"""Routing is replayed, but nothing is known of this sequence: its experts are the router's choice."""

_ONE_OP, _VISIBLE = 1e-5, 1e-3  # allowed float32 difference after one operation; least one that other experts make


def random_experts(seed: int, num_tokens: int, allowed: ReplayedExperts) -> ExpertArray:
    """Draw experts [T, L, C], in no order."""
    shape = (num_tokens, allowed.num_layers, allowed.num_experts)
    every = np.broadcast_to(np.arange(allowed.num_experts), shape)
    return np.random.default_rng([seed, num_tokens]).permuted(every, axis=-1)[..., : allowed.top_k].astype(np.uint16)


class RoutingReplayContract(TrainingSuite):
    @pytest.fixture
    def allowed(self, driver: ModelDriver) -> ReplayedExperts:
        found = driver.capabilities.replayed_experts
        need(found, "routing replay")
        assert found is not None
        need(found.top_k < found.num_experts, "experts to choose from")
        return found

    def test_given_experts_compute_in_any_order(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        model_id, datum = driver.create_trained(), random_datum(70, 33, driver.capabilities.vocab_size)
        given = random_experts(70, 33, allowed)
        data = [replace(datum, routed_experts=each) for each in (given, given[..., ::-1], NOT_SAMPLED)]
        for output in (driver.forward(model_id, data), driver.forward_backward(model_id, data)):
            one, turned, own = logprobs_of(output)
            np.testing.assert_allclose(turned, one, rtol=0, atol=_ONE_OP)
            assert np.abs(own - one).max() > _VISIBLE, "other experts must make a difference"

    def test_tokens_without_experts_are_the_routers(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        """Where a sequence's experts end, its router chooses again; where there are none, nothing changes."""
        model_id, datum = driver.create_trained(), random_datum(71, 33, driver.capabilities.vocab_size)
        given, other = (random_experts(seed, 33, allowed) for seed in (71, 72))
        first, second = given[:20], np.concatenate([given[:20], other[20:]])
        data = [replace(datum, routed_experts=each) for each in (given, first, second, NOT_SAMPLED)]
        whole, begun, mixed, unknown = logprobs_of(driver.forward(model_id, data))
        for left, right in ((whole, begun), (begun, mixed), (mixed, whole)):
            np.testing.assert_allclose(left[:20], right[:20], rtol=0, atol=_ONE_OP)
            assert np.abs(left[20:] - right[20:]).max() > _VISIBLE, "other experts must make a difference"
        (without,) = logprobs_of(driver.forward(model_id, [datum]))
        np.testing.assert_allclose(unknown, without, rtol=0, atol=_ONE_OP)

    def test_gradient_is_that_of_the_given_experts(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        data = _replayed(ragged_data(73, driver.capabilities.vocab_size), allowed)
        model_id = driver.create_trained()
        gradient = driver.gradient(model_id, data)
        length = norm(gradient)
        assert length > 0
        direction = {name: array / length for name, array in gradient.items()}
        found = slope(driver, model_id, data, direction, distance=0.02 / length)
        assert math.isclose(found, length, rel_tol=1e-2), f"slope {found:.6g}, gradient {length:.6g}"

    def test_replay_does_not_reach_others(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        """Three models in one call: one replays all of its sequences, one some, one none."""
        vocab_size = driver.capabilities.vocab_size
        merged, separate = ([driver.create_trained(rank=rank, seed=rank) for rank in (1, 4, 8)] for _ in range(2))
        data = [ragged_data(74 + index, vocab_size, (5, 33)) for index in range(3)]
        data[0] = _replayed(data[0], allowed)
        data[1] = [*_replayed(data[1][:1], allowed), replace(data[1][1], routed_experts=NOT_SAMPLED)]
        data[2] = [replace(each, routed_experts=NOT_SAMPLED) for each in data[2]]

        def ops(models: list[str]) -> list[ForwardBackward]:
            return [ForwardBackward(model_id=model, data=tuple(own)) for model, own in zip(models, data, strict=True)]

        together = succeeded(driver.backend.forward_backward(ops(merged)))
        apart = [succeeded(driver.backend.forward_backward([op]))[0] for op in ops(separate)]
        for left, right in zip(together, apart, strict=True):
            for logp, expected in zip(logprobs_of(left), logprobs_of(right), strict=True):
                assert_same_numbers(driver.capabilities, logp, expected, "logprobs of a merged call")
        for left_id, right_id in zip(merged, separate, strict=True):
            gradients = driver.state(right_id).gradients
            for name, array in driver.state(left_id).gradients.items():
                assert_same_numbers(driver.capabilities, array, gradients[name], f"gradient {name} of a merged call")


def _replayed(data: Sequence[Datum], allowed: ReplayedExperts) -> list[Datum]:
    return [
        replace(datum, routed_experts=random_experts(index, len(datum.tokens_T), allowed))
        for index, datum in enumerate(data)
    ]
