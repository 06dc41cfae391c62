"""What transformers computes with an adapter: the reference for the megatron backend's numbers, in float32."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from forced_routing import ForcedRouting

from tinsmith import AdamParams, Array, Datum, LoraConfig
from tinsmith_checkpoints.huggingface import JoinedMatrix, joined_matrices


class Reference:
    """A model of transformers whose weights are the base's plus scale * B A."""

    def __init__(self, directory: Path, lora: LoraConfig, weights: Mapping[str, Array]) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.requires_grad_(requires_grad=False)
        self._lora, self._joined = lora, joined_matrices(self._model.config.to_dict())
        self.routing = ForcedRouting(self._model)
        self.weights = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}

    def forward_backward(self, data: Sequence[Datum]) -> list[Array]:
        """Return logprobs, and leave the gradients of cross_entropy in the weights."""
        found = []
        for datum in data:
            self.routing.begin(datum)
            tokens = torch.tensor(datum.tokens_T.astype(np.int64))[None]
            logits = torch.func.functional_call(self._model, self._adapted(), (tokens,), tie_weights=False).logits[0]
            targets = torch.tensor(datum.loss_inputs["target_tokens"])
            logp = torch.log_softmax(logits, -1).gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)
            (-(logp * torch.tensor(datum.loss_inputs["weights"])).sum()).backward()
            found.append(logp.detach().numpy())
        return found

    def chosen_TLC(self, datum: Datum) -> Array:
        """Return the experts that compute a sequence."""
        self.forward_backward([datum])
        return self.routing.chosen_TLC

    def gradients(self) -> dict[str, Array]:
        return {name: weight.grad.numpy() for name, weight in self.weights.items() if weight.grad is not None}

    def step(self, adam: AdamParams, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return the weights after one step of torch's AdamW with these gradients."""
        for name, weight in self.weights.items():
            weight.grad = torch.tensor(gradients[name])
        optimizer = torch.optim.AdamW(
            self.weights.values(), adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay
        )
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), adam.grad_clip_norm)
        optimizer.step()
        return {name: weight.detach().numpy() for name, weight in self.weights.items()}

    def _adapted(self) -> dict[str, torch.Tensor]:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        modules = sorted({name.removeprefix("base_model.model.").split(".lora_")[0] for name in self.weights})
        for module in modules:
            A, B = (self.weights[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
            delta = self._lora.scale * (B @ A)
            joined = next((each for each in self._joined if module.endswith(each.modules)), None)
            if ".experts." in module:
                _add_to_experts(parameters, module, delta)
            elif joined is not None:
                _add_to_rows(parameters, module, joined, delta)
            else:
                name = f"{module}.weight"
                parameters[name] = parameters[name] + delta
        return parameters


def _add_to_rows(parameters: dict[str, torch.Tensor], module: str, joined: JoinedMatrix, delta: torch.Tensor) -> None:
    """Transformers keeps the rows of several modules in one matrix."""
    path = next(each for each in joined.modules if module.endswith(each))
    name = f"{module.removesuffix(path)}{joined.path}.weight"
    parameters[name] = parameters[name].index_add(0, torch.from_numpy(joined.rows_of(path)), delta)


def _add_to_experts(parameters: dict[str, torch.Tensor], module: str, delta: torch.Tensor) -> None:
    """Transformers keeps gate above up in one array of all experts."""
    prefix, _, leaf = module.rpartition(".")
    if leaf == "w2":
        parameters[f"{prefix}.down_proj"] = parameters[f"{prefix}.down_proj"] + delta
        return
    other = torch.zeros_like(delta)
    both = [delta, other] if leaf == "w1" else [other, delta]
    parameters[f"{prefix}.gate_up_proj"] = parameters[f"{prefix}.gate_up_proj"] + torch.cat(both, dim=1)
