"""Every claim that a setting reads: what the provider does not stand for decides nothing."""

from typing import Any

import pytest
from pydantic import ValidationError

from tinsmith import AuthenticationError, Principal
from tinsmith_oidc.config import CHOSEN_BY_USERS, OidcConfig
from tinsmith_oidc.users import principal_of, with_user_info

SETTINGS = ("tenant_claim", "admin_claim", "allow_claim")
ROOT = "root@example.org"


def config(**options: Any) -> OidcConfig:
    return OidcConfig.model_validate({"issuer": "https://id.example", "client_id": "a", **options})


def reading(setting: str, claim: str, *values: str, **more: Any) -> OidcConfig:
    """Return settings of which one decides by a claim."""
    name = setting.removesuffix("_claim")
    return config(**{setting: claim}, **({} if name == "tenant" else {f"{name}_values": values}), **more)


def decided(setting: str, settings: OidcConfig, claims: dict[str, Any]) -> bool:
    """Return whether the claim that the setting names got the user what it can give."""
    try:
        found = principal_of({"sub": "mallory", **claims}, settings)
    except AuthenticationError:
        return False
    return found.admin if setting == "admin_claim" else True


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("claim", "claims", "counts"),
    [
        ("email", {"email": ROOT, "email_verified": True}, True),
        ("email", {"email": ROOT, "email_verified": False}, False),
        ("email", {"email": ROOT}, False),
        ("email", {"email": ROOT, "email_verified": "true"}, False),
        ("email", {"email": ROOT, "email_verified": 1}, False),
        ("email", {"email": ROOT, "emailVerified": True}, False),
        ("email", {"email": ROOT.upper(), "email_verified": True}, None),
        ("Email", {"Email": ROOT, "email_verified": True}, False),
        ("mail", {"mail": ROOT}, False),
        ("email_address", {"email_address": ROOT}, False),
        ("emails", {"emails": [ROOT]}, False),
        ("emails", {"emails": [ROOT], "email_verified": True}, False),
        ("user.email", {"user": {"email": ROOT}, "email_verified": True}, False),
        ("user.email", {"user": {"email": ROOT, "email_verified": True}}, True),
        ("https://id.example/email", {"https://id.example/email": ROOT}, False),
        (
            "https://id.example/email",
            {"https://id.example/email": ROOT, "https://id.example/email_verified": True},
            True,
        ),
        ("phone_number", {"phone_number": ROOT}, False),
        ("phone_number", {"phone_number": ROOT, "phone_number_verified": True}, True),
        ("department", {"department": ROOT, "department_verified": False}, False),
        ("department", {"department": ROOT}, True),
    ],
)
def test_what_is_not_verified_decides_nothing(
    setting: str, claim: str, claims: dict[str, Any], counts: bool | None
) -> None:
    """`None`: it is a tenant of its own, and no administrator."""
    expected = setting == "tenant_claim" if counts is None else counts
    assert decided(setting, reading(setting, claim, ROOT), claims) is expected


@pytest.mark.parametrize("setting", ["admin_claim", "allow_claim"])
def test_values_are_compared_whole(setting: str) -> None:
    settings = reading(setting, "groups", "admins")
    for wrong in ("admins people", "Admins", "admins ", ["Admins"], [["admins"]], {"admins": True}, True, None, [None]):
        assert not decided(setting, settings, {"groups": wrong}), wrong
    for right in ("admins", ["people", "admins"]):
        assert decided(setting, settings, {"groups": right}), right


@pytest.mark.parametrize("setting", SETTINGS)
def test_claims_that_users_choose_are_refused_unless_they_are_trusted(setting: str) -> None:
    for claim in (*CHOSEN_BY_USERS, "user.nickname", "https://id.example/name", "UPN"):
        with pytest.raises(ValidationError, match=f"{setting} is '{claim}', which users choose themselves"):
            reading(setting, claim, "root")
        settings = reading(setting, claim, "root", trusted_claims=[claim])
        assert decided(setting, settings, {claim: "root", "user": {"nickname": "root"}})
    assert not decided(setting, reading(setting, "email", ROOT, trusted_claims=["email"]), {"email": ROOT})


@pytest.mark.parametrize(
    ("id_token", "user_info", "verified"),
    [
        ({"email": ROOT}, {"email": ROOT, "email_verified": True}, True),
        ({}, {"email": ROOT, "email_verified": True}, True),
        ({"email": ROOT, "email_verified": True}, {}, True),
        ({"email": ROOT, "email_verified": True}, {"email": "new@example.org", "email_verified": False}, True),
        ({"email": ROOT, "email_verified": True}, {"email": ROOT, "email_verified": False}, False),
        ({"email": ROOT}, {"email": "own@example.org", "email_verified": True}, False),
        ({"email": ROOT}, {"email_verified": True}, False),
        ({"email_verified": True}, {"email": ROOT}, False),
        ({"email_verified": True}, {"email": ROOT, "email_verified": False}, False),
    ],
)
def test_one_source_does_not_verify_the_address_of_another(
    id_token: dict[str, Any], user_info: dict[str, Any], verified: bool
) -> None:
    claims = with_user_info({"sub": "mallory", **id_token}, {"groups": ["people"], **user_info})
    assert decided("admin_claim", reading("admin_claim", "email", ROOT), dict(claims)) is verified
    assert claims["groups"] == ["people"]


def test_a_name_in_the_audit_log_is_no_address_that_nobody_verified() -> None:
    assert principal_of({"sub": "m", "email": ROOT}, config()) == Principal(tenant="m", name="m")
    assert principal_of({"sub": "m", "email": ROOT, "email_verified": True}, config()).name == ROOT
