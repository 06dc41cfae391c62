"""What attackers ask of samplers: every number at its extremes, every token, adapters that are not numbers.

Everything passes `check_sample_operation`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np

from tinsmith.backend import HostSnapshot, SamplerCapabilities, Snapshot
from tinsmith.operations import LoraConfig, Sample, SamplingParams
from tinsmith.ranges import LORA_ALPHA, sampling_ranges
from tinsmith.testing.abuse_values import drawn, extremes
from tinsmith.testing.sampling_suite import SUITE_LORA, Shapes, new_snapshot_id, random_prompt, random_snapshot

ATTACKER: Final = "abuse-attacker:sample:0"
_PARAMS = ("seed", "temperature", "top_k", "top_p")
_LENGTH = 9
_MAX_TOKENS = 3
_RUINS = (math.nan, math.inf, -math.inf, 3.4e38, 1e30, 1e-45, 0.0)
_MOST_SAMPLES = 40  # of a random case


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    what: str
    op: Sample
    snapshot: Snapshot | None = None  # loaded for this case; `op` names it


def cases_of(capabilities: SamplerCapabilities, shapes: Shapes | None, group: str, num_random: int) -> Iterator[Case]:
    """Yield the cases of a group; `shapes` of an adapter are None if none can be made."""
    match group:
        case "adapters":
            return _adapters(capabilities, shapes) if shapes is not None else iter(())
        case "random":
            return (_random(capabilities, seed) for seed in range(num_random))
        case _:
            return _GROUPS[group](capabilities)


def _case(capabilities: SamplerCapabilities, params: Mapping[str, Any], **fields: Any) -> Case:
    op = Sample(
        **{
            "sampling_session_id": ATTACKER,
            "snapshot_id": None,
            "prompt_P": random_prompt(50, _LENGTH, capabilities.vocab_size),
            "params": SamplingParams(**{"max_tokens": _MAX_TOKENS, "seed": 1, **params}),
            **fields,
        }
    )
    asked = {name: value for name, value in fields.items() if np.ndim(value) == 0}
    return Case(what=f"{dict(params)} {asked}", op=op)


def _parameters(capabilities: SamplerCapabilities) -> Iterator[Case]:
    ranges = {name: sampling_ranges(capabilities)[f"sampling_params: {name}"] for name in _PARAMS}
    for name, allowed in ranges.items():
        for value in extremes(allowed):
            yield _case(capabilities, {name: value})
    hot, cold = ranges["temperature"].high, ranges["temperature"].low
    for temperature, top_k, top_p in product((0.0, cold, hot), (-1, 1, 2**31 - 1), (ranges["top_p"].low, 1.0)):
        yield _case(capabilities, {"temperature": temperature, "top_k": top_k, "top_p": top_p})


def _questions(capabilities: SamplerCapabilities) -> Iterator[Case]:
    """How many samples, tokens, alternatives and scores."""
    ranges, context = sampling_ranges(capabilities), capabilities.max_context_tokens
    for value in extremes(ranges["num_samples"]):
        yield _case(capabilities, {"max_tokens": 1}, num_samples=value)
    for length in (1, 2, context - 1, context):
        prompt = random_prompt(51, length, capabilities.vocab_size)
        for max_tokens in {1, max(1, context - length)}:
            yield _case(capabilities, {"max_tokens": max_tokens}, prompt_P=prompt)
    for k in extremes(ranges["topk_sample_logprobs"]):
        yield _case(capabilities, {}, topk_sample_logprobs=k)
        if capabilities.prompt_logprobs:
            yield _case(capabilities, {}, topk_prompt_logprobs=k, prompt_logprobs=True)
    if capabilities.prompt_logprobs:
        for last_n in (1, _LENGTH - 1):
            yield _case(capabilities, {}, prompt_logprobs=True, prompt_logprobs_last_n=last_n)


def _tokens(capabilities: SamplerCapabilities) -> Iterator[Case]:
    ids = [int(value) for value in extremes(sampling_ranges(capabilities)["token id"])]
    for token in ids:
        prompt = np.full(_LENGTH, token, np.int32)
        yield _case(capabilities, {"stop_tokens": (token,)}, prompt_P=prompt)
        if capabilities.target_prompt_logprobs:
            yield _case(capabilities, {}, target_prompt_logprobs=np.full((_LENGTH - 1, 1), token))
    every = tuple(range(min(capabilities.vocab_size, 8192)))
    yield _case(capabilities, {"stop_tokens": every, "max_tokens": 20})
    yield _case(capabilities, {"stop_tokens": every[1:] * 2, "stop_at_eos": False, "max_tokens": 20})
    if capabilities.target_prompt_logprobs:
        for width in (1, 64):
            yield _case(capabilities, {}, target_prompt_logprobs=np.full((_LENGTH - 1, width), -1))


def _adapters(capabilities: SamplerCapabilities, shapes: Shapes) -> Iterator[Case]:
    """Adapters of which some or all numbers are ruined: by divergence, or on purpose in a checkpoint."""
    healthy = random_snapshot(shapes, seed=60).adapter_weights()
    for value, every in product(_RUINS, (1, 97)):
        ruined = {name: array.copy() for name, array in healthy.items()}
        for array in ruined.values():
            array.reshape(-1)[::every] = value
        yield from _with(capabilities, HostSnapshot(new_snapshot_id(), SUITE_LORA, ruined), f"weights of {value}")
    for alpha in extremes(LORA_ALPHA):
        lora = LoraConfig(rank=SUITE_LORA.rank, seed=0, alpha=alpha)
        yield from _with(capabilities, HostSnapshot(new_snapshot_id(), lora, healthy), f"alpha {alpha}")


def _with(capabilities: SamplerCapabilities, snapshot: Snapshot, what: str) -> Iterator[Case]:
    """One sample that draws, and one that asks for everything."""
    scores: dict[str, Any] = {"prompt_logprobs": True} if capabilities.prompt_logprobs else {}
    if sampling_ranges(capabilities)["topk_sample_logprobs"].high >= 1:
        scores["topk_sample_logprobs"] = 1
    for params, fields in (({"top_k": 5, "top_p": 0.9}, {}), ({"temperature": 0.0}, scores)):
        case = _case(capabilities, params, snapshot_id=snapshot.snapshot_id, **fields)
        yield replace(case, what=f"{what}, {case.what}", snapshot=snapshot)


def _random(capabilities: SamplerCapabilities, seed: int) -> Case:
    rng, ranges = np.random.default_rng([seed, 34]), sampling_ranges(capabilities)
    length = int(rng.integers(1, min(64, capabilities.max_context_tokens // 2) + 1))
    params = {name: drawn(rng, ranges[f"sampling_params: {name}"]) for name in _PARAMS if rng.random() < 0.7}
    params["max_tokens"] = int(rng.integers(1, min(20, capabilities.max_context_tokens - length) + 1))
    fields: dict[str, Any] = {
        "prompt_P": random_prompt(seed, length, capabilities.vocab_size),
        "num_samples": int(min(_MOST_SAMPLES, drawn(rng, ranges["num_samples"]))),
        "topk_sample_logprobs": int(drawn(rng, ranges["topk_sample_logprobs"])) if rng.random() < 0.3 else 0,
    }
    if capabilities.prompt_logprobs and length > 1 and rng.random() < 0.5:
        fields |= {"prompt_logprobs": True, "prompt_logprobs_last_n": int(rng.integers(1, length))}
    return _case(capabilities, params, **fields)


_GROUPS: Final[Mapping[str, Callable[[SamplerCapabilities], Iterator[Case]]]] = {
    "parameters": _parameters,
    "questions": _questions,
    "tokens": _tokens,
}
GROUPS: Final = (*_GROUPS, "adapters", "random")
