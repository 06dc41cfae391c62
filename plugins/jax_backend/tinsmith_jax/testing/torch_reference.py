"""The same training in torch: a transformers model with LoRA put in by hand, autograd, torch.optim.AdamW.

Nothing here is shared with the backend: losses are written as the public documentation states them and differentiated
automatically.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tinsmith import AdamParams, Array, Datum, ForwardBackward, LoraConfig
from tinsmith_checkpoints.huggingface import (
    LANGUAGE_MODEL,
    JoinedMatrix,
    joined_matrices,
    read_model_config,
    weight_name,
)


class _LoraLinear(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear, A: torch.nn.Parameter, B: torch.nn.Parameter, scale: float) -> None:
        super().__init__()
        self.linear, self.A, self.B, self.scale = linear, A, B, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + self.scale * (x @ self.A.T) @ self.B.T
        return out


class _LoraJoined(torch.nn.Module):
    """A matrix with the rows of several modules. `parts`: for each, where they are, A and B."""

    def __init__(
        self,
        linear: torch.nn.Linear,
        parts: Sequence[tuple[Array, torch.nn.Parameter, torch.nn.Parameter]],
        scale: float,
    ) -> None:
        super().__init__()
        self.linear, self.parts, self.scale = linear, parts, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        for rows, A, B in self.parts:
            out = out.index_add(-1, torch.tensor(rows), self.scale * (x @ A.T) @ B.T)
        return out


class _LoraExperts(torch.nn.Module):
    """The experts of a layer, one after the other. `factors` holds A and B of w1 (gate), w3 (up) and w2 (down).

    Without gates, the square of a ReLU is in their place.
    """

    def __init__(self, experts: Any, factors: Mapping[str, torch.nn.Parameter], scale: float) -> None:
        super().__init__()
        self.experts: Any = experts  # a module of transformers
        self.factors, self.scale = factors, scale

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.experts.down_proj.shape[0]):
            token, place = torch.where(chosen == expert)
            if hasattr(self.experts, "gate_up_proj_bias"):
                y = self._like_gpt_oss(x[token], expert)
            elif not hasattr(self.experts, "gate_up_proj"):
                up = x[token] @ self.experts.up_proj[expert].T + self._delta("w3", expert, x[token])
                inner = up.relu().square()
                y = inner @ self.experts.down_proj[expert].T + self._delta("w2", expert, inner)
            else:
                gate, up = (x[token] @ self.experts.gate_up_proj[expert].T).chunk(2, dim=-1)
                gate, up = gate + self._delta("w1", expert, x[token]), up + self._delta("w3", expert, x[token])
                inner = torch.nn.functional.silu(gate) * up
                y = inner @ self.experts.down_proj[expert].T + self._delta("w2", expert, inner)
            out = out.index_add(0, token, y * weights[token, place, None])
        return out

    def _like_gpt_oss(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        own = self.experts
        gate_up = x @ own.gate_up_proj[expert] + own.gate_up_proj_bias[expert]
        deltas = torch.stack((self._delta("w1", expert, x), self._delta("w3", expert, x)), dim=-1)
        gate, up = (gate_up + deltas.flatten(-2)).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=own.limit), up.clamp(-own.limit, own.limit)
        inner = (up + 1) * gate * torch.sigmoid(own.alpha * gate)
        out: torch.Tensor = inner @ own.down_proj[expert] + own.down_proj_bias[expert]
        return out + self._delta("w2", expert, inner)

    def _delta(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        A, B = (self.factors[f"{name}.lora_{side}.weight"] for side in "AB")
        return self.scale * (x @ A[min(expert, len(A) - 1)].T) @ B[min(expert, len(B) - 1)].T


def _gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as transformers' `torch_chunk_gated_delta_rule`, which rounds to float32: token by token, in any type."""
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = torch.zeros(*key.shape[:1], *key.shape[2:], value.shape[-1], dtype=value.dtype)
    found = []
    for t in range(key.shape[1]):
        state = state * g[:, t].to(state.dtype).exp()[..., None, None]
        correction = (value[:, t] - (state * key[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * correction[:, :, None]
        found.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(found, 1), state


class TorchModel:
    """One model in training. `weights` are in canonical (PEFT) names."""

    def __init__(self, directory: Path, lora: LoraConfig, weights: Mapping[str, Array], dtype: torch.dtype) -> None:
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        made = getattr(transformers, read_model_config(directory)["architectures"][0])
        self.model: Any = made.from_pretrained(directory, dtype=dtype, **plain)
        self.model.requires_grad_(requires_grad=False)
        of_class: Any = sys.modules[type(self.model).__module__]
        if hasattr(of_class, "torch_chunk_gated_delta_rule"):
            of_class.torch_chunk_gated_delta_rule = _gated_delta_rule
        self.dtype = dtype
        self.parameters = {
            name: torch.nn.Parameter(torch.tensor(value, dtype=dtype)) for name, value in weights.items()
        }
        for name in weights:
            if name.endswith(".experts.w2.lora_A.weight"):
                self._adapt_experts(name.removesuffix("w2.lora_A.weight"), lora.scale)
            elif name.endswith(".lora_A.weight") and ".experts." not in name:
                path = self._path(name, ".lora_A.weight")
                parent, _, leaf = path.rpartition(".")
                module = self.model.get_submodule(parent) if parent else self.model
                if hasattr(module, leaf):
                    setattr(module, leaf, _LoraLinear(getattr(module, leaf), *self._factors(name), lora.scale))
        for joined in joined_matrices(self.model.config.to_dict()):
            self._adapt_joined(joined, lora.scale)
        self.optimizer: Any = torch.optim.AdamW([*self.parameters.values()]) if weights else None

    def _path(self, name: str, end: str) -> str:
        """Return a module's path in the model, of which the decoder may be a part."""
        path = name.removeprefix("base_model.model.").removesuffix(end)
        return path.replace("model.", LANGUAGE_MODEL, 1) if hasattr(self.model.model, "language_model") else path

    def _factors(self, name: str) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        return self.parameters[name], self.parameters[name.replace("lora_A", "lora_B")]

    def _adapt_joined(self, joined: JoinedMatrix, scale: float) -> None:
        parent, _, leaf = joined.path.rpartition(".")
        for i, layer in enumerate(self.model.model.layers):
            names = [weight_name(f"model.layers.{i}.{module}", "A") for module in joined.modules]
            if names[0] in self.parameters:
                parts = [(joined.rows_of(m), *self._factors(n)) for m, n in zip(joined.modules, names, strict=True)]
                module = layer.get_submodule(parent)
                setattr(module, leaf, _LoraJoined(getattr(module, leaf), parts, scale))

    def _adapt_experts(self, prefix: str, scale: float) -> None:
        mlp: Any = self.model.get_submodule(self._path(prefix, ".experts."))
        factors = {name.removeprefix(prefix): each for name, each in self.parameters.items() if name.startswith(prefix)}
        mlp.experts = _LoraExperts(mlp.experts, factors, scale)

    def logprobs(self, datum: Datum) -> torch.Tensor:
        logits = self.model(torch.tensor(np.asarray(datum.tokens_T))[None]).logits[0]
        targets = torch.tensor(datum.targets_TK)
        return torch.log_softmax(logits, -1).gather(-1, targets).reshape(datum.loss_inputs["target_tokens"].shape)

    def loss(self, op: ForwardBackward) -> torch.Tensor:
        """The plain sum over tokens and data."""
        return sum((self._datum_loss(op, datum) for datum in op.data), torch.zeros((), dtype=self.dtype))

    def gradients(self, ops: Sequence[ForwardBackward]) -> dict[str, torch.Tensor]:
        for op in ops:
            self.loss(op).backward()
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def step(self, op: ForwardBackward, adam: AdamParams) -> float:
        """One optimizer step; the norm of its gradient before clipping."""
        for group in self.optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        self.optimizer.zero_grad()
        self.loss(op).backward()
        limit = adam.grad_clip_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit))
        self.optimizer.step()
        return norm

    def restore(self, m: Mapping[str, Array], v: Mapping[str, Array], step: int) -> None:
        """Give the optimizer a history."""
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.tensor(m[name], dtype=self.dtype),
                "exp_avg_sq": torch.tensor(v[name], dtype=self.dtype),
            }

    def host_weights(self) -> dict[str, Array]:
        return {name: parameter.detach().numpy().copy() for name, parameter in self.parameters.items()}

    def _datum_loss(self, op: ForwardBackward, datum: Datum) -> torch.Tensor:
        logp = self.logprobs(datum)
        given = {name: torch.tensor(value) for name, value in datum.loss_inputs.items()}
        if op.loss_fn == "cross_entropy":
            return -(given["weights"] * logp).sum()
        ratio, A = torch.exp(logp - given["logprobs"]), given["advantages"]
        match op.loss_fn:
            case "importance_sampling":
                return -(ratio * A).sum()
            case "ppo":
                low, high = _thresholds(op, 0.8, 1.2)
                return -torch.minimum(ratio * A, ratio.clamp(low, high) * A).sum()
            case "cispo":
                low, high = _thresholds(op, 0.0, 4.0)
                return -(ratio.clamp(low, high).detach() * logp * A).sum()
            case "dro":
                beta = op.loss_fn_config.get("beta", 0.05)
                return -(logp * A - 0.5 * beta * (logp - given["logprobs"]) ** 2).sum()
        raise AssertionError(op.loss_fn)


def _thresholds(op: ForwardBackward, low: float, high: float) -> tuple[float, float]:
    config = op.loss_fn_config
    return config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
