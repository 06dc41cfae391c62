"""The page, in a browser: a run that the SDK trains appears, its curve grows, and its reward arrives."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from browser import Browser
from test_curves import WAIT_S, trained

import tinsmith_trackers
from tinsmith.figures import Figures, Gpu, HostReport, Interface, MemoryPlan, Report, encode_report
from tinsmith.store import Lease
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import rl_datum

Take = Callable[[str], None]
Connect = Callable[[str, str], tinker.ServiceClient]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("page")) as server:
        yield server


def test_the_page_needs_no_key_and_no_other_host(server: RunningServer) -> None:
    page = httpx.get(server.url, timeout=WAIT_S)
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    names = [f"/{each}" for each in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)]
    assert len(names) == 5
    modules = re.findall(r'from "\./([^"]+)"', httpx.get(f"{server.url}/page/page.js", timeout=WAIT_S).text)
    assert {"api.js", "curves.js", "engines.js", "runs.js"} <= set(modules)
    for name in (*names, *(f"/page/{module}" for module in modules), "/page/uPlot.LICENSE"):
        file = httpx.get(server.url + name, timeout=WAIT_S).raise_for_status()
        assert name.startswith("/page/uPlot") or not re.search(r"https?://", file.text)
    for secret in ("/page/page.py", "/page/..%2fpage.py", "/page/%2e%2e/page.py"):
        assert httpx.get(server.url + secret, timeout=WAIT_S).status_code == 404


def test_a_run_is_seen_while_it_trains(server: RunningServer, connect: Connect, browser: Browser, take: Take) -> None:
    client = connect(server.url, "tml-ann")
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
    tinsmith_trackers.track(first).log(1, reward=0.5)
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


def test_a_run_is_read_by_keyboard_alone(server: RunningServer, connect: Connect, browser: Browser) -> None:
    client = connect(server.url, "tml-key")
    run = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
    trained(run, 3)
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{server.url}/?keys#run={run.get_info().model_id}")
    browser.until("document.querySelector('figure') && document.activeElement.id === 'title'")
    walked: list[str] = []
    while not (walked and walked[-1].startswith("loss:sum: ")):
        browser.press("Tab")
        walked.append(
            browser.evaluate(
                "document.activeElement.id || document.activeElement.ariaLabel || document.activeElement.textContent"
            )
        )
        assert len(walked) < 12, walked
    assert walked[:-1] == ["pick", "axis", "smooth", "from-step", "to-step", "tables", "share"]
    told = "document.activeElement.ariaLabel.split(': ').slice(1, -1).join()"
    for key, step in (("ArrowLeft", 2), ("ArrowLeft", 1), ("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1), ("End", 2)):
        browser.press(key)
        browser.until(f"{told} === 'step {step}'")
    browser.press("Enter")
    browser.until("document.querySelector('#point').open")
    browser.press("Escape")
    browser.until(f"!document.querySelector('#point').open && {told} === 'step 2'")
    browser.press("Tab")
    browser.until("document.activeElement.ariaLabel.startsWith('grad_norm: ')")
    assert browser.problems == []


def test_a_script_goes_on_from_a_checkpoint_near_a_point(
    server: RunningServer, browser: Browser, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By keyboard, on a server without keys: the copy then belongs to the key that is asked for."""
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-fay")
    run = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
    run_id = run.get_info().model_id
    trained(run, 2)
    path = run.save_state("kept").result(WAIT_S).path
    tinsmith_trackers.track(run).log(1, reward=0.123456789)
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{server.url}/?point#run={run_id}")
    browser.until("document.querySelector('figure .uplot')?.ariaLabel.startsWith('reward: ')")
    browser.evaluate("document.querySelector('figure .uplot').focus()")
    browser.press("End")
    browser.press("Enter")
    browser.until("document.querySelector('#point').open")
    exact = "[...document.querySelectorAll('#point-values tr')].map((row) => row.textContent)"
    assert "reward0.123456789" in browser.evaluate(exact)
    take("point")
    browser.look(width=1280, height=800, dark=False)
    browser.evaluate("document.querySelector('#point-more button').focus()")
    browser.press("Enter")
    browser.until("document.querySelector('#branch').open && document.activeElement.id === 'branch-name'")
    assert path in browser.evaluate("document.querySelector('#branch-about').textContent")
    browser.send("Input.insertText", text="once more")
    browser.press("Enter")
    browser.until("document.activeElement.id === 'branch-key'")
    take("branch")
    browser.look(width=1280, height=800, dark=False)
    browser.send("Input.insertText", text="tml-fay")
    browser.press("Enter")
    browser.until("document.activeElement.matches('#branch-made pre')")
    take("branched")
    monkeypatch.setenv("TINKER_API_KEY", "tml-fay")
    made: dict[str, Any] = {}
    exec(compile(browser.evaluate("document.activeElement.textContent"), "the page's script", "exec"), made)
    trained(made["training"], 1)
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": "tml-fay"}, timeout=WAIT_S) as http:
        second, branch, _ = http.get("/runs").raise_for_status().json()["runs"]
        assert (branch["name"], branch["tags"], branch["ended"]) == ("once more", ["branch"], "success")
        assert second["steps"] == 3
        runs = {each["run_id"]: each for each in http.get(f"/runs/{run_id}/lineage").json()["runs"]}
        sources = {name: [origin["source"] for origin in each["origins"]] for name, each in runs.items()}
        assert sources == {run_id: [], branch["run_id"]: [run_id], second["run_id"]: [branch["run_id"]]}
    browser.press("Escape")
    browser.until("!document.querySelector('#branch').open && document.activeElement.matches('#point-more button')")
    browser.press("Escape")
    browser.until("!document.querySelector('#point').open")
    assert run_id.replace(":", "%3A") in browser.evaluate("encodeURIComponent(location.hash)")


