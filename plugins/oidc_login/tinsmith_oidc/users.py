"""Who somebody is on this server, by the claims of a token.

A claim that decides something must come from the provider, not from the user. An address counts only if the provider
has verified it; `config.py` refuses the names of claims in which users describe themselves.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tinsmith import AuthenticationError, Principal
from tinsmith.logins import LONGEST, Login
from tinsmith_oidc.config import OidcConfig

_MOST_CHARS: Final = 200
_ADDRESS: Final = re.compile(r"(?:.*[./:])?(?:e?mails?|e?mail_?address(?:es)?|phone(?:_?numbers?)?)", re.IGNORECASE)
"""Claims whose values users write themselves, until the provider has sent something there."""

Claims = Mapping[str, Any]
"""Any: what a provider says. Read it by the functions of this module."""


class NotAllowedError(AuthenticationError):
    """The provider knows the account, and it may not use this server."""


def account_of(claims: Claims, config: OidcConfig) -> str:
    """Return the name of an account here. It says nothing of the account, and does not change with its claims."""
    return hashlib.sha256(f"{config.issuer}\0{claims['sub']}".encode()).hexdigest()[:32]


def login_of(token: str, claims: Claims, config: OidcConfig) -> Login:
    """Return the login that a bearer token is: what is made with it ends with it."""
    began_at, expires_at = (datetime.fromtimestamp(int(claims[name]), UTC) for name in ("iat", "exp"))
    return Login(
        login_id=hashlib.sha256(token.encode()).hexdigest()[:32],
        account=account_of(claims, config),
        began_at=began_at,
        expires_at=min(expires_at, began_at + LONGEST),
    )


def principal_of(claims: Claims, config: OidcConfig) -> Principal:
    """Raises NotAllowedError if the user may not sign in, AuthenticationError if there is no tenant."""
    allowed = config.allow_claim
    if allowed is not None and not _has_one(claims, allowed, config.allow_values):
        msg = (
            f"your account may not use this server: its claim {allowed!r} has none of the values in login.allow_values"
            f"{_unverified(claims, allowed)}"
        )
        raise NotAllowedError(msg)
    admin = config.admin_claim is not None and _has_one(claims, config.admin_claim, config.admin_values)
    return Principal(tenant=_tenant(claims, config.tenant_claim), name=_name(claims), admin=admin)


def with_user_info(id_token: Claims, user_info: Claims) -> Claims:
    """Return the claims of both; those of the ID token count first.

    Whether a claim is verified, only the source of its value can say. If both have it, neither may deny it.
    """
    merged = {**user_info, **id_token}
    for name in [each for each in merged if f"{each}_verified" in merged]:
        sources = [source for source in (id_token, user_info) if name in source and source[name] == merged[name]]
        said = [source[f"{name}_verified"] for source in sources if f"{name}_verified" in source]
        merged[f"{name}_verified"] = bool(said) and all(each is True for each in said)
    return merged


def _tenant(claims: Claims, claim: str) -> str:
    value = _value(claims, claim)
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARS or not value.isprintable():
        msg = (
            f"the claim {claim!r} of your account is no text of 1 to {_MOST_CHARS} printable characters, so it names "
            "no tenant; set login.tenant_claim and login.scopes to what the provider sends"
        )
        raise AuthenticationError(msg)
    if not _is_verified(claims, claim):
        msg = (
            f"the provider has not verified the claim {claim!r} of your account, which names your tenant; verify it "
            "there"
        )
        raise AuthenticationError(msg)
    return value


def _name(claims: Claims) -> str:
    """Return a name to show and to log: it decides nothing, and an address in it is verified."""
    usable = (claim for claim in ("email", "preferred_username", "name", "sub") if _is_verified(claims, claim))
    names = (claims.get(claim) for claim in usable)
    return next((name[:_MOST_CHARS] for name in names if isinstance(name, str) and name.isprintable()), "")


def _has_one(claims: Claims, claim: str, values: Sequence[str]) -> bool:
    if not _is_verified(claims, claim):
        return False
    value = _value(claims, claim)
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return any(each in values for each in found if isinstance(each, str))


def _is_verified(claims: Claims, claim: str) -> bool:
    """Return whether the provider stands for a claim: for an address, only if the claim beside it says so."""
    verified = _value(claims, f"{claim}_verified")
    return verified is True or (verified is None and _ADDRESS.fullmatch(claim) is None)


def _unverified(claims: Claims, claim: str) -> str:
    return "" if _is_verified(claims, claim) else ", or the provider has not verified it; verify it there"


def _value(claims: Claims, claim: str) -> object:
    """Return the claim of that name, or else the nested one that its dots lead to, such as `realm_access.roles`."""
    if claim in claims:
        return claims[claim]
    found: object = claims
    for part in claim.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
