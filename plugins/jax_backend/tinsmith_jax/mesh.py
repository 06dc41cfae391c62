"""A mesh of devices, and the few places in which a program on a mesh differs from one on a single device.

Axes: `data` and `fsdp` divide the sequences, each shard having a token stream of its own; `fsdp` divides the base
weights besides, which are gathered layer by layer; `tensor` divides the matrices of each layer and the vocabulary, as
in Megatron-LM (arXiv 1909.08053). Programs run under shard_map: every collective is written out here.

On an axis of size 1 nothing happens, so a single device runs the same program as without a mesh.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinsmith import Array, ConfigError
from tinsmith_jax.config import MeshConfig
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels.choice import REFERENCE, Kernels
from tinsmith_jax.model_config import DENSE, Latent, ModelConfig

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
STREAMS: Final = (DATA, FSDP)
"""The axes over which sequences are divided."""

_MOST_PARTS: Final = 256  # of an axis, that an error proposes

Spec = PartitionSpec
Index = tuple[slice, ...]
"""A part of an array."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of the axes, and the collectives over them. Hashable, so that compiled functions may close over it."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    exact: bool = True
    """Fold the adapters' gradients in the order of the sequences, whichever shard computes them. It takes the work of
    all shards on each, and keeps a tenant's bits independent of the others'."""
    kernels: Kernels = REFERENCE

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_streams(self) -> int:
        return self.data * self.fsdp

    @property
    def joins_streams(self) -> bool:
        return self.exact and self.num_streams > 1

    # tensor

    @property
    def undivided(self) -> "Axes":
        """Return what layers work with that `tensor` does not divide: each of its shards computes the same."""
        return replace(self, tensor=1)

    def enter_tensor(self, x: Jax) -> Jax:
        """Give `x` to every shard of a layer's matrices. Reverse differentiation sums what they return."""
        return x if self.tensor == 1 else _enter(self, x)

    def leave_tensor(self, x: Jax) -> Jax:
        """Sum the shards' parts of a product. The gradient passes through unchanged."""
        return x if self.tensor == 1 else _leave(self, x)

    def total(self, x: Jax) -> Jax:
        """Sum over the shards. Not differentiated.

        If results are to be exact, shards are added in order: a ring all-reduce starts at a different rank for
        each chunk, so rounding would depend on position. With two ranks, the order cannot matter.
        """
        if self.tensor == 1:
            return x
        if self.tensor == 2 or not self.exact:
            return jax.lax.psum(x, TENSOR)
        return functools.reduce(operator.add, jax.lax.all_gather(x, TENSOR))

    def highest(self, x: Jax) -> Jax:
        return x if self.tensor == 1 else jax.lax.pmax(x, TENSOR)

    def first_row(self, num_rows: int) -> Jax:
        """Return the first of this shard's rows of the vocabulary."""
        return 0 if self.tensor == 1 else jax.lax.axis_index(TENSOR) * num_rows

    def every_column(self, logits: Jax) -> Jax:
        """Join the logits (last axis) of all shards of the vocabulary."""
        return logits if self.tensor == 1 else jax.lax.all_gather(logits, TENSOR, axis=logits.ndim - 1, tiled=True)

    def own_experts(self, experts: Jax, number: int) -> Jax:
        """Count from this shard's first expert. Experts of other shards become `number`, one past its own."""
        if self.tensor == 1:
            return experts
        own = experts - jax.lax.axis_index(TENSOR) * number
        return jnp.where((own >= 0) & (own < number), own, number)

    # fsdp

    def whole(self, weight: Jax, axis: int) -> Jax:
        """Gather a base weight, which is divided along `axis`."""
        if self.fsdp == 1:
            return weight
        return jax.lax.all_gather(weight, FSDP, axis=axis, tiled=True)

    # streams

    def every_stream(self, tree: Jax) -> Jax:
        """Join all streams' rows (axis 0) in the order of the shards, if gradients are to be folded in that order."""
        if not self.joins_streams:
            return tree
        return jax.tree.map(lambda x: jax.lax.all_gather(x, STREAMS, axis=0, tiled=True), tree)

    def own_stream(self, x: Jax) -> Jax:
        """Undo `every_stream`."""
        if not self.joins_streams:
            return x
        rows = x.shape[0] // self.num_streams
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(STREAMS) * rows, rows)

    def complete(self, x: Jax, axis: int = 0) -> Jax:
        """Give every shard the rows of all streams."""
        return x if self.num_streams == 1 else jax.lax.all_gather(x, STREAMS, axis=axis, tiled=True)

    def anywhere(self, flag: Jax) -> Jax:
        """Return whether `flag` is set on any shard."""
        return flag if self.num_streams == 1 else jax.lax.pmax(flag.astype(jnp.int32), STREAMS) > 0

    def own_row(self, row: Jax, num_rows: int) -> Jax:
        """Return the index of one of all shards' rows among this shard's; `num_rows` if another shard has it."""
        if self.num_streams == 1:
            return row
        own = row - jax.lax.axis_index(STREAMS) * num_rows
        return jnp.where((own >= 0) & (own < num_rows), own, num_rows)

    def of_owner(self, tree: Jax, *, own: Jax) -> Jax:
        """Give every shard what the one has for which `own` is set."""
        if self.num_streams == 1:
            return tree
        return jax.tree.map(lambda x: jax.lax.psum(jnp.where(own, x, 0), STREAMS), tree)

    def fold_start(self, sums: Jax, weights: Jax) -> Jax:
        """Return where this shard's fold of the gradients begins, given its parts of their sums."""
        if self.exact or self.num_streams == 1:
            return self.joined(sums, weights)
        return jax.tree.map(jnp.zeros_like, weights)

    def folded(self, sums: Jax, ends: Jax) -> Jax:
        """Return this shard's parts of the new sums, given where each shard's fold has ended."""
        if self.exact or self.num_streams == 1:
            return self.own_part(ends, sums)
        return jax.tree.map(lambda before, end: before + self._sum_of_streams(end, before), sums, ends)

    def _sum_of_streams(self, x: Jax, part: Jax) -> Jax:
        axis = _divided_axis(x, part)
        if axis is None:
            return jax.lax.psum(x, STREAMS)
        own = jax.lax.psum_scatter(x, FSDP, scatter_dimension=axis, tiled=True)
        return own if self.data == 1 else jax.lax.psum(own, DATA)

    # an adapter's state, which `state_specs` divides over fsdp

    def own_part(self, tree: Jax, like: Jax) -> Jax:
        """Return this shard's part of each array. `like`: arrays of the parts' shapes."""

        def own(whole: Jax, part: Jax) -> Jax:
            axis = _divided_axis(whole, part)
            if axis is None:
                return whole
            size = part.shape[axis]
            return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(FSDP) * size, size, axis)

        return jax.tree.map(own, tree, like)

    def joined(self, tree: Jax, like: Jax) -> Jax:
        """Undo `own_part`. `like`: arrays of the whole shapes."""

        def join(part: Jax, whole: Jax) -> Jax:
            axis = _divided_axis(whole, part)
            return part if axis is None else jax.lax.all_gather(part, FSDP, axis=axis, tiled=True)

        return jax.tree.map(join, tree, like)

    def to_step(self, weights: Jax, parts: tuple[Jax, ...]) -> tuple[Jax, ...]:
        """Return what this shard steps of an adapter, given its weights and its parts of the state: these parts.

        If results are to be exact, it is everything: compilers round differently at the edges of smaller arrays.
        """
        if self.exact:
            return weights, *(self.joined(part, weights) for part in parts)
        return self.own_part(weights, parts[0]), *parts

    def square_sums(self, gradients: Jax, weights: Jax) -> Iterable[Jax]:
        """Return the sum of squares of each array of an adapter's gradients, given what `to_step` returned of them."""
        sums: Iterable[Jax] = (jnp.sum(g * g) for g in jax.tree.leaves(gradients))
        if self.fsdp > 1 and not self.exact:
            pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(gradients), strict=True)
            divided = np.array([_divided_axis(whole, part) is not None for whole, part in pairs])
            sums = _where_divided(divided, sums, lambda own: jax.lax.psum(own, FSDP))
        if self.tensor > 1:
            layers = weights["layers"]
            found = adapter_specs(layers, experts=_with_experts(layers))
            specs = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Spec))
            sums = _where_divided(np.array([TENSOR in spec for spec in specs]), sums, self.total)
        return sums