def test_a_part_of_the_curves_is_shown_in_full(server: RunningServer, browser: Browser, take: Take) -> None:
    """A chart of 2,000 steps shows about 1,000; those between them come, with all digits that tell them apart."""
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-gil")
    run = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
    path = f"{server.url}/api/v1/runs/{run.get_info().model_id}/metrics"
    for first in (0, 1000):
        points = [{"step": step, "values": {"long": 10**6 + step / 1000}} for step in range(first, first + 1000)]
        httpx.post(path, json={"points": points}, headers={"x-api-key": "tml-gil"}, timeout=WAIT_S).raise_for_status()
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{server.url}/?part#run={run.get_info().model_id}")
    plot = "(await import('/page/curves.js')).charts.get('long')?.plot"
    thin = f"Math.trunc({plot}?.data[0].length / 100) === 10"  # with the newest ones, which the stream repeats
    browser.until(thin)
    browser.evaluate(
        "for (const [id, step] of [['from-step', 500], ['to-step', 510]]) {"
        " document.getElementById(id).value = step; document.getElementById(id).dispatchEvent(new Event('change')); }"
    )
    browser.until(f"{plot}.data[0].join() === '{','.join(map(str, range(499, 512)))}'")
    caption = "document.querySelector('figure .uplot').ariaLabel"
    browser.evaluate("document.querySelector('figure .uplot').focus()")
    for told in ("step 510: 1.00000051e+6", "step 509: 1.000000509e+6"):
        browser.press("ArrowLeft")
        browser.until(f"{caption} === 'long: {told}'")
    texts = f"(async () => {plot}.axes[1]._values)()"
    ticks = browser.evaluate(texts)
    assert len(set(ticks)) == len(ticks) > 2
    take("part")
    browser.look(width=1280, height=800, dark=False)
    browser.evaluate("document.querySelector('#tables').click()")
    rows = "[...document.querySelectorAll('#charts tbody tr')]"
    cells = f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))"
    expected = [[str(step), str(10**6 + step / 1000)] for step in range(510, 499, -1)]
    browser.until(f"JSON.stringify({cells}) === JSON.stringify({expected})")
    take("tables")
    browser.look(width=1280, height=800, dark=False)
    browser.evaluate("document.querySelector('#tables').click()")
    browser.evaluate("document.querySelector('#whole-run').click()")
    browser.until(thin)
    box = browser.evaluate("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    y = box["top"] + box["height"] / 2
    drawn = (("mousePressed", 0.25), ("mouseMoved", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.5))
    for kind, part in drawn:
        x = box["left"] + part * box["width"]
        browser.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    browser.until("document.querySelector('#to-step').value !== '' && !document.querySelector('#whole-run').hidden")
    first, last = (int(browser.evaluate(f"document.querySelector('#{end}').value")) for end in ("from-step", "to-step"))
    assert (abs(first - 500) < 20, abs(last - 1000) < 20) == (True, True)
    assert not browser.evaluate("document.querySelector('#point').open")
    assert browser.problems == []


HIDE = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true }); " + (
    "document.dispatchEvent(new Event('visibilitychange'))"
)


