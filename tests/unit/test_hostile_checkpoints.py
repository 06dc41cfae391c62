"""Checkpoints that strangers have made: each is refused by name, in bounded memory, and none hangs."""

import json
import os
import struct
from pathlib import Path

import pytest

from tinsmith.checkpoints.format import read_manifest
from tinsmith.commands.printable import escape, printable
from tinsmith.errors import ServerError
from tinsmith.huggingface.outside_files import open_regular, parse_json, read_json
from tinsmith.huggingface.safetensors_files import StoredTensors, read_header

DEEP = b'{"a":' * 200_000 + b"1" + b"}" * 200_000


def safetensors_file(directory: Path, header: bytes, data: bytes = b"") -> Path:
    file = directory / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return file


def entry(shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()


def test_a_fifo_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tinsmith.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ServerError, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(ServerError, match="cannot be read"):
        read_manifest(tmp_path)
    for path in (tmp_path / "tinsmith.json", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)


def test_nesting_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="nested"):
        read_header(safetensors_file(tmp_path, DEEP))
    (tmp_path / "tinsmith.json").write_bytes(DEEP)
    with pytest.raises(ServerError, match="nested"):
        read_manifest(tmp_path)
    with pytest.raises(ValueError, match="nested"):
        read_json(tmp_path / "tinsmith.json")
    assert parse_json(b'{"[[[": "' + b"[" * 1000 + b'\\""}') == {"[[[": "[" * 1000 + '"'}


@pytest.mark.parametrize(
    ("shape", "offsets"), [([1 << 40], [0, 8]), ([2], [-8, 0]), ([-2], [0, 8]), ([2], [8, 0]), ([3], [0, 8])]
)
def test_a_shape_that_its_bytes_do_not_hold_allocates_nothing(
    tmp_path: Path, shape: list[int], offsets: list[int]
) -> None:
    safetensors_file(tmp_path, entry(shape, offsets), bytes(8))
    with pytest.raises(ServerError, match="is damaged"):
        StoredTensors.of(tmp_path, "model")["w"]


def test_a_terminal_obeys_nothing_from_outside() -> None:
    hostile = "\x1b]0;owned\x07 \x9b31m \u202e[red]x\r\n"
    assert printable(hostile).isprintable()
    assert printable("Qwen/Qwen3 größe 模型") == "Qwen/Qwen3 größe 模型"
    assert escape(hostile).isprintable()
