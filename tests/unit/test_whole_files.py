"""A model's files that are damaged are named, with what is wrong, before anything is loaded, and by every reader."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinsmith.errors import ConfigError, ServerError, TinsmithError
from tinsmith_checkpoints.huggingface import StopRules, StoredTensors, WeightFiles, decoder_shape, read_model_config
from tinsmith_checkpoints.huggingface.model_files import understood
from tinsmith_checkpoints.huggingface.safetensors_files import shard_name, write_index
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.huggingface.whole_files import check_model_files, lacks_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4294967296\n" % (b"0" * 64)
SHARDS = tuple(shard_name("model", number, 2) for number in range(2))
INDEX = "model.safetensors.index.json"
FILES = (
    *SHARDS,
    INDEX,
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in two shards."""
    directory = tmp_path_factory.mktemp("models") / "sound"
    write_tiny_model(directory, TinyShape(num_layers=1))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {SHARDS[0]: names[::2], SHARDS[1]: names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    write_index(directory, "model", {name: file for file, part in shards.items() for name in part}, 1)
    (directory / "chat_template.jinja").write_text("{{ messages }} \N{SNOWMAN}")
    return directory


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def cut(file: Path) -> None:
    os.truncate(file, random.Random(file.name).randrange(1, file.stat().st_size))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def pointer(file: Path) -> None:
    file.write_bytes(POINTER)


def as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def dangling(file: Path) -> None:
    """As in the hub's cache, after somebody has deleted the blobs."""
    file.unlink()
    file.symlink_to("../blobs/gone")


DAMAGES = {
    cut: "cut short|not a safetensors file|is damaged|cannot be read",
    empty: "is empty",
    pointer: "is a pointer of Git LFS in the place of a file of 4294967296 bytes: run `git lfs pull` there",
    as_directory: "[Dd]irectory|regular",
    fifo: "is not a regular file",
    dangling: "is missing|No such file|no config.json|neither",
}


def readers(directory: Path) -> Iterator[Callable[[], object]]:
    """Yield everything that reads a model's directory."""

    def weights() -> None:
        with WeightFiles(directory, framework="numpy") as files:
            for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
                files.whole(name, files.shape(name))
            files.matrix_types()

    yield weights
    yield lambda: dict(StoredTensors.of(directory, "model"))
    yield lambda: StopRules.of_model(directory)
    yield lambda: decoder_shape(read_model_config(directory), directory, supported=["Qwen3ForCausalLM"])


def test_a_sound_directory_has_no_faults(directory: Path) -> None:
    assert check_model_files(directory) == sum((directory / file).stat().st_size for file in SHARDS)
    for read in readers(directory):
        read()
    for name in FILES[4:]:
        (directory / name).unlink()
    check_model_files(directory)
    assert lacks_tokenizer(directory)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_and_is_no_crash(directory: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(directory / file)
    if (file, damage) != ("chat_template.jinja", cut):  # what is left is a text
        with pytest.raises(ConfigError, match=DAMAGES[damage]) as raised:
            check_model_files(directory)
        assert file in str(raised.value)
        assert str(directory) in str(raised.value)
    for read in readers(directory):
        with suppress(TinsmithError):  # any other exception would be taken for a crash
            read()


@pytest.mark.parametrize("file", FILES[:-1])
def test_a_file_that_may_not_be_read_is_named(directory: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the kernel's refusal: tests may run as root, who may read everything."""
    real_open = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(directory / file):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ConfigError, match="Permission denied") as raised:
        check_model_files(directory)
    assert file in str(raised.value)


def test_the_sizes_are_told(directory: Path) -> None:
    file = directory / SHARDS[0]
    size = file.stat().st_size
    os.truncate(file, size - 4)
    said = f"{SHARDS[0]} is damaged: it is cut short: it has {size - 4} bytes, and its header says {size}"
    with pytest.raises(ConfigError, match=said):
        check_model_files(directory)
    os.truncate(file, size + 4)
    with pytest.raises(ConfigError, match="something follows its last tensor"):
        check_model_files(directory)


def test_several_faults_are_told_at_once_and_many_are_counted(directory: Path) -> None:
    for file in (*SHARDS, "tokenizer.json"):
        empty(directory / file)
    with pytest.raises(ConfigError) as raised:
        check_model_files(directory)
    assert all(f"{file} is empty" in str(raised.value) for file in (*SHARDS, "tokenizer.json"))
    names = {f"t{number}": f"{number}.safetensors" for number in range(20)}
    write_index(directory, "model", names, 1)
    with pytest.raises(ConfigError, match=r"0\.safetensors is missing; .*; and 16 more faults; download"):
        check_model_files(directory)


def test_an_index_of_another_model_is_named(directory: Path) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["model.layers.7.weight"] = SHARDS[0]
    (directory / INDEX).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{INDEX} places model.layers.7.weight in {SHARDS[0]}, which does not"):
        check_model_files(directory)


def test_integers_in_the_place_of_a_weight_are_refused(directory: Path) -> None:
    tensors = load_file(directory / SHARDS[0])
    name, tensor = next((name, each) for name, each in tensors.items() if each.ndim == 2)
    save_file({**tensors, name: np.ones(tensor.shape, np.int8)}, directory / SHARDS[0])
    with WeightFiles(directory, framework="numpy") as files, pytest.raises(ConfigError, match=f"'{name}' is I8"):
        files.whole(name, tensor.shape)


@pytest.mark.parametrize("seed", range(40))
def test_a_shard_cut_anywhere_is_refused_by_every_reader(directory: Path, seed: int) -> None:
    dice = random.Random(seed)
    file = directory / dice.choice(SHARDS)
    os.truncate(file, dice.randrange(file.stat().st_size))
    with pytest.raises(ConfigError, match=file.name):
        check_model_files(directory)
    weights, stored, *_ = readers(directory)
    with pytest.raises(ConfigError):
        weights()
    with pytest.raises(ServerError):
        stored()


VALUES = (None, True, -1, 0, 1.5, 1 << 80, "x", "", [], [1], {}, {"a": 1}, [[]])


def test_a_value_of_any_type_in_a_configuration_is_no_crash(directory: Path) -> None:
    config = read_model_config(directory)
    for name in (*config, "eos_token_id", "quantization_config", "rope_scaling"):
        for value in VALUES:
            (directory / "config.json").write_text(json.dumps({**config, name: value}))
            file = directory / "config.json"
            with suppress(TinsmithError), understood(file):
                decoder_shape(read_model_config(directory), file, supported=["Qwen3ForCausalLM"])
    for value in VALUES:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        with suppress(TinsmithError):
            StopRules.of_model(directory)
