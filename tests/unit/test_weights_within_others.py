"""Weights that files hold within larger tensors are read by the names that they have where they stand alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import WeightFiles

EXPERTS, INNER, HIDDEN = 3, 6, 4
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
RULE, LAYER = "model.layers.0.linear_attn", "model.layers.0.mlp.experts"
GROUP = 3 + 3 + 2 * 5 + 2 * 5  # rows of a key head: query, key, values, and their gates


def directory_of(root: Path, *, turned: bool = False) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    gate_up, down = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    shapes = {
        f"{LAYER}.gate_up_proj": gate_up,
        f"{LAYER}.down_proj": down,
        f"{RULE}.in_proj_qkvz.weight": (2 * GROUP, HIDDEN),
    }
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    stored = {
        name: np.ascontiguousarray(value.transpose(0, 2, 1)) if turned and value.ndim == 3 else value
        for name, value in tensors.items()
    }
    save_file(stored, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(CONFIG))
    return root, tensors


@pytest.mark.parametrize("turned", [False, True])
def test_the_matrices_of_an_expert(turned: bool, tmp_path: Path) -> None:
    """Of files that have all experts as [out, in], or as [in, out]."""
    directory, tensors = directory_of(tmp_path, turned=turned)
    gate_up, down = tensors[f"{LAYER}.gate_up_proj"], tensors[f"{LAYER}.down_proj"]
    with WeightFiles(directory, framework="numpy") as files:
        gate = files.whole(f"{LAYER}.1.gate_proj.weight", (INNER, HIDDEN))
        up = files.part(f"{LAYER}.1.up_proj.weight", (INNER, HIDDEN), (slice(2, 5),))
        own = files.part(f"{LAYER}.2.down_proj.weight", (HIDDEN, INNER), (slice(0, 3), slice(1, 4)))
        np.testing.assert_array_equal(gate, gate_up[1, :INNER])
        np.testing.assert_array_equal(up, gate_up[1, INNER:][2:5])
        np.testing.assert_array_equal(own, down[2, 0:3, 1:4])
        assert f"{LAYER}.1.gate_proj.weight" not in files, "it is not stored so"


def test_the_rows_of_a_module(tmp_path: Path) -> None:
    """Qwen3-Next has the queries, keys, values and gates of each key head in turn."""
    directory, tensors = directory_of(tmp_path)
    by_head = tensors[f"{RULE}.in_proj_qkvz.weight"].reshape(2, GROUP, HIDDEN)
    queries, keys, values, gates = (
        by_head[:, start:stop].reshape(-1, HIDDEN) for start, stop in ((0, 3), (3, 6), (6, 16), (16, 26))
    )
    expected = np.concatenate([queries, keys, values])
    with WeightFiles(directory, framework="numpy") as files:
        np.testing.assert_array_equal(files.whole(f"{RULE}.in_proj_qkv.weight", expected.shape), expected)
        part = files.part(f"{RULE}.in_proj_qkv.weight", expected.shape, (slice(4, 17), slice(1, 3)))
        np.testing.assert_array_equal(part, expected[4:17, 1:3])
        np.testing.assert_array_equal(files.part(f"{RULE}.in_proj_z.weight", gates.shape, (slice(0, 11),)), gates[:11])


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    directory, _ = directory_of(tmp_path)
    with WeightFiles(directory, framework="numpy") as files:
        with pytest.raises(
            ConfigError, match=r"tensor 'model\.layers\.0\.mlp\.experts\.3\.gate_proj\.weight' is missing"
        ):
            files.whole(f"{LAYER}.3.gate_proj.weight", (INNER, HIDDEN))
        with pytest.raises(ConfigError, match=r"has shape \(6, 4\), config.json says \(5, 4\)"):
            files.whole(f"{LAYER}.0.gate_proj.weight", (5, HIDDEN))
