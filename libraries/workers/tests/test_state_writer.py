"""The worker's side of a capture: no framework, no processes. The disk waits until a test opens it."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tinsmith.operations import FloatArray
from tinsmith_checkpoints.huggingface import Kind, Targets
from tinsmith_checkpoints.huggingface.state_files import lay_out
from tinsmith_workers import Slice, StateWriter, Written

SHAPES = {"square": (8, 4), "vector": (16,)}
ROWS = 2
BAND = ROWS * 4 * 4  # bytes of two rows of the square
STATE = 3 * (8 * 4 + 16) * 4  # bytes of the weights and moments
KINDS: tuple[Kind, ...] = ("gradients", "weights", "adam_m", "adam_v")
WAIT_S = 300.0


class Model:
    """Tensors that change in place."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.tensors: dict[Kind, dict[str, FloatArray]] = {
            kind: {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()} for kind in KINDS
        }

    def slices(self, targets: Targets, *, halves: bool = False) -> Iterator[Slice]:
        for kind, tensors in targets.items():
            for name, target in tensors.items():
                array = self.tensors[kind][name]
                columns = [(2, 4), (0, 2)] if halves and array.ndim == 2 else [None]
                for start in range(0, len(array), ROWS if array.ndim == 2 else ROWS * 4):
                    rows = array[start : start + (ROWS if array.ndim == 2 else ROWS * 4)]
                    for each in columns:
                        part = rows if each is None else rows[:, slice(*each)]
                        yield Slice(
                            kind=kind,
                            target=target,
                            start=start,
                            columns=each,
                            num_bytes=part.nbytes,
                            read=part.copy,
                        )

    def change(self) -> None:
        for tensors in self.tensors.values():
            for array in tensors.values():
                np.add(array, 1, out=array)


class Disk:
    """Takes nothing before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.asked = threading.Event(), threading.Event()
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._write)

    def _write(self, file: int, data: memoryview, offset: int) -> int:
        self.asked.set()
        assert self.opened.wait(WAIT_S)
        return self._pwrite(file, data, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.opened.set()


def complete(writer: StateWriter, capture_id: str) -> Written:
    poll = threading.Event()
    while not (found := writer.written(capture_id)).complete and found.refusal is None:
        poll.wait(0.001)
    return found


def files_hold(directory: Path, expected: Sequence[tuple[str, FloatArray]]) -> None:
    stored: dict[str, FloatArray] = {}
    for file in directory.glob("*.safetensors"):
        stored |= safetensors.numpy.load_file(file)
    assert stored.keys() == {name for name, _ in expected}
    for name, array in expected:
        np.testing.assert_array_equal(stored[name], array)


def copied(model: Model, prefixes: dict[Kind, str]) -> list[tuple[str, FloatArray]]:
    return [(prefixes[k] + name, array.copy()) for k in prefixes for name, array in model.tensors[k].items()]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shard_bytes", [100, 1 << 20])
def test_slices_come_together(tmp_path: Path, shard_bytes: int, halves: bool) -> None:
    model, writer = Model(), StateWriter(STATE)
    targets = lay_out(tmp_path, SHAPES, ("weights", "adam_m", "adam_v"), shard_bytes)
    writer.begin("c", "m", list(model.slices(targets, halves=halves))[::-1])
    assert complete(writer, "c") == Written(complete=True, refusal=None, num_bytes=STATE)
    files_hold(tmp_path, copied(model, {"weights": "", "adam_m": "adam_m.", "adam_v": "adam_v."}))
    assert writer.settled_bytes == 0


def test_what_changes_after_settling_is_written_as_it_was(tmp_path: Path, disk: Disk) -> None:
    """All of it fits into the buffer: nothing waits for the disk."""
    model, writer = Model(), StateWriter(STATE)
    before = copied(model, {"weights": "", "adam_m": "adam_m.", "adam_v": "adam_v."})
    targets = lay_out(tmp_path, SHAPES, ("weights", "adam_m", "adam_v"), 1 << 20)
    writer.begin("c", "m", model.slices(targets))
    writer.settle("m", KINDS)
    model.change()
    assert not writer.written("c").complete
    disk.opened.set()
    assert complete(writer, "c").complete
    files_hold(tmp_path, before)
    assert 0 < writer.settled_bytes <= STATE


def test_what_does_not_fit_into_the_buffer_waits_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    model, writer = Model(), StateWriter(3 * BAND)
    before = copied(model, {"weights": "", "adam_m": "adam_m.", "adam_v": "adam_v."})
    targets = lay_out(tmp_path, SHAPES, ("weights", "adam_m", "adam_v"), 1 << 20)
    writer.begin("c", "m", model.slices(targets))
    assert disk.asked.wait(WAIT_S)
    order: list[str] = []
    trainer = threading.Thread(target=lambda: (writer.settle("m", KINDS), order.append("settled")))
    trainer.start()
    while writer.peak_bytes < 3 * BAND:  # the training thread fills the buffer, and no more
        threading.Event().wait(0.001)
    order.append("opened")
    disk.opened.set()
    trainer.join(WAIT_S)
    assert order == ["opened", "settled"]
    model.change()
    assert complete(writer, "c").complete
    files_hold(tmp_path, before)
    assert writer.peak_bytes == 3 * BAND


def test_only_what_is_about_to_change_is_settled(tmp_path: Path, disk: Disk) -> None:
    """A backward pass changes gradients alone; another model's step changes nothing here."""
    model, writer = Model(), StateWriter(STATE)
    targets = lay_out(tmp_path, SHAPES, ("gradients", "weights"), 1 << 20)
    writer.begin("c", "m", model.slices(targets))
    writer.settle("other", KINDS)
    assert writer.settled_bytes == 0
    writer.settle("m", ("gradients",))
    assert writer.settled_bytes <= STATE // 3
    disk.opened.set()
    complete(writer, "c")