def test_a_hidden_page_holds_no_connection_and_misses_no_step(
    server: RunningServer, connect: Connect, browser: Browser
) -> None:
    """Beyond six streams of one browser, hidden pages would keep all others of the server from loading."""
    client = connect(server.url, "tml-dot")
    run = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
    trained(run, 1)
    browser.open(f"{server.url}/?hidden#run={run.get_info().model_id}")
    browser.until("document.querySelector('figure') && document.querySelector('#live').textContent === 'live'")
    browser.evaluate(
        "window.streams = []; const asked = fetch; window.fetch = (path, options) => {"
        " if (path.includes('run_events')) streams.push(options.signal); return asked(path, options); }; true"
    )
    browser.evaluate(HIDE % "true")
    trained(run, 70)  # more than a stream repeats
    browser.evaluate(HIDE % "false")
    steps = "import('/page/curves.js').then((view) => view.charts.get('loss:sum')?.plot.data[0].length)"
    browser.until(f"(await {steps}) === 71")
    browser.until("streams.length === 1")
    browser.evaluate(HIDE % "true")
    assert browser.evaluate("streams.map((each) => each.aborted)") == [True]


def report_host(server: RunningServer) -> None:
    """Report what an engine on a host with a GPU would."""
    gpu, traffic = Gpu("GPU-1", 1, "H100", 0.75, 20 * 10**9, 80 * 10**9), Interface("eth0", 5 * 10**9, 10**6)
    lease = server.call(server.store.acquire_lease("toy", engine_id="far", duration_s=WAIT_S))
    assert isinstance(lease, Lease)
    parts = (("base model", 9 * 10**9), ("adapters of 4 models", 10**9))
    plan = MemoryPlan(parts=parts, total=10**10, limit=72 * 10**9, devices=("1",))
    report = Report(Figures().series(), HostReport("node-1", 1000, 2.5, (gpu,), (traffic,)), memory=plan)
    server.call(server.store.report_figures(lease, encode_report(report)))


def test_engines_show_what_waits_and_for_whom(tmp_path: Path, browser: Browser, take: Take) -> None:
    keys = [{"key": f"tml-{name}", "tenant": name, "admin": name == "root"} for name in ("ann", "bob", "root")]
    with running_server(tmp_path, server={"api_keys": keys}, engines=False) as server, ExitStack() as clients:
        for name in ("ann", "bob"):
            client = clients.enter_context(tinker.ServiceClient(base_url=server.url, api_key=f"tml-{name}"))
            client.create_lora_training_client(base_model="toy", rank=4)  # waits: no engine runs
        shown = "[...document.querySelectorAll('#cards tbody tr')].map((row) => row.cells[0].textContent).join()"
        browser.look(width=1280, height=800, dark=False)
        browser.open(f"{server.url}/#view=engines&key=tml-root")
        browser.until(f"{shown} === 'ann,bob'")
        assert "starting" in browser.evaluate("document.querySelector('#cards h2').textContent")
        assert browser.evaluate("document.querySelectorAll('#hosts article').length") == 0
        report_host(server)
        browser.until("document.querySelectorAll('#hosts tbody tr').length === 2")
        assert browser.evaluate("document.querySelector('#hosts tbody').textContent") == "1H10075 %20 GB of 80 GB"
        assert browser.evaluate("document.querySelectorAll('#hosts tbody')[1].rows[0].cells[3].textContent") == "5 GB"
        memory = "[...document.querySelectorAll('.memory tbody tr')].map((row) => row.textContent)"
        assert browser.evaluate(memory) == [
            "base model9 GB",
            "adapters of 4 models1 GB",
            "planned in all10 GB",
            "used of the devices, by all processes20 GB",
            "limit72 GB",
        ]
        take("engines")
        assert browser.evaluate("document.querySelector('#cards').textContent.includes('Most of what')") is False
        figures = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
        kind = '{base_model="toy",kind="create_model",state="queued"}'
        assert f"tinsmith_pending_operations{kind} 2.0" in figures
        assert f"tinsmith_pending_oldest_seconds{kind} " in figures
        assert "process_resident_memory_bytes " in figures
        client.create_lora_training_client(base_model="toy", rank=4)
        browser.until("document.querySelector('#cards').textContent.includes(`pending is bob's: 2 of 3 operations`)")
        browser.open(f"{server.url}/?again#view=engines&key=tml-ann")
        browser.until(f"{shown} === 'ann'")
        assert browser.evaluate("document.querySelectorAll('#hosts article').length") == 0
        browser.press("Escape")
        browser.until("document.querySelectorAll('#rows tr').length === 1")
        now = browser.evaluate("document.querySelector('#rows .now').textContent")
        assert now.startswith("now: no engine of 'toy' has started yet (")
        assert browser.evaluate("document.querySelectorAll('#rows .tag').length") == 0
        browser.evaluate("document.querySelector('#rows a').focus()")
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann").create_lora_training_client("toy", rank=4)
        renew = "await (await import('/page/runs.js')).renewRuns()"  # as the page does every few seconds
        browser.until(f"{renew}, document.querySelectorAll('#rows tr').length === 2")
        assert browser.evaluate("document.activeElement === document.querySelectorAll('#rows a')[1]")
        browser.open(f"{server.url}/?list#key=tml-root")
        tags = "[...document.querySelectorAll('#rows .tag')].map((tag) => tag.textContent).sort().join()"
        browser.until(f"{tags} === 'ann,ann,bob,bob'")
        browser.evaluate("document.querySelector('#rows a').click()")
        browser.until("document.querySelector('#now').textContent.startsWith('0 steps · creating · now: no engine of')")
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
        assert browser.asked == [], "the tab had no key that a server knows"
        for browser.agrees, key in ((False, "tml-secret"), (True, "tml-of-another")):
            browser.evaluate("location.hash = '#key=tml-of-another'")
            browser.until("location.hash === ''")
            assert browser.evaluate("sessionStorage.getItem('key')") == key
        question = "This link brings an API key. Use it in this tab instead of the key that you gave?"
        assert browser.asked == [question] * 2


