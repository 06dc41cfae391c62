"""The language part of a model that also sees or hears: its settings and its tensors, as if it stood alone.

The tensors are named as Llama's, also of models whose files call the decoder `backbone`.
"""

from collections.abc import Collection, Mapping
from typing import Final

from tinsmith_checkpoints.values import Json

LANGUAGE_MODEL: Final = "model.language_model."
"""How modules of the language part start in transformers 5, in place of `model.`."""

_PREFIXES: Final = (LANGUAGE_MODEL, "language_model.model.")  # the latter in older files
_HEADS: Final = ("lm_head.", "language_model.lm_head.")
_BACKBONE: Final = {"backbone.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm."}
_OF_THE_WHOLE: Final = ("architectures", "tie_word_embeddings", "quantization_config")


def language_config(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the settings of the language part, with the architecture of the whole; all, if there is no other part."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key)}
    return {**dtype, **text, **{key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}}


def decoder_names(stored: Collection[str]) -> dict[str, str]:
    """Return the names of the language part's tensors in files, by those that they have where it stands alone.

    Tensors of other parts are left out. If no name tells of other parts, every tensor is its own.
    """
    prefix = next((each for each in _PREFIXES if f"{each}embed_tokens.weight" in stored), None)
    if prefix is None and "backbone.embeddings.weight" in stored:
        return {_in_backbone(name): name for name in stored if name.startswith(("backbone.", _HEADS[0]))}
    if prefix is None:
        return {name: name for name in stored}
    found = {f"model.{name.removeprefix(prefix)}": name for name in stored if name.startswith(prefix)}
    for head in _HEADS:
        found |= {f"lm_head.{name.removeprefix(head)}": name for name in stored if name.startswith(head)}
    return found


def _in_backbone(stored: str) -> str:
    for theirs, ours in _BACKBONE.items():
        if stored.startswith(theirs):
            return ours + stored.removeprefix(theirs)
    return f"model.{stored.removeprefix('backbone.')}" if stored.startswith("backbone.") else stored
