"""API keys over HTTP: a tenant makes, lists and deletes its own; administrators list and delete everybody's.

The key that a request was sent with is `apikey/me`, which `tinker auth login` and `tinker auth logout` ask about.
"""

import secrets
from datetime import datetime, timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from tinsmith.errors import UnsupportedError, UserError
from tinsmith.hook_values import Principal
from tinsmith.protocol import translate, wire
from tinsmith.server.auth import AccessScope, Actor, Caller, visible_tenant
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import JsonRoute
from tinsmith.settings.schema import digest_of_key
from tinsmith.store import IssuedKey
from tinsmith.store.logins import account_in, is_reference, of_account
from tinsmith.store.refusals import missing

router = APIRouter(prefix=f"{API_PREFIX}/auth", tags=["API keys"], route_class=JsonRoute)

_KEY_BYTES: Final = 24


@router.post("/apikeys", response_model_exclude_none=True)
async def make_api_key(
    body: wire.NewApiKey, request: Request, caller: Caller, actor: Actor, context: Context
) -> wire.ApiKey:
    """Make a key for the caller's tenant, without administrators' rights. This answer alone has the key."""
    now = context.now()
    made_with, expires_at = _rests_on(context, caller, request, body, now)
    await context.quotas.admit_api_key(caller.tenant)
    key = f"tml-{secrets.token_urlsafe(_KEY_BYTES)}"
    issued = IssuedKey(
        key_id=context.api_keys.tokens.key_id(digest_of_key(key)),
        tenant=caller.tenant,
        name=body.name,
        note=body.note,
        made_with=made_with,
        created_at=now,
        expires_at=expires_at,
    )
    await context.store.add_api_key(issued, by=actor)
    return _shown(issued).model_copy(update={"key": key})


def _rests_on(
    context: ServerContext, caller: Principal, request: Request, body: wire.NewApiKey, now: datetime
) -> tuple[str, datetime | None]:
    """Return what a new key ends with, and when it ends by itself."""
    if context.api_keys.accept_anybody:
        msg = "this server has no configured keys, so it accepts any; to make keys, configure server.api_keys first"
        raise UnsupportedError(msg)
    asked = None if body.expires_in_s is None else timedelta(seconds=body.expires_in_s)
    if (used := context.api_keys.id_used(caller, request.headers)) is not None:
        if context.api_keys.made_over_http(used) is not None:
            msg = (
                "a key that was made over HTTP makes no others, which would outlive it; use a key of server.api_keys, "
                "or sign in"
            )
            raise UnsupportedError(msg)
        return used, None if asked is None else now + asked
    if asked is None and caller.login is not None:
        return caller.login.reference, caller.login.expires_at
    longest = timedelta(seconds=context.settings.server.made_key_lifetime_s)
    if asked is None or asked > longest:
        msg = (
            f"expires_in_s is {body.expires_in_s}; without a key of server.api_keys, give at most "
            f"{longest.total_seconds():.0f} (server.made_key_lifetime_s)"
        )
        raise UserError(msg)
    return "" if caller.login is None else of_account(caller.login.account, now), now + asked


@router.get("/apikeys", response_model_exclude_none=True)
async def list_api_keys(
    caller: Caller,
    context: Context,
    access_scope: AccessScope = "owned",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> wire.ApiKeys:
    """List keys made over HTTP, newest first, expired ones as well. None shows the key itself."""
    tenant = visible_tenant(caller, access_scope)
    found = await context.store.list_api_keys(tenant, limit=limit, offset=offset)
    return wire.ApiKeys(api_keys=[_shown(each) for each in found])


@router.delete("/apikeys/{key_id}")
async def delete_api_key(key_id: str, caller: Caller, actor: Actor, context: Context) -> dict[str, str]:
    """Delete a key. This server refuses it from now on, others within a second."""
    tenant = None if caller.admin else caller.tenant
    if not await context.store.delete_api_key(key_id, tenant=tenant, by=actor):
        raise missing("API key", key_id)
    _refuse(context, key_id)
    return {"deleted": key_id}


@router.get("/apikey/me")
async def api_key_me(caller: Caller, context: Context, request: Request) -> wire.ApiKeyInfo:
    """Tell about the key that the request was sent with, or about the caller, who signed in otherwise."""
    used = context.api_keys.id_used(caller, request.headers)
    issued = context.api_keys.made_over_http(used) if used is not None else None
    name = caller.name or caller.tenant
    return wire.ApiKeyInfo(
        key_id=translate.checksum(caller.tenant if issued is None else issued.key_id),
        name=name if issued is None else issued.name,
        note="" if issued is None else issued.note,
        details=wire.KeyDetails(
            org_details=wire.OrgDetails(name=caller.tenant), user_details=wire.UserDetails(email=name)
        ),
    )


@router.delete("/apikey/me")
async def delete_own_api_key(caller: Caller, actor: Actor, context: Context, request: Request) -> dict[str, str]:
    """Delete the key that the request was sent with, if it was made over HTTP."""
    used = context.api_keys.id_used(caller, request.headers)
    if used is None or context.api_keys.made_over_http(used) is None:
        msg = (
            "only a key that was made over HTTP can be deleted over HTTP; one of the server's configuration "
            "(server.api_keys) is removed there"
        )
        raise UnsupportedError(msg)
    await context.store.delete_api_key(used, tenant=caller.tenant, by=actor)
    _refuse(context, used)
    return {"deleted": used}


def _refuse(context: ServerContext, key_id: str) -> None:
    if context.api_keys.issued is not None:
        context.api_keys.issued.forget(key_id)


def _shown(key: IssuedKey) -> wire.ApiKey:
    return wire.ApiKey(
        key_id=key.key_id,
        name=key.name,
        note=key.note,
        tenant=key.tenant,
        created_at=key.created_at,
        expires_at=key.expires_at,
        account=account_in(key.made_with) if is_reference(key.made_with) else None,
    )
