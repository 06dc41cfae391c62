"""Where ranks compute: a GPU that torch cannot use is refused with torch's reason, and never replaced by the CPU.

What only a GPU does is done with stand-ins.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from attention_on_cpu import OnCard
from fsdp_harness import make_backend

from tinsmith import ConfigError, Device, Placement
from tinsmith_fsdp.rank import Rank
from tinsmith_workers import Launch, Launcher, WorkerDevice, alone
from tinsmith_workers.torch import (
    HostCopies,
    Rows,
    SleepingTensors,
    Span,
    free_what_is_unused,
    head,
    join_process_group,
    local_devices,
    score,
    to_device,
)
from tinsmith_workers.torch.process_group import find_device, worker_device
from tinsmith_workers.training_backend import agreed_device


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch for CUDA as it behaves with a driver that it cannot use."""

    def init() -> None:
        message = "The NVIDIA driver on your system is too old (found version 12020)."
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.usefixtures("old_driver")
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


@pytest.mark.usefixtures("old_driver")
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
    assert agreed_device([gpu, gpu], None) == agreed_device([gpu, gpu], "cuda") == gpu
    for found, wanted in (([gpu, cpu], None), ([gpu, cpu], "cuda"), ([cpu], "cuda"), ([cpu, gpu], "cpu")):
        with pytest.raises(ConfigError, match=r"rank \d computes on .* TINSMITH_WORKER_DEVICE=\w+"):
            agreed_device(found, wanted)


CARD = torch.device("cuda", 1)


def test_a_rank_takes_the_gpu_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100", total_memory=80 << 30)
    )
    assert find_device(None, 3) == find_device("cuda", 1) == CARD
    assert find_device("cpu", 1) == torch.device("cpu")
    assert taken == [CARD, CARD]
    assert local_devices() == [Device(name="H100", memory_bytes=80 << 30)] * 2
    assert worker_device(CARD) == WorkerDevice(type="cuda", name="H100", memory_bytes=80 << 30)


def test_ranks_on_gpus_meet_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: joined.append(backend))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    for device in (CARD, torch.device("cpu")):
        with alone() as worker:
            join_process_group(worker, device)
    assert joined == ["cpu:gloo,cuda:nccl", "gloo"]


