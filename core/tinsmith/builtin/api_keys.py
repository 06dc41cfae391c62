"""Who sent a request, by API key: the default behind every other plugin's `tinsmith_authenticate`.

With keys configured, exactly those are known. With none, any key of the form that the SDK accepts is, and each is a
tenant of its own, named by a fingerprint of the key: two people with different keys never see each other's work.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from tinsmith.errors import AuthenticationError
from tinsmith.hookspecs import hookimpl
from tinsmith.principal import Principal
from tinsmith.settings import ApiKey

HEADER = "x-api-key"
_PREFIXES = ("tml-", "eyJ")


class ApiKeys:
    """The server makes one from its settings and registers it as a plugin."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    @hookimpl(trylast=True)
    def tinsmith_authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Raise AuthenticationError where there is no key, or one that is not known."""
        key = headers.get(HEADER, "")
        if not key:
            msg = "the X-API-Key header is missing; pass api_key=... or set TINKER_API_KEY"
            raise AuthenticationError(msg)
        return self._configured(key) if self._keys else _anyone(key)

    def _configured(self, key: str) -> Principal:
        found: Principal | None = None
        for known in self._keys:  # all of them, so that time tells nothing
            if hmac.compare_digest(known.key.get_secret_value().encode(), key.encode()):
                found = Principal(tenant=known.tenant, name=known.tenant, admin=known.admin)
        if found is None:
            msg = "this API key is not known; use one from `server.api_keys` of the server's configuration"
            raise AuthenticationError(msg)
        return found


def _anyone(key: str) -> Principal:
    if not key.startswith(_PREFIXES):
        msg = "the API key must start with 'tml-'"
        raise AuthenticationError(msg)
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Principal(tenant=f"key-{fingerprint}", name=f"key {fingerprint}")
