"""Authentication by API key: the default, asked after every other plugin's `tinsmith_authenticate`.

If keys are configured, only those are accepted, and the keys that their owners made over HTTP. Otherwise any key that
the SDK accepts is a tenant of its own, named after a fingerprint of the key, so people with different keys never see
each other's work. A key can be exchanged for a token (JWT) that stands for it for a limited time.
"""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import jwt

from tinsmith.errors import AuthenticationError, InvalidTokenError
from tinsmith.hook_values import Principal
from tinsmith.hookspecs import hookimpl
from tinsmith.server.issued_keys import IssuedKeys
from tinsmith.server.live_keys import LiveKeys
from tinsmith.settings import ApiKey
from tinsmith.settings.schema import digest_of_key
from tinsmith.store import IssuedKey
from tinsmith.store.logins import is_reference
from tinsmith_checkpoints.values import Json

AUDIENCE: Final = "tinsmith"
_ALGORITHM: Final = "HS256"
_CLAIMS: Final = ("aud", "exp", "iat", "sub", "key")
_SKEW_S: Final = 30  # between the clocks of servers that share a store
_MOST_KNOWN: Final = 1000
_RENEW: Final = "exchange the API key for a new one (the SDK does)"
_HEADER: Final = "x-api-key"
_BEARER: Final = "bearer "
_KEY_PREFIX: Final = "tml-"
_TOKEN_PREFIX: Final = "eyJ"  # how every JWT begins
_UNKNOWN: Final = (
    "this API key is not known; use one from `server.api_keys` of the server's configuration, or one made over HTTP "
    "that has not expired"
)
_ANYBODY: Final = "anybody"  # the `key` of tokens for keys that are not configured

HasEnded = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyToken:
    """The contents of a token whose signature has been checked."""

    tenant: str
    key_id: str
    expires_at: int  # seconds since 1970


class KeyTokens:
    """Issues and reads tokens with a secret that all servers on one store share."""

    def __init__(self, secret: bytes, lifetime_s: int) -> None:
        self._secret = secret
        self._lifetime_s = lifetime_s
        self._known = lru_cache(_MOST_KNOWN)(self._decoded)

    def key_id(self, digest: str) -> str:
        """Return an id of the key with this digest. It does not reveal the key, not even by trying out keys."""
        return hmac.new(self._secret, digest.encode(), hashlib.sha256).hexdigest()[:32]

    def issue(self, principal: Principal, key_id: str, *, not_after: int | None = None) -> str:
        now = int(time.time())
        expires_at = now + self._lifetime_s
        claims = {
            "iss": AUDIENCE,
            "aud": AUDIENCE,
            "iat": now,
            "exp": expires_at if not_after is None else min(expires_at, not_after),
            "sub": principal.tenant,  # `tinker auth whoami` shows this and the next two
            "org_id": principal.tenant,
            "email": principal.name if "@" in principal.name else "",
            "key": key_id,
        }
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)

    def read(self, token: str) -> KeyToken:
        """Raises InvalidTokenError if the token has expired, is for another audience, or has a wrong signature.

        What does not change with time is checked once: decoding takes as long as several statements of the store.
        """
        known = self._known(token)
        return known if time.time() < known.expires_at else self._decoded(token)

    def _decoded(self, token: str) -> KeyToken:
        try:
            claims: dict[str, Json] = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                audience=AUDIENCE,
                issuer=AUDIENCE,
                leeway=min(_SKEW_S, self._lifetime_s // 4),
                options={"require": list(_CLAIMS)},
            )
        except jwt.ExpiredSignatureError as error:
            msg = f"this token has expired; {_RENEW}"
            raise InvalidTokenError(msg) from error
        except jwt.InvalidAudienceError as error:
            msg = f"this token is not for this server, which accepts only tokens for {AUDIENCE!r}; {_RENEW}"
            raise InvalidTokenError(msg) from error
        except jwt.PyJWTError as error:
            msg = f"this server did not issue this token ({str(error).lower()}); {_RENEW}"
            raise InvalidTokenError(msg) from error
        return KeyToken(tenant=claims["sub"], key_id=str(claims["key"]), expires_at=int(claims["exp"]))


