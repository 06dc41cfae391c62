"""How the toy draws tokens: one sequence at a time, a token per turn of the event loop.

Its vocabulary is trivial: token i is the character chr(32 + i), so that stop strings mean something; the last token is
the end of the sequence and has no text.

Array suffixes: V = vocabulary, P = prompt tokens, K = alternatives per token.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tinsmith.backend import OnTokens
from tinsmith.builtin.toy_model import Adapter, Float64Array, ToyModel, log_softmax, quiet
from tinsmith.operations import (
    FloatArray,
    IntArray,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TopLogprobs,
    WeightsSpan,
)

_UNUSED_LOGPROB = -99999.0
_OF_PROMPT = 1 << 32  # in place of a sequence's number: the generator of the prompt's alternatives


def text_of(token: int, vocab_size: int) -> str:
    return "" if token == vocab_size - 1 else chr(32 + token)


class Loaded(NamedTuple):
    """A loaded snapshot."""

    snapshot_id: str | None
    adapter: Adapter


def _not_moved() -> Loaded | None:
    return None


async def sample(
    model: ToyModel,
    adapter: Adapter,
    op: Sample,
    vocab_size: int,
    on_tokens: OnTokens | None = None,
    newer: Callable[[], Loaded | None] = _not_moved,
) -> SampleOutput:
    """Answer one request. Touches nothing shared: what it returns depends on its arguments alone.

    `newer` is asked before each step for the weights with which to go on, instead of `adapter`.
    """
    asked_at_s = time.monotonic()
    begun = newer() or Loaded(op.snapshot_id, adapter)
    prompt = model.forward(op.prompt_P, begun.adapter)
    first_token_s = time.monotonic() - asked_at_s
    logp_PV = log_softmax(prompt.logits_TV)
    sequences = []
    for index in range(op.num_samples):
        rng = np.random.default_rng([op.params.seed, index])  # the same whatever num_samples is
        drawing, now = _Drawing(op, rng, vocab_size), begun
        memory_H, logits_V = prompt.memory_TH[-1], prompt.logits_TV[-1]
        while drawing.goes_on(logits_V, now.snapshot_id):
            if on_tokens is not None:
                on_tokens(index, len(drawing.tokens) - 1, drawing.tokens[-1:])
            await asyncio.sleep(0)  # lets others run, and a cancellation in
            now = newer() or now
            seen = model.forward(np.array(drawing.tokens[-1:], np.int32), now.adapter, memory_H)
            memory_H, logits_V = seen.memory_TH[-1], seen.logits_TV[-1]
        sequences.append(drawing.result())
    targets = op.target_prompt_logprobs
    return SampleOutput(
        sequences=tuple(sequences),
        prompt_logprobs=_prompt_logprobs(op, logp_PV) if op.prompt_logprobs else None,
        top_prompt_logprobs=_top_prompt_logprobs(op, logp_PV) if op.topk_prompt_logprobs else None,
        target_prompt_logprobs=_target_logprobs(targets, logp_PV) if targets is not None else None,
        first_token_s=first_token_s,
        prompt_alt_tokens=_alternatives(op, prompt.logits_TV, logp_PV) if op.prompt_alt_tokens_k else None,
    )


class _Drawing:
    """One sequence in the making."""

    def __init__(self, op: Sample, rng: np.random.Generator, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._drawn_from: list[str | None] = []
        self._logp_V: list[Float64Array] = []  # kept for the alternatives, if they are requested
        self._text = ""
        self._stopped = False
        self._op, self._rng, self._vocab_size = op, rng, vocab_size

    def goes_on(self, logits_V: Float64Array, snapshot_id: str | None) -> bool:
        """Draw a token from logits of a snapshot; return whether another one follows."""
        params = self._op.params
        logp_V = log_softmax(logits_V / (params.temperature or 1.0))  # 0 is greedy, reported at 1
        token = int(logp_V.argmax()) if params.temperature == 0 else draw(logp_V, params, self._rng)
        self.tokens.append(token)
        self._logprobs.append(logp_V[token])
        self._drawn_from.append(snapshot_id)
        if self._op.topk_sample_logprobs:
            self._logp_V.append(logp_V)
        self._text += text_of(token, self._vocab_size)
        self._stopped = (
            token in params.stop_tokens
            or (params.stop_at_eos and token == self._vocab_size - 1)
            or any(stop in self._text for stop in params.stop_strings)  # at the first token that completes one
        )
        return not self._stopped and len(self.tokens) < params.max_tokens

    @quiet
    def result(self) -> SampledSequence:
        k = self._op.topk_sample_logprobs
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            stop_reason="stop" if self._stopped else "length",
            top_logprobs=top_logprobs(np.array(self._logp_V), k) if k else None,
            weights=self._weights(),
        )

    def _weights(self) -> tuple[WeightsSpan, ...]:
        if set(self._drawn_from) == {self._op.snapshot_id}:
            return ()
        return WeightsSpan.of_tokens(name for name in self._drawn_from if name is not None)


@quiet
def draw(logp_V: Float64Array, params: SamplingParams, rng: np.random.Generator) -> int:
    """Draw a token from the distribution cut to its `top_k` best, and of those to the best that reach `top_p`."""
    best_first = np.argsort(-logp_V, kind="stable")
    if params.top_k > 0:
        best_first = best_first[: params.top_k]
    probabilities = np.exp(logp_V[best_first])
    cumulative = np.cumsum(probabilities)
    kept = 1 + int(np.searchsorted(cumulative[:-1], params.top_p * cumulative[-1]))
    threshold = rng.random() * cumulative[kept - 1]
    return int(best_first[np.searchsorted(cumulative[: kept - 1], threshold, side="right")])


@quiet
def top_logprobs(logp_TV: Float64Array, k: int) -> TopLogprobs:
    """Return the k best tokens of every row, the lower token id first if two are equal."""
    width = min(k, logp_TV.shape[1])
    best = np.argsort(-logp_TV, axis=-1, kind="stable")[:, :width]
    token_ids = np.zeros((len(logp_TV), k), np.int32)
    logprobs = np.full((len(logp_TV), k), _UNUSED_LOGPROB, np.float32)
    token_ids[:, :width] = best
    logprobs[:, :width] = np.take_along_axis(logp_TV, best, axis=-1)
    return TopLogprobs(token_ids=token_ids, logprobs=logprobs)


def _first_scored(op: Sample) -> int:
    last_n = op.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(op.prompt_P) - last_n)


@quiet
def _prompt_logprobs(op: Sample, logp_PV: Float64Array) -> FloatArray:
    logprobs = np.full(len(op.prompt_P), np.nan, np.float32)
    for position in range(_first_scored(op), len(op.prompt_P)):
        logprobs[position] = logp_PV[position - 1, op.prompt_P[position]]
    return logprobs


def _top_prompt_logprobs(op: Sample, logp_PV: Float64Array) -> TopLogprobs:
    best = top_logprobs(np.roll(logp_PV, 1, axis=0), op.topk_prompt_logprobs)  # row i: what position i - 1 expects
    best.token_ids[: _first_scored(op)] = 0
    best.logprobs[: _first_scored(op)] = _UNUSED_LOGPROB
    return best


@quiet
def _target_logprobs(targets: IntArray, logp_PV: Float64Array) -> FloatArray:
    logprobs = np.take_along_axis(logp_PV[:-1], np.maximum(targets, 0), axis=-1)
    return np.where(targets < 0, 0.0, logprobs).astype(np.float32)


@quiet
def _alternatives(op: Sample, logits_PV: Float64Array, logp_PV: Float64Array) -> TopLogprobs:
    rng, temperature = np.random.default_rng([op.params.seed, _OF_PROMPT]), op.params.temperature
    shape = (len(op.prompt_P) - 1, op.prompt_alt_tokens_k)
    if temperature == 0:
        token_ids = np.broadcast_to(logits_PV[:-1].argmax(axis=-1)[:, None], shape)
    else:
        cumulative_PV = np.cumsum(np.exp(log_softmax(logits_PV[:-1] / temperature)), axis=-1)
        threshold_PK = rng.random(shape) * cumulative_PV[:, -1:]
        rows = zip(cumulative_PV, threshold_PK, strict=True)
        drawn = [np.searchsorted(cumulative_V[:-1], threshold_K, side="right") for cumulative_V, threshold_K in rows]
        token_ids = np.array(drawn, np.int64).reshape(shape)
    logprobs = np.take_along_axis(logp_PV[:-1], token_ids, axis=-1)
    return TopLogprobs(token_ids=token_ids.astype(np.int32), logprobs=logprobs.astype(np.float32))
