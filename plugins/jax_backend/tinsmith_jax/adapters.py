"""LoRA adapters as pytrees: shapes, seeded initial values, canonical (PEFT) names, stacks of adapters, snapshots.

An adapter is {"layers": {module: (A [L, in, r], B [L, r, out])}, "head": (A [H, r], B [r, V])} in float32. Modules are
q, k, v, o, gate, up, down, the gated delta rule's, Mamba's or the latents', and the shared expert's where a model
has one; L are the layers that have the module. Where the first layers have a dense MLP and the others have experts,
names of the former begin with `dense_`. r is the adapter's rank padded to its rank class, which depends on that rank
alone.
Padding and untrained modules are zero in both A and B: they change no output, and their gradient is exactly zero.

Of a model with experts, the factors that face the experts' inner values are each expert's own: B of gate and up is
[L, E, r, I], A of down is [L, E, I, r]. The experts share the other ones.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith import Array, LoraConfig, Snapshot, UserError
from tinsmith_checkpoints.huggingface import (
    ATTENTION,
    DELTA,
    EXPERTS,
    HEAD,
    LATENT,
    MAMBA,
    MLP,
    draw_lora_A,
    weight_name,
)
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.model_config import DENSE, ModelConfig

Adapter = Jax  # a pytree as above, of jax or NumPy arrays

HF_MODULES: Mapping[str, str] = dict(zip(("q", "k", "v", "o", "gate", "up", "down"), (*ATTENTION, *MLP), strict=True))
"""Where a dense model has each module."""
_SHARED: Final = ("shared_gate", "shared_up", "shared_down")
_LATENT: Mapping[str, str] = dict(zip(("q_a", "q_b", "kv_a", "kv_b"), LATENT, strict=True))
_DELTA: Mapping[str, str] = dict(zip(("delta_qkv", "delta_z", "delta_b", "delta_a", "delta_o"), DELTA, strict=True))
_MAMBA: Mapping[str, str] = {"mamba_in": MAMBA[0]}
_ATTENTION = frozenset({"q", "k", "v", "o", *_LATENT, *_DELTA, *_MAMBA})
_COPYING: Final = 4  # threads that copy weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module of the layers that have it. `own` is the factor that each expert has for itself: "A" or "B"."""

    name: str
    path: str
    size_in: int
    size_out: int
    layers: tuple[int, ...]
    own: str | None = None
    num_experts: int = 0

    def is_trained(self, trained: Collection[str]) -> bool:
        return self.name.removeprefix(DENSE) in trained

    @property
    def own_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axes of experts of A and of B."""
        experts = (self.num_experts,)
        return experts if self.own == "A" else (), experts if self.own == "B" else ()

    def with_experts(self, factor: Array) -> Array:
        """Give a factor [L, in, out] that experts share an axis of experts, of size 1."""
        return factor[:, None] if self.own is not None and factor.ndim == 3 else factor


def _modules(config: ModelConfig) -> tuple[_Module, ...]:
    shapes, experts = config.linear_shapes(), config.experts
    paths = {**HF_MODULES, **_LATENT, **_DELTA, **_MAMBA}
    if experts is not None:
        paths |= zip(_SHARED[-len(experts.shared_modules) :], experts.shared_modules, strict=True)
    recurrent = () if config.recurrence is None else config.recurrence.adapted_modules
    there = dict.fromkeys(config.runs, frozenset((*config.plain_modules, *recurrent)))
    if config.dense_layers:
        there[DENSE] = frozenset((*config.attention_modules, *config.mlp_modules))
    plain = [
        _Module(
            name=f"{run}{name}",
            path=path,
            size_in=shapes[path][0],
            size_out=shapes[path][1],
            layers=config.layers_with(f"{run}{name}"),
        )
        for run, own in there.items()
        for name, path in paths.items()
        if path in own
    ]
    if experts is None:
        return tuple(plain)
    hidden, inner, number = config.expert_input, experts.intermediate_size, experts.num_experts
    gate, up, down = EXPERTS
    every = config.layers_with("router")
    routed = (
        _Module(name="gate", path=gate, size_in=hidden, size_out=inner, layers=every, own="B", num_experts=number),
        _Module(name="up", path=up, size_in=hidden, size_out=inner, layers=every, own="B", num_experts=number),
        _Module(name="down", path=down, size_in=inner, size_out=hidden, layers=every, own="A", num_experts=number),
    )
    return (*plain, *routed[-len(config.mlp_modules) :])


def layer_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the layers' modules that an adapter may train."""
    return tuple(module.name for module in _modules(config))


class DeviceSnapshot(Snapshot):
    """A snapshot that stays on the devices. `arrays`: the handle by which their sampler knows its weights."""

    def __init__(self, snapshot_id: str, lora: LoraConfig, arrays: Jax) -> None:
        super().__init__(snapshot_id, lora)
        self.arrays = arrays


