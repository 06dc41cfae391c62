"""Results, by long polls. Each ends before the SDK gives up, and tells what the result waits for."""

import asyncio
import random
from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tinsmith.errors import ServerError
from tinsmith.hook_values import Principal
from tinsmith.operations import Failed
from tinsmith.protocol import answers, wire
from tinsmith.protocol.json_results import answer_in_json
from tinsmith.server.auth import Caller, expect_readable_operation, own_operation, polled_sampler
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import DirectRoute, JsonRoute
from tinsmith.server.request_trace import note_answered
from tinsmith.server.results import as_told, finished_result
from tinsmith.server.waiting_reasons import reason_of, with_causes
from tinsmith.stopping import unless_stopped
from tinsmith.store import FinishedSample, OperationRecord

router = APIRouter(prefix=API_PREFIX, tags=["futures"], route_class=JsonRoute)

INLINE_BYTES: Final = 4 << 20
"""Larger results are announced by their size first, so that the SDK can limit its parallel downloads."""
_SHORTEST: Final = 0.5  # of `server.long_poll_s`
_DAMPING_S: Final = 1.0
"""The SDK repeats a poll that got a 5xx at once and without end, which would flood a store that is down."""

_COMPLETIONS: Final = 1000
"""The most in one answer. The client fetches the rest at once, with the next cursor."""


async def retrieve_future(
    request: Request, body: wire.RetrieveFutureRequest, caller: Caller, context: Context
) -> Response:
    try:
        await expect_readable_operation(context, caller, body.request_id)
        operation = await _wait(context, body.request_id)
        if not operation.state.is_finished:
            return await _still_pending(context, caller, operation)
    except ServerError as error:
        if error.http_status >= 500:
            await asyncio.sleep(_DAMPING_S)
        raise
    note_answered(operation)
    size = len(operation.result or b"")
    if body.allow_metadata_only and size > INLINE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    encode = answer_in_json if _wants_json(request) else answers.answer
    answer = await finished_result(operation, encode)
    if isinstance(answer, Failed):  # a 200 with `error` and `category`, which the SDK turns into a typed exception
        answer = answers.answer(await as_told(context, caller, answer))
    return Response(answer.body, media_type=answer.media_type)


def _wants_json(request: Request) -> bool:
    """Return whether JSON is asked for by name. Whoever accepts anything gets what the SDK gets."""
    accepted = request.headers.get("accept", "")
    return answers.JSON in accepted and answers.PROTOBUF not in accepted


router.add_api_route("/retrieve_future", retrieve_future, methods=["POST"], route_class_override=DirectRoute)


@router.post("/retrieve_futures", response_model_exclude_none=True)
async def retrieve_futures(
    body: wire.RetrieveFuturesRequest, caller: Caller, context: Context
) -> wire.FuturesRetrieved:
    """List which of a sampling client's requests have finished since its last poll. The cursor moves only with them."""
    target = body.target
    await polled_sampler(context, caller, target.sampling_session_id)
    find = partial(
        context.store.finished_samples,
        target.sampling_session_id,
        target.cloned_sampler_id,
        after=body.prev_cursor,
        limit=_COMPLETIONS,
    )
    hold_s = spread_hold_s(context)
    timeout_s = hold_s if body.timeout is None else min(hold_s, body.timeout)
    found = (
        await unless_stopped(context.stopping, find(timeout_s=timeout_s)) if timeout_s > 0 else await find(timeout_s=0)
    )
    if found is None:
        return wire.FuturesRetrieved(completions=[], cursor=body.prev_cursor)
    return wire.FuturesRetrieved(completions=[_completion(sample) for sample in found.samples], cursor=found.cursor)


def _completion(sample: FinishedSample) -> wire.FutureCompletion:
    if not sample.succeeded:
        return wire.FutureCompletion(state="failed", request_id=sample.request_id)
    return wire.FutureCompletion(
        state="finished", request_id=sample.request_id, response_payload_uncompressed_size=sample.size_bytes
    )


@router.post("/cancel_future")
async def cancel_future(body: wire.CancelFutureRequest, caller: Caller, context: Context) -> dict[str, str]:
    """Cancel a sample. A training request is part of its model's history and cannot be cancelled."""
    await own_operation(context, caller, body.request_id)
    operation = await context.store.cancel(body.request_id)
    return {"request_id": operation.request_id, "state": operation.state.value}


async def _wait(context: ServerContext, request_id: str) -> OperationRecord:
    found = await unless_stopped(context.stopping, context.store.wait_for(request_id, spread_hold_s(context)))
    return await context.store.get_operation(request_id) if found is None else found


def spread_hold_s(context: ServerContext) -> float:
    """Return how long to hold a poll: it differs, or thousands that began together would come back together."""
    return context.settings.server.long_poll_s * random.uniform(_SHORTEST, 1)


async def _still_pending(context: ServerContext, caller: Principal, operation: OperationRecord) -> JSONResponse:
    engines = await context.engines.records()
    reason = await reason_of(operation, context.store, engines, context.settings.quotas)
    content = {
        "type": "try_again",
        "request_id": operation.request_id,
        "queue_state": reason.queue_state,
        "queue_state_reason": with_causes(reason.text, engines.values(), operator=context.is_operator(caller)),
    }
    return JSONResponse(content, 408)
