"""The layout of experts' adapters that PEFT loads."""

import numpy as np
import pytest

from tinsmith import LoraConfig, UserError
from tinsmith_checkpoints.huggingface.decoder import EXPERTS
from tinsmith_checkpoints.huggingface.peft_experts import to_peft
from tinsmith_checkpoints.huggingface.peft_layout import weight_name

NUMBER, INNER, HIDDEN, RANK = 2, 3, 4, 1


def test_gate_and_up_alternate_where_those_of_the_base_model_do() -> None:
    rng = np.random.default_rng(0)
    weights = {}
    for path in EXPERTS:
        of_A, of_B = ((1, RANK, HIDDEN), (NUMBER, INNER, RANK))
        if path == EXPERTS[2]:
            of_A, of_B = ((NUMBER, RANK, INNER), (1, HIDDEN, RANK))
        module = f"model.layers.0.{path}"
        weights[weight_name(module, "A")] = rng.normal(size=of_A).astype(np.float32)
        weights[weight_name(module, "B")] = rng.normal(size=of_B).astype(np.float32)
    lora = LoraConfig(rank=RANK, seed=0)
    halves, _ = to_peft("Qwen/Qwen3-30B-A3B", lora, weights)
    alternating, _ = to_peft("openai/gpt-oss-20b", lora, weights)
    both = weight_name("model.layers.0.mlp.experts.base_layer", "B")
    np.testing.assert_array_equal(alternating[both], halves[both][[0, 3, 1, 4, 2, 5]])
    assert all(np.array_equal(alternating[name], halves[name]) for name in halves if name != both)
    with pytest.raises(UserError, match="--base-model"):
        to_peft("somebody/tuned", lora, weights)