ONE: Final = Axes()


def is_kept(primitive: Jax, *_: Jax, **params: Jax) -> bool:
    """Return whether a layer's value is kept for the backward pass, for jax.checkpoint: gathered weights are not."""
    return not (primitive.name == "all_gather" and FSDP in params["axis_name"])


def _divided_axis(whole: Jax, part: Jax) -> int | None:
    """Return the axis along which a part is smaller than the whole, if there is one."""
    sizes = zip(whole.shape, part.shape, strict=True)
    return next((axis for axis, (all_rows, rows) in enumerate(sizes) if rows != all_rows), None)


def _where_divided(divided: Jax, own: Iterable[Jax], total: Callable[[Jax], Jax]) -> Iterable[Jax]:
    """Replace the numbers that are divided by their totals, all in one collective."""
    stacked = jnp.stack(list(own))
    return jnp.where(divided, total(stacked), stacked)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(axes: Axes, x: Jax) -> Jax:
    del axes
    return x


_enter.defvjp(lambda _, x: (x, None), lambda axes, _, d_x: (axes.total(d_x),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _leave(axes: Axes, x: Jax) -> Jax:
    return axes.total(x)


_leave.defvjp(lambda axes, x: (axes.total(x), None), lambda _, __, d_x: (d_x,))


# Where arrays lie -----------------------------------------------------------------------------------------------------

_BASE: Final[Mapping[str, Spec]] = {
    "qkv": Spec(None, FSDP, TENSOR),
    "gate_up": Spec(None, FSDP, TENSOR),
    "shared_gate_up": Spec(None, FSDP, TENSOR),
    "o": Spec(None, TENSOR, FSDP),
    "down": Spec(None, TENSOR, FSDP),
    "shared_down": Spec(None, TENSOR, FSDP),
    "qkv_bias": Spec(None, TENSOR),
    "gate_up_bias": Spec(None, TENSOR),
    "expert_gate_up": Spec(None, TENSOR, FSDP),
    "expert_down": Spec(None, TENSOR, None, FSDP),
    "expert_gate_up_bias": Spec(None, TENSOR),
    "expert_down_bias": Spec(None, TENSOR),
    "sinks": Spec(None, TENSOR),
    "delta_in": Spec(None, FSDP),
    "delta_o": Spec(None, None, FSDP),
    "mamba_in": Spec(None, FSDP),
    "mamba_o": Spec(None, None, FSDP),
    "latent_in": Spec(None, FSDP),
    "latent_q": Spec(None, None, FSDP),
    "latent_kv": Spec(None, None, FSDP),
}
VOCABULARY: Final = Spec(TENSOR, FSDP)
_EXPERTS: Final = Spec(None, TENSOR, None, None)
_COLUMNS: Final = frozenset({"q", "k", "v", "gate", "up", "shared_gate", "shared_up"})
"""The modules whose outputs are divided over `tensor`; of the others, inputs are, unless they are whole."""
_OF_LATENTS: Final = frozenset({"q_a", "q_b", "kv_a", "kv_b"})
"""Modules that are whole, and so are all others of attention beside them."""


PAGES: Final = Spec(None, STREAMS, TENSOR)
"""Keys and values: pages over the streams, heads over `tensor` (decode.Cache has the shapes)."""
WHOLE_PAGES: Final = Spec(None, STREAMS)
"""Latents, which all heads share, and recurrent states."""
ROWS: Final = Spec(STREAMS)
"""Arrays whose first axis holds the streams' rows."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The devices of a mesh, and how arrays are divided among them."""

    axes: Axes
    devices: Mesh

    def placed(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.devices, spec)

    def placed_tree(self, specs: Jax) -> Jax:
        return jax.tree.map(self.placed, specs, is_leaf=lambda x: isinstance(x, Spec))


def put(tree: Jax, layout: MeshLayout | None, specs: Jax) -> Jax:
    """Put host arrays onto the device, or divided onto the mesh. `specs` is a tree of the same structure.

    Every process of the mesh has the same arrays, and puts the parts of its own devices.
    """
    if layout is None:
        return jax.device_put(tree)

    def divided(array: Jax, sharding: NamedSharding) -> Jax:
        return jax.make_array_from_callback(np.shape(array), sharding, lambda index: np.asarray(array)[index])

    return jax.tree.map(divided, tree, layout.placed_tree(specs))


def put_parts(shape: tuple[int, ...], layout: MeshLayout, spec: Spec, part: Callable[[Index], Array]) -> Jax:
    """Make an array of the parts that the devices hold. Devices with the same part share one reading of it.

    It waits until they hold them: else the host would go on reading, and keep the parts of several arrays.
    """
    found: dict[tuple[tuple[int, int], ...], Array] = {}

    def once(index: Index | None) -> Array:
        assert index is not None
        cuts = bounds(index, shape)
        if (key := tuple((cut.start, cut.stop) for cut in cuts)) not in found:
            found[key] = part(cuts)
        return found[key]

    return jax.make_array_from_callback(shape, layout.placed(spec), once).block_until_ready()


def bounds(index: Index, shape: tuple[int, ...]) -> Index:
    """Give each slice its ends."""
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))