@pytest.fixture
def memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU's memory stand in for a card's, and write down what is asked of the card."""
    done: list[str] = []
    empty, to = torch.empty, torch.Tensor.to

    def made(*size: int, pin_memory: bool = False, device: object = None, **named: Any) -> torch.Tensor:
        del device
        done.extend(["pin"] * pin_memory)
        return empty(*size, **named)

    def moved(tensor: torch.Tensor, where: Any, *rest: Any, **named: Any) -> torch.Tensor:
        if where == CARD:
            done.append("send beside its work" if named.get("non_blocking") else "send")
            return tensor
        return to(tensor, where, *rest, **named)

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        done.append("pin")
        return tensor

    stream = SimpleNamespace(wait_stream=lambda _: done.append("wait for the passes"))
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext(done.append("in a stream of its own")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))
    return done


def test_what_goes_to_a_gpu_and_back_does_not_stop_it(memory_of_a_card: list[str]) -> None:
    numbers = np.arange(3, dtype=np.float32)
    tensor = to_device(numbers, CARD)
    assert memory_of_a_card == ["pin", "send beside its work"]
    copies = HostCopies(CARD)
    copies.begin()
    np.testing.assert_array_equal(copies.copy(tensor), numbers)
    free_what_is_unused()
    assert memory_of_a_card[2:] == ["wait for the passes", "in a stream of its own", "free"]


def test_a_sleeper_on_a_gpu_waits_for_its_copies(memory_of_a_card: list[str]) -> None:
    frozen, changing = torch.arange(5.0), torch.arange(3.0)
    sleeper = SleepingTensors(CARD)
    sleeper.sleep([changing], frozen=[frozen])
    assert memory_of_a_card == ["pin", "pin", "synchronize"]
    assert frozen.untyped_storage().nbytes() == changing.untyped_storage().nbytes() == 0
    sleeper.wake()
    assert memory_of_a_card[3:] == ["synchronize"]
    assert (frozen.tolist(), changing.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])


def test_a_sleeper_on_a_gpu_pins_no_more_than_it_copies(memory_of_a_card: list[str]) -> None:
    """Torch rounds each piece of pinned memory up to a power of two."""
    numbers = torch.arange((5 << 20) // 4 + 3)
    before, made, taken = numbers.clone(), torch.empty, list[int]()

    def pinned(*size: int, **named: Any) -> torch.Tensor:
        if named.get("pin_memory"):
            taken.append(1 << (size[0] - 1).bit_length())
        return made(*size, **named)

    sleeper = SleepingTensors(CARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", pinned)
        sleeper.sleep([numbers])
    num_bytes = before.untyped_storage().nbytes()
    assert num_bytes <= sum(taken) < num_bytes + (1 << 20)
    sleeper.wake()
    assert torch.equal(numbers, before)


@pytest.mark.parametrize(("device", "strict"), [(CARD, False), (CARD, True), (torch.device("cpu"), False)])
def test_a_rank_on_a_gpu_takes_its_share_and_is_deterministic_if_that_is_claimed(
    device: torch.device, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr("tinsmith_workers.torch.rank.find_device", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: done.append(given))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda **_: done.append("deterministic"))
    monkeypatch.setattr("tinsmith_fsdp.rank.join_mesh", partial(stop, done))
    setup: Any = SimpleNamespace(strict=strict, memory_share=0.5, config=None)
    with alone() as worker, pytest.raises(InterruptedError):
        Rank(worker).load(setup)
    claimed = ["deterministic"] if strict or device != CARD else []
    assert done == [*claimed, *([(0.5, CARD)] if device == CARD else []), "meet"]


def stop(done: list[object], *_: object) -> None:
    done.append("meet")
    raise InterruptedError


class RanksOnCards:
    """Answers as two ranks would that have a card each."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __len__(self) -> int:
        return 2

    def call(self, method: Any, *_: object) -> list[object]:
        device = WorkerDevice(type="cuda", name="H100", memory_bytes=80 << 30)
        return [device if method.__name__ == "device" else True] * 2

    def close(self) -> None: ...


def test_on_gpus_no_bits_are_claimed(
    fsdp_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_workers.training_backend.WorkerGroup", RanksOnCards)
    placement = Placement(devices=("0", "1"), memory_bytes=40 << 30, device_bytes=80 << 30)
    backend = make_backend(fsdp_models["qwen3"], tmp_path, placement=placement, device="cuda")
    found, setup = backend.trainer_capabilities, backend.setup
    assert (found.device, found.dtype, found.deterministic, found.isolation) == ("2 x H100", "bfloat16", False, "close")
    assert (setup.strict, setup.checkpointing, setup.compile) == (False, True, True)
    assert setup.memory_share is not None
    assert 0.4 < setup.memory_share < 0.5


def test_the_head_takes_more_rows_at_a_time_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def chunk(hidden: torch.Tensor, _: Any, __: Any, ___: Any, rows: slice, *____: Any) -> list[torch.Tensor]:
        sizes.append(rows.stop - rows.start)
        return [hidden] * 2

    monkeypatch.setattr(head, "score_chunk", chunk)
    monkeypatch.setattr(head, "CPU_LOGITS", 100 * 64)
    monkeypatch.setattr(head, "GPU_LOGITS", 100 * 128)
    batch = cast("Any", SimpleNamespace(sequences=()))
    rows, hidden = Rows([Span(0, 256, None)], batch, *[cast("Any", None)] * 2), torch.zeros(1, 4)
    for each in (hidden, hidden.as_subclass(OnCard)):
        score(each, torch.zeros(100, 4), rows)
    assert sizes == [64, 64, 64, 64, 128, 128]
