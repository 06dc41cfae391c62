"""The engine's side of the fsdp backend: checks operations, distributes them to the ranks and collects the results."""

import logging
import pickle
from collections.abc import Sequence
from typing import Any

from tinsmith import (
    Array,
    BackendContext,
    Capabilities,
    CapacityError,
    ConfigError,
    CreateModel,
    Failed,
    FloatArray,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    HostSnapshot,
    ModelState,
    NotFoundError,
    OptimStep,
    OptimStepOutput,
    OutOfMemoryError,
    Placement,
    ServerError,
    Snapshot,
    TrainingBackend,
    UserError,
)
from tinsmith.workers import (
    MakeLauncher,
    MicroBatch,
    Segment,
    StateFiles,
    WorkerGroup,
    combined_outputs,
    count_gpus,
    deal,
    one_by_one,
    segments,
)
from tinsmith_fsdp import batching
from tinsmith_fsdp.admission import Budget, budget_of, require_enough
from tinsmith_fsdp.architecture import read_architecture
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import FULL_BYTES, ITEM, STRICT_SEQUENCES
from tinsmith_fsdp.demand import resolved_ranks
from tinsmith_fsdp.environment import DEVICE
from tinsmith_fsdp.full_state import FullModelState
from tinsmith_fsdp.layout import AdapterLayout
from tinsmith_fsdp.messages import AdapterState, FullyLoaded, Loaded, NoMemory, NotMade, RankDevice, Setup, Step

_log = logging.getLogger(__name__)
PROGRAM = "tinsmith_fsdp.rank:Rank"  # of the workers
_MAX_TARGETS = 128  # per token; [T, K] arrays of a micro-batch must fit
FAST_ISOLATION_ERROR = 1e-4  # a bound that test_fsdp_modes.py checks on CPU in float32; not measured on GPUs


