"""Walks the fields of config.json that transformers' class of a family knows, and tries other values of each.

For the tests of backends that describe models themselves: what a table says of a field must be what happens.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import Field, FileFields

Read = Callable[[Mapping[str, Any]], object]
"""Describes a model, given a config.json. Raises ConfigError."""

_ELSEWHERE = {"architectures", "eos_token_id", "text_config", "quantization_config"}
"""Honoured by other code, or tested by other files."""
_KINDS = {
    "KimiK25ForConditionalGeneration": "deepseek_v3",  # code of its vendor
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
_OPEN: dict[str, dict[str, Any]] = {
    "first_k_dense_replace": {"mlp_layer_types": None},
    "partial_rotary_factor": {"rope_parameters": None},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "original_max_position_embeddings": {"rope_parameters": _LONG},
}
"""What leaves open what a field says: it counts where another one says nothing."""


def class_of(name: str) -> Any:
    """Return transformers' configuration class of a model's language part."""
    kinds: dict[str, str] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for kind, names in mapping.items():
            for each in [names] if isinstance(names, str) else names:
                kinds.setdefault(each, kind)
    return type(CONFIG_MAPPING[_KINDS.get(name) or kinds[name]]().get_text_config())


@cache
def _published(name: str) -> str:
    own = {"layers_block_type": ["mamba", "moe", "attention", "moe"]} if name == "NemotronHForCausalLM" else {}
    return str(class_of(name)(**own).to_json_string(use_diff=False))


def published(name: str) -> dict[str, Any]:
    """Return a config.json with all fields that the class writes."""
    return {**json.loads(_published(name)), "architectures": [name]}


def known(name: str) -> set[str]:
    """Return the fields that the class knows, also under other names."""
    kind = class_of(name)
    return {*published(name), *(each.name for each in dataclasses.fields(kind)), *kind.attribute_map}


def contradictions(name: str, table: FileFields, read: Read) -> Iterator[str]:
    """Say where a row is wrong.

    A field that is honoured must change the description or be refused at some value, one without meaning at none, and
    others must be refused by name at every value that their row does not have.
    """
    config = published(name)
    for field, row in table.fields.items():
        if field not in config or field in _ELSEWHERE:
            continue
        effects = {repr(value): _effect(config, field, value, read) for value in _others(config[field])}
        refused = [value for value in _others(config[field]) if not row.takes(value)]
        if row.status == "honoured" and not any(effects.values()):
            yield f"{field} is honoured, and no value does anything: {effects}"
        elif row.status == "no meaning" and any(effects.values()):
            yield f"{field} has no meaning: {effects}"
        elif row.status == "only" and not (refused and all(f"{field} is " in effects[repr(each)] for each in refused)):
            yield f"not every other value of {field} is refused by name: {effects}"


def meaningful(config: Any, rows: Mapping[str, Field]) -> Iterator[str]:
    """Say which fields without a meaning have one in transformers: its logits change. `config`: of a tiny model.

    Values that transformers cannot compute with say nothing.
    """
    model = AutoModelForCausalLM.from_config(config)
    usual, weights = _logits(model), model.state_dict()
    written = json.loads(config.to_json_string(use_diff=False))
    for field in sorted(written.keys() & {name for name, row in rows.items() if row.status == "no meaning"}):
        for value in _others(written[field]):
            try:
                other = AutoModelForCausalLM.from_config(type(config).from_dict({**written, field: value}))
                own = {name: each.shape for name, each in other.state_dict().items()}
                alike = {name: each for name, each in weights.items() if own.get(name) == each.shape}
                other.load_state_dict(alike, strict=False)
                changed = not torch.equal(_logits(other), usual)
            except Exception:  # noqa: BLE001 - whatever classes raise for a value that they do not take
                continue
            if changed:
                yield f"{field} = {value!r}"


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(3, 35)[None], return_dict=True).logits
    return found


def _others(value: Any) -> Iterator[Any]:
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


def _effect(config: Mapping[str, Any], field: str, value: Any, read: Read) -> str:
    """Return what another value does: the refusal, "changed" or "broken" (no such value is possible), or nothing."""
    beside = {key: each for key, each in _OPEN.get(field, {}).items() if key in config}
    try:
        changed = read({**config, **beside, field: value}) != read({**config, **beside})
    except ConfigError as refusal:
        return str(refusal)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return "broken"
    return "changed" if changed else ""