def credential_of(headers: Mapping[str, str]) -> str:
    """Return the key or token of a request: from `X-API-Key`, or else a bearer's. Empty if there is none."""
    if (credential := headers.get(_HEADER)) is not None:
        return credential
    given = headers.get("authorization", "")
    return given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else ""


class ApiKeys:
    """The server registers one as a plugin."""

    def __init__(
        self,
        keys: LiveKeys,
        tokens: KeyTokens,
        *,
        issued: IssuedKeys | None = None,
        required: bool = False,
        has_ended: HasEnded | None = None,
    ) -> None:
        """Make it.

        issued: keys made over HTTP, besides the configured ones.
        required: without configured keys, do not accept every key, since callers are known by other means.
        has_ended: whether a login has ended, by its reference.
        """
        self.keys = keys
        self.tokens = tokens
        self.issued = issued
        self._required = required
        self._has_ended = has_ended
        self._indexed: tuple[object, object] = (None, None)  # keys and tokens of the index
        self._by_id: dict[str, ApiKey] = {}

    @hookimpl(trylast=True)
    def tinsmith_authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Raises AuthenticationError if the key is missing or unknown."""
        return self.principal(credential_of(headers))

    def principal(self, credential: str) -> Principal:
        """Return the owner of a key or token. Raises AuthenticationError if the credential is not valid."""
        if not credential:
            msg = (
                "the request has no API key; send `Authorization: Bearer KEY` or `X-API-Key: KEY`; with the SDK, pass "
                "api_key=... or set TINKER_API_KEY"
            )
            raise AuthenticationError(msg)
        if credential.startswith(_TOKEN_PREFIX):
            return self._of_token(credential)
        keys = self.keys.now()
        if not keys and not self._required:
            return _anyone(credential)
        found = self._owner_of_id(self.tokens.key_id(digest_of_key(credential)), keys)
        if found is None:
            raise AuthenticationError(_UNKNOWN)
        return found

    async def look_up(self, headers: Mapping[str, str], *, unknown: bool = True) -> None:
        """Prepare for identifying the sender of a request. It may have a key that was made over HTTP.

        unknown: whether to ask the store for keys that were never seen before.
        """
        if (credential := credential_of(headers)) != "":
            with suppress(AuthenticationError):  # which whoever identifies the sender reports
                await self._look_up_id(self._key_id(credential), unknown=unknown)

    async def look_up_owner(self, key_id: str) -> Principal | None:
        """Return the owner of the key that `made_with` named; None if it named none, or there were no keys then or now.

        Raises AuthenticationError if the key has been removed or has expired, or the login has ended.
        """
        if not key_id:
            return None
        if is_reference(key_id):
            if self._has_ended is not None and await self._has_ended(key_id):
                msg = "whoever made it has signed out, or may no longer sign in"
                raise AuthenticationError(msg)
            return None
        await self._look_up_id(key_id)
        return self._owner_of_used(key_id)

    async def _look_up_id(self, key_id: str, *, unknown: bool = True) -> None:
        if self.issued is not None and key_id != _ANYBODY and key_id not in self._index(self.keys.now()):
            await self.issued.look_up(key_id, unknown=unknown)

    def exchange(self, credential: str) -> str:
        """Make a token for a key. A token made for a token expires with it, so nobody keeps access without the key.

        Raises AuthenticationError as `principal` does.
        """
        principal = self.principal(credential)
        not_after = self.tokens.read(credential).expires_at if credential.startswith(_TOKEN_PREFIX) else None
        return self.tokens.issue(principal, self._key_id(credential), not_after=not_after)

    def identifies(self, caller: Principal, credential: str) -> bool:
        """Return whether it was this credential that identified the caller, rather than one that a plugin knows."""
        try:
            return self.principal(credential) == caller
        except AuthenticationError:
            return False

    def id_used(self, caller: Principal, headers: Mapping[str, str]) -> str | None:
        """Return the id of the key with which the caller was identified; None if a plugin knew another credential."""
        credential = credential_of(headers)
        return self._key_id(credential) if self.identifies(caller, credential) else None

    def made_with(self, caller: Principal, headers: Mapping[str, str]) -> str:
        """Return what a credential rests on that is made for this caller: the id of the API key, or the login.

        Empty: a plugin knew the caller, and did not say by which login.
        """
        if (key_id := self.id_used(caller, headers)) is not None:
            return key_id
        return "" if caller.login is None else caller.login.reference

    def made_over_http(self, key_id: str) -> IssuedKey | None:
        """Return the key that `id_used` named, unless it is a configured one."""
        return self.issued.get(key_id) if self.issued is not None else None

    def _owner_of_used(self, key_id: str) -> Principal | None:
        keys = self.keys.now()
        if not keys and not self._required and key_id == _ANYBODY:
            return None
        if (known := self._owner_of_id(key_id, keys)) is not None:
            return known
        msg = "the API key has been removed or has expired"
        raise AuthenticationError(msg)

    def _owner_of_id(self, key_id: str, keys: tuple[ApiKey, ...]) -> Principal | None:
        """Return whose key this is: of the configured ones, or of those made over HTTP.

        A key made over HTTP counts as long as the configured key behind it, and never is an administrator's. Whether
        the login behind it has ended, its look-up has asked.
        """
        index = self._index(keys)
        if (configured := index.get(key_id)) is not None:
            return _owner(configured)
        issued = self.made_over_http(key_id)
        if issued is None:
            return None
        if issued.made_with and not is_reference(issued.made_with):
            root = index.get(issued.made_with)
            if root is None or root.tenant != issued.tenant:
                return None
        return Principal(tenant=issued.tenant, name=issued.tenant)

    @property
    def accept_anybody(self) -> bool:
        """True if no keys are configured or required, so every caller is this server's operator."""
        try:
            return not self.keys.now() and not self._required
        except AuthenticationError:  # all of them were removed
            return False

    def _index(self, keys: tuple[ApiKey, ...]) -> dict[str, ApiKey]:
        """Return the keys by their ids, so that a wrong key costs the same however many there are.

        The ids are keyed hashes, so the time of a look-up reveals nothing.
        """
        if self._indexed[0] is not keys or self._indexed[1] is not self.tokens:
            self._by_id = {self.tokens.key_id(each.digest): each for each in keys}
            self._indexed = (keys, self.tokens)
        return self._by_id

    def _key_id(self, credential: str) -> str:
        """Return the id of the key, or of the key that a token stands for. The id does not reveal the key."""
        if credential.startswith(_TOKEN_PREFIX):
            return self.tokens.read(credential).key_id
        return self.tokens.key_id(digest_of_key(credential)) if self.keys.now() or self._required else _ANYBODY

    def _of_token(self, credential: str) -> Principal:
        token = self.tokens.read(credential)
        try:
            return self._owner_of_used(token.key_id) or _with_fingerprint(token.tenant)
        except AuthenticationError as error:
            msg = "the API key of this token has been removed or has expired; use another one"
            raise InvalidTokenError(msg) from error


def _owner(key: ApiKey) -> Principal:
    return Principal(tenant=key.tenant, name=key.tenant, admin=key.admin)


def owner_of(key: str, keys: Sequence[ApiKey]) -> Principal:
    """Return the owner of a key among the configured ones. Raises AuthenticationError if it is not among them."""
    if not keys:
        return _anyone(key)
    found = next((each for each in keys if each.digest == digest_of_key(key)), None)
    if found is None:
        raise AuthenticationError(_UNKNOWN)
    return _owner(found)


def _anyone(key: str) -> Principal:
    if not key.startswith(_KEY_PREFIX):
        msg = f"the API key must start with {_KEY_PREFIX!r}"
        raise AuthenticationError(msg)
    return _with_fingerprint(f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}")


def _with_fingerprint(tenant: str) -> Principal:
    return Principal(tenant=tenant, name=tenant.replace("-", " ", 1))
