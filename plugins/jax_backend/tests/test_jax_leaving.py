"""A server that ends while its engine compiles the kernels leaves no compiler and no scratch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinsmith.machine import Scratch
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith_workers.testing.contract import alive, wait_until_ended

LIMIT_S = 300
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo a slow compiler
sleep 1000 &
echo $$ $! >> "$LOG"
touch "$TMPDIR/left"
wait
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_outlives_its_server(end: signal.Signals, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=1))
    compiler, log = tmp_path / "c++", tmp_path / "log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environ = {**os.environ, "CXX": str(compiler), "LOG": str(log), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tinsmith", "serve", str(tmp_path / "model"), "--backend", "jax"]
    with subprocess.Popen([*command, "--port", "0", "--data-dir", str(tmp_path / "data")], env=environ) as server:
        try:
            wait_until_it_compiles(server, log)
        finally:
            server.send_signal(end)
    wait_until_ended([int(word) for word in log.read_text().split()])
    left = list((tmp_path / "data" / "cache").glob("jax/*/native/*"))
    if end is signal.SIGTERM:
        assert left == []
        return
    [place] = left
    with Scratch("compiling-", place.parent) as fresh:
        assert list(place.parent.iterdir()) == [fresh.path], "the next engine sweeps it"


def wait_until_it_compiles(server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (log.exists() and log.read_text().endswith("\n")):
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(alive(int(word)) for word in log.read_text().split())
