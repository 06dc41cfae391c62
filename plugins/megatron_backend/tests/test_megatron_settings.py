"""What is refused before any rank starts, and how adapters are laid out over the parts of a model. No torch."""

from collections.abc import Mapping
from pathlib import Path

import config_walk
import numpy as np
import pytest
from megatron_harness import make_backend, shape

from tinsmith import ConfigError, LoraConfig, UserError
from tinsmith.testing import write_tiny_model
from tinsmith_checkpoints.huggingface import DecoderShape, known_config, read_model_config
from tinsmith_megatron.architecture import ARCHITECTURES, architecture_of, read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.config_fields import fields_of
from tinsmith_megatron.parallel import Coordinates, check_model, check_ranks, part_of, smallest_group
from tinsmith_workers import Launch, Launcher, WholeLayout, holders


def nothing_starts(_: Launch) -> Launcher:
    raise AssertionError("ranks were started")


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"tensor_parallel": 4}, r"num_key_value_heads of the model \(2\) .* \(4\); possible are 1, 2$"),
        ("qwen3", {"pipeline_parallel": 3}, r"num_hidden_layers of the model \(2\) .* \(3\); possible are 1, 2$"),
        ("qwen3_moe", {"expert_parallel": 3}, r"num_experts of the model \(4\) .* \(3\); possible are 1, 2, 4$"),
        ("llama", {"expert_parallel": 2}, "LlamaForCausalLM has no experts: leave it out"),
    ],
)
def test_wrong_divisions_are_refused_before_anything_starts(
    family: str, settings: dict[str, int], message: str, megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(megatron_models[family], tmp_path, nothing_starts, **settings)


def test_the_divisors_that_would_do_suit_all_sizes() -> None:
    """12 and 8 heads, 300 tokens, 48 inner: 12 divides none but the first and the last two, and 8 not all either."""
    sizes = DecoderShape(
        class_name="LlamaForCausalLM", vocab_size=300, hidden_size=48, intermediate_size=48, num_layers=6, num_heads=12,
        num_kv_heads=8, head_dim=4, max_position=64, tied=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"num_key_value_heads of the model \(8\) .* possible are 1, 2, 4$"):
        check_model(MegatronConfig(tensor_parallel=12), sizes)
    check_model(MegatronConfig(tensor_parallel=4, pipeline_parallel=3), sizes)


@pytest.mark.parametrize("name", ["context_parallel", "virtual_pipeline_parallel"])
def test_what_megatron_has_and_this_plugin_has_not_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is not supported: .*; `tinsmith megatron-plan` lists the layouts"):
        MegatronConfig.model_validate({name: 2})


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", shape("qwen3"))
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "MixtralForCausalLM"))
    with pytest.raises(ConfigError, match=r"'MixtralForCausalLM' is not supported, only LlamaForCausalLM, Qwen3For"):
        make_backend(tmp_path / "m", tmp_path, nothing_starts)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}
UNSUPPORTED: list[tuple[dict[str, object], str]] = [
    ({"attention_bias": True}, "attention_bias is True: "),
    ({"mlp_bias": True}, "mlp_bias is True: "),
    ({"use_sliding_window": True}, "use_sliding_window is True: "),
    ({"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\} is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu': "),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is "),
    ({"is_causal": False}, "is_causal is False: "),
    ({"rope_scaling": LONG}, r"change with the length \(longrope\) are not supported"),
    ({"rope_scaling": YARN}, r"attention factor \(yarn\) are not supported by the megatron backend"),
]


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED, ids=[next(iter(changes)) for changes, _ in UNSUPPORTED])
def test_what_a_model_has_and_megatron_would_leave_out_is_refused(
    changes: dict[str, object], message: str, megatron_models: Mapping[str, Path]
) -> None:
    """It would train another model without a word."""
    config = read_model_config(megatron_models["qwen3"])
    architecture_of(config, Path("config.json"))
    with pytest.raises(ConfigError, match=message):
        architecture_of({**config, **changes}, Path("config.json"))


UNKNOWN_LATENTS: list[tuple[dict[str, object], str]] = [
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax': "),
    ({"topk_method": "greedy"}, "topk_method is 'greedy': "),
    ({"norm_topk_prob": False}, "norm_topk_prob is False: "),
    ({"rope_interleave": False}, "rope_interleave is False: "),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2: "),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1, and Megatron-core does not normalise"),
    ({"n_group": 6}, r"n_routed_experts \(256\) must fill n_group \(6\) equal groups of 2 or more"),
]


