"""Where files of base models keep the matrices of modules: what is added to one changes its own numbers alone."""

import numpy as np
import pytest

from tinsmith_checkpoints.huggingface.places import weight_places

LAYER = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_joined_experts_are_changed_one_by_one(prefix: str) -> None:
    """Of two experts with an inner size of 3 and a hidden size of 4."""
    experts = f"{prefix}layers.0.mlp.experts"
    shapes = {
        f"{prefix}embed_tokens.weight": (5, 4),
        f"{experts}.gate_up_proj": (2, 6, 4),
        f"{experts}.down_proj": (2, 4, 3),
    }
    tower = {} if prefix == "model." else {"model.visual.blocks.0.mlp.down_proj.weight": (4, 4)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    places = weight_places({}, {**shapes, **tower})
    matrices = [f"{LAYER}.{expert}.{name}_proj.weight" for expert in range(2) for name in ("gate", "up", "down")]
    assert set(places) == {"model.embed_tokens.weight", *matrices}
    for number, name in enumerate(matrices, start=1):
        place = places[name]
        assert place.shape == ((4, 3) if "down" in name else (3, 4))
        place.add(np.full(place.shape, number, np.float32), tensors[place.tensor])
    gate_up, down = tensors[f"{experts}.gate_up_proj"], tensors[f"{experts}.down_proj"]
    assert gate_up[:, :, 0].tolist() == [[1, 1, 1, 2, 2, 2], [4, 4, 4, 5, 5, 5]]
    assert [np.unique(each).tolist() for each in down] == [[3], [6]]


def test_transposed_experts_are_told_by_their_shapes() -> None:
    """As published files of Qwen3-VL have them: gate before up, [in, out]."""
    shapes = {f"{LAYER}.gate_up_proj": (2, 4, 6), f"{LAYER}.down_proj": (2, 3, 4)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    places = weight_places({"text_config": {"hidden_size": 4}}, shapes)
    for number, name in enumerate(("gate", "up", "down"), start=1):
        place = places[f"{LAYER}.1.{name}_proj.weight"]
        assert place.shape == ((4, 3) if name == "down" else (3, 4))
        place.add(np.full(place.shape, number, np.float32), tensors[place.tensor])
    gate_up, down = tensors[f"{LAYER}.gate_up_proj"], tensors[f"{LAYER}.down_proj"]
    assert gate_up[:, 0].tolist() == [[0] * 6, [1, 1, 1, 2, 2, 2]]
    assert [np.unique(each).tolist() for each in down] == [[0], [3]]
