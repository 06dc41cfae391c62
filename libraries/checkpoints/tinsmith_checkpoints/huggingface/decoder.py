"""The shape of a decoder, dense or with experts, from its config.json, and the modules that an adapter may train."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.huggingface.int8 import Int8, read_int8
from tinsmith_checkpoints.huggingface.language_part import language_config
from tinsmith_checkpoints.values import Json

ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LATENT: Final = tuple(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
"""Those that make queries, keys and values out of latents, which some models have in place of the first three."""
SHARED_EXPERT: Final = tuple(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
"""The expert that computes every token, where a model has one."""
SHARED_EXPERTS: Final = tuple(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
"""Several such experts, as one, where a model counts them without a gate."""
DELTA: Final = (
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "linear_attn.out_proj",
)
"""Those of a layer with the gated delta rule, in place of attention."""
MAMBA: Final = ("mamba.in_proj", "mamba.out_proj")
"""Those of a Mamba-2 layer, in place of attention."""
HEAD: Final = "lm_head"

EXPERTS: Final = ("mlp.experts.w1", "mlp.experts.w3", "mlp.experts.w2")
"""gate, up and down of all experts of a layer, under Tinker's names: each adapter weight is one array with an axis of
experts. The side that faces the hidden states is shared by the experts, so its axis has the size 1."""

EXPERT_MODULES: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""What Hugging Face files call them, in each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The sizes of the experts of a layer. Every layer has them, in place of a dense MLP."""

    num_experts: int
    top_k: int  # experts that compute each token
    intermediate_size: int  # of one expert
    normalized: bool  # whether the weights of a token's experts add up to 1
    shared_size: int = 0  # of the expert that computes every token; 0: there is none
    shared_modules: tuple[str, ...] = SHARED_EXPERT  # its paths; a gate weights it if they are these
    latent_size: int | None = None  # of the latent that routed experts read and give; None: hidden states

    @property
    def shared_gate(self) -> bool:
        return bool(self.shared_size) and self.shared_modules == SHARED_EXPERT

    def without_gates(self) -> "ExpertShape":
        """Return the shape of experts with two matrices each, of which the first one is `up_proj`."""
        return replace(self, shared_modules=self.shared_modules[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder. Hashable."""

    class_name: str  # in transformers, for example Qwen3ForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    tied: bool  # the output head is the embedding
    gated: bool = True  # MLPs and experts have a gate: three matrices, not two
    experts: ExpertShape | None = None  # None: a dense model
    int8: Int8 | None = None  # how the layers' matrices are quantised; None: they are not

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def vector_weights(self) -> int:
        """The weights of a layer's norms and biases, as Qwen2, Qwen3, Qwen3-MoE, Llama and Mistral have them."""
        own = 0
        if self.class_name.startswith("Qwen3"):
            own = 2 * self.head_dim
        elif self.class_name.startswith("Qwen2"):
            own = self.q_size + 2 * self.kv_size
        return 2 * self.hidden_size + own

    @property
    def attending_layers(self) -> int:
        return self.num_layers

    @property
    def other_weights(self) -> tuple[int, int]:
        """What layers unlike the others have beyond what these take: in all, and in LoRA of rank 1."""
        return 0, 0

    @property
    def cached_size(self) -> int:
        """Numbers of a token that a layer which attends keeps for later ones."""
        return 2 * self.kv_size

    @property
    def state_size(self) -> int:
        """Numbers that a sequence needs in layers that do not attend, however long it is."""
        return 0

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """The paths of the linear modules of a layer that attends."""
        return ATTENTION

    @property
    def mlp_modules(self) -> tuple[str, ...]:
        """The paths of the linear modules of an MLP."""
        return MLP if self.gated else MLP[1:]

    @property
    def expert_input(self) -> int:
        """Numbers of a token that a routed expert reads, and gives."""
        latent = None if self.experts is None else self.experts.latent_size
        return self.hidden_size if latent is None else latent

    @property
    def period(self) -> int:
        """After how many layers the order of their kinds repeats, up to the last one."""
        return 1

    def mixer_modules(self, layer: int) -> tuple[str, ...]:
        """Return the paths of the linear modules by which a layer mixes tokens."""
        del layer
        return self.attention_modules

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has routed experts."""
        del layer
        return self.experts is not None

    def feed_forward_modules(self, layer: int) -> tuple[str, ...]:
        """Return the paths of the linear modules of a layer's MLP, or of the expert that computes every token."""
        if not self.has_experts(layer):
            return self.mlp_modules
        return tuple(path for path in self.plain_modules if path not in self.attention_modules)

    @property
    def plain_modules(self) -> tuple[str, ...]:
        """The paths of a layer's linear modules that an adapter may train, other than the routed experts'."""
        if self.experts is None:
            return (*self.attention_modules, *self.mlp_modules)
        return (*self.attention_modules, *(self.experts.shared_modules if self.experts.shared_size else ()))

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) of each linear module of a layer, keyed by its path within the layer, and of the head.

        Routed experts are not among them.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        shared = 0 if self.experts is None else self.experts.shared_size
        shapes = [(hidden, self.q_size), (hidden, self.kv_size), (hidden, self.kv_size), (self.q_size, hidden)]
        shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        found = {**dict(zip((*ATTENTION, *MLP), shapes, strict=True)), HEAD: (hidden, self.vocab_size)}
        if self.experts is not None and shared:
            *inputs, down = self.experts.shared_modules
            found |= {**dict.fromkeys(inputs, (hidden, shared)), down: (shared, hidden)}
        return found


def decoder_shape(config: Mapping[str, Json], path: Path, *, supported: Collection[str]) -> DecoderShape:
    """Read the sizes from a parsed config.json. `path` names the file in errors.

    Raise ConfigError if the architecture is not among the supported ones, if a size is missing, or if the weights are
    quantised other than to 8-bit integers.
    """
    class_name = next(iter(config.get("architectures") or ["(none named)"]))
    if class_name not in supported:
        msg = f"{path}: architecture {class_name!r} is not supported, only {', '.join(supported)}"
        raise ConfigError(msg)
    experts = has_experts(config)
    inner = "moe_intermediate_size" if experts and "intermediate_size" not in config else "intermediate_size"
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return DecoderShape(
            class_name=class_name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config[inner]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_position=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=_expert_shape(config, path) if experts else None,
            int8=read_int8(config, path),
        )
    except KeyError as error:
        msg = f"{path}: {error.args[0]!r} is missing"
        raise ConfigError(msg) from error


_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def has_experts(config: Mapping[str, Json]) -> bool:
    """Return whether a model, or its language part, has layers with experts, given its config.json."""
    return any(language_config(config).get(key) for key in _NUM_EXPERTS)


def _expert_shape(config: Mapping[str, Json], path: Path) -> ExpertShape:
    for key, uniform in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(key, uniform) not in (uniform, None):
            msg = f"{path}: {key} is {config[key]!r}: models of which some layers are dense are not supported"
            raise ConfigError(msg)
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    without_gate = int(config.get("n_shared_experts") or 0)
    return ExpertShape(
        num_experts=next(int(config[key]) for key in _NUM_EXPERTS if config.get(key)),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=size,
        normalized=bool(config.get("norm_topk_prob", False)),
        shared_size=int(config.get("moe_shared_expert_intermediate_size") or without_gate * size)
        or int(config.get("shared_expert_intermediate_size") or 0),
        shared_modules=SHARED_EXPERTS if without_gate else SHARED_EXPERT,
        latent_size=config.get("moe_latent_size"),
    )
