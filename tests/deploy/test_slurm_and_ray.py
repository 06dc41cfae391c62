"""The examples for Slurm and Ray are valid, and the one for Slurm is executed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_scale import API_KEYS, ENVIRONMENT, LINES, answers, kill, on_cpu, own_address, tutorial, write_model

from tinsmith.commands.load_settings import load_settings
from tinsmith.placement.machine import Machine
from tinsmith.placement.plan import make_plan
from tinsmith.placement.report import lines_of
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import Settings
from tinsmith_checkpoints.huggingface import known_config

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "slurm" / "tinsmith.sbatch"
PROGRAMS = {
    "tinsmith": f'exec {sys.executable} -m tinsmith "$@"',
    "srun": """
        for id in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$id "$@" & tasks+=($!); done
        trap 'kill "${tasks[@]}"' TERM
        wait
    """,
}


def settings_of(example: str, path: Path) -> dict[str, Any]:
    """Return the configuration of an example, with its model's files at another path."""
    settings: dict[str, Any] = yaml.safe_load((DEPLOY / example / "tinsmith.yaml").read_text())
    settings["models"][0]["path"] = str(path)
    return settings


@pytest.mark.parametrize("example", ["slurm", "ray"])
def test_the_configuration_is_valid(example: str, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    file = tmp_path / "tinsmith.yaml"
    file.write_text(yaml.safe_dump(settings_of(example, tmp_path / "tiny")))
    environ = {"TINSMITH_SERVER__API_KEYS": API_KEYS, "TINSMITH_SERVER__DATA_DIR": str(tmp_path)}
    assert load_settings(Plugins.load(), file=file, environ=environ).models


@pytest.mark.parametrize("example", ["slurm", "ray"])
def test_backend_and_sampler_divide_the_memory_of_the_cards_that_they_share(example: str, tmp_path: Path) -> None:
    """The workers took 92 % of each card, and vLLM 30 % of it."""
    (tmp_path / "config.json").write_text(json.dumps(known_config("Qwen3-32B")))
    settings = Settings.model_validate({"models": settings_of(example, tmp_path)["models"]})
    machine = Machine(devices=tuple(map(str, range(8))), device_bytes=80 << 30, others_alike=True)
    plan = make_plan(settings, Plugins.load(), machine, ["Qwen/Qwen3-32B"])
    assert sum(placed.placement.memory_bytes or machine.device_bytes for placed in plan) <= (machine.usable_bytes or 0)
    assert plan[0].demand.layout == "16 ranks"
    assert not [line for line in lines_of(plan) if line.startswith("warning")]


def test_the_script_asks_slurm_for_the_machines_that_the_backend_uses() -> None:
    options = shlex.split(" ".join(re.findall(r"^#SBATCH (.*)$", SCRIPT.read_text(), re.MULTILINE)))
    backend = settings_of("slurm", SCRIPT)["models"][0]["backend"]
    assert f"--nodes={backend['nnodes']}" in options
    assert f"--gpus-per-node={backend['nproc_per_node']}" in options


@contextmanager
def job(directory: Path, nodes: int) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run the script as Slurm would. Yields the server's URL."""
    head = own_address()
    for name, text in PROGRAMS.items():
        program = directory / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TINSMITH_", "SLURM_"))},
        **ENVIRONMENT,
        "PATH": f"{directory}:{os.environ['PATH']}",
        "SLURMD_NODENAME": head,
        "SLURM_NNODES": str(nodes),
        "SLURM_GPUS_ON_NODE": "1",
        "TINSMITH_CONFIG": str(directory / "tinsmith.yaml"),
        "TINSMITH_SERVER__API_KEYS": API_KEYS,
        "TINSMITH_SERVER__DATA_DIR": str(directory / "data"),
    }
    running = subprocess.Popen(["bash", str(SCRIPT)], env=environment, start_new_session=True)
    try:
        yield f"http://{head}:8000", running
    finally:
        kill(running)
        running.wait()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_the_script_serves_from_two_machines(tmp_path: Path) -> None:
    """They are processes of this one, started by the srun above, with one worker on the CPU each."""
    tiny = tmp_path / "tiny"
    write_model(tiny)
    settings = settings_of("slurm", tiny)
    [model] = settings["models"]
    settings["models"] = [on_cpu(model, name=str(tiny))]
    (tmp_path / "tinsmith.yaml").write_text(yaml.safe_dump(settings).replace("0.0.0.0", own_address()))
    with job(tmp_path, model["backend"]["nnodes"]) as (url, running):
        while not answers(f"{url}/healthz"):
            assert running.poll() is None
        assert len(list(tutorial(url, str(tiny), "trained"))) == LINES
        running.send_signal(signal.SIGTERM)  # Slurm, before the time limit
        assert running.wait() == 128 + signal.SIGTERM
