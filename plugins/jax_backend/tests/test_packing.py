"""How requests are cut into micro-batches: order, limits, and as little padding as there can be."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith import Datum, ForwardBackward
from tinsmith_jax.buckets import Bucket, Buckets
from tinsmith_jax.packing import MicroBatch, Piece, plan, room_beside
from tinsmith_jax.tiles import MAX_ADAPTERS, TILE

BUCKETS = Buckets(max_tokens=1024, max_targets=64)


def piece(index: int, model: str, num_tokens: int, *, rank: int = 8, targets: int = 1) -> Piece:
    datum = Datum(tokens_T=np.zeros(num_tokens, np.int32), loss_inputs={})
    op = ForwardBackward(model_id=model, data=(datum,))
    return Piece(
        op_index=index,
        op=op,
        datum=datum,
        scale=1.0,
        padded_rank=rank,
        targets_TK=np.zeros((num_tokens, targets), np.int64),
    )


def padded_tokens(batches: list[MicroBatch]) -> list[int]:
    return [batch.bucket(BUCKETS).num_tokens for batch in batches]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([64] * 9, [512, 128]),  # not 1024
        ([64] * 15, [1024]),  # 512 + 256 + 256 is no less, and three calls
        ([600], [1024]),
        ([600, 30], [1024]),
        ([900] * 2 + [30], [1024, 1024]),
        ([1], [128]),
    ],
)
def test_cuts_pad_least(lengths: list[int], expected: list[int]) -> None:
    pieces = [piece(index, "m", length) for index, length in enumerate(lengths)]
    assert sorted(padded_tokens(list(plan(pieces, BUCKETS, 32)))) == sorted(expected)


def test_dear_calls_are_not_multiplied() -> None:
    pieces = [piece(index, "m", 64) for index in range(9)]
    assert padded_tokens(list(plan(pieces, BUCKETS, 4096))) == [1024]


@pytest.mark.parametrize("lengths", [[1024], [700, 300], [128] * 8, [64] * 16, [256] * 4])
def test_scoring_of_half_the_room_costs_half(lengths: list[int]) -> None:
    sizes = Buckets(max_tokens=2048, max_targets=128, kind="score")
    batches = plan([piece(index, "m", length) for index, length in enumerate(lengths)], sizes, 32)
    assert sum(batch.bucket(sizes).num_tokens for batch in batches) == 1024


def test_scoring_a_few_tokens_costs_little() -> None:
    """A save for sampling scores the gate's probes."""
    sizes = Buckets(max_tokens=2048, max_targets=128, kind="score")
    (batch,) = plan([piece(index, "m", 32) for index in range(2)], sizes, 32)
    assert batch.bucket(sizes).num_tokens == 128


def test_less_room_makes_smaller_batches() -> None:
    """A sequence that is longer than that runs by itself."""
    pieces = [piece(index, "m", length) for index, length in enumerate([64, 128, 200, 600, 30, 64])]
    batches = list(plan(pieces, BUCKETS, 32, 256))
    assert [[each.op_index for each in batch.pieces] for batch in batches] == [[0, 1], [2], [3], [4, 5]]
    assert padded_tokens(batches) == [256, 256, 1024, 128]


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ([128] * 8, 2048, 512),
        ([64] * 4, 2048, 128),
        ([64] * 5, 2048, 256),
        ([1], 2048, 128),
        ([2048], 2048, 512),  # as many tiles as there are rows
        ([128] * 8, 512, 256),
        ([128] * 8, 192, 192),  # too little for two
    ],
)
def test_two_passes_share_the_room_and_the_work(lengths: list[int], room: int, expected: int) -> None:
    assert room_beside([piece(index, "m", length) for index, length in enumerate(lengths)], room) == expected


def test_tiles_apart_have_rows_of_their_own() -> None:
    batch = MicroBatch()
    for index, (model, length) in enumerate([("a", 100), ("b", 64), ("a", 1), ("b", 65), ("c", 10)]):
        batch.add(piece(index, model, length))
    assert batch.rows() == (["a", "b", "c"], [[0, 0], [1], [0], [1, 1], [2]])
    assert batch.rows({"a", "c"}) == (["a", "a", "b", "a", "c"], [[0, 1], [2], [3], [2, 2], [4]])


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=12))
def test_halves_are_as_equal_as_whole_sequences_allow(lengths: list[int]) -> None:
    batch = MicroBatch()
    for index, length in enumerate(lengths):
        batch.add(piece(index, f"m{index % 3}", length))
    first, second = batch.halves()
    assert [*first.pieces, *second.pieces] == batch.pieces
    assert [set(half.models) for half in (first, second)] == [
        {each.op.model_id for each in half.pieces} for half in (first, second)
    ]
    sizes = [sum(each.num_tiles for each in half.pieces) for half in (first, second)]
    assert min(sizes) > 0
    assert max(sizes) <= sum(sizes) / 2 + max(each.num_tiles for each in batch.pieces)


def assert_in_streams(batch: MicroBatch, bucket: Bucket, num_streams: int) -> None:
    """No piece is divided, and none overlaps another."""
    assert bucket.num_tokens <= BUCKETS.max_tokens
    end = 0
    for start, each in zip(batch.starts(bucket), batch.pieces, strict=True):
        assert start >= end
        end = start + each.num_tiles * TILE
        assert start // bucket.num_tokens == (end - 1) // bucket.num_tokens < num_streams


PIECES = st.lists(
    st.tuples(st.integers(0, 11), st.integers(1, 1024), st.sampled_from([8, 32]), st.sampled_from([1, 2])),
    max_size=40,
)


@settings(deadline=None, derandomize=True)
@given(PIECES, st.sampled_from([1, 3]))
def test_every_piece_runs_once_and_in_its_models_order(
    drawn: list[tuple[int, int, int, int]], num_streams: int
) -> None:
    buckets = replace(BUCKETS, num_streams=num_streams)
    pieces = [
        piece(index, f"{model}/{rank}", length, rank=rank, targets=targets)
        for index, (model, length, rank, targets) in enumerate(drawn)
    ]
    batches = list(plan(pieces, buckets, 32))
    order: dict[str, list[int]] = {}
    for batch in batches:
        assert_in_streams(batch, batch.bucket(buckets), num_streams)
        assert len(batch.models) <= MAX_ADAPTERS
        assert len({each.padded_rank for each in batch.pieces}) == 1
        assert len({each.num_targets > 1 for each in batch.pieces}) == 1
        for each in batch.pieces:
            order.setdefault(each.op.model_id, []).append(each.op_index)
    expected: dict[str, list[int]] = {}
    for each in pieces:
        expected.setdefault(each.op.model_id, []).append(each.op_index)
    assert order == expected
