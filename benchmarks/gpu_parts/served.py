"""An RL iteration as a user has it: `tinsmith serve` with trainer and sampler on one card, through the SDK.

A served model is read from its files, so they are written first: of the 8B shape, with fewer layers. The sampler is
vLLM, where it is installed, and otherwise JAX.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from comparison.scenarios import Job, reinforce
from comparison.workbench import Workbench

from gpu_parts.common import Notes, Options, Report, needs

LAYERS = 12
PROMPTS, GROUP, NEW_TOKENS = 16, 16, 256


def run(options: Options) -> Report:
    needs("transformers", "tinker")
    note, sampler = Notes(), "vllm" if importlib.util.find_spec("vllm") else "jax"
    prompts, group, new_tokens = (2, 2, 8) if options.toy else (PROMPTS, GROUP, NEW_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        vocab_size = _write(options, Path(directory) / "model")
        started = time.perf_counter()
        with _served(options, Path(directory), sampler) as (url, base_model):
            note("served", sampler=sampler, layers=layers(options), ready_s=time.perf_counter() - started)
            bench = Workbench(url=url, base_model=base_model, vocab_size=vocab_size, rank=options.rank)
            iteration = reinforce(tenants=1, prompts=prompts, size=group, max_tokens=new_tokens)(bench)
            sampled = {"sequences": prompts * group, "new_tokens_each": new_tokens}
            note("first iteration", s=_seconds(iteration), **sampled)
            note("iteration", s=median(_seconds(iteration) for _ in range(options.repeats)), **sampled)
    return note.report


def _write(options: Options, directory: Path) -> int:
    """Write a model with random weights; return the size of its vocabulary."""
    shape = options.write_model(directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": layers(options)}))
    options.write_weights(directory)
    return shape.vocab_size


def layers(options: Options) -> int:
    return 1 if options.toy else LAYERS


@contextmanager
def _served(options: Options, directory: Path, sampler: str) -> Iterator[tuple[str, str]]:
    """Serve until the block ends. Give the address, and what to call the model."""
    command = [sys.executable, "-m", "comparison.start_tinsmith", "--model", str(directory / "model"), "--work-dir"]
    command += [str(directory), "--max-models", "1", "--rank", str(options.rank), "--backend", "fsdp", "--"]
    command += ["--models.0.sampler.plugin", sampler]
    if options.toy and sampler == "vllm":
        command += ["--models.0.sampler.kv_cache_bytes", str(1 << 28), "--models.0.sampler.max_model_len", "256"]
    found = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # may lead to tinsmith
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                msg = f"the server did not start:\n{(directory / 'server.log').read_text()[-4000:]}"
                raise RuntimeError(msg)
            told = json.loads(line)
            yield told["url"], told["base_model"]
        finally:
            server.stdin.close()


def _seconds(work: Job) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
