"""Base models of 8-bit integers: they are read as what they stand for, and other layouts are refused.

test_fsdp_int8.py compares with compressed-tensors itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinsmith.errors import ConfigError, ServerError
from tinsmith.operations import Array
from tinsmith.testing.int8_model import int8_config, write_int8_model
from tinsmith_checkpoints.huggingface import StoredTensors, WeightFiles, weight_counts
from tinsmith_checkpoints.huggingface.decoder import decoder_shape
from tinsmith_checkpoints.huggingface.int8 import Int8, read_int8
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
ODD = TinyShape(
    family="llama", vocab_size=300, hidden_size=30, intermediate_size=13, num_layers=1, head_dim=6, num_heads=3,
    num_kv_heads=1, tied=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`int8` and `plain` are the same model; no matrix has a multiple of four columns."""
    root = tmp_path_factory.mktemp("int8-models")
    write_tiny_model(root / "source", ODD)
    write_int8_model(root / "source", root / "int8", root / "plain")
    write_tiny_model(root / "even", replace(ODD, intermediate_size=12))
    write_int8_model(root / "even", root / "int8-groups", root / "plain-groups", group_size=6)
    return root


KINDS = ["", "-groups"]


def numbers(models: Path, kind: str) -> dict[str, Array]:
    found: dict[str, Array] = load_file(models / f"plain{kind}" / "model.safetensors")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_its_tensors_are_what_they_stand_for(kind: str, models: Path) -> None:
    found, plain = StoredTensors.of(models / f"int8{kind}", "model"), numbers(models, kind)
    assert set(found) == set(plain)
    assert found.shapes() == {name: array.shape for name, array in plain.items()}
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array)
    np.testing.assert_array_equal(found.stored[Q_PROJ].load_rows(3, 7), plain[Q_PROJ][3:7])


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_matrix_can_be_read(kind: str, models: Path) -> None:
    plain = numbers(models, kind)[Q_PROJ]
    with WeightFiles(models / f"int8{kind}", framework="numpy", int8=Int8(6 if kind else None)) as files:
        np.testing.assert_array_equal(files.whole(Q_PROJ, plain.shape), plain)
        np.testing.assert_array_equal(files.part(Q_PROJ, plain.shape, (slice(2, 9),)), plain[2:9])
        for first in range(30):
            for last in range(first + 1, 31):
                part = files.part(Q_PROJ, plain.shape, (slice(5, 11), slice(first, last)))
                np.testing.assert_array_equal(part, plain[5:11, first:last])


@pytest.mark.parametrize(("kind", "how"), [("int8", Int8(None)), ("int8-groups", Int8(6)), ("plain", None)])
def test_the_shape_says_so_and_counts_its_bytes(kind: str, how: Int8 | None, models: Path) -> None:
    shape = decoder_shape(read_model_config(models / kind), Path("config.json"), supported=["LlamaForCausalLM"])
    assert shape.int8 == how
    stored = load_file(models / kind / "model.safetensors")
    held = sum(in_memory(name, array, stored) for name, array in stored.items())
    assert weight_counts(shape).total_bytes(4) == held


def in_memory(name: str, array: Array, stored: dict[str, Array]) -> int:
    """Return the bytes of a tensor without the padding of packed ones."""
    if name.endswith("_shape"):
        return 0
    if name.endswith("_packed"):
        return int(np.prod(stored[name.replace("_packed", "_shape")]))
    return array.nbytes


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quant_method",), "awq"),
        (("format",), "int-quantized"),
        (("kv_cache_scheme",), {"num_bits": 8}),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}),
        (("transform_config",), {"config_groups": {}}),
        (("config_groups", "group_0", "targets"), ["re:.*q_proj"]),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
        ((*WEIGHTS, "num_bits"), 4),
        ((*WEIGHTS, "type"), "float"),
        ((*WEIGHTS, "strategy"), "tensor"),
        ((*WEIGHTS, "symmetric"), False),
        ((*WEIGHTS, "actorder"), "group"),
    ],
)
def test_other_layouts_are_refused_by_name(path: tuple[str, ...], value: Any) -> None:
    config = int8_config()
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=rf"config.json: quantization_config.{'.'.join(path)} is .*W8A16"):
        read_int8({"quantization_config": config}, Path("config.json"))


def test_several_groups_are_refused() -> None:
    config = int8_config()
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"]
    with pytest.raises(ConfigError, match="config_groups is 2, supported is 1"):
        read_int8({"quantization_config": config}, Path("config.json"))


@pytest.mark.parametrize(
    ("end", "change", "told"),
    [
        ("_packed", lambda array: array[:-1], r"is stored as I32 \[17, 8\].*\[18, 8\]"),
        ("_packed", lambda array: array.astype(np.int64), r"is stored as I64 \[18, 8\]"),
        ("_scale", lambda array: array[:-1], r"with scales \[17, 1\]"),
        ("_shape", None, "q_proj.weight_shape is missing"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, models: Path, end: str, change: Any, told: str) -> None:
    stored = load_file(models / "int8" / "model.safetensors")
    whole = stored.pop(f"{Q_PROJ}{end}")
    if change is not None:
        stored[f"{Q_PROJ}{end}"] = np.ascontiguousarray(change(whole))
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ServerError, match=told):
        StoredTensors.of(tmp_path, "model")
