"""A script through the unmodified SDK: `tinsmith serve` with Megatron ranks as trainer, JAX as sampler."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinsmith.testing import TinyShape, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SCRIPT = Path(__file__).parents[3] / "examples" / "pig_latin.py"
LIMIT_S = 840


@pytest.mark.timeout(1200)
def test_pig_latin_on_two_ranks_and_the_jax_sampler(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=2))
    model = {
        "name": "tiny",
        "path": str(tmp_path / "model"),
        "backend": {"plugin": "megatron", "device": "cpu", "tensor_parallel": 2, "max_context_tokens": 256},
        "sampler": {"plugin": "jax", "max_context_tokens": 256, "warm_up": False},
    }
    settings = {"server": {"port": 0, "data_dir": str(tmp_path / "data")}, "models": [model]}
    (tmp_path / "tinsmith.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "tinsmith", "serve", "--config", str(tmp_path / "tinsmith.yaml")]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stderr=log, env=environment(), start_new_session=True)
        try:
            url = wait_for_url(server, tmp_path / "data")
            done = subprocess.run(
                [sys.executable, str(SCRIPT), "--base-url", url, "--base-model", "tiny"],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env=environment(),
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(300)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}


def wait_for_url(process: "subprocess.Popen[bytes]", data_dir: Path) -> str:
    """Look until the server has written where it answers; it waits for its engine by itself."""
    while not ended(process):
        with contextlib.suppress(OSError, ValueError):
            url = json.loads((data_dir / "server.lock").read_text())["url"]
            if url is not None:
                return str(url)
    raise AssertionError(f"the server ended with {process.returncode}")


def ended(process: "subprocess.Popen[Any]") -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.1)
    return process.poll() is not None
