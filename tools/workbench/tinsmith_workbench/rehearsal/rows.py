"""Figures of rehearsals: as lines of JSON, in words, and as a table."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from tinsmith import ConfigError, LoraConfig
from tinsmith.placement.machine import Machine
from tinsmith_checkpoints.huggingface import known_config, read_model_config, weight_counts
from tinsmith_checkpoints.huggingface.known_shapes import KNOWN_SHAPES
from tinsmith_checkpoints.values import Json
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import FULL_BYTES, ITEM
from tinsmith_fsdp.demand import resolved_ranks

GIB: Final = 1 << 30
GB: Final = 10**9
CARDS: Final = {"80 GB": 81_559 << 20, "141 GB": 143_771 << 20}
"""Memory of an H100 and of an H200, as nvidia-smi reports it."""

MACHINES: Final = (1, 2, 4, 8, 16, 32, 64)
_RUNTIME: Final = GIB  # of CUDA and NCCL: assumed, as in costs.py


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Work(_Frozen):
    """A rehearsal: one step of all tenants, with one micro-batch on each card."""

    model: str
    cards: int
    tenants: int
    rank: int  # 0: one model, trained fully
    sequences: int  # of each card
    length: int
    layers: int | None = None  # None: all
    shard_size: int | None = None  # None: all cards

    @property
    def shards(self) -> int:
        return self.shard_size or self.cards


class Row(_Frozen):
    """Bytes of one card; see `step.Rehearsal`."""

    work: Work
    resident: int
    peak: int
    step: int
    gathered: int
    reduced: int
    summed: int
    broadcast: int

    @property
    def greatest(self) -> int:
        return max(self.peak, self.step)

    @property
    def received(self) -> tuple[int, int, int]:
        """Return what a card receives if each kind of collective is a ring: layers, gradients, adapters' gradients.

        Only replicas of a fully trained model sum gradients of shards.
        """
        cards, shards = self.work.cards, self.work.shards
        layers, gradients = round(self.gathered * _ring(shards)), self.reduced * _ring(shards)
        if self.work.rank == 0:
            return layers, round(gradients + 2 * self.summed * _ring(cards // shards)), 0
        return layers, round(gradients), round(2 * self.summed * _ring(cards))

    def fits(self, memory: int) -> bool:
        usable = Machine(device_bytes=memory).usable_bytes
        assert usable is not None
        return self.greatest + _RUNTIME <= usable


def _ring(cards: int) -> float:
    return (cards - 1) / cards


def row_of(work: Work) -> Row:
    """Rehearse with the settings that GPUs get by default."""
    from tinsmith_workbench.rehearsal.step import rehearse  # torch and transformers

    config, model = FsdpConfig.model_validate({"shard_size": work.shard_size}), _config_of(work)
    ranks = resolved_ranks(config, work.cards, on_cpu=False)
    loras = [LoraConfig(rank=work.rank, seed=0)] * work.tenants
    found = rehearse(config, model, ranks, loras, [work.length] * work.sequences)
    return Row(work=work, **asdict(found))


def _config_of(work: Work) -> dict[str, Json]:
    found = read_model_config(Path(work.model)) if Path(work.model).is_dir() else known_config(work.model)
    if found is None:
        msg = f"no model named {work.model!r}: give a directory with config.json, or one of {', '.join(KNOWN_SHAPES)}"
        raise ConfigError(msg)
    return {**found} if work.layers is None else {**found, "num_hidden_layers": work.layers}


def on_more_cards(row: Row, cards: int) -> Row:
    """Return the figures for more cards than the row's, which has several: only the shards differ.

    They are taken to be equal, as they are if the number of cards divides all rows of the weights.
    """
    ratio = row.work.cards / cards
    weights = weight_counts(architecture_of(_config_of(row.work), Path("config.json")))
    trained = FULL_BYTES * weights.total if row.work.rank == 0 else 0
    shards = (weights.total_bytes(ITEM["bfloat16"]) + trained) // row.work.cards
    resident = row.resident - shards + round(shards * ratio)
    stepping = (row.step - row.resident) * (ratio if row.work.rank == 0 else 1)
    return row.model_copy(
        update={
            "work": row.work.model_copy(update={"cards": cards}),
            "resident": resident,
            "peak": resident + row.peak - row.resident,
            "step": resident + round(stepping),
        }
    )


def sentence(row: Row) -> str:
    fitting = [name for name, memory in CARDS.items() if row.fits(memory)]
    where = f"fits a card of {' or '.join(fitting)}" if fitting else f"fits no card of {' or '.join(CARDS)}"
    layers, gradients, adapters = (f"{size / GB:.2f} GB" for size in row.received)
    replicas = f" with shard size {row.work.shards}" if row.work.shards < row.work.cards else ""
    return (
        f"{row.work.model} on {row.work.cards}{replicas}: {row.resident / GIB:.1f} GiB between passes, at most "
        f"{row.peak / GIB:.1f} in a pass and {row.step / GIB:.1f} in a step, {where}; receives "
        f"{layers} of layers, {gradients} of their gradients, {adapters} of adapters'"
    )


def read_lines(text: str) -> list[Row]:
    """Read what `rehearse --json` has written."""
    return [Row.model_validate_json(line) for line in text.splitlines() if line]


def table(rows: Iterable[Row], model: str, *, replicas: bool = False) -> str:
    """Return a row for each kind of training and each number of cards: of several, from the smallest rehearsed.

    replicas: instead, those rows that were rehearsed with replicas.
    """
    of_model = (row for row in rows if row.work.model == model and row.work.layers is None)
    own = sorted((row for row in of_model if (row.work.shards < row.work.cards) == replicas), key=_order)
    head = (
        "Training", "Cards", "GiB between passes", "in a pass", "in a step", *(f"Fits {name}" for name in CARDS),
        "GB received: layers", "their gradients", "adapters' gradients",
    )  # fmt: skip
    several = (row for _, group in groupby(own, lambda row: _order(row)[:2]) for row in _on_machines(list(group)))
    found = own if replicas else several
    return "\n".join([_cells(head), _cells(["---"] + ["--:"] * (len(head) - 1)), *map(_line, found)])


def _order(row: Row) -> tuple[bool, int, int, int]:
    return row.work.rank == 0, row.work.tenants, row.work.cards, -row.work.shards


def _on_machines(rehearsed: list[Row]) -> Iterator[Row]:
    of_cards = {row.work.cards: row for row in rehearsed}
    several = next((row for row in rehearsed if row.work.cards > 1), None)
    for cards in MACHINES:
        if cards in of_cards:
            yield of_cards[cards]
        elif several is not None and cards > several.work.cards:
            yield on_more_cards(several, cards)


def _line(row: Row) -> str:
    work = row.work
    kind = "all weights" if work.rank == 0 else f"LoRA, {work.tenants} tenant{'s' * (work.tenants > 1)}"
    if work.shards < work.cards:
        kind += f", shard size {work.shards}"
    memory = (f"{size / GIB:.1f}" for size in (row.resident, row.peak, row.step))
    fits = ("yes" if row.fits(size) else "**no**" for size in CARDS.values())
    return _cells([kind, str(work.cards), *memory, *fits, *(f"{size / GB:.2f}" for size in row.received)])


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
