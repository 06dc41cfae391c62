"""One rank's work: passes over its share of the sequences, and optimizer steps that all ranks perform identically.

Models of LoRA rank 0 are in full_model.py. Adapters, their moments and their pending gradients are whole and identical
on every rank; only the base model is sharded. A pending gradient is complete after every call, because the ranks'
contributions are added before it returns.

- strict: each sequence is a separate stream, and its gradient is added separately, in the order of the log. No bit
depends on other sequences, on how calls were merged, or on the number of ranks.
- fast: all sequences of a micro-batch whose adapters have similar ranks form one stream, and gradients are summed per
adapter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from tinsmith import ConfigError, LoraConfig
from tinsmith_checkpoints.huggingface import HEAD
from tinsmith_fsdp.adapter_pack import RANK_STEP, AdapterPack
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.full_model import FullModel
from tinsmith_fsdp.mesh import Mesh
from tinsmith_fsdp.program import NoMemory, NotMade, Owner, Setup, Training
from tinsmith_fsdp.shortage import PassDroppedError, is_out_of_memory
from tinsmith_fsdp.streams import Stream, empty_stream, make_stream
from tinsmith_workers import AdapterLayout, NotFinite, Scored, Segment
from tinsmith_workers.torch import (
    Leaves,
    LossTable,
    ModelsOfWorker,
    Scores,
    SleepingTensors,
    free_what_is_unused,
    scored,
    storage_bytes,
    wait_for,
)

_PIECE: Final = 1 << 22  # numbers that are copied at a time
Made = TypeVar("Made")
_Packs = dict[tuple[str, ...], AdapterPack]  # by their models
_Ran = tuple[Segment, Scores, int]  # with its first row in the scores, which may still be on their way to the host


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Gradients of single sequences, before the ranks have told each other."""

    flat: dict[int, torch.Tensor]  # by dp rank; empty if there is one rank
    gradients: dict[int, torch.Tensor]  # by position, of all ranks: parts of `flat`


