"""What deploy/ is executed with: a model and devices that are here, the client that trains it, and processes."""

import json
import math
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from tinsmith.testing import TinyShape, write_tiny_model

API_KEY: Final = "tml-a-key-of-the-test"
API_KEYS: Final = json.dumps([{"key": API_KEY, "tenant": "me"}])
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CLIENT: Final = Path(__file__).with_name("tutorial_client.py")
STEPS: Final = 6
LINES: Final = STEPS + 2

_SMALL: Final = {"max_context_tokens": 256}
_GLOO: Final = {
    "fsdp": {"device": "cpu", "nproc_per_node": 1, **_SMALL},
    "jax": {"max_batch_tokens": 1024, "warm_up": False, **_SMALL},
}


def write_model(directory: Path) -> None:
    write_tiny_model(directory, TinyShape(num_layers=2, num_kv_heads=4))


def on_cpu(model: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what is served in the place of an item of `models`: with as many machines, in the same way."""
    backend = {**model["backend"], **_GLOO[model["backend"]["plugin"]]}
    if "mesh" in backend:
        backend["simulated_devices"] = math.prod(backend["mesh"].values()) // backend.get("nnodes", 1)
    served = {"name": name, "path": model["path"], "backend": backend}  # the SDK loads the tokenizer by its name
    return served if "sampler" not in model else {**served, "sampler": {"plugin": "jax", "warm_up": False, **_SMALL}}


def tutorial(url: str, model: str, checkpoint: str) -> Generator[str, None, None]:
    """Run the tutorial's script. Yields lines as they are written: the steps, the checkpoint's path, what is sampled.

    Closing the iterator ends the script.
    """
    command = [sys.executable, str(CLIENT), checkpoint, "--base-url", url, "--base-model", model]
    environment = {**os.environ, **ENVIRONMENT, "TINKER_API_KEY": API_KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
        assert client.stdout is not None
        try:
            yield from client.stdout
            assert client.wait() == 0, "the script has failed; see its output"
        finally:
            client.kill()


def saved(data_dir: Path, checkpoint: str) -> Mapping[str, bytes]:
    """Return the files with the weights and moments of a checkpoint."""
    [directory] = data_dir.glob(f"checkpoints/**/{checkpoint}")
    files = {each.name: each.read_bytes() for each in directory.glob("*.safetensors")}
    assert files
    return files


def own_address(index: int = 0) -> str:
    """Return a loopback address that no other process of this machine uses."""
    number = os.getpid()  # below 2**22
    return f"127.{64 + 64 * index + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def answers(url: str) -> bool:
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(psutil.NoSuchProcess):
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
