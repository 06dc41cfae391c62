"""A replay compares what was recorded, bit for bit; what a newer version adds is no difference."""

from collections.abc import Mapping

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.engine.replay import difference


def a_pass(outputs: Mapping[str, float], metrics: Mapping[str, float]) -> ops.ForwardBackwardOutput:
    arrays = {name: np.full(3, value, np.float32) for name, value in outputs.items()}
    return ops.ForwardBackwardOutput(loss_fn_outputs=(arrays,), metrics=metrics)


RECORDED = a_pass({"logprobs": -1.0}, {"loss:sum": 3.0})


@pytest.mark.parametrize(
    ("replayed", "differs"),
    [
        (RECORDED, None),
        (a_pass({"logprobs": -1.0, "elementwise_loss": 1.0}, {"loss:sum": 3.0, "not_finite:max": 0.0}), None),
        (a_pass({"logprobs": -1.5}, {"loss:sum": 3.0}), "by 0.5 in logprobs of datum 0"),
        (a_pass({"logprobs": -1.0}, {"loss:sum": np.nan}), "by nan in metric 'loss:sum'"),
        (a_pass({"logprobs": -1.0}, {}), "only what was recorded has metric 'loss:sum'"),
        (a_pass({}, {"loss:sum": 3.0}), "only what was recorded has logprobs of datum 0"),
    ],
)
def test_what_was_recorded_is_compared(replayed: ops.ForwardBackwardOutput, differs: str | None) -> None:
    assert difference(RECORDED, replayed) == differs


def test_steps_are_compared_by_their_metrics() -> None:
    recorded = ops.OptimStepOutput(metrics={"grad_norm": 1.0})
    assert difference(recorded, ops.OptimStepOutput(metrics={"grad_norm": 1.0, "more": 2.0})) is None
    assert difference(recorded, ops.OptimStepOutput(metrics={"grad_norm": 1.5})) == "by 0.5 in metric 'grad_norm'"
