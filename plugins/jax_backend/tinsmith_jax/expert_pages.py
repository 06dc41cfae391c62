"""Which experts computed the tokens that the cache's pages hold of prompts: on the host, beside the pages.

So a prompt that finds a prefix in the cache has that prefix's experts, too.
"""

import numpy as np

from tinsmith import Array
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_values import PAGE, ExpertsOfPages, SamplingShape, expert_dtype, experts_of_token
from tinsmith_jax.slots import Prompt


class ExpertPages:
    """S = shards, P = pages of a shard, T = tokens of a page, L = layers, C = experts of a token in a layer."""

    def __init__(self, shape: SamplingShape, config: ModelConfig) -> None:
        pages = (shape.num_shards, shape.pages_per_shard, PAGE)
        self._experts_SPTLC = np.zeros((*pages, *experts_of_token(config)), expert_dtype(config))

    def write(self, experts: ExpertsOfPages) -> None:
        for place, experts_TLC in experts.items():
            self._experts_SPTLC[place] = experts_TLC

    def of(self, prompt: Prompt) -> Array:
        """Return a copy of the experts of what was read of a prompt, [tokens, L, C]."""
        experts_TLC = self._experts_SPTLC[prompt.shard, prompt.all_pages]
        return experts_TLC.reshape(-1, *experts_TLC.shape[2:])[: prompt.num_read]
