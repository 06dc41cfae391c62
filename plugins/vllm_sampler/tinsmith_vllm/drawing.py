"""One sample in progress: the request sent to vLLM, and the sequences that come back."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tinsmith import (
    ExpertArray,
    FloatArray,
    OnTokens,
    Sample,
    SampledSequence,
    SampleOutput,
    StopReason,
    TokenArray,
    TopLogprobs,
)
from tinsmith_checkpoints.huggingface import StopRules, StopWatch
from tinsmith_vllm.messages import Drawn, Generate, PromptQuestion, PromptScores

_UNUSED_LOGPROB: Final = -99999.0
_MASK: Final = (1 << 64) - 1


@dataclass(slots=True)
class _Sequence:
    """The tokens of one sequence so far. `watch` is set if stop strings may end it, as vLLM does not check them."""

    watch: StopWatch | None
    tokens: list[TokenArray] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[FloatArray] = field(default_factory=list)
    top_ids: list[TokenArray] = field(default_factory=list)
    top_logprobs: list[FloatArray] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)
    stop_reason: StopReason | None = None


class Drawing:
    """Collects the sequences that one replica draws for one request."""

    def __init__(
        self,
        request_id: int,
        op: Sample,
        rules: StopRules,
        experts_of_token: tuple[int, int] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> None:
        """`experts_of_token`: layers and experts, if sequences come with the experts that computed them."""
        self.request_id = request_id
        self._experts_of_token = experts_of_token
        self._op = op
        self._stop_tokens = sorted(rules.stop_tokens(op.params))
        self._on_tokens = on_tokens
        watches = bool(op.params.stop_strings)
        self._sequences = [_Sequence(rules.watch(op.params) if watches else None) for _ in range(op.num_samples)]
        self._scores: PromptScores | None = None
        self._asks = op.prompt_logprobs or op.topk_prompt_logprobs > 0 or op.target_prompt_logprobs is not None
        self._cached_tokens = 0

    def generate(self, adapter_id: int) -> Generate:
        params = self._op.params
        return Generate(
            request_id=self.request_id,
            prompt=np.ascontiguousarray(self._op.prompt_P, np.int32).tobytes(),
            seeds=[_seed_of(params.seed, index) for index in range(self._op.num_samples)],
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            stop_tokens=self._stop_tokens,
            num_top=self._op.topk_sample_logprobs,
            adapter_id=adapter_id,
            cache_salt=self._op.sampling_session_id,
            stream=bool(params.stop_strings) or self._on_tokens is not None,
            question=self._question() if self._asks else None,
        )

    def _question(self) -> PromptQuestion:
        op, P = self._op, len(self._op.prompt_P)
        last_n = P if op.prompt_logprobs_last_n is None else op.prompt_logprobs_last_n
        targets = np.empty((P - 1, 0), np.int64) if op.target_prompt_logprobs is None else op.target_prompt_logprobs
        return PromptQuestion(
            first_row=0 if targets.shape[1] else self._first_row(last_n),  # last_n does not limit targets
            num_top=op.topk_prompt_logprobs,
            num_targets=targets.shape[1],
            targets=np.ascontiguousarray(targets, np.int64).tobytes(),
        )

    def _first_row(self, last_n: int) -> int:
        return max(0, len(self._op.prompt_P) - last_n - 1)

    @property
    def is_done(self) -> bool:
        return all(sequence.stop_reason is not None for sequence in self._sequences)

    def take(self, drawn: Drawn) -> list[int]:
        """Add the message's tokens. Return the sequences to end because their text contains a stop string."""
        sequence = self._sequences[drawn.index]
        self._scores = drawn.scores or self._scores
        if drawn.index == 0:
            self._cached_tokens = drawn.cached_tokens
        if sequence.stop_reason is not None:
            return []  # drawn before vLLM received the request to end it
        k = self._op.topk_sample_logprobs
        tokens = np.frombuffer(drawn.tokens, np.int32)
        logprobs = np.frombuffer(drawn.logprobs, np.float32)
        top_ids = np.frombuffer(drawn.top_ids, np.int32).reshape(len(tokens), k)
        top_logprobs = np.frombuffer(drawn.top_logprobs, np.float32).reshape(len(tokens), k)
        kept, found = len(tokens), False
        if sequence.watch is not None:
            for position, token in enumerate(tokens.tolist()):
                if sequence.watch.push(token) == "stop":
                    kept, found = position + 1, True
                    break
        if self._on_tokens is not None:
            self._on_tokens(drawn.index, sequence.num_tokens, tokens[:kept].tolist())
        sequence.num_tokens += kept
        sequence.tokens.append(tokens[:kept])
        sequence.logprobs.append(logprobs[:kept])
        sequence.top_ids.append(top_ids[:kept])
        sequence.top_logprobs.append(top_logprobs[:kept])
        if self._experts_of_token is not None:
            sequence.experts.append(np.frombuffer(drawn.experts, np.uint16).reshape(-1, *self._experts_of_token))
        if found:
            sequence.stop_reason = "stop"
            return [] if drawn.ended else [drawn.index]
        if drawn.ended:
            sequence.stop_reason = "stop" if drawn.ended == "stop" else "length"
        return []

    def output(self) -> SampleOutput:
        """Return the complete result, once all sequences are done."""
        op = self._op
        P = len(op.prompt_P)
        result = SampleOutput(
            sequences=tuple(self._sampled(sequence) for sequence in self._sequences),
            prompt_cache_hit_tokens=self._cached_tokens,
        )
        if self._scores is None:
            return result
        first = self._first_row(P if op.prompt_logprobs_last_n is None else op.prompt_logprobs_last_n)
        return SampleOutput(
            sequences=result.sequences,
            prompt_logprobs=_prompt_logprobs(self._scores, first) if op.prompt_logprobs else None,
            top_prompt_logprobs=self._top_prompt(self._scores, first) if op.topk_prompt_logprobs else None,
            target_prompt_logprobs=(
                None
                if op.target_prompt_logprobs is None
                else np.frombuffer(self._scores.targets, np.float32).reshape(op.target_prompt_logprobs.shape).copy()
            ),
            prompt_cache_hit_tokens=self._cached_tokens,
        )

    def _sampled(self, sequence: _Sequence) -> SampledSequence:
        assert sequence.stop_reason is not None
        top = None
        if self._op.topk_sample_logprobs:
            ids, logprobs = np.concatenate(sequence.top_ids), np.concatenate(sequence.top_logprobs)
            top = TopLogprobs(token_ids=ids, logprobs=logprobs)
        tokens, experts = np.concatenate(sequence.tokens), None
        if self._experts_of_token is not None:
            experts = np.concatenate(sequence.experts)[: len(self._op.prompt_P) + len(tokens) - 1]
        return SampledSequence(
            tokens=tokens,
            logprobs=np.concatenate(sequence.logprobs),
            stop_reason=sequence.stop_reason,
            top_logprobs=top,
            routed_experts=experts,
        )

    def _top_prompt(self, scores: PromptScores, first: int) -> TopLogprobs:
        P, k = len(self._op.prompt_P), self._op.topk_prompt_logprobs
        ids, logprobs = np.zeros((P, k), np.int32), np.full((P, k), _UNUSED_LOGPROB, np.float32)
        ids[first + 1 :] = np.frombuffer(scores.top_ids, np.int32).reshape(P - 1, k)[first:]
        logprobs[first + 1 :] = np.frombuffer(scores.top_logprobs, np.float32).reshape(P - 1, k)[first:]
        return TopLogprobs(token_ids=ids, logprobs=logprobs)


def _prompt_logprobs(scores: PromptScores, first: int) -> FloatArray:
    result: FloatArray = np.concatenate([np.full(1, np.nan, np.float32), np.frombuffer(scores.logprobs, np.float32)])
    result[: first + 1] = np.nan
    return result


def _seed_of(seed: int, index: int) -> int:
    """Mix a request's seed and a sequence's number (SplitMix64), so that adjacent seeds share no sequence."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
