"""What a server takes of a host's memory, as multiples of the bytes of the base model's weights in bfloat16.

    python benchmarks/memory.py [--model large] [--rank 8] [--rounds 3] [-- --models.0.backend.max_models 4 ...]

It runs this tree's server with the jax backend on a CPU, as shipped, and looks at all of its processes:

- loaded: once everything is compiled, before anybody has asked for anything;
- trained: one tenant takes steps over eight sequences of 128 tokens;
- drawn: eight sequences of 64 tokens are drawn from its weights, with a prompt of 32;
- at work: both at a time;
- idle: everything has been answered.

"Now" is what lies in memory at the end of each part, "most" what ever lay there during it (the sum of what each
process had at the most). Memory that processes share is counted in each, except under "shared once" (PSS); "own" is
what no file backs, so that the system cannot take it back. The last lines are the speed of each.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from comparison.proc import forget_peaks, tree_memory
from comparison.servers import Server, Setup
from comparison.shapes import SHAPES
from comparison.workbench import Workbench, num_tokens, published, sample, step

from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

_COMPILED_S = 600.0
_SEQUENCES, _TOKENS, _PROMPT, _DRAWN = 8, 128, 32, 64


class Report:
    """Prints each figure as a multiple of the weights."""

    def __init__(self, pid: int, weights: int) -> None:
        self._pid, self._weights = pid, weights
        print(f"weights: {weights / 1e9:.3f} GB")
        print(f"{'':<10}{'now':>14}{'most':>14}{'shared once':>14}{'own':>14}")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        forget_peaks(self._pid)
        yield
        found = tree_memory(self._pid)
        sizes = (found.resident, found.peak, found.shared_once, found.anonymous)
        cells = (f"{size / 1e9:.2f} = x{size / self._weights:.2f}" for size in sizes)
        print(f"{name:<10}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def times(rounds: int, job: Callable[[], float]) -> list[float]:
    """Return how much the job did in a second, of each round."""
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        done = job()
        found.append(done / (time.perf_counter() - started))
    return found


def measure(server: Server, options: argparse.Namespace, weights: int) -> None:
    assert server.pid is not None
    report = Report(server.pid, weights)
    shape = SHAPES[options.model]
    bench = Workbench(url=server.url, base_model=server.base_model, vocab_size=shape.vocab_size, rank=options.rank)
    with report.part("loaded"):
        server.settle(_COMPILED_S)
    tenant, data = bench.tenant(), bench.batch(0, [_TOKENS] * _SEQUENCES)
    prompt = bench.tokens(0, _PROMPT)

    def trained() -> float:
        step(tenant, data)
        return _TOKENS * _SEQUENCES

    with report.part("trained"):
        alone = times(options.rounds, trained)
    sampler = published(tenant)

    def drawn() -> float:
        return num_tokens(sample(sampler, prompt, _DRAWN, number=_SEQUENCES, seed=7).result())

    with report.part("drawn"):
        sampled = times(options.rounds, drawn)
    with report.part("at work"):
        training = threading.Thread(target=times, args=(options.rounds, trained))
        training.start()
        while training.is_alive():
            drawn()
        training.join()
    with report.part("idle"):
        time.sleep(options.idle_s)
    for name, rates in (("training", alone), ("drawing", sampled)):
        print(f"{name} alone: {statistics.median(rates):.1f} tokens/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="large", choices=SHAPES)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=1.0)
    parser.add_argument("--work-dir", type=Path, help="keep the model, caches and logs here for later runs")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work_dir = options.work_dir or Path(scratch)
        model = work_dir / options.model
        if not model.exists():
            write_tiny_model(model, SHAPES[options.model])
        setup = Setup(
            model=model,
            vocab_size=SHAPES[options.model].vocab_size,
            work_dir=work_dir,
            max_models=8,
            rank=options.rank,
            sdk=None,
        )
        script = ["tinsmith", *(["--", *options.settings] if options.settings else [])]
        with Server.started(script, setup) as server:
            measure(server, options, sum(file.stat().st_size for file in model.glob("*.safetensors")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
