"""The dashboard and the alert rules: every metric that they name is on `/metrics` after a short load."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tinsmith.testing.harness import running_server

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


def expressions() -> list[str]:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    assert len(rules) == 8
    return [rule["expr"] for rule in rules] + [each["expr"] for panel in panels for each in panel["targets"]]


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