@pytest.mark.parametrize(
    ("changes", "message"), UNKNOWN_LATENTS, ids=[next(iter(changes)) for changes, _ in UNKNOWN_LATENTS]
)
def test_other_models_with_latents_are_refused(changes: dict[str, object], message: str) -> None:
    config = known_config("DeepSeek-V3.1")
    assert config is not None
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    architecture_of(plain, Path("config.json"))
    with pytest.raises(ConfigError, match=message):
        architecture_of({**plain, **changes}, Path("config.json"))


def test_the_language_part_of_a_model_with_latents_is_read(tmp_path: Path) -> None:
    config = known_config("Kimi-K2")
    assert config is not None
    text = {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
    whole = {"architectures": ["Kimi_K25ForConditionalGeneration"], "text_config": text}
    found = architecture_of(whole, tmp_path / "config.json")
    assert found.latent is not None
    assert (found.latent.dense_layers, found.latent.rank) == (1, 512)
    check_model(MegatronConfig(tensor_parallel=8, expert_parallel=8), found.shape)


def test_the_number_of_ranks_must_fit() -> None:
    config = MegatronConfig(tensor_parallel=2, pipeline_parallel=2, expert_parallel=4)
    assert smallest_group(config) == 8
    check_ranks(config, 16)
    with pytest.raises(ConfigError, match=r"number of ranks \(12\) .*: 8, 16, \.\.\."):
        check_ranks(config, 12)


def test_parts_of_an_adapter_make_the_whole(megatron_models: Mapping[str, Path]) -> None:
    """Two stages and two shares of the experts: every weight lies somewhere, and comes back as it was."""
    sizes, lora = read_architecture(megatron_models["qwen3_moe"]).shape, LoraConfig(rank=3, seed=7)
    alone = MegatronConfig()
    divided = MegatronConfig(pipeline_parallel=2, expert_parallel=2)
    ranks = [
        Coordinates(tp_rank=0, pp_rank=stage, ep_rank=share, dp_rank=copy)
        for copy in range(2)
        for stage in range(2)
        for share in range(2)
    ]
    parts = holders([part_of(coordinates, divided, sizes) for coordinates in ranks])
    assert list(parts.values()) == [0, 1, 2, 3]
    whole = WholeLayout(lora, sizes, [part_of(Coordinates(tp_rank=0, pp_rank=0, ep_rank=0, dp_rank=0), alone, sizes)])
    pieces = WholeLayout(lora, sizes, list(parts))
    expected = whole.to_canonical([whole.parts[0].fresh()])
    drawn = pieces.to_canonical([part.fresh() for part in pieces.parts])
    again = pieces.to_canonical(pieces.from_canonical(expected))
    assert expected["base_model.model.model.layers.1.mlp.experts.w2.lora_A.weight"].shape == (4, 3, 24)
    assert expected["base_model.model.model.layers.1.mlp.experts.w2.lora_B.weight"].shape == (1, 32, 3)
    assert expected["base_model.model.model.layers.1.mlp.experts.w1.lora_A.weight"].shape == (1, 3, 32)
    assert expected.keys() == drawn.keys() == again.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(drawn[name], value, err_msg=name)
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_weights_of_another_shape_are_refused(megatron_models: Mapping[str, Path]) -> None:
    sizes = read_architecture(megatron_models["qwen3"]).shape
    part = part_of(Coordinates(tp_rank=0, pp_rank=0, ep_rank=0, dp_rank=0), MegatronConfig(), sizes)
    layout = WholeLayout(LoraConfig(rank=2, seed=0), sizes, [part])
    weights = layout.to_canonical([layout.parts[0].fresh()])
    name = min(weights)
    with pytest.raises(UserError, match=r"is missing"):
        layout.from_canonical({key: value for key, value in weights.items() if key != name})
    with pytest.raises(UserError, match=r"has shape \(1, 2\), this model and LoRA need"):
        layout.from_canonical({**weights, name: np.zeros((1, 2), np.float32)})
    with pytest.raises(UserError, match=r"'other' and 0 more do not belong"):
        layout.from_canonical({**weights, "other": np.zeros(1, np.float32)})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_field_that_the_class_of_transformers_knows_has_a_status(name: str) -> None:
    assert config_walk.known(name) <= fields_of(name).fields.keys()
    assert list(config_walk.contradictions(name, fields_of(name), described)) == []


def described(config: Mapping[str, object]) -> object:
    return architecture_of(config, Path("config.json"))
