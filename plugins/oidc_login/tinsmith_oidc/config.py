"""The settings of the login: the keys of `login:` beside `plugin: oidc`."""

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

import tinsmith
from tinsmith import ConfigError, Settings

CHOSEN_BY_USERS = frozenset(
    {
        *("name", "given_name", "family_name", "middle_name", "nickname", "preferred_username", "profile", "picture"),
        *("website", "gender", "birthdate", "zoneinfo", "locale", "address", "updated_at", "username", "login"),
        *("upn", "unique_name", "display_name", "displayname"),  # Entra's, which it says not to decide by
    }
)
"""Claims in which users describe themselves (OpenID Connect Core 1.0, 5.1 and 5.7), or that pass to somebody else."""


class OidcConfig(tinsmith.BackendConfig):
    issuer: str = Field(
        description="URL of the provider, under which it answers `/.well-known/openid-configuration`; it must be "
        "https, except on this machine"
    )
    client_id: str = Field(min_length=1, description="name under which the provider knows this server")
    client_secret: SecretStr | None = Field(
        None, description="secret of this client; default: none, for a public client, which PKCE alone protects"
    )
    client_secret_file: Path | None = Field(None, description="file that holds the secret instead")
    scopes: tuple[str, ...] = Field(
        ("openid", "profile", "email"), description="scopes to ask for; they decide which claims an ID token has"
    )
    audience: str | None = Field(
        None, description="audience of access tokens that scripts send as bearer tokens; default: `client_id`"
    )
    tenant_claim: str = Field(
        "sub",
        description="claim whose value is the user's tenant. Here and below, `email` counts only if the provider has "
        "verified it, and claims that users choose, such as `preferred_username`, are refused",
    )
    admin_claim: str | None = Field(
        None, description="claim that makes administrators, such as `groups`; default: nobody becomes one by signing in"
    )
    admin_values: tuple[str, ...] = Field((), description="values of it, of which administrators have at least one")
    allow_claim: str | None = Field(
        None, description="claim that users must have to sign in; default: everybody whom the provider knows may"
    )
    allow_values: tuple[str, ...] = Field((), description="values of it, of which users have at least one")
    trusted_claims: tuple[str, ...] = Field(
        (),
        description="claims that users choose at other providers, and at this one cannot: they may be named above. "
        "Addresses need to be verified all the same",
    )
    session_s: int = Field(
        8 * 3600,
        ge=1,
        le=366 * 86400,
        description="seconds after which a browser must sign in again; the provider may not ask again",
    )

    @field_validator("issuer")
    @classmethod
    def _is_safe(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme == "https" or (parts.scheme == "http" and _is_this_machine(parts.hostname or "")):
            return value
        msg = f"issuer is {value!r}; it must be an https URL, or an http URL on this machine"
        raise ValueError(msg)

    @field_validator("scopes")
    @classmethod
    def _asks_for_an_identity(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "openid" in value:
            return value
        msg = f"scopes are {list(value)}; they must include 'openid', or the provider says nothing of the user"
        raise ValueError(msg)

    @model_validator(mode="after")
    def _goes_together(self) -> "OidcConfig":
        if self.client_secret is not None and self.client_secret_file is not None:
            msg = "client_secret and client_secret_file are both set; keep one of them"
            raise ValueError(msg)
        for name in ("admin", "allow"):
            claim, values = getattr(self, f"{name}_claim"), getattr(self, f"{name}_values")
            if (claim is None) != (not values):
                msg = f"{name}_claim is {claim!r} and {name}_values are {list(values)}; set both or neither"
                raise ValueError(msg)
        for name in ("tenant_claim", "admin_claim", "allow_claim"):
            _expect_of_provider(name, getattr(self, name), self.trusted_claims)
        return self

    def secret(self) -> str | None:
        """Return the client's secret. Raises ConfigError if its file cannot be read."""
        if self.client_secret_file is None:
            return None if self.client_secret is None else self.client_secret.get_secret_value()
        try:
            return self.client_secret_file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            msg = f"login.client_secret_file: cannot read {str(self.client_secret_file)!r}: {error}"
            raise ConfigError(msg) from error


def check(config: OidcConfig) -> Iterator[str]:
    """Yield why the client's secret cannot be read."""
    try:
        config.secret()
    except ConfigError as error:
        yield str(error)


def config_of(settings: Settings) -> OidcConfig | None:
    """Return the settings of this login; None if another plugin, or none, is configured. Raises ConfigError."""
    if settings.login is None or settings.login.plugin != "oidc":
        return None
    try:
        return OidcConfig.model_validate(settings.login.options())
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(('login', *map(str, each['loc'])))}: {each['msg']}" for each in error.errors())
        raise ConfigError(found) from None  # the values may be secrets


def _expect_of_provider(setting: str, claim: str | None, trusted: tuple[str, ...]) -> None:
    if claim is not None and claim not in trusted and re.split("[./:]", claim)[-1].lower() in CHOSEN_BY_USERS:
        msg = (
            f"{setting} is {claim!r}, which users choose themselves at many providers; use 'sub' or a claim such as "
            f"'groups', or, if only administrators of this provider can change it, add {claim!r} to trusted_claims"
        )
        raise ValueError(msg)


def _is_this_machine(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
