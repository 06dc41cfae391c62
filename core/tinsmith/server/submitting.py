"""From an operation to a row in the log. A submit is answered at once; its result is behind a future.

If the routing is replayed, a training operation takes along the experts with which its sequences were sampled.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from tinsmith import operations as ops
from tinsmith.checks import check_operation
from tinsmith.errors import UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.protocol import translate, wire
from tinsmith.server.context import ServerContext
from tinsmith.server.kept import KnownOwner, KnownRun
from tinsmith.server.request_trace import note_submitted, traced
from tinsmith.store import EngineCapabilities, NewOperation, SamplingSessionRecord
from tinsmith.store.codec import (
    decode_experts,
    decode_operation,
    decoded_bytes,
    digest_of,
    encode_operation,
    kind_of,
    largest_result,
)
from tinsmith.store.refusals import refuse_large_metadata

_NONE: Final = np.zeros((0, 0, 0), np.uint16)

Digests = Sequence[tuple[bytes, ...]]
"""For each datum, the sequences that it could be, best first: its tokens; or all but the last, which was then sampled
but computed nothing, and its experts are the trainer's choice."""


def is_replayed(context: ServerContext, new: NewOperation) -> bool:
    models = (model for model in context.settings.models if model.name == new.base_model)
    on = any(model.routing_replay.enabled for model in models)
    return on and new.refused is None and new.kind in {"forward", "forward_backward"}


async def with_routed_experts(context: ServerContext, run: KnownRun, new: NewOperation) -> NewOperation:
    """Return the operation with the experts that are found. Its digest stays the digest of the client's operation."""
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


async def submit_training(
    context: ServerContext,
    run: KnownRun,
    seq_id: int,
    operation: ops.TrainingOperation,
    *,
    problem: UserError | None = None,
) -> wire.Submitted:
    """Record an operation, as failed if there is a problem or if the backend cannot carry it out."""
    return await submit_decoded(context, run, seq_id, lambda: operation, body_bytes=0, problem=problem)


async def submit_decoded(
    context: ServerContext,
    run: KnownRun,
    seq_id: int,
    decode: Callable[[], ops.TrainingOperation],
    *,
    body_bytes: int,
    problem: UserError | None = None,
) -> wire.Submitted:
    """As `submit_training`, for a body that is still to be decoded.

    The operation exists only while it is decoded, checked, encoded and hashed, in one piece of work. So a process holds
    one large operation at a time, however many bodies it holds.
    """
    capabilities = await context.engines.capabilities(run.base_model)
    prepare = partial(_prepared, context, run, seq_id, decode, capabilities, problem)
    new = await context.heavy.run(run.tenant, body_bytes, prepare)
    if is_replayed(context, new):
        new = _if_it_fits(context, await with_routed_experts(context, run, new))
    if new.refused is None:
        await context.quotas.admit_operation(new)
    return await _submit(context, run, new)


def _prepared(
    context: ServerContext,
    run: KnownRun,
    seq_id: int,
    decode: Callable[[], ops.TrainingOperation],
    capabilities: EngineCapabilities | None,
    problem: UserError | None,
) -> NewOperation:
    """The digest is the operation's in any case, so a repeat finds it even if a problem has come or gone in between."""
    operation = decode()
    refused = None if problem is None else _failed(problem)
    try:
        if capabilities is not None:
            check_operation(operation, capabilities, context.losses)
        refuse_unstorable(operation, context.store.max_value_bytes)
    except UserError as error:
        refused = refused or _failed(error)
    return _if_it_fits(context, new_training_operation(run, seq_id, operation, refused=refused))


def _failed(error: UserError) -> ops.Failed:
    return ops.Failed(message=str(error), category=error.category)


def _if_it_fits(context: ServerContext, new: NewOperation) -> NewOperation:
    """Return the operation, or its refusal if the store cannot hold its payload."""
    try:
        refuse_large_payload(new.payload, context.store.max_value_bytes)
    except UserError as error:
        return replace(new, payload=b"", refused=_failed(error))
    return new


async def submit_refusal(context: ServerContext, run: KnownRun, seq_id: int, kind: str, message: str) -> wire.Submitted:
    """Record a request that became no operation, as failed. Its message stands in for its content when it repeats."""
    return await _submit(
        context,
        run,
        NewOperation(
            base_model=run.base_model,
            kind=kind,
            tenant=run.tenant,
            session_id=run.session_id,
            subject_id=run.model_id,
            seq_id=seq_id,
            ordered=True,
            payload=b"",
            digest=hashlib.sha256(f"{kind}\0{message}".encode()).digest(),
            refused=ops.Failed(message=message, category="user"),
        ),
    )


@durable_boundary("server.submit")
async def _submit(context: ServerContext, run: KnownRun, operation: NewOperation) -> wire.Submitted:
    operation = traced(operation)
    request_id = await context.store.submit(operation)
    accepted(context, operation, request_id)
    return wire.Submitted(request_id=request_id, model_id=run.model_id)


