"""Every field that transformers' class of a family knows is honoured, refused by name, or listed as without meaning."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import config_walk
import pytest
import transformers
from transformers.modeling_rope_utils import RopeParameters

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import short_rope, tiny_config
from tinsmith_checkpoints.huggingface.config_fields import COMMON_FIELDS, ROPE_FIELDS, WHOLE_FIELDS
from tinsmith_checkpoints.huggingface.fields import ANNOUNCEMENTS
from tinsmith_jax import ModelConfig
from tinsmith_jax.families import built_in, config_of, fields_of

PATH = Path("config.json")
FAMILIES = built_in()


def read(name: str, **changes: Any) -> ModelConfig:
    return config_of({**config_walk.published(name), **changes}, PATH)


def test_the_walk_finds_the_fields() -> None:
    assert {"final_logit_softcapping", "layer_types", "architectures"} <= config_walk.known("Gemma2ForCausalLM")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_class_has_a_status(name: str) -> None:
    assert config_walk.known(name) <= fields_of(name).fields.keys()
    read(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_status_says_what_another_value_does(name: str) -> None:
    assert list(config_walk.contradictions(name, fields_of(name), lambda config: config_of(config, PATH))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FAMILIES if name.endswith("ForCausalLM")])
def test_what_has_no_meaning_changes_nothing_in_transformers(name: str) -> None:
    """DeepSeek V3 takes `head_dim` for its rotary embedding, and fails with any but `qk_rope_head_dim`, or 1."""
    own = {field: row for field, row in fields_of(name).fields.items() if COMMON_FIELDS.get(field) != row}
    rows = COMMON_FIELDS if name == "LlamaForCausalLM" else own
    found = set(config_walk.meaningful(tiny_config(name), rows))
    assert found <= ({"head_dim = 1"} if name == "DeepseekV3ForCausalLM" else set())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "off",
    [{"is_causal": False}, {"add_cross_attention": True}, {"attention_chunk_size": 64}, {"is_encoder_decoder": True}],
)
def test_what_transformers_reads_beside_the_class_is_refused_by_name(name: str, off: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(off))} is {next(iter(off.values()))}: "):
        read(name, **off)


def test_every_field_of_rotary_embeddings_has_a_status() -> None:
    assert RopeParameters.__annotations__.keys() <= ROPE_FIELDS.fields.keys()
    for given in ("rope_parameters", "rope_scaling"):
        rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
        with pytest.raises(ConfigError, match=f"{given}.llama_4_scaling_beta is not known here"):
            read("LlamaForCausalLM", **{"rope_parameters": None, given: rope})
    nested = {"full_attention": {"rope_type": "default", "newest": 1}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match=r"rope_parameters.newest is not known here"):
        read("Gemma3ForCausalLM", rope_parameters=nested)


def test_longrope_ends_where_its_frequencies_change() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512, **factors}
    assert short_rope({"rope_parameters": rope}) == 512
    described = read("LlamaForCausalLM", rope_parameters=rope)
    assert (described.longest, described.max_position) == (512, 512)
    assert short_rope({"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 9}) == 9
    assert short_rope({"rope_parameters": {"rope_type": "yarn"}}) is None


@pytest.mark.parametrize("name", [each for each in FAMILIES if each.endswith("ForConditionalGeneration")])
def test_every_field_beside_a_language_part_has_a_status(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = getattr(transformers, name, transformers.Kimi_K25ForConditionalGeneration)
    whole = kind.config_class
    known = {each.name for each in dataclasses.fields(whole)} | whole.attribute_map.keys()
    assert known <= {*WHOLE_FIELDS.fields, *COMMON_FIELDS}
    config = {
        "text_config": config_walk.published(name),
        "architectures": [name],
        "newest_part": 1,
        "vision_config": {"a": 1},
    }
    with caplog.at_level(logging.WARNING, ANNOUNCEMENTS.name):
        config_of(config, Path(name))
    assert [record.getMessage().partition("reads: ")[2].partition(";")[0] for record in caplog.records] == [
        "newest_part"
    ]


def test_a_field_that_the_class_does_not_read_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, ANNOUNCEMENTS.name):
        described = config_of(
            {**config_walk.published("LlamaForCausalLM"), "vendor_scale": 3, "unset": None}, Path("a")
        )
    assert described == read("LlamaForCausalLM")
    [record] = caplog.records
    assert "a has fields that nothing here reads: vendor_scale;" in record.getMessage()
