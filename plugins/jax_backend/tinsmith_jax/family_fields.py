"""The fields of config.json that several families share here, beyond those that the library has."""

from collections.abc import Mapping
from typing import Final

from tinsmith_checkpoints.huggingface import Field, honoured

BIASES: Final[Mapping[str, Field]] = {"attention_bias": honoured()}

MLP_BIASES: Final[Mapping[str, Field]] = {"attention_bias": honoured(), "mlp_bias": honoured()}

WINDOWS: Final[Mapping[str, Field]] = dict.fromkeys(
    ("sliding_window", "layer_types", "sliding_window_pattern"), honoured()
)
"""Of families that mix layers which see a window with others."""
