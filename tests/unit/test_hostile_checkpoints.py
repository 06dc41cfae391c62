"""Checkpoints that strangers have made: each is refused by name, in bounded memory, and none hangs."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.errors import ServerError
from tinsmith.operations import LoraConfig
from tinsmith.processes.logs import escape, escape_lines, printable
from tinsmith_checkpoints.format import read_manifest, write_peft_adapter
from tinsmith_checkpoints.huggingface.outside_files import open_regular, parse_json, read_json
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors, read_header

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
    assert escape_lines("a\n\x1b[2Jb") == "a\n\\x1b[2Jb"


def sound_checkpoints(directory: Path) -> None:
    """A training and a sampler checkpoint of an adapter, an export of it, and a whole model in shards."""
    weights = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)
        for side, shape in (("A", (4, 16)), ("B", (24, 4)))
    }
    lora = LoraConfig(rank=4, seed=7, train_unembed=False)
    adapter = ModelState(lora=lora, weights=weights, adam_m=weights, adam_v=weights, gradients=weights, step=3)
    full = replace(adapter, lora=LoraConfig(rank=0, seed=1))
    for name, kind, state in (
        ("training", "training", adapter), ("sampler", "sampler", adapter), ("full", "training", full),
    ):  # fmt: skip
        write_checkpoint(
            directory, name, kind=kind, state=state, base_model="tiny", user_metadata={"a": "b"},
            created_at=datetime(2026, 1, 31, tzinfo=UTC), overwrite=False, shard_bytes=300,
        )  # fmt: skip
    (directory / "export").mkdir()
    write_peft_adapter(directory / "export", adapter, base_model="tiny")


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.thorough)])
def test_random_damage_is_refused_by_name_in_bounded_memory(tmp_path: Path, count: int) -> None:
    sound_checkpoints(tmp_path / "sound")
    child = Path(__file__).with_name("damaged_checkpoints.py")
    # With an arena for each thread, malloc reserves more address space than the bound leaves, whatever is read.
    one_arena = os.environ | {"MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, child, tmp_path, "0", str(count)]
    done = subprocess.run(command, env=one_arena, check=False, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["unexpected"] == []
    assert told["seen"]["refused"] > count / 4
