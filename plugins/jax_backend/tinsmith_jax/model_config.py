"""The architecture of a base model, read from the config.json of a Hugging Face directory. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tinsmith import ConfigError
from tinsmith.huggingface import DecoderShape, Json, Rope, decoder_shape, read_model_config, read_rope

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """Static facts of a decoder; hashable, so that compiled functions may close over it."""

    rms_norm_eps: float
    rope: Rope
    dtype: str | None  # of the weights, as config.json has it

    @property
    def qk_norm(self) -> bool:
        return self.class_name != "LlamaForCausalLM"

    def divided(self, parts: int) -> "ModelConfig":
        """Return what one of `parts` shards of each layer's matrices sees: fewer heads."""
        return (
            self
            if parts == 1
            else replace(self, num_heads=self.num_heads // parts, num_kv_heads=self.num_kv_heads // parts)
        )


def read_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind."""
    return config_of(read_model_config(directory), directory / "config.json")


def config_of(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Read what config.json holds. `path` names it in errors."""
    shape = decoder_shape(config, path, supported=ARCHITECTURES)
    _refuse_unsupported(config, path)
    return ModelConfig(
        **{each.name: getattr(shape, each.name) for each in fields(shape)},
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, shape.head_dim, str(path)),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _refuse_unsupported(config: Mapping[str, Json], path: Path) -> None:
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            msg = f"{path}: {key} = {config[key]!r} is not supported by the jax backend"
            raise ConfigError(msg)
    if config.get("hidden_act", "silu") != "silu":
        msg = f"{path}: hidden_act {config['hidden_act']!r} is not supported, only 'silu'"
        raise ConfigError(msg)
