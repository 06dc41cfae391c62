"""Signing in by a real provider: who gets in as whom, for how long, and what is refused."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jwt
import pytest
from browser import Browser as PageOfBrowser
from browser import running_browser
from cryptography.hazmat.primitives.asymmetric import rsa
from oidc_served import API, CLIENT, SCRIPT, SECRET, Browser, RealProvider
from starlette.responses import Response
from typer.testing import CliRunner

import tinsmith_oidc.cookies
from tinsmith import Principal, RoutesContext
from tinsmith.commands import cli
from tinsmith.errors import PluginError
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith_oidc.config import OidcConfig
from tinsmith_oidc.cookies import Cookies
from tinsmith_oidc.sessions import Sessions

KEY = "tml-of-the-operator"
OPTIONS = {
    "client_id": CLIENT,
    "client_secret": SECRET,
    "audience": API,
    "admin_claim": "groups",
    "admin_values": ["admins"],
}


@pytest.fixture(scope="module")
def provider() -> Iterator[RealProvider]:
    with RealProvider.running() as running:
        yield running


@contextmanager
def served(directory: Path, provider: RealProvider, **options: Any) -> Iterator[RunningServer]:
    login = {"plugin": "oidc", "issuer": provider.issuer, **OPTIONS, **options}
    with running_server(
        directory, engines=False, login=login, server={"api_keys": [{"key": KEY, "tenant": "ops"}]}
    ) as server:
        provider.serve(server.url)
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, provider: RealProvider) -> Iterator[RunningServer]:
    with served(tmp_path_factory.mktemp("data"), provider) as running:
        yield running


@pytest.fixture
def browser(server: RunningServer) -> Iterator[Browser]:
    with Browser(server.url) as browser:
        yield browser


def provider_of(server: RunningServer) -> str:
    assert server.settings.login is not None
    issuer: str = server.settings.login.options()["issuer"]
    return issuer


def user_of(browser: Browser) -> dict[str, Any]:
    """Return the user without the account, whose name says nothing."""
    return {name: value for name, value in browser.user().items() if name != "account"}


def runs(server: RunningServer, token: str) -> httpx.Response:
    return httpx.get(f"{server.url}/api/v1/runs", headers={"Authorization": f"Bearer {token}"}, timeout=300)


def test_whoever_signs_in_is_the_tenant_of_the_claim_until_signing_out(browser: Browser) -> None:
    assert browser.user() is None
    assert browser.get("/api/v1/runs").status_code == 401
    landed = browser.sign_in("ann", path="/login?next=/%23run=r-1")
    assert (landed.status_code, str(landed.url)) == (200, f"{browser.url}/#run=r-1")
    assert '"page/login.js"' in landed.text
    assert browser.get("/page/login.js").status_code == 200
    assert user_of(browser) == {"tenant": "ann", "name": "ann@example.org", "admin": False}
    assert browser.get("/api/v1/runs").status_code == 200
    kept = browser.cookies()
    answer = browser.post("/login/logout")
    assert answer.json()["redirect"].startswith("http://127.0.0.1")
    assert "end your session" not in answer.text
    assert browser.cookies() == {}
    browser.restore(kept)
    assert browser.user() is None, "a copied cookie ends with its session"
    assert browser.get("/api/v1/runs").status_code == 401


def test_signing_out_holds_at_every_server_of_the_store(tmp_path: Path, provider: RealProvider) -> None:
    """Also for a copied cookie, and after a restart. The audit log has who signed in and out, once."""
    with served(tmp_path, provider) as first, served(tmp_path, provider) as second:
        with Browser(first.url) as ann, Browser(second.url) as copy, Browser(second.url) as bob:
            ann.sign_in("ann")
            bob.sign_in("bob")
            kept = ann.cookies()
            copy.restore(kept)
            account = copy.user()["account"]
            assert user_of(copy) == {"tenant": "ann", "name": "ann@example.org", "admin": False}
            assert copy.get("/api/v1/runs").status_code == 200
            for _ in range(2):
                assert ann.post("/login/logout").status_code == 200
            while copy.user() is not None:
                pass  # a server may know for a second what was so
            assert copy.get("/api/v1/runs").status_code == 401
            assert bob.user()["tenant"] == "bob"
        now, day = datetime.now(UTC), timedelta(days=1)
        entries = second.call(second.store.read_audit("ann", since=now - day, until=now + day, limit=9))
        by = {"actor": "ann@example.org", "login": "oidc", "account": account}
        assert [(each.event, each.details) for each in entries] == [("user_login", by), ("user_logout", by)]
    with served(tmp_path, provider) as again, Browser(again.url) as copy:
        copy.restore(kept)
        assert copy.user() is None


async def test_a_session_is_looked_up_once_a_second_and_a_forged_one_never() -> None:
    class Store:
        asked, ended = 0, False

        async def ended_login(self, login_id: str) -> datetime | None:
            self.asked += not login_id.startswith("account ")
            return datetime.now(UTC) if self.ended else None

    def cookies(secret: bytes) -> Cookies:
        return Cookies(secret, purpose="test", session_s=3600, secure=False)

    def headers(cookies: Cookies) -> dict[str, str]:
        answer = Response()
        cookies.open(answer, Principal(tenant="ann", name="ann"), "of-ann")
        return {"cookie": answer.headers["set-cookie"].partition(";")[0]}

    store, now_s, real = Store(), [0.0], cookies(b"secret")
    context = cast("RoutesContext", SimpleNamespace(store=store, logins_ended=lambda: None))
    sessions = Sessions(real, context, clock=lambda: now_s[0])
    good, forged = headers(real), headers(cookies(b"another"))
    assert sessions.of(good) is None, "nobody has asked the store"
    for each in (good, good, forged, {}):
        await sessions.look_up(each)
    assert (sessions.of(good) is None, sessions.of(forged), store.asked) == (False, None, 1)
    store.ended, now_s[0] = True, 0.9
    await sessions.look_up(good)
    assert sessions.of(good) is not None
    for now_s[0] in (1.0, 2.0, 9.0):
        await sessions.look_up(good)
    assert (sessions.of(good), store.asked) == (None, 2)


def test_signing_out_leads_to_the_providers_own_page_and_back(browser: Browser) -> None:
    browser.sign_in("ann")
    page = browser.http.get(browser.post("/login/logout").json()["redirect"])
    assert page.status_code == 200
    assert 'action="' in page.text


def test_cookies_are_kept_from_scripts_and_other_sites(browser: Browser) -> None:
    browser.http.follow_redirects = False
    answer = browser.get("/login")
    for each in answer.headers.get_list("set-cookie"):
        assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(each.split("; "))


def test_behind_https_cookies_are_secure_and_of_this_host_alone(tmp_path: Path, provider: RealProvider) -> None:
    login = {"plugin": "oidc", "issuer": provider.issuer, **OPTIONS}
    public = {"public_url": "https://tinsmith.example"}
    with running_server(tmp_path, engines=False, login=login, server=public) as server:
        answer = httpx.get(f"{server.url}/login")
        (cookie,) = answer.headers.get_list("set-cookie")
    assert cookie.startswith("__Host-tinsmith_sign_in=")
    assert "Secure" in cookie.split("; ")
    assert "redirect_uri=https%3A%2F%2Ftinsmith.example%2Flogin%2Fcallback" in answer.headers["location"]


def test_below_a_path_cookies_and_redirects_stay_there(tmp_path: Path, provider: RealProvider) -> None:
    login = {"plugin": "oidc", "issuer": provider.issuer, **OPTIONS}
    public = {"public_url": "https://lab.example/tools/tinsmith/"}
    with running_server(tmp_path, engines=False, login=login, server=public) as server:
        for path in ("/tools/tinsmith/#run=r-1", "/tools/other/", "/"):
            answer = httpx.get(f"{server.url}/login", params={"next": path})
            (cookie,) = answer.headers.get_list("set-cookie")
            assert cookie.startswith("__Secure-tinsmith_sign_in=")
            assert {"Secure", "Path=/tools/tinsmith"} <= set(cookie.split("; "))
            value = cookie.partition("=")[2].partition(";")[0]
            comes_back_to = jwt.decode(value, options={"verify_signature": False})["next_path"]
            assert comes_back_to == (path if path.startswith("/tools/tinsmith/") else "/tools/tinsmith/")
        callback = "redirect_uri=https%3A%2F%2Flab.example%2Ftools%2Ftinsmith%2Flogin%2Fcallback"
        assert callback in answer.headers["location"]
        refused = httpx.get(f"{server.url}/login/callback", params={"state": "forged"})
        assert "<a href='/tools/tinsmith/'>Back</a>" in refused.text


def test_administrators_are_those_with_the_value_of_the_claim(browser: Browser) -> None:
    browser.sign_in("root")
    assert user_of(browser) == {"tenant": "root", "name": "root@example.org", "admin": True}


def test_an_address_that_nobody_verified_names_no_tenant(tmp_path: Path, provider: RealProvider) -> None:
    with served(tmp_path, provider, tenant_claim="email") as server:
        with Browser(server.url) as mallory:
            refused = mallory.sign_in("mallory")
            assert refused.status_code == 401
            assert "has not verified the claim &#x27;email&#x27;" in refused.text
        with Browser(server.url) as ann:
            ann.sign_in("ann")
            assert ann.user()["tenant"] == "ann@example.org"


def test_an_address_that_nobody_verified_lets_nobody_in_and_makes_no_administrator(
    tmp_path: Path, provider: RealProvider
) -> None:
    addresses = {"admin_claim": "email", "admin_values": ["mallory@example.org", "ann@example.org"]}
    with served(tmp_path / "admin", provider, **addresses) as server:
        for name, admin in (("mallory", False), ("ann", True)):
            with Browser(server.url) as browser:
                browser.sign_in(name)
                assert browser.user()["admin"] is admin
    allowed = {"allow_claim": "email", "allow_values": addresses["admin_values"]}
    with served(tmp_path / "allow", provider, **allowed) as server:
        with Browser(server.url) as mallory:
            assert "the provider has not verified it" in mallory.sign_in("mallory").text
            assert mallory.user() is None
        with Browser(server.url) as ann:
            ann.sign_in("ann")
            assert ann.user()["tenant"] == "ann"


def test_accounts_without_the_required_claim_are_refused(tmp_path: Path, provider: RealProvider) -> None:
    with served(tmp_path, provider, allow_claim="groups", allow_values=["admins"]) as server:
        with Browser(server.url) as ann:
            assert "may not use this server" in ann.sign_in("ann").text
            assert ann.user() is None
        with Browser(server.url) as root:
            root.sign_in("root")
            assert root.user()["tenant"] == "root"


def test_an_account_that_may_no_longer_sign_in_loses_what_it_has(tmp_path: Path, provider: RealProvider) -> None:
    """Its other sessions, and the keys that it made with an end of their own, on every server of the store."""
    with (
        served(tmp_path, provider) as before,
        served(tmp_path, provider, allow_claim="groups", allow_values=["admins"]) as after,
        Browser(before.url) as ann,
        Browser(after.url) as again,
        Browser(before.url) as bob,
    ):
        keys = []
        for browser, name in ((ann, "ann"), (bob, "bob")):
            browser.sign_in(name)
            made = browser.http.post(
                f"{before.url}/api/v1/auth/apikeys",
                json={"name": "laptop", "expires_in_s": 3600},
                headers={"sec-fetch-site": "same-origin"},
            )
            keys.append(made.json()["key"])
        assert [runs(before, key).status_code for key in keys] == [200, 200]
        assert "may not use this server" in again.sign_in("ann").text
        while ann.user() is not None or runs(before, keys[0]).status_code != 401:
            pass  # a server may know for a second what was so
        assert (runs(after, keys[0]).status_code, runs(before, keys[1]).status_code) == (401, 200)
        assert bob.user()["tenant"] == "bob"


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "https://evil.example", "/%0d%0aa:b", ""])
def test_nobody_is_sent_to_another_site(browser: Browser, path: str) -> None:
    assert str(browser.sign_in("ann", path=f"/login?next={path}").url) == f"{browser.url}/"


def test_a_forged_or_repeated_answer_opens_no_session(browser: Browser, server: RunningServer) -> None:
    callback = httpx.URL(browser.callback("ann"))
    forged = browser.http.get(callback.copy_set_param("state", "of-another-sign-in"))
    assert (forged.status_code, browser.user()) == (401, None)
    assert "begun no such sign-in" in forged.text
    with Browser(server.url) as victim:  # a link with the attacker's own code
        assert victim.http.get(callback).status_code == 401
        assert victim.user() is None

    callback = httpx.URL(browser.callback("ann"))
    kept = browser.cookies()
    for wrong in ({"iss": "https://evil.example"}, {"code": "guessed"}, {"error": "access_denied"}):
        (name, value), *_ = wrong.items()
        browser.restore(kept)
        assert browser.http.get(callback.copy_set_param(name, value)).status_code == 401
    assert browser.user() is None
    browser.restore(kept)
    assert browser.http.get(callback).status_code == 200
    assert browser.user()["tenant"] == "ann"
    browser.restore(kept)
    replayed = browser.http.get(callback)
    assert (replayed.status_code, browser.user()) == (401, None), "the provider has taken its code"
    assert "refused the authorization code: invalid_grant" in replayed.text


def test_another_sites_page_changes_nothing_with_a_sessions_cookie(browser: Browser) -> None:
    browser.sign_in("ann")
    body, url = {"tags": [], "sdk_version": "0.38.0"}, f"{browser.url}/api/v1/create_session"

    def status(**headers: str) -> int:
        return browser.http.post(url, json=body, headers=headers).status_code

    assert status(**{"sec-fetch-site": "same-origin"}) == 200
    assert status(origin=browser.url) == 200, "a browser without a safe connection says no more"
    for site in ("cross-site", "same-site", "none"):
        assert status(**{"sec-fetch-site": site}) == 401
    assert status(origin="https://evil.example") == 401
    assert status(origin="null") == 401
    assert status() == 401
    for path in ("copy_weights", "sessions/none/finish", "runs/none/share_links"):  # the page's other deeds
        assert browser.post(f"/api/v1/{path}", site="cross-site").status_code == 401
        assert browser.post(f"/api/v1/{path}").status_code in {404, 422}
    assert browser.get("/api/v1/runs").status_code == 200
    assert browser.get("/api/v1/runs", **{"sec-fetch-site": "cross-site"}).status_code == 401
    assert browser.post("/login/logout", site="cross-site").status_code == 403
    assert browser.user() is not None


def test_a_session_ends_by_itself(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = browser.callback("ann")
    hours_ago = SimpleNamespace(time=lambda: time.time() - 8 * 3600, time_ns=time.time_ns)
    with monkeypatch.context() as patch:
        patch.setattr(tinsmith_oidc.cookies, "time", hours_ago)
        answer = browser.http.get(callback, follow_redirects=False)
    browser.restore({"tinsmith_session": answer.cookies["tinsmith_session"]})
    assert browser.user() is None
    assert browser.get("/api/v1/runs").status_code == 401


def test_scripts_send_the_providers_tokens(server: RunningServer, provider: RealProvider) -> None:
    assert runs(server, provider.access_token()).status_code == 200
    headers = {"X-API-Key": provider.access_token()}
    created = httpx.post(
        f"{server.url}/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}, headers=headers
    )
    session = server.call(server.store.get_session(created.json()["session_id"]))
    assert session.tenant == SCRIPT
    elsewhere = runs(server, provider.access_token("https://elsewhere.example"))
    assert (elsewhere.status_code, "audience must be" in elsewhere.json()["detail"]) == (401, True)


def test_expired_tokens_are_refused(server: RunningServer, provider: RealProvider) -> None:
    provider.tell(shift_s=-7200)
    old = provider.access_token()
    provider.tell()
    refused = runs(server, old)
    assert (refused.status_code, "has expired" in refused.json()["detail"]) == (401, True)


def test_tokens_that_the_provider_has_not_signed_are_refused(server: RunningServer, provider: RealProvider) -> None:
    real = provider.access_token()
    header, claims = jwt.get_unverified_header(real), jwt.decode(real, options={"verify_signature": False})
    (key,) = httpx.get(f"{provider.issuer}/jwks").json()["keys"]
    own = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    forged = {
        "signed by another key": jwt.encode(claims, own, "RS256", headers=header),
        "of an unknown key": jwt.encode(claims, own, "RS256", headers={**header, "kid": "unknown"}),
        "signed by the public key": jwt.encode(claims, key["n"].encode(), "HS256", headers={"kid": key["kid"]}),
        "not signed": jwt.encode(claims, None, "none", headers={"kid": key["kid"]}),
        "changed": real[:-6] + ("AAAAAA" if not real.endswith("AAAAAA") else "BBBBBB"),
    }
    for what, token in forged.items():
        refused = runs(server, token)
        assert (refused.status_code, "token is not valid" in refused.json()["detail"]) == (401, True), what
    assert runs(server, real).status_code == 200


def test_a_key_counts_from_when_the_provider_publishes_it_until_it_withdraws_it(
    server: RunningServer, provider: RealProvider
) -> None:
    before = provider.access_token()
    assert runs(server, before).status_code == 200
    provider.rotate_keys()
    assert runs(server, provider.access_token()).status_code == 200
    assert runs(server, before).status_code == 401
    with Browser(server.url) as ann:
        ann.sign_in("ann")
        assert ann.user()["tenant"] == "ann"


def test_keys_work_beside_the_login_and_only_configured_ones(server: RunningServer, browser: Browser) -> None:
    assert runs(server, KEY).status_code == 200
    assert runs(server, "tml-anybody").status_code == 401
    browser.sign_in("ann")
    with_key = browser.get("/api/v1/runs", **{"x-api-key": "tml-anybody"})
    assert with_key.status_code == 401, "what a request brings itself counts before the cookie"


def test_without_any_configured_key_a_server_with_a_login_is_closed(tmp_path: Path, provider: RealProvider) -> None:
    login = {"plugin": "oidc", "issuer": provider.issuer, **OPTIONS}
    with running_server(tmp_path, engines=False, login=login) as server:
        assert runs(server, "tml-anybody").status_code == 401
        assert httpx.get(f"{server.url}/api/v1/runs").status_code == 401


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ({"plugin": "oidc", "client_id": "a"}, "login.issuer: Field required"),
        ({"plugin": "oidc", "client_id": "a", "issuer": "http://idp.example"}, "must be an https URL"),
        ({"plugin": "oidc", "client_id": "a", "issuer": "https://a", "admin_claim": "groups"}, "set both or neither"),
        (
            {"plugin": "oidc", "client_id": "a", "issuer": "https://a", "tenant_claim": "upn"},
            "'upn', which users choose",
        ),
        ({"plugin": "oidc", "client_id": "a", "issuer": "https://a", "client_secret_file": "/nowhere"}, "cannot read"),
        ({"plugin": "oidc", "client_id": "a", "issuer": "https://a", "scopes": ["email"]}, "must include 'openid'"),
        ({"plugin": "saml"}, "no installed plugin named 'saml' offers a login"),
    ],
)
def test_a_server_with_a_wrong_login_does_not_start(tmp_path: Path, login: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginError, match=reason), running_server(tmp_path, engines=False, login=login):
        raise AssertionError


@pytest.mark.parametrize(
    ("login", "said"),
    [
        ("client_id: a", "tinsmith.yaml:2: login.issuer: field required; add it"),
        ("issuer: https://a, client_id: a, scope: [openid]", "login.scope: unknown key, allowed: admin_claim,"),
        ("issuer: http://idp.example, client_id: a", "tinsmith.yaml:2: login.issuer: issuer is 'http://idp.example'"),
        ("issuer: https://a, client_id: a, client_secret_file: /nowhere", "login.client_secret_file: cannot read"),
    ],
)
@pytest.mark.parametrize("command", ["check-config", "doctor"])
def test_the_settings_are_checked_before_a_server_starts(command: str, login: str, said: str, tmp_path: Path) -> None:
    told = told_by(command, f"login:\n  {{plugin: oidc, {login}}}\n", tmp_path)
    assert said in told


def test_a_login_that_is_not_installed_is_named(tmp_path: Path) -> None:
    assert "login.plugin: no login named 'oidk', installed: oidc; did you mean 'oidc'?" in told_by(
        "check-config", "login: {plugin: oidk}\n", tmp_path
    )


def told_by(command: str, login: str, directory: Path) -> str:
    """Return what a command says of a configuration, in one line."""
    file, plugins = directory / "tinsmith.yaml", Plugins.load()
    server = json.dumps({"data_dir": str(directory / "data"), "port": 0})
    file.write_text(f"{login}server: {server}\nmodels: [{{name: a, backend: {{plugin: toy}}}}]\n")
    done = CliRunner().invoke(cli.build_group(plugins), [command, "--config", str(file)], obj=plugins)
    return " ".join(f"{done.output} {done.exception or ''}".split())


def test_a_provider_that_is_away_is_not_asked_by_every_request(tmp_path: Path) -> None:
    with RealProvider.running() as provider, served(tmp_path, provider) as server:
        token = provider.access_token()
        provider_is_there = runs(server, KEY)
        assert provider_is_there.status_code == 200
        issuer = provider.issuer
    login = {"plugin": "oidc", "issuer": issuer, **OPTIONS}
    with running_server(tmp_path, engines=False, login=login) as server:
        first, second = runs(server, token), runs(server, token)
        assert (first.status_code, second.status_code) == (401, 401)
        assert "does not answer as one does" in first.json()["detail"]
        assert "try again in a few seconds" in second.json()["detail"]
        assert httpx.get(f"{server.url}/login").status_code == 401


def test_the_readme_describes_every_option() -> None:
    table = (Path(__file__).parents[1] / "README.md").read_text().partition("## Options of `login`")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("| `")
    ]
    described = {name.strip("`"): description for name, _, description in rows}
    assert described == {name: field.description for name, field in OidcConfig.model_fields.items()}


def test_no_secret_of_a_link_goes_to_the_server_with_a_sign_in(server: RunningServer, tmp_path: Path) -> None:
    """Neither to the server nor to the provider; and a link with a key asks before it takes the place of a sign-in."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium")
    with running_browser(chromium, tmp_path / "profile") as page:
        page.look(width=1280, height=800, dark=False)
        page.agrees = False
        page.open(f"{server.url}/#run=r-1&view=time&share=a-secret&key=tml-secret")
        page.until("document.querySelector('nav a[href$=login]')")
        page.until("!location.hash.includes('key')")
        assert page.asked == ["This link brings an API key. Use it in this tab instead of your sign-in?"]
        assert page.evaluate("sessionStorage.getItem('key')") is None
        link = "document.querySelector('nav a[href*=login]')"
        page.evaluate(f"{link}.addEventListener('click', (event) => event.preventDefault()), {link}.click()")
        assert page.evaluate(f"{link}.href") == f"{server.url}/login?next=%2F%23run%3Dr-1%26view%3Dtime"


