"""While a mesh loads, no worker holds more than its share of the weights and a part of one array.

The memory of the workers is looked at all the time, without the pages of the files, which the system may drop. What a
tiny model needs in the same way is taken off.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jax_harness import LOSSES

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.devices import Setup
from tinsmith_jax.mesh_worker import SIMULATED, MeshWorker
from tinsmith_workers import WorkerGroup
from tinsmith_workers.testing.contract import no_progress

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LARGE = TinyShape(
    vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=128
)
TINY = TinyShape(
    vocab_size=320, hidden_size=64, intermediate_size=64, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=8
)
ROOM = 24 << 20  # bytes: what allocators keep, and small arrays
FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("models")
    for name, shape in (("large", LARGE), ("tiny", TINY)):
        write_tiny_model(root / name, shape)
    yield {name: root / name for name in ("large", "tiny")}
    (root / "large" / "model.safetensors").unlink()  # half a gigabyte


def memory(pid: int) -> int:
    """Return the bytes that a process has, but for mapped files."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon:", "RssShmem:")))


class Watch(threading.Thread):
    """Notes the most memory that each of the processes has had, until it is stopped."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._stopped = threading.Event()
        self._before = [memory(pid) for pid in pids]
        self._most = list(self._before)

    def run(self) -> None:
        while not self._stopped.wait(0.001):
            self._most = [max(most, memory(pid)) for most, pid in zip(self._most, self._pids, strict=True)]

    def growth(self) -> list[int]:
        self._stopped.set()
        self.join()
        return [most - before for most, before in zip(self._most, self._before, strict=True)]


def growth(model: Path, cache: Path, mesh: dict[str, int], num_workers: int) -> list[int]:
    """Load the model. Return by how much the memory of each worker grew at most."""
    devices = math.prod(mesh.values())
    config = JaxConfig.model_validate(
        {"mesh": mesh, "nproc_per_node": num_workers, "max_lora_rank": 1, "max_context_tokens": 64, "warm_up": False}
    )
    setup = Setup(config=config, model_directory=model, cache_dir=cache, losses=LOSSES, samples=False)
    environment = {SIMULATED: str(devices // num_workers)}
    group = WorkerGroup("tinsmith_jax.mesh_worker:MeshWorker", config, no_progress, environment=environment)
    watch = Watch(group.pids)
    watch.start()
    try:
        group.call(MeshWorker.load, setup)
        return watch.growth()
    finally:
        group.close()


def matrices(shape: TinyShape) -> dict[str, int]:
    """Return the sizes in bytes of the arrays that are divided, as the backend joins them."""
    hidden, heads = shape.hidden_size, shape.head_dim
    layer = {
        "qkv": hidden * (shape.num_heads + 2 * shape.num_kv_heads) * heads,
        "o": shape.num_heads * heads * hidden,
        "gate_up": 2 * hidden * shape.intermediate_size,
        "down": hidden * shape.intermediate_size,
    }
    joined = {name: size * shape.num_layers for name, size in layer.items()}
    return {name: size * FLOAT_BYTES for name, size in {**joined, "embed": shape.vocab_size * hidden}.items()}


MESHES = [({"fsdp": 2, "tensor": 2}, 1), ({"fsdp": 2}, 2), ({"fsdp": 2, "tensor": 2}, 2), ({"fsdp": 2, "tensor": 2}, 4)]


@pytest.mark.parametrize(("mesh", "num_workers"), MESHES)
def test_no_worker_holds_more_than_its_share_and_a_part_of_one_array(
    mesh: dict[str, int], num_workers: int, models: dict[str, Path], tmp_path: Path
) -> None:
    large, tiny = (growth(models[name], tmp_path / name, mesh, num_workers) for name in ("large", "tiny"))
    arrays = matrices(LARGE)
    share, part = sum(arrays.values()) // num_workers, max(arrays.values()) // num_workers
    peaks = [one - other for one, other in zip(large, tiny, strict=True)]
    print(f"{mesh} in {num_workers}: share {share >> 20} MiB, largest part {part >> 20} MiB, ", end="")
    print("peaks of workers", [peak >> 20 for peak in peaks], "MiB")
    for peak in peaks:
        assert share < peak < share + part + ROOM