def fetch(tree: Jax) -> Jax:
    """Copy arrays to the host, whole. If they are divided among processes, all of these must call it."""
    return jax.tree.map(np.asarray, jax.tree.map(_whole, tree))


def _whole(array: Jax) -> Jax:
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    return _replicated(array.sharding.mesh)(array)


@functools.cache
def _replicated(devices: Mesh) -> Jax:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(devices, Spec()))


def check_shape(config: MeshConfig, model: ModelConfig) -> Axes:
    """Return the axes of a mesh that divides the model evenly. Raise ConfigError if it does not."""
    axes = Axes(config.data, config.fsdp, config.tensor)
    if axes.tensor > 1 and model.attention.qk_norm == "whole":
        msg = f"mesh {_text(axes)}: {model.class_name} normalises all heads together, so {TENSOR} must be 1; use {FSDP}"
        raise ConfigError(msg)
    if axes.tensor > 1 and model.mamba is not None:
        msg = f"mesh {_text(axes)}: {TENSOR} does not divide the state space of {model.class_name}, so it must be 1"
        raise ConfigError(f"{msg}; use {FSDP}")
    latent = model.attention.latent
    heads = {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}
    inner = {"intermediate_size": model.intermediate_size}
    if model.experts is not None:
        inner = inner if model.dense_layers else {}
        inner["num_experts"] = model.experts.num_experts
        if model.experts.shared_size:
            inner["shared_expert_intermediate_size"] = model.experts.shared_size
    for axis, parts, sizes in (
        (FSDP, axes.fsdp, {"hidden_size": model.hidden_size, **({} if latent is None else _by_heads(model, latent))}),
        (
            TENSOR,
            axes.tensor,
            {**(heads if latent is None else {}), **inner, "vocab_size": model.vocab_size},
        ),
    ):
        uneven = [f"{name} ({size})" for name, size in sizes.items() if size % parts]
        if uneven:
            possible = ", ".join(map(str, _divisors(math.gcd(*sizes.values()))))
            msg = f"mesh {_text(axes)}: {uneven[0]} of the model is not a multiple of {axis}; {axis} can be {possible}"
            raise ConfigError(msg)
    return axes


