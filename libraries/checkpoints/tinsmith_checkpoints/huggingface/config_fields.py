"""The fields of config.json that all decoders share; a backend adds the rows of each family.

The measure is the class in transformers that `architectures` names. A field that this class does not read has no effect
there, either: it is announced, not refused. Decision 0040 has the reasons.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.huggingface.fields import OFF, Field, FileFields, announce, honoured, no_meaning, only
from tinsmith_checkpoints.huggingface.rope import KNOWN_TYPES
from tinsmith_checkpoints.huggingface.tokenizer_fields import GENERATION_CONFIG_FIELDS
from tinsmith_checkpoints.values import Json

_ON: Final = (True, None)
_TRAINING: Final = no_meaning("acts in the training of the base model alone; training here has no dropout")
_RUNNING: Final = no_meaning("how transformers loads and runs the model, and what it returns")
_GENERATION: Final = no_meaning("as in generation_config.json")
_HEADS: Final = no_meaning("of other heads than the one that gives the next token")

DECODER_FIELDS: Final[Mapping[str, Field]] = {
    "is_causal": only(*_ON, otherwise="tokens see only those before them here"),
    "is_encoder_decoder": only(*OFF, otherwise="the models here are decoders"),
    "add_cross_attention": only(*OFF, otherwise="the models here are decoders"),
}
"""What transformers reads of every model, beside its class, and no backend computes."""

COMMON_FIELDS: Final[Mapping[str, Field]] = {
    "architectures": honoured("the first one names the family"),
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps"),
            *("rope_theta", "partial_rotary_factor"),
        ),
        honoured(),
    ),
    "rope_parameters": honoured("see the next table"),
    "rope_scaling": honoured("as `rope_parameters`, of older files"),
    "hidden_act": honoured("others than those of the family are refused"),
    "quantization_config": honoured("integers of 8 or 4 bits, fp8 and MXFP4, as far as the backend has them"),
    **dict.fromkeys(("dtype", "torch_dtype"), honoured("unless the backend's settings name another")),
    "text_config": honoured("the language part: its fields are read as if it stood alone"),
    "eos_token_id": honoured("if generation_config.json has none"),
    **DECODER_FIELDS,
    "attention_chunk_size": only(None, otherwise="layers that see chunks are not computed here"),
    "pruned_heads": only({}, None, otherwise="all heads are computed here"),
    "num_kv_shared_layers": only(None, 0, otherwise="each layer has its own keys and values here"),
    **dict.fromkeys(("initializer_range", "attention_dropout"), _TRAINING),
    **dict.fromkeys(
        (
            *("model_type", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
            *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
            *("torchscript", "use_bfloat16", "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size"),
            *("decoder_start_token_id", "tokenizer_class", "prefix", "base_model_tp_plan", "base_model_pp_plan"),
            *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_experts_implementation"),
            *("tf_legacy_loss", "sep_token_id", "_flash_attn_2_enabled"),
        ),
        _RUNNING,
    ),
    "pretraining_tp": no_meaning("how older versions of transformers divided products; the sums are the same"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), no_meaning("no token is put before or behind a request's own")),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type"), _HEADS),
    **dict.fromkeys(("finetuning_task", "task_specific_params"), _HEADS),
}

ROPE_FIELDS: Final = FileFields(
    "rope_parameters of config.json",
    {
        **dict.fromkeys(("rope_type", "type"), honoured(f"one of {', '.join(KNOWN_TYPES)}")),
        **dict.fromkeys(
            (
                *("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
                *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
                *("short_factor", "low_freq_factor", "high_freq_factor"),
            ),
            honoured(),
        ),
        "long_factor": no_meaning("sequences are no longer than those with `short_factor`"),
        **dict.fromkeys(
            ("mrope_section", "mrope_interleaved"), no_meaning("without images, the three positions of a token are one")
        ),
        **dict.fromkeys(("full_attention", "sliding_attention"), honoured("of layers of this kind")),
    },
)

_OF_IMAGES: Final = no_meaning("of images and sounds, which requests cannot have")

WHOLE_FIELDS: Final = FileFields(
    "config.json of a model with a language part",
    {
        **dict.fromkeys(
            ("text_config", "architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype"),
            honoured(),
        ),
        "ignore_index": no_meaning("of losses in transformers"),
        **dict.fromkeys(
            (
                *("vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id"),
                *("image_token_index", "boi_token_index", "eoi_token_index", "vision_start_token_id"),
                *("boi_token_id", "eoi_token_id", "vision_end_token_id", "mm_tokens_per_image", "spatial_merge_size"),
                *(
                    "vision_feature_layer",
                    "multimodal_projector_bias",
                    "projector_hidden_act",
                    "use_unified_vision_chunk",
                ),
                *("projection_hidden_size", "projection_layer_norm_eps", "media_placeholder_token_id"),
                "video_placeholder",
            ),
            _OF_IMAGES,
        ),
    },
)

_OF_GENERATION: Final = GENERATION_CONFIG_FIELDS.fields.keys() - {"eos_token_id"}


def family_table(name: str, own: Mapping[str, Field]) -> FileFields:
    """Return the table of a family: the rows of all decoders, and its own, which go before."""
    return FileFields(name, {**dict.fromkeys(sorted(_OF_GENERATION), _GENERATION), **COMMON_FIELDS, **own})


def check_config(config: Mapping[str, Json], path: Path, table: FileFields, *, all_known: bool = True) -> None:
    """Raise ConfigError, naming the fields, for what is not computed as a config.json says.

    `config`: of the language part. Announce the fields that are not in the table, if it has `all_known` ones.
    """
    problems = [*table.refusals(config), *_of_rope(config)]
    if problems:
        msg = f"{path}: a {table.file} with these settings is not supported: {'; '.join(problems)}"
        raise ConfigError(msg)
    if all_known:
        announce(path, table.unknown(config))


def check_whole(config: Mapping[str, Json], path: Path) -> None:
    """Announce what a model that also sees or hears has beside its language part."""
    announce(path, [name for name in WHOLE_FIELDS.unknown(config) if name not in COMMON_FIELDS])


def _of_rope(config: Mapping[str, Json]) -> Iterator[str]:
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not isinstance(given, dict):
            continue
        kinds = [each for each in given.values() if isinstance(each, dict)]
        for each in [given, *kinds]:
            yield from (f"{name}.{field} is not known here" for field in ROPE_FIELDS.unknown(each))
