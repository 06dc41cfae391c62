"""Archives of checkpoints that change while they are sent."""

import io
import random
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tinsmith.checkpoints import atomic_directory
from tinsmith.checkpoints.saved import open_checkpoint_files
from tinsmith.errors import NotFoundError
from tinsmith.server.archives import COMPLETE, Archive, RangeOutsideError, wanted_range

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
    archive = Archive(files, NAME)
    size = archive.size
    pieces = archive.read()
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


def whole(root: Path) -> tuple[bytes, str]:
    archive = Archive(open_checkpoint_files(root, NAME), NAME)
    return b"".join(archive.read()), archive.etag


def test_every_range_has_the_bytes_of_the_whole_and_closes_the_files(tmp_path: Path) -> None:
    save(tmp_path, b"x" * 700 + b"y")
    content, _ = whole(tmp_path)
    dice = random.Random(0)
    for start, stop in [(0, 1), (511, 513), (len(content) - 1, len(content))] + [
        tuple(sorted((dice.randrange(len(content)), dice.randrange(len(content))))) for _ in range(200)
    ]:
        files = open_checkpoint_files(tmp_path, NAME)
        assert b"".join(Archive(files, NAME).read(start, stop)) == content[start:stop]
        assert all(file.closed for file in files)


def test_the_etag_is_that_of_a_version(tmp_path: Path) -> None:
    save(tmp_path, b"first")
    content, etag = whole(tmp_path)
    assert whole(tmp_path) == (content, etag)
    save(tmp_path, b"other")
    assert whole(tmp_path)[1] != etag


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, None),
        ("bytes=0-", (0, 10240)),
        ("bytes=10-", (10, 10240)),
        ("bytes=10-19", (10, 20)),
        ("bytes = 10 - 19", (10, 20)),
        ("bytes=10-99999999999999", (10, 10240)),
        ("bytes=-10", (10230, 10240)),
        ("bytes=-99999", (0, 10240)),
        ("bytes=5-4", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=-", None),
        ("bytes=10240-", RangeOutsideError),
        ("bytes=-0", RangeOutsideError),
        ("bytes=" + "9" * 30 + "-", None),
    ],
)
def test_what_a_client_asks_for(tmp_path: Path, asked: str | None, wanted: Any) -> None:
    save(tmp_path, b"first")
    archive = Archive(open_checkpoint_files(tmp_path, NAME), NAME)
    assert archive.size == 10240
    with pytest.raises(RangeOutsideError) if wanted is RangeOutsideError else nullcontext():
        assert wanted_range(asked, None, archive) == wanted
        assert wanted_range(asked, archive.etag, archive) == wanted
        assert wanted_range(asked, '"another"', archive) is None
        assert wanted_range(asked, "Sat, 28 Nov 2026 00:00:00 GMT", archive) is None
    archive.close()
