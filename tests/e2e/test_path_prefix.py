"""The pages behind a proxy that serves them below a path: nothing is asked for outside of it."""

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from browser import running_browser

from tinsmith.testing.harness import running_server

PREFIX = "/lab/tinsmith"
KEY = {"x-api-key": "tml-ann"}
_OF_CONNECTIONS = {"connection", "transfer-encoding", "keep-alive"}


class Proxy(ThreadingHTTPServer):
    """Passes on what is asked for below the prefix, without it. `outside` is what else was asked for."""

    daemon_threads = True
    target = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.outside: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}{PREFIX}"


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        if not self.path.startswith(f"{PREFIX}/"):
            self.server.outside.append(self.path)
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        url, headers = f"{self.server.target}{self.path.removeprefix(PREFIX)}", dict(self.headers)
        with httpx.stream(self.command, url, headers=headers, content=body, timeout=300) as answer:
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in _OF_CONNECTIONS:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            try:
                for part in answer.iter_raw():
                    self.wfile.write(part)
            except OSError:  # the browser has left the page
                self.close_connection = True

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def test_the_pages_stay_below_the_path_of_the_proxy(proxy: Proxy, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium")
    options = {"public_url": proxy.url, "api_keys": [{"key": "tml-ann", "tenant": "ann"}]}
    with running_server(tmp_path / "data", engines=False, server=options) as server:
        proxy.target = server.url
        with httpx.Client(base_url=f"{proxy.url}/api/v1/", headers=KEY, timeout=300) as http:
            session = http.post("create_session", json={}).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
            run = http.post("create_model", json=body).json()["model_id"]
            http.post(f"runs/{run}/metrics", json={"points": [{"step": 0, "values": {"reward": 0.5}}]})
        with running_browser(chromium, tmp_path / "profile") as page:
            page.look(width=1280, height=800, dark=False)
            page.open(f"{proxy.url}/")
            page.until("document.activeElement?.id === 'key'")
            assert f'base_url="{proxy.url}"' in page.evaluate("document.querySelector('#snippet').textContent")
            page.open(f"{proxy.url}/?again#run={run}&key=tml-ann")
            page.until("[...document.querySelectorAll('figcaption')].some((each) => each.textContent === 'reward0.5')")
            page.until("document.querySelector('#live').textContent === 'live'")
            page.evaluate("document.querySelector('#share').click()")
            page.until("document.querySelector('#curves p a')?.href.includes('share=')")
            assert page.evaluate("document.querySelector('#curves p a').href").startswith(f"{proxy.url}/#")
            page.evaluate("document.querySelector('header a').click()")
            page.until("document.querySelectorAll('#rows tr').length === 1")
            assert page.evaluate("document.querySelector('header nav a[href=docs]').href") == f"{proxy.url}/docs"
            page.open(f"{proxy.url}/docs")
            page.until("document.querySelectorAll('.opblock').length > 20")
            assert page.evaluate("document.querySelector('.servers option')?.value") == PREFIX
            page.open(f"{proxy.url}/chat")
            page.until("document.querySelectorAll('#model0 option').length > 0")
            assert page.evaluate("[...document.styleSheets].every((sheet) => sheet.cssRules.length > 0)")
            assert page.problems == [problem for problem in page.problems if "401" in problem], "the first had no key"
    assert proxy.outside == []
