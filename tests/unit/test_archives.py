"""Archives of checkpoints that change while they are sent."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.checkpoints import atomic_directory
from tinsmith.checkpoints.saved import open_checkpoint_files
from tinsmith.errors import NotFoundError
from tinsmith.server.routes.downloads import COMPLETE, archive, archive_bytes

NAME = "m/weights/a"
FILES = ("optimizer.safetensors", "weights.safetensors")


def save(root: Path, content: bytes) -> None:
    def fill(directory: Path) -> None:
        for name in FILES:
            (directory / name).write_bytes(content)

    atomic_directory.write(root, NAME, fill, overwrite=True)


@pytest.mark.parametrize(
    "change",
    [lambda root: save(root, b"newer, and longer"), lambda root: atomic_directory.delete(root, NAME)],
    ids=["replaced", "deleted"],
)
def test_an_archive_holds_the_version_that_was_there_when_it_began(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    save(tmp_path, b"first")
    files = open_checkpoint_files(tmp_path, NAME)
    size = archive_bytes(files)
    pieces = archive(files)
    sent = next(pieces)
    change(tmp_path)
    sent += b"".join(pieces)
    assert len(sent) == size
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        assert tar.getnames() == [*FILES, COMPLETE]
        for name in FILES:
            found = tar.extractfile(name)
            assert found is not None
            assert found.read() == b"first"
    assert all(file.closed for file in files)


def test_a_version_that_is_replaced_while_its_files_are_opened_is_not_mixed_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, b"first")
    read, really_open = list[str](), Path.open

    def replaced_in_between(path: Path, mode: str) -> object:
        if mode == "rb":
            read.append(path.name)
            if len(read) == 2:
                save(tmp_path, b"second")
        return really_open(path, mode)

    monkeypatch.setattr(Path, "open", replaced_in_between)
    files = open_checkpoint_files(tmp_path, NAME)
    assert [file.read() for file in files] == [b"second", b"second"]
    assert read == [*FILES, *FILES]
    for file in files:
        file.close()


def test_a_checkpoint_that_is_not_there_has_no_archive(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        open_checkpoint_files(tmp_path, NAME)
