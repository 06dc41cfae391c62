"""Rotary frequencies from a Hugging Face config: default, linear, llama3, yarn and longrope. NumPy only.

The formulas come from transformers/modeling_rope_utils.py (Apache-2.0). Other types are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.values import Json

KNOWN_TYPES = ("default", "linear", "llama3", "yarn", "longrope")

Frequencies = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """Angles are `position * inv_freq`; cos and sin are multiplied by `factor` (1 except for yarn)."""

    inv_freq: tuple[float, ...]  # [rotated dimensions of a head / 2], exact float32 values
    factor: float = 1.0


def read_rope(config: Mapping[str, Json], head_dim: int, source: str, *, partial: float | None = None) -> Rope:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`. Raise ConfigError for unknown types.

    `partial`: the share of each head's dimensions, the first ones, that the model's code rotates unless its config says
    otherwise. None: that code rotates all, whatever the config says, so another share is refused.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    share = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or partial or 1.0)
    if partial is None and share != 1.0:
        msg = f"{source}: partial rotary embeddings are not supported, use a model without partial_rotary_factor"
        raise ConfigError(msg)
    rotated = int(head_dim * share)
    plain = (1.0 / theta ** (np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated))).astype(np.float32)
    try:
        match kind:
            case "default":
                return _rope(plain)
            case "linear":
                return _rope(plain / np.float32(parameters["factor"]))
            case "llama3":
                return _rope(_llama3(plain, parameters))
            case "longrope":
                return _longrope(plain, parameters, int(config["max_position_embeddings"]))
            case "yarn":
                return _yarn(plain, theta, rotated, parameters, int(config["max_position_embeddings"]))
    except KeyError as error:
        msg = f"{source}: rope type {kind!r} needs {error.args[0]!r}, which the config lacks"
        raise ConfigError(msg) from error
    msg = f"{source}: rope type {kind!r} is not supported, only {', '.join(KNOWN_TYPES)}"
    raise ConfigError(msg)


def short_rope(config: Mapping[str, Json]) -> int | None:
    """Return the tokens of a sequence beyond which longrope has other frequencies; None if the type is another one."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" not in (parameters.get("rope_type"), parameters.get("type")):
        return None
    original = parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(original or config["max_position_embeddings"])


def _rope(inv_freq: Frequencies, factor: float = 1.0) -> Rope:
    return Rope(tuple(float(x) for x in inv_freq.astype(np.float32)), factor)


def _llama3(plain: Frequencies, parameters: Mapping[str, Any]) -> Frequencies:
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    old_context = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    smooth = (old_context / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    slowed = np.where(wavelength > old_context / low, plain / factor, plain)
    is_between = (wavelength >= old_context / high) & (wavelength <= old_context / low)
    return np.where(is_between, between, slowed).astype(np.float32)


def _longrope(plain: Frequencies, parameters: Mapping[str, Any], max_position: int) -> Rope:
    """Return the frequencies for sequences within the original context."""
    old_context = float(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or max_position / old_context)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old_context))
    short: Frequencies = np.asarray(parameters["short_factor"], np.float32)
    return _rope(plain / short, float(attention_factor))


def _yarn(plain: Frequencies, theta: float, head_dim: int, parameters: Mapping[str, Any], max_position: int) -> Rope:
    old_context = float(parameters.get("original_max_position_embeddings") or max_position)
    factor = float(parameters.get("factor") or max_position / old_context)
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        both = bool(mscale and mscale_all)
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all) if both else _mscale(factor, 1.0)

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(old_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(float(parameters.get("beta_fast") or 32))
    high = dimension_of(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    return _rope((plain / np.float32(factor)) * (1 - keep) + plain * keep, float(attention_factor))


def _mscale(factor: float, mscale: float | None) -> float:
    return 1.0 if factor <= 1 or mscale is None else 0.1 * float(mscale) * math.log(factor) + 1.0
