"""Requests for `stable_reinforce`. Its objective is not public: another loss stands in for it if an operator says so.

Clients send the loss's inputs without a mask, and provenance spans: which input and target tokens are whose.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tinsmith import corrections
from tinsmith.errors import ConfigError, UnsupportedError, UserError
from tinsmith.losses import LossSpec
from tinsmith.operations import Array, FloatArray
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.settings import LossSettings

NAME: Final = "stable_reinforce"
_INPUTS: Final = frozenset({"logprobs", "advantages"})
_MASK: Final = corrections.MARKED


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """The loss that is computed instead."""

    loss: LossSpec
    config: Mapping[str, float]

    @classmethod
    def of(cls, settings: LossSettings, losses: Mapping[str, LossSpec]) -> "StandIn | None":
        """Return what the settings name. Raises ConfigError if it cannot stand in."""
        name, config = settings.stable_reinforce, settings.stable_reinforce_config
        if name is None:
            return None
        suitable = sorted(name for name, spec in losses.items() if _INPUTS <= set(spec.inputs) <= {*_INPUTS, _MASK})
        if name not in suitable:
            msg = f"losses.stable_reinforce: {name!r} cannot stand in; use one of {', '.join(suitable)}"
            raise ConfigError(msg)
        spec = losses[name]
        if unknown := sorted(config.keys() - set(spec.settings)):
            allowed = ", ".join(spec.settings) or "none"
            msg = f"losses.stable_reinforce_config: {unknown[0]!r} is not a setting of {name!r}; allowed: {allowed}"
            raise ConfigError(msg)
        if lacking := sorted(set(spec.required_config) - config.keys()):
            msg = f"losses.stable_reinforce_config: {lacking[0]!r} is missing; {name!r} has no default for it"
            raise ConfigError(msg)
        return cls(loss=spec, config=config)

    def __str__(self) -> str:
        settings = "".join(f", {key} {self.config[key]:g}" for key in sorted(self.config))
        return f"the loss {NAME!r} is computed as {self.loss.name!r}{settings}: its own objective is not public"

    def inputs(self, datum: pb.Datum, loss_inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the loss's inputs. Raises UserError if the spans do not fit the tokens."""
        length = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
        _sampled("model_input_spans", datum.model_input_spans, length)
        targets, advantages = loss_inputs.get("target_tokens"), loss_inputs.get("advantages")
        length = length if targets is None else len(targets)
        sampled = _sampled("loss_fn_input_spans", datum.loss_fn_input_spans, length)
        if advantages is not None and advantages.shape == sampled.shape and (stray := advantages[sampled == 0]).any():
            position = int(np.flatnonzero((advantages != 0) & (sampled == 0))[0])
            msg = (
                f"loss_fn_inputs: advantages holds {stray[stray != 0][0]} at position {position}, whose target was not "
                f"sampled; {NAME!r} takes advantages of sampled tokens alone"
            )
            raise UserError(msg)
        wants_mask = _MASK in self.loss.inputs or corrections.ROLLOUT in loss_inputs
        return {**loss_inputs, _MASK: sampled} if wants_mask else loss_inputs


def refuse(what: str) -> UnsupportedError:
    """Return the error of a server on which nothing stands in."""
    return UnsupportedError(
        f"{what} is not offered: the objective of the loss {NAME!r} is not public, and this server's operator has "
        "named no other loss to stand in for it (`losses.stable_reinforce`); train with another loss (ppo, gspo, "
        "cispo, importance_sampling)"
    )


def _sampled(what: str, spans: Iterable[pb.ProvenanceSpan], length: int) -> FloatArray:
    """Return 1 for sampled tokens, and 0 for prompts' tokens."""
    runs = []
    for span in spans:
        kind = span.WhichOneof("span")
        run = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
        if kind is None or not run.sequence_id or run.offset < 0 or not 0 <= run.length <= length:
            msg = (
                f"{what}: a span of {run.length} tokens from {run.offset} on of {run.sequence_id[:100]!r} is none; it "
                f"needs a sequence_id, an offset of at least 0 and a length of 0 to {length}"
            )
            raise UserError(msg)
        runs.append((float(kind == "sampled_tokens"), run.length))
    covered = sum(number for _, number in runs)
    if covered != length:
        msg = f"{what} cover {covered} of {length} tokens; {NAME!r} needs the provenance of each"
        raise UserError(msg)
    return np.repeat(np.array([sampled for sampled, _ in runs], np.float32), [number for _, number in runs])
