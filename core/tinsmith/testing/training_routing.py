"""The contract of routing replay: given experts compute a token in place of the router's choice.

So it is known which experts compute what, and the metrics of experts are held to values counted here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tinsmith.backend import ReplayedExperts
from tinsmith.operations import Array, Datum, ExpertArray, ForwardBackward, ForwardBackwardOutput
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

    def test_metrics_tell_how_evenly_experts_were_used(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        """In the first layer, the same experts compute all tokens. In all others, every expert computes as many."""
        layers, experts, top_k = allowed.num_layers, allowed.num_experts, allowed.top_k
        num_tokens = experts // math.gcd(experts, top_k)
        choice_TC = np.arange(num_tokens * top_k).reshape(num_tokens, top_k) % experts
        given = np.broadcast_to(choice_TC[:, None], (num_tokens, layers, top_k)).astype(np.uint16)
        given[:, 0] = np.arange(top_k)
        datum = random_datum(77, num_tokens, driver.capabilities.vocab_size)
        model_id, data = driver.create_trained(), [replace(datum, routed_experts=given)] * 3
        used, most = top_k / experts, experts / top_k - 1
        expected = {
            "e_frac_with_tokens:mean": (used + layers - 1) / layers,
            "e_frac_oversubscribed:mean": used / layers,
            "e_max_violation:mean": most / layers,
            "e_max_violation:max": most,
            "e_min_violation:mean": -1 / layers,
        }
        for output in (driver.forward(model_id, data), driver.forward_backward(model_id, data)):
            assert _of_experts(output) == pytest.approx(expected, rel=1e-12)

    def test_metrics_are_of_the_requests_own_tokens(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        """Two of four requests are of one model."""
        vocab_size, models = driver.capabilities.vocab_size, [driver.create_trained(rank=n, seed=n) for n in (1, 4, 8)]
        lengths = ((5,), (5, 33), (33,), (33, 5))
        data = [_replayed(ragged_data(n, vocab_size, own), allowed, seed=n) for n, own in enumerate(lengths)]
        ops = [
            ForwardBackward(model_id=model_id, data=tuple(own))
            for model_id, own in zip([*models, models[0]], data, strict=True)
        ]
        for own, output in zip(data, succeeded(driver.backend.forward_backward(ops)), strict=True):
            given = [datum.routed_experts for datum in own if datum.routed_experts is not None]
            assert _of_experts(output) == pytest.approx(_metrics_by_hand(given, allowed), rel=1e-12)

    def test_routers_own_choice_is_counted(self, driver: ModelDriver, allowed: ReplayedExperts) -> None:
        """With replay for one of the two sequences, for its beginning, and for none; alone, in company and in parts."""
        model_id, other = driver.create_trained(), driver.create_trained(rank=8, seed=8)
        first, second = ragged_data(81, driver.capabilities.vocab_size, (33, 64))
        need(driver.capabilities.isolation == "bitwise", "bitwise isolation")
        given = random_experts(81, 20, allowed)
        of_other = ForwardBackward(model_id=other, data=tuple(ragged_data(82, driver.capabilities.vocab_size)))
        for data in ([first, second], [replace(first, routed_experts=given), second]):
            alone = _of_experts(driver.forward_backward(model_id, data))
            assert alone.keys() == _metrics_by_hand([given], allowed).keys()
            op = ForwardBackward(model_id=model_id, data=tuple(data))
            for ops in ([op, of_other], [of_other, op, of_other]):
                outputs = succeeded(driver.backend.forward_backward(ops))
                assert _of_experts(outputs[ops.index(op)]) == alone
            assert _of_experts(driver.forward(model_id, data)) == alone


def _of_experts(output: ForwardBackwardOutput) -> dict[str, float]:
    return {name: value for name, value in output.metrics.items() if name.startswith("e_")}


def _metrics_by_hand(experts: Sequence[ExpertArray], allowed: ReplayedExperts) -> dict[str, float]:
    """Return the metrics of a request whose tokens are all given their experts [T, L, C]."""
    chosen_PL = np.concatenate([each.swapaxes(1, 2).reshape(-1, allowed.num_layers) for each in experts])
    balance = len(chosen_PL) / allowed.num_experts
    layers: list[Array] = [np.bincount(chosen, minlength=allowed.num_experts) for chosen in chosen_PL.T]
    highest = [tokens.max() / balance - 1 for tokens in layers]
    return {
        "e_frac_with_tokens:mean": float(np.mean([(tokens > 0).mean() for tokens in layers])),
        "e_frac_oversubscribed:mean": float(np.mean([(tokens > balance).mean() for tokens in layers])),
        "e_max_violation:mean": float(np.mean(highest)),
        "e_max_violation:max": float(max(highest)),
        "e_min_violation:mean": float(np.mean([tokens.min() / balance - 1 for tokens in layers])),
    }


def _replayed(data: Sequence[Datum], allowed: ReplayedExperts, seed: int = 0) -> list[Datum]:
    return [
        replace(datum, routed_experts=random_experts(100 * seed + index, len(datum.tokens_T), allowed))
        for index, datum in enumerate(data)
    ]
