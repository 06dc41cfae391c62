"""A refused training request keeps its number.

A model's requests run in the order of their seq_id. If a refused request left no trace, all requests behind it would
wait for a number that never comes. So whatever refuses one raises an error, and `record_refusal` records that error as
a failed operation under the number that the body states. It is called for everything that a `NumberedRoute` raises, and
by `Bodies` for bodies that reach no route. If the body states no number of one of the caller's models, the answer is
an HTTP error.
"""

from collections.abc import Mapping
from typing import Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from tinsmith.errors import CapacityError, NotFoundError, UserError
from tinsmith.protocol.proto_scan import address_of, asks_forward_only
from tinsmith.server.auth import identified, own_known_run
from tinsmith.server.context import API_PREFIX, context_of
from tinsmith.server.error_answers import validation_detail
from tinsmith.server.json_routes import Handler, JsonRoute
from tinsmith.server.submitting import submit_refusal

_KINDS: Final[Mapping[str, str]] = {
    f"{API_PREFIX}/forward_backward": "forward_backward",
    f"{API_PREFIX}/optim_step": "optim_step",
    f"{API_PREFIX}/save_weights": "save_state",
    f"{API_PREFIX}/save_weights_for_sampler": "save_for_sampler",
    f"{API_PREFIX}/save_weights_external": "export_adapter",
    f"{API_PREFIX}/load_weights": "load_state",
}
"""The paths whose requests are numbered, and the operations that they ask for."""


class NumberedRoute(JsonRoute):
    """For `APIRouter(route_class=...)`: records what the route refuses."""

    async def answer(self, request: Request, handle: Handler) -> Response:
        try:
            return await handle(request)
        except CapacityError:  # the client sends the same request again
            raise
        except (UserError, RequestValidationError) as error:
            message = str(error) if isinstance(error, UserError) else validation_detail(error)
            recorded = await record_refusal(request, await request.body(), message)
            if recorded is None:
                raise
            return recorded


async def record_refusal(request: Request, body: bytes, message: str) -> Response | None:
    """Record a failed operation and return the answer to its submit; `body` may be only the beginning.

    Returns None if the path is not numbered, or if the body states no number of one of the caller's models.
    """
    kind = _KINDS.get(request.scope["path"])
    address = address_of(body) if kind is not None else None
    if kind is None or address is None:
        return None
    model_id, seq_id = address
    context = context_of(request)
    try:
        run = await own_known_run(context, identified(request.scope, context), model_id)
    except NotFoundError:
        return None
    if kind == "forward_backward" and asks_forward_only(body):
        kind = "forward"  # whose failure spoils no step
    submitted = await submit_refusal(context, run, seq_id, kind, message)
    return JSONResponse(submitted.model_dump(exclude_none=True))
