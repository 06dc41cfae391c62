"""Download links that work without a key: the SDK fetches checkpoint files with plain urllib."""

import hashlib
import hmac
from datetime import datetime
from urllib.parse import quote

from tinsmith.errors import AuthenticationError


class UrlSigner:
    """Signs (path, expiry) with a secret that all servers on one store share."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def url_path(self, name: str, expires: datetime) -> str:
        """Return `<expiry>/<signature>/<name>`, escaped for a URL."""
        stamp = int(expires.timestamp())
        return f"{stamp}/{self._sign(name, stamp)}/{quote(name)}"

    def check(self, name: str, stamp: int, signature: str, now: datetime) -> None:
        """Raises AuthenticationError if the link was not made here or has expired."""
        if not hmac.compare_digest(signature.encode(), self._sign(name, stamp).encode()):
            msg = "the signature of this download link is wrong; ask for a new one (external_weights_urls)"
            raise AuthenticationError(msg)
        if now.timestamp() > stamp:
            msg = "this download link has expired; ask for a new one (external_weights_urls)"
            raise AuthenticationError(msg)

    def _sign(self, name: str, stamp: int) -> str:
        return hmac.new(self._secret, f"{stamp}\0{name}".encode(), hashlib.sha256).hexdigest()
