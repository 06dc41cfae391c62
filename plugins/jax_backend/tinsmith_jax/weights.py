"""Load the frozen base model from a Hugging Face directory's safetensors as one pytree of stacked device arrays.

Every layer tensor is stacked over layers and stored [in, out]; attention projections are fused as q|k|v and the MLP's
as gate|up. Legend: L = layers, H = hidden, I = intermediate, V = vocabulary, d = head_dim, q = heads * d, kv = kv heads
* d.

    {"embed": [V, H], "head": [V, H] (the same buffer as embed if tied), "final_norm": [H],
     "layers": {"input_norm": [L, H], "qkv": [L, H, q + 2 kv], "q_norm", "k_norm": [L, d],
                "o": [L, q, H], "post_norm": [L, H], "gate_up": [L, H, 2 I], "down": [L, I, H]}}

Which norms and biases there are, `ModelConfig.vectors` says. Norms whose weights have an offset are float32.

Matrices are of the type that is asked for; or all of bfloat16 beside norms of float32, if the files have them so and
the kernels widen them where they multiply.

A model with the gated delta rule in some layers has for these "delta_in" [L, H, qkv + z + b + a], "delta_o",
"delta_conv" [L, C, w], "delta_decay" and "delta_step" [L, value heads], and "delta_norm"; L counts the layers that have
the weight. Mamba-2 has "mamba_in" [L, H, gate + C + heads], "mamba_o", "mamba_conv" with its bias, "mamba_decay",
"mamba_step" and "mamba_skip" [L, heads], and "mamba_norm".

Attention by latents has, in place of qkv, "latent_in" [L, H, queries' rank + latent + rotated], "latent_q" [L, queries'
rank, q], "latent_kv" [L, latent, heads * (plain + value)], and norms of the two latents. If queries are products of the
input, the first matrix has them, and there is no second one.

A model with E experts has, in place of the last two, "router" [L, H, E], "expert_gate_up" [L, E, H, 2 I] and
"expert_down" [L, E, I, H]. If an expert computes every token, it is "shared_gate_up" and "shared_down", and
"shared_weight" [L, H, 1] gives its gate. If the first layers have a dense MLP, the names of all that these layers have
begin with "dense_". MLPs and experts without gates have up alone for gate|up. Experts that read a latent have
"routed_in" [L, H, latent] and "routed_out", and its size in place of H.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import numpy as np

from tinsmith import Array, Progress
from tinsmith_checkpoints.huggingface import DELTA, LATENT, MAMBA, DeltaRule, Mamba, WeightFiles
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.memory import empty
from tinsmith_jax.mesh import VOCABULARY, Index, MeshLayout, Spec, base_specs, put_parts
from tinsmith_jax.model_config import DENSE, ModelConfig

Base = Jax

Read = Callable[[str, tuple[int, ...], Index], Array]
"""Reads a part of a tensor, given the shape of the whole."""

Put = Callable[[tuple[int, ...], Spec, Callable[[Index], Array], str], Jax]
"""Makes an array of a shape, divided as told, out of what a function returns for each part, of a type."""

# our name -> (Hugging Face modules, joined along `out`)
_ATTENTION: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
}
_LATENT: Mapping[str, Sequence[str]] = {"latent_kv": LATENT[3:], "o": _ATTENTION["o"]}
_DELTA: Mapping[str, Sequence[str]] = {"delta_in": DELTA[:-1], "delta_o": DELTA[-1:]}
_MAMBA: Mapping[str, Sequence[str]] = {"mamba_in": MAMBA[:1], "mamba_o": MAMBA[1:]}
_TO_LATENT, _FROM_LATENT = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"


def load_base(
    directory: Path,
    config: ModelConfig,
    dtype: str,
    progress: Progress,
    layout: MeshLayout | None = None,
    *,
    widens: bool = False,
) -> Base:
    """Read all weights as `dtype` and put them on the default device, or divided on a mesh.

    `widens`: what multiplies them takes matrices of bfloat16 as well, for the same numbers as float32. If all of the
    files' are such, they stay as they are.

    On a mesh, the joined matrices are laid out shard by shard: q, k and v of the first shard, then of the second. Each
    device's part of a tensor is read by itself.

    Raise ConfigError for missing files or tensors, or wrong shapes.
    """
    with WeightFiles(directory, framework="numpy", int8=config.int8) as files:
        of_matrices = "bfloat16" if widens and files.matrix_types() == {"BF16"} else dtype

        def read(name: str, shape: tuple[int, ...], index: Index) -> Array:
            whole = all(part == slice(0, size) for part, size in zip(index, shape, strict=True))
            tensor: Array = files.whole(name, shape) if whole else files.part(name, shape, index)
            if name.endswith(".e_score_correction_bias"):
                return tensor.astype(np.float32, copy=False)  # experts whose scores are near would change places
            return tensor.astype(np.dtype(dtype if len(shape) == 1 else of_matrices), copy=False)

        def put(shape: tuple[int, ...], spec: Spec, part: Callable[[Index], Array], kind: str) -> Jax:
            del kind  # the parts are of that type
            if layout is None:
                return jax.device_put(part(tuple(slice(0, size) for size in shape)))
            return put_parts(shape, layout, spec, part)

        first = next(iter(config.layers_with("router")), 0)
        down = f"model.layers.{first}.{config.in_files(_joined_tensor('expert_down'))}"
        in_one = files.shape(down) if down in files else None
        base = _Loader(read, put, config, dtype, experts_in_one=in_one).load(progress)
        for leaf in jax.tree.leaves(base):
            leaf.block_until_ready()
        progress("loading weights", 1.0)
        return base


def base_shapes(config: ModelConfig, dtype: str, layout: MeshLayout | None = None) -> Base:
    """Return the shapes and types of what `load_base` loads, with their places if there is a mesh. Load nothing."""

    def shape_of(shape: tuple[int, ...], spec: Spec, part: Callable[[Index], Array], kind: str) -> Jax:
        del part
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind), sharding=layout and layout.placed(spec))

    return _Loader(_no_file, shape_of, config, dtype, experts_in_one=None).load(lambda *_: None)


def _no_file(name: str, shape: tuple[int, ...], index: Index) -> Array:
    raise AssertionError(name, shape, index)


def plain_matrices(config: ModelConfig) -> frozenset[str]:
    """Return the names of the layers' matrices that every token is multiplied with: all but the routed experts'."""
    return frozenset(_Loader(_no_file, lambda *_: None, config, "", experts_in_one=None).matrices)


class _Loader:
    def __init__(
        self, read: Read, put: Put, config: ModelConfig, dtype: str, *, experts_in_one: tuple[int, ...] | None
    ) -> None:
        """`experts_in_one`: the shape of the tensor with the last matrix of all experts of a layer, if there is one."""
        self._read = read
        self._put_as = put
        self._config = config
        self._dtype = dtype
        self._shapes = config.linear_shapes()
        alternate = config.mixture.alternate
        self._experts_in_one = experts_in_one is not None or alternate
        self._turned = alternate or (experts_in_one is not None and experts_in_one[1] != config.expert_input)
        self._within = {module: each for each in config.joined for module in each.modules}
        mixer = _mixer(config)
        mlp = {"gate_up": config.mlp_modules[:-1], "down": config.mlp_modules[-1:]}
        self._matrices: Mapping[str, Sequence[str]] = {**mixer, **mlp}
        self._experts: Mapping[str, Sequence[str]] = {}
        if (experts := config.experts) is not None:
            router, first = config.mixture.router, self._matrices if config.dense_layers else {}
            self._matrices = {**mixer, "router": (router,)}
            self._experts = {f"expert_{name}": [_leaf(path) for path in paths] for name, paths in mlp.items()}
            self._shapes[router] = (config.hidden_size, experts.num_experts)
            if experts.shared_size:
                shared = {"shared_gate_up": experts.shared_modules[:-1], "shared_down": experts.shared_modules[-1:]}
                self._matrices = {**self._matrices, **shared}
            if experts.shared_gate:
                self._matrices = {**self._matrices, "shared_weight": ("mlp.shared_expert_gate",)}
                self._shapes["mlp.shared_expert_gate"] = (config.hidden_size, 1)
            if (latent := experts.latent_size) is not None:
                self._matrices = {**self._matrices, "routed_in": (_TO_LATENT,), "routed_out": (_FROM_LATENT,)}
                self._shapes |= {_TO_LATENT: (config.hidden_size, latent), _FROM_LATENT: (latent, config.hidden_size)}
            self._matrices = {**self._matrices, **{f"{DENSE}{name}": each for name, each in first.items()}}
        if config.delta is not None:
            self._matrices = {**self._matrices, **_DELTA}
        if config.mamba is not None:
            self._matrices = {**self._matrices, **_MAMBA}

    def load(self, progress: Progress) -> Base:
        config = self._config
        vectors = config.vectors()
        biases = [f"{name}_bias" for name in self._experts] if config.mixture.bias else []
        specs = base_specs([*self._matrices, *self._experts, *vectors, *biases])["layers"]
        done, total = 0, len(self._matrices) + len(self._experts) + 1
        layers: dict[str, Jax] = {}
        for name, modules in self._matrices.items():
            progress("loading weights", done / total)
            layers[name] = self._matrix(name, modules, specs[name])
            done += 1
        for name in self._experts:
            progress("loading weights", done / total)
            load = self._of_experts_in_one if self._experts_in_one else self._of_experts
            layers[name] = load(name, specs[name])
            done += 1
        for name in biases:
            layers[name] = self._expert_bias(name.removesuffix("_bias"), specs[name])
        for name, (parts, size) in vectors.items():
            layers[name] = self._vectors(name, parts, size, specs[name])
        if config.delta is not None:
            layers["delta_conv"] = self._convolutions("delta_conv", "linear_attn", config.delta)
        if config.mamba is not None:
            layers["mamba_conv"] = self._convolutions("mamba_conv", "mamba", config.mamba)
        progress("loading weights", done / total)
        embed = self._vocabulary("model.embed_tokens.weight")
        head = embed if config.tied else self._vocabulary("lm_head.weight")
        final_norm = self._put(
            (config.hidden_size,),
            Spec(),
            lambda index: self._norm(self._read("model.norm.weight", (config.hidden_size,), index)),
            widened=config.norms.offset != 0,
        )
        return {"embed": embed, "head": head, "final_norm": final_norm, "layers": layers}

    @property
    def matrices(self) -> Collection[str]:
        return self._matrices.keys()

    def _put(self, shape: tuple[int, ...], spec: Spec, part: Callable[[Index], Array], *, widened: bool = False) -> Jax:
        return self._put_as(shape, spec, part, "float32" if widened else self._dtype)

    def _vocabulary(self, name: str) -> Jax:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._put(shape, VOCABULARY, lambda index: np.ascontiguousarray(self._read(name, shape, index)))

    def _vectors(self, name: str, parts: Sequence[str], size: int, spec: Spec) -> Jax:
        """Load norms, sinks, or biases, which are joined as the matrices are."""
        linear, own_layers = self._shapes, self._config.layers_with(name)
        has_offset = name.endswith("norm") and name not in {"delta_norm", "mamba_norm"}
        sizes = [size] if len(parts) == 1 else [linear[part.removesuffix(".bias")][1] for part in parts]

        def part(index: Index) -> Array:
            layers, columns = index
            own = [_share(columns, each, size) for each in sizes]
            found = [
                np.concatenate(
                    [
                        self._read(self._name(i, part), (whole,), (cut,))
                        for part, whole, cut in zip(parts, sizes, own, strict=True)
                    ]
                )
                for i in own_layers[layers]
            ]
            return self._norm(np.stack(found)) if has_offset else np.stack(found)

        widened = name.removeprefix(DENSE) == "router_correction" or (has_offset and self._config.norms.offset != 0)
        return self._put((len(own_layers), size), spec, part, widened=widened)

    def _convolutions(self, name: str, module: str, rule: DeltaRule | Mamba) -> Jax:
        """Load [layers, channels, width], which are whole on every device."""
        shape, own_layers = (rule.mixed_size, 1, rule.width), self._config.layers_with(name)
        whole = tuple(slice(0, size) for size in shape)

        def part(index: Index) -> Array:
            names = [self._name(i, f"{module}.conv1d.weight") for i in own_layers[index[0]]]
            return np.stack([self._read(name, shape, whole)[:, 0] for name in names])

        return self._put((len(own_layers), rule.mixed_size, rule.width), Spec(), part)

    def _name(self, layer: int, path: str) -> str:
        return f"model.layers.{layer}.{self._config.in_files(path)}"

    def _norm(self, weights: Array) -> Array:
        offset = self._config.norms.offset
        return weights.astype(np.float32) + np.float32(offset) if offset else weights

    def _matrix(self, name: str, modules: Sequence[str], spec: Spec) -> Jax:
        own_layers = self._config.layers_with(name)
        d_in = self._shapes[modules[0]][0]
        widths = [self._shapes[module][1] for module in modules]

        def part(index: Index) -> Array:
            layers, rows, columns = index
            found: Array | None = None
            for place, i in enumerate(own_layers[layers]):
                offset = 0
                for module, width in zip(modules, widths, strict=True):
                    own = _share(columns, width, sum(widths))
                    tensor = self._rows(i, module, (width, d_in), (own, rows))
                    if found is None:
                        shape = (layers.stop - layers.start, rows.stop - rows.start, columns.stop - columns.start)
                        found = empty(shape, tensor.dtype)
                    found[place, :, offset : offset + len(tensor)] = tensor.T
                    offset += len(tensor)
            assert found is not None, "a model has at least one layer"
            return found

        return self._put((len(own_layers), d_in, sum(widths)), spec, part)

    def _rows(self, layer: int, module: str, shape: tuple[int, int], index: tuple[slice, slice]) -> Array:
        """Read a part of a module's matrix [out, in], which may lie within a larger one."""
        within = self._within.get(module)
        if within is None:
            return self._read(self._name(layer, f"{module}.weight"), shape, index)
        rows = within.rows_of(module)[index[0]]
        span = slice(int(rows[0]), int(rows.max()) + 1)
        found = self._read(f"model.layers.{layer}.{within.path}.weight", (within.num_rows, shape[1]), (span, index[1]))
        return found[rows - span.start]

    def _of_experts(self, name: str, spec: Spec) -> Jax:
        """Load matrices that files hold by expert. Joined ones are not divided along their outputs."""
        modules, stored = self._experts[name], self._expert_shape(name)

        def read(layer: int, expert: int, inputs: slice, outputs: slice) -> Array:
            own = (_share(outputs, stored[0], stored[0] * len(modules)), inputs)
            path = self._name(layer, f"mlp.experts.{expert}")
            return np.concatenate([self._read(f"{path}.{module}.weight", stored, own) for module in modules]).T

        return self._experts_of(name, spec, read)

    def _of_experts_in_one(self, name: str, spec: Spec) -> Jax:
        """Load matrices that files hold together: [E, out, in], or [E, in, out], where gate and up may alternate."""
        tensor, number, (out, hidden) = _joined_tensor(name), len(self._experts[name]), self._expert_shape(name)
        alternate, experts = self._config.mixture.alternate, self._config.experts
        assert experts is not None, "the model has experts"
        shape = (experts.num_experts, *((hidden, number * out) if self._turned else (number * out, hidden)))

        def read(layer: int, expert: int, inputs: slice, outputs: slice) -> Array:
            path, one = self._name(layer, tensor), slice(expert, expert + 1)
            if self._turned and not alternate:
                whole_inputs: Array = self._read(path, shape, (one, inputs, outputs))[0]
                return whole_inputs
            if not alternate:
                own: Array = self._read(path, shape, (one, outputs, inputs))[0]
                return own.T
            whole: Array = self._read(path, shape, (one, inputs, slice(0, shape[-1])))[0]
            return np.concatenate([whole[:, i::number] for i in range(number)], axis=1)[:, outputs]

        return self._experts_of(name, spec, read)

    def _experts_of(self, name: str, spec: Spec, read: Callable[[int, int, slice, slice], Array]) -> Jax:
        """Stack what `read` returns, [in, out], given a layer, an expert, and which inputs and outputs."""
        config, own_layers = self._config, self._config.layers_with("router")
        assert config.experts is not None, "the model has experts"
        out, inputs = self._expert_shape(name)

        def part(index: Index) -> Array:
            layers, experts, *columns = index
            sizes = (layers.stop - layers.start, experts.stop - experts.start)
            found: Array | None = None
            for layer, expert in np.ndindex(sizes):
                one = read(own_layers[layers.start + layer], experts.start + expert, *columns)
                if found is None:
                    found = empty((*sizes, *one.shape), one.dtype)
                found[layer, expert] = one
            assert found is not None, "a model has at least one layer and one expert"
            return found

        shape = (config.expert_layers, config.experts.num_experts, inputs, out * len(self._experts[name]))
        return self._put(shape, spec, part)

    def _expert_bias(self, name: str, spec: Spec) -> Jax:
        config, modules = self._config, self._experts[name]
        assert config.experts is not None, "the model has experts"
        number, width = config.experts.num_experts, self._expert_shape(name)[0] * len(modules)

        def part(index: Index) -> Array:
            layers, experts, columns = index
            found = [
                self._read(f"model.layers.{i}.{_joined_tensor(name)}_bias", (number, width), (experts, slice(0, width)))
                for i in config.layers_with("router")[layers]
            ]
            parts = [np.stack(found)[..., i :: len(modules)] for i in range(len(modules))]
            whole: Array = np.concatenate(parts, axis=-1)
            return whole[..., columns]

        return self._put((config.expert_layers, number, width), spec, part)

    def _expert_shape(self, name: str) -> tuple[int, int]:
        """Return (out, in) of each of an expert's matrices."""
        assert self._config.experts is not None, "the model has experts"
        inner, hidden = self._config.experts.intermediate_size, self._config.expert_input
        return (hidden, inner) if name == "expert_down" else (inner, hidden)


def _mixer(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Return the matrices of layers that attend."""
    q_a, q_b, kv_a, _ = LATENT
    if (latent := config.attention.latent) is None:
        return _ATTENTION
    if not latent.query_rank:
        return {"latent_in": (_ATTENTION["qkv"][0], kv_a), **_LATENT}
    return {"latent_in": (q_a, kv_a), "latent_q": (q_b,), **_LATENT}


def _joined_tensor(name: str) -> str:
    """Return the name within a layer of the tensor with these matrices of all experts."""
    return "mlp.experts.down_proj" if name == "expert_down" else "mlp.experts.gate_up_proj"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _share(columns: slice, width: int, total: int) -> slice:
    """Return the columns of one module that lie in the given part of the joined matrix, which is laid out by parts."""
    return slice(columns.start * width // total, columns.stop * width // total)
