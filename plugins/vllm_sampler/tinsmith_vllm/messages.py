"""Messages between the sampler and the vLLM process. Both import this module, so it imports nothing but msgspec.

Arrays travel as bytes: tokens int32, logprobs float32, in C order. Shapes follow from the request:
P = tokens of the prompt, k = requested alternatives, K = targets per position, L = layers with experts, C = experts of
a token.
"""

from typing import Any, Final, Literal, TypedDict

import msgspec

ADAPTER: Final = "adapter_model.safetensors"
CHANGES: Final = "changes.json"
"""The files of an adapter that is merged into the base weights."""

CONFIG: Final = "adapter_config.json"
"""PEFT's configuration: the other file of an adapter that vLLM applies.

An adapter that lies in memory has CONFIG or CHANGES in the metadata of its safetensors instead.
"""

QUESTION: Final = "tinsmith_question"
SEED: Final = "tinsmith_seed"
"""Keys of SamplingParams.extra_args."""


Target = Literal["attn", "mlp", "unembed"]
"""A part of the model that an adapter may change."""


class Changes(TypedDict):
    """The content of CHANGES: the adapter's scale, and for each tensor of the model's files what is added to it.

    A change is [name of A, index, name of B, index, part, transposed]. The product of A and B, or that transposed, is
    added to the part of the tensor; an index selects an expert's part of A or B, or is null. A part has one entry for
    each of the tensor's first axes: a number, a slice [start, stop, step], or ranges [[start, stop], ...] in turn.
    """

    scale: float
    changes: dict[str, list[list[Any]]]
    embedding: str
    """The tensor of the embedding. If the files have no head, changes of `HEAD_WEIGHT` are added to a copy of it."""


HEAD_WEIGHT: Final = "lm_head.weight"


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """Base of all messages; each is a tagged msgpack array."""


# To vLLM


class Start(Message, frozen=True):
    """The first message, once."""

    engine_args: dict[str, object]
    float32_on_cpu: bool  # dtype, eager mode and memory are not configured: the child knows the device
    eager_on_cpu: bool
    merge_on_cpu: bool  # adapters are merged into the weights, because vLLM has no kernels for them there
    half_the_memory_on_cpu: bool  # memory is shared there, and vLLM does not start unless its share is free
    step_tokens_on_gpu: int  # vLLM's own default for an engine in a process of ours is a quarter of it
    impossible_on_cpu: str = ""  # why this cannot run there, if so
    routed_experts: bool = False  # sequences come with the experts that computed them


class Load(Message, frozen=True):
    """Announce an adapter, or whole weights. With `prepare`, the child reads it now and answers with Loaded."""

    adapter_id: int
    name: str
    path: str
    prepare: bool


class Unload(Message, frozen=True):
    adapter_id: int


class PromptQuestion(Message, frozen=True):
    """The requested scores of a prompt. Row i scores position i + 1."""

    first_row: int
    num_top: int
    num_targets: int  # K
    targets: bytes  # int64 [P - 1, K]; -1 = skip


class Generate(Message, frozen=True):
    """Draw one sequence per seed."""

    request_id: int
    prompt: bytes
    seeds: list[int]
    max_tokens: int
    temperature: float
    top_k: int  # 0 = off
    top_p: float
    stop_tokens: list[int]
    num_top: int
    adapter_id: int  # 0 = the base model
    cache_salt: str  # only requests with the same one share the prefix cache
    stream: bool  # send Drawn after every token, not only at the end
    question: PromptQuestion | None


class Abort(Message, frozen=True):
    """End sequences of a request. Has no answer."""

    request_id: int
    indices: list[int]


class Count(Message, frozen=True):
    """Ask how many sequences vLLM holds."""

    request_id: int


class Rest(Message, frozen=True):
    """Give the device's memory away, or take it again. Comes when only aborted requests run."""

    request_id: int
    asleep: bool


# From vLLM


class Ready(Message, frozen=True):
    version: str
    device: str
    vocab_size: int
    max_model_len: int
    dtype: str  # of weights and activations
    targets: list[Target]  # what an adapter may change
    merges: bool  # a snapshot's weights are loaded in place of the last one's; otherwise adapters are applied


class Unstartable(Message, frozen=True):
    """The process cannot start, and trying again would not help."""

    message: str


class Beat(Message, frozen=True):
    """Sent from time to time while vLLM works."""


class Loaded(Message, frozen=True):
    adapter_id: int
    error: str  # empty if the adapter was loaded


class PromptScores(Message, frozen=True):
    logprobs: bytes  # [P - 1]; NaN if not scored
    top_ids: bytes  # [P - 1, k]
    top_logprobs: bytes  # [P - 1, k]
    targets: bytes  # [P - 1, K]


class Drawn(Message, frozen=True):
    """Tokens of one sequence: all of them, or with `stream` only those since the last message."""

    request_id: int
    index: int
    tokens: bytes
    logprobs: bytes
    top_ids: bytes  # [length, k]
    top_logprobs: bytes
    ended: str  # "stop", "length", or empty while it goes on
    cached_tokens: int
    scores: PromptScores | None  # with the first tokens of sequence 0, if prompt scores were requested
    experts: bytes = b""  # uint16 [rows, L, C]: of the tokens computed since the last message, the prompt included


class Refused(Message, frozen=True):
    """vLLM rejects the request."""

    request_id: int
    message: str
    is_for_sender: bool  # the message tells what is wrong with the request; otherwise it is for the operator


class Counted(Message, frozen=True):
    request_id: int
    num_sequences: int


class Rested(Message, frozen=True):
    """The process sleeps, or is awake, as it was asked."""

    request_id: int


ToVllm = Start | Load | Unload | Generate | Abort | Count | Rest
FromVllm = Ready | Unstartable | Beat | Loaded | Drawn | Refused | Counted | Rested
