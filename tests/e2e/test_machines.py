"""The documented machines, as far as the backends: what serve prints, what each is handed, and a client's first steps.

Cards are what CUDA_VISIBLE_DEVICES and a stand-in for nvidia-smi say. The trainer's and the sampler's own arithmetic
makes the plan; a toy backend takes what they are handed in their place.
"""

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import save_file

from tinsmith import BackendConfig, BackendContext, Placement
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.commands.load_settings import load_settings
from tinsmith.placement.machine import Machine
from tinsmith.placement.plan import make_plan
from tinsmith.plugins.loading import Plugins
from tinsmith.processes import serve
from tinsmith.settings.sources import Flag
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import TOKENS, datum, step
from tinsmith_checkpoints.huggingface import known_config

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CARD = 80 * GIB
MODEL = "Qwen/Qwen3-8B"

FOUR, OTHERS = ("0", "1", "2", "3"), ("4", "5", "6", "7")


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def believe(number: int) -> None:
        driver = tmp_path / "bin" / "nvidia-smi"
        driver.parent.mkdir()
        driver.write_text("#!/bin/sh\n" + f"echo {CARD >> 20}\n" * number)
        driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{driver.parent}:/bin:/usr/bin")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))

    return believe


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Placement]:
    """Return what the trainer and the sampler get; a toy backend is both."""
    found: dict[str, Placement] = {}
    made: list[ToyBackend] = []

    def taken(role: str) -> Callable[[BackendConfig, BackendContext], ToyBackend]:
        def create(config: BackendConfig, context: BackendContext) -> ToyBackend:
            del config
            found[role] = context.placement
            made[:] = made or [ToyBackend(ToyConfig(), context)]
            return made[0]

        return create

    monkeypatch.setattr("tinsmith_fsdp.backend.FsdpBackend", taken("trainer"))
    monkeypatch.setattr("tinsmith_vllm.sampler.VllmSampler", taken("sampler"))
    return found


@pytest.mark.parametrize(
    ("file", "number", "trainer", "sampler"),
    [
        ("one-card", 1, ("0",), ("0",)),
        pytest.param("eight-cards", 8, FOUR, OTHERS, marks=pytest.mark.thorough),
        pytest.param("eight-cards-colocated", 8, (*FOUR, *OTHERS), (*FOUR, *OTHERS), marks=pytest.mark.thorough),
        pytest.param("two-nodes", 8, (), (*FOUR, *OTHERS), marks=pytest.mark.thorough),
    ],
)
def test_a_documented_configuration_starts_as_planned(
    file: str,
    number: int,
    trainer: tuple[str, ...],
    sampler: tuple[str, ...],
    cards: Callable[[int], None],
    handed: dict[str, Placement],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cards(number)
    (tmp_path / "config.json").write_text(json.dumps(known_config(MODEL)))
    save_file({"read.by.nobody": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    plugins = Plugins.load()
    flags = [Flag("models.0.path", str(tmp_path))]
    settings = load_settings(plugins, file=ROOT / "deploy" / "gpus" / f"{file}.yaml", environ={}, flags=flags)
    placed = serve.assign_devices(settings, plugins)
    printed = capsys.readouterr().err
    with running_server(tmp_path / "data", models=placed.models) as server:
        first_steps(server.url)
    assert (handed["trainer"].devices, handed["sampler"].devices) == (trainer, sampler)
    for role, devices in (("trainer", trainer), ("sampler", sampler)):
        assert handed[role].device_bytes == (CARD if devices else None)
        memory = (handed[role].memory_bytes or 0) / GIB
        assert not devices or f"devices {', '.join(devices)}, {memory:.1f} GiB of each" in printed
    shares = [handed[role].share or 0 for role in ("trainer", "sampler")]
    together = bool(set(trainer) & set(sampler))
    assert (sum if together else max)(shares) == pytest.approx(0.92, abs=1e-6)
    if file == "one-card":
        assert printed.strip() == documented()


def first_steps(url: str) -> None:
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    model = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result(timeout=300)
    step(model, [datum()])
    trained = model.save_weights_and_get_sampling_client().result(timeout=300)
    params = tinker.SamplingParams(max_tokens=4, stop=[])
    (sequence,) = trained.sample(tinker.ModelInput.from_ints(TOKENS), 1, params).result(timeout=300).sequences
    assert len(sequence.tokens) == 4
    client.close("success").result(timeout=300)


def documented() -> str:
    """Return the plan that the page on several GPUs shows."""
    page = (ROOT / "docs" / "how-to" / "use-several-gpus.md").read_text(encoding="utf-8")
    found = re.search(r"```console\n(placement\n.*?)\n```", page, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_page_says_what_turns_make_room_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_config(MODEL)))
    plugins, machine = Plugins.load(), Machine(devices=("0",), device_bytes=CARD)
    rows: list[list[int | None]] = [[], [], []]
    for turns in ("false", "true"):
        flags = [Flag("models.0.path", str(tmp_path)), Flag("models.0.turns.enabled", turns)]
        settings = load_settings(plugins, file=ROOT / "deploy" / "gpus" / "one-card.yaml", environ={}, flags=flags)
        trainer, sampler = (each.demand for each in make_plan(settings, plugins, machine, [MODEL]))
        for row, figure in zip(rows, (trainer.batch_tokens, trainer.max_models, sampler.batch_tokens), strict=True):
            row.append(figure)
    page = (ROOT / "docs" / "how-to" / "use-several-gpus.md").read_text(encoding="utf-8")
    table = page.partition("| | Memory divided | Turns |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert [[int(cell.replace(",", "")) for cell in line.split("|")[2:4]] for line in table.splitlines()] == rows
