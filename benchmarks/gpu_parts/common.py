"""What the parts share: their options, the model's shape, and the limits of the card."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tinsmith.operations import Array, Datum, ForwardBackward
from tinsmith_checkpoints.huggingface import HEAD, DecoderShape, decoder_shape, known_config
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

if TYPE_CHECKING:  # parts that use JAX run where torch is not installed, and where it must not take memory of the card
    import torch

TINY = TinyShape(vocab_size=512, num_layers=2)
MODEL = "Qwen3-8B"

Report = dict[str, object]
WARM_S: Final = 0.5
"""So long a card works before its limits are measured: its clock rises with the load."""
QUEUED: Final = 20
"""Pieces of work that it is given before anybody waits for one."""
SHARE: Final = "share_of_matmul_limit"
NOTE = "figures "
"""Begins a line in which a part says what it has found so far."""


@dataclass(slots=True)
class Notes:
    """A report that also prints each figure as soon as it is there: gpu.py keeps them if the part does not end."""

    report: Report = field(default_factory=dict)

    def __call__(self, name: str, **figures: object) -> None:
        self.report[name] = figures
        print(f"{NOTE}{json.dumps({name: figures}, default=float)}", flush=True)


class NotInstalledError(Exception):
    """A part needs a package that this environment lacks. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured. With `toy`, tiny shapes on the CPU: this shows that the program runs, not how fast."""

    toy: bool
    rank: int
    repeats: int

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU: checks that this program runs")
        parser.add_argument("--rank", type=int, default=32, help="of all adapters")
        parser.add_argument("--repeats", type=int, default=5, help="of each measurement; the median counts")

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Options:
        return cls(toy=parsed.toy, rank=parsed.rank, repeats=parsed.repeats)

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.toy else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.toy else torch.bfloat16

    @property
    def tokens(self) -> int:
        """Return how many a forward_backward has."""
        return 512 if self.toy else 16_384

    def write_model(self, directory: Path) -> DecoderShape:
        """Write config.json and a tokenizer. The weights beside them have another shape: see `write_weights`."""
        write_tiny_model(directory, TINY)
        path = directory / "config.json"
        config = json.loads(path.read_text())
        if not self.toy:
            sizes = known_config(MODEL)
            assert sizes is not None, MODEL
            config.update(sizes)
            path.write_text(json.dumps(config))
        return decoder_shape(config, path, supported=["Qwen3ForCausalLM"])

    def write_weights(self, directory: Path) -> None:
        """Replace the weights by random ones of the shape in config.json, made on the device."""
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(directory)
        (directory / "model.safetensors").unlink()
        with self.device:
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)  # type: ignore[no-untyped-call]
        made.save_pretrained(directory)
        del made
        if not self.toy:
            torch.cuda.empty_cache()  # the processes that load it need the room


def needs(*packages: str) -> None:
    """Raise NotInstalledError for the first of them that is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise NotInstalledError(package)


def linear_parameters(shape: DecoderShape) -> int:
    """Return the number of weights that a token is multiplied with: all layers and the head, not the embedding."""
    layer = shape.linear_shapes()
    into, out = layer.pop(HEAD)
    return shape.num_layers * sum(a * b for a, b in layer.values()) + into * out


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Run twice to warm up, then return the median."""
    import torch

    times = []
    for number in range(repeats + 2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def queued_seconds(work: Callable[[], object], wait: Callable[[object], object]) -> float:
    """Return what one of many takes that follow each other without a pause, on a card that is warm."""
    wait(work())  # the first one has libraries loaded, during which the card has nothing to do
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_S:
        wait(work())
    begun = time.perf_counter()
    for _ in range(QUEUED):
        last = work()
    wait(last)
    return (time.perf_counter() - begun) / QUEUED


def measured_again(report: Report, before: float, after: float) -> Report:
    """Return the figures of a part as shares of the larger of two limits, measured before its work and after.

    A card that was idle before may not be as fast at first as it then is.
    """
    larger = max(before, after)

    def shared(figures: Mapping[str, object]) -> Report:
        share = figures.get(SHARE)
        return {**figures, SHARE: share * before / larger} if isinstance(share, float) else dict(figures)

    limits = {"matmul_tflops": larger / 1e12, "matmul_tflops_at_first": before / 1e12}
    groups = {name: shared(value) if isinstance(value, Mapping) else value for name, value in shared(report).items()}
    found = groups.get("limits")
    return {**groups, "limits": {**(found if isinstance(found, dict) else {}), **limits}}


def matmul_limit(options: Options) -> float:
    """Return the FLOP per second of a large product of random matrices."""
    import torch

    size = 512 if options.toy else 8192
    a, b = (torch.randn(size, size, device=options.device, dtype=options.dtype) for _ in range(2))
    return 2 * size**3 / queued_seconds(lambda: a @ b, _wait(options.device))


def bandwidth_limit(options: Options) -> float:
    """Return the bytes per second of a copy: those read, and those written."""
    import torch

    source = torch.empty(1 << (20 if options.toy else 30), dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / queued_seconds(lambda: target.copy_(source), _wait(options.device))


def _wait(device: torch.device) -> Callable[[object], object]:
    import torch

    return lambda _: torch.cuda.synchronize(device) if device.type == "cuda" else None


def peak_gib(device: torch.device) -> float | None:
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def forget_peak(device: torch.device) -> None:
    """Let the next peak be that of what comes now."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def operations(
    models: Sequence[str], vocab_size: int, tokens: int, *, seed: int, tile: int = 1
) -> list[ForwardBackward]:
    """Give each tenant its part of the tokens, in sequences of 100 to 2000 that are padded to whole tiles."""
    rng = np.random.default_rng(seed)
    made = []
    for model_id in models:
        left, data = tokens // len(models), []
        while left > 0:
            length = min(left, int(rng.integers(100, 2001)))
            sequence = rng.integers(0, vocab_size, length + 1)
            inputs: dict[str, Array] = {
                "target_tokens": sequence[1:].astype(np.int64),
                "weights": np.ones(length, np.float32),
            }
            data.append(Datum(tokens_T=sequence[:-1].astype(np.int32), loss_inputs=inputs))
            left -= -(-length // tile) * tile
        made.append(ForwardBackward(model_id=model_id, data=tuple(data)))
    return made
