"""Tokens stand for API keys: exactly as long as they are young, ours, and the key is known."""

import base64
import hashlib
import json
import time
from typing import Any

import jwt
import pytest
from pydantic import SecretStr

from tinsmith.errors import AuthenticationError, InvalidTokenError
from tinsmith.hook_values import Principal
from tinsmith.server.api_keys import ApiKeys, KeyTokens, owner_of
from tinsmith.server.live_keys import LiveKeys
from tinsmith.settings import ApiKey, KeySource

SECRET = b"s" * 32
ONE = ApiKey(key=SecretStr("tml-one"), tenant="one@example.org")
TWO = ApiKey(key=SecretStr("tml-two"), tenant="two", admin=True)


def keys(*known: ApiKey, secret: bytes = SECRET, lifetime_s: int = 3600) -> ApiKeys:
    return ApiKeys(LiveKeys(KeySource(keys=known)), KeyTokens(secret, lifetime_s))


def claims_of(token: str) -> dict[str, Any]:
    return dict(jwt.decode(token, options={"verify_signature": False}))


def test_a_token_is_as_good_as_its_key_on_every_server_of_a_store() -> None:
    for known, key in (((ONE, TWO), "tml-two"), ((), "tml-anything")):
        token = keys(*known).exchange(key)
        assert keys(*known).tinsmith_authenticate({"x-api-key": token}) == keys(*known).principal(key)


def test_a_key_and_its_hash_are_the_same_key_in_every_way() -> None:
    hashed = ApiKey(key=SecretStr("sha256:" + hashlib.sha256(b"tml-two").hexdigest().upper()), tenant="two", admin=True)
    assert keys(ONE, hashed).principal("tml-two") == keys(ONE, TWO).principal("tml-two")
    token = keys(ONE, TWO).exchange("tml-two")
    assert keys(ONE, hashed).principal(token) == keys(ONE, TWO).principal(token)
    assert owner_of("tml-two", (ONE, hashed)) == keys(TWO).principal("tml-two")
    for known_from_the_file in (hashed.key.get_secret_value(), hashed.digest):
        with pytest.raises(AuthenticationError):
            keys(ONE, hashed).principal(known_from_the_file)
        with pytest.raises(AuthenticationError):
            owner_of(known_from_the_file, (ONE, hashed))


def test_a_token_has_the_claims_that_the_sdk_reads_and_does_not_tell_the_key() -> None:
    token = keys(ONE).exchange("tml-one")
    claims = claims_of(token)
    assert claims["exp"] - claims["iat"] == 3600
    assert abs(claims["iat"] - time.time()) < 60
    assert (claims["sub"], claims["org_id"], claims["email"]) == ("one@example.org",) * 3
    assert claims_of(keys(TWO).exchange("tml-two"))["email"] == ""
    assert "tml" not in json.dumps(claims)


def test_what_a_key_may_do_is_looked_up_anew() -> None:
    token = keys(TWO).exchange("tml-two")
    demoted = TWO.model_copy(update={"admin": False, "tenant": "moved"})
    assert keys(demoted).principal(token) == Principal(tenant="moved", name="moved")


def test_a_removed_key_takes_its_tokens_along() -> None:
    token, anybodys = keys(ONE, TWO).exchange("tml-one"), keys().exchange("tml-one")
    for known in ((TWO,), ()):
        with pytest.raises(InvalidTokenError, match="has been removed"):
            keys(*known).principal(token)
    with pytest.raises(InvalidTokenError, match="has been removed"):
        keys(ONE).principal(anybodys)  # the key is configured now: whoever has it gets a new token


def test_an_exchange_of_a_token_does_not_prolong_it() -> None:
    first = keys(ONE, lifetime_s=1000).exchange("tml-one")
    second = keys(ONE, lifetime_s=5000).exchange(first)
    assert claims_of(second)["exp"] == claims_of(first)["exp"]
    assert keys(ONE).principal(second).tenant == ONE.tenant


def forged(**changes: Any) -> str:
    claims = {**claims_of(keys(ONE).exchange("tml-one")), **changes}
    return jwt.encode({name: value for name, value in claims.items() if value is not None}, SECRET, algorithm="HS256")


def test_bad_tokens_are_refused_by_their_fault() -> None:
    now = int(time.time())
    good = forged()
    head, body, signature = good.split(".")
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    for token, words in (
        (forged(exp=now - 60, iat=now - 120), "has expired"),
        (forged(aud="elsewhere"), "not for this server"),
        (forged(aud=None), "aud"),
        (forged(iss="elsewhere"), "did not issue this token"),
        (forged(exp=None), "exp"),
        (forged(iat=now + 3600), "did not issue this token"),
        (forged(key=None), "key"),
        (f"{head}.{body}.{signature[::-1]}", "did not issue this token"),
        (f"{unsigned}.{body}.", "did not issue this token"),
        (jwt.encode(claims_of(good), b"t" * 32, algorithm="HS256"), "did not issue this token"),
        ("eyJ", "did not issue this token"),
        ("eyJ.é.x", "did not issue this token"),
    ):
        with pytest.raises(InvalidTokenError, match=words):
            keys(ONE).principal(token)
        with pytest.raises(InvalidTokenError):
            keys().exchange(token)
    assert keys(ONE).principal(good).tenant == ONE.tenant


def test_a_wrong_key_is_no_invalid_token() -> None:
    """Or the SDK would ask for another token in vain."""
    for credential in ("tml-three", "", "other"):
        with pytest.raises(AuthenticationError) as refusal:
            keys(ONE).principal(credential)
        assert not isinstance(refusal.value, InvalidTokenError)


def counted_decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the tokens whose signature is checked from now on, in order."""
    decoded: list[str] = []
    decode = jwt.decode

    def noting(token: str, *arguments: Any, **options: Any) -> Any:
        decoded.append(token)
        return decode(token, *arguments, **options)

    monkeypatch.setattr(jwt, "decode", noting)
    return decoded


def test_a_signature_is_checked_once_and_the_time_always(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted_decodes(monkeypatch)
    tokens = KeyTokens(SECRET, 3600)
    token = tokens.issue(Principal(tenant="one", name="one"), "id", not_after=int(time.time()) + 100)
    assert [tokens.read(token) for _ in range(3)] == [tokens.read(token)] * 3
    assert decoded == [token]
    time_s = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: time_s)
    tokens.read(token)
    assert decoded == [token, token]  # which knows how much clocks may differ


def test_few_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted_decodes(monkeypatch)
    tokens = KeyTokens(SECRET, 3600)
    issued = [tokens.issue(Principal(tenant=f"t{n}", name="a"), "id") for n in range(2000)]
    assert [tokens.read(token).tenant for token in issued] == [f"t{n}" for n in range(2000)]
    assert decoded == issued
    decoded.clear()
    for token in (issued[-1], issued[0]):
        tokens.read(token)
    assert decoded == [issued[0]], "the newest is remembered, the oldest is not"
