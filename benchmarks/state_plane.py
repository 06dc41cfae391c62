"""A fully trained model's state on its way to the disk: memory, and time of the training thread, by its size.

    python benchmarks/state_plane.py [--mib 150 300 600] [--buffer-mib 64 1024] [--ranks 2] [--directory DIR]

For each size of a state and each buffer: train, capture, make an optimizer step at once, which is the worst that can
happen to a capture, and write the checkpoint. Counted: what the step had to copy, the most that was in a rank's buffer.
Measured: how much more the memory of a rank grew than in a step alone, and how that of this process (the engine) grew;
the capture call, the step alone and right after the capture, and the time until the checkpoint was in its place. Then
the checkpoint is restored, and the growth of a rank measured again.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tinsmith import BUILTIN_LOSSES, AdamParams, BackendContext, CreateModel, LoraConfig, ModelState, OptimStep
from tinsmith.checkpoints.saved import read_checkpoint, write_checkpoint
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers import TrainingProgram

MODEL = "m"
MIB = 1 << 20
COLUMNS = (
    "state MiB",
    "buffer MiB",
    "copied in the training thread",
    "peak of the buffer",
    "ranks grew",
    "engine grew",
    "capture s",
    "step s",
    "step after a capture s",
    "checkpoint s",
    "restore: ranks grew",
)


class Peaks:
    """The growth of processes' memory since this was made."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._now()

    def _now(self) -> list[int]:
        lines = (Path(f"/proc/{pid}/status").read_text().splitlines() for pid in self._pids)
        return [int(next(line for line in each if line.startswith("VmHWM:")).split()[1]) << 10 for each in lines]

    def grown(self) -> int:
        return max(after - before for after, before in zip(self._now(), self._before, strict=True))


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def backend_of(directory: Path, state_mib: int, buffer_mib: int, ranks: int) -> Iterator[FsdpBackend]:
    """A model with one wide layer, whose weights and moments take so much."""
    width = 256
    shape = TinyShape(hidden_size=width, intermediate_size=state_mib * MIB // 12 // 3 // width, num_layers=1)
    write_tiny_model(directory / "model", shape)
    config = FsdpConfig(device="cpu", nproc_per_node=ranks, capture_buffer_bytes=buffer_mib * MIB)
    losses = {loss.name: loss for loss in BUILTIN_LOSSES}
    backend = FsdpBackend(
        config,
        BackendContext(model_name="wide", model_path=directory / "model", cache_dir=directory / "cache", losses=losses),
    )
    try:
        yield backend
    finally:
        backend.close()


def save(state: ModelState, root: Path) -> None:
    write_checkpoint(
        root,
        "m/weights/x",
        kind="training",
        state=state,
        base_model="wide",
        user_metadata={},
        created_at=datetime.now(UTC),
        overwrite=False,
    )


def measure(directory: Path, state_mib: int, buffer_mib: int, ranks: int) -> str:
    with backend_of(directory, state_mib, buffer_mib, ranks) as backend:

        def step() -> None:
            backend.optim_step([OptimStep(model_id=MODEL, adam=AdamParams(learning_rate=1e-3))])

        backend.create_model(CreateModel(model_id=MODEL, lora=LoraConfig(rank=0, seed=0)))
        step()
        step()
        alone = Peaks(*backend.ranks.pids)
        alone_s = timed(step)
        own = alone.grown()
        of_ranks, of_engine = Peaks(*backend.ranks.pids), Peaks(os.getpid())
        started = time.perf_counter()
        state = backend.capture_state(MODEL)
        capture_s = time.perf_counter() - started
        after_s = timed(step)
        save(state, directory)
        checkpoint_s = time.perf_counter() - started
        peaks, settled = zip(*backend.ranks.call(TrainingProgram.capture_bytes), strict=True)
        grown, engine_grown = of_ranks.grown() - own, of_engine.grown()
        del state
        gc.collect()
        restoring = Peaks(*backend.ranks.pids)
        backend.restore_state(MODEL, read_checkpoint(directory, "m/weights/x").state)
        size = sum(file.stat().st_size for file in (directory / "m/weights/x").glob("*.safetensors"))
        mib = [size, buffer_mib * MIB, sum(settled), max(peaks), grown, engine_grown]
        times = [capture_s, alone_s, after_s, checkpoint_s]
        cells = [f"{each / MIB:.0f}" for each in mib] + [f"{each:.2f}" for each in times]
        return f"| {' | '.join([*cells, f'{restoring.grown() / MIB:.0f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[150, 300, 600], help="sizes of the state")
    parser.add_argument("--buffer-mib", type=int, nargs="+", default=[64, 1024], help="buffers of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--directory", type=Path, help="on the disk to be measured; default: the system's temporary one"
    )
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'--:|' * len(COLUMNS)}")
    for buffer_mib in arguments.buffer_mib:
        for state_mib in arguments.mib:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                print(measure(Path(directory), state_mib, buffer_mib, arguments.ranks), flush=True)


if __name__ == "__main__":
    main()
