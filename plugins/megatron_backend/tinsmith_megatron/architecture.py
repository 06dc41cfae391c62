"""The facts about a base model that engine and ranks need, read from its config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import (
    DecoderShape,
    HybridShape,
    Json,
    LatentShape,
    Rope,
    check_config,
    check_whole,
    decoder_shape,
    hybrid_shape,
    language_config,
    latent_shape,
    read_model_config,
    read_rope,
    short_rope,
    understood,
    without_fp8,
    without_int4,
)
from tinsmith_megatron.config_fields import FIELDS, fields_of

HYBRIDS = (
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM"),
)
"""They have layers with the gated delta rule, and store the weights of norms less 1."""

LATENTS = ("DeepseekV3ForCausalLM", "Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration")
"""They attend by latents, and choose experts by sigmoids with a correction, in groups."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *HYBRIDS, *LATENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """What models of `LATENTS` have besides sizes."""

    rope_factor: float  # how many times longer yarn makes the context; 1: it does not
    mscale_all_dim: float  # how much the scale of scores grows with it; 0: not at all
    groups: int  # of experts; 1: all may be chosen
    chosen_groups: int  # of each token
    routed_scale: float  # of what the routed experts give together


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    shape: DecoderShape
    rms_norm_eps: float
    rope: Rope
    latents: Latents | None = None

    @property
    def qk_norm(self) -> bool:
        return self.shape.class_name != "LlamaForCausalLM"

    @property
    def hybrid(self) -> HybridShape | None:
        return self.shape if isinstance(self.shape, HybridShape) else None

    @property
    def latent(self) -> LatentShape | None:
        return self.shape if isinstance(self.shape, LatentShape) else None


def read_architecture(directory: Path) -> Architecture:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind."""
    return architecture_of(read_model_config(directory), directory / "config.json")


def architecture_of(config: Mapping[str, Json], path: Path) -> Architecture:
    """Understand a config.json. `path` is for messages."""
    with understood(path):
        return _described(config, path)


def _described(config: Mapping[str, Json], path: Path) -> Architecture:
    whole, config = config, language_config(config)
    class_name = next(iter(config.get("architectures") or [""]))
    if whole is not config:
        check_whole(whole, path)
    config = without_int4(without_fp8(config, path), path)
    check_config(config, path, fields_of(class_name), all_known=class_name in FIELDS)
    _refuse_unsupported(config, path)
    eps = float(config.get("rms_norm_eps", 1e-6))
    if class_name in LATENTS:
        by_latents = latent_shape(config, path, supported=ARCHITECTURES)
        rope = read_rope(config, by_latents.rotated_dim, str(path))
        return Architecture(shape=by_latents, rms_norm_eps=eps, rope=rope, latents=_latents(config, by_latents, path))
    is_hybrid = class_name in HYBRIDS
    shape = (hybrid_shape if is_hybrid else decoder_shape)(config, path, supported=ARCHITECTURES)
    rope = read_rope(config, shape.head_dim, str(path), partial=0.25 if is_hybrid else None)
    if rope.factor != 1.0:
        msg = f"{path}: rotary embeddings with an attention factor (yarn) are not supported by the megatron backend"
        raise ConfigError(msg)
    return Architecture(shape=shape, rms_norm_eps=eps, rope=rope)


def _latents(config: Mapping[str, Json], shape: LatentShape, path: Path) -> Latents:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = Latents(
        rope_factor=float(rope.get("factor") or 1),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
        groups=int(config.get("n_group") or 1),
        chosen_groups=int(config.get("topk_group") or 1),
        routed_scale=float(config.get("routed_scaling_factor", 2.5)),
    )
    if shape.experts is not None:
        _check_routing(found, shape.experts.num_experts, shape.experts.top_k, path)
    return found


def _check_routing(latents: Latents, num_experts: int, top_k: int, path: Path) -> None:
    """Refuse what Megatron-core computes in another way, and what has no meaning."""
    if top_k == 1:
        msg = f"{path}: num_experts_per_tok is 1, and Megatron-core does not normalise the weight of one expert alone"
        raise ConfigError(msg)
    if num_experts % latents.groups or num_experts < 2 * latents.groups:
        msg = f"{path}: n_routed_experts ({num_experts}) must fill n_group ({latents.groups}) equal groups of 2 or more"
        raise ConfigError(msg)


def _refuse_unsupported(config: Mapping[str, Json], path: Path) -> None:
    if config.get("quantization_config"):
        msg = (
            f"{path}: quantization_config = {config['quantization_config']!r} is not supported by the megatron backend"
        )
        raise ConfigError(msg)
    if short_rope(config) is not None:
        msg = f"{path}: rotary embeddings that change with the length (longrope) are not supported by megatron"
        raise ConfigError(msg)
