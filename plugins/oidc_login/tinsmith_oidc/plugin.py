"""The plugin's offers: the routes of the login, and what knows its users."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import tinsmith
from tinsmith.logins import LoginSpec
from tinsmith_oidc.config import OidcConfig, check, config_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import APIRouter


@tinsmith.hookimpl
def tinsmith_register_logins() -> LoginSpec[OidcConfig]:
    return LoginSpec(name="oidc", config=OidcConfig, check=check, description="sign in with OpenID Connect")


@tinsmith.hookimpl
def tinsmith_register_routes(settings: tinsmith.Settings, context: tinsmith.RoutesContext) -> Sequence[APIRouter]:
    """Offer nothing unless `login.plugin` is `oidc`. Raises ConfigError if its settings are wrong."""
    from tinsmith_oidc.cookies import Cookies  # here, since only servers need them
    from tinsmith_oidc.login import Login
    from tinsmith_oidc.provider import Provider
    from tinsmith_oidc.routes import LoginRoutes
    from tinsmith_oidc.sessions import Sessions

    config = config_of(settings)
    if config is None:
        return []
    provider = Provider(config)
    public_url = settings.server.public_url or ""
    cookies = Cookies(
        context.secret,
        purpose=f"{config.issuer} {config.client_id}",
        session_s=config.session_s,
        secure=public_url.startswith("https:"),
        path=urlsplit(public_url).path.rstrip("/") or "/",
    )
    sessions = Sessions(cookies, context)
    context.look_ups.append(sessions.look_up)
    context.logins.append(Login(config, provider, sessions))
    return [LoginRoutes(settings, config, provider, cookies, sessions).router(context)]
