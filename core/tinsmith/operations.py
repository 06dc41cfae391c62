"""What is asked of an engine and what comes back: frozen values with NumPy arrays, no behaviour, no framework.

Operations are stored as bytes (`codec.py`) and are the unit of the log: `(model_id, seq_id)` is the key of one.

Array suffixes: T = tokens of one sequence, K = targets per position or alternatives per token, P = prompt tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tinsmith.errors import Category

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]  # any dtype: weights may be bfloat16 in checkpoints of full fine-tuning

StopReason = Literal["stop", "length"]

LORA_ALPHA = 32.0
"""The constant alpha of the Tinker API: W' = W + (alpha / rank) * B @ A, for every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which adapter a model trains. `seed` is always set: the server draws one where the client sent none."""

    rank: int  # 0: no adapter, all weights are trained; the flags are then all set
    seed: int
    alpha: float = LORA_ALPHA
    train_attn: bool = True  # q, k, v and o projections
    train_mlp: bool = True  # gate, up and down projections
    train_unembed: bool = True  # the output head, also where it is tied to the embedding

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """One step's hyper-parameters; nothing carries over from the step before. Maths: torch.optim.AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12  # outside the root
    weight_decay: float = 0.0  # decoupled: p <- p * (1 - lr * wd) first
    grad_clip_norm: float = 0.0  # global L2 norm over the model's trainable weights; 0 = off


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence. Position i of `tokens_T` predicts target i: the client has shifted already.

    `loss_inputs` holds `target_tokens` (int64, [T] or [T, K]) and the float32 inputs of the loss, each of the shape
    of `target_tokens`.
    """

    tokens_T: TokenArray
    loss_inputs: Mapping[str, Array]

    @property
    def targets_TK(self) -> IntArray:
        """Targets as [T, K]; K is 1 where the client sent [T]."""
        targets: IntArray = self.loss_inputs["target_tokens"]
        return targets.reshape(len(self.tokens_T), -1)


# Training operations: run in seq_id order per model -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """seq_id 0 of every model. With `checkpoint` the weights (and, if asked, the optimizer) come from there."""

    model_id: str
    lora: LoraConfig
    checkpoint: str | None = None  # tinker:// path of a training checkpoint
    load_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Adds the gradient of the plain sum of the per-token losses to the model's pending gradient."""

    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str = "cross_entropy"
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_T) for datum in self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(ForwardBackward):
    """The same losses and logprobs; leaves the pending gradient alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Applies and clears the pending gradient. Without one it is a step with a zero gradient."""

    model_id: str
    adam: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Writes a training checkpoint (weights, moments, pending gradient, step)."""

    model_id: str
    path: str  # tinker://<model_id>/weights/<name>
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Replaces the weights of an existing model; without `load_optimizer` moments and step start afresh."""

    model_id: str
    path: str
    load_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForSampler:
    """Freezes the weights as of this operation as a sampling snapshot.

    Persisted (`path` set): also written as a sampler checkpoint. Ephemeral (`sampling_session_id` set): a sampler
    comes into being with it.
    """

    model_id: str
    path: str | None = None  # tinker://<model_id>/sampler_weights/<name>
    sampling_session_id: str | None = None
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAdapter:
    """Writes a PEFT directory."""

    model_id: str
    path: str  # tinker://<model_id>/external_weights/<name>
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Frees what the model holds on the device. Internal: sent when a session ends."""

    model_id: str


# Sampling: no order ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. Every field is decided before the operation is stored, the seed included."""

    max_tokens: int
    seed: int  # 0 <= seed < 2**63
    temperature: float = 1.0  # 0 = greedy
    top_k: int = -1  # -1 = off
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_at_eos: bool = True  # False only where the client sent an empty stop list


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """Which cells of a [rows, columns] matrix a sparse tensor (CSR) lists, in its order."""

    crow_indices: IntArray  # [rows + 1]
    col_indices: IntArray  # [cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`num_samples` independent continuations of one prompt, and what was asked about the prompt itself."""

    sampling_session_id: str
    snapshot_id: str | None  # None = the base model
    prompt_P: TokenArray
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None  # score only the last n prompt positions
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: IntArray | None = None  # [P - 1, K]; row i scores position i + 1; -1 = skip
    target_layout: SparseLayout | None = None  # where the targets came sparse: the answer has this layout too


TrainingOperation = (
    CreateModel
    | ForwardBackward
    | Forward
    | OptimStep
    | SaveState
    | LoadState
    | SaveForSampler
    | ExportAdapter
    | UnloadModel
)
Operation = TrainingOperation | Sample


# Results --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An operation's own failure, as a value: nothing else in its batch is touched."""

    message: str
    category: Category = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCreated:
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """One mapping per datum, in order: `logprobs` float32 of the shape of its targets, and more where a backend has it.

    Every metric name ends in a reduction the SDK knows (`:sum`, `:mean`, `:min`, `:max`); `loss:sum` is required.
    """

    loss_fn_outputs: tuple[Mapping[str, Array], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """What the trainer and the sampler make of the same probe tokens, compared when a snapshot is saved.

    Differences are absolute, of log-probabilities in nats; None where nothing was compared.
    """

    verdict: Literal["consistent", "inconsistent", "not compared"]
    reason: str | None = None  # of the last two
    num_tokens: int = 0  # scored
    max_difference: float | None = None
    mean_difference: float | None = None
    effect: float | None = None  # of the adapter: the trainer's mean difference to the base model
    base_difference: float | None = None  # the largest one without an adapter; None where it could not be measured


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaved:
    """Of SaveState, SaveForSampler and ExportAdapter."""

    path: str | None = None
    sampling_session_id: str | None = None
    size_bytes: int | None = None
    consistency: Consistency | None = None  # of SaveForSampler, where the model has a sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    model_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnloaded:
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The k best tokens per position, best first; unused cells hold token 0 and logprob -99999."""

    token_ids: TokenArray  # [length, k]
    logprobs: FloatArray  # [length, k]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """Stop tokens and stop strings are kept in `tokens`; never empty."""

    tokens: TokenArray
    logprobs: FloatArray  # of log softmax(logits / temperature), before top-k and top-p; temperature 1 where greedy
    stop_reason: StopReason
    top_logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None  # [P]; NaN at 0 and where not scored
    top_prompt_logprobs: TopLogprobs | None = None  # [P, k]; row 0 unused
    target_prompt_logprobs: FloatArray | None = None  # [P - 1, K]; 0 where the target was -1
    target_layout: SparseLayout | None = None  # of the request; set by the engine, not by samplers
    prompt_cache_hit_tokens: int = 0


Result = (
    Failed
    | ModelCreated
    | ForwardBackwardOutput
    | OptimStepOutput
    | WeightsSaved
    | WeightsLoaded
    | ModelUnloaded
    | SampleOutput
)
