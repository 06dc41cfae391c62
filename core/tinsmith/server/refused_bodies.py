"""A training request whose body does not fit its model keeps its number all the same.

Otherwise what the client sends after it would wait for a seq_id that never comes.
"""

from collections.abc import Mapping
from typing import Final

from fastapi import Request
from fastapi.responses import JSONResponse

from tinsmith import operations as ops
from tinsmith.errors import UserError
from tinsmith.server.auth import authenticated, own_run
from tinsmith.server.context import context_of
from tinsmith.server.submitting import submit_training

_KINDS: Final[Mapping[str, str]] = {
    "optim_step": "optim_step",
    "save_weights": "save_state",
    "save_weights_for_sampler": "save_for_sampler",
    "save_weights_external": "export_adapter",
    "load_weights": "load_state",
}


async def record_refusal(request: Request, body: object, detail: str) -> JSONResponse | None:
    """Record a failed operation and answer its submit; None where the body does not say whose it is."""
    kind = _KINDS.get(request.url.path.rpartition("/")[2])
    if kind is None or not isinstance(body, dict):
        return None
    model_id, seq_id = body.get("model_id"), body.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int or not 1 <= seq_id < 2**31:
        return None

    def build() -> ops.TrainingOperation:
        raise UserError(detail)

    context = context_of(request)
    run = await own_run(context, authenticated(request, context), model_id)
    submitted = await submit_training(context, run, seq_id, kind=kind, build=build)
    return JSONResponse(submitted.model_dump(exclude_none=True))
