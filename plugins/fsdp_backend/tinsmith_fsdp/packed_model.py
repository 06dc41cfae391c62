"""A transformers decoder reassembled to process streams: embedding, its own layers, norm, head and loss.

A pass takes several streams. Each goes through a layer by itself, while the layer's weights are gathered once for all.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith_fsdp.head import rows_of
from tinsmith_fsdp.lora import MultiLoraLinear, local
from tinsmith_fsdp.streams import Stream
from tinsmith_fsdp.tensor_parallel import gather_tokens, scatter_sums
from tinsmith_workers.torch import LossTable, Scores, Vocabulary, score, score_with_gradients


class PackedLayer(nn.Module):
    """One decoder layer of transformers, applied stream by stream."""

    def __init__(self, inner: nn.Module, *, checkpointing: bool) -> None:
        super().__init__()
        self.inner = inner
        self.checkpointing = checkpointing
        self.linears = tuple(module for module in inner.modules() if isinstance(module, MultiLoraLinear))

    def forward(self, hiddens: Sequence[torch.Tensor], streams: Sequence[Stream]) -> list[torch.Tensor]:
        if self.checkpointing and torch.is_grad_enabled():
            return [
                checkpoint(self._run, hidden, stream, use_reentrant=False, preserve_rng_state=False)
                for hidden, stream in zip(hiddens, streams, strict=True)
            ]
        return [self._run(hidden, stream) for hidden, stream in zip(hiddens, streams, strict=True)]

    def _run(self, hidden: torch.Tensor, stream: Stream) -> torch.Tensor:
        for linear in self.linears:  # set here, so that recomputation in the backward pass sees it too
            linear.factors = stream.factors.get(linear.module)
        out = self.inner(hidden, attention_mask=None, position_embeddings=stream.rope, stream=stream)
        assert isinstance(out, torch.Tensor)
        return out


class PackedModel(nn.Module):
    """The whole model. `canonical_name` maps its parameters to their canonical names."""

    def __init__(self, causal_lm: nn.Module, *, checkpointing: bool) -> None:
        super().__init__()
        trunk = causal_lm.model
        assert isinstance(trunk, nn.Module)
        self.embed_tokens = _module(trunk.embed_tokens)
        self.embed_tokens.padding_idx = None  # type: ignore[assignment]  # a row like any other: it has a gradient, too
        self.layers = nn.ModuleList(PackedLayer(layer, checkpointing=checkpointing) for layer in trunk.layers)  # type: ignore[union-attr]  # a ModuleList
        self.norm = _module(trunk.norm)
        self.lm_head = _module(causal_lm.lm_head)
        self.vocabulary = Vocabulary(0, None)

    def recompute(self, yes: bool) -> None:  # noqa: FBT001
        """Set whether passes from now on recompute activations in the backward pass, which changes no number."""
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            layer.checkpointing = yes

    def set_rotary(self, rotary: nn.Module) -> None:
        """Set the rotary embedding, which has no parameters and is not sharded."""
        self._rotary = [rotary]

    def forward(
        self, streams: Sequence[Stream], losses: LossTable, *, backward: bool
    ) -> tuple[list[torch.Tensor], list[Scores]]:
        """Return each stream's scores, and with `backward` its summed loss, on which to call backward."""
        hiddens = []
        for stream in streams:
            hidden = self._embedded(stream.tokens_T[None])
            if backward:
                hidden.requires_grad_()  # a frozen base model must still pass on gradients, for the adapters
            stream.rope = self._rotary[0](hidden, stream.positions_T[None])
            hiddens.append(hidden)
        for layer in self.layers:
            hiddens = layer(hiddens, streams)
        totals, scores = [], []
        weight = local(self.lm_head.weight)
        for hidden, stream in zip(hiddens, streams, strict=True):
            rows = rows_of(stream, losses, self.vocabulary, len(weight))
            normed = gather_tokens(self.norm(hidden), self.vocabulary.group)[0]
            if backward:
                total, found = score_with_gradients(normed, weight, rows)
                totals.append(total)
            else:
                found = score(normed, weight, rows)
            scores.append(found)
        return totals, scores

    def _embedded(self, tokens_1T: torch.Tensor) -> torch.Tensor:
        """Look up the tokens: with tensor parallelism, this rank's part of them."""
        if self.vocabulary.group is None:
            return self.embed_tokens(tokens_1T)  # type: ignore[no-any-return]
        weight = local(self.embed_tokens.weight)
        own_1T, index_1T = self.vocabulary.own(tokens_1T, len(weight))
        return scatter_sums(F.embedding(index_1T, weight) * own_1T[..., None], self.vocabulary.group)


def _module(child: object) -> nn.Module:
    assert isinstance(child, nn.Module)
    return child


def canonical_name(name: str) -> str:
    """Turn a parameter's name into its name in the Hugging Face checkpoint."""
    name = name.replace(".inner.", ".")
    return name if name.startswith("lm_head.") else f"model.{name}"