def until(page: PageOfBrowser, condition: str) -> None:
    """Return once a condition is true, on whatever page the browser has come to. The test's time-out bounds it."""
    while True:
        with suppress(AssertionError):  # the page has changed meanwhile
            page.until(condition)
            return


@pytest.mark.thorough
def test_the_page_leads_to_the_provider_and_back(server: RunningServer, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium")
    with running_browser(chromium, tmp_path / "profile") as page:
        page.look(width=1280, height=800, dark=False)
        page.open(server.url)
        until(page, "document.querySelector('#ask a')")
        page.evaluate("document.querySelector('#ask a').click()")
        until(page, "document.querySelector('[name=login]')")
        page.evaluate("document.querySelector('[name=login]').value = 'ann'")
        page.evaluate("document.querySelector('[name=password]').value = 'any'")
        page.evaluate("document.querySelector('form').requestSubmit()")
        until(page, "document.querySelector('[name=prompt]')?.value === 'consent'")
        page.evaluate("document.querySelector('form').requestSubmit()")
        until(page, "document.querySelector('#user')?.textContent === 'ann@example.org'")
        until(page, "!document.querySelector('#runs').hidden")
        page.evaluate("document.querySelector('#user ~ button').click()")
        until(page, f"location.origin === {provider_of(server)!r}")
