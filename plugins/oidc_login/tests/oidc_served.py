"""A real OpenID provider, and browsers of people who sign in there."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

CLIENT = "tinsmith"
SECRET = "of the client, which signs nothing"
SCRIPT = "nightly-job"
"""A client that signs in nobody: it gets access tokens of its own."""

API = "https://tinsmith.example/api"
"""The audience of access tokens for the server."""

_MODULE = Path(sys.executable).parents[1] / "oidc-provider/node_modules/oidc-provider/lib/index.js"
_WAIT_S = 300


class RealProvider:
    """`provider.mjs`, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = process
        self._output = process.stdout
        self.issuer = self._output.readline().strip()
        self._served: list[str] = []

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        node = shutil.which("node")
        if node is None or not _MODULE.exists():
            pytest.skip("needs Node.js and npm, from whose registry `make` installs a provider")
        script = Path(__file__).parent / "provider.mjs"
        command = [node, str(script), str(_MODULE)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def serve(self, url: str) -> None:
        """Let the server at this URL send people here, as well as those before."""
        self._served.append(url)
        code = {
            "client_id": CLIENT,
            "client_secret": SECRET,
            "redirect_uris": [f"{each}/login/callback" for each in self._served],
            "post_logout_redirect_uris": [f"{each}/" for each in self._served],
        }
        script = {
            "client_id": SCRIPT,
            "client_secret": SECRET,
            "grant_types": ["client_credentials"],
            "redirect_uris": [],
            "response_types": [],
        }
        self.tell(clients=[code, script])

    def rotate_keys(self) -> None:
        self.tell(rotate=True)

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        assert self._output.readline() == "done\n"

    def access_token(self, audience: str = API) -> str:
        """Return a JWT of a script for the server with this audience."""
        form = {"grant_type": "client_credentials", "resource": audience}
        answer = httpx.post(
            f"{self.issuer}/token", data=form, auth=(SCRIPT, SECRET.replace(" ", "+").replace(",", "%2C"))
        )
        token: str = answer.json()["access_token"]
        return token


class Browser:
    """Has cookies, follows redirects, and fills in the provider's forms. It says which page sends a request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(timeout=_WAIT_S, follow_redirects=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def sign_in(self, name: str, *, path: str = "/login") -> httpx.Response:
        """Return the last answer: the page to which the server sends the browser, or why nobody is signed in."""
        return self.http.get(self.callback(name, path=path))

    def callback(self, name: str, *, path: str = "/login") -> str:
        """Sign in at the provider, and return the URL to which it sends the browser back."""
        self.http.follow_redirects = False
        try:
            answer = self.http.get(f"{self.url}{path}")
            while True:
                if answer.has_redirect_location:
                    target = str(answer.url.join(answer.headers["location"]))
                    if target.startswith(f"{self.url}/login/callback"):
                        return target
                    answer = self.http.get(target)
                    continue
                answer.raise_for_status()
                found = re.search(r'action="([^"]+)"', answer.text)
                assert found is not None, answer.text
                prompt = re.search(r'name="prompt" value="(\w+)"', answer.text)
                assert prompt is not None, answer.text
                form = {"prompt": prompt[1], "login": name, "password": "any"}
                answer = self.http.post(unescape(found[1]), data=form)
        finally:
            self.http.follow_redirects = True

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(f"{self.url}{path}", headers=headers)

    def post(self, path: str, *, site: str = "same-origin") -> httpx.Response:
        return self.http.post(f"{self.url}{path}", json={}, headers={"sec-fetch-site": site})

    def cookies(self) -> dict[str, str]:
        """Return the cookies of the server."""
        return {each.name: each.value or "" for each in self.http.cookies.jar if each.name.startswith("tinsmith_")}

    def restore(self, cookies: Mapping[str, str]) -> None:
        for name in self.cookies():
            self.http.cookies.delete(name)
        for name, value in cookies.items():
            self.http.cookies.set(name, value, domain="127.0.0.1", path="/")

    def user(self) -> Any:
        return self.get("/login/session").json()["user"]