def _by_heads(model: ModelConfig, latent: Latent) -> dict[str, int]:
    """Return the outputs of the matrices that make keys and values, and queries, of latents."""
    keys_and_values = model.num_heads * (latent.plain_dim + latent.value_dim)
    queries = {"num_attention_heads x qk_head_dim": model.q_size} if latent.query_rank else {}
    return {"num_attention_heads x (qk_nope_head_dim + v_head_dim)": keys_and_values, **queries}


def make_layout(
    config: MeshConfig, model: ModelConfig, *, exact: bool, devices: Sequence[Jax] | None = None
) -> MeshLayout:
    """Choose among the devices, by default all that JAX finds.

    Raise ConfigError if there are too few, or more than the mesh has and in several processes, each of which would have
    to take part, or if the model cannot be divided in this way.
    """
    axes = replace(check_shape(config, model), exact=exact)
    found = jax.devices() if devices is None else devices
    processes = len({device.process_index for device in found})
    if len(found) < axes.num_devices or (len(found) > axes.num_devices and processes > 1):
        there, bound = (f" in {processes} processes", "exactly") if processes > 1 else ("", "at most")
        msg = (
            f"mesh {_text(axes)} needs {axes.num_devices} devices, and there are {len(found)} ({found[0].device_kind})"
            f"{there}; data x fsdp x tensor can be {bound} {len(found)}"
        )
        raise ConfigError(msg)
    return MeshLayout(axes, Mesh(arranged(found[: axes.num_devices], axes), (DATA, FSDP, TENSOR)))


def arranged(devices: Sequence[Jax], axes: Axes) -> Jax:
    """Return the devices as an array [data, fsdp, tensor]; on TPUs, an axis's devices are neighbours where possible.

    JAX numbers TPUs by host, and a host's TPUs form a square. In that order, messages along the next axis would pass
    through other chips, and share their links.
    """
    shape = (axes.data, axes.fsdp, axes.tensor)
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _divisors(number: int) -> list[int]:
    return [parts for parts in range(1, min(number, _MOST_PARTS) + 1) if number % parts == 0]


