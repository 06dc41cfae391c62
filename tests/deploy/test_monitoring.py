"""The dashboard and the alert rules: every metric that they name is on `/metrics` after a short load.

With the package prometheus, a real one scrapes a server under load, and each panel of the dashboard has data there.
"""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from few_programs import FEW_PROGRAMS, SHAPE
from prometheus_client.parser import text_string_to_metric_families

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
ELSEWHERE = re.compile("tinsmith_gpu_|tinsmith_pending_")
"""Tested in tests/unit/test_figures.py and tests/e2e/test_page.py: there may be no GPU, and nothing waits here."""
WAIT_S = 300.0
LOAD = """
import sys, numpy, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-ann")
training = service.create_lora_training_client(base_model="toy", rank=4).result()
inputs = {"target_tokens": numpy.array([2, 3]), "weights": numpy.ones(2, numpy.float32)}
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
training.forward_backward([datum], "cross_entropy").result()
training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
sampler = training.save_weights_and_get_sampling_client().result()
sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=2)).result()
"""


def panels() -> list[str]:
    found = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    return [each["expr"] for panel in found for each in panel["targets"]]


def expressions() -> list[str]:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert len(rules) == 8
    return [rule["expr"] for rule in rules] + panels()


def named() -> set[str]:
    return {name for each in expressions() for name in re.findall(r"\b(?:tinsmith|process)_\w+", each)}


def test_every_metric_that_is_watched_exists(tmp_path: Path) -> None:
    """The last report of an engine comes with its end, so nothing here waits for the next one."""
    with running_server(tmp_path) as server:
        subprocess.run([sys.executable, "-c", LOAD, server.url], check=True)
    with running_server(tmp_path, engines=False) as server:
        httpx.get(f"{server.url}/healthz", timeout=WAIT_S).raise_for_status()
        text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).raise_for_status().text
    samples = {each.name for family in text_string_to_metric_families(text) for each in family.samples}
    assert {name for name in named() - samples if not ELSEWHERE.match(name)} == set()
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families)), "Prometheus refuses a family that comes twice"
    assert re.search(r'tinsmith_tokens_total\{base_model="toy",of="trained"\} 2\.0', text)
    assert re.search(
        r'tinsmith_operation_seconds_count\{base_model="toy",kind="optim_step",outcome="success"\} 1\.0', text
    )


@pytest.mark.thorough
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of the package prometheus")
    of_panels = [
        {"record": f"tinsmith:{number}", "expr": each.replace("$__rate_interval", "1m")}
        for number, each in enumerate(expressions())
    ]
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": of_panels}]}))
    subprocess.run([promtool, "check", "rules", MONITORING / "alerts.yaml", tmp_path / "panels.yaml"], check=True)


LOAD_WITHOUT_END = """
import sys, numpy, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-ann")
training = service.create_lora_training_client(base_model="tiny", rank=4).result()
inputs = {"target_tokens": numpy.array([2, 3]), "weights": numpy.ones(2, numpy.float32)}
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
wrong = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={})
print("loaded", flush=True)
while True:
    for sent, fails in ((datum, False), (wrong, True)):
        asked = training.forward_backward([sent], "cross_entropy"), training.optim_step(tinker.AdamParams())
        for each in asked:
            try:
                each.result()
            except tinker.TinkerError:
                assert fails, "only the step of a refused pass fails"
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(list(range(3, 40)))
    for _ in range(2):
        sampler.sample(prompt, 4, tinker.SamplingParams(max_tokens=8)).result()
"""


class Prometheus:
    """A real one, which scrapes a server each second."""

    def __init__(self, binary: str, directory: Path, target: str) -> None:
        config = {
            "global": {"scrape_interval": "1s"},
            "rule_files": [str(MONITORING / "alerts.yaml")],
            "scrape_configs": [{"job_name": "tinsmith", "static_configs": [{"targets": [target]}]}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))
        command = [binary, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        self._log = (directory / "prometheus.log").open("w+")
        self.process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=self._log)

    def url(self) -> str:
        """Return where it listens, once it does: it chooses the port, and does not say which."""
        while True:
            assert self.process.poll() is None, self.log
            for each in psutil.Process(self.process.pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    return f"http://127.0.0.1:{each.laddr.port}"

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


def has_data(http: httpx.Client, expression: str, since_s: float) -> bool:
    """Return whether the panel would show a number at any moment since then."""
    asked = {"query": expression.replace("$__rate_interval", "10s"), "start": since_s, "end": time.time(), "step": 1}
    answer = http.get("/api/v1/query_range", params=asked)
    if answer.status_code == 503:  # it reads its own data first
        return False
    series = answer.raise_for_status().json()["data"]["result"]
    return any(math.isfinite(float(value)) for each in series for _, value in each["values"])


@pytest.mark.thorough
def test_every_panel_has_data_in_prometheus(tmp_path: Path) -> None:
    """But for the GPUs: the load trains, samples, saves, is refused, waits and compiles."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("needs prometheus, of the package prometheus")
    write_tiny_model(tmp_path / "model", SHAPE)
    backend = PluginSection.model_validate({"plugin": "jax", "warm_up": False, **FEW_PROGRAMS})
    model = ModelSettings(name="tiny", path=tmp_path / "model", backend=backend)
    wanted = {each for each in panels() if "tinsmith_gpu_" not in each}
    assert len(wanted) > 20
    with ExitStack() as stack:
        server = stack.enter_context(running_server(tmp_path / "data", models=(model,)))
        since_s = time.time()
        prometheus = Prometheus(binary, tmp_path, server.url.removeprefix("http://"))
        stack.callback(prometheus.close)
        load = subprocess.Popen([sys.executable, "-c", LOAD_WITHOUT_END, server.url], stderr=subprocess.PIPE, text=True)
        stack.callback(load.communicate)
        stack.callback(load.kill)
        http = stack.enter_context(httpx.Client(base_url=prometheus.url(), timeout=WAIT_S))
        while wanted:
            assert load.poll() is None, load.communicate()[1]
            assert prometheus.process.poll() is None, prometheus.log
            assert time.time() - since_s < WAIT_S, f"no data: {wanted}"
            wanted = {each for each in wanted if not has_data(http, each, since_s)}
            time.sleep(1)  # it has no call that waits
        rules = http.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        assert [each["health"] for group in rules for each in group["rules"]].count("err") == 0
