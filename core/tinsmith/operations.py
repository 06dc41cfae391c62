"""Requests to an engine and their results: frozen values with NumPy arrays, no behaviour, no framework.

An operation is one entry of the log. Its key is `(model_id, seq_id)`; `store/codec.py` turns it into bytes.

Array suffixes: T = tokens of one sequence, K = targets per position or alternatives per token, P = prompt tokens,
L = layers with experts, C = experts of a token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tinsmith.errors import Category
from tinsmith_checkpoints.values import LORA_ALPHA as LORA_ALPHA
from tinsmith_checkpoints.values import Array as Array
from tinsmith_checkpoints.values import FloatArray as FloatArray
from tinsmith_checkpoints.values import LoraConfig as LoraConfig
from tinsmith_checkpoints.values import StopReason as StopReason

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]
ExpertArray = npt.NDArray[np.uint16]

ADDED: Mapping[str, bool] = {"sent": False}
"""Metadata of a field that the server adds to a client's operation. A repeat need not match it."""

INFLIGHT: Final = ".inflight"
"""Ends the ids of snapshots that a later save of their model replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Hyper-parameters of one step. None carries over to the next step. Maths: torch.optim.AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12  # outside the root
    weight_decay: float = 0.0  # decoupled: p <- p * (1 - lr * wd) first
    grad_clip_norm: float = 0.0  # global L2 norm over the model's trainable weights; 0 = off


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence. Position i of `tokens_T` predicts target i: the client has already shifted the targets.

    `loss_inputs` holds `target_tokens` (int64, [T] or [T, K]) and the float32 inputs of the loss, each with the shape
    of `target_tokens`.

    `routed_experts` [n, L, C], n <= T, has the experts that computed the first n tokens when they were sampled, in any
    order. The trainer uses these instead of its router's choice, with its own router's weights. An empty array: routing
    is replayed, but this sequence was not sampled from this model. None: routing is not replayed.
    """

    tokens_T: TokenArray
    loss_inputs: Mapping[str, Array]
    routed_experts: ExpertArray | None = field(default=None, metadata=ADDED)

    @property
    def targets_TK(self) -> IntArray:
        """Targets as [T, K]; K is 1 if the client sent [T]."""
        targets: IntArray = self.loss_inputs["target_tokens"]
        return targets.reshape(len(self.tokens_T), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRight:
    """By which right an operation reads a checkpoint, as found when it was submitted. It is checked again when it runs.

    A tenant may read its own checkpoints, whichever version lies under the name by then.
    """

    created_at: datetime | None = None  # of the version that may be read; None: any
    only_while_public: bool = True  # False: the sender is an administrator, who may read every checkpoint


# Training operations: run in seq_id order per model -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """The first operation of every model (seq_id 0). `checkpoint` is where weights and, if asked, moments come from."""

    model_id: str
    lora: LoraConfig
    checkpoint: str | None = None  # tinker:// path of a training checkpoint
    load_optimizer: bool = False
    right: ReadRight = field(default=ReadRight(), metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Adds the gradient of the plain sum of the per-token losses to the model's pending gradient."""

    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str = "cross_entropy"
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    stands_in_for: str = field(default="", metadata=ADDED)  # the loss that was asked for, if it is another one

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_T) for datum in self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(ForwardBackward):
    """Computes the same losses and logprobs, and leaves the pending gradient unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Applies the pending gradient and clears it. If none is pending, the gradient is zero."""

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
    """Replaces the weights of an existing model. Without `load_optimizer`, moments and step count are reset."""

    model_id: str
    path: str
    load_optimizer: bool
    right: ReadRight = field(default=ReadRight(), metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForSampler:
    """Freezes the weights as of this operation as a sampling snapshot.

    Persisted (`path` is set): also writes a sampler checkpoint. Ephemeral (`sampling_session_id` is set): also creates
    a sampling session. If it is `inflight`, all such sessions of the model sample from the newest of these snapshots.
    """

    model_id: str
    path: str | None = None  # tinker://<model_id>/sampler_weights/<name>
    sampling_session_id: str | None = None
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    inflight: bool = False  # only of ephemeral ones

    @property
    def snapshot_id(self) -> str | None:
        """The snapshot's id, if it is ephemeral. It says whether it is an inflight one."""
        if self.sampling_session_id is None or not self.inflight:
            return self.sampling_session_id
        return self.sampling_session_id + INFLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAdapter:
    """Writes a PEFT directory."""

    model_id: str
    path: str  # tinker://<model_id>/external_weights/<name>
    ttl_seconds: int | None = None
    recipients: tuple[str, ...] = ()  # public keys of age; with any, files are encrypted for them


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Frees everything that the model holds on the device. Internal: queued when a session ends."""

    model_id: str


# Sampling: no order ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. All fields, including the seed, are fixed before the operation is stored."""

    max_tokens: int
    seed: int  # 0 <= seed < 2**63
    temperature: float = 1.0  # 0 = greedy
    top_k: int = -1  # -1 = off
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_at_eos: bool = True  # False only if the client sent an empty list of stops


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """The cells of a [rows, columns] matrix that a sparse tensor (CSR) lists, in the order of the tensor."""

    crow_indices: IntArray  # [rows + 1]
    col_indices: IntArray  # [cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Asks for `num_samples` independent continuations of one prompt, and for scores of the prompt itself."""

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
    target_layout: SparseLayout | None = None  # set if the targets came sparse; the answer then has the same layout
    prompt_alt_tokens_k: int = 0  # draw so many tokens in place of each prompt token but the first
    streamed: bool = field(default=False, metadata=ADDED)  # somebody reads the tokens while they are drawn

    def fits(self, max_context_tokens: int) -> bool:
        """Return whether prompt and continuations fit into a context of that many tokens.

        A prompt that fills the context may be scored: the one token that is drawn after it is not read.
        """
        room = max_context_tokens - len(self.prompt_P)
        return self.params.max_tokens <= room or (room == 0 and self.params.max_tokens == 1)


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
    """The failure of one operation, as a value. The rest of its batch is unaffected."""

    message: str
    category: Category = "user"
    gradient_dropped: bool = False  # a step that was not applied, but has cleared the pending gradient
    cause: str = field(default="", compare=False)
    """Details for the operator: administrators see them, and everybody on a server without keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCreated:
    model_id: str
    version: str | None = field(default=None, compare=False)  # of the checkpoint it was made from; see WeightsLoaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """One mapping per datum, in order: `logprobs` (float32, the shape of the targets), and whatever a backend adds.

    Every metric name ends in a reduction that the SDK knows (`:sum`, `:mean`, `:min`, `:max`). `loss:sum` is required,
    and of a model with experts what `tinsmith.expert_metrics` returns.
    """

    loss_fn_outputs: tuple[Mapping[str, Array], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """How the trainer and the sampler score the same probe tokens, compared when a snapshot is saved.

    Differences are absolute differences of log-probabilities, in nats. They are None if nothing was compared.
    """

    verdict: Literal["consistent", "inconsistent", "not compared"]
    reason: str | None = None  # for the last two verdicts
    num_tokens: int = 0  # scored
    max_difference: float | None = None
    mean_difference: float | None = None
    effect: float | None = None  # of the adapter: the trainer's mean difference from the base model
    base_difference: float | None = None  # the largest difference without an adapter; None if it could not be measured


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaved:
    """The result of SaveState, SaveForSampler and ExportAdapter."""

    path: str | None = None
    sampling_session_id: str | None = None
    size_bytes: int | None = None
    consistency: Consistency | None = None  # only for SaveForSampler, if the model has a sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """`version` is the directory of the version that was loaded. A replay loads that one, or none."""

    model_id: str
    path: str
    version: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnloaded:
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The k best tokens per position, best first. Unused cells hold token 0 and logprob -99999."""

    token_ids: TokenArray  # [length, k]
    logprobs: FloatArray  # [length, k]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpan:
    """The next `length` tokens of a sequence were drawn from this snapshot."""

    snapshot_id: str
    length: int

    @property
    def sampling_session_id(self) -> str:
        """The session for which these weights were saved, if they are of an inflight snapshot."""
        return self.snapshot_id.removesuffix(INFLIGHT)

    @classmethod
    def of_tokens(cls, snapshot_ids: Iterable[str]) -> tuple["WeightsSpan", ...]:
        """Return the spans of a sequence, given the snapshot of each of its tokens."""
        return tuple(cls(snapshot_id=name, length=len(list(run))) for name, run in groupby(snapshot_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """Stop tokens and stop strings are part of `tokens`, which is never empty."""

    tokens: TokenArray
    logprobs: FloatArray  # of log softmax(logits / temperature), before top-k and top-p; at temperature 1 if greedy
    stop_reason: StopReason
    top_logprobs: TopLogprobs | None = None
    routed_experts: ExpertArray | None = None  # [P + T - 1, L, C]: of prompt and tokens, but for the last; see Datum
    weights: tuple[WeightsSpan, ...] = ()  # of all tokens; samplers leave it if `Sample.snapshot_id` drew them all


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None  # [P]; NaN at position 0 and at positions that were not scored
    top_prompt_logprobs: TopLogprobs | None = None  # [P, k]; row 0 unused
    target_prompt_logprobs: FloatArray | None = None  # [P - 1, K]; 0 if the target is -1
    # [P - 1, k]; row i: tokens in place of prompt token i + 1, drawn with replacement at the request's temperature,
    # without top-k and top-p; their logprobs are at temperature 1, as prompt_logprobs are
    prompt_alt_tokens: TopLogprobs | None = None
    target_layout: SparseLayout | None = None  # copied from the request by the engine; samplers leave it None
    prompt_cache_hit_tokens: int = 0
    first_token_s: float | None = field(default=None, compare=False)
    """Seconds from the call until the first token of any sequence was drawn, if the sampler tells. Not part of the
    answer: the engine records it beside the result."""


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
