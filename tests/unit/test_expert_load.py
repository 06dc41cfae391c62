"""The metrics of experts: their names, their values, and how the SDK combines those of a request that it has split."""

import re
from pathlib import Path

import numpy as np
import pytest
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput, forward_backward_output

from tinsmith import expert_metrics

NAMES = (
    "e_frac_with_tokens:mean", "e_frac_oversubscribed:mean", "e_max_violation:mean", "e_max_violation:max",
    "e_min_violation:mean",
)  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([[2, 2, 2, 2]], (1.0, 0.0, 0.0, 0.0, 0.0), id="even"),
        pytest.param([[8, 0, 0, 0]], (0.25, 0.25, 3.0, 3.0, -1.0), id="all on one"),
        pytest.param([[3, 3, 1, 1]], (1.0, 0.5, 0.5, 0.5, -0.5), id="none idle"),
        pytest.param([[8, 0, 0, 0], [2, 2, 2, 2]], (0.625, 0.125, 1.5, 3.0, -0.5), id="two layers"),
        pytest.param([[1, 1, 0], [1, 1, 0]], (2 / 3, 2 / 3, 0.5, 0.5, -1.0), id="balance of a fraction"),
    ],
)
def test_values_by_hand(tokens: list[list[int]], expected: tuple[float, ...]) -> None:
    found = expert_metrics(np.array(tokens))
    assert tuple(found) == NAMES
    assert tuple(found.values()) == pytest.approx(expected, rel=1e-15)
    assert {type(value) for value in found.values()} == {float}


def test_the_names_are_those_that_the_sdk_documents() -> None:
    documented = re.findall(r"``(e_\w+:\w+)``: ", Path(forward_backward_output.__file__).read_text())
    assert sorted(documented) == sorted(NAMES)


def test_the_sdk_combines_them_by_their_reductions() -> None:
    """Means are weighted by the number of sequences of each part, and the largest is the largest of all."""
    one, other = expert_metrics(np.array([[8, 0], [4, 4]])), expert_metrics(np.array([[3, 1], [3, 1]]))
    parts = [
        ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{}] * number, metrics=metrics)
        for number, metrics in ((3, one), (1, other))
    ]
    combined = combine_fwd_bwd_output_results(parts).metrics
    assert combined == pytest.approx(dict(zip(NAMES, (0.8125, 0.3125, 0.5, 1.0, -0.5), strict=True)), rel=1e-15)
