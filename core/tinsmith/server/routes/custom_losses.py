"""Losses that clients send as graphs.

The id of a loss is also the id of the request that creates it, which is done at once.
"""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from tinsmith.errors import NotFoundError
from tinsmith.hook_values import Principal
from tinsmith.operations import CustomLoss
from tinsmith.protocol import translate, wire
from tinsmith.server.auth import Caller, own_known_session, own_session
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.kept import KnownRun
from tinsmith.server.routes.sessions import refuse_ended
from tinsmith.store.codec import decode_custom_loss, encode_custom_loss
from tinsmith.store.refusals import custom_loss_id, missing

router = APIRouter(prefix=API_PREFIX, tags=["training"], route_class=JsonRoute)


@router.post("/create_custom_loss", response_model_exclude_none=True)
async def create_custom_loss(body: wire.CreateCustomLossRequest, caller: Caller, context: Context) -> wire.Submitted:
    """Check a loss and keep it. Whatever is wrong with its graph is an HTTP error."""
    session = await own_session(context, caller, body.session_id)
    refuse_ended(session)
    content = encode_custom_loss(translate.custom_loss(body))
    await context.store.create_custom_loss(session.session_id, body.custom_loss_seq_id, content)
    return wire.Submitted(request_id=custom_loss_id(session.session_id, body.custom_loss_seq_id))


async def created(context: ServerContext, caller: Principal, session_id: str, number: int) -> JSONResponse:
    """Answer the poll for the request that created a loss."""
    loss_id = custom_loss_id(session_id, number)
    try:
        await own_known_session(context, caller, session_id)
    except NotFoundError as error:
        raise missing("custom loss", loss_id) from error
    await context.store.get_custom_loss(session_id, number)
    return JSONResponse(wire.CustomLossCreated(loss_id=loss_id).model_dump())


async def loss_for(context: ServerContext, run: KnownRun, loss_id: str) -> CustomLoss:
    """Return a loss for a model. Raises NotFoundError if its session has none of this id."""
    session_id, number = translate.custom_loss_of(loss_id) or ("", 0)
    if session_id != run.session_id:
        raise missing("custom loss", loss_id)
    return decode_custom_loss(await context.store.get_custom_loss(session_id, number))
