"""The engine's side of the fsdp backend: checks operations, distributes them to the ranks and collects the results."""

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tinsmith import (
    BackendContext,
    ConfigError,
    CreateModel,
    ForwardBackward,
    ForwardBackwardOutput,
    OutOfMemoryError,
    ServerError,
    log_privately,
)
from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_fsdp.admission import Budget, budget_of
from tinsmith_fsdp.architecture import DIVISIBLE, SEES, read_architecture
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import FULL_BYTES, ITEM, STRICT_SEQUENCES
from tinsmith_fsdp.demand import resolved_ranks
from tinsmith_fsdp.program import Loaded, NoMemory, NotMade, Owner, Program, Setup
from tinsmith_workers import (
    AdapterModelState,
    FullModelState,
    MakeLauncher,
    MicroBatch,
    Segment,
    WorkerDevice,
    WorkerGroup,
    WorkersBackend,
    combined_outputs,
    deal,
    segments,
    start_ranks,
    whole_model,
)

Made = TypeVar("Made")
_log = logging.getLogger(__name__)
PROGRAM = "tinsmith_fsdp.rank:Rank"  # of the workers


class FsdpBackend(WorkersBackend[FsdpConfig, Setup, Loaded]):
    """Does not import torch."""

    ranks: WorkerGroup[Program]
    _budget: Budget

    def __init__(self, config: FsdpConfig, context: BackendContext, launch_with: MakeLauncher | None = None) -> None:
        self.architecture = read_architecture(context.model_directory, config.max_context_tokens)
        _refuse_full_models(config, self.architecture)
        super().__init__(start_ranks(PROGRAM, config, context, launch_with), config, context)
        self.most_kept = self.rank_tokens
        counted = self.setup.strict and self._budget.memory is not None
        self._rank_sequences = STRICT_SEQUENCES if counted else None

    def prepare(self, device: WorkerDevice, context: BackendContext) -> tuple[Budget, Setup]:
        _check_tensor_parallel(self.architecture, self.config.tensor_parallel)
        ranks = resolved_ranks(self.config, len(self.ranks), on_cpu=device.type == "cpu")
        budget = budget_of(self.config, self.architecture, ranks, device.usable_bytes(context.placement))
        budget.require_enough()
        return budget, Setup(
            config=self.config,
            architecture=self.architecture,
            model_path=str(context.model_directory),
            losses=self.sendable_losses(),
            dtype=ranks.dtype,
            strict=ranks.strict,
            checkpointing=ranks.checkpointing,
            prefetch=ranks.prefetch,
            compile=ranks.compiled,
            probes=str(context.cache_dir / "packing"),
            memory_share=device.allocator_share(context.placement, budget.costs.runtime),
        )

    @property
    def max_full_models(self) -> int:
        """0 for a model whose weights cannot be trained fully: see `_refuse_full_models`."""
        return self.config.max_full_models if _why_no_full_models(self.architecture) is None else 0

    # sleep

    def sleep_trainer(self) -> None:
        if not self._asleep:
            self.ranks.call(Program.sleep)
            self._asleep = True

    def wake_trainer(self) -> None:
        if self._asleep:
            self.ranks.call(Program.wake)
            self._asleep = False

    # life of a model

    def make_adapter(self, op: CreateModel) -> AdapterModelState:
        remedy = "end a session that has a model, or ask for a smaller rank"
        answers = self.ranks.call(Program.create_model, op.model_id, op.lora)
        self._made(op, answers, what=f"a model of LoRA rank {op.lora.rank}", remedy=remedy)
        parts = [whole_model(self.architecture)] * len(self.ranks)
        return AdapterModelState(op.model_id, op.lora, self.ranks, self.architecture, parts)

    def make_full(self, op: CreateModel) -> FullModelState:
        base = self.loaded[0]
        weights = base.total_bytes // ITEM[self.setup.dtype]
        ranks = self._budget.ranks
        whose = f"{'all' if ranks.shards == ranks.dp else 'each'} {ranks.shards * ranks.tp} ranks"
        size = f"{weights * FULL_BYTES / 2**30:.2f} GiB over {whose}"
        what = f"a model of LoRA rank 0 (full fine-tuning): {weights} weights take {size}, {FULL_BYTES} bytes each"
        remedy = "end a session that has a model, use more ranks, or train a LoRA adapter"
        made = self._made(op, self.ranks.call(Program.create_full_model, op.model_id), what=what, remedy=remedy)
        return FullModelState(op.model_id, op.lora, self.ranks, made[0], self.state_files)

    def _made(self, op: CreateModel, answers: Sequence[Made | NotMade], *, what: str, remedy: str) -> list[Made]:
        """Return the ranks' answers to the creation of a model. If one has failed, none keeps its part."""
        refused = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, NotMade)]
        if not refused:
            return [answer for answer in answers if not isinstance(answer, NotMade)]
        self.ranks.call(Program.unload_model, op.model_id)
        rank, refusal = next((each for each in refused if each[1].out_of_memory), refused[0])
        where = f"rank {rank} of {len(answers)}"
        if refusal.out_of_memory:
            msg = f"{where} has no memory left for {what}; {remedy} ({log_privately(_log, refusal.message)})"
            raise OutOfMemoryError(msg)
        seen = log_privately(_log, refusal.message)
        msg = f"{where} can no longer read the base model's files ({seen})"
        raise ServerError(msg)

    # training

    def run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        work = list(segments(ops, self.losses))
        tokens = self.rank_tokens
        while micros := self._dealt(work, tokens):
            kept = self._kept(work, micros) if backward else []
            owned = [owners(micro) for micro in kept or micros]
            shares = self.shares(kept or micros)
            answers = self.ranks.call_each(Program.run, [(share, owned, backward, bool(kept)) for share in shares])
            found = [answer for answer in answers if not isinstance(answer, NoMemory)]
            if len(found) == len(answers):
                self.rank_tokens = tokens  # what was too much once would be again
                return combined_outputs(ops, found)
            if kept:
                self.most_kept = most_tokens(kept) // 2
                _log.warning("no memory to keep activations: from now on for %d tokens at most", self.most_kept)
            else:
                tokens = _half(micros, answers)
        return combined_outputs(ops, [])

    def _dealt(self, work: Sequence[Segment], tokens: int) -> list[MicroBatch]:
        return list(deal(work, self._budget.data_parallel, tokens, max_sequences=self._rank_sequences))

    def _kept(self, work: Sequence[Segment], recomputing: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches that may keep their activations. None if there is no room, or recomputing is faster."""
        held = sum(self._budget.bytes_of(model.lora.rank) for model in self.models.values())
        tokens = min(self.most_kept, self._budget.kept_tokens(held))
        if tokens == 0:
            return []
        micros = self._dealt(work, tokens)
        if most_tokens(micros) > tokens:  # a sequence is longer
            return []
        worth = len(micros) <= len(recomputing) or (tokens >= self._budget.worth_keeping and not self._budget.gathers)
        return micros if worth else []

    def shares(self, micros: Sequence[MicroBatch]) -> list[list[list[Segment]]]:
        """Ranks of one tp group get the same part."""
        tp = self.config.tensor_parallel
        return [[micro[rank // tp] for micro in micros] for rank in range(len(self.ranks))]


def owners(micro: MicroBatch) -> list[Owner]:
    """Return the owner of each position in a micro-batch."""
    placed = {
        segment.position: Owner(model_id=segment.model_id, dp_rank=dp_rank)
        for dp_rank, share in enumerate(micro)
        for segment in share
    }
    return [placed[position] for position in range(len(placed))]


def most_tokens(micros: Iterable[MicroBatch]) -> int:
    """Return the tokens of the largest share of a rank in a micro-batch."""
    return max(sum(segment.num_tokens for segment in share) for micro in micros for share in micro)


def _check_tensor_parallel(arch: DecoderShape, tp: int) -> None:
    if tp > 1 and arch.class_name not in DIVISIBLE:
        msg = (
            f"tensor_parallel is {tp}, and the backend can divide the layers of {', '.join(DIVISIBLE)} alone; the "
            f"model is a {arch.class_name}: set it to 1"
        )
        raise ConfigError(msg)
    for what, size in (
        ("num_key_value_heads", arch.num_kv_heads),
        ("intermediate_size", arch.intermediate_size),
        ("vocab_size", arch.vocab_size),
    ):
        if size % tp:
            msg = f"{what} of the model ({size}) must be a multiple of tensor_parallel ({tp})"
            raise ConfigError(msg)
    if arch.int8 is None or arch.int8.group_size is None:
        return
    for what, size in (("the width of attention", arch.q_size), ("intermediate_size", arch.intermediate_size)):
        if size // tp % arch.int8.group_size:  # columns that have one scale would be on two ranks
            msg = (
                f"{what} of the model ({size}) / tensor_parallel ({tp}) must be a multiple of group_size of the 8-bit "
                f"integers ({arch.int8.group_size})"
            )
            raise ConfigError(msg)


def _refuse_full_models(config: FsdpConfig, architecture: DecoderShape) -> None:
    why = _why_no_full_models(architecture)
    if why is not None and config.max_full_models and "max_full_models" in config.model_fields_set:
        msg = f"max_full_models is {config.max_full_models}, and {why}"
        raise ConfigError(msg)


def _why_no_full_models(architecture: DecoderShape) -> str | None:
    """Return why not all weights of the model can be trained, with the remedy; None: they can."""
    if architecture.int8 is not None:
        return (
            "the base model's matrices are 8-bit integers, which cannot be trained; set it to 0, or use the "
            "unquantised model"
        )
    if architecture.experts is not None:
        return (
            "the fsdp backend trains adapters of experts, but not all weights of a model with experts; set it to 0, or "
            "use the backend megatron"
        )
    if architecture.class_name.endswith(SEES):
        return (
            f"the model is a {architecture.class_name}, of which only the language part is loaded; set it to 0, or use "
            "a model for text alone"
        )
    return None


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
            f"have the operator give the backend more memory or ranks ({log_privately(_log, lacking.message)})"
        )
        raise OutOfMemoryError(msg)
    _log.warning("rank %d has no memory for %d tokens at once: halved (%s)", rank, tokens, lacking.message)
    return tokens // 2
