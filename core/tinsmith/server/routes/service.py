"""Requests about the service: configuration, capabilities, health, telemetry, the caller's key."""

import re
from collections.abc import Callable
from typing import Annotated, Final

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response

from tinsmith.errors import UnsupportedError, UserError
from tinsmith.protocol import stable_reinforce, translate, wire
from tinsmith.server.auth import Caller, identified
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.waiting_reasons import last_failure, with_causes
from tinsmith.settings.secrets import cleaned
from tinsmith.store import EngineRecord, EngineState

router = APIRouter(prefix=API_PREFIX, tags=["service"], route_class=JsonRoute)
open_router = APIRouter(tags=["service"])
"""Routes that need no key."""


@router.post("/client/config")
async def client_config(
    body: wire.ClientConfigRequest,
    caller: Caller,
    context: Context,
    x_api_key: Annotated[str, Header()] = "",
    x_stainless_runtime_version: Annotated[str, Header()] = "",
) -> wire.ClientConfig:
    """The first request of every client, sent with its key."""
    del body
    setting = context.settings.server.poll_samples_together
    together = polls_together(x_stainless_runtime_version) if setting == "auto" else setting == "always"
    return wire.ClientConfig(
        pjwt_auth_enabled=context.api_keys.identifies(caller, x_api_key), sample_use_retrieve_futures=together
    )


@router.post("/auth/token")
async def auth_token(caller: Caller, context: Context, x_api_key: Annotated[str, Header()] = "") -> wire.AuthToken:
    """Exchange an API key for a token that is valid in its place for `server.token_lifetime_s`."""
    if not context.api_keys.identifies(caller, x_api_key):
        msg = "tokens are issued only for API keys, and a plugin identified this caller otherwise; use that credential"
        raise UnsupportedError(msg)
    return wire.AuthToken(jwt=context.api_keys.exchange(x_api_key))


def polls_together(python_version: str) -> bool:
    """Return whether an SDK on this Python can be told to poll its samples together.

    On Python 3.11 its `close` sometimes hangs. It cancels its poller, and `asyncio.wait_for` in the transport loses a
    cancellation that coincides with an answer (fixed in Python 3.12).
    """
    found = re.match(r"(\d+)\.(\d+)", python_version)
    return found is not None and (int(found[1]), int(found[2])) >= (3, 12)


@router.post("/client/dynamic_config")
async def dynamic_config(body: wire.ClientConfigRequest, caller: Caller) -> wire.DynamicConfig:
    del body, caller
    return wire.DynamicConfig()


@router.get("/get_server_capabilities", response_model_exclude_none=True)
async def get_server_capabilities(caller: Caller, context: Context) -> wire.ServerCapabilities:
    """List the models. One that has not loaded yet is listed by its name alone."""
    del caller
    records = await context.engines.records()
    return wire.ServerCapabilities(
        supported_models=[_supported(model.name, records.get(model.name)) for model in context.settings.models],
        stand_ins=None if context.stand_in is None else {stable_reinforce.NAME: context.stand_in.loss.name},
    )


def _supported(name: str, record: EngineRecord | None) -> wire.SupportedModel:
    capabilities = record.capabilities if record is not None else None
    if capabilities is None:
        return wire.SupportedModel(model_name=name)
    return wire.SupportedModel(
        model_name=name,
        max_context_length=capabilities.trainer.max_context_tokens,
        trainable=capabilities.trainer.trains,
        sampleable=capabilities.sampler is not None,
        inflight=None if capabilities.sampler is None else capabilities.sampler.inflight,
    )


@router.post("/telemetry")
async def telemetry(body: wire.TelemetryRequest, caller: Caller) -> wire.TelemetryAccepted:
    """Accept and drop telemetry. Without this route, every error in a client would be delayed by 30 s."""
    del body, caller
    return wire.TelemetryAccepted()


@open_router.get("/healthz")
@open_router.get("/api/v1/healthz")
async def healthz() -> wire.Health:
    """Tell that the server answers. /readyz tells whether the models have loaded."""
    return wire.Health()


@open_router.get("/readyz")
@open_router.get("/api/v1/readyz")
async def readyz(request: Request, context: Context) -> Response:
    """Answer 503 until every engine is ready and its sampler works, with the state of each, and while the disk is full.

    How one failed is told to callers with a key, and the cause to administrators and on a server without keys.
    """
    records = await context.engines.records()
    try:
        caller = identified(request.scope, context)
    except UserError:
        caller = None
    operator = context.is_operator(caller)
    engines = {}
    for model in context.settings.models:
        record = records.get(model.name)
        engines[model.name] = (
            {"state": EngineState.STARTING.value}
            if record is None
            else _reported(record, with_failure=operator or caller is not None, operator=operator)
        )
        if (why := context.without_text(model.name)) is not None:
            engines[model.name]["text"] = why
    ready = all(engine["state"] == EngineState.READY and "sampler" not in engine for engine in engines.values())
    trouble = await context.storage.trouble()
    storage = {} if trouble is None else {"storage": cleaned(trouble.to(operator=operator))}
    ready = ready and trouble is None
    content = {"status": "ok" if ready else "waiting", "engines": engines, **storage}
    return JSONResponse(content, 200 if ready else 503)


def _reported(record: EngineRecord, *, with_failure: bool, operator: bool) -> dict[str, str | float | None]:
    """Return what one engine reports. `with_failure`: the caller may know how its last process ended."""
    detail, before = record.detail, last_failure(record)
    if record.state in {EngineState.RESTARTING, EngineState.FAILED} and not with_failure:
        detail = "the reason is in the server's log; send an API key to see it here"
    found = {"state": record.state.value, "detail": with_causes(detail, [record], operator=operator)}
    if before is not None and with_failure:
        found["restarted"] = with_causes(before, [record], operator=operator)
    if record.sampler_trouble is not None:
        found["sampler"] = cleaned(record.sampler_trouble)
    return {**found, "progress": record.progress}


NOT_OFFERED: Final = {
    "POST /forward": "only SDKs up to 0.24 send it: use 0.25 or newer, which sends forward passes to "
    "`forward_backward`",
    "POST /create_custom_loss": translate.CUSTOM_LOSSES_RUN_IN_CLIENTS,
}
"""Endpoints that the SDK has and this server refuses, with the reason and what to do instead."""


def _refusal(path: str, reason: str) -> Callable[[Caller], None]:
    def refuse(caller: Caller) -> None:
        del caller
        msg = f"{path} is not offered by this server: {reason}"
        raise UnsupportedError(msg)

    return refuse


for _call, _reason in NOT_OFFERED.items():
    _method, _, _path = _call.partition(" ")
    router.add_api_route(
        _path,
        _refusal(_path, _reason),
        methods=[_method],
        summary=f"Not offered: {_reason}",
        tags=["not offered"],
    )
