"""A transformers decoder that processes streams: its own embedding, layers and norm, and a head with the losses.

A pass takes several streams. Each goes through a layer by itself, while the layer's weights are gathered once for all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith_fsdp.lora import Adapters, local
from tinsmith_fsdp.streams import Call, Stream
from tinsmith_fsdp.tensor_parallel import gather_tokens, scatter_sums
from tinsmith_workers.torch import LossTable, Rows, Scores, Span, Vocabulary, score, score_with_gradients


class PackedLayer(nn.Module):
    """One decoder layer of transformers, applied stream by stream."""

    def __init__(self, inner: nn.Module, *, checkpointing: bool) -> None:
        super().__init__()
        self.inner = inner
        self.checkpointing = checkpointing
        self.adapters = tuple(module for module in inner.modules() if isinstance(module, Adapters))

    def forward(self, hiddens: Sequence[torch.Tensor], streams: Sequence[Stream], index: int) -> list[torch.Tensor]:
        """`index`: of the layer, whose calls the streams have."""
        work = [(hidden, stream, stream.calls[index]) for hidden, stream in zip(hiddens, streams, strict=True)]
        if self.checkpointing and torch.is_grad_enabled():
            return [checkpoint(self._run, *each, use_reentrant=False, preserve_rng_state=False) for each in work]
        return [self._run(*each) for each in work]

    def _run(self, hidden: torch.Tensor, stream: Stream, call: Call) -> torch.Tensor:
        for adapters in self.adapters:  # set here, so that recomputation in the backward pass sees them too
            adapters.factors = stream.factors.get(adapters.module)
        positional, named = call
        out = self.inner(hidden, *positional, **named, stream=stream)
        assert isinstance(out, torch.Tensor)
        return out


class _Noted(nn.Module):
    """Stands for a layer while transformers prepares a pass: notes how it is called, and changes nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = (layer,)  # not a submodule of this
        self.call: Call = (), {}

    def forward(self, hidden: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
        self.call = positional, named
        return hidden

    def taken(self) -> Call:
        """Return the call, and keep nothing of it: its rotations are as long as the stream."""
        call, self.call = self.call, ((), {})
        return call

    def __getattr__(self, name: str) -> Any:
        """Trunks look at some attributes of their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer[0], name)


class _Embedding(nn.Module):
    """Looks up tokens as the model does, of which each tensor-parallel rank has a part."""

    def __init__(self, model: "PackedModel") -> None:
        super().__init__()
        self._model = (model,)  # not a submodule of this

    def forward(self, tokens_1T: torch.Tensor) -> torch.Tensor:
        return self._model[0].embedded(tokens_1T)


class PackedModel(nn.Module):
    """The whole model. `canonical_name` maps its parameters to their canonical names.

    What transformers' trunk computes before its layers, it computes here, too: embedding, scales, and rotations of each
    kind of layer. Only its layers run later, for all streams together.
    """

    def __init__(self, causal_lm: nn.Module, *, checkpointing: bool) -> None:
        """Take a model of transformers apart; it cannot be used afterwards."""
        super().__init__()
        trunk = causal_lm.model
        assert isinstance(trunk, nn.Module)
        self.embed_tokens = _module(trunk.embed_tokens)
        self.embed_tokens.padding_idx = None  # type: ignore[assignment]  # a row like any other: it has a gradient, too
        self.layers = nn.ModuleList(PackedLayer(layer, checkpointing=checkpointing) for layer in trunk.layers)  # type: ignore[union-attr]  # a ModuleList
        self.norm = _module(trunk.norm)
        self.lm_head = _module(causal_lm.lm_head)
        self.vocabulary = Vocabulary(0, None)
        self.scale, self._cap = _logits(causal_lm.config)
        self._noted = [_Noted(layer.inner) for layer in self.layers]  # type: ignore[arg-type]  # a module
        trunk.layers, trunk.norm, trunk.embed_tokens = nn.ModuleList(self._noted), nn.Identity(), _Embedding(self)
        self._trunk = (trunk,)  # not a submodule: its parameters are this one's

    def recompute(self, yes: bool) -> None:  # noqa: FBT001
        """Set whether passes from now on recompute activations in the backward pass, which changes no number."""
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            layer.checkpointing = yes

    def set_rotary(self, rotary: nn.Module) -> None:
        """Set the rotary embedding, which has no parameters and is not sharded."""
        self._trunk[0].rotary_emb = rotary

    def forward(
        self, streams: Sequence[Stream], losses: LossTable, *, backward: bool
    ) -> tuple[list[torch.Tensor], list[Scores]]:
        """Return each stream's scores, and with `backward` its summed loss, on which to call backward."""
        totals, scores = [], []
        weight = local(self.lm_head.weight)
        for normed, stream in zip(self.normed(streams, backward=backward), streams, strict=True):
            rows = _rows_of(stream, losses, self.vocabulary, len(weight), self._cap)
            if backward:
                total, found = score_with_gradients(normed, weight, rows)
                totals.append(total)
            else:
                found = score(normed, weight, rows)
            scores.append(found)
        return totals, scores

    def normed(self, streams: Sequence[Stream], *, backward: bool) -> list[torch.Tensor]:
        """Return what the head reads of each stream [T, H], with the scale of its logits."""
        hiddens = []
        for stream in streams:
            hidden = self._prepared(stream)
            if backward:
                hidden.requires_grad_()  # a frozen base model must still pass on gradients, for the adapters
            hiddens.append(hidden)
        for index, layer in enumerate(self.layers):
            hiddens = layer(hiddens, streams, index)
        found = [gather_tokens(self.norm(hidden), self.vocabulary.group)[0] for hidden in hiddens]
        return found if self.scale == 1.0 else [normed * self.scale for normed in found]

    def logits(self, normed_TH: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, V] of what `normed` returned, of a model that nothing divides."""
        logits_TV = F.linear(normed_TH, self.lm_head.weight)  # type: ignore[arg-type]  # a parameter
        return logits_TV if self._cap is None else torch.tanh(logits_TV / self._cap) * self._cap

    def _prepared(self, stream: Stream) -> torch.Tensor:
        """Return what the first layer takes, and note how each layer is called."""
        (trunk,) = self._trunk
        out = trunk(input_ids=stream.tokens_T[None], position_ids=stream.positions_T[None], use_cache=False)
        stream.calls = [noted.taken() for noted in self._noted]
        hidden = out.last_hidden_state
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def embedded(self, tokens_1T: torch.Tensor) -> torch.Tensor:
        """Look up the tokens: with tensor parallelism, this rank's part of them."""
        if self.vocabulary.group is None:
            return self.embed_tokens(tokens_1T)  # type: ignore[no-any-return]
        weight = local(self.embed_tokens.weight)
        own_1T, index_1T = self.vocabulary.own(tokens_1T, len(weight))
        return scatter_sums(F.embedding(index_1T, weight) * own_1T[..., None], self.vocabulary.group)


def _rows_of(stream: Stream, losses: LossTable, vocabulary: Vocabulary, size: int, cap: float | None) -> Rows:
    """Return what the head computes of a stream, with its adapters.

    `size`: of this rank's part of the vocabulary. `cap`: of the logits.
    """
    own = slice(vocabulary.start, vocabulary.start + size)
    assert stream.batch is not None
    spans = [
        Span(group.start, group.stop, None if group.leaves is None else group.leaves.on_head(own))
        for group in stream.groups
    ]
    return Rows(spans, stream.batch, losses, vocabulary, cap)


def _logits(config: Any) -> tuple[float, float | None]:
    """Return the scale of a model's logits and their soft cap, by the names that transformers' classes give them."""
    scale = getattr(config, "logit_scale", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return float(scale) / float(getattr(config, "logits_scaling", None) or 1.0), None if cap is None else float(cap)


def _module(child: object) -> nn.Module:
    assert isinstance(child, nn.Module)
    return child


def canonical_name(name: str) -> str:
    """Turn a parameter's name into its name in the Hugging Face checkpoint."""
    name = name.replace(".inner.", ".")
    return name if name.startswith("lm_head.") else f"model.{name}"
