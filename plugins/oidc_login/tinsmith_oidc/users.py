"""Who somebody is on this server, by the claims of a token."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tinsmith import AuthenticationError, Principal
from tinsmith_oidc.config import OidcConfig

_MOST_CHARS: Final = 200

Claims = Mapping[str, Any]
"""Any: what a provider says. Read it by the functions of this module."""


def principal_of(claims: Claims, config: OidcConfig) -> Principal:
    """Raises AuthenticationError if the user may not sign in, or has no tenant."""
    allowed = config.allow_claim
    if allowed is not None and not _has_one(claims, allowed, config.allow_values):
        msg = (
            f"your account may not use this server: its claim {allowed!r} has none of the values in login.allow_values"
        )
        raise AuthenticationError(msg)
    admin = config.admin_claim is not None and _has_one(claims, config.admin_claim, config.admin_values)
    return Principal(tenant=_tenant(claims, config.tenant_claim), name=_name(claims), admin=admin)


def _tenant(claims: Claims, claim: str) -> str:
    value = _value(claims, claim)
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARS or not value.isprintable():
        msg = (
            f"the claim {claim!r} of your account is no text of 1 to {_MOST_CHARS} printable characters, so it names "
            "no tenant; set login.tenant_claim and login.scopes to what the provider sends"
        )
        raise AuthenticationError(msg)
    if claim == "email" and claims.get("email_verified") is not True:
        msg = "the provider has not verified your email address, which names your tenant; verify it there"
        raise AuthenticationError(msg)
    return value


def _name(claims: Claims) -> str:
    """Return a name to show: it decides nothing."""
    names = (claims.get(claim) for claim in ("email", "preferred_username", "name", "sub"))
    return next((name[:_MOST_CHARS] for name in names if isinstance(name, str) and name.isprintable()), "")


def _has_one(claims: Claims, claim: str, values: Sequence[str]) -> bool:
    value = _value(claims, claim)
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return any(each in values for each in found if isinstance(each, str))


def _value(claims: Claims, claim: str) -> object:
    """Return the claim of that name, or else the nested one that its dots lead to, such as `realm_access.roles`."""
    if claim in claims:
        return claims[claim]
    found: object = claims
    for part in claim.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
