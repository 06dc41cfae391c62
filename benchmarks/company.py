"""What company costs in training: a forward_backward of one and of many tenants with the same number of tokens.

    python benchmarks/company.py megatron [--family qwen3_moe] [--tokens 4096] [--ranks 1] [--settings '{...}']
    python benchmarks/company.py fsdp --family qwen3
    python benchmarks/company.py jax --family qwen3 --tenants 1 4 16 64 --sequence 64 --adapter-ranks 8

Tenants share the tokens, and by default have adapters of ranks between 4 and 16. What counts is the CPU time of all
processes, which other load on the machine hardly changes; the numbers of tenants take turns, and the median of all
rounds is shown. `one by one`: the same operations in calls of their own. Exits with 1 if tenants together take over
25 % longer than one alone.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tinsmith.backend import BackendContext
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import AdamParams, CreateModel, Datum, ForwardBackward, LoraConfig, OptimStep
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig
from tinsmith_megatron.backend import MegatronBackend
from tinsmith_megatron.config import MegatronConfig

Backend = FsdpBackend | JaxBackend | MegatronBackend

BOUND = 1.25


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory) / "model", shape(options))
        backend = make_backend(Path(directory), options)
        try:
            return report(measure(backend, options), options)
        finally:
            backend.close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what company costs.")
    parser.add_argument("backend", choices=["megatron", "fsdp", "jax"])
    parser.add_argument("--family", choices=["qwen3", "llama", "qwen3_moe"], default="qwen3_moe")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of all tenants together")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 16], help="the first number must be 1")
    parser.add_argument("--adapter-ranks", type=int, nargs="+", default=[16, 8, 4, 12], help="the widest first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="processes")
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings of the backend, as JSON")
    options = parser.parse_args()
    if options.tenants[0] != 1:
        parser.error(
            f"--tenants begins with {options.tenants[0]}; the others are compared with 1, which must come first"
        )
    for tenants in options.tenants:
        if options.tokens % (options.sequence * tenants):
            parser.error(
                f"{tenants} tenants cannot share {options.tokens} tokens in whole sequences of {options.sequence}: "
                "change --tokens or --sequence"
            )
    if options.backend == "jax" and options.ranks != 1:
        parser.error("--ranks is for fsdp and megatron: jax computes in one process")
    return options


def shape(options: argparse.Namespace) -> TinyShape:
    inner = options.hidden // 2 if options.family == "qwen3_moe" else 3 * options.hidden
    return TinyShape(
        family=options.family, vocab_size=2048, hidden_size=options.hidden, intermediate_size=inner,
        num_layers=options.layers, num_heads=8, num_kv_heads=4, head_dim=options.hidden // 8, num_experts=16,
        experts_per_token=4, tied=False,
    )  # fmt: skip


def make_backend(directory: Path, options: argparse.Namespace) -> Backend:
    given: dict[str, Any] = {"max_batch_tokens": options.tokens, "max_context_tokens": options.sequence}
    given["max_models"] = sum(options.tenants)
    if options.backend != "jax":
        given |= {"device": "cpu", "isolation": "fast", "nproc_per_node": options.ranks}
    given |= options.settings
    context = BackendContext(
        model_name="tiny",
        model_path=directory / "model",
        cache_dir=directory,
        losses={spec.name: spec for spec in BUILTIN_LOSSES},
    )
    if options.backend == "fsdp":
        return FsdpBackend(FsdpConfig.model_validate(given), context)
    if options.backend == "jax":
        return JaxBackend(JaxConfig.model_validate({"warm_up": False, **given}), context)
    return MegatronBackend(MegatronConfig.model_validate(given), context)


def work(backend: Backend, tenants: int, options: argparse.Namespace) -> list[ForwardBackward]:
    """Create the models; return what each trains on."""
    rng = np.random.default_rng(tenants)
    each, ranks = options.tokens // options.sequence // tenants, options.adapter_ranks
    ops = []
    for number in range(tenants):
        model_id = f"{tenants}-{number}"
        lora = LoraConfig(rank=ranks[number % len(ranks)], seed=number)
        backend.create_model(CreateModel(model_id=model_id, lora=lora))
        texts = rng.integers(3, backend.trainer_capabilities.vocab_size, (each, options.sequence + 1))
        ops.append(ForwardBackward(model_id=model_id, data=tuple(map(datum, texts))))
    return ops


def datum(text: Any) -> Datum:
    inputs = {"target_tokens": text[1:].astype(np.int64), "weights": np.ones(len(text) - 1, np.float32)}
    return Datum(tokens_T=text[:-1].astype(np.int32), loss_inputs=inputs)


def measure(backend: Backend, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return CPU seconds of all processes, by what was done, of each round."""
    pids = [os.getpid()] if isinstance(backend, JaxBackend) else backend.ranks.pids
    processes = [psutil.Process(pid) for pid in pids]
    adam = AdamParams(learning_rate=1e-4)
    every = {tenants: work(backend, tenants, options) for tenants in options.tenants}
    calls: Mapping[str, Sequence[Any]] = {f"{tenants} together": [ops] for tenants, ops in every.items()}
    apart = {f"{tenants} one by one": [[op] for op in every[tenants]] for tenants in options.tenants[1:]}
    found: dict[str, list[float]] = {}

    def timed(name: str, batches: Sequence[Sequence[Any]], run: Any) -> None:
        before = cpu_seconds(processes)
        for batch in batches:
            run(batch)
        found.setdefault(name, []).append(cpu_seconds(processes) - before)

    for _ in range(options.rounds + 1):
        for name, batches in {**calls, **apart}.items():
            timed(name, batches, backend.forward_backward)
            steps = [OptimStep(model_id=op.model_id, adam=adam) for batch in batches for op in batch]
            timed(f"optim_step after {name}", [steps], backend.optim_step)
    return {name: seconds[1:] for name, seconds in found.items()}  # the first round is slower


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def report(found: Mapping[str, Sequence[float]], options: argparse.Namespace) -> int:
    alone = float(np.median(found["1 together"]))
    what = f"{options.backend}, {options.family}" + ("" if options.backend == "jax" else f", {options.ranks} ranks")
    print(f"{what}: {options.tokens} tokens of each call, {options.rounds} rounds")
    for name, seconds in found.items():
        median = float(np.median(seconds))
        print(f"{name:28}  {median:7.3f} s of CPU  {median / alone:5.2f} of one tenant's forward_backward")
    worst = max(float(np.median(found[f"{tenants} together"])) for tenants in options.tenants) / alone
    print(f"company makes a call take {worst:.2f} of one tenant's; allowed is {BOUND}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