class JaxSnapshot(DeviceSnapshot):
    """A snapshot on this process's device. Its arrays are immutable and are never donated to a computation."""

    def __init__(self, snapshot_id: str, lora: LoraConfig, arrays: Adapter, config: ModelConfig) -> None:
        super().__init__(snapshot_id, lora, arrays)
        self._config = config
        self._copy: Mapping[str, Array] = {}  # of a sampler beside this backend, in place of the arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves([self.arrays, dict(self._copy)]))

    def keep_in(self, weights: Mapping[str, Array]) -> None:
        self._copy, self.arrays = weights, {}

    def adapter_weights(self) -> Mapping[str, Array]:
        if self._copy:
            return self._copy
        return CanonicalAdapter(jax.tree.map(np.asarray, self.arrays), self.lora, self._config)


def trained_modules(lora: LoraConfig) -> frozenset[str]:
    """Return the names of the modules that the flags select, in whichever layers; the output head is "head"."""
    every = (*HF_MODULES, *_LATENT, *_DELTA, *_MAMBA, *_SHARED)
    names = {name for name in every if (lora.train_attn if name in _ATTENTION else lora.train_mlp)}
    return frozenset(names | {"head"} if lora.train_unembed else names)


def shapes(config: ModelConfig, rank: int) -> Adapter:
    """Return an adapter's shapes as a pytree of jax.ShapeDtypeStruct."""
    layers = {}
    for module in _modules(config):
        own_A, own_B = module.own_axes
        A = _f32(len(module.layers), *own_A, module.size_in, rank)
        layers[module.name] = (A, _f32(len(module.layers), *own_B, rank, module.size_out))
    head = (_f32(config.hidden_size, rank), _f32(rank, config.vocab_size))
    return {"layers": layers, "head": head}


def host_zeros(config: ModelConfig, rank: int) -> Adapter:
    """Make an all-zero adapter on the host, which has no output and no gradient."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes(config, rank))


def fresh(lora: LoraConfig, config: ModelConfig, padded_rank: int) -> Adapter:
    """Make initial weights on the host: A uniform within 1 / sqrt(in), B zero.

    Each module of each layer draws from its own random stream, derived from the seed. The numbers are the same on every
    device and whichever other modules are trained.
    """
    adapter = host_zeros(config, padded_rank)
    trained = trained_modules(lora)
    for module in _modules(config):
        if module.is_trained(trained):
            A = adapter["layers"][module.name][0]
            for place in np.ndindex(A.shape[:-2]):  # a layer, or an expert of a layer
                index, expert = (*place, None)[:2]
                layer = module.layers[index]
                A[place][:, : lora.rank] = draw_lora_A(lora, module.path, layer, module.size_in, expert=expert).T
    if "head" in trained:
        A = adapter["head"][0]
        A[:, : lora.rank] = draw_lora_A(lora, HEAD, 0, A.shape[0]).T
    return adapter


# Canonical names ------------------------------------------------------------------------------------------------------


class Location(NamedTuple):
    """Where a canonical weight lies in an adapter."""

    module: str  # or "head"
    side: int  # 0: A, 1: B
    layer: int  # among those that have the module; 0 for the head

    def leaf_of(self, adapter: Adapter) -> Jax:
        """Return the array that holds it: [L, ...], or the head's, which is of no layer."""
        return (adapter["head"] if self.module == "head" else adapter["layers"][self.module])[self.side]

    def matrix_of(self, adapter: Adapter) -> Jax:
        """Return the part of that array which is the weight."""
        leaf = self.leaf_of(adapter)
        return leaf if self.module == "head" else leaf[self.layer]


def locations(lora: LoraConfig, config: ModelConfig) -> dict[str, Location]:
    """Return where each trained weight lies, by canonical name."""
    trained, found = trained_modules(lora), dict[str, Location]()
    for module in _modules(config):
        if module.is_trained(trained):
            for index, layer in enumerate(module.layers):
                found |= _pair_of(f"model.layers.{layer}.{config.in_files(module.path)}", module.name, index)
    return found | _pair_of(HEAD, "head", 0) if "head" in trained else found


def _pair_of(path: str, module: str, layer: int) -> dict[str, Location]:
    return {weight_name(path, "A"): Location(module, 0, layer), weight_name(path, "B"): Location(module, 1, layer)}


