"""The draw of all rows at once: its distribution, its independence of the batch, and what it launches."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinsmith_vllm.draws import draw, quantiles

VOCAB = 1000


def logits(rows: int, *, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += 1
        return operator(*args, **(kwargs or {}))


def launches(rows: int) -> int:
    given, seeds = logits(rows), quantiles(range(rows), [0] * rows)
    with _Launches() as counted:
        draw(given, seeds)
    return counted.number


def test_more_rows_launch_nothing_more() -> None:
    assert launches(1) == launches(256)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """Chi-square over eight groups of tokens, 20,000 draws, one position each: below the 99.9th percentile."""
    row = logits(1)[0]
    likely = row.softmax(-1).double().numpy()
    number = 20_000
    drawn = draw(row.expand(number, -1), quantiles([7] * number, range(number))).numpy()
    group = np.arange(VOCAB) % 8
    expected = number * np.bincount(group, likely, 8)
    found = np.bincount(group[drawn], minlength=8)
    assert ((found - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom


def test_a_row_is_drawn_alike_alone_and_in_company() -> None:
    rows, seeds, positions = logits(64), list(range(64)), [5] * 64
    together = draw(rows, quantiles(seeds, positions))
    alone = [draw(rows[n : n + 1], quantiles(seeds[n : n + 1], [5])) for n in range(64)]
    assert torch.equal(together, torch.cat(alone))


def test_seeds_and_positions_give_numbers_of_their_own() -> None:
    seeds, positions = np.meshgrid(np.arange(100), np.arange(100))
    found = quantiles(seeds.ravel(), positions.ravel())
    assert len(np.unique(found)) == 10_000
    assert 0 <= found.min() < 0.001
    assert 0.999 < found.max() < 1
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("quantile", [0.0, 1 - 2**-52])
def test_an_excluded_token_is_never_drawn(quantile: float) -> None:
    """At both ends of the distribution, where rounding would show."""
    rows = torch.full((1, VOCAB), -torch.inf)
    rows[0, 400:600] = 0.0
    (token,) = draw(rows, np.array([quantile])).tolist()
    assert token == (400 if quantile == 0.0 else 599)


def test_a_token_that_is_sure_is_drawn() -> None:
    rows = torch.full((3, VOCAB), -torch.inf)
    rows[:, 123] = 2.0
    assert draw(rows, quantiles([1, 2, 3], [0, 0, 0])).tolist() == [123] * 3


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_get_a_token_and_change_no_other_row(number: float) -> None:
    """An index beyond the vocabulary would end the process at the next step."""
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    where = quantiles([1, 2, 3], [0, 0, 0])
    expected = draw(logits_RV, where).tolist()
    logits_RV[1] = number
    tokens = draw(logits_RV, where).tolist()
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert 0 <= tokens[1] < 50
