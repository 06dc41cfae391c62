"""Every field that transformers' class of a family knows is honoured, refused by name, or listed as without meaning."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import short_rope
from tinsmith_checkpoints.huggingface.config_fields import COMMON_FIELDS, ROPE_FIELDS, WHOLE_FIELDS
from tinsmith_checkpoints.huggingface.fields import ANNOUNCEMENTS
from tinsmith_jax import ModelConfig
from tinsmith_jax.families import built_in, config_of, fields_of

PATH = Path("config.json")
NEVER_READ_HERE = {"architectures", "eos_token_id", "text_config", "quantization_config"}
"""Honoured elsewhere, or tested by other files."""
OTHERS = {
    "KimiK25ForConditionalGeneration": "deepseek_v3",  # code of its vendor
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
FAMILIES = built_in()
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
OPEN: dict[str, dict[str, Any]] = {
    "first_k_dense_replace": {"mlp_layer_types": None},
    "partial_rotary_factor": {"rope_parameters": None},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "original_max_position_embeddings": {"rope_parameters": LONG},
}
"""What leaves open what a field says: it counts where another one says nothing."""


def class_of(name: str) -> Any:
    """Return transformers' configuration class of the language part."""
    kinds: dict[str, str] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for kind, names in mapping.items():
            for each in [names] if isinstance(names, str) else names:
                kinds.setdefault(each, kind)
    found = CONFIG_MAPPING[OTHERS.get(name) or kinds[name]]
    return type(found().get_text_config())


@cache
def published(name: str) -> str:
    """Return, as JSON, a config.json with all fields that the class has."""
    own = {"layers_block_type": ["mamba", "moe", "attention", "moe"]} if name == "NemotronHForCausalLM" else {}
    content = json.loads(class_of(name)(**own).to_json_string(use_diff=False))
    return json.dumps({**content, "architectures": [name]})


def read(name: str, **changes: Any) -> ModelConfig:
    return config_of({**json.loads(published(name)), **changes}, PATH)


def others(value: Any) -> Iterator[Any]:
    """Yield other values of a field, which stand for all."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, 2 * value, max(1, value // 2), 1)
        case float():
            yield 1.5 * value + 0.1
        case str():
            yield from ("gelu_pytorch_tanh", "relu2", "float16", f"{value}x")
        case list():
            yield from (value[::-1], [*value[:-1], "sliding_attention"], [*value, *value[:1]], [0, 1.0])
        case dict():
            yield from ({**value, "rope_theta": 123.0}, {"rope_type": "dynamic"}, {**value, "newest": 1})
        case None:
            yield from (True, 7, 0.5, "x", [1], {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})


def effect(name: str, field: str, value: Any) -> str:
    """Return what another value of a field does: it changes the description, is refused, or does nothing."""
    try:
        beside = {key: each for key, each in OPEN.get(field, {}).items() if key in json.loads(published(name))}
        changed = read(name, **{**beside, field: value}) != read(name, **beside)
    except ConfigError as refusal:
        return str(refusal)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return "broken"  # a value that is no such setting
    return "changed" if changed else ""


def test_the_walk_finds_the_fields() -> None:
    known = {each.name for each in dataclasses.fields(class_of("Gemma2ForCausalLM"))}
    assert {"final_logit_softcapping", "layer_types", "hidden_activation", "architectures"} <= known


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_class_has_a_status(name: str) -> None:
    kind = class_of(name)
    written = {*json.loads(published(name)), *(each.name for each in dataclasses.fields(kind)), *kind.attribute_map}
    assert written <= fields_of(name).fields.keys()
    read(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_status_says_what_another_value_does(name: str) -> None:
    """A field that is honoured changes the description, one without meaning does not, others are refused by name."""
    config = json.loads(published(name))
    for field, status in fields_of(name).fields.items():
        if field not in config or field in NEVER_READ_HERE:
            continue
        effects = {repr(value): effect(name, field, value) for value in others(config[field])}
        if status.status == "honoured":
            assert any(effects.values()), f"{field} is honoured, and no value does anything: {effects}"
        elif status.status == "no meaning":
            assert not any(effects.values()), f"{field} has no meaning: {effects}"
        else:
            refused = [value for value in others(config[field]) if not status.takes(value)]
            assert refused, f"no other value of {field} is refused"
            assert all(f"{field} is " in effects[repr(value)] for value in refused), f"{field}: {effects}"


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
        "text_config": json.loads(published(name)),
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
            {**json.loads(published("LlamaForCausalLM")), "vendor_scale": 3, "unset": None}, Path("a")
        )
    assert described == read("LlamaForCausalLM")
    [record] = caplog.records
    assert "a has fields that nothing here reads: vendor_scale;" in record.getMessage()