def test_settling_waits_for_the_slice_that_is_being_copied(tmp_path: Path) -> None:
    begun, go, order = threading.Event(), threading.Event(), list[str]()
    model, writer = Model(), StateWriter(STATE)
    first, *_ = model.slices(lay_out(tmp_path, SHAPES, ("weights",), 1 << 20))

    def slowly() -> FloatArray:
        begun.set()
        assert go.wait(WAIT_S)
        order.append("copied")
        return first.read()

    slow = Slice(kind="weights", target=first.target, start=0, columns=None, num_bytes=first.num_bytes, read=slowly)
    writer.begin("c", "m", [slow])
    assert begun.wait(WAIT_S)
    trainer = threading.Thread(target=lambda: (writer.settle("m", KINDS), order.append("settled")))
    trainer.start()
    trainer.join(0.1)  # would be enough for a thread that does not wait
    go.set()
    trainer.join(WAIT_S)
    assert order == ["copied", "settled"]
    complete(writer, "c")


def test_a_disk_that_refuses_stops_no_training_and_no_other_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, writer = Model(), StateWriter(BAND)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        writer.begin("c", "m", model.slices(lay_out(tmp_path, SHAPES, ("weights",), 1 << 20)))
        writer.settle("m", KINDS)
        assert complete(writer, "c").refusal == "No space left on device"
    (tmp_path / "next").mkdir()
    writer.begin("d", "m", model.slices(lay_out(tmp_path / "next", SHAPES, ("weights",), 1 << 20)))
    assert complete(writer, "d").complete
    files_hold(tmp_path / "next", copied(model, {"weights": ""}))


def test_a_slice_that_cannot_be_copied_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    def broken() -> FloatArray:
        raise ZeroDivisionError

    model, writer = Model(), StateWriter(STATE)
    first, *_ = model.slices(lay_out(tmp_path, SHAPES, ("weights",), 1 << 20))
    bad = Slice(kind="weights", target=first.target, start=0, columns=None, num_bytes=BAND, read=broken)
    writer.begin("c", "m", [bad])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        complete(writer, "c")


def test_what_nobody_waits_for_is_not_written(tmp_path: Path, disk: Disk) -> None:
    model, writer = Model(), StateWriter(STATE)
    reads: list[Callable[[], FloatArray]] = []
    slices = [
        Slice(
            kind=each.kind,
            target=each.target,
            start=each.start,
            columns=None,
            num_bytes=each.num_bytes,
            read=lambda own=each: (reads.append(own.read), own.read())[1],
        )
        for each in model.slices(lay_out(tmp_path, SHAPES, ("weights",), 1 << 20))
    ]
    writer.begin("c", "m", slices)
    assert disk.asked.wait(WAIT_S)
    writer.forget(["c"])
    writer.settle("m", KINDS)
    (tmp_path / "next").mkdir()
    writer.begin("d", "m", [])
    disk.opened.set()
    assert complete(writer, "d").complete
    assert len(reads) == 1, "the one whose writing had begun"
