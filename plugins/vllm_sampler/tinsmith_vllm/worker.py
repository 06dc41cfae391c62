"""Code that runs in vLLM's workers: scores prompts, and reads adapters while the batch keeps running.

It connects heads.py and draws.py with the model runner.
Array suffixes: R = rows scored, P = tokens of the prompt, V = vocabulary, K = targets per position, k = alternatives.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tinsmith_vllm import compat
from tinsmith_vllm.draws import draw, quantiles
from tinsmith_vllm.gated_delta import mix
from tinsmith_vllm.heads import Heads
from tinsmith_vllm.messages import HEAD_WEIGHT, QUESTION, SEED
from tinsmith_vllm.weights import weights_of


def _make_heads(runner: Any, model: Any) -> None:
    """Called when the model is loaded, if vLLM applies adapters."""
    heads = Heads(**compat.head_sizes(runner))
    runner.tinsmith_heads = None
    if compat.add_to_logits(
        model, lambda logits, hidden: heads.add(logits, hidden, compat.adapters_of_rows(runner, len(hidden)))
    ):
        runner.tinsmith_heads = heads
        compat.watch_slots(runner, heads.put)


# vLLM imports this module in each worker before it loads the model and makes the cache
compat.clear_new_blocks()
compat.choose_factors_by_our_context()
compat.compute_gated_delta(mix)
compat.import_without_torchvision()
compat.keep_the_head(_make_heads)

Scores = tuple[Any, Any, Any, Any]  # float32 [P - 1], int32 and float32 [P - 1, k], float32 [P - 1, K]


class TinsmithWorker:
    """Mixed into vLLM's worker class. `collective_rpc` calls its methods."""

    model_runner: Any  # vLLM's, as is the next
    rank: int

    def tinsmith_install(self) -> None:
        """Hook into the model runner. Called once, before the first request."""
        runner = self.model_runner
        heads = None if runner.lora_config is None else runner.tinsmith_heads
        self.tinsmith_scorer = PromptScorer(runner, heads)
        compat.replace_drawing(runner, lambda logits: logits.log_softmax(dim=-1, dtype=torch.float32), self._draw)
        compat.replace_prompt_scoring(runner, self.tinsmith_scorer.score)
        # kernels are compiled now: what fails then ends the start, and not a tenant's first sample
        draw(compat.blank_logits(runner), quantiles([0], [0]))
        if runner.lora_config is not None:
            compat.leave_base_rows_alone()
            self.tinsmith_adapters = PreparedAdapters(runner.lora_config.max_cpu_loras)
            compat.replace_adapter_loading(
                runner, self.tinsmith_adapters.wrap, _no_head if heads is None else heads.take
            )
            self.tinsmith_parts = _adaptable(compat.known_modules(runner), has_head=heads is not None)

    def tinsmith_targets(self) -> list[str]:
        """Return the parts of the model to which adapters are applied: attn, mlp, unembed."""
        return self.tinsmith_parts

    def tinsmith_keep_experts(self) -> None:
        """Keep the experts of cached tokens. Called once, before the first request."""
        self.tinsmith_experts = CachedExperts(self.model_runner)
        compat.replace_prompt_scoring(self.model_runner, self._after_step)

    def _after_step(self, hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> dict[str, None]:
        self.tinsmith_experts.keep(sum(num_scheduled_tokens.values()))
        return self.tinsmith_scorer.score(hidden_states, num_scheduled_tokens)

    def tinsmith_experts_of(self, name: str, first: int, last: int) -> bytes | None:
        """Return the experts [last - first, L, C] of a sequence's tokens, as uint16. None on ranks but the first."""
        return self.tinsmith_experts.of(name, first, last) if self.rank == 0 else None

    def tinsmith_load_weights(self, path: str) -> None:
        """Load the weights of a snapshot, or of the base model, in place. Nothing may be running."""
        directory = Path(path) if path else None
        compat.load_weights(self.model_runner, lambda base: weights_of(base, directory), HEAD_WEIGHT)

    def _draw(self, logits_RV: torch.Tensor) -> torch.Tensor:
        rows = compat.rows_of(self.model_runner, len(logits_RV))
        return draw(logits_RV, quantiles([extra[SEED] for extra, _ in rows], [position for _, position in rows]))

    def tinsmith_scores(self, key: int) -> Scores | None:
        """Return the requested scores of a prompt, once. Return None on ranks without logits."""
        return self.tinsmith_scorer.take(key)

    def tinsmith_prepare(self, adapter_id: int, name: str, path: str) -> None:
        """Begin to read an adapter while the batch keeps running."""
        self.tinsmith_adapters.prepare(compat.lora_request(adapter_id, name, path))

    def tinsmith_prepared(self, adapter_id: int) -> str | None:
        """Return None while the adapter is being read, then the error, or an empty string if there is none."""
        return self.tinsmith_adapters.outcome(adapter_id)


_ATTENTION: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_DELTA: Final = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
_CONVOLUTION: Final = "conv1d"
_MLP: Final = ({"gate_proj", "up_proj", "down_proj"}, {"experts.w1", "experts.w2", "experts.w3"})


def _adaptable(known: Collection[str], *, has_head: bool) -> list[str]:
    """Return the parts of a model whose modules, of one kind or the other, are all known to vLLM.

    Layers with a short convolution have projections of their own in place of attention's.
    """
    mixers = _ATTENTION | (_DELTA if _CONVOLUTION in known else set())
    parts = {"attn": (mixers,), "mlp": _MLP}
    found = [part for part, kinds in parts.items() if any(kind <= set(known) for kind in kinds)]
    return [*found, *(["unembed"] if has_head else [])]


def _no_head(tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Leave an adapter's head where it is: vLLM refuses it by name."""
    del tensors, scale


class CachedExperts:
    """The experts that computed each token whose keys and values are in the cache, at the same positions.

    So what a sequence shares with others through the prefix cache has its experts as well.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._of_step = compat.capture_experts(runner)
        shape = (compat.num_slots(runner), *self._of_step.shape[1:])
        self._of_slot = torch.zeros(shape, dtype=torch.int16)  # pages that are never written take no memory

    def keep(self, num_rows: int) -> None:
        """Called after each step, with the number of tokens that it computed."""
        self._of_slot[compat.slots_of_step(self._runner, num_rows)] = self._of_step[:num_rows].to("cpu", torch.int16)

    def of(self, name: str, first: int, last: int) -> bytes:
        slots = compat.slots_of(self._runner, name, first, last)
        return self._of_slot[slots].numpy().astype(np.uint16).tobytes()


class PromptScorer:
    """Scores prompts as their rows are computed, chunk by chunk, with any adapter."""

    def __init__(self, runner: Any, heads: Heads | None) -> None:
        self._runner, self._heads = runner, heads
        self._max_rows = compat.max_rows(runner)
        self._scores: dict[int, Scores] = {}

    def take(self, key: int) -> Scores | None:
        return self._scores.pop(key, None)

    def score(self, hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> dict[str, None]:
        """Replace the runner's own method. Its result would go to the requests' outputs, so it returns an empty one."""
        runner = self._runner
        for req_id in list(runner.num_prompt_logprobs):
            num_tokens = num_scheduled_tokens.get(req_id)
            if num_tokens is None:
                continue  # preempted
            request = runner.requests[req_id]
            question = request.sampling_params.extra_args[QUESTION]
            start, P = request.num_computed_tokens, len(request.prompt_token_ids)
            if question["key"] not in self._scores or start == 0:
                self._scores[question["key"]] = _unscored(P, question)
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[req_id]]) - start
            last = min(start + num_tokens, P - 1)
            for first in range(max(start, question["first_row"]), last, self._max_rows):
                rows = slice(first, min(first + self._max_rows, last))
                self._score_rows(hidden_states[offset + rows.start : offset + rows.stop], rows, request, question)
            if start + num_tokens >= P:
                del runner.num_prompt_logprobs[req_id]
        return {}

    def _score_rows(self, hidden: torch.Tensor, rows: slice, request: Any, question: Mapping[str, Any]) -> None:
        adapter = request.lora_request
        adapter_id = 0 if adapter is None else adapter.lora_int_id
        with nullcontext() if self._heads is None else self._heads.scoring(adapter_id):
            logits_RV = self._runner.model.compute_logits(hidden)
        if logits_RV is None:
            return  # another rank of this replica has the logits
        logp_RV = logits_RV.log_softmax(dim=-1, dtype=torch.float32)
        logprobs, top_ids, top_logprobs, target_logprobs = self._scores[question["key"]]
        following = torch.tensor(request.prompt_token_ids[rows.start + 1 : rows.stop + 1], device=logp_RV.device)
        logprobs[rows] = logp_RV.gather(-1, following[:, None])[:, 0].cpu().numpy()
        if top_ids.shape[1]:
            best = torch.topk(logp_RV, top_ids.shape[1], dim=-1)
            top_ids[rows], top_logprobs[rows] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        if target_logprobs.shape[1]:
            wanted_RK = torch.from_numpy(question["targets"][rows]).to(logp_RV.device)
            found_RK = logp_RV.gather(-1, wanted_RK.clamp_min(0)).masked_fill(wanted_RK < 0, 0.0)
            target_logprobs[rows] = found_RK.cpu().numpy()


def _unscored(P: int, question: Mapping[str, Any]) -> Scores:
    k, K = question["num_top"], question["targets"].shape[1]
    return (
        np.full(P - 1, np.nan, np.float32),
        np.zeros((P - 1, k), np.int32),
        np.full((P - 1, k), np.nan, np.float32),
        np.zeros((P - 1, K), np.float32),
    )


class PreparedAdapters:
    """Reads adapters in threads until vLLM asks for them, because vLLM's own loader would block the batch."""

    def __init__(self, most: int) -> None:
        self._most = most  # the oldest ones are dropped; vLLM reads those itself when needed
        self._lock = threading.Lock()
        self._models: OrderedDict[int, Any] = OrderedDict()
        self._outcomes: dict[int, str] = {}
        self._load: Callable[[Any], Any]

    def wrap(self, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        self._load = load

        def take_or_load(request: Any) -> Any:
            with self._lock:
                model = self._models.pop(request.lora_int_id, None)
            return load(request) if model is None else model

        return take_or_load

    def prepare(self, request: Any) -> None:
        threading.Thread(target=self._read, args=(request,), name="adapter", daemon=True).start()

    def outcome(self, adapter_id: int) -> str | None:
        with self._lock:
            return self._outcomes.pop(adapter_id, None)

    def _read(self, request: Any) -> None:
        error, model = "", None
        try:
            model = self._load(request)
        except Exception as failure:  # noqa: BLE001 - whatever vLLM has against it is for whoever published it
            error = f"{type(failure).__name__}: {failure}".replace(request.lora_path, "the adapter")
        with self._lock:
            if model is not None:
                self._models[request.lora_int_id] = model
                while len(self._models) > self._most:
                    self._models.popitem(last=False)
            self._outcomes[request.lora_int_id] = error