def device_name(layout: MeshLayout | None) -> str:
    """Name the kind of the devices, with their number if there is a mesh."""
    kind, number = jax.devices()[0].device_kind, 1 if layout is None else layout.axes.num_devices
    return str(kind) if number == 1 else f"{number} x {kind}"


def _text(axes: Axes) -> str:
    return f"{DATA}={axes.data},{FSDP}={axes.fsdp},{TENSOR}={axes.tensor}"


def base_specs(layers: Sequence[str]) -> Jax:
    """Return how the base weights are divided (weights.py has their shapes)."""
    divided = {**_BASE, "o": Spec(None, None, FSDP)} if "latent_kv" in layers else _BASE
    return {
        "embed": VOCABULARY,
        "head": VOCABULARY,
        "final_norm": Spec(),
        "layers": {name: divided.get(name.removeprefix(DENSE), Spec()) for name in layers},
    }


def gathered(base: Jax, axes: Axes) -> tuple[Jax, Axes]:
    """Gather a shard's base weights over `fsdp`. Return them, and the axes for what works on them."""
    if axes.fsdp == 1:
        return base, axes

    def whole(spec: Spec, weight: Jax) -> Jax:
        return axes.whole(weight, list(spec).index(FSDP)) if FSDP in spec else weight

    specs = base_specs(list(base["layers"]))
    return jax.tree.map(whole, specs, base, is_leaf=lambda x: isinstance(x, Spec)), replace(axes, fsdp=1)


def adapter_specs(modules: Iterable[str], *, experts: bool = False) -> Jax:
    """Return how an adapter is divided (adapters.py has its shapes): like the matrices that it changes.

    With `experts`, what each expert has for itself lies where the expert does. What latents or the gated delta rule
    have is whole.
    """
    names = {name: name.removeprefix(DENSE) for name in modules}
    whole = _OF_LATENTS | {"q", "o"} if "kv_a" in names.values() else frozenset[str]()

    def pair(name: str) -> tuple[Spec, Spec]:
        if name in whole or name.startswith("delta_"):
            return Spec(), Spec()
        return (Spec(), Spec(None, None, TENSOR)) if name in _COLUMNS else (Spec(None, TENSOR, None), Spec())

    layers = {name: pair(own) for name, own in names.items()}
    if experts:
        own = {"gate": (Spec(), _EXPERTS), "up": (Spec(), _EXPERTS), "down": (_EXPERTS, Spec())}
        layers |= {name: specs for name, specs in own.items() if name in layers}
    return {"layers": layers, "head": (Spec(), Spec(None, TENSOR))}


def _with_experts(layers: Jax) -> bool:
    """Return whether these are the modules of an adapter for a model with experts."""
    return len(layers["down"][0].shape) == len(_EXPERTS)


def state_specs(modules: Iterable[str], shapes: Jax, axes: Axes) -> Jax:
    """Return how an adapter's gradients and moments are divided: like its weights, and also over `fsdp`.

    That divides the inputs of A and the outputs of B. Where their number is no multiple, an array stays as it is.
    """

    def divided(spec: Spec, shape: Jax, axis: int) -> Spec:
        names = [*spec, *[None] * (len(shape.shape) - len(spec))]
        before = () if names[axis] is None else (names[axis],)
        if axes.fsdp == 1 or shape.shape[axis] % (axes.fsdp * (axes.tensor if before else 1)):
            return spec
        names[axis] = (*before, FSDP)
        return Spec(*names)

    def pair(specs: tuple[Spec, Spec], shape: tuple[Jax, Jax]) -> tuple[Spec, Spec]:
        return divided(specs[0], shape[0], -2), divided(specs[1], shape[1], -1)

    specs = adapter_specs(modules, experts=_with_experts(shapes["layers"]))
    return jax.tree.map(pair, specs, shapes, is_leaf=lambda x: isinstance(x, tuple))


def resident_specs(modules: Sequence[str], *, experts: bool = False) -> Jax:
    """Return how the sampler's adapters are divided: like one adapter, and their rows over the streams."""

    def with_rows(spec: Spec, num_axes: int) -> Spec:
        axes = [*spec, *[None] * (num_axes - len(spec))]
        return Spec(*axes[:-2], STREAMS, *axes[-2:])

    one = adapter_specs(modules, experts=experts)
    layers = {name: tuple(with_rows(spec, max(3, len(spec))) for spec in pair) for name, pair in one["layers"].items()}
    return {"layers": layers, "head": tuple(with_rows(spec, 2) for spec in one["head"])}
