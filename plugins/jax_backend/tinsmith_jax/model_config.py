"""The description of a decoder: what its layers compute, as a frozen value. The families make it. No jax.

Programs are compiled from it, and nothing else knows which family a model is of.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import (
    ATTENTION,
    LATENT,
    DecoderShape,
    DeltaRule,
    JoinedMatrix,
    Json,
    Mamba,
    Rope,
    decoder_shape,
    joined_matrices,
    read_rope,
    short_rope,
    without_fp8,
    without_int4,
)

Activation = Literal["silu", "gelu_pytorch_tanh", "relu2"]
"""The activation of an MLP's gate, or of what is projected down if there is none, as transformers names it."""

DENSE: Final = "dense_"
"""How the weights and modules of the first layers begin, where these have a dense MLP and the others have experts."""

_OF_ATTENTION: Final = frozenset(
    {
        *("qkv", "qkv_bias", "q_norm", "k_norm", "o_bias", "sinks", "q", "k", "v", "o", "attention_index"),
        *("latent_in", "latent_q", "latent_kv", "latent_q_norm", "latent_kv_norm", "q_a", "q_b", "kv_a", "kv_b"),
    }
)
"""What only layers that attend have: weights, and modules of adapters."""
_OF_ALL: Final = frozenset({"kind"})
_OF_MIXERS: Final = frozenset({"input_norm", "attention_out_norm"})
"""What layers have that mix tokens, in whichever way."""
_OF_EXPERTS: Final = frozenset({"router_bias", "router_correction"})
_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_pytorch_tanh", "relu2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Where layers of one model differ. The weights of those that attend have the same shapes."""

    delta: DeltaRule | None = None  # by which they mix tokens, in place of attention
    mamba: Mamba | None = None  # likewise, by a state space
    mixer: bool = True  # False: they mix no tokens, and have an MLP or experts alone
    mlp: bool = True  # False: they mix tokens, and that is all
    rope: Rope | None = None  # of the first 2 * len(inv_freq) dimensions of each head; None: positions are not encoded
    window: int | None = None  # tokens that a token sees, itself included; None: all before it

    @property
    def attends(self) -> bool:
        return self.mixer and self.recurrence is None

    @property
    def recurrence(self) -> DeltaRule | Mamba | None:
        return self.delta or self.mamba


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of attention whose keys and values are products of a latent that all heads share.

    A head's key is such a product, and behind it a rotated part, which all heads share, too.
    """

    query_rank: int | None  # of the latent that queries are products of; None: they are products of the input
    rank: int  # numbers of the latent
    plain_dim: int  # of a head's query and key, which do not rotate
    rotated_dim: int
    value_dim: int
    alternate: bool = True  # the two numbers of a rotated pair follow each other, instead of lying in the two halves

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def cached_dim(self) -> int:
        """Of what is kept of a token: its latent, and the rotated part of its key."""
        return self.rank + self.rotated_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Parts of attention in addition to its matrices."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None  # of each head of queries and keys, or of all heads together
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    sinks: bool = False  # each head has a score that takes part in the softmax, and adds nothing
    cap: float | None = None  # scores s become cap * tanh(s / cap)
    gated: bool = False  # q_proj gives each head's query and a gate; the sigmoid of this multiplies what o_proj reads
    latent: Latent | None = None
    alternate: bool = False  # the two numbers of a rotated pair follow each other, instead of lying in the two halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamped:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), of gates up to `limit` and ups within +/- `limit`."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Properties of a layer's experts in addition to their sizes, and their layout in files.

    Unless they `alternate`, files may hold each expert's matrices, or all in one tensor [E, out, in], gate before up.
    """

    router: str = "mlp.gate"  # its module
    groups: "Groups | None" = None  # how experts are chosen, and counted by sigmoid; None: by softmax
    bias: bool = False  # of the router, and of each matrix of an expert
    alternate: bool = False  # the matrices of all experts are one tensor [E, in, out], in which gate and up alternate


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Experts are chosen by sigmoid, plus a correction, out of those groups of which the best two together are best.

    What counts is the sigmoid without the correction.
    """

    number: int = 1
    chosen: int = 1
    scale: float = 1.0  # of the experts' outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms of a layer, by the names of their modules. None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    offset: float = 0.0  # added to every stored norm weight, including queries', keys' and the last norm's
    centred: bool = False  # hidden states are normalised less their mean, as LayerNorm does, but without a bias

    def modules(self) -> dict[str, str]:
        """Return the modules that are there by the names of their weights in weights.py."""
        found = {
            "input_norm": self.before_attention,
            "attention_out_norm": self.after_attention,
            "post_norm": self.before_mlp,
            "mlp_out_norm": self.after_mlp,
        }
        return {name: module for name, module in found.items() if module is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """A decoder. Hashable, so that compiled functions may close over it."""

    rms_norm_eps: float
    dtype: str | None  # of the weights, as config.json has it
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]  # which kind each layer is
    attention: Attention = Attention()
    norms: Norms = Norms()
    mixture: Mixture = Mixture()
    activation: Activation | Clamped = "silu"
    mlp_bias: bool = False
    parallel: bool = False  # MLPs read what attention reads, normed by the norm before attention
    dense_layers: int = 0  # the first ones, which have a dense MLP in place of experts
    joined: tuple[JoinedMatrix, ...] = ()  # how files hold several modules of a layer in one matrix
    renamed: tuple[tuple[str, str], ...] = ()  # how modules' paths begin here, and in files and adapters
    embedding_scale: float = 1.0  # of embedded tokens
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0
    logits_cap: float | None = None  # logits z become cap * tanh(z / cap), after they are scaled
    longest: int | None = None  # tokens of a sequence up to which the description holds; None: of any

    @property
    def vector_weights(self) -> int:
        """Those of a layer that attends and has an MLP."""
        own = sum(size for name, (_, size) in self._own_vectors().items() if not _recurs(name))
        if self.experts is None or not self.mixture.bias:
            return own
        return own + self.experts.num_experts * (2 * self.experts.intermediate_size + self.hidden_size)

    @property
    def attending_layers(self) -> int:
        return sum(self.kinds[kind].attends for kind in self.pattern)

    @property
    def expert_layers(self) -> int:
        return len(self.layers_with("router"))

    @property
    def cached_size(self) -> int:
        latent = self.attention.latent
        return 2 * self.kv_size if latent is None else latent.cached_dim

    @property
    def attention_modules(self) -> tuple[str, ...]:
        latent, (q, *_, o) = self.attention.latent, ATTENTION
        if latent is None:
            return ATTENTION
        return (*LATENT, o) if latent.query_rank else (q, *LATENT[2:], o)

    def mixer_modules(self, layer: int) -> tuple[str, ...]:
        kind = self.kinds[self.pattern[layer]]
        if kind.recurrence is not None:
            return kind.recurrence.adapted_modules
        return self.attention_modules if kind.mixer else ()

    def modules_of(self, layer: int) -> tuple[str, ...]:
        """Return the paths of the linear modules of a layer that an adapter may train, but for the routed experts'."""
        if not self.kinds[self.pattern[layer]].mlp:
            return self.mixer_modules(layer)
        if self.experts is None or layer < self.dense_layers:
            return (*self.mixer_modules(layer), *self.mlp_modules)
        return (*self.mixer_modules(layer), *self._shared_modules)

    @property
    def frozen_matrices(self) -> int:
        """The numbers in linear modules of all layers that no adapter trains, and that lie where the others do."""
        if (rule := self.recurrence) is None:
            return 0
        number = sum(self.kinds[kind].recurrence is not None for kind in self.pattern)
        shapes = rule.linear_shapes(self.hidden_size).items()
        return number * _products(sizes for path, sizes in shapes if path not in rule.adapted_modules)

    @property
    def other_weights(self) -> tuple[int, int]:
        own, adapted = self._of_unlike_layers()
        if self.experts is not None and self.dense_layers:
            linear = self.linear_shapes()
            dense, shared = ([linear[path] for path in paths] for paths in (self.mlp_modules, self._shared_modules))
            routed, adapted_routed = self._of_experts()
            routed += sum(size for name, (_, size) in self._own_vectors().items() if name in _OF_EXPERTS)
            own += self.dense_layers * (_products(dense) - _products(shared) - routed)
            adapted += self.dense_layers * (_sums(dense) - _sums(shared) - adapted_routed)
        return own, adapted

    @property
    def _shared_modules(self) -> tuple[str, ...]:
        return self.experts.shared_modules if self.experts is not None and self.experts.shared_size else ()

    def _of_experts(self) -> tuple[int, int]:
        """Count what a layer has for its routed experts, and of them LoRA of rank 1 has: see `other_weights`."""
        if self.experts is None:
            return 0, 0
        number, matrices = self.experts.num_experts, len(self.mlp_modules)
        inner = number * self.experts.intermediate_size
        beside = self.hidden_size * (number + self.experts.shared_gate + 2 * (self.experts.latent_size or 0))
        return matrices * self.expert_input * inner + beside, matrices * (self.expert_input + inner)

    def _of_unlike_layers(self) -> tuple[int, int]:
        """Do as `other_weights` of layers that do not attend, or have no MLP."""
        kinds, linear, rule = [self.kinds[kind] for kind in self.pattern], self.linear_shapes(), self.recurrence
        vectors = {name: size for name, (_, size) in self._own_vectors().items()}
        own = adapted = 0
        if rule is not None:
            number, sizes = sum(kind.recurrence is not None for kind in kinds), rule.linear_shapes(self.hidden_size)
            of_rule = sum(size for name, size in vectors.items() if _recurs(name)) + rule.mixed_size * rule.width
            own += number * (_products(sizes.values()) + of_rule)
            adapted += number * _sums(sizes[path] for path in rule.adapted_modules)
        attention = [linear[path] for path in self.attention_modules]
        of_attention = sum(size for name, size in vectors.items() if name in _OF_ATTENTION)
        of_mixers = sum(size for name, size in vectors.items() if name in _OF_MIXERS)
        lacking = self.num_layers - self.attending_layers
        own -= lacking * (_products(attention) + of_attention) + sum(not kind.mixer for kind in kinds) * of_mixers
        adapted -= lacking * _sums(attention)
        mlp = [linear[path] for path in (self.mlp_modules if self.experts is None else self._shared_modules)]
        routed, adapted_routed = self._of_experts()
        lacking = sum(not kind.mlp for kind in kinds)
        own -= lacking * (_products(mlp) + routed + self.vector_weights - of_attention - of_mixers)
        adapted -= lacking * (_sums(mlp) + adapted_routed)
        return own, adapted

    @property
    def state_size(self) -> int:
        if (rule := self.recurrence) is None:
            return 0
        own = rule.value_size * rule.key_dim + (rule.width - 1) * rule.mixed_size
        return sum(self.kinds[kind].recurrence is not None for kind in self.pattern) * own

    @property
    def delta(self) -> DeltaRule | None:
        """The rule of the layers that have one: there is at most one."""
        return next((kind.delta for kind in self.kinds if kind.delta is not None), None)

    @property
    def mamba(self) -> Mamba | None:
        return next((kind.mamba for kind in self.kinds if kind.mamba is not None), None)

    @property
    def recurrence(self) -> DeltaRule | Mamba | None:
        """By which layers mix tokens that have a state: there is at most one in a model."""
        return next((kind.recurrence for kind in self.kinds if kind.recurrence is not None), None)

    @property
    def parts(self) -> list[tuple[bool, bool, bool]]:
        """What each layer has: attention, anything that mixes tokens, and an MLP or experts."""
        return [(self.kinds[kind].attends, self.kinds[kind].mixer, self.kinds[kind].mlp) for kind in self.pattern]

    @property
    def period(self) -> int:
        """After how many layers the order of what they have repeats, up to the last one."""
        parts = self.parts
        return next(n for n in range(1, len(parts) + 1) if parts == parts[:n] * (len(parts) // n))

    @property
    def runs(self) -> dict[str, tuple[int, ...]]:
        """The layers that are computed in one loop, by how the names of their weights begin."""
        first, others = tuple(range(self.dense_layers)), tuple(range(self.dense_layers, self.num_layers))
        return {DENSE: first, "": others} if first else {"": others}

    def layers_with(self, name: str) -> tuple[int, ...]:
        """Return the layers that have a weight, or a module of adapters, named as in weights.py or adapters.py."""
        dense = name.startswith(DENSE)
        layers, name = self.runs[DENSE if dense else ""], name.removeprefix(DENSE)
        return tuple(i for i in layers if _has(self.kinds[self.pattern[i]], name))

    def in_files(self, path: str) -> str:
        """Return a path within a layer as files and adapters have it."""
        for ours, theirs in self.renamed:
            if path.startswith(f"{ours}."):
                return theirs + path.removeprefix(ours)
        return path

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        shapes = DecoderShape.linear_shapes(self)
        if self.attention.gated:
            shapes[ATTENTION[0]] = (self.hidden_size, 2 * self.q_size)
        if self.recurrence is not None:
            shapes |= self.recurrence.linear_shapes(self.hidden_size)
        if (latent := self.attention.latent) is not None:
            q_a, q_b, kv_a, kv_b = LATENT
            heads = self.num_heads
            if latent.query_rank:
                shapes[q_a] = (self.hidden_size, latent.query_rank)
                shapes[q_b] = (latent.query_rank, heads * latent.key_dim)
            shapes[kv_a] = (self.hidden_size, latent.cached_dim)
            shapes[kv_b] = (latent.rank, heads * (latent.plain_dim + latent.value_dim))
            shapes[ATTENTION[3]] = (heads * latent.value_dim, self.hidden_size)
        return shapes

    def vectors(self) -> dict[str, tuple[tuple[str, ...], int]]:
        """Return the vectors of layers by name: the tensors that are joined, and the size of the whole."""
        found = self._own_vectors()
        if self.dense_layers:
            found |= {f"{DENSE}{name}": each for name, each in found.items() if name not in _OF_EXPERTS}
        return found

    def _own_vectors(self) -> dict[str, tuple[tuple[str, ...], int]]:
        """Return the parts of a layer with experts, if some layers have them."""
        found: dict[str, tuple[tuple[str, ...], int]] = {}
        for name, module in self.norms.modules().items():
            found[name] = (f"{module}.weight",), self.hidden_size
        found |= self._vectors_of_attention()
        if self.mlp_bias:
            *inputs, down = self.mlp_modules
            found["gate_up_bias"] = tuple(f"{path}.bias" for path in inputs), len(inputs) * self.intermediate_size
            found["down_bias"] = (f"{down}.bias",), self.hidden_size
        if self.experts is not None and self.mixture.bias:
            found["router_bias"] = (f"{self.mixture.router}.bias",), self.experts.num_experts
        if self.experts is not None and self.mixture.groups is not None:
            found["router_correction"] = (f"{self.mixture.router}.e_score_correction_bias",), self.experts.num_experts
        if self.delta is not None:
            found["delta_decay"] = ("linear_attn.A_log",), self.delta.value_heads
            found["delta_step"] = ("linear_attn.dt_bias",), self.delta.value_heads
            found["delta_norm"] = ("linear_attn.norm.weight",), self.delta.value_dim
        if isinstance(rule := self.recurrence, Mamba):
            heads = {"mamba_decay": "A_log", "mamba_step": "dt_bias", "mamba_skip": "D"}
            found |= {name: ((f"mamba.{theirs}",), rule.value_heads) for name, theirs in heads.items()}
            found["mamba_norm"] = ("mamba.norm.weight",), rule.value_size
            if rule.conv_bias:
                found["mamba_conv_bias"] = ("mamba.conv1d.bias",), rule.mixed_size
        return found

    def _vectors_of_attention(self) -> dict[str, tuple[tuple[str, ...], int]]:
        found: dict[str, tuple[tuple[str, ...], int]] = {}
        if self.attention.qk_norm is not None:
            heads = self.attention.qk_norm == "head"
            found["q_norm"] = ("self_attn.q_norm.weight",), self.head_dim if heads else self.q_size
            found["k_norm"] = ("self_attn.k_norm.weight",), self.head_dim if heads else self.kv_size
        if (latent := self.attention.latent) is not None:
            if latent.query_rank:
                found["latent_q_norm"] = ("self_attn.q_a_layernorm.weight",), latent.query_rank
            found["latent_kv_norm"] = ("self_attn.kv_a_layernorm.weight",), latent.rank
        if self.attention.qkv_bias:
            biases = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
            found["qkv_bias"] = biases, sum(self.linear_shapes()[path][1] for path in ATTENTION[:3])
        if self.attention.o_bias:
            found["o_bias"] = ("self_attn.o_proj.bias",), self.hidden_size
        if self.attention.sinks:
            found["sinks"] = ("self_attn.sinks",), self.num_heads
        return found

    def divided(self, parts: int) -> "ModelConfig":
        """Return what one of `parts` shards of each layer's matrices sees: fewer heads, unless these are of latents."""
        if parts == 1 or self.attention.latent is not None:
            return self
        return replace(self, num_heads=self.num_heads // parts, num_kv_heads=self.num_kv_heads // parts)


def _products(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in shapes)


def _sums(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(inputs + outputs for inputs, outputs in shapes)


def mixes(name: str) -> bool:
    """Return whether such a weight, or module of adapters, belongs to what mixes tokens: attention or a recurrence."""
    return name in _OF_ATTENTION or _recurs(name)


def _recurs(name: str) -> bool:
    return name.startswith(("delta_", "mamba_"))


def _has(kind: LayerKind, name: str) -> bool:
    """Return whether layers of this kind have a weight, or module of adapters, of this name."""
    if name in _OF_ATTENTION:
        return kind.attends
    if name.startswith("delta_"):
        return kind.delta is not None
    if name.startswith("mamba_"):
        return kind.mamba is not None
    return kind.mixer if name in _OF_MIXERS else name in _OF_ALL or kind.mlp


def decoder(
    config: Mapping[str, Json],
    path: Path,
    *,
    kinds: Mapping[str, LayerKind] | None = None,
    layer_types: tuple[str, ...] = (),
    activation: str | Clamped | None = None,
    longest: int | None = None,
    gated: bool = True,
    **differences: Any,  # any field of ModelConfig
) -> ModelConfig:
    """Describe a decoder that differs from Llama as told. `path` names config.json in errors.

    `layer_types` names the kind of each layer. By default, all see every token before them, and encode positions as
    config.json says. `gated`: whether MLPs and experts have a gate. Raise ConfigError for what is missing or not
    supported.
    """
    config = without_int4(without_fp8(config, path), path)
    shape = decoder_shape(config, path, supported=[next(iter(config["architectures"]))])
    longest = short_rope(config) if longest is None else longest
    if longest is not None:
        shape = replace(shape, max_position=min(shape.max_position, longest))
    if not gated:
        shape = replace(shape, gated=False, experts=shape.experts and shape.experts.without_gates())
    if kinds is None:
        kinds, layer_types = {"": LayerKind(rope=read_rope(config, shape.head_dim, str(path)))}, ("",)
        layer_types *= shape.num_layers
    if len(layer_types) != shape.num_layers or not set(layer_types) <= set(kinds):
        msg = f"{path}: layer_types must name one of {', '.join(kinds)} for each of the {shape.num_layers} layers"
        raise ConfigError(msg)
    used = [name for name in kinds if name in layer_types]
    if not any(kinds[name].attends for name in used):
        msg = f"{path}: layer_types names no layer that attends; at least one must"
        raise ConfigError(msg)
    return ModelConfig(
        **{each.name: getattr(shape, each.name) for each in fields(shape)},
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        kinds=tuple(kinds[name] for name in used),
        pattern=tuple(used.index(name) for name in layer_types),
        joined=joined_matrices(config),
        activation=activation
        if isinstance(activation, Clamped)
        else _activation(activation or config.get("hidden_act", "silu"), path),
        longest=longest,
        **differences,
    )


def head_dim(config: Mapping[str, Json]) -> int:
    """Return the size of a head, which config.json may leave out."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def sliding_and_full(
    config: Mapping[str, Json], path: Path, *, every: int, sliding_theta: float, full_theta: float
) -> tuple[dict[str, LayerKind], tuple[str, ...]]:
    """Return the kinds of layers that see a window or everything, as transformers names them, and each layer's kind.

    Unless config.json says otherwise: `every` how many layers one sees everything, and the bases of the frequencies.
    A single `rope_scaling` applies to the layers that see everything.
    """
    given: Mapping[str, Json] = config.get("rope_parameters") or {}
    defaults: dict[str, dict[str, Json]] = {
        "sliding_attention": {"rope_theta": sliding_theta},
        "full_attention": {"rope_theta": full_theta, **(config.get("rope_scaling") or {})},
    }
    if unknown := given.keys() - defaults.keys():
        msg = f"{path}: rope_parameters has {min(unknown)!r}; it must have {' and '.join(defaults)}"
        raise ConfigError(msg)
    windows = {"sliding_attention": config.get("sliding_window", 4096), "full_attention": None}
    kinds = {}
    for name, default in defaults.items():
        own = {**config, "rope_parameters": {**default, **(given.get(name) or {})}}
        kinds[name] = LayerKind(rope=read_rope(own, head_dim(config), str(path)), window=windows[name])
    by_default = ("full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(_layers(config)))
    return kinds, tuple(config.get("layer_types") or by_default)


def _layers(config: Mapping[str, Json]) -> int:
    return int(config["num_hidden_layers"])


def refuse(config: Mapping[str, Json], path: Path, *keys: str) -> None:
    """Raise ConfigError if one of these settings is on."""
    for key in keys:
        if config.get(key):
            msg = f"{path}: {key} = {config[key]!r} is not supported by the jax backend"
            raise ConfigError(msg)


def _activation(name: str, path: Path) -> Activation:
    for known in _ACTIVATIONS:
        if known == name:
            return known
    msg = f"{path}: activation {name!r} is not supported, only {', '.join(_ACTIVATIONS)}"
    raise ConfigError(msg)
