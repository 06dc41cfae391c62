"""Every check against the jax backend, with a tiny model that has a tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest
from few_programs import SHAPE

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model
from tinsmith_conformance.checks import CHECKS
from tinsmith_conformance.runner import Runner
from tinsmith_conformance.tester import Target
from tinsmith_conformance.verdicts import Verdict

NAME = "tiny/qwen3"
LIMIT_S = 300.0  # a check may be the first that needs a program


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_the_jax_backend_passes_every_check(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", replace(SHAPE, family="qwen3", tied=True))
    options = {"plugin": "jax", "warm_up": False, "max_context_tokens": 256, "max_lora_rank": 16, "max_models": 16}
    model = ModelSettings(name=NAME, path=tmp_path / "model", backend=PluginSection.model_validate(options))
    keys = [{"key": f"tml-{name}", "tenant": name} for name in ("a", "b")]  # without them, none can be made
    with running_server(tmp_path, models=[model], server={"api_keys": keys}) as server:
        target = Target(url=server.url, model=NAME, key="tml-a", other_key="tml-b")
        outcomes = dict(Runner(target, limit_s=LIMIT_S).outcomes(CHECKS))
    wrong = {each.name: outcome.detail for each, outcome in outcomes.items() if outcome.verdict is not Verdict.PASSED}
    assert [*wrong] == [each.name for each in CHECKS if each.title.startswith("Images")], wrong
