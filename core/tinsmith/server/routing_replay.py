"""Routing replay: a training operation takes along the experts with which its sequences were sampled.

The client sends tokens alone. A datum whose tokens this tenant has sampled from this model gets their experts, before
the operation is recorded. So whatever runs it, or replays it after a crash, finds the same experts in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from tinsmith import operations as ops
from tinsmith.server.context import ServerContext
from tinsmith.server.known import KnownRun
from tinsmith.store import NewOperation
from tinsmith.store.codec import decode_operation, decoded_bytes, encode_operation
from tinsmith.store.routed_experts import decode_experts, digest_of

_NONE: Final = np.zeros((0, 0, 0), np.uint16)

Digests = Sequence[tuple[bytes, ...]]
"""For each datum, the sequences that it could be, best first: its tokens; or all but the last, which was then sampled
but computed nothing, and its experts are the trainer's choice."""


def is_replayed(context: ServerContext, new: NewOperation) -> bool:
    models = (model for model in context.settings.models if model.name == new.base_model)
    on = any(model.routing_replay.enabled for model in models)
    return on and new.refused is None and new.kind in {"forward", "forward_backward"}


async def with_routed_experts(context: ServerContext, run: KnownRun, new: NewOperation) -> NewOperation:
    """Return the operation with the experts that are found. Its digest stays that of what the client has sent."""
    size = new.num_bytes
    digests = await context.heavy.run(run.tenant, size, partial(_digests, new))
    wanted = list(dict.fromkeys(digest for each in digests for digest in each))
    found = await context.store.find_routed_experts(run.tenant, run.model_id, wanted)
    matched = sum(any(digest in found for digest in each) for each in digests)
    for outcome, number in (("replayed", matched), ("own_routing", len(digests) - matched)):
        labels = {"base_model": new.base_model, "kind": new.kind, "outcome": outcome}
        context.metrics.routing_replay.labels(**labels).inc(number)
    size += sum(map(len, found.values()))
    return await context.heavy.run(run.tenant, size, partial(_with_experts, new, digests, found))


def _digests(new: NewOperation) -> Digests:
    return [
        (digest_of(datum.tokens_T), *([digest_of(datum.tokens_T[:-1])] if len(datum.tokens_T) > 1 else []))
        for datum in _decoded(new).data
    ]


def _with_experts(new: NewOperation, digests: Digests, found: Mapping[bytes, bytes]) -> NewOperation:
    operation = _decoded(new)
    experts = [next((decode_experts(found[each]) for each in own if each in found), _NONE) for own in digests]
    data = [replace(datum, routed_experts=each) for datum, each in zip(operation.data, experts, strict=True)]
    operation = replace(operation, data=tuple(data))
    return replace(new, payload=encode_operation(operation), num_bytes=decoded_bytes(operation))


def _decoded(new: NewOperation) -> ops.ForwardBackward:
    operation = decode_operation(new.kind, new.payload)
    assert isinstance(operation, ops.ForwardBackward)
    return operation
