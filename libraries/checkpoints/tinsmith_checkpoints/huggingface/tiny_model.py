"""Write a tiny random model, for demos and tests, that every Hugging Face tool can read.

No ML framework is needed for `FAMILIES`, and the same shape and seed give the same files, byte for byte. Classes of
transformers (`tiny_classes`) are made by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from safetensors.numpy import save_file

from tinsmith_checkpoints.errors import UserError
from tinsmith_checkpoints.huggingface.safetensors_files import ShardWriter
from tinsmith_checkpoints.huggingface.tiny_classes import TINY_CLASSES, save_as_published, tiny_causal_lm
from tinsmith_checkpoints.huggingface.tiny_tokenizer import chat_template, special_tokens, train_tokenizer
from tinsmith_checkpoints.values import FloatArray, Json

_ARCHITECTURES: Final = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
}
FAMILIES: Final = tuple(_ARCHITECTURES)
"""Those that need no framework."""
_ROPE_THETA: Final = {
    "qwen3": 1_000_000.0,
    "llama": 500_000.0,
    "qwen3_moe": 1_000_000.0,
    "qwen2": 1_000_000.0,
    "mistral": 1_000_000.0,
}
_WITH_HEAD_NORMS: Final = ("qwen3", "qwen3_moe")  # of queries and keys
_LIKE_LLAMA: Final = ("llama", "mistral", "LlamaForCausalLM", "MistralForCausalLM")
_ONE_SHARD: Final = 1 << 40  # bytes
_BIAS_STD: Final = 0.5  # as large as queries and keys, so that a bias that is left out shows
_EMBEDDING_STD: Final = 0.02  # small relative to the layers' outputs, so that hidden states mix the whole context


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """The shape of the model. The defaults give about a million parameters, which a laptop trains in seconds."""

    family: str = "qwen3"  # of `FAMILIES`, or a class of `TINY_CLASSES`
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 384  # of one expert, if the family has experts
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_context_tokens: int = 2048
    num_experts: int = 8  # of each layer, for families that have experts
    experts_per_token: int = 2
    tied: bool = True  # the output head is the embedding
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # of config.json in addition, of a class alone

    def __post_init__(self) -> None:
        others = {"family", "tied", "dtype", "seed", "settings"}
        sizes = {name: getattr(self, name) for name in self.__slots__ if name not in others}
        for name, size in sizes.items():
            if size < 1:
                msg = f"{name} is {size}; it must be at least 1"
                raise UserError(msg)
        if self.family not in FAMILIES and self.family not in TINY_CLASSES:
            msg = f"no family {self.family!r}, known: {', '.join((*FAMILIES, *TINY_CLASSES))}"
            raise UserError(msg)
        if self.settings and self.family in FAMILIES:
            msg = f"settings are for classes of transformers ({', '.join(TINY_CLASSES)}), not for {self.family!r}"
            raise UserError(msg)
        if self.num_heads % self.num_kv_heads:
            msg = f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            raise UserError(msg)
        if self.experts_per_token > self.num_experts:
            msg = f"experts_per_token ({self.experts_per_token}) must be at most num_experts ({self.num_experts})"
            raise UserError(msg)
        if self.head_dim % 2:
            msg = f"head_dim is {self.head_dim}; rotary positions need an even one"
            raise UserError(msg)
        if self.family == "qwen2" and self.num_heads * self.head_dim != self.hidden_size:
            msg = (
                f"hidden_size is {self.hidden_size}; in the family 'qwen2' it is num_heads ({self.num_heads}) times "
                f"head_dim ({self.head_dim})"
            )
            raise UserError(msg)


def write_tiny_model(directory: Path, shape: TinyShape, *, overwrite: bool = False) -> int:
    """Write model and tokenizer and return the number of parameters.

    Raise UserError if the directory is not empty, unless `overwrite`.
    """
    if not overwrite and directory.exists() and any(directory.iterdir()):
        msg = f"{str(directory)!r} is not empty; choose another directory, or overwrite it with --force"
        raise UserError(msg)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_like(shape.family), shape.vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    ids = {name: vocabulary[token] for name, token in special_tokens(_like(shape.family)).items()}
    for stale in directory.glob("model*.safetensors*"):
        stale.unlink()
    size = _write_class(directory, shape, ids) if shape.family in TINY_CLASSES else _write_family(directory, shape, ids)
    _write_json(directory / "generation_config.json", _generation_config(ids))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(shape))
    return size


def _write_class(directory: Path, shape: TinyShape, ids: Mapping[str, int]) -> int:
    known = TINY_CLASSES[shape.family]
    settings: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context_tokens,
        "tie_word_embeddings": shape.tied,
        **{f"{name}_id": number for name, number in ids.items()},
    }
    if known.experts:
        settings[known.experts] = shape.num_experts
        settings["num_experts_per_tok"] = shape.experts_per_token
        settings |= {key: shape.intermediate_size for key in known.settings if key.endswith("intermediate_size")}
    if "qk_rope_head_dim" in known.settings:  # heads of latents have sizes of their own
        settings["num_key_value_heads"] = shape.num_heads
        del settings["head_dim"]
    tied = {"tie_word_embeddings": shape.tied}
    model = tiny_causal_lm(shape.family, {**settings, **shape.settings}, tied, seed=shape.seed)
    if shape.dtype == "bfloat16":
        model = model.bfloat16()
    save_as_published(model, directory)
    return int(model.num_parameters())


def _write_family(directory: Path, shape: TinyShape, ids: Mapping[str, int]) -> int:
    weights = dict(_weights(shape))
    if shape.dtype == "float32":
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        with ShardWriter(directory, "model", weights, shard_bytes=_ONE_SHARD, dtype=shape.dtype) as writer:
            for name, array in weights.items():
                writer.add(name, array)
    _write_json(directory / "config.json", _config(shape, ids))
    return sum(array.size for array in weights.values())


def _weights(shape: TinyShape) -> Iterator[tuple[str, FloatArray]]:
    """Yield every tensor, [out, in] as in torch. Layers have variance 1 / in, so that none fades out."""
    rng = np.random.default_rng(shape.seed)
    hidden = shape.hidden_size

    def mlp(prefix: str) -> Iterator[tuple[str, FloatArray]]:
        yield f"{prefix}.gate_proj.weight", matrix(shape.intermediate_size, hidden)
        yield f"{prefix}.up_proj.weight", matrix(shape.intermediate_size, hidden)
        yield f"{prefix}.down_proj.weight", matrix(hidden, shape.intermediate_size)

    def matrix(out: int, into: int, std: float | None = None) -> FloatArray:
        return (rng.standard_normal((out, into)) * (std or into**-0.5)).astype(np.float32)

    def ones(size: int) -> FloatArray:
        return np.ones(size, np.float32)

    yield "model.embed_tokens.weight", matrix(shape.vocab_size, hidden, _EMBEDDING_STD)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones(hidden)
        yield from _attention_weights(shape, f"{prefix}.self_attn", matrix)
        yield f"{prefix}.post_attention_layernorm.weight", ones(hidden)
        if shape.family == "qwen3_moe":
            yield f"{prefix}.mlp.gate.weight", matrix(shape.num_experts, hidden)
            for expert in range(shape.num_experts):
                yield from mlp(f"{prefix}.mlp.experts.{expert}")
        else:
            yield from mlp(f"{prefix}.mlp")
    yield "model.norm.weight", ones(hidden)
    if not shape.tied:
        yield "lm_head.weight", matrix(shape.vocab_size, hidden, _EMBEDDING_STD)


def _attention_weights(
    shape: TinyShape, prefix: str, matrix: Callable[..., FloatArray]
) -> Iterator[tuple[str, FloatArray]]:
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{prefix}.{name}.weight", matrix(size, hidden)
        if shape.family == "qwen2":
            yield f"{prefix}.{name}.bias", matrix(1, size, _BIAS_STD)[0]
    yield f"{prefix}.o_proj.weight", matrix(hidden, queries)
    if shape.family in _WITH_HEAD_NORMS:
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.{name}.weight", np.ones(shape.head_dim, np.float32)


def _config(shape: TinyShape, ids: Mapping[str, int]) -> dict[str, Json]:
    return {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context_tokens,
        "rope_theta": _ROPE_THETA[shape.family],
        "rope_scaling": None,
        "rms_norm_eps": 1e-5 if shape.family in _LIKE_LLAMA else 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tied,
        "initializer_range": _EMBEDDING_STD,
        "torch_dtype": shape.dtype,
        "use_cache": True,
        "bos_token_id": ids["bos_token"],
        "eos_token_id": ids["eos_token"],
        "pad_token_id": ids["pad_token"],
        **({"sliding_window": None} if shape.family == "mistral" else {}),
        **(_expert_config(shape) if shape.family == "qwen3_moe" else {}),
    }


def _expert_config(shape: TinyShape) -> dict[str, Json]:
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _generation_config(ids: Mapping[str, int]) -> dict[str, Json]:
    return {
        "bos_token_id": ids["bos_token"],
        "eos_token_id": [ids["eos_token"], ids["pad_token"]],
        "pad_token_id": ids["pad_token"],
        "do_sample": True,
    }


def _tokenizer_config(shape: TinyShape) -> dict[str, Json]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": chat_template(_like(shape.family)),
        **special_tokens(_like(shape.family)),
    }


def _like(family: str) -> str:
    """Return the family whose tokenizer and chat template this one uses."""
    return "llama" if family in _LIKE_LLAMA else "qwen3"


def _write_json(file: Path, content: dict[str, Json]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
