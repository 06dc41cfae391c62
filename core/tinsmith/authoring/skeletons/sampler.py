"""A sampler in NumPy, for the model that `tinsmith new-plugin --kind backend` trains: the next token from this one.

Array suffixes: P = prompt tokens, V = vocabulary, H = hidden size.
"""

import asyncio

import numpy as np
import numpy.typing as npt
from pydantic import Field

import tinsmith
from tinsmith import Sample, SampledSequence, SampleOutput, SamplingParams

Float64Array = npt.NDArray[np.float64]

A, B = (f"base_model.model.lm_head.lora_{which}.weight" for which in "AB")


class SkeletonConfig(tinsmith.BackendConfig):
    vocab_size: int = Field(64, ge=32, description="that of the trainer")
    hidden_size: int = Field(16, ge=1, description="that of the trainer")


class SkeletonSampler(tinsmith.SamplingBackend):
    def __init__(self, config: SkeletonConfig, context: tinsmith.BackendContext) -> None:
        del context
        rng, shape = np.random.default_rng(0), (config.vocab_size, config.hidden_size)
        self._embedding_VH = rng.normal(size=shape)
        head_VH = rng.normal(size=shape) / config.hidden_size**0.5
        self._heads_VH: dict[str | None, Float64Array] = {None: head_VH}  # by snapshot; None is the base model

    @property
    def sampler_capabilities(self) -> tinsmith.SamplerCapabilities:
        return tinsmith.SamplerCapabilities(
            device="cpu",
            dtype="float32",
            vocab_size=len(self._embedding_VH),
            max_context_tokens=512,
            max_lora_rank=self._embedding_VH.shape[1],
            lora_targets=frozenset({"unembed"}),
            isolation="bitwise",
            prompt_logprobs=True,
            target_prompt_logprobs=True,
        )

    async def load_snapshot(self, snapshot: tinsmith.Snapshot) -> None:
        if snapshot.snapshot_id not in self._heads_VH:
            down_rH, up_Vr = (snapshot.adapter_weights()[name].astype(np.float64) for name in (A, B))
            self._heads_VH[snapshot.snapshot_id] = self._heads_VH[None] + snapshot.lora.scale * up_Vr @ down_rH

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self._heads_VH.pop(snapshot_id, None)  # samples that are running hold theirs

    async def sample(self, op: Sample) -> SampleOutput | tinsmith.Failed:
        head_VH = self._heads_VH.get(op.snapshot_id)
        if head_VH is None:
            return tinsmith.Failed(message=f"snapshot {op.snapshot_id!r} is not loaded", category="server")
        logp_VV = _next_logprobs(self._embedding_VH, head_VH)  # row: this token; column: the next one
        if not np.abs(logp_VV).max() <= np.finfo(np.float32).max:  # true for NaN, too
            return tinsmith.diverged(op)
        sequences = [await _draw(op, index, logp_VV) for index in range(op.num_samples)]
        scores_P, targets = None, None
        if op.prompt_logprobs:
            scored_n = len(op.prompt_P) if op.prompt_logprobs_last_n is None else op.prompt_logprobs_last_n
            scores_P = np.full(len(op.prompt_P), np.nan, np.float32)  # NaN: not scored
            for position in range(max(1, len(op.prompt_P) - scored_n), len(op.prompt_P)):
                scores_P[position] = logp_VV[op.prompt_P[position - 1], op.prompt_P[position]]
        if op.target_prompt_logprobs is not None:
            asked = op.target_prompt_logprobs
            found = np.take_along_axis(logp_VV[op.prompt_P[:-1]], np.maximum(asked, 0), axis=-1)
            targets = np.where(asked < 0, 0.0, found).astype(np.float32)
        return SampleOutput(sequences=tuple(sequences), prompt_logprobs=scores_P, target_prompt_logprobs=targets)


async def _draw(op: Sample, index: int, logp_VV: Float64Array) -> SampledSequence:
    """Draw one sequence, which depends on the operation and the snapshot alone."""
    rng, params = np.random.default_rng([op.params.seed, index]), op.params
    if params.temperature > 0:  # 0 is greedy, and reported at 1
        logp_VV = _log_softmax(logp_VV / params.temperature)
    tokens, logprobs, last, stopped = list[int](), list[float](), int(op.prompt_P[-1]), False
    while len(tokens) < params.max_tokens and not stopped:
        await asyncio.sleep(0)  # lets others run, and a cancellation in
        token = int(logp_VV[last].argmax()) if params.temperature == 0 else _choose(logp_VV[last], params, rng)
        tokens.append(token)
        logprobs.append(logp_VV[last, token])  # before top-k and top-p
        last, stopped = token, token in params.stop_tokens  # a stop token is kept
    return SampledSequence(
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        stop_reason="stop" if stopped else "length",
    )


def _choose(logp_V: Float64Array, params: SamplingParams, rng: np.random.Generator) -> int:
    """Draw from the `top_k` most likely tokens, and of those from the fewest that reach `top_p`."""
    best_first = np.argsort(-logp_V, kind="stable")[: params.top_k if params.top_k > 0 else None]
    cumulative = np.cumsum(np.exp(logp_V[best_first]))
    kept = 1 + int(np.searchsorted(cumulative[:-1], params.top_p * cumulative[-1]))
    return int(best_first[np.searchsorted(cumulative[: kept - 1], rng.random() * cumulative[kept - 1], side="right")])


@np.errstate(all="ignore")  # of diverged weights; the caller looks at the result
def _next_logprobs(embedding_VH: Float64Array, head_VH: Float64Array) -> Float64Array:
    return _log_softmax(embedding_VH @ head_VH.T)


@np.errstate(all="ignore")
def _log_softmax(logits_VV: Float64Array) -> Float64Array:
    result: Float64Array = logits_VV - np.logaddexp.reduce(logits_VV, axis=-1, keepdims=True)
    return result


@tinsmith.hookimpl
def tinsmith_register_samplers() -> tinsmith.SamplerSpec[SkeletonConfig]:
    return tinsmith.SamplerSpec(
        name="skeleton", config=SkeletonConfig, create=SkeletonSampler, description="draws the next token from this one"
    )
