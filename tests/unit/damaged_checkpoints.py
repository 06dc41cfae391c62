"""Reads checkpoints with one random damage each, in this process, whose memory is bounded. Prints what came of it."""

import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.saved import read_checkpoint, read_snapshot
from tinsmith.errors import TinsmithError
from tinsmith_checkpoints.format import describe
from tinsmith_checkpoints.tools.adapters import adapter_of
from tinsmith_checkpoints.tools.contents import described, open_contents
from tinsmith_checkpoints.tools.rewriting import convert
from tinsmith_checkpoints.tools.verifying import faults

_MORE_MEMORY = 1 << 29  # bytes, than the process has once everything is imported
_LIMIT_S = 60  # for one checkpoint, which takes milliseconds
_HUGE = 1 << 40
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 63, 10**400, 1e308, float("nan"), "", "x\x1b[2J", "../../etc/passwd", "\x00",
    "a" * 100_000, [], {}, [_HUGE] * 3, [0] * 10_000, [-1, 8], {"a": {}}, [[[[]]]],
)  # fmt: skip


def damage(directory: Path, dice: random.Random) -> str:
    file = dice.choice(sorted(directory.iterdir()))
    how = dice.choice(
        (cut, empty, pointer, flip, insert, zero, lengthen, header_length, value, value, value, nest, kind)
    )
    how(file, dice)
    manifest = directory / "tinsmith.json"
    if dice.random() < 0.7 and file != manifest and file.is_file() and file.stat().st_size < _HUGE:
        restate(manifest, file)
    return f"{how.__name__} of {file.name}"


def restate(manifest: Path, file: Path) -> None:
    """Have the manifest state the damaged file's digest, as a stranger would."""
    if manifest.exists():
        content, stated = json.loads(manifest.read_bytes()), describe(file)
        content["files"][file.name] = {"size": stated.size, "sha256": stated.sha256}
        manifest.write_text(json.dumps(content))


def cut(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.randrange(file.stat().st_size))


def empty(file: Path, _dice: random.Random) -> None:
    file.write_bytes(b"")


def pointer(file: Path, dice: random.Random) -> None:
    """As in a clone without Git LFS."""
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize %d\n" % dice.randrange(_HUGE))


def flip(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(dice.choice((1, 1, 10))):
        content[dice.randrange(min(len(content), dice.choice((8, 200, len(content)))))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def insert(file: Path, dice: random.Random) -> None:
    content, where = file.read_bytes(), dice.randrange(file.stat().st_size)
    file.write_bytes(content[:where] + dice.randbytes(dice.choice((1, 8, 4096))) + content[where:])


def zero(file: Path, dice: random.Random) -> None:
    content, start = bytearray(file.read_bytes()), dice.randrange(file.stat().st_size)
    end = dice.randrange(start, len(content)) + 1
    content[start:end] = bytes(end - start)
    file.write_bytes(content)


def lengthen(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.choice((file.stat().st_size + 1, _HUGE)))


def header_length(file: Path, dice: random.Random) -> None:
    length = dice.choice((0, 1, 99_999_999, 1 << 31, 1 << 63, (1 << 64) - 1))
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])


def nest(file: Path, dice: random.Random) -> None:
    deep = b'{"a":' * 100_000 if dice.random() < 0.5 else b"[" * 100_000
    file.write_bytes(deep if file.suffix == ".json" else struct.pack("<Q", len(deep)) + deep)


def kind(file: Path, dice: random.Random) -> None:
    file.unlink()
    match dice.randrange(4):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            file.symlink_to("/dev/zero")


def value(file: Path, dice: random.Random) -> None:
    """Replace one value, or one name, in JSON: the file, or the header of its tensors."""
    content = file.read_bytes()
    stored = file.suffix == ".safetensors"
    end = 8 + int.from_bytes(content[:8], "little") if stored else len(content)
    parsed = json.loads(content[8 * stored : end])
    place = parsed
    while isinstance(place, dict | list) and place:
        name = dice.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        inner = place[name]
        if not isinstance(inner, dict | list) or not inner or dice.random() < 0.2:
            if isinstance(place, dict) and dice.random() < 0.2:
                place[str(dice.choice(_VALUES))] = place.pop(name)
            else:
                place[name] = dice.choice(_VALUES)
            break
        place = inner
    changed = json.dumps(parsed).encode()
    file.write_bytes((struct.pack("<Q", len(changed)) + changed if stored else changed) + content[end:])


def read(directory: Path, scratch: Path) -> str:
    """Do everything that reads checkpoints of others. Return whether one of it raised an error meant for people."""
    told = [attempt(lambda: tools(directory)), attempt(lambda: convert_to(directory, scratch))]
    told += [attempt(lambda: served(directory)), attempt(lambda: read_snapshot(directory.parent, directory.name, "s"))]
    return "refused" if any(told) else "read"


def attempt(what: Any) -> bool:
    try:
        what()
    except TinsmithError:
        return True
    return False


def tools(directory: Path) -> None:
    contents = open_contents(directory)
    json.dumps(described(contents))
    found = list(faults(contents, None, lambda _: None))
    if contents.layout == "adapter":
        adapter_of(contents)
    if found:
        raise TinsmithError(found[0])


def convert_to(directory: Path, scratch: Path) -> None:
    convert(open_contents(directory), scratch, dtype=None, shard_bytes=1 << 20, force=True, progress=lambda _: None)


def served(directory: Path) -> None:
    state = read_checkpoint(directory.parent, directory.name).state
    for tensors in (state.weights, state.adam_m, state.adam_v, state.gradients):
        dict(tensors)


def hung(*_: object) -> None:
    msg = "it hangs"
    raise RuntimeError(msg)


def main(root: Path, first: int, count: int) -> None:
    """Print how many were read or refused, and what else happened to which."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MORE_MEMORY, now + _MORE_MEMORY))
    signal.signal(signal.SIGALRM, hung)
    seen, unexpected = Counter[str](), []
    for seed in range(first, first + count):
        dice = random.Random(seed)
        sound = dice.choice(sorted((root / "sound").iterdir()))
        case = root / "case" / sound.name
        shutil.rmtree(root / "case", ignore_errors=True)
        shutil.copytree(sound, case)
        try:
            what = damage(case, dice)
        except (ValueError, KeyError, TypeError):  # what is no JSON cannot be damaged as JSON
            seen["skipped"] += 1
            continue
        signal.alarm(_LIMIT_S)
        try:
            seen[read(case, root / "case" / "converted")] += 1
        except BaseException:  # noqa: BLE001 - each is a finding
            unexpected.append(f"seed {seed}, {what} in {sound.name}: {traceback.format_exc(-3)}")
    print(json.dumps({"seen": seen, "unexpected": unexpected}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
