"""The disk of a campaign: it fails where it is told to, or loses at a power cut what was not synchronised."""

import errno
import mmap
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

CALLS = ("open", "write", "sync", "rename", "link", "unlink", "mkdir", "truncate")
_SOURCE = Path(__file__).with_suffix(".c")
_HEAD = struct.Struct("=IiIIQQ")  # mode, error, per million, unused, nth, number
_COUNTS = struct.Struct(f"={len(CALLS)}Q")
_PATH_BYTES = 1024
_FAIL, _SHADOW = 1, 2
_CHANCE = 0.5  # that something survives which was not synchronised


class Control:
    """What the processes are told. They, and those that tell them, map one file."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)

    def _set(self, mode: int, *, error: int = 0, per_million: int = 0, nth: int = 0) -> None:
        counts = _HEAD.size
        self._map[counts : counts + 2 * _COUNTS.size] = bytes(2 * _COUNTS.size)
        self._map[: _HEAD.size] = _HEAD.pack(0, error, per_million, 0, nth, 0)
        self._map[: _HEAD.size] = _HEAD.pack(mode, error, per_million, 0, nth, 0)

    def fail(self, error: int, *, per_million: int = 0, nth: int = 0) -> None:
        """Let calls fail: each with this chance, or the nth of them alone."""
        self._set(_FAIL, error=error, per_million=per_million, nth=nth)

    def heal(self) -> dict[str, int]:
        """Return how many calls of each kind have failed."""
        failed = self._counts(1)
        self._set(0)
        return failed

    @property
    def seen(self) -> dict[str, int]:
        """How many calls of each kind there were since `fail`."""
        return self._counts(0)

    def _counts(self, which: int) -> dict[str, int]:
        at = _HEAD.size + which * _COUNTS.size
        return dict(zip(CALLS, _COUNTS.unpack(self._map[at : at + _COUNTS.size]), strict=True))


class Disk(Control):
    """The disk of the processes of one launcher."""

    def __init__(self, work: Path) -> None:
        self.library = work / "disk_shim.so"
        self.shadow = work / "shadow"
        self._file = work / "control"
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", self.library, _SOURCE, "-ldl"], check=True)
        self._file.write_bytes(bytes(_HEAD.size + 2 * _COUNTS.size + 2 * _PATH_BYTES))
        super().__init__(self._file)

    @property
    def environ(self) -> dict[str, str]:
        """Return what a process needs to have this disk."""
        return {"LD_PRELOAD": str(self.library), "DISK_CONTROL": str(self._file)}

    def holds(self, directory: Path) -> None:
        """Let everything below `directory` lie on this disk, which is healthy so far."""
        self._set(0)
        shutil.rmtree(self.shadow, ignore_errors=True)
        self.shadow.mkdir()
        start = _HEAD.size + 2 * _COUNTS.size
        for number, path in enumerate((directory, self.shadow)):
            at = start + number * _PATH_BYTES
            self._map[at : at + _PATH_BYTES] = os.fsencode(path).ljust(_PATH_BYTES, b"\0")

    def remember(self) -> None:
        """Keep note of what is synchronised. Call this before anything is written."""
        self._set(_SHADOW)

    def cut_power(self, directory: Path, kept: random.Random | None = None) -> None:
        """Replace `directory` by what the cut leaves: what was synchronised, and by chance some that was not.

        No process may use it. The next one starts with what is there now, which is on the disk.
        """
        left = directory.with_name(f"{directory.name}-after-the-cut")
        self._restore(directory.stat().st_ino, directory, left, kept)
        shutil.rmtree(directory)
        left.rename(directory)
        for path in self.shadow.iterdir():
            path.unlink()
        self._note(directory)

    def _restore(self, inode: int, found: Path | None, left: Path, kept: random.Random | None) -> None:
        """Make the directory `left` from its names. `found` is there now, unless it has been removed."""
        left.mkdir(mode=0o700)  # as the product makes them
        names = self._names(inode)
        present = {} if found is None else {path.stat().st_ino: path for path in _files_and_directories(found)}
        if kept is not None:
            for path in present.values():
                if kept.random() < _CHANCE:
                    names[path.name] = "d" if path.is_dir() else "f", path.stat().st_ino
        for name, (what, number) in sorted(names.items()):
            there = present.get(number)
            if what == "d":
                self._restore(number, there, left / name, kept)
            else:
                self._restore_file(number, there, left / name, kept)

    def _restore_file(self, inode: int, there: Path | None, left: Path, kept: random.Random | None) -> None:
        synchronised = self.shadow / f"f-{inode}"
        if there is not None and kept is not None and kept.random() < _CHANCE:
            shutil.copyfile(there, left)
        elif synchronised.exists():
            shutil.copyfile(synchronised, left)
        else:
            left.touch()

    def _names(self, inode: int) -> dict[str, tuple[str, int]]:
        """Return kind and inode of each name in a directory when it was synchronised last."""
        listing = self.shadow / f"d-{inode}"
        if not listing.exists():
            return {}
        lines = [line.split(" ", 2) for line in listing.read_text().splitlines()]
        return {name: (what, int(number)) for what, number, name in lines}

    def _note(self, directory: Path) -> None:
        """Note what lies on the disk as synchronised."""
        lines = []
        for path in _files_and_directories(directory):
            what, inode = "d" if path.is_dir() else "f", path.stat().st_ino
            lines.append(f"{what} {inode} {path.name}\n")
            if path.is_dir():
                self._note(path)
            else:
                shutil.copyfile(path, self.shadow / f"f-{inode}")
        (self.shadow / f"d-{directory.stat().st_ino}").write_text("".join(lines))


ERRORS: Mapping[str, int] = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}


def _files_and_directories(directory: Path) -> list[Path]:
    """Without sockets: a cut leaves none."""
    return [path for path in sorted(directory.iterdir()) if path.is_dir() or path.is_file()]