class FsdpBackend(TrainingBackend):
    """Does not import torch. Called from one thread. Any exception other than UserError leaves it unusable."""

    def __init__(self, config: FsdpConfig, context: BackendContext, launch_with: MakeLauncher | None = None) -> None:
        self.architecture = read_architecture(context.model_directory)
        self._losses = dict(context.losses)
        self._config = config
        self._models: dict[str, AdapterLayout | FullModelState] = {}
        self.ranks = _start(config, context, launch_with)
        try:
            self._state_files = StateFiles(
                self.ranks, context.cache_dir / "state", shard_bytes=context.checkpoint_shard_bytes
            )
            self._dp_size = self._data_parallel(len(self.ranks))
            device: RankDevice = self.ranks.call("device")[0]
            self._budget = self._admitted(device, context.placement)
            self._setup = self._decide(device, context)
            self.loaded = self._load()
            self._capabilities = self._describe(device)
        except BaseException:
            self.ranks.close()
            raise

    def _data_parallel(self, world: int) -> int:
        tp, arch = self._config.tensor_parallel, self.architecture
        if world % tp:
            msg = f"the number of ranks ({world}) must be a multiple of tensor_parallel ({tp})"
            raise ConfigError(msg)
        for what, size in (("num_key_value_heads", arch.num_kv_heads), ("intermediate_size", arch.intermediate_size)):
            if size % tp:
                msg = f"{what} of the model ({size}) must be a multiple of tensor_parallel ({tp})"
                raise ConfigError(msg)
        return world // tp

    def _admitted(self, device: RankDevice, placement: Placement) -> Budget:
        """Divide a rank's memory. Raise ConfigError if it is not enough for one model."""
        ranks = resolved_ranks(self._config, len(self.ranks), on_cpu=device.type == "cpu")
        memory = placement.memory_bytes
        if memory is None and device.memory_bytes is not None:
            memory = device.memory_bytes * 92 // 100  # the driver, and gaps, take the rest
        budget = budget_of(self._config, self.architecture, ranks, memory)
        require_enough(budget)
        return budget

    def _decide(self, device: RankDevice, context: BackendContext) -> Setup:
        """Resolve the settings that are left open."""
        ranks, compiles = self._budget.ranks, self._config.compile
        share = None
        if context.placement.memory_bytes is not None and device.memory_bytes is not None:
            share = min(1.0, (context.placement.memory_bytes - self._budget.costs.runtime) / device.memory_bytes)
        return Setup(
            config=self._config,
            architecture=self.architecture,
            model_path=str(context.model_directory),
            losses=self._losses,
            dtype=ranks.dtype,
            strict=ranks.strict,
            checkpointing=ranks.checkpointing,
            compile=not (ranks.on_cpu or ranks.strict) if compiles is None else compiles,
            memory_share=share,
        )

    def _load(self) -> list[Loaded]:
        """Have every rank load its part of the model. Raise ConfigError if the model's files are at fault."""
        try:
            pickle.dumps(self._setup.losses)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = f"a registered loss cannot be sent to the ranks: {error}; define per_token at the top of its module"
            raise ConfigError(msg) from error
        return self.ranks.call("load", self._setup)

    def _describe(self, device: RankDevice) -> Capabilities:
        on_cpu, exact = device.type == "cpu", self._setup.strict and self._setup.dtype == "float32"
        counted = self._setup.strict and self._budget.memory is not None
        self._rank_tokens = self._budget.micro_tokens
        self._rank_sequences = STRICT_SEQUENCES if counted else None
        return Capabilities(
            device=f"{len(self.ranks)} x {device.name}",
            dtype=self._setup.dtype,
            vocab_size=self.architecture.vocab_size,
            max_context_tokens=self._budget.context_tokens,
            max_batch_tokens=self._rank_tokens * self._dp_size,
            max_models=self._budget.max_models,
            max_full_models=self._config.max_full_models,
            losses=frozenset(self._losses),
            max_lora_rank=self._config.max_lora_rank,
            full_fine_tuning=self._config.max_full_models > 0,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            max_targets_per_token=_MAX_TARGETS,
            deterministic=on_cpu,
            isolation="bitwise" if on_cpu and exact else "close",
            isolation_error=0.0 if not on_cpu or exact else FAST_ISOLATION_ERROR,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def close(self) -> None:
        self.ranks.close()

    # life of a model

    def create_model(self, op: CreateModel) -> None:
        if len(self._models) >= self._config.max_models:
            msg = f"all {self._config.max_models} models are in use: end a session, or raise the backend's max_models"
            raise CapacityError(msg)
        if op.lora.rank <= self._config.max_lora_rank:  # else it is refused for its rank
            held = [self._budget.bytes_of(model.lora) for model in self._models.values()]
            self._budget.check(op.lora, sum(held))
        if op.lora.rank == 0:
            self._create_full(op)
            return
        if not 1 <= op.lora.rank <= self._config.max_lora_rank:
            allowed = f"1 to {self._config.max_lora_rank}, the backend's max_lora_rank"
            msg = f"LoRA rank {op.lora.rank} is not served: allowed are {allowed}"
            raise UserError(msg)
        remedy = "end a session that has a model, or ask for a smaller rank"
        self._make("create_model", op, op.lora, what=f"a model of LoRA rank {op.lora.rank}", remedy=remedy)
        self._models[op.model_id] = AdapterLayout(op.lora, self.architecture)

    def _create_full(self, op: CreateModel) -> None:
        limit = self._config.max_full_models
        if sum(isinstance(model, FullModelState) for model in self._models.values()) >= limit:
            msg = (
                "no room for one more model of LoRA rank 0 (full fine-tuning): the backend's max_full_models is "
                f"{limit}; end the session that has one, raise the setting, or train a LoRA adapter"
            )
            raise CapacityError(msg)
        self._state_files.check()
        base = self.loaded[0]
        weights = base.total_bytes // ITEM[self._setup.dtype]
        size = f"{weights * FULL_BYTES / 2**30:.2f} GiB over all {len(self.loaded)} ranks"
        what = f"a model of LoRA rank 0 (full fine-tuning): {weights} weights take {size}, {FULL_BYTES} bytes each"
        remedy = "end a session that has a model, use more ranks, or train a LoRA adapter"
        made: list[FullyLoaded] = self._make("create_full_model", op, what=what, remedy=remedy)
        self._models[op.model_id] = FullModelState(op.model_id, op.lora, self.ranks, made, self._state_files)

    def _make(self, method: str, op: CreateModel, *arguments: Any, what: str, remedy: str) -> list[Any]:
        """Have every rank create its part of a model. If one fails, none keeps its part. Any: the method's results."""
        answers = self.ranks.call(method, op.model_id, *arguments)
        refused = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, NotMade)]
        if not refused:
            return answers
        self.ranks.call("unload_model", op.model_id)
        rank, refusal = next((each for each in refused if each[1].out_of_memory), refused[0])
        where = f"rank {rank} of {len(answers)}"
        if refusal.out_of_memory:
            msg = f"{where} has no memory left for {what}; {remedy} ({refusal.message})"
            raise OutOfMemoryError(msg)
        msg = f"{where} can no longer read the base model's files: {refusal.message}"
        raise ServerError(msg)

    def unload_model(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None:
            self.ranks.call("unload_model", model_id)

    def capture_state(self, model_id: str) -> ModelState:
        layout = self._model(model_id)
        if isinstance(layout, FullModelState):
            return layout.capture()
        state = self._captured(model_id)

        def named(flat: FloatArray | None) -> dict[str, Array]:
            return {} if flat is None else layout.to_canonical(flat)

        return ModelState(
            lora=layout.lora,
            weights=named(state.weights),
            adam_m=named(state.adam_m),
            adam_v=named(state.adam_v),
            gradients=named(state.gradients),
            step=state.step,
        )

    def restore_state(self, model_id: str, state: ModelState) -> None:
        layout = self._model(model_id)
        if isinstance(layout, FullModelState):
            layout.restore(state)
            return
        flat = AdapterState(
            lora=layout.lora,
            weights=layout.from_canonical(state.weights),
            adam_m=layout.from_canonical(state.adam_m) if state.adam_m else None,
            adam_v=layout.from_canonical(state.adam_v) if state.adam_v else None,
            gradients=layout.from_canonical(state.gradients) if state.gradients else None,
            step=state.step,
        )
        self.ranks.call("restore_adapter", model_id, flat)

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        layout = self._model(model_id)
        if isinstance(layout, FullModelState):
            return layout.publish(snapshot_id)
        weights = self.ranks.call("adapter_weights", model_id)[0]
        return HostSnapshot(snapshot_id, layout.lora, layout.to_canonical(weights))

    def _captured(self, model_id: str) -> AdapterState:
        state = self.ranks.call("capture_adapter", model_id)[0]
        assert isinstance(state, AdapterState)
        return state

    def _model(self, model_id: str) -> AdapterLayout | FullModelState:
        if model_id not in self._models:
            raise NotFoundError(_unknown(model_id).message)
        return self._models[model_id]

    # training

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=False)

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=True)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        known = [op for op in ops if op.model_id in self._models]
        steps = [Step(model_id=op.model_id, adam=op.adam) for op in known]
        norms = iter(self.ranks.call("optim_step", steps)[0] if steps else ())
        return [
            OptimStepOutput(metrics={"grad_norm": next(norms)})
            if op.model_id in self._models
            else _unknown(op.model_id)
            for op in ops
        ]

    def _run(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput | Failed]:
        refused = {index: failure for index, op in enumerate(ops) if (failure := self._refusal(op)) is not None}
        good = [op for index, op in enumerate(ops) if index not in refused]
        whole = [isinstance(self._models[op.model_id], FullModelState) for op in good]
        adapted = iter(
            self._run_adapters([op for op, full in zip(good, whole, strict=True) if not full], backward=backward)
        )
        outputs = iter(
            [
                self._run_full(op, backward=backward) if full else next(adapted)
                for op, full in zip(good, whole, strict=True)
            ]
        )
        return [refused[index] if index in refused else next(outputs) for index in range(len(ops))]

    def _run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        """Run the operations of LoRA models together."""
        work = list(segments(ops, self._losses))
        tokens = self._rank_tokens
        while micros := list(deal(work, self._dp_size, tokens, max_sequences=self._rank_sequences)):
            owners = [batching.owners(micro) for micro in micros]
            answers = self.ranks.call_each("run", [(share, owners, backward) for share in self._shares(micros)])
            if not any(isinstance(answer, NoMemory) for answer in answers):
                self._rank_tokens = tokens  # what was too much once would be again
                return combined_outputs(ops, answers)
            tokens = _half(micros, answers)
        return combined_outputs(ops, [])

    def _run_full(self, op: ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        """Run one operation by itself: the model has its own weights, so there is nothing to share with others."""
        work = list(segments([op], self._losses))
        if self._setup.strict:
            micros = list(one_by_one(work, self._dp_size))
        else:
            micros = list(deal(work, self._dp_size, self._rank_tokens))
        shares = [(op.model_id, share, backward) for share in self._shares(micros)]
        (output,) = combined_outputs([op], self.ranks.call_each("run_full", shares))
        return output

    def _shares(self, micros: Sequence[MicroBatch]) -> list[list[list[Segment]]]:
        """Give each rank its part of every micro-batch. Ranks of one tp group get the same part."""
        tp = self._config.tensor_parallel
        return [[micro[rank // tp] for micro in micros] for rank in range(len(self.ranks))]

    def _refusal(self, op: ForwardBackward) -> Failed | None:
        """Refuse an unknown model or loss. Core has already checked everything else against the capabilities."""
        if op.model_id not in self._models:
            return _unknown(op.model_id)
        if op.loss_fn not in self._losses:
            return Failed(message=f"no loss named {op.loss_fn!r}, known: {', '.join(sorted(self._losses))}")
        return None


def _start(config: FsdpConfig, context: BackendContext, launch_with: MakeLauncher | None) -> WorkerGroup:
    devices = context.placement.devices
    gpus = 0 if config.device == "cpu" else len(devices) or count_gpus()
    chosen = {} if config.device is None else {DEVICE: config.device}
    return WorkerGroup(
        PROGRAM,
        config,
        context.progress,
        environment={**chosen, "CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else chosen,
        gpus=None if config.device is None else config.device == "cuda",
        default_per_node=max(1, gpus),
        launch_with=launch_with,
    )


def _half(micros: Sequence[MicroBatch], answers: Sequence[object]) -> int:
    """Return half of the tokens for which a rank had no memory.

    Raise OutOfMemoryError if it had one sequence. Core then runs the call's operations one by one, and fails those that
    do not fit alone.
    """
    rank, lacking = next((r, each) for r, each in enumerate(answers) if isinstance(each, NoMemory) and each.message)
    share = micros[lacking.micro_batch][rank]  # there is no tensor parallelism where this happens
    tokens = sum(segment.num_tokens for segment in share)
    if len(share) <= 1:
        msg = (
            f"rank {rank} of {len(answers)} has no memory for a sequence of {tokens} tokens; send shorter ones, or "
            f"have the operator give the backend more memory or ranks ({lacking.message})"
        )
        raise OutOfMemoryError(msg)
    _log.warning("rank %d has no memory for %d tokens at once: halved (%s)", rank, tokens, lacking.message)
    return tokens // 2


def _unknown(model_id: str) -> Failed:
    return Failed(message=f"no model {model_id!r} in training: it was never created, or has been unloaded")
