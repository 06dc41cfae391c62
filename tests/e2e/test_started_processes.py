"""What `tinsmith serve` starts: where each process listens, and that none imports from the current directory."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
import yaml
from listeners import listeners, own_address, tree

from tinsmith.processes.data_dir_lock import read_server_url
from tinsmith.settings import DataDir
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith.testing.sdk_data import TOKENS, datum, step, wait_until_at_rest

WAIT_S = 900
TRAPS = (
    *(
        "tinsmith",
        "tinsmith_jax",
        "tinsmith_fsdp",
        "tinsmith_megatron",
        "tinsmith_oidc",
        "tinsmith_openai",
        "tinsmith_otel",
        "tinsmith_vllm",
    ),
    *("numpy", "torch", "jax", "vllm", "megatron", "transformers", "pydantic", "sqlalchemy", "msgspec", "uvloop"),
    *("uuid", "secrets", "sitecustomize", "usercustomize"),
)
TRAP = """
from pathlib import Path
with Path({log!r}).open("a") as log:
    print(__name__, file=log)
raise ImportError("a module of the current directory was imported")
"""
SMALL = {"max_context_tokens": 128, "max_lora_rank": 8}
JAX = {"plugin": "jax", "warm_up": False, **SMALL}
VLLM = {"plugin": "vllm", "max_model_len": 128, "max_num_seqs": 8, "kv_cache_bytes": 32 << 20, "max_lora_rank": 8}
RANKS = {"device": "cpu", "nproc_per_node": 2, **SMALL}


@dataclass(frozen=True, slots=True)
class SetUp:
    backend: Mapping[str, Any]
    sampler: Mapping[str, Any] | None = None
    num_processes: int = 2  # at least: the server, the engine, and what that starts
    variables: Mapping[str, str] = field(default_factory=dict)


SET_UPS = {
    "toy": SetUp({"plugin": "toy"}),
    "jax": SetUp(JAX),
    "jax mesh": SetUp({**JAX, "mesh": {"fsdp": 2}, "nproc_per_node": 2, "simulated_devices": 1}, num_processes=4),
    "fsdp and vllm": SetUp({"plugin": "fsdp", **RANKS}, VLLM, num_processes=5),
    "vllm on two": SetUp(JAX, {**VLLM, "tensor_parallel_size": 2}, 5, {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}),
    "megatron and jax": SetUp({"plugin": "megatron", "tensor_parallel": 2, **RANKS}, JAX, num_processes=4),
}
SHORT = "toy"


@pytest.mark.slow
@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHORT else pytest.mark.thorough) for name in SET_UPS]
)
def test_processes_of_one_machine_listen_on_loopback_and_import_what_is_installed(name: str, tmp_path: Path) -> None:
    set_up = SET_UPS[name]
    with serving(set_up, tmp_path) as (server, url):
        use(url)
        processes = tree(server.pid)
        assert len(processes) >= set_up.num_processes
        found = listeners(processes)
    assert f"127.0.0.1:{url.rpartition(':')[2]}" in {each.address for each in found}, "the server's own is seen"
    assert [each for each in found if not each.is_private] == []


@contextmanager
def serving(set_up: SetUp, directory: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Start a server in a directory full of traps. Yields it and its URL when its engine is ready."""
    trapped = directory / "trapped"
    trapped.mkdir()
    imported = directory / "imported"
    for module in TRAPS:
        (trapped / f"{module}.py").write_text(TRAP.format(log=str(imported)))
    write_tiny_model(directory / "model", TinyShape(num_layers=2))
    model = {"name": "tiny", "path": str(directory / "model"), "backend": dict(set_up.backend)}
    if set_up.sampler is not None:
        model["sampler"] = dict(set_up.sampler)
    settings = {"server": {"port": 0, "data_dir": str(directory / "data")}, "models": [model]}
    (directory / "tinsmith.yaml").write_text(yaml.safe_dump(settings))
    program = Path(sys.executable).with_name("tinsmith")
    with (directory / "log").open("wb") as log:
        command = [*named_by_its_address(), str(program), "serve", "--config", str(directory / "tinsmith.yaml")]
        server = subprocess.Popen(
            command, stderr=log, env={**environment(), **set_up.variables}, cwd=trapped, start_new_session=True
        )
    try:
        yield server, wait_until_ready(server, directory, imported)
    except BaseException:
        print((directory / "log").read_text(errors="replace"))
        raise
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(WAIT_S)
    assert not imported.exists(), imported.read_text()


def named_by_its_address() -> list[str]:
    """Give the processes a machine whose name leads to an address that others reach: frameworks like to listen there.

    Only root may do that; for others, the name leads wherever it leads.
    """
    address = own_address()
    if os.geteuid() != 0 or address is None or shutil.which("unshare") is None:
        return []
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', address]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}


def wait_until_ready(server: "subprocess.Popen[bytes]", directory: Path, imported: Path) -> str:
    while server.poll() is None:
        assert not imported.exists(), f"imported from the current directory: {imported.read_text()}"
        url = read_server_url(DataDir.at(directory / "data"), pid=server.pid)
        try:
            if url is not None:
                urllib.request.urlopen(f"{url}/readyz", timeout=WAIT_S).close()
                return url
        except urllib.error.HTTPError as error:
            error.close()
        time.sleep(0.1)
    raise AssertionError(f"the server ended with {server.returncode}")


def use(url: str) -> None:
    """Train and sample: frameworks may open sockets when they are first asked to."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    model = client.create_lora_training_client(base_model="tiny", rank=4).result(timeout=WAIT_S)
    step(model, [datum(TOKENS)])
    sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    prompt, params = tinker.ModelInput.from_ints(TOKENS), tinker.SamplingParams(max_tokens=2)
    sampler.sample(prompt, num_samples=1, sampling_params=params).result(timeout=WAIT_S)
    wait_until_at_rest(sampler)
    client.close("success").result(timeout=WAIT_S)