def test_health_shows_recoveries_verdicts_commits_and_quotas(tmp_path: Path, browser: Browser, take: Take) -> None:
    keys = [{"key": f"tml-{name}", "tenant": name, "admin": name == "root"} for name in ("ann", "root")]
    with (
        running_server(tmp_path, server={"api_keys": keys}) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as client,
    ):
        training = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
        training.save_weights_and_get_sampling_client().result(WAIT_S)
        found = httpx.get(f"{server.url}/api/v1/engines", headers={"x-api-key": "tml-root"}, timeout=WAIT_S).json()
        assert found["commits"]["number"] > 0
        assert 0 < found["commits"]["mean_s"] <= found["commits"]["most_s"]
        tenants = httpx.get(f"{server.url}/api/v1/engines", headers={"x-api-key": "tml-ann"}, timeout=WAIT_S).json()
        assert "hosts" in found
        assert "hosts" not in tenants
        browser.look(width=1280, height=800, dark=False)
        browser.open(f"{server.url}/#view=health&key=tml-root")
        browser.until("document.querySelectorAll('#checks article').length === 3")
        text = browser.evaluate("document.querySelector('#checks').textContent")
        assert "toyready" in text
        assert "commits of this server" in text
        assert browser.evaluate("document.querySelectorAll('#checks table')[1].rows[1].cells[0].textContent") == "ann"
        take("health")
        assert browser.problems == []


def test_axe_finds_no_serious_fault(server: RunningServer, connect: Connect, browser: Browser) -> None:
    """In every view, in light and dark, on a desktop and a phone."""
    axe = Path(pytest.importorskip("axe_core_python").__file__).parent / "axe.min.js"
    client = connect(server.url, "tml-eve")
    runs = [client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S) for _ in range(2)]
    for run in runs:
        passed = run.forward_backward([rl_datum([1, 2, 3, 4], [0.0, 0.0, -0.5], 1.0)], "importance_sampling")
        run.optim_step(tinker.AdamParams(learning_rate=0.1)).result(WAIT_S)
        passed.result(WAIT_S)
    runs[0].save_state("kept").result(WAIT_S)
    one, other = (run.get_info().model_id for run in runs)
    views = {
        "": "document.querySelector('#rows tr')",
        f"#run={one}": "document.querySelector('figure')",
        f"#run={one}&run={other}": "document.querySelector('figure')",
        f"#run={one}&view=rollouts": "document.querySelector('#rollout .sampled')",
        f"#run={one}&view=lineage": "document.querySelector('.tree a')",
        f"#run={one}&view=time": "document.querySelector('#bars .bar-of')",
        "#view=engines": "document.querySelector('#cards article')",
        "#view=health": "document.querySelector('#checks article')",
        f"#run={one}&with=tables": "document.querySelector('#charts table')",
        f"#run={one}&view=lineage&with=branch": "document.querySelector('#branch').open",
    }
    actions = {"tables": "document.querySelector('#tables')", "branch": "document.querySelector('#checkpoints button')"}
    for number, (view, drawn) in enumerate(views.items()):
        browser.open(f"{server.url}/?{number}{view}")
        if action := actions.get(view.rpartition("with=")[2]):
            browser.until(action)
            browser.evaluate(f"{action}.click()")
        browser.until(drawn)
        browser.evaluate(f"{axe.read_text()}; true")
        for width, height, dark in ((1280, 800, False), (390, 844, True)):
            browser.look(width=width, height=height, dark=dark)
            faults = browser.evaluate(
                "axe.run().then((found) => found.violations.filter((each) => /serious|critical/.test(each.impact))"
                ".map((each) => [each.id, each.nodes.map((node) => node.html)]))"
            )
            assert faults == [], (view, dark)
