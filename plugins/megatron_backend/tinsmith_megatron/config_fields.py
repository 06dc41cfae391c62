"""What happens to each field of config.json, by architecture, beyond the fields of all decoders. No torch."""

from collections.abc import Mapping
from typing import Final

from tinsmith_checkpoints.huggingface import (
    DELTA_FIELDS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    NO_WINDOW_FIELDS,
    OFF,
    Field,
    FileFields,
    family_table,
    no_meaning,
    only,
)

_ON: Final = (True, None)
_NO_BIAS: Final = only(*OFF, otherwise="these matrices have no biases here")
_SHARED: Final[Mapping[str, Field]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias"), _NO_BIAS),
    **dict.fromkeys(("dtype", "torch_dtype"), no_meaning("the backend's setting `dtype` decides")),
    "hidden_act": only("silu", None, otherwise="MLPs have SiLU here"),
}
_QWEN3: Final = {**_SHARED, **NO_WINDOW_FIELDS}
_HYBRID: Final = {**_SHARED, **DELTA_FIELDS, "use_sliding_window": NO_WINDOW_FIELDS["use_sliding_window"]}
_HYBRID_EXPERTS: Final = {**_HYBRID, **EXPERT_FIELDS}
_LATENT: Final = {
    **LATENT_FIELDS,
    **_SHARED,
    "norm_topk_prob": only(*_ON, otherwise="the weights of a token's experts add up to 1 here"),
    "rope_interleave": only(*_ON, otherwise="the numbers of a rotated pair follow each other here"),
}
FIELDS: Final[Mapping[str, Mapping[str, Field]]] = {
    "LlamaForCausalLM": _SHARED,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": {**_QWEN3, **EXPERT_FIELDS},
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _HYBRID),
    **dict.fromkeys(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM"), _HYBRID_EXPERTS
    ),
    **dict.fromkeys(
        ("DeepseekV3ForCausalLM", "Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"), _LATENT
    ),
}


def fields_of(class_name: str) -> FileFields:
    """Return the table of config.json for an architecture; of one that is not supported, the rows of all decoders."""
    return family_table(class_name, FIELDS.get(class_name, {}))
