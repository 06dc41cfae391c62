"""The file between workers and whoever reads a fully trained model: no framework, no processes."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tinsmith import ServerError
from tinsmith.workers import Piece, Spool

SHAPES = {"square": (6, 4), "vector": (5,)}


def whole(name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return np.random.default_rng(len(name)).normal(size=SHAPES[name]).astype(np.float32)


def test_pieces_come_together_whatever_their_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path, ("weights", "adam_m"), SHAPES)
    square, vector = whole("square"), whole("vector")
    for kind, factor in (("adam_m", 2), ("weights", 1)):
        for start, stop, columns in ((4, 6, None), (0, 4, (2, 4)), (0, 4, (0, 2))):
            part = square[start:stop] if columns is None else square[start:stop, slice(*columns)]
            spool.put(Piece(kind=kind, name="square", start=start, columns=columns, values=factor * part))  # type: ignore[arg-type]
        for start, stop in ((3, 5), (0, 3)):
            values = factor * vector[start:stop]
            spool.put(Piece(kind=kind, name="vector", start=start, columns=None, values=values))  # type: ignore[arg-type]
    weights, moments = spool.tensors("weights"), spool.tensors("adam_m")
    assert set(weights) == set(SHAPES)
    for name in SHAPES:
        np.testing.assert_array_equal(weights[name], whole(name))
        np.testing.assert_array_equal(moments[name], 2 * whole(name))
    with pytest.raises(KeyError):
        weights["stray"]


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    spool = Spool(tmp_path, ("weights",), SHAPES)
    assert not list(tmp_path.iterdir()), "it has no name, so that no death leaves it"
    descriptor = spool._file
    tensors = spool.tensors("weights")
    del spool
    os.fstat(descriptor)  # who holds tensors holds the file
    del tensors
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_disk_that_refuses_is_told_to_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spool = Spool(tmp_path, ("weights",), SHAPES)
    monkeypatch.setattr(os, "pwrite", refuse)
    spool.put(Piece(kind="weights", name="vector", start=0, columns=None, values=whole("vector")))
    monkeypatch.undo()
    spool.put(Piece(kind="weights", name="square", start=0, columns=None, values=whole("square")))
    with pytest.raises(ServerError, match="No space left on device"):
        spool.tensors("weights")["square"]
