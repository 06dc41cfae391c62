"""The range of every number of every request, in one table.

`checks.py` refuses what is outside, the abuse suites of `tinsmith.testing` try what is inside, and the reference page
"Limits" prints it. Within these ranges, what a backend derives from a number alone is finite in float32, and integers
fit the width in which backends keep them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from tinsmith.backend import Capabilities, SamplerCapabilities, TrainerCapabilities
from tinsmith.errors import UserError
from tinsmith_checkpoints.values import MAX_ALPHA

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
FLOAT32_MAX: Final = 3.4e38
"""Just below the greatest float32: between that and the next power of two, float64 has numbers that do not convert."""
FLOAT32_LEAST: Final = 1.2e-38
"""Just above the least normal float32. Positive numbers below it may be rounded to zero."""

_MAX_RATE = 1e18  # the product of two is finite in float32, and so is one divided by 1 - beta
_MAX_BETA = 0.9999999  # in float32, little more is 1, and backends divide by 1 - beta
_MAX_SAMPLES = 1024
_HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values that a number may have: `low` to `high`, both included, and single ones beside them."""

    low: float
    high: float
    integer: bool = False
    also: Mapping[float, str] = field(default_factory=dict)  # single values, with their meanings
    low_from: str = ""  # what decides a bound, for the reference page; empty: it is the same for all backends
    high_from: str = ""

    def holds(self, value: float) -> bool:
        """Return whether the value is allowed; NaN never is."""
        return value in self.also or self.low <= value <= self.high

    def check(self, name: str, value: float) -> None:
        """Raise UserError if the value is not allowed."""
        if not self.holds(value):
            msg = f"{name} is {value}; allowed: {self}"
            raise UserError(msg)

    def __str__(self) -> str:
        return self._written(f"{self._shown(self.low)} to {self._shown(self.high)}")

    def described(self) -> str:
        """Say what is allowed, with the names of bounds that depend on the backend."""
        return self._written(f"{self.low_from or self._shown(self.low)} to {self.high_from or self._shown(self.high)}")

    def _written(self, ends: str) -> str:
        single = [f"{self._shown(value)} ({meaning})" for value, meaning in self.also.items()]
        return ", or ".join([*single, ends])

    def _shown(self, value: float) -> str:
        return str(int(value)) if self.integer else f"{value:.8g}"


TTL_SECONDS: Final = Range(low=_HOUR_S, high=10 * 365 * 24 * _HOUR_S, integer=True)
NUM_SAMPLES: Final = Range(low=1, high=_MAX_SAMPLES, integer=True)
LORA_ALPHA: Final = Range(low=1 / MAX_ALPHA, high=MAX_ALPHA)
"""Clients cannot choose alpha; it comes with imported adapters."""


@lru_cache(maxsize=64)
def training_ranges(trainer: TrainerCapabilities) -> Mapping[str, Range]:
    """Return the ranges for requests to a trainer, by the names that refusals use.

    `token id`, `loss_fn_config` and `loss_fn_inputs` stand for every number of that kind.
    """
    rate, beta = Range(low=0.0, high=_MAX_RATE), Range(low=0.0, high=_MAX_BETA)
    any_float32 = Range(low=-FLOAT32_MAX, high=FLOAT32_MAX)
    return {
        "lora_config: rank": Range(
            low=1,
            high=trainer.max_lora_rank,
            integer=True,
            also={0: "all weights"} if trainer.full_fine_tuning else {},
            high_from="`max_lora_rank`",
        ),
        "lora_config: seed": _SEED,
        "lora_config: alpha": LORA_ALPHA,
        "token id": _token_id(trainer),
        "loss_fn_config": any_float32,
        "loss_fn_inputs": any_float32,
        "adam_params: learning_rate": rate,
        "adam_params: beta1": beta,
        "adam_params: beta2": beta,
        "adam_params: eps": Range(low=FLOAT32_LEAST, high=FLOAT32_MAX),  # with 0, what has no gradient yet is 0 / 0
        "adam_params: weight_decay": rate,
        "adam_params: grad_clip_norm": Range(low=FLOAT32_LEAST, high=FLOAT32_MAX, also={0.0: "off"}),
    }


@lru_cache(maxsize=64)
def sampling_ranges(sampler: SamplerCapabilities) -> Mapping[str, Range]:
    """Return the ranges for requests to a sampler, by the names that refusals use."""
    topk = Range(
        low=0,
        high=sampler.max_topk_logprobs,
        integer=True,
        high_from="`max_topk_logprobs`, and at most `max_targets_per_token` if the backend trains",
    )
    return {
        "token id": _token_id(sampler),
        "sampling_params: max_tokens": Range(
            low=1,
            high=sampler.max_context_tokens - 1,
            integer=True,
            high_from="`max_context_tokens` - tokens of the prompt; 1 if the prompt fills the context",
        ),
        "sampling_params: seed": _SEED,
        "sampling_params: temperature": Range(
            low=sampler.min_temperature,
            high=sampler.max_temperature,
            also={0.0: "greedy"},
            low_from="`min_temperature`",
            high_from="`max_temperature`",
        ),
        "sampling_params: top_k": Range(low=1, high=INT32_MAX, integer=True, also={-1: "off"}),
        "sampling_params: top_p": Range(low=FLOAT32_LEAST, high=1.0),
        "num_samples": NUM_SAMPLES,
        "topk_prompt_logprobs": topk,
        "topk_sample_logprobs": topk,
        "prompt_alt_tokens_k": Range(
            low=0, high=sampler.max_prompt_alt_tokens, integer=True, high_from="`max_prompt_alt_tokens`"
        ),
        "prompt_logprobs_last_n": Range(
            low=1,
            high=sampler.max_context_tokens - 1,
            integer=True,
            high_from="tokens of the prompt - 1",
        ),
    }


_SEED = Range(low=0, high=INT64_MAX, integer=True)


def _token_id(capabilities: Capabilities) -> Range:
    return Range(low=0, high=capabilities.vocab_size - 1, integer=True, high_from="`vocab_size` - 1")
