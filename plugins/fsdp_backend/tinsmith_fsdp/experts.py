"""The experts of a layer with the adapters of all tenants, with the interface that transformers' layers call.

Pairs of a token and one of its experts are sorted by expert and, within it, by adapter, so that every product is one
grouped product. What faces the hidden states has one factor for all experts: it is computed for tokens, not for pairs.

Legend: T = tokens of the stream, K = experts of a token, N = T * K pairs, E = experts, G = groups (adapters),
H = hidden size, F = intermediate size, R = rank.
"""

from typing import Any, Final

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import EXPERTS, ExpertShape
from tinsmith_fsdp.grouped import grouped
from tinsmith_fsdp.lora import Adapters, Factors, local

NAME: Final = "tinsmith_packed"
PATH: Final = "mlp.experts"


class ExpertAdapters(nn.Module):
    """The adapters of gate, up and down of a layer's experts, which have the same targets and groups."""

    def __init__(self, layer: str) -> None:
        """`layer`: its canonical path."""
        super().__init__()
        self.gate, self.up, self.down = (Adapters(f"{layer}.{module}") for module in EXPERTS)

    def factors(self) -> tuple[Factors, Factors, Factors] | None:
        """Return those of gate, up and down; None: no adapter of the stream trains them."""
        gate, up, down = self.gate.factors, self.up.factors, self.down.factors
        return None if gate is None or up is None or down is None else (gate, up, down)


def adapt(layer: nn.Module, path: str, shape: ExpertShape) -> None:
    """Give the experts of a layer adapters. Raise ConfigError if it has none of these sizes, with a gate."""
    experts = dict(layer.named_modules()).get(PATH)
    weight = getattr(experts, "gate_up_proj", None)
    turned = 1 if getattr(experts, "is_transposed", False) else 2
    if (
        not getattr(experts, "has_gate", False)
        or weight is None
        or weight.ndim != 3
        or (len(weight), weight.shape[3 - turned]) != (shape.num_experts, 2 * shape.intermediate_size)
    ):
        msg = (
            f"{path}.{PATH} should be {shape.num_experts} experts of size {shape.intermediate_size} with gates, as "
            f"transformers joins them, and is {experts}: the fsdp backend trains models all of whose layers have them"
        )
        raise ConfigError(msg)
    experts.adapters = ExpertAdapters(path)  # type: ignore[union-attr]  # a module


def packed_experts(experts: Any, x_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's experts [T, H]. `experts`: transformers' module, with or without adapters."""
    adapters: ExpertAdapters | None = getattr(experts, "adapters", None)
    factors = None if adapters is None else adapters.factors()
    routing = _Routing(index_TK, weights_TK, experts.num_experts, None if factors is None else factors[0].ends)
    gate_up = _product(experts, "gate_up_proj", x_TH[routing.token_N], routing)
    if factors is not None:
        gate, up = (_from_hidden(each, x_TH, routing) for each in factors[:2])
        both = torch.cat([gate, up], -1) if experts.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
        gate_up = gate_up + both
    inner_NF = experts._apply_gate(gate_up)  # noqa: SLF001  (where transformers has a model's activation)
    y_TH = routing.summed(_product(experts, "down_proj", inner_NF, routing))
    if factors is not None:
        y_TH = y_TH + _to_hidden(factors[2], inner_NF, routing)
    return y_TH.to(x_TH.dtype)


class _Routing:
    """The order in which pairs are computed."""

    def __init__(
        self, index_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, ends_G: torch.Tensor | None
    ) -> None:
        """`ends_G`: of the groups' tokens; None: there is one group."""
        self.shape, device = index_TK.shape, index_TK.device
        tokens = torch.arange(len(index_TK), device=device)
        groups = 1 if ends_G is None else len(ends_G)
        key_TK = index_TK * groups
        if ends_G is not None:
            key_TK = key_TK + torch.searchsorted(ends_G, tokens.to(ends_G.dtype), right=True)[:, None]
        key_N, self._order_N = torch.sort(key_TK.flatten(), stable=True)
        every = torch.arange(num_experts * groups, device=device)
        self.ends_EG = torch.searchsorted(key_N, every, right=True).to(torch.int32)
        self.ends_E = self.ends_EG[groups - 1 :: groups].contiguous()
        self.expert_N = key_N // groups
        self.token_N = self._order_N // self.shape[1]
        self._weights_TK = weights_TK

    def summed(self, y_NH: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's pairs [T, H], always in the same order."""
        in_turn = torch.empty_like(self._order_N)
        in_turn[self._order_N] = torch.arange(len(in_turn), device=in_turn.device)
        y_TKH = y_NH[in_turn].view(*self.shape, -1)
        return (y_TKH * self._weights_TK[..., None]).sum(1)


def _product(experts: Any, name: str, x: torch.Tensor, routing: _Routing) -> torch.Tensor:
    """Multiply each pair by its expert's frozen matrix."""
    weight = local(getattr(experts, name))
    y = grouped(x, weight.transpose(1, 2) if experts.is_transposed else weight, routing.ends_E)
    return y + local(getattr(experts, f"{name}_bias"))[routing.expert_N] if experts.has_bias else y


def _from_hidden(factors: Factors, x_TH: torch.Tensor, routing: _Routing) -> torch.Tensor:
    """Return what a gate's or an up's adapters add to each pair [N, F]: A is all experts', B each one's own."""
    if factors.ends is None:
        h_TR = (x_TH.float() @ factors.A[0].T) * factors.scale
        return grouped(h_TR[routing.token_N], factors.B, routing.ends_EG).to(x_TH.dtype)
    h_TR = (grouped(x_TH, factors.A[:, 0], factors.ends) * factors.scale).to(x_TH.dtype)
    return grouped(h_TR[routing.token_N], _by_expert(factors.B), routing.ends_EG)


def _to_hidden(factors: Factors, inner_NF: torch.Tensor, routing: _Routing) -> torch.Tensor:
    """Return what the adapters of down add to each token [T, H]: A is each expert's own, B all experts'."""
    if factors.ends is None:
        h_TR = routing.summed(grouped(inner_NF.float(), factors.A, routing.ends_EG))
        return ((h_TR @ factors.B[0].T) * factors.scale).to(inner_NF.dtype)
    h_TR = routing.summed(grouped(inner_NF, _by_expert(factors.A), routing.ends_EG))
    return grouped((h_TR * factors.scale).to(inner_NF.dtype), factors.B[:, 0], factors.ends)


def _by_expert(stack: torch.Tensor) -> torch.Tensor:
    """Map [G, E, ...] to [E * G, ...]."""
    return stack.transpose(0, 1).flatten(0, 1)


def register() -> None:
    """Register the implementation with transformers."""
    ExpertsInterface.register(NAME, packed_experts)
