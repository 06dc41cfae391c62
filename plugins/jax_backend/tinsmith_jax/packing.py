"""Pack requests into micro-batches of one token stream each, on the host.

A sequence starts on a tile boundary and stays in one micro-batch; a model's sequences keep their order. Micro-batches
are filled in the order of the requests, one open batch per rank class.

Legend: T = tokens of the stream, n = tiles, K = targets per token, I = loss inputs, C = loss settings; in the experts
of tokens: L = layers, C = experts of a token.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tinsmith import AdamParams, Array, Datum, ForwardBackward, LoraConfig, ModelState, Snapshot
from tinsmith_jax.buckets import SMALLEST, Bucket, Buckets, Pass
from tinsmith_jax.loss_table import LossBatch, LossTable, LossTables
from tinsmith_jax.tiles import MAX_ADAPTERS, TILE, Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One sequence and where its results belong."""

    op_index: int
    op: ForwardBackward
    datum: Datum
    scale: float  # alpha / rank of the model
    padded_rank: int
    targets_TK: Array
    summed: bool = False  # its loss needs sums over the sequence

    @property
    def num_tokens(self) -> int:
        return len(self.targets_TK)

    @property
    def num_tiles(self) -> int:
        return -(-self.num_tokens // TILE)

    @property
    def num_targets(self) -> int:
        return int(self.targets_TK.shape[1])


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Pieces that run together. `models` are distinct, in order of appearance: the rows of the adapter stack."""

    pieces: list[Piece] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.op.model_id not in self.models:
            self.models.append(piece.op.model_id)

    def bucket(self, buckets: Buckets) -> Bucket:
        return buckets.choose(
            num_tokens=longest_stream([piece.num_tiles for piece in self.pieces], buckets.num_streams) * TILE,
            num_adapters=len(self.models),
            num_targets=max(piece.num_targets for piece in self.pieces),
            padded_rank=self.pieces[0].padded_rank,
            summed=self.pieces[0].summed,
        )

    def rows(self, apart: Collection[str] = ()) -> tuple[list[str], list[list[int]]]:
        """Return the model of each row of the adapter stack, and of each piece the rows of its tiles.

        A model has one row, to which all its tiles are added. One that is `apart` has a row for each tile.
        """
        models: list[str] = []
        of_pieces = []
        for piece in self.pieces:
            model_id, number = piece.op.model_id, piece.num_tiles
            if model_id in apart:
                of_pieces.append(list(range(len(models), len(models) + number)))
                models += [model_id] * number
                continue
            if model_id not in models:
                models.append(model_id)
            of_pieces.append([models.index(model_id)] * number)
        return models, of_pieces

    def halves(self) -> tuple["MicroBatch", "MicroBatch"]:
        """Cut between two pieces, so that the larger half has as few tiles as possible. There are at least two."""
        sizes = [piece.num_tiles for piece in self.pieces]
        cut = min(range(1, len(sizes)), key=lambda at: max(sum(sizes[:at]), sum(sizes[at:])))
        return _batch(self.pieces[:cut]), _batch(self.pieces[cut:])

    def starts(self, bucket: Bucket) -> list[int]:
        """Return the first row of each piece. Streams lie one behind the other."""
        room = bucket.num_tokens // TILE
        starts, stream, filled = [], 0, 0
        for piece in self.pieces:
            if filled + piece.num_tiles > room:
                stream, filled = stream + 1, 0
            starts.append((stream * room + filled) * TILE)
            filled += piece.num_tiles
        return starts


def longest_stream(sizes: Sequence[int], num_streams: int) -> int:
    """Return the shortest length with which `num_streams` streams hold all pieces, in order and none divided."""
    low, high = max(*sizes, -(-sum(sizes) // num_streams)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_streams(sizes, middle) <= num_streams else (middle + 1, high)
    return low


def _num_streams(sizes: Sequence[int], length: int) -> int:
    number, filled = 1, 0
    for size in sizes:
        number, filled = (number + 1, size) if filled + size > length else (number, filled + size)
    return number


@dataclass(frozen=True, slots=True)
class Stream:
    """The arrays of a micro-batch, as passed to compiled functions."""

    tokens_T: Array
    positions_T: Array
    tiles: Tiles
    batch: LossBatch
    experts_LTC: Array | None = None  # int16; -1: the router chooses. None: it chooses for all tokens

    @property
    def replays(self) -> bool:
        return self.experts_LTC is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """A micro-batch as the device takes it. `models` are its rows.

    Of models `apart`, each tile has a row: its gradient comes alone, and is added to the model's afterwards.
    """

    bucket: Bucket
    models: Sequence[str]
    stream: Stream
    apart: Collection[str] = ()


class Scored(NamedTuple):
    """The results of a micro-batch, T and n = T / TILE over all its streams, or of one of its sequences."""

    logp_TK: Array
    loss_TK: Array
    load_LnE: Array | None  # tokens of each tile that every expert has computed; None: there are no experts


class TrainerDevice(Protocol):
    """The device interface of the trainer, in this process or in workers: training_device.py documents it."""

    def create(self, model_id: str, lora: LoraConfig) -> None: ...

    def unload(self, model_id: str) -> None: ...

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot: ...

    def capture(self, model_id: str) -> ModelState: ...

    def restore(self, model_id: str, state: ModelState) -> None: ...

    def prepare(self, kind: Pass, buckets: Sequence[Bucket], *, replays: bool = False) -> Bucket: ...

    def score(self, one: TrainingPass) -> Scored: ...

    def gradients(self, passes: Sequence[TrainingPass]) -> tuple[list[Scored], list[str]]: ...

    def begin(self, models: Sequence[str]) -> None: ...

    def roll_back(self) -> None: ...

    def step(self, steps: Sequence[tuple[str, AdamParams]]) -> list[float]: ...

    def drop_gradient(self, model_id: str) -> None: ...


def plan(pieces: Iterable[Piece], buckets: Buckets, call_tokens: int, room: int | None = None) -> Iterator[MicroBatch]:
    """Group pieces into micro-batches, keeping each model's pieces in order.

    Batches are filled up to `room` tokens of a stream, or to the largest bucket. A longer piece runs by itself. The
    remainder of a rank class is cut so as to minimise the padded tokens plus `call_tokens` per call. The positions of
    the cuts change no bits.
    """
    open_batches: dict[int, MicroBatch] = {}
    most = (room or buckets.max_tokens) // TILE
    for piece in pieces:
        batch = open_batches.get(piece.padded_rank)
        if batch is not None and not _fits(batch, piece, most, buckets.num_streams):
            yield batch
            batch = None
        if batch is None:
            batch = open_batches[piece.padded_rank] = MicroBatch()
        batch.add(piece)
    for batch in open_batches.values():
        yield from _cut(batch.pieces, buckets, call_tokens)


def room_beside(pieces: Iterable[Piece], room: int) -> int:
    """Return the tokens of a micro-batch with which two share the pieces evenly, and fit into `room` side by side.

    Each tile of the second may need a row of its own, so there are no more than rows. Return `room` if it is too small
    for two.
    """
    half = sum(piece.num_tiles for piece in pieces) * TILE // 2
    most = min(MAX_ADAPTERS * TILE, room // 2)
    if most < SMALLEST:
        return room
    return next(size for size in (SMALLEST << i for i in range(most.bit_length())) if size >= min(half, most))


def _fits(batch: MicroBatch, piece: Piece, num_tiles: int, num_streams: int) -> bool:
    same_program = batch.pieces[0].summed == piece.summed
    same_targets = (batch.pieces[0].num_targets > 1) == (piece.num_targets > 1)
    has_row = piece.op.model_id in batch.models or len(batch.models) < MAX_ADAPTERS
    sizes = [each.num_tiles for each in (*batch.pieces, piece)]
    return same_program and same_targets and has_row and _num_streams(sizes, num_tiles) <= num_streams


def _cut(pieces: Sequence[Piece], buckets: Buckets, call_tokens: int) -> Iterator[MicroBatch]:
    """Cut a batch that fits into one call into the cheapest sequence of calls (shortest path over the cuts)."""
    batches: list[MicroBatch] = []  # for every n: the last batch of the cheapest way to run the first n pieces
    costs = [0]
    for end in range(1, len(pieces) + 1):
        ways = [_batch(pieces[start:end]) for start in range(end)]
        totals = [costs[start] + way.bucket(buckets).num_tokens + call_tokens for start, way in enumerate(ways)]
        best = min(range(end), key=totals.__getitem__)
        costs.append(totals[best])
        batches.append(ways[best])
    path: list[MicroBatch] = []
    end = len(pieces)
    while end:
        path.append(batches[end - 1])
        end -= len(batches[end - 1].pieces)
    yield from reversed(path)


def _batch(pieces: Sequence[Piece]) -> MicroBatch:
    batch = MicroBatch()
    for piece in pieces:
        batch.add(piece)
    return batch


def pack(
    micro: MicroBatch,
    bucket: Bucket,
    losses: LossTables,
    num_streams: int = 1,
    *,
    experts: tuple[int, int] | None = None,
    apart: Collection[str] = (),
) -> Stream:
    """Lay out a micro-batch. Unused rows are token 0 at position 0 without a loss.

    `experts` are the layers and the experts of a token, if routing is replayed. `apart` as for MicroBatch.rows.
    """
    table = losses.of(summed=bucket.summed)
    stream = _empty(bucket, table, num_streams, experts)
    _, rows_of_pieces = micro.rows(apart)
    for start, piece, rows in zip(micro.starts(bucket), micro.pieces, rows_of_pieces, strict=True):
        _write(stream, piece, start, rows, table)
    return stream


def _empty(bucket: Bucket, losses: LossTable, num_streams: int, experts: tuple[int, int] | None) -> Stream:
    T, K = bucket.num_tokens * num_streams, bucket.num_targets
    return Stream(
        np.zeros(T, np.int32),
        np.zeros(T, np.int32),
        Tiles(np.zeros(T // TILE, np.int32), np.zeros(T // TILE, np.float32)),
        LossBatch(
            targets_TK=np.zeros((T, K), np.int32),
            kind_T=np.full(T, -1, np.int32),
            inputs_ITK=np.zeros((len(losses.inputs), T, K), np.float32),
            config_CT=np.zeros((len(losses.settings), T), np.float32),
        ),
        None if experts is None else np.full((experts[0], T, experts[1]), -1, np.int16),
    )


def _write(stream: Stream, piece: Piece, start: int, adapter_rows: Sequence[int], losses: LossTable) -> None:
    length, K = piece.targets_TK.shape
    rows = slice(start, start + length)
    tiles = slice(start // TILE, start // TILE + piece.num_tiles)
    stream.tokens_T[rows] = piece.datum.tokens_T
    # positions continue through the last tile's padding: a tile's first position gives its sequence's start
    stream.positions_T[start : start + piece.num_tiles * TILE] = np.arange(piece.num_tiles * TILE)
    if stream.experts_LTC is not None and (replayed := piece.datum.routed_experts) is not None and len(replayed):
        # in order of their numbers, in which the router takes equally probable ones
        stream.experts_LTC[:, start : start + len(replayed)] = np.sort(replayed, axis=-1).swapaxes(0, 1)
    stream.tiles.adapter_n[tiles] = adapter_rows
    stream.tiles.scale_n[tiles] = piece.scale
    loss = piece.op.loss_fn
    stream.batch.targets_TK[rows, :K] = piece.targets_TK
    stream.batch.kind_T[rows] = losses.kinds[loss]
    spec = losses.spec(loss)
    for name in spec.inputs:
        values = piece.datum.loss_inputs[name].reshape(length, K)
        stream.batch.inputs_ITK[losses.inputs.index(name), rows, :K] = values
    config = {**spec.config, **piece.op.loss_fn_config}
    for key in spec.settings:
        stream.batch.config_CT[losses.settings.index((loss, key)), rows] = config[key]
