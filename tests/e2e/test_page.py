"""The page, in a browser: a run that the SDK trains appears, its curve grows, and its reward arrives."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from browser import Browser
from test_curves import WAIT_S, trained

import tinsmith
from tinsmith.testing.harness import RunningServer, running_server

Take = Callable[[str], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("page")) as server:
        yield server


def test_the_page_needs_no_key_and_no_other_host(server: RunningServer) -> None:
    page = httpx.get(server.url, timeout=WAIT_S)
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    names = re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text)
    assert len(names) == 4
    modules = re.findall(r'from "\./([^"]+)"', httpx.get(f"{server.url}/page/page.js", timeout=WAIT_S).text)
    assert {"api.js", "curves.js", "engines.js", "runs.js"} <= set(modules)
    for name in (*names, *(f"/page/{module}" for module in modules), "/page/uPlot.LICENSE"):
        file = httpx.get(server.url + name, timeout=WAIT_S).raise_for_status()
        assert name.startswith("/page/uPlot") or not re.search(r"https?://", file.text)
    for secret in ("/page/page.py", "/page/..%2fpage.py", "/page/%2e%2e/page.py"):
        assert httpx.get(server.url + secret, timeout=WAIT_S).status_code == 404


def test_a_run_is_seen_while_it_trains(server: RunningServer, browser: Browser, take: Take) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
    first, second = (client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S) for _ in range(2))
    trained(first, 2)
    browser.look(width=1280, height=800, dark=False)
    browser.open(server.url)  # which has no keys, so its page asks for none
    browser.until("document.querySelectorAll('#rows tr').length === 2")
    assert browser.evaluate("document.querySelector('#forget').hidden")
    take("runs")

    run_id = first.get_info().model_id
    browser.evaluate(f"""document.querySelector(`[href="#run={run_id.replace(":", "%3A")}"]`).click()""")
    caption = "document.querySelector('figure .uplot')?.getAttribute('aria-label')"
    browser.until(f"{caption}?.startsWith('loss:sum: ') && document.querySelector('#live').textContent === 'live'")
    before = browser.evaluate(caption)
    trained(first, 1)
    browser.until(f"{caption} !== {before!r}")
    tinsmith.track(first).log(1, reward=0.5)
    browser.until("[...document.querySelectorAll('figcaption')].some((each) => each.textContent === 'reward0.5')")
    take("run")

    browser.press("Escape")
    browser.until("document.querySelectorAll('#rows input').length === 2")
    trained(second, 3)
    browser.evaluate("document.querySelectorAll('#rows input').forEach((each) => each.click())")
    browser.evaluate("document.querySelector('#compare').click()")
    browser.until("document.querySelectorAll('#legend li').length === 2 && document.querySelector('figure')")
    data = "import('/page/curves.js').then((view) => view.charts.get('loss:sum').plot.data.map((each) => each.length))"
    assert browser.evaluate(data) == [3, 3, 3]
    take("compare")
    assert browser.problems == []


def test_engines_show_what_waits_and_for_whom(tmp_path: Path, browser: Browser, take: Take) -> None:
    keys = [{"key": f"tml-{name}", "tenant": name, "admin": name == "root"} for name in ("ann", "bob", "root")]
    with running_server(tmp_path, server={"api_keys": keys}, engines=False) as server:
        for name in ("ann", "bob"):
            client = tinker.ServiceClient(base_url=server.url, api_key=f"tml-{name}")
            client.create_lora_training_client(base_model="toy", rank=4)  # waits: no engine runs
        shown = "[...document.querySelectorAll('#cards tbody tr')].map((row) => row.cells[0].textContent).join()"
        browser.look(width=1280, height=800, dark=False)
        browser.open(f"{server.url}/#view=engines&key=tml-root")
        browser.until(f"{shown} === 'ann,bob'")
        assert "starting" in browser.evaluate("document.querySelector('#cards h2').textContent")
        take("engines")
        figures = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
        kind = '{base_model="toy",kind="create_model",state="queued"}'
        assert f"tinsmith_pending_operations{kind} 2.0" in figures
        assert f"tinsmith_pending_oldest_seconds{kind} " in figures
        assert "process_resident_memory_bytes " in figures
        browser.open(f"{server.url}/?again#view=engines&key=tml-ann")
        browser.until(f"{shown} === 'ann'")
        browser.press("Escape")
        browser.until("!document.querySelector('#runs').hidden")
        assert browser.problems == []


def test_a_server_with_keys_asks_for_one_until_it_is_known(tmp_path: Path, browser: Browser, take: Take) -> None:
    keys = [{"key": "tml-secret", "tenant": "ann"}]
    with running_server(tmp_path, server={"api_keys": keys}) as server:
        browser.open(server.url)
        browser.until("document.activeElement?.id === 'key'")
        assert server.url in browser.evaluate("document.querySelector('#snippet').textContent")
        assert browser.evaluate("document.querySelector('#problem').hidden")
        take("key")
        browser.evaluate("document.querySelector('#key').value = 'tml-secret'")
        browser.press("Enter")
        browser.until("!document.querySelector('#runs').hidden && !document.querySelector('#none').hidden")
        assert browser.evaluate("sessionStorage.getItem('key')") == "tml-secret"
        browser.evaluate("document.querySelector('#forget').click()")
        browser.until("document.activeElement?.id === 'key'")
        browser.open(f"{server.url}/?again#key=tml-wrong")
        browser.until("document.querySelector('#problem')?.hidden === false && !document.querySelector('#ask').hidden")
        assert "not known" in browser.evaluate("document.querySelector('#problem').textContent")
        browser.open(f"{server.url}/#key=tml-secret")
        browser.until("document.querySelector('#runs') && !document.querySelector('#runs').hidden")
        assert "secret" not in browser.evaluate("location.href")