def canonical_shapes(lora: LoraConfig, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained tensors, by canonical name."""
    own, found = shapes(config, lora.rank), dict[str, tuple[int, ...]]()
    with_experts = frozenset(module.name for module in _modules(config) if module.own is not None)
    for name, location in locations(lora, config).items():
        *experts, rows, columns = location.leaf_of(own).shape[0 if location.module == "head" else 1 :]
        shared = (1,) if location.module in with_experts and not experts else ()
        found[name] = (*shared, *experts, columns, rows)
    return found


class CanonicalAdapter(Mapping[str, Array]):
    """An adapter on the host under its canonical names, PEFT's. A weight gets its canonical form when it is read.

    That is a transposition, which takes longer than the copy from the device: a capture does not wait for it.
    Factors of experts have an axis of experts before the two of a matrix, of size 1 where the experts share them.
    """

    def __init__(self, adapter: Adapter, lora: LoraConfig, config: ModelConfig) -> None:
        """`adapter` has host arrays. Keep what is trained of them, without padding."""
        rank, trained = lora.rank, trained_modules(lora)
        self._locations = locations(lora, config)
        self._pairs: dict[str, tuple[Array, Array]] = {}
        for module in _modules(config):
            if module.is_trained(trained):
                A, B = (module.with_experts(factor) for factor in adapter["layers"][module.name])
                self._pairs[module.name] = _cut(A, B, rank)
        if "head" in trained:
            A, B = adapter["head"]
            self._pairs["head"] = _cut(A[None], B[None], rank)

    @property
    def nbytes(self) -> int:
        """As it is kept, and once more in canonical form while it is written."""
        return 2 * sum(A.nbytes + B.nbytes for A, B in self._pairs.values())

    def __getitem__(self, name: str) -> Array:
        module, side, layer = self._locations[name]
        return np.ascontiguousarray(self._pairs[module][side][layer].swapaxes(-1, -2))

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, name: object) -> bool:
        return name in self._locations


def _cut(A: Array, B: Array, rank: int) -> tuple[Array, Array]:
    return np.ascontiguousarray(A[..., :rank]), np.ascontiguousarray(B[..., :rank, :])


def from_canonical(named: Mapping[str, Array], lora: LoraConfig, config: ModelConfig, padded_rank: int) -> Adapter:
    """Build a host adapter for `transposed`. Raise UserError if names or shapes do not match this LoRA and model.

    Its matrices are canonical ones, so this takes only copies, which several threads make.
    """
    adapter = jax.tree.map(
        lambda leaf: np.zeros((*leaf.shape[:-2], *leaf.shape[:-3:-1]), np.float32), shapes(config, padded_rank)
    )
    wanted, where = canonical_shapes(lora, config), locations(lora, config)
    for name in wanted:
        if name not in named:
            msg = f"adapter weight {name!r} is missing"
            raise UserError(msg)
    if left := set(named) - set(wanted):
        msg = f"adapter weights {min(left)!r} and {len(left) - 1} more do not belong to this model and LoRA config"
        raise UserError(msg)

    def copy(name: str) -> None:
        value = np.asarray(named[name], np.float32)
        if value.shape != wanted[name]:
            msg = f"adapter weight {name!r} has shape {value.shape}, this model and LoRA need {wanted[name]}"
            raise UserError(msg)
        target = where[name].matrix_of(adapter)
        own = target[..., : lora.rank, :] if where[name].side == 0 else target[..., : lora.rank]
        own[...] = value.reshape(own.shape)  # without the axis of size 1 where experts share a factor

    with ThreadPoolExecutor(_COPYING) as threads:
        list(threads.map(copy, wanted))
    return adapter


def transposed(adapter: Adapter) -> Adapter:
    """Transpose the matrices of a host adapter, as views.

    JAX puts such views into order on their way to the device, in blocks and several at a time. NumPy takes much longer.
    """
    return jax.tree.map(lambda leaf: leaf.swapaxes(-1, -2), adapter)


# Stacks, inside compiled functions ------------------------------------------------------------------------------------


def stack(adapters: Sequence[Adapter]) -> Adapter:
    """Join k adapters along a new axis, the third from the end: [L, k, ...], of an expert's own [L, E, k, ...]."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=-3), *adapters)


def unstack(stacked: Adapter, rows: Iterable[Jax]) -> tuple[Adapter, ...]:
    """Take the adapters of these rows apart. Rows are integers, or scalars that are known when the program runs."""
    return tuple(jax.tree.map(lambda leaf, row=row: _row(leaf, row), stacked) for row in rows)


def _row(stacked: Jax, row: Jax) -> Jax:
    return jax.lax.dynamic_index_in_dim(stacked, row, stacked.ndim - 3, keepdims=False)


def put_row(rows: tuple[Jax, Jax], pair: tuple[Jax, Jax], row: Jax, scale: Jax = 1.0, *, pads: bool = True) -> Jax:
    """Write one module's A and scaled B into a row of each array. With `pads`, fill up the rank with zeros."""
    (rows_A, rows_B), (A, B) = rows, pair
    missing = rows_A.shape[-1] - A.shape[-1] if pads else 0
    A = jnp.pad(A, [(0, 0)] * (A.ndim - 1) + [(0, missing)]).astype(rows_A.dtype)
    B = jnp.pad(B * scale, [(0, 0)] * (B.ndim - 2) + [(0, missing), (0, 0)]).astype(rows_B.dtype)
    rank = A.shape[-1]
    return rows_A.at[..., row, :, :rank].set(A), rows_B.at[..., row, :rank, :].set(B)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