def new_training_operation(
    run: KnownRun, seq_id: int, operation: ops.TrainingOperation, *, refused: ops.Failed | None = None
) -> NewOperation:
    num_tokens = operation.num_tokens if isinstance(operation, ops.ForwardBackward) else 0
    return _new(operation, run, run.model_id, seq_id, ordered=True, num_tokens=num_tokens, refused=refused)


def _new(
    operation: ops.Operation,
    owner: KnownRun | SamplingSessionRecord,
    subject_id: str,
    seq_id: int,
    *,
    ordered: bool,
    num_tokens: int,
    refused: ops.Failed | None = None,
) -> NewOperation:
    return NewOperation(
        base_model=owner.base_model,
        kind=kind_of(operation),
        tenant=owner.tenant,
        session_id=owner.session_id,
        subject_id=subject_id,
        seq_id=seq_id,
        ordered=ordered,
        payload=b"" if refused is not None else encode_operation(operation),
        digest=translate.digest(operation),
        num_tokens=num_tokens,
        num_bytes=decoded_bytes(operation),
        refused=refused,
    )


async def submit_sample(
    context: ServerContext,
    sampler: SamplingSessionRecord,
    seq_id: int,
    decode: Callable[[], ops.Sample],
    *,
    body_bytes: int,
) -> str:
    """Submit a sample of a sampling session, and return its request_id. Raises UserError if it is refused.

    As with `submit_decoded`, the operation exists only while it is decoded, checked and encoded.
    """
    capabilities = await context.engines.capabilities(sampler.base_model)
    prepare = partial(_prepared_sample, context, sampler, seq_id, decode, capabilities)
    new = await context.heavy.run(sampler.tenant, body_bytes, prepare)
    await context.quotas.admit_sample(new)
    new = traced(new)
    request_id = await context.store.submit(new)
    accepted(context, new, request_id)
    return request_id


def _prepared_sample(
    context: ServerContext,
    sampler: SamplingSessionRecord,
    seq_id: int,
    decode: Callable[[], ops.Sample],
    capabilities: EngineCapabilities | None,
) -> NewOperation:
    operation = decode()
    if capabilities is not None:
        check_operation(operation, capabilities, context.losses)
    refuse_unstorable(operation, context.store.max_value_bytes)
    num_tokens = len(operation.prompt_P) + operation.num_samples * operation.params.max_tokens
    new = _new(operation, sampler, operation.sampling_session_id, seq_id, ordered=False, num_tokens=num_tokens)
    refuse_large_payload(new.payload, context.store.max_value_bytes)
    return new


def accepted(context: ServerContext, operation: NewOperation, request_id: str) -> None:
    """Count an operation that has been submitted. Its client asks for its result next, most likely here."""
    context.requests.note(request_id, KnownOwner(operation.tenant))
    note_submitted(operation, request_id)
    labels = {"base_model": operation.base_model, "kind": operation.kind}
    context.metrics.submitted.labels(**labels).inc()
    context.metrics.tokens.labels(**labels).inc(operation.num_tokens)
    if operation.refused is not None:
        context.refusal_log.tell(
            f"{operation.kind} {request_id}", operation.refused.category, operation.tenant, run=operation.subject_id
        )


# What the store could not hold is refused before it is queued ---------------------------------------------------------


def refuse_unstorable(operation: ops.Operation, max_bytes: int) -> None:
    """Raises UserError if the result could take more than `max_bytes` in the store, or the metadata are too large."""
    if isinstance(operation, ops.SaveState | ops.SaveForSampler):
        refuse_large_metadata(operation.user_metadata)
    size = largest_result(operation)
    if size > max_bytes:
        msg = f"the result could take {size} bytes, and this server stores at most {max_bytes}; {_remedy(operation)}"
        raise UserError(msg)


def refuse_large_payload(payload: bytes, max_bytes: int) -> None:
    """Raises UserError if the encoded operation takes more than `max_bytes`."""
    if len(payload) > max_bytes:
        msg = (
            f"the request takes {len(payload)} bytes in the store, and this server stores at most {max_bytes}; "
            "send less in one request"
        )
        raise UserError(msg)


def _remedy(operation: ops.Operation) -> str:
    if not isinstance(operation, ops.Sample):
        return "send fewer sequences, or fewer targets per token, in one request"
    return (
        f"it is for num_samples {operation.num_samples} x max_tokens {operation.params.max_tokens} x (1 + "
        f"topk_sample_logprobs {operation.topk_sample_logprobs}), and {len(operation.prompt_P)} prompt tokens x "
        f"(topk_prompt_logprobs {operation.topk_prompt_logprobs} + prompt_alt_tokens_k "
        f"{operation.prompt_alt_tokens_k}); ask for less of them in one request"
    )
