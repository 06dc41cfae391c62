"""The same training in torch: a transformers model with LoRA put in by hand, autograd, torch.optim.AdamW.

Nothing here is shared with the backend: losses are written as the public documentation states them and differentiated
automatically.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tinsmith import AdamParams, Array, Datum, ForwardBackward, LoraConfig


class _LoraLinear(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear, A: torch.nn.Parameter, B: torch.nn.Parameter, scale: float) -> None:
        super().__init__()
        self.linear, self.A, self.B, self.scale = linear, A, B, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * (x @ self.A.T) @ self.B.T


class TorchModel:
    """One model in training. `weights` are in canonical (PEFT) names."""

    def __init__(self, directory: Path, lora: LoraConfig, weights: Mapping[str, Array], dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self.model.requires_grad_(requires_grad=False)
        self.dtype = dtype
        self.parameters = {
            name: torch.nn.Parameter(torch.tensor(value, dtype=dtype)) for name, value in weights.items()
        }
        for name in weights:
            if name.endswith(".lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                parent, _, leaf = path.rpartition(".")
                module = self.model.get_submodule(parent) if parent else self.model
                A, B = self.parameters[name], self.parameters[name.replace("lora_A", "lora_B")]
                setattr(module, leaf, _LoraLinear(getattr(module, leaf), A, B, lora.scale))
        self.optimizer = torch.optim.AdamW(list(self.parameters.values())) if weights else None

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
        return {name: parameter.grad for name, parameter in self.parameters.items()}

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
