"""Two processes that both believe that they write: one was stopped, and goes on after the other has taken over."""

import errno
import os
from pathlib import Path

import pytest

from tinsmith.checkpoints import atomic_directory

OLD_EPOCH, NEW_EPOCH = 1, 2


def write(root: Path, name: str, text: str, epoch: int) -> None:
    atomic_directory.write(root, name, lambda fresh: said(fresh, text), overwrite=True, epoch=epoch)


def said(fresh: Path, text: str) -> None:
    (fresh / "text").write_text(text)


def text_at(root: Path, name: str) -> str:
    return (atomic_directory.find(root, name) / "text").read_text()


def test_directories_above_that_cannot_be_synchronised_fail_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the root of an automounter."""
    home, own = tmp_path / "home", os.fsync
    root = home / "user" / "data" / "checkpoints"
    root.mkdir(parents=True)

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), home.stat()):
            raise OSError(errno.EINVAL, "Invalid argument")
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(root, "one", "text", 1)
    assert text_at(root, "one") == "text"


@pytest.mark.parametrize("name", ["run/a", "run/b"])
def test_a_writer_that_was_superseded_leaves_what_its_successor_writes(tmp_path: Path, name: str) -> None:
    def fill(fresh: Path) -> None:
        write(tmp_path, name, "late", OLD_EPOCH)
        said(fresh, "new")

    atomic_directory.write(tmp_path, "run/a", fill, overwrite=True, epoch=NEW_EPOCH)
    assert text_at(tmp_path, "run/a") == "new"
    assert text_at(tmp_path, name) == ("new" if name == "run/a" else "late")


def test_a_version_that_is_put_back_meanwhile_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "run/a", "old", OLD_EPOCH)
    put, seen = atomic_directory.put, []

    def put_late(target: Path, fresh: Path) -> None:
        if target.name == "a" and not seen:
            write(tmp_path, "run/b", "late", OLD_EPOCH)  # finds `.a.old` without `a`, as after a crash
            seen.append(text_at(tmp_path, "run/a"))
        put(target, fresh)

    monkeypatch.setattr(atomic_directory, "put", put_late)
    write(tmp_path, "run/a", "new", NEW_EPOCH)
    assert seen == ["old"]
    assert text_at(tmp_path, "run/a") == "new"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "b"]


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    for left in (".a.new-1-x", ".a.new-2-x", ".b.new-3-x", ".c.new-x", ".d.deleted-x"):
        (tmp_path / "run" / left).mkdir(parents=True)
    write(tmp_path, "run/a", "new", NEW_EPOCH)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".b.new-3-x", "a"]
