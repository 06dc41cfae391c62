"""The OpenID provider: its endpoints (OpenID Connect Discovery 1.0), its keys, and the tokens that it signs.

All calls block, so they run in threads. What the provider publishes is kept for some minutes, and the keys are read
again if a token names one that is not among them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx
import jwt

from tinsmith import AuthenticationError
from tinsmith_oidc.config import OidcConfig
from tinsmith_oidc.users import Claims

_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Those with a public key. With HMAC, whoever knows the public key could sign."""
_SKEW_S: Final = 30  # between the provider's clock and ours
_TIMEOUT_S: Final = 10.0
_AWAY_S: Final = 5.0
_KEPT_S: Final = 300.0
"""How long a key that the provider has withdrawn goes on to count."""
_MOST_READS: Final = 10
"""Reads of the keys within `_KEPT_S` for tokens with unknown keys, which anybody can make."""


class Tokens(NamedTuple):
    id_token: str
    access_token: str | None


class Provider:
    """Thread-safe."""

    def __init__(
        self, config: OidcConfig, *, client: httpx.Client | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Ask nothing yet: the server starts without the provider. Raises ConfigError if the secret cannot be read."""
        self._config = config
        self._secret = config.secret()
        self._http = client or httpx.Client(timeout=_TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))
        self._clock = clock
        self._lock = threading.Lock()
        self._metadata: dict[str, Any] = {}
        self._metadata_at_s = -_KEPT_S
        self._keys: dict[str | None, dict[str, Any]] = {}
        self._keys_at_s = -_KEPT_S
        self._away_until_s = -_AWAY_S
        self._reads_s: deque[float] = deque(maxlen=_MOST_READS)

    def endpoint(self, name: str) -> str:
        """Return a URL of the metadata, such as `token_endpoint`. Raises AuthenticationError if there is none."""
        found = self.metadata(name)
        if not isinstance(found, str):
            msg = f"the provider {self._config.issuer} publishes no {name}"
            raise AuthenticationError(msg)
        return found

    def metadata(self, name: str) -> object:
        """Return what the provider publishes under a name, None if nothing."""
        with self._lock:
            if self._clock() - self._metadata_at_s >= _KEPT_S:
                self._discover()
            return self._metadata.get(name)

    def redeem(self, code: str, *, verifier: str, redirect_uri: str) -> Tokens:
        """Exchange an authorization code for tokens (RFC 6749, 4.1.3, with the verifier of RFC 7636).

        Raises AuthenticationError if the provider refuses the code: it is wrong, too old, or has been used.
        """
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri}
        form |= {"client_id": self._config.client_id, "code_verifier": verifier}
        answer = self._asked("POST", self.endpoint("token_endpoint"), data=form, auth=self._client_auth())
        id_token, access_token = answer.get("id_token"), answer.get("access_token")
        if not isinstance(id_token, str):
            reason = str(answer.get("error", "it sent no ID token"))[:200]
            msg = f"the provider refused the authorization code: {reason}; sign in again"
            raise AuthenticationError(msg)
        return Tokens(id_token, access_token if isinstance(access_token, str) else None)

    def user_info(self, access_token: str, subject: str) -> Claims:
        """Return the claims that an ID token may leave out, if the provider gives them (OpenID Connect Core, 5.3)."""
        url = self.metadata("userinfo_endpoint")
        if not isinstance(url, str):
            return {}
        claims = self._asked("GET", url, headers={"authorization": f"Bearer {access_token}"})
        return claims if claims.get("sub") == subject else {}

    def verified(self, token: str, *, audiences: tuple[str, ...]) -> Claims:
        """Return the claims of a token that the provider has signed for one of the audiences.

        Raises AuthenticationError, which says what is wrong.
        """
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key_of(token),
                algorithms=_ALGORITHMS,
                audience=audiences,
                issuer=self._config.issuer,
                leeway=_SKEW_S,
                options={"require": ["aud", "exp", "iat", "iss", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            msg = "the token has expired; get another one from the provider, or sign in again"
            raise AuthenticationError(msg) from error
        except jwt.InvalidAudienceError as error:
            allowed = " or ".join(map(repr, audiences))
            msg = f"the token is not for this server; its audience must be {allowed}"
            raise AuthenticationError(msg) from error
        except jwt.PyJWTError as error:
            msg = f"the token is not valid: {str(error).lower()}"
            raise AuthenticationError(msg) from error
        return claims

    def issued(self, token: str) -> bool:
        """Return whether a token says that it is of this provider. Nothing is verified."""
        try:
            claims = jwt.decode(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return False
        return claims.get("iss") == self._config.issuer

    def _key_of(self, token: str) -> jwt.PyJWK:
        header = jwt.get_unverified_header(token)
        key_id, algorithm = header.get("kid"), header.get("alg")
        if algorithm not in _ALGORITHMS:
            msg = f"it is signed by {algorithm!r:.40}; allowed: {', '.join(_ALGORITHMS)}"
            raise jwt.InvalidAlgorithmError(msg)
        url = self.endpoint("jwks_uri")
        with self._lock:
            is_old = self._clock() - self._keys_at_s >= _KEPT_S
            if is_old or (key_id not in self._keys and self._may_read_again()):
                self._read_keys(url)
            found = self._keys.get(key_id)
            if key_id is None and len(self._keys) == 1:
                found = next(iter(self._keys.values()))
        if found is None:
            msg = "the provider has no key of its id"
            raise jwt.InvalidKeyError(msg)
        return jwt.PyJWK(found, found.get("alg") or algorithm)

    def _may_read_again(self) -> bool:
        return len(self._reads_s) < _MOST_READS or self._clock() - self._reads_s[0] >= _KEPT_S

    def _read_keys(self, url: str) -> None:
        self._reads_s.append(self._clock())
        published = self._asked("GET", url).get("keys")
        keys = [each for each in published if each.get("use", "sig") == "sig"] if isinstance(published, list) else []
        self._keys = {each.get("kid"): each for each in keys}
        self._keys_at_s = self._clock()

    def _discover(self) -> None:
        issuer = self._config.issuer
        found = self._asked("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != issuer:
            msg = f"login.issuer is {issuer!r}, but the provider calls itself {str(found.get('issuer'))[:200]!r}"
            raise AuthenticationError(msg)
        self._metadata, self._metadata_at_s = found, self._clock()

    def _client_auth(self) -> tuple[str, str] | None:
        """Return name and password of this client (RFC 6749, 2.3.1), None for a public client."""
        return None if self._secret is None else (quote(self._config.client_id, ""), quote(self._secret, ""))

    def _asked(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> dict[str, Any]:  # Any: as httpx has it
        """Raises AuthenticationError, at once if the provider has just failed: requests must not queue up behind it."""
        if self._clock() < self._away_until_s:
            msg = f"the provider {self._config.issuer} does not answer; try again in a few seconds"
            raise AuthenticationError(msg)
        try:
            answer = self._http.request(
                method, url, headers={"accept": "application/json", **(headers or {})}, **options
            ).json()
        except (httpx.HTTPError, ValueError) as error:
            self._away_until_s = self._clock() + _AWAY_S
            msg = f"the provider does not answer as one does at {url}: {error}; try again later"
            raise AuthenticationError(msg) from error
        return answer if isinstance(answer, dict) else {}
