"""What transformers computes when all weights are trained: the reference for full fine-tuning, in float32."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from forced_routing import ForcedRouting

from tinsmith import AdamParams, Array, Datum


class FullReference:
    """The whole model, under canonical names: transformers joins a layer's experts, files do not."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.get_input_embeddings().padding_idx = None  # a gradient like any other's
        self.routing = ForcedRouting(self._model)

    def forward_backward(self, data: Sequence[Datum]) -> list[Array]:
        """Return logprobs, and leave the gradients of cross_entropy in the model."""
        found = []
        for datum in data:
            self.routing.begin(datum)
            logits = self._model(torch.tensor(datum.tokens_T.astype(np.int64))[None]).logits[0]
            targets = torch.tensor(datum.loss_inputs["target_tokens"])
            logp = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
            (-(logp * torch.tensor(datum.loss_inputs["weights"])).sum()).backward()
            found.append(logp.detach().numpy())
        return found

    def gradients(self) -> dict[str, Array]:
        return {
            name: part.numpy()
            for whole, weight in self._model.named_parameters()
            if weight.grad is not None
            for name, part in _canonical(whole, weight.grad)
        }

    def step(self, adam: AdamParams) -> dict[str, Array]:
        """Return the weights after one step of torch's AdamW."""
        optimizer = torch.optim.AdamW(
            self._model.parameters(), adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay
        )
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), adam.grad_clip_norm)
        optimizer.step()
        return {
            name: part.numpy()
            for whole, weight in self._model.named_parameters()
            for name, part in _canonical(whole, weight.detach())
        }


def _canonical(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    prefix, _, leaf = name.rpartition(".")
    if leaf not in ("gate_up_proj", "down_proj"):
        yield name, value
        return
    for expert, own in enumerate(value):
        if leaf == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", own
        else:
            gate, up = own.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
