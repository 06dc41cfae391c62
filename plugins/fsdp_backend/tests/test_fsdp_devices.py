"""Where ranks compute: a GPU that torch cannot use is refused with torch's reason, and never replaced by the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsdp_harness import make_backend

from tinsmith import ConfigError, Device, Placement
from tinsmith.torch_workers import find_device, local_devices
from tinsmith.workers import Launch, Launcher, WorkerDevice, agreed_device, alone
from tinsmith_fsdp.rank import Rank


@pytest.fixture(autouse=True)
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch for CUDA as it behaves with a driver that it cannot use."""

    def init() -> None:
        message = "The NVIDIA driver on your system is too old (found version 12020)."
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_the_cpu_never_takes_the_place_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device(None, 0) == find_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"too old \(found version 12020\)\), and this machine has no NVIDIA GPUs"):
        find_device("cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert find_device("cpu", 0) == torch.device("cpu")
    assert local_devices("cpu") == [Device(name="cpu")]
    looks: tuple[Callable[[], object], ...] = (
        lambda: find_device(None, 1),
        local_devices,
        lambda: local_devices("cuda"),
    )
    for look in looks:
        with pytest.raises(ConfigError, match=r"torch .* sees no GPU .*'3,5': install a driver .*`device: cpu`"):
            look()


def test_a_rank_with_a_device_does_not_start_on_the_cpu(
    fsdp_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trained there in float32, while the server had printed how much of the card it would take."""

    def launch(wanted: Launch) -> Launcher:
        for name, value in wanted.environment.items():
            monkeypatch.setenv(name, value)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        make_backend(fsdp_models["qwen3"], tmp_path, launch, placement=Placement(devices=("0",)), device=None)
    with alone() as worker, pytest.raises(ConfigError, match=r"too old .* CUDA_VISIBLE_DEVICES is '0'"):
        Rank(worker)


def test_a_worker_that_computes_elsewhere_than_asked_is_refused() -> None:
    """Something else starts it, and its environment may not say what the configuration does."""
    gpu, cpu = WorkerDevice(type="cuda", name="H100", memory_bytes=80 << 30), WorkerDevice(type="cpu", name="CPU rank")
    assert agreed_device([gpu, gpu], None, "VARIABLE") == agreed_device([gpu, gpu], "cuda", "VARIABLE") == gpu
    for found, wanted in (([gpu, cpu], None), ([gpu, cpu], "cuda"), ([cpu], "cuda"), ([cpu, gpu], "cpu")):
        with pytest.raises(ConfigError, match=r"rank \d computes on .* VARIABLE=\w+"):
            agreed_device(found, wanted, "VARIABLE")