class Trainer(ModelsOfWorker[FullModel], Training):
    def __init__(self, base: BaseModel, mesh: Mesh, setup: Setup) -> None:
        super().__init__(mesh.device, setup.config.capture_buffer_bytes, speaks=dist.get_rank() == 0)
        self.base, self._mesh, self._setup = base, mesh, setup
        self._losses = LossTable(setup.losses)
        self._strict = setup.strict
        self._sleeping = SleepingTensors(mesh.device)

    # life of a model

    def create_model(self, model_id: str, lora: LoraConfig) -> NotMade | None:
        return self._or_not_made(lambda: self._add_adapter(model_id, AdapterLayout(lora, self._setup.architecture)))

    def create_full_model(self, model_id: str) -> Mapping[str, tuple[int, ...]] | NotMade:
        return self._or_not_made(lambda: self._make_full(model_id))

    def _make_full(self, model_id: str) -> Mapping[str, tuple[int, ...]]:
        base = BaseModel(self._setup, self._mesh, trainable=True)
        base.load(lambda _: None)
        self.full[model_id] = FullModel(base, self._mesh, self._losses)
        return {part.name: part.shape for part in base.parts}

    @staticmethod
    def _or_not_made(make: Callable[[], Made]) -> Made | NotMade:
        """Return an error that may concern this rank alone. Ranks do not wait for each other here, so none hangs."""
        try:
            return make()
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            if not out_of_memory and not isinstance(error, ConfigError):
                raise
            refusal = NotMade(message=(str(error) or type(error).__name__).splitlines()[0], out_of_memory=out_of_memory)
        free_what_is_unused()  # not earlier: the error kept partial results alive
        return refusal

    # sleep

    def sleep(self) -> None:
        """Move this rank's part of everything to the host. What captures still need of it is copied first."""
        for model_id, model in self.full.items():
            self._settle(model_id)
            model.let_go()
        self.base.let_go()
        self._sleeping.sleep(self._changing(), frozen=self._frozen())
        free_what_is_unused()

    def wake(self) -> None:
        self._sleeping.wake()

    def device_bytes(self) -> int:
        """Return what models take of the device."""
        return storage_bytes([*self._frozen(), *self._changing()])

    def _frozen(self) -> list[torch.Tensor]:
        return [part.local for part in self.base.parts]

    def _changing(self) -> Iterator[torch.Tensor]:
        for adapter in self.adapters.values():
            yield from adapter.tensors()
        for model in self.full.values():
            yield from model.tensors()

    # passes

    def run(
        self,
        micros: Sequence[Sequence[Segment]],
        owners: Sequence[Sequence[Owner]],
        backward: bool,  # noqa: FBT001  (over the wire)
        keeps: bool = False,  # noqa: FBT001, FBT002
    ) -> list[Scored | NotFinite] | NoMemory:
        self.base.model.recompute(self._setup.checkpointing and not keeps)
        models = sorted({owner.model_id for owned in owners for owner in owned}) if backward else []
        ran: list[_Ran] = []
        packs: _Packs = {}
        number = 0
        try:
            sums = self._attempt(lambda: {model: self._begun_sum(model) for model in models})
            for number, (segments, owned) in enumerate(zip(micros, owners, strict=True)):  # noqa: B007  (told below)
                if self._strict:
                    ran += self._run_apart(segments, owned, sums, backward=backward)
                else:
                    work = partial(self._run_together, segments, packs, sums, backward=backward)
                    ran += self._attempt(work, backward=backward)
        except PassDroppedError as dropped:
            return NoMemory(message=str(dropped), micro_batch=number)
        finally:
            self.base.forget_adapters()
        self._keep(sums)
        not_finite = self._not_finite(models)
        wait_for(self._mesh.device)  # not earlier: it computes while the host prepares the next micro-batch
        return [*(scored(*each) for each in ran), *not_finite]

    def _attempt(self, work: Callable[[], Made], *, backward: bool | None = None) -> Made:
        shortage = self.base.shortage
        return work() if shortage is None else shortage.attempt(work, backward=backward)

    def _begun_sum(self, model_id: str) -> torch.Tensor:
        """Make the vector to which a pass adds: with strict isolation, a copy of the pending gradient."""
        adapter = self.adapters[model_id]
        if self._strict and adapter.gradients is not None:
            return adapter.gradients.clone()
        return torch.zeros_like(adapter.weights)

    def _keep(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Make the sums the pending gradients. Takes no memory."""
        for model_id, total in sums.items():
            adapter = self.adapters[model_id]
            if not self._strict and dist.get_world_size() > 1:
                self._add_up(total)
            if self._strict or adapter.gradients is None:
                adapter.gradients = total
            else:
                adapter.gradients.add_(total)

    def _add_up(self, total: torch.Tensor) -> None:
        """Replace it by the sum of all ranks'."""
        if self._setup.config.reduce_dtype == "float32":
            dist.all_reduce(total)
            return
        for piece in total.split(_PIECE):  # whose copy has room
            sent = piece.to(torch.bfloat16)
            dist.all_reduce(sent)
            piece.copy_(sent)

    def _run_apart(
        self, segments: Sequence[Segment], owned: Sequence[Owner], sums: Mapping[str, torch.Tensor], *, backward: bool
    ) -> list[_Ran]:
        """Compute each sequence by itself. Add the gradients to `sums` in order, whichever rank computed them."""
        work = partial(self._computed_apart, segments, owned, backward=backward)
        ran, exchange = self._attempt(work, backward=backward)
        for dp_rank, flat in exchange.flat.items():
            self._share(flat, dp_rank)
        for position in range(len(exchange.gradients)):
            sums[owned[position].model_id].add_(exchange.gradients[position])
        return ran

    def _computed_apart(
        self, segments: Sequence[Segment], owned: Sequence[Owner], *, backward: bool
    ) -> tuple[list[_Ran], "_Exchange"]:
        single = {segment.position: self._leaves(segment.model_id, backward=backward) for segment in segments}
        streams = [self._stream([segment], [single[segment.position]]) for segment in segments]
        results = self._pass(streams, backward=backward)
        ran = [(segment, score, 0) for segment, score in zip(segments, results, strict=False)]
        own = {position: _gradients(leaves) for position, leaves in single.items()} if backward else {}
        return ran, self._exchange(owned, own) if backward else _Exchange({}, {})

    def _exchange(self, owned: Sequence[Owner], own: dict[int, torch.Tensor]) -> "_Exchange":
        """Make room for the gradients of all ranks."""
        if dist.get_world_size() == 1:
            return _Exchange({}, own)
        flat: dict[int, torch.Tensor] = {}
        gradients: dict[int, torch.Tensor] = {}
        for dp_rank in sorted({owner.dp_rank for owner in owned}):
            positions = [position for position, owner in enumerate(owned) if owner.dp_rank == dp_rank]
            sizes = [self.adapters[owned[position].model_id].layout.size for position in positions]
            mine = dp_rank == self._mesh.dp_rank
            flat[dp_rank] = (
                torch.cat([own.pop(position) for position in positions])
                if mine
                else torch.empty(sum(sizes), device=self._mesh.device)
            )
            gradients |= zip(positions, torch.split(flat[dp_rank], sizes), strict=True)
        return _Exchange(flat, gradients)

    def _share(self, flat: torch.Tensor, dp_rank: int) -> None:
        """Give every rank what a dp rank has computed: the sum of its tp ranks' parts, in order."""
        tp = self._setup.config.tensor_parallel
        total: torch.Tensor | None = None
        for source in range(dp_rank * tp, (dp_rank + 1) * tp):
            sent = flat if tp == 1 else flat.clone()
            dist.broadcast(sent, source)
            total = sent if total is None else total + sent
        assert total is not None
        if total is not flat:
            flat.copy_(total)

    def _run_together(
        self, segments: Sequence[Segment], packs: _Packs, sums: Mapping[str, torch.Tensor], *, backward: bool
    ) -> list[_Ran]:
        """Compute the sequences in a stream for each class of ranks, grouped by model. Add the gradients to `sums`."""
        ordered = sorted(segments, key=lambda segment: (self._rank_class(segment.model_id), segment.model_id))
        shares = [list(share) for _, share in groupby(ordered, lambda segment: self._rank_class(segment.model_id))]
        models = [tuple(dict.fromkeys(segment.model_id for segment in share)) for share in shares]
        for other in packs.keys() - set(models):
            del packs[other]  # before there are new ones
        for together in models:
            if together not in packs:
                packs[together] = self._pack(together, backward=backward)
        heads = {model: self._head_leaves(model, sums.get(model)) for model in chain(*models)}
        streams = [
            self._stream(share, [heads[each.model_id] for each in share], packs[together])
            for share, together in zip(shares, models, strict=True)
        ]
        results = self._pass(streams, backward=backward)
        if backward:
            for together in models:
                packs[together].move_gradients([sums[model] for model in together])
        return [
            (segment, scores, start)
            for share, stream, scores in zip(shares, streams, results, strict=False)
            for segment, (start, _) in zip(share, stream.bounds, strict=True)
        ]

    def _rank_class(self, model_id: str) -> int:
        """Return a power of two that holds the model's rank: a pack pads all its adapters to the largest."""
        return 1 << (max(RANK_STEP, self.adapters[model_id].layout.lora.rank) - 1).bit_length()

    def _leaves(self, model_id: str, *, backward: bool) -> Leaves:
        """Make leaves whose gradients go to a new vector."""
        adapter = self.adapters[model_id]
        return Leaves(adapter.layout, adapter.weights, torch.zeros_like(adapter.weights) if backward else None)

    def _head_leaves(self, model_id: str, gradients: torch.Tensor | None) -> Leaves:
        adapter = self.adapters[model_id]
        return Leaves(adapter.layout, adapter.weights, gradients, modules=(HEAD,))

    def _pack(self, models: Sequence[str], *, backward: bool) -> AdapterPack:
        adapters = [(self.adapters[model].layout, self.adapters[model].weights) for model in models]
        return AdapterPack(adapters, getattr(torch, self._setup.dtype), backward=backward)

    def _stream(self, segments: Sequence[Segment], leaves: Sequence[Leaves], pack: AdapterPack | None = None) -> Stream:
        return make_stream(segments, leaves, self._losses, self._mesh.device, pack=pack, multiple=self._mesh.tp_size)

    def _pass(self, streams: Sequence[Stream], *, backward: bool) -> list[Scores]:
        streams = streams or [empty_stream(self._losses, self._mesh.device, length=self._mesh.tp_size)]
        with torch.set_grad_enabled(backward):
            totals, scores = self.base.run(streams, self._losses, backward=backward)
        if backward:
            torch.autograd.backward(totals)
        return [each.begin_to_host() for each in scores]


def _gradients(leaves: Leaves) -> torch.Tensor:
    assert leaves.gradients is not None
    return leaves.gradients
